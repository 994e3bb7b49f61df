/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A device module (device/module.h) that takes the place of a GPU's: the CPU device's table under the name of a GPU. A
 * test replaces some of its operations.
 */
#ifndef EPX_TESTS_LIB_DEVICE_MODULE_H
#define EPX_TESTS_LIB_DEVICE_MODULE_H

#include "device/device.h"
#include "device/module.h"

static const struct device_host *host;
static struct device_ops ops;

static epx_status open_device(int index, struct device **device)
{
    const epx_status status = host->cpu->open(index, device);

    if (status == EPX_OK)
        (*device)->ops = &ops;
    return status;
}

/* Makes the table. 0: the library has another version. */
static int make_ops(const struct device_host *given, const char *name, epx_device kind)
{
    if (given->version != DEVICE_MODULE_VERSION)
        return 0;
    host = given;
    ops = *given->cpu;
    ops.name = name;
    ops.kind = kind;
    ops.open = open_device;
    return 1;
}

/* What the library asks for. */
__attribute__((visibility("default"))) const struct device_ops *epx_device_module(const struct device_host *given);

#endif
