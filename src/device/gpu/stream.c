/* SPDX-License-Identifier: Apache-2.0 */
/* Streams and events: CUDA's own. What callers see as epx_stream is a cudaStream_t, theirs or ours. */
#include <pthread.h>

#include "device/gpu/gpu.h"

static cudaStream_t stream_of(struct device_stream *stream)
{
    return (cudaStream_t)stream;
}

static cudaEvent_t event_of(struct device_event *event)
{
    return (cudaEvent_t)event;
}

/*
 * Where ranks are threads of one process, a kernel in a stream that was just made has been seen not to start for as
 * long as those of other streams ran, which waited for it (H200, driver 580; in one of a hundred cases of
 * tests/gpu/gpu_prop; in none of 600 with streams that had been used before). So streams that come back are given out
 * again, and a new one runs a kernel at once, while nobody waits for anything.
 */
#define IDLE_MOST 64

static struct {
    pthread_mutex_t lock;
    int n;
    struct {
        cudaStream_t stream;
        int device;
    } at[IDLE_MOST];
} idle = {.lock = PTHREAD_MUTEX_INITIALIZER};

static cudaStream_t take_idle(int device)
{
    cudaStream_t stream = NULL;

    pthread_mutex_lock(&idle.lock);
    for (int i = idle.n - 1; i >= 0 && !stream; i--)
        if (idle.at[i].device == device) {
            stream = idle.at[i].stream;
            idle.at[i] = idle.at[--idle.n];
        }
    pthread_mutex_unlock(&idle.lock);
    return stream;
}

/* Zero: there is no room. */
static int keep_idle(int device, cudaStream_t stream)
{
    int kept = 0;

    pthread_mutex_lock(&idle.lock);
    if (idle.n < IDLE_MOST) {
        idle.at[idle.n].stream = stream;
        idle.at[idle.n++].device = device;
        kept = 1;
    }
    pthread_mutex_unlock(&idle.lock);
    return kept;
}

epx_status gpu_stream_create(struct device *device, struct device_stream **stream)
{
    epx_status status = gpu_use(device);
    cudaStream_t created = status == EPX_OK ? take_idle(((struct gpu_device *)device)->index) : NULL;

    if (status == EPX_OK && !created) {
        status = gpu_check(cudaStreamCreateWithFlags(&created, cudaStreamNonBlocking), "cudaStreamCreate");
        if (status == EPX_OK)
            status = gpu_first_launch(created);
    }
    *stream = (struct device_stream *)created;
    return status;
}

epx_status gpu_stream_destroy(struct device *device, struct device_stream *stream)
{
    epx_status status = stream ? gpu_stream_sync(device, stream) : EPX_OK;
    const int mode = gpu_capture_relax();

    if (status == EPX_OK && stream && !keep_idle(((struct gpu_device *)device)->index, stream_of(stream)))
        status = gpu_check(cudaStreamDestroy(stream_of(stream)), "cudaStreamDestroy");
    gpu_capture_restore(mode);
    return status;
}

/* Waits and looks do not end a capture of another stream, into which a garbage collector may bring them. */
epx_status gpu_stream_sync(struct device *device, struct device_stream *stream)
{
    epx_status status = gpu_use(device);
    const int mode = gpu_capture_relax();

    if (status == EPX_OK)
        status = gpu_check(cudaStreamSynchronize(stream_of(stream)), "cudaStreamSynchronize");
    gpu_capture_restore(mode);
    return status;
}

epx_status gpu_stream_query(struct device *device, struct device_stream *stream)
{
    epx_status status = gpu_use(device);
    cudaError_t error;
    int mode;

    if (status != EPX_OK)
        return status;
    mode = gpu_capture_relax();
    error = cudaStreamQuery(stream_of(stream));
    gpu_capture_restore(mode);
    if (error != cudaErrorNotReady)
        return gpu_check(error, "cudaStreamQuery");
    (void)cudaGetLastError();
    return EPX_ERR_NOT_READY;
}

