/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libepx_cudart.so: CUDA's runtime as far as a program for nccl_ep.h needs it that runs on the CPU device. Memory is
 * the host's. This file: devices, errors, memory.
 */
#include "standin/cudart.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "util/descriptor.h"
#include "util/env.h"

enum { ALIGNMENT = 256 };

static _Thread_local int current_device;

/* ---- Errors ------------------------------------------------------------------------------------------------------ */

static _Thread_local cudaError_t last_error;

static const struct {
    cudaError_t error;
    const char *name, *text;
} errors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "an argument is wrong"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidMemcpyDirection, "cudaErrorInvalidMemcpyDirection", "no such kind of copy"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "no such device"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "no such stream, event or graph"},
    {cudaErrorSymbolNotFound, "cudaErrorSymbolNotFound", "no such symbol"},
    {cudaErrorNotReady, "cudaErrorNotReady", "not done yet"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "EPX's stand-in cannot do this"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported", "not while the stream captures a graph"},
    {cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched", "the stream captures no graph"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

static size_t find_error(cudaError_t error)
{
    size_t i = 0;

    while (i + 1 < sizeof(errors) / sizeof(errors[0]) && errors[i].error != error)
        i++;
    return i;
}

const char *cudaGetErrorString(cudaError_t error)
{
    return errors[find_error(error)].text;
}

const char *cudaGetErrorName(cudaError_t error)
{
    return errors[find_error(error)].name;
}

cudaError_t keep_error(cudaError_t error)
{
    if (error != cudaSuccess && error != cudaErrorNotReady)
        last_error = error;
    return error;
}

cudaError_t cudaPeekAtLastError(void)
{
    return last_error;
}

cudaError_t cudaGetLastError(void)
{
    const cudaError_t error = last_error;

    last_error = cudaSuccess;
    return error;
}

/* ---- Devices ----------------------------------------------------------------------------------------------------- */

cudaError_t give(int *out, int value)
{
    if (!out)
        return keep_error(cudaErrorInvalidValue);
    *out = value;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    return give(version, CUDART_VERSION);
}

cudaError_t cudaDriverGetVersion(int *version)
{
    return give(version, CUDART_VERSION);
}

cudaError_t cudaGetDeviceCount(int *count)
{
    return give(count, DEVICES);
}

cudaError_t cudaSetDevice(int device)
{
    if (device < 0 || device >= DEVICES)
        return keep_error(cudaErrorInvalidDevice);
    current_device = device;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device)
{
    return give(device, current_device);
}

cudaError_t cudaDeviceReset(void)
{
    return cudaDeviceSynchronize();
}

/* ---- Memory ------------------------------------------------------------------------------------------------------ */

/* "MemAvailable", where the kernel says it; else what is free. */
static size_t available_bytes(void)
{
    const long pages = sysconf(_SC_AVPHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    size_t bytes = pages > 0 && page > 0 ? (size_t)pages * (size_t)page : 0;
    FILE *file = fd_open_file("/proc/meminfo");
    unsigned long long kib;
    char line[256];

    while (file && fgets(line, sizeof(line), file)) {
        if (sscanf(line, "MemAvailable: %llu kB", &kib) == 1)
            bytes = (size_t)kib * 1024;
    }
    if (file)
        fclose(file);
    return bytes;
}

cudaError_t cudaMemGetInfo(size_t *available, size_t *total)
{
    const long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);

    if (!available || !total)
        return keep_error(cudaErrorInvalidValue);
    *total = pages > 0 && page > 0 ? (size_t)pages * (size_t)page : 0;
    *available = available_bytes();
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **ptr, size_t size)
{
    if (!ptr)
        return keep_error(cudaErrorInvalidValue);
    *ptr = NULL;
    if (!size)
        return cudaSuccess;
    if (posix_memalign(ptr, ALIGNMENT, size))
        *ptr = NULL;
    if (*ptr && known_add(KNOWN_MEMORY, *ptr)) {
        free(*ptr);
        *ptr = NULL;
    }
    return keep_error(*ptr ? cudaSuccess : cudaErrorMemoryAllocation);
}

/* As CUDA's, it waits for whatever may still use the memory. What cudaMalloc did not give is refused. */
cudaError_t cudaFree(void *ptr)
{
    cudaError_t error;

    if (!ptr)
        return cudaSuccess;
    if (!known_remove(KNOWN_MEMORY, ptr))
        return keep_error(cudaErrorInvalidValue);
    error = cudaDeviceSynchronize();
    free(ptr);
    return error;
}

cudaError_t cudaMallocHost(void **ptr, size_t size)
{
    return cudaMalloc(ptr, size);
}

cudaError_t cudaHostAlloc(void **ptr, size_t size, unsigned int flags)
{
    (void)flags;
    return cudaMalloc(ptr, size);
}

cudaError_t cudaFreeHost(void *ptr)
{
    return cudaFree(ptr);
}

/* The NULL stream, here and below, waits for all others. */
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind)
{
    return cudaMemcpyAsync(to, from, bytes, kind, NULL);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    const struct work work = {.kind = WORK_COPY, .copy = {to, from, bytes}};

    if ((unsigned int)kind > cudaMemcpyDefault)
        return keep_error(cudaErrorInvalidMemcpyDirection);
    if (bytes && (!to || !from))
        return keep_error(cudaErrorInvalidValue);
    return work_submit(stream, &work);
}

cudaError_t cudaMemset(void *ptr, int value, size_t bytes)
{
    return cudaMemsetAsync(ptr, value, bytes, NULL);
}

cudaError_t cudaMemsetAsync(void *ptr, int value, size_t bytes, cudaStream_t stream)
{
    const struct work work = {.kind = WORK_FILL, .fill = {ptr, value, bytes}};

    if (bytes && !ptr)
        return keep_error(cudaErrorInvalidValue);
    return work_submit(stream, &work);
}
