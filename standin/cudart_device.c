/* SPDX-License-Identifier: Apache-2.0 */
/* What programs ask of a device before they use it, and the functions of the driver that they fetch by name. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "standin/cudart.h"
#include "util/env.h"

_Static_assert(sizeof(struct cudaDeviceProp) == 1008 && offsetof(struct cudaDeviceProp, major) == 360 &&
                   offsetof(struct cudaDeviceProp, multiProcessorCount) == 384,
               "as CUDA 13 has it");

static int processors(void)
{
    const long count = sysconf(_SC_NPROCESSORS_ONLN);

    return count > 0 ? (int)count : 1;
}

/* Times ten. That of a device that has all that EPX has, NVFP4 too; EPX_STANDIN_CAPABILITY=9.0 is one without. */
static int capability(void)
{
    const char *text = env_string("EPX_STANDIN_CAPABILITY");
    int major = 10, minor = 0;

    if (!text || sscanf(text, "%2d.%1d", &major, &minor) < 1 || major < 1 || minor < 0)
        return 100;
    return major * 10 + minor;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{
    if (device < 0 || device >= DEVICES)
        return keep_error(cudaErrorInvalidDevice);
    switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
        return give(value, processors());
    case cudaDevAttrComputeCapabilityMajor:
        return give(value, capability() / 10);
    case cudaDevAttrComputeCapabilityMinor:
        return give(value, capability() % 10);
    }
    return keep_error(cudaErrorInvalidValue);
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device)
{
    size_t available = 0;

    if (!properties)
        return keep_error(cudaErrorInvalidValue);
    if (device < 0 || device >= DEVICES)
        return keep_error(cudaErrorInvalidDevice);
    memset(properties, 0, sizeof(*properties));
    snprintf(properties->name, sizeof(properties->name), "EPX stand-in, device %d", device);
    memcpy(properties->uuid.bytes, &device, sizeof(device));
    properties->major = capability() / 10;
    properties->minor = capability() % 10;
    properties->multiProcessorCount = processors();
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->sharedMemPerBlock = 48 << 10;
    properties->canMapHostMemory = 1;
    properties->integrated = 1; /* its memory is the host's */
    return cudaMemGetInfo(&available, &properties->totalGlobalMem);
}

/* A context is told from others by its address. */
static int get_current_context(void **context)
{
    static char contexts[DEVICES];
    int device = 0;

    if (!context || cudaGetDevice(&device) != cudaSuccess)
        return cudaErrorInvalidValue;
    *context = &contexts[device];
    return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned int version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *result)
{
    int (*const found)(void **context) = symbol && !strcmp(symbol, "cuCtxGetCurrent") ? get_current_context : NULL;

    (void)version;
    (void)flags;
    if (!symbol || !function)
        return keep_error(cudaErrorInvalidValue);
    memcpy(function, &found, sizeof(found));
    if (result)
        *result = found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return keep_error(found || result ? cudaSuccess : cudaErrorSymbolNotFound);
}

cudaError_t cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult *result)
{
    return cudaGetDriverEntryPointByVersion(symbol, function, CUDART_VERSION, flags, result);
}
