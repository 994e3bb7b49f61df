/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libepx_cudart.so: CUDA's runtime as far as a program for nccl_ep.h needs it that runs on the CPU device. Memory is
 * the host's. A stream is a name; the work on it is EPX's, and libnccl_ep.so, where it is, waits for it.
 */
#include <cuda_runtime.h>

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { DEVICES = 1024, ALIGNMENT = 256 };

static _Thread_local int current_device;

const char *cudaGetErrorString(cudaError_t error)
{
    switch (error) {
    case cudaSuccess:
        return "no error";
    case cudaErrorInvalidValue:
        return "an argument is wrong";
    case cudaErrorMemoryAllocation:
        return "out of memory";
    case cudaErrorInvalidDevice:
        return "no such device";
    case cudaErrorUnknown:
        break;
    }
    return "unknown error";
}

cudaError_t cudaGetDeviceCount(int *count)
{
    if (!count)
        return cudaErrorInvalidValue;
    *count = DEVICES;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    if (device < 0 || device >= DEVICES)
        return cudaErrorInvalidDevice;
    current_device = device;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device)
{
    if (!device)
        return cudaErrorInvalidValue;
    *device = current_device;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{
    const long processors = sysconf(_SC_NPROCESSORS_ONLN);

    if (!value)
        return cudaErrorInvalidValue;
    if (device < 0 || device >= DEVICES)
        return cudaErrorInvalidDevice;
    switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
        *value = processors > 0 ? (int)processors : 1;
        return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
        *value = 9;
        return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
        *value = 0;
        return cudaSuccess;
    }
    return cudaErrorInvalidValue;
}

/* ---- Memory ------------------------------------------------------------------------------------------------------ */

cudaError_t cudaMalloc(void **ptr, size_t size)
{
    if (!ptr)
        return cudaErrorInvalidValue;
    *ptr = NULL;
    if (!size)
        return cudaSuccess;
    return posix_memalign(ptr, ALIGNMENT, size) ? cudaErrorMemoryAllocation : cudaSuccess;
}

cudaError_t cudaFree(void *ptr)
{
    free(ptr);
    return cudaSuccess;
}

cudaError_t cudaMallocHost(void **ptr, size_t size)
{
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
    cudaError_t error;

    (void)kind;
    if (bytes && (!to || !from))
        return cudaErrorInvalidValue;
    error = cudaStreamSynchronize(stream);
    if (error == cudaSuccess && bytes)
        memmove(to, from, bytes);
    return error;
}

cudaError_t cudaMemset(void *ptr, int value, size_t bytes)
{
    return cudaMemsetAsync(ptr, value, bytes, NULL);
}

cudaError_t cudaMemsetAsync(void *ptr, int value, size_t bytes, cudaStream_t stream)
{
    cudaError_t error;

    if (bytes && !ptr)
        return cudaErrorInvalidValue;
    error = cudaStreamSynchronize(stream);
    if (error == cudaSuccess && bytes)
        memset(ptr, value, bytes);
    return error;
}

/* ---- Streams ----------------------------------------------------------------------------------------------------- */

struct CUstream_st {
    struct CUstream_st *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct CUstream_st *streams;

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags)
{
    struct CUstream_st *s;

    (void)flags;
    if (!stream)
        return cudaErrorInvalidValue;
    *stream = s = malloc(sizeof(*s));
    if (!s)
        return cudaErrorMemoryAllocation;
    pthread_mutex_lock(&lock);
    s->next = streams;
    streams = s;
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
    return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    struct CUstream_st **link = &streams;
    cudaError_t error = cudaStreamSynchronize(stream);

    pthread_mutex_lock(&lock);
    while (*link && *link != stream)
        link = &(*link)->next;
    if (*link)
        *link = stream->next;
    else
        error = cudaErrorInvalidValue;
    pthread_mutex_unlock(&lock);
    if (error != cudaErrorInvalidValue)
        free(stream);
    return error;
}

static cudaError_t wait_for(cudaStream_t stream)
{
    int (*synchronize)(cudaStream_t stream); /* ncclEpxStreamSynchronize */

    *(void **)&synchronize = dlsym(RTLD_DEFAULT, "ncclEpxStreamSynchronize");
    return synchronize && synchronize(stream) ? cudaErrorUnknown : cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void)
{
    cudaError_t error = wait_for(NULL);

    pthread_mutex_lock(&lock);
    for (struct CUstream_st *s = streams; s && error == cudaSuccess; s = s->next)
        error = wait_for(s);
    pthread_mutex_unlock(&lock);
    return error;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    return stream ? wait_for(stream) : cudaDeviceSynchronize();
}
