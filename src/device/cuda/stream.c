/* SPDX-License-Identifier: Apache-2.0 */
/* Streams and events: CUDA's own. What callers see as epx_stream is a cudaStream_t, theirs or ours. */
#include <stdlib.h>

#include "device/cuda/cuda.h"

static cudaStream_t stream_of(struct device_stream *stream)
{
    return (cudaStream_t)stream;
}

static cudaEvent_t event_of(struct device_event *event)
{
    return (cudaEvent_t)event;
}

epx_status cuda_stream_create(struct device *device, struct device_stream **stream)
{
    epx_status status = cuda_use(device);
    cudaStream_t created = NULL;

    if (status == EPX_OK)
        status = cuda_check(cudaStreamCreateWithFlags(&created, cudaStreamNonBlocking), "cudaStreamCreate");
    *stream = (struct device_stream *)created;
    return status;
}

epx_status cuda_stream_destroy(struct device *device, struct device_stream *stream)
{
    epx_status status = stream ? cuda_stream_sync(device, stream) : EPX_OK;

    if (status == EPX_OK && stream)
        status = cuda_check(cudaStreamDestroy(stream_of(stream)), "cudaStreamDestroy");
    return status;
}

epx_status cuda_stream_sync(struct device *device, struct device_stream *stream)
{
    epx_status status = cuda_use(device);

    return status == EPX_OK ? cuda_check(cudaStreamSynchronize(stream_of(stream)), "cudaStreamSynchronize") : status;
}

epx_status cuda_stream_query(struct device *device, struct device_stream *stream)
{
    epx_status status = cuda_use(device);
    cudaError_t error;

    if (status != EPX_OK)
        return status;
    error = cudaStreamQuery(stream_of(stream));
    if (error != cudaErrorNotReady)
        return cuda_check(error, "cudaStreamQuery");
    (void)cudaGetLastError();
    return EPX_ERR_NOT_READY;
}

int cuda_stream_captures(struct device *device, struct device_stream *stream)
{
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;

    return cuda_use(device) == EPX_OK && cudaStreamIsCapturing(stream_of(stream), &capture) == cudaSuccess &&
           capture != cudaStreamCaptureStatusNone;
}

epx_status cuda_stream_call(struct device *device, struct device_stream *stream, void (*fn)(void *), void *arg)
{
    epx_status status = cuda_use(device);

    return status == EPX_OK ? cuda_check(cudaLaunchHostFunc(stream_of(stream), fn, arg), "cudaLaunchHostFunc") : status;
}

epx_status cuda_stream_wait(struct device *device, struct device_stream *stream, struct device_event *event)
{
    epx_status status = cuda_use(device);

    if (status == EPX_OK)
        status = cuda_check(cudaStreamWaitEvent(stream_of(stream), event_of(event), 0), "cudaStreamWaitEvent");
    return status;
}

epx_status cuda_stream_copy(struct device *device, struct device_stream *stream, void *to, const void *from,
                            size_t bytes)
{
    epx_status status = bytes ? cuda_use(device) : EPX_OK;

    if (status == EPX_OK && bytes)
        status = cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_of(stream)), "cudaMemcpyAsync");
    return status;
}

epx_status cuda_event_create(struct device *device, struct device_event **event)
{
    epx_status status = cuda_use(device);
    cudaEvent_t created = NULL;

    if (status == EPX_OK)
        status = cuda_check(cudaEventCreateWithFlags(&created, cudaEventDisableTiming), "cudaEventCreate");
    *event = (struct device_event *)created;
    return status;
}

void cuda_event_destroy(struct device *device, struct device_event *event)
{
    if (event && cuda_use(device) == EPX_OK)
        cudaEventDestroy(event_of(event));
}

epx_status cuda_event_record(struct device *device, struct device_event *event, struct device_stream *stream)
{
    epx_status status = cuda_use(device);

    if (status == EPX_OK)
        status = cuda_check(cudaEventRecord(event_of(event), stream_of(stream)), "cudaEventRecord");
    return status;
}

epx_status cuda_event_sync(struct device *device, struct device_event *event)
{
    epx_status status = cuda_use(device);

    return status == EPX_OK ? cuda_check(cudaEventSynchronize(event_of(event)), "cudaEventSynchronize") : status;
}

epx_status cuda_event_query(struct device *device, struct device_event *event)
{
    epx_status status = cuda_use(device);
    cudaError_t error;

    if (status != EPX_OK)
        return status;
    error = cudaEventQuery(event_of(event));
    if (error != cudaErrorNotReady)
        return cuda_check(error, "cudaEventQuery");
    (void)cudaGetLastError();
    return EPX_ERR_NOT_READY;
}
