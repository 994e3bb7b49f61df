/* SPDX-License-Identifier: Apache-2.0 */
#include "device/gpu/hip/runtime.h"

#include <stdlib.h>

/* Of later versions of HIP: memory that no cache keeps. */
#ifndef hipDeviceMallocUncached
#define hipDeviceMallocUncached 0x3
#endif

/*
 * What hipMalloc gives is coherent between GPUs only where kernels begin and end. An MI300's second-level caches, one
 * per die, are kept out of memory that is asked for as uncached; older GPUs and runtimes know fine-grained memory.
 */
hipError_t hip_malloc_shared(void **ptr, size_t bytes)
{
    hipError_t error = hipExtMallocWithFlags(ptr, bytes, hipDeviceMallocUncached);

    if (error != hipErrorInvalidValue && error != hipErrorNotSupported)
        return error;
    (void)hipGetLastError();
    return hipExtMallocWithFlags(ptr, bytes, hipDeviceMallocFinegrained);
}

/* ---- A function of the host in stream order --------------------------------------------------------------------- */

/* HIP 5.2 declares it and does not have it. */
#pragma weak hipLaunchHostFunc

struct host_call {
    hipHostFn_t fn;
    void *arg;
};

static void call_host(hipStream_t stream, hipError_t status, void *context)
{
    struct host_call call = *(struct host_call *)context;

    (void)stream;
    (void)status; /* as with hipLaunchHostFunc, whoever asks the stream learns of it */
    free(context);
    call.fn(call.arg);
}

hipError_t hip_launch_host_func(hipStream_t stream, hipHostFn_t fn, void *arg)
{
    struct host_call *call;
    hipError_t error;

    if (hipLaunchHostFunc)
        return hipLaunchHostFunc(stream, fn, arg);
    call = malloc(sizeof(*call));
    if (!call)
        return hipErrorOutOfMemory;
    call->fn = fn;
    call->arg = arg;
    error = hipStreamAddCallback(stream, call_host, call, 0);
    if (error != hipSuccess)
        free(call);
    return error;
}
