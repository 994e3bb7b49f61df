/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A stand-in for CUDA's runtime on machines without CUDA: memory and streams, as much as a program for nccl_ep.h needs
 * that brings no kernels of its own. "Device" memory is the host's. Link libepx_cudart.so.
 *
 * Work on a stream is EPX's alone: the *Async calls here wait for that stream first, then do their work at once. The
 * NULL stream waits for all streams of the process.
 */
#ifndef EPX_STANDIN_CUDA_RUNTIME_H
#define EPX_STANDIN_CUDA_RUNTIME_H

#include <stddef.h>

#include <cuda.h>

#ifdef __cplusplus
#define EPX_CUDART_OR(value) = value
extern "C" {
#else
#define EPX_CUDART_OR(value)
#endif

typedef enum cudaError {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidDevice = 101,
    cudaErrorUnknown = 999
} cudaError_t;

typedef CUstream cudaStream_t;

enum cudaMemcpyKind {
    cudaMemcpyHostToHost = 0,
    cudaMemcpyHostToDevice = 1,
    cudaMemcpyDeviceToHost = 2,
    cudaMemcpyDeviceToDevice = 3,
    cudaMemcpyDefault = 4
};

enum cudaDeviceAttr {
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76
};

#define cudaStreamDefault 0x00
#define cudaStreamNonBlocking 0x01

#if defined(__GNUC__)
#define EPX_CUDART_API __attribute__((visibility("default")))
#else
#define EPX_CUDART_API
#endif

EPX_CUDART_API const char *cudaGetErrorString(cudaError_t error);
EPX_CUDART_API cudaError_t cudaGetDeviceCount(int *count); /* 1024: a rank may take its own number */
EPX_CUDART_API cudaError_t cudaSetDevice(int device);
EPX_CUDART_API cudaError_t cudaGetDevice(int *device);
/* Programs ask whether a GPU is new enough: this one says 9.0, with a multiprocessor per processor. */
EPX_CUDART_API cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device);
EPX_CUDART_API cudaError_t cudaDeviceSynchronize(void);
EPX_CUDART_API cudaError_t cudaMalloc(void **ptr, size_t size);
EPX_CUDART_API cudaError_t cudaFree(void *ptr);
EPX_CUDART_API cudaError_t cudaMallocHost(void **ptr, size_t size);
EPX_CUDART_API cudaError_t cudaFreeHost(void *ptr);
EPX_CUDART_API cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind);
EPX_CUDART_API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                                           cudaStream_t stream EPX_CUDART_OR(NULL));
EPX_CUDART_API cudaError_t cudaMemset(void *ptr, int value, size_t bytes);
EPX_CUDART_API cudaError_t cudaMemsetAsync(void *ptr, int value, size_t bytes, cudaStream_t stream EPX_CUDART_OR(NULL));
EPX_CUDART_API cudaError_t cudaStreamCreate(cudaStream_t *stream);
EPX_CUDART_API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags);
EPX_CUDART_API cudaError_t cudaStreamDestroy(cudaStream_t stream);
EPX_CUDART_API cudaError_t cudaStreamSynchronize(cudaStream_t stream);

#ifdef __cplusplus
}

/* C++ programs give pointers to pointers of any type. */
template <class T> inline cudaError_t cudaMalloc(T **ptr, size_t size)
{
    return cudaMalloc((void **)(void *)ptr, size);
}
template <class T> inline cudaError_t cudaMallocHost(T **ptr, size_t size)
{
    return cudaMallocHost((void **)(void *)ptr, size);
}
#endif
#endif
