/* SPDX-License-Identifier: Apache-2.0 */
/* Finds the device that a group asked for. */
#include "device/device.h"

#include <strings.h>

#include "device/module.h"
#include "device/probe.h"
#include "util/env.h"
#include "util/runtime.h"
#include "util/sigactions.h"
#include "util/status.h"

/* What AUTO means: EPX_DEVICE by name, else the CPU, which is always there. */
static epx_status auto_kind(epx_device *kind)
{
    static const struct {
        const char *name;
        epx_device kind;
    } names[] = {{"auto", EPX_DEVICE_CPU}, {"cpu", EPX_DEVICE_CPU}, {"cuda", EPX_DEVICE_CUDA}, {"hip", EPX_DEVICE_HIP}};
    const char *value = env_string("EPX_DEVICE");
    size_t i;

    *kind = EPX_DEVICE_CPU;
    if (!value)
        return EPX_OK;
    for (i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        if (strcasecmp(value, names[i].name) == 0) {
            *kind = names[i].kind;
            return EPX_OK;
        }
    }
    return fail(EPX_ERR_ARGUMENT, "EPX_DEVICE: expected auto, cpu, cuda or hip, got \"%s\"", value);
}

epx_status device_explain(const char *name, epx_status status)
{
    struct gpu_probe probe;

    if (status != EPX_ERR_UNSUPPORTED)
        return status;
    gpu_probe(name, &probe);
    if (probe.count)
        return status;
    return fail(status, "device %s: expected a GPU, found none: %s; choose the device cpu, or see `epx doctor`", name,
                probe.why);
}

static epx_status open_module(const char *name, int index, struct device **device)
{
    const struct device_ops *ops;
    struct sigactions actions;
    epx_status status;

    /* The module brings the vendor's runtime, which loads its driver when it is first called. */
    sigactions_save(&actions);
    status = device_module_open(name, &ops);
    if (status == EPX_OK)
        status = ops->open(index, device);
    status = device_explain(name, status);
    sigactions_restore(&actions, name);
    return status;
}

epx_status device_open(epx_device kind, int index, struct device **device)
{
    epx_status status;

    *device = NULL;
    if (runtime()->device)
        return runtime()->device->open(index, device);
    if (kind == EPX_DEVICE_AUTO) {
        status = auto_kind(&kind);
        if (status != EPX_OK)
            return status;
    }
    switch (kind) {
    case EPX_DEVICE_CPU:
        return cpu_device_ops.open(index, device);
    case EPX_DEVICE_CUDA:
        return open_module("cuda", index, device);
    case EPX_DEVICE_HIP:
        return open_module("hip", index, device);
    default:
        return fail(EPX_ERR_ARGUMENT, "device: expected an epx_device, 0 to 3, got %d", (int)kind);
    }
}
