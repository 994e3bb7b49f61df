/* SPDX-License-Identifier: Apache-2.0 */
/* Time stamps (events with timing) and graphs, for benchmarks and tests. */
#include <stdlib.h>

#include "device/gpu/gpu.h"

struct device_timers {
    int count;
    cudaEvent_t event[];
};

epx_status gpu_timers_create(struct device *device, int count, struct device_timers **timers)
{
    epx_status status = gpu_use(device);

    *timers = status == EPX_OK && count > 0 ? calloc(1, sizeof(**timers) + (size_t)count * sizeof(cudaEvent_t)) : NULL;
    if (status == EPX_OK && !*timers)
        return fail(EPX_ERR_MEMORY, "device " GPU_NAME ": no memory for %d time stamps", count);
    for (int i = 0; status == EPX_OK && i < count; i++) {
        status = gpu_check(cudaEventCreate(&(*timers)->event[i]), "cudaEventCreate");
        (*timers)->count += status == EPX_OK;
    }
    if (status != EPX_OK && *timers) {
        gpu_timers_destroy(device, *timers);
        *timers = NULL;
    }
    return status;
}

void gpu_timers_destroy(struct device *device, struct device_timers *timers)
{
    if (!timers)
        return;
    for (int i = 0; gpu_use(device) == EPX_OK && i < timers->count; i++)
        cudaEventDestroy(timers->event[i]);
    free(timers);
}

/* While the stream captures, an event that the host asks for must be recorded as external. HIP records it as it is. */
static cudaError_t record(cudaEvent_t event, cudaStream_t stream, int captures)
{
#ifndef EPX_HIP
    if (captures)
        return cudaEventRecordWithFlags(event, stream, cudaEventRecordExternal);
#endif
    (void)captures;
    return cudaEventRecord(event, stream);
}

epx_status gpu_timers_record(struct device *device, struct device_timers *timers, int i, struct device_stream *stream)
{
    const int captures = gpu_stream_captures(device, stream) != 0;

    if (i < 0 || i >= timers->count)
        return fail(EPX_ERR_ARGUMENT, "device " GPU_NAME ": expected time stamp 0 to %d, got %d", timers->count - 1, i);
    return gpu_check(record(timers->event[i], (cudaStream_t)stream, captures), "cudaEventRecord");
}

epx_status gpu_timers_elapsed(struct device *device, struct device_timers *timers, int from, int to, double *us)
{
    epx_status status = gpu_use(device);
    float ms = 0;

    *us = 0;
    if (from < 0 || to < 0 || from >= timers->count || to >= timers->count)
        return fail(EPX_ERR_ARGUMENT, "device " GPU_NAME ": expected time stamps 0 to %d, got %d and %d",
                    timers->count - 1, from, to);
    if (status == EPX_OK)
        status = gpu_check(cudaEventElapsedTime(&ms, timers->event[from], timers->event[to]), "cudaEventElapsedTime");
    *us = (double)ms * 1e3;
    return status;
}

epx_status gpu_graph_begin(struct device *device, struct device_stream *stream)
{
    epx_status status = gpu_use(device);

    if (status == EPX_OK)
        status = gpu_check(cudaStreamBeginCapture((cudaStream_t)stream, cudaStreamCaptureModeThreadLocal),
                           "cudaStreamBeginCapture");
    return status;
}

epx_status gpu_graph_end(struct device *device, struct device_stream *stream, struct device_graph **graph)
{
    epx_status status = gpu_use(device);
    cudaGraph_t captured = NULL;
    cudaGraphExec_t made = NULL;

    *graph = NULL;
    if (status == EPX_OK)
        status = gpu_check(cudaStreamEndCapture((cudaStream_t)stream, &captured), "cudaStreamEndCapture");
    if (status == EPX_OK)
        status = gpu_check(cudaGraphInstantiate(&made, captured, 0), "cudaGraphInstantiate");
    if (captured)
        cudaGraphDestroy(captured);
    if (status == EPX_OK)
        status = gpu_check(cudaGraphUpload(made, (cudaStream_t)stream), "cudaGraphUpload");
    if (status == EPX_OK)
        *graph = (struct device_graph *)made;
    else if (made)
        cudaGraphExecDestroy(made);
    return status;
}

epx_status gpu_graph_launch(struct device *device, struct device_graph *graph, struct device_stream *stream)
{
    epx_status status = gpu_use(device);

    if (status == EPX_OK)
        status = gpu_check(cudaGraphLaunch((cudaGraphExec_t)graph, (cudaStream_t)stream), "cudaGraphLaunch");
    return status;
}

void gpu_graph_destroy(struct device *device, struct device_graph *graph)
{
    if (graph && gpu_use(device) == EPX_OK)
        cudaGraphExecDestroy((cudaGraphExec_t)graph);
}