/* The call has had three signatures; the last arguments are what else may be asked. */
static cudaError_t capture_info(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *number)
{
#if defined(CUDART_VERSION) && CUDART_VERSION >= 13000
    return cudaStreamGetCaptureInfo(stream, status, number, NULL, NULL, NULL, NULL);
#elif defined(CUDART_VERSION) && CUDART_VERSION >= 12000
    return cudaStreamGetCaptureInfo(stream, status, number, NULL, NULL, NULL);
#else
    return cudaStreamGetCaptureInfo(stream, status, number);
#endif
}

uint64_t gpu_stream_captures(struct device *device, struct device_stream *stream)
{
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long number = 0;

    if (gpu_use(device) != EPX_OK)
        return 0;
    if (capture_info(stream_of(stream), &status, &number) != cudaSuccess) { /* the legacy stream beside a capture */
        (void)cudaGetLastError(); /* or the caller's next check of a launch would find it */
        return 0;
    }
    if (status == cudaStreamCaptureStatusNone)
        return 0;
    return status == cudaStreamCaptureStatusActive ? number
                                                   : UINT64_MAX; /* of one that has failed no number is known */
}

epx_status gpu_stream_call(struct device *device, struct device_stream *stream, void (*fn)(void *), void *arg)
{
    epx_status status = gpu_use(device);

    return status == EPX_OK ? gpu_check(cudaLaunchHostFunc(stream_of(stream), fn, arg), "cudaLaunchHostFunc") : status;
}

epx_status gpu_stream_wait(struct device *device, struct device_stream *stream, struct device_event *event)
{
    epx_status status = gpu_use(device);

    if (status == EPX_OK)
        status = gpu_check(cudaStreamWaitEvent(stream_of(stream), event_of(event), 0), "cudaStreamWaitEvent");
    return status;
}

epx_status gpu_stream_copy(struct device *device, struct device_stream *stream, void *to, const void *from,
                           size_t bytes)
{
    epx_status status = bytes ? gpu_use(device) : EPX_OK;

    if (status == EPX_OK && bytes)
        status = gpu_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_of(stream)), "cudaMemcpyAsync");
    return status;
}

epx_status gpu_event_create(struct device *device, struct device_event **event)
{
    epx_status status = gpu_use(device);
    cudaEvent_t created = NULL;

    if (status == EPX_OK)
        status = gpu_check(cudaEventCreateWithFlags(&created, cudaEventDisableTiming), "cudaEventCreate");
    *event = (struct device_event *)created;
    return status;
}

void gpu_event_destroy(struct device *device, struct device_event *event)
{
    if (event && gpu_use(device) == EPX_OK)
        cudaEventDestroy(event_of(event));
}

epx_status gpu_event_record(struct device *device, struct device_event *event, struct device_stream *stream)
{
    epx_status status = gpu_use(device);

    if (status == EPX_OK)
        status = gpu_check(cudaEventRecord(event_of(event), stream_of(stream)), "cudaEventRecord");
    return status;
}

epx_status gpu_event_sync(struct device *device, struct device_event *event)
{
    epx_status status = gpu_use(device);
    const int mode = gpu_capture_relax();

    if (status == EPX_OK)
        status = gpu_check(cudaEventSynchronize(event_of(event)), "cudaEventSynchronize");
    gpu_capture_restore(mode);
    return status;
}

epx_status gpu_event_query(struct device *device, struct device_event *event)
{
    epx_status status = gpu_use(device);
    cudaError_t error;
    int mode;

    if (status != EPX_OK)
        return status;
    mode = gpu_capture_relax();
    error = cudaEventQuery(event_of(event));
    gpu_capture_restore(mode);
    if (error != cudaErrorNotReady)
        return gpu_check(error, "cudaEventQuery");
    (void)cudaGetLastError();
    return EPX_ERR_NOT_READY;
}
