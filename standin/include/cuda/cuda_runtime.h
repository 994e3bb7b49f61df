/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A stand-in for CUDA's runtime on machines without CUDA: memory, streams, events and graphs, as much as a program for
 * nccl_ep.h needs that brings no kernels of its own. "Device" memory is the host's. Link libepx_cudart.so.
 *
 * Copies, fills, events and calls are done in stream order: behind EPX's operations where the stream has any in flight,
 * else at once. A stream that captures records them, and EPX's operations, into a graph. The NULL stream waits for all
 * streams of the process; it cannot capture.
 */
#ifndef EPX_STANDIN_CUDA_RUNTIME_H
#define EPX_STANDIN_CUDA_RUNTIME_H

#include <assert.h> /* programs rely on CUDA's headers for these */
#include <limits.h>
#include <stddef.h>
#ifdef __cplusplus
#include <algorithm>
#include <climits>
#endif

#include <cuda.h>

#define CUDART_VERSION 13000

#ifdef __cplusplus
#define EPX_CUDART_OR(value) = value
extern "C" {
#else
#define EPX_CUDART_OR(value)
#endif

/* Words that mean something to nvcc alone. */
#ifndef __host__
#define __host__
#define __device__
#endif

typedef enum cudaError {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidMemcpyDirection = 21,
    cudaErrorInvalidDevice = 101,
    cudaErrorInvalidResourceHandle = 400,
    cudaErrorSymbolNotFound = 500,
    cudaErrorNotReady = 600,
    cudaErrorNotSupported = 801,
    cudaErrorStreamCaptureUnsupported = 900,
    cudaErrorStreamCaptureUnmatched = 903,
    cudaErrorUnknown = 999
} cudaError_t;

typedef CUstream cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;
typedef struct CUgraph_st *cudaGraph_t;
typedef struct CUgraphExec_st *cudaGraphExec_t;
typedef struct CUgraphNode_st *cudaGraphNode_t;
typedef void (*cudaHostFn_t)(void *userData);

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

enum cudaStreamCaptureMode {
    cudaStreamCaptureModeGlobal = 0,
    cudaStreamCaptureModeThreadLocal = 1,
    cudaStreamCaptureModeRelaxed = 2
};

enum cudaStreamCaptureStatus {
    cudaStreamCaptureStatusNone = 0,
    cudaStreamCaptureStatusActive = 1,
    cudaStreamCaptureStatusInvalidated = 2
};

enum cudaDriverEntryPointQueryResult {
    cudaDriverEntryPointSuccess = 0,
    cudaDriverEntryPointSymbolNotFound = 1,
    cudaDriverEntryPointVersionNotSufficent = 2
};

enum cudaRoundMode { cudaRoundNearest = 0, cudaRoundZero = 1, cudaRoundPosInf = 2, cudaRoundMinInf = 3 };

/* As CUDA 13 lays it out, up to what is filled in here; the rest is zero. */
struct cudaDeviceProp {
    char name[256];
    struct {
        char bytes[16];
    } uuid;
    char luid[8];
    unsigned int luidDeviceNodeMask;
    size_t totalGlobalMem, sharedMemPerBlock;
    int regsPerBlock, warpSize;
    size_t memPitch;
    int maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3];
    size_t totalConstMem;
    int major, minor;
    size_t textureAlignment, texturePitchAlignment;
    int multiProcessorCount, integrated, canMapHostMemory;
    int reserved[153];
};

/* Vector types that programs move memory with. One of CUDA's own headers that is included too (cuda_fp6.h, say) has
 * them in vector_types.h, whose guard this is. */
#ifndef __VECTOR_TYPES_H__
#define __VECTOR_TYPES_H__
typedef struct int2 {
    int x, y;
} int2;
typedef struct __attribute__((aligned(8))) float2 {
    float x, y;
} float2;
typedef struct __attribute__((aligned(16))) int4 {
    int x, y, z, w;
} int4;
typedef struct __attribute__((aligned(16))) uint4 {
    unsigned int x, y, z, w;
} uint4;
typedef struct __attribute__((aligned(16))) float4 {
    float x, y, z, w;
} float4;
#endif

struct epxCudart;
struct epxCudartHooks;

#define cudaStreamDefault 0x00
#define cudaStreamNonBlocking 0x01
#define cudaEventDefault 0x00
#define cudaEventBlockingSync 0x01
#define cudaEventDisableTiming 0x02
#define cudaHostAllocDefault 0x00

