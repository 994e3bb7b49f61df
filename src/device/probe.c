/* SPDX-License-Identifier: Apache-2.0 */
#include "device/probe.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

static const char *const cuda_names[] = {"libcuda.so.1", NULL};
static const char *const hip_names[] = {"libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5",
                                        NULL};

/* POSIX lets an object pointer hold a function; ISO C wants the detour. */
int gpu_probe_load(const struct gpu_probe *probe, const char *function, void *slot)
{
    void *symbol = dlsym(probe->library, function);

    memcpy(slot, &symbol, sizeof(symbol));
    return symbol != NULL;
}

static int count_cuda(const struct gpu_probe *probe, int *count)
{
    int (*init)(unsigned flags);
    int (*get_count)(int *value);
    int rc;

    if (!gpu_probe_load(probe, "cuInit", &init) || !gpu_probe_load(probe, "cuDeviceGetCount", &get_count))
        return -1;
    rc = init(0);
    return rc ? rc : get_count(count);
}

static int count_hip(const struct gpu_probe *probe, int *count)
{
    int (*get_count)(int *value);

    return gpu_probe_load(probe, "hipGetDeviceCount", &get_count) ? get_count(count) : -1;
}

void gpu_probe(const char *device, struct gpu_probe *probe)
{
    const int cuda = strcmp(device, "cuda") == 0;
    int rc;

    *probe = (struct gpu_probe){0};
    for (const char *const *name = cuda ? cuda_names : hip_names; *name && !probe->library; name++) {
        probe->name = *name;
        probe->library = dlopen(*name, RTLD_NOW | RTLD_LOCAL);
    }
    if (!probe->library) {
        snprintf(probe->why, sizeof(probe->why), cuda ? "no driver (libcuda.so.1)" : "no library (libamdhip64.so)");
        return;
    }
    rc = cuda ? count_cuda(probe, &probe->count) : count_hip(probe, &probe->count);
    if (rc)
        probe->count = 0;
    if (rc < 0)
        snprintf(probe->why, sizeof(probe->why), "%s lacks the functions that count devices", probe->name);
    else if (!probe->count)
        snprintf(probe->why, sizeof(probe->why), "%s is there, but finds no device (error %d)", probe->name, rc);
}