#if defined(__GNUC__)
#define EPX_CUDART_API __attribute__((visibility("default")))
#else
#define EPX_CUDART_API
#endif

EPX_CUDART_API const char *cudaGetErrorString(cudaError_t error);
EPX_CUDART_API const char *cudaGetErrorName(cudaError_t error);
/* What the last call of this thread that failed returned; GetLastError forgets it. */
EPX_CUDART_API cudaError_t cudaGetLastError(void);
EPX_CUDART_API cudaError_t cudaPeekAtLastError(void);
EPX_CUDART_API cudaError_t cudaRuntimeGetVersion(int *version);
EPX_CUDART_API cudaError_t cudaDriverGetVersion(int *version);
EPX_CUDART_API cudaError_t cudaGetDeviceCount(int *count); /* 1024: a rank may take its own number */
EPX_CUDART_API cudaError_t cudaSetDevice(int device);
EPX_CUDART_API cudaError_t cudaGetDevice(int *device);
/* Programs ask whether a GPU is new enough: this one says 10.0, with a multiprocessor per processor. */
EPX_CUDART_API cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device);
EPX_CUDART_API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device);
/* Of the CUDA driver, programs get the functions of the stand-in: cuCtxGetCurrent, which is of the current device. */
EPX_CUDART_API cudaError_t cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags,
                                                   enum cudaDriverEntryPointQueryResult *result EPX_CUDART_OR(NULL));
EPX_CUDART_API cudaError_t
cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned int version, unsigned long long flags,
                                 enum cudaDriverEntryPointQueryResult *result EPX_CUDART_OR(NULL));
EPX_CUDART_API cudaError_t cudaDeviceSynchronize(void);
EPX_CUDART_API cudaError_t cudaDeviceReset(void); /* waits for all streams; memory and streams stay */
/* The machine's memory: available, and in all. */
EPX_CUDART_API cudaError_t cudaMemGetInfo(size_t *available, size_t *total);

EPX_CUDART_API cudaError_t cudaMalloc(void **ptr, size_t size);
EPX_CUDART_API cudaError_t cudaFree(void *ptr);
EPX_CUDART_API cudaError_t cudaMallocHost(void **ptr, size_t size);
EPX_CUDART_API cudaError_t cudaHostAlloc(void **ptr, size_t size, unsigned int flags);
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
EPX_CUDART_API cudaError_t cudaStreamQuery(cudaStream_t stream);
EPX_CUDART_API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event,
                                               unsigned int flags EPX_CUDART_OR(0));
EPX_CUDART_API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn, void *userData);

EPX_CUDART_API cudaError_t cudaEventCreate(cudaEvent_t *event);
EPX_CUDART_API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags);
EPX_CUDART_API cudaError_t cudaEventDestroy(cudaEvent_t event);
EPX_CUDART_API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream EPX_CUDART_OR(NULL));
EPX_CUDART_API cudaError_t cudaEventSynchronize(cudaEvent_t event);
EPX_CUDART_API cudaError_t cudaEventQuery(cudaEvent_t event);
/* Milliseconds between the moments at which two streams came to their events. */
EPX_CUDART_API cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end);

/* A graph is a list of what one stream was given. A stream that captures cannot wait for an event that is recorded in
 * a graph, and a graph is not launched into another. */
EPX_CUDART_API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode);
EPX_CUDART_API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph);
EPX_CUDART_API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status);
EPX_CUDART_API cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph,
                                                unsigned long long flags EPX_CUDART_OR(0));
EPX_CUDART_API cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);
EPX_CUDART_API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);
EPX_CUDART_API cudaError_t cudaGraphDestroy(cudaGraph_t graph);

/* For libnccl_ep.so (src/nccl_ep/capture.h). */
EPX_CUDART_API const struct epxCudart *epxCudartAttach(const struct epxCudartHooks *hooks);

#ifdef __cplusplus
}

/* C++ programs give pointers to pointers of any type, and know graphs as CUDA 11 had them. */
template <class T> inline cudaError_t cudaMalloc(T **ptr, size_t size)
{
    return cudaMalloc((void **)(void *)ptr, size);
}
template <class T> inline cudaError_t cudaMallocHost(T **ptr, size_t size)
{
    return cudaMallocHost((void **)(void *)ptr, size);
}
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, cudaGraphNode_t *error_node,
                                        char *log, size_t log_bytes)
{
    if (error_node)
        *error_node = NULL;
    if (log && log_bytes)
        log[0] = '\0';
    return cudaGraphInstantiate(exec, graph, 0);
}
#endif
#endif
