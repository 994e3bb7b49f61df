/* SPDX-License-Identifier: Apache-2.0 */
/* Streams: names, as far as EPX's operations go; what else is given to them runs between these. */
#include "standin/cudart.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct CUstream_st {
    int device;
    struct CUgraph_st *capture; /* what it records into; NULL: it does not */
    struct CUstream_st *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct CUstream_st *streams;

/* Where a stream hangs in the list, with the lock held; NULL: it is none of ours. */
static struct CUstream_st **find(cudaStream_t stream)
{
    struct CUstream_st **link = &streams;

    while (*link && *link != stream)
        link = &(*link)->next;
    return *link ? link : NULL;
}

static int current_device(void)
{
    int device = 0;

    (void)cudaGetDevice(&device);
    return device;
}

/* ---- libnccl_ep.so, where it is ---------------------------------------------------------------------------------- */

static const struct epxCudartHooks *epx;

static const struct epxCudartHooks *epx_hooks(void)
{
    return __atomic_load_n(&epx, __ATOMIC_ACQUIRE); /* pairs with the store in epxCudartAttach */
}

cudaError_t stream_drain(cudaStream_t stream)
{
    const struct epxCudartHooks *hooks = epx_hooks();

    return hooks && hooks->synchronize(stream, current_device()) ? cudaErrorUnknown : cudaSuccess;
}

/* ---- Work -------------------------------------------------------------------------------------------------------- */

static void run(const struct work *work)
{
    switch (work->kind) {
    case WORK_COPY:
        if (work->copy.bytes)
            memmove(work->copy.to, work->copy.from, work->copy.bytes);
        break;
    case WORK_FILL:
        if (work->fill.bytes)
            memset(work->fill.ptr, work->fill.value, work->fill.bytes);
        break;
    case WORK_RECORD:
        event_reach(work->event.event, work->event.ticket);
        break;
    case WORK_WAIT:
        event_await(work->event.event, work->event.ticket);
        break;
    case WORK_CALL:
        work->call.fn(work->call.arg);
        break;
    case WORK_EPX:
        break;
    }
    if (work->kind == WORK_RECORD || work->kind == WORK_WAIT)
        event_release(work->event.event);
}

static void run_and_free(void *arg)
{
    run(arg);
    free(arg);
}

/* Events are counted when work is given to a stream, not when it is recorded. */
static cudaError_t queue(cudaStream_t stream, const struct work *given)
{
    struct work *work;
    int rc = 1;

    if (!stream && cudaDeviceSynchronize() != cudaSuccess)
        return cudaErrorUnknown;
    work = malloc(sizeof(*work));
    if (!work)
        return cudaErrorMemoryAllocation;
    *work = *given;
    if (work->kind == WORK_RECORD || work->kind == WORK_WAIT) {
        event_hold(work->event.event);
        work->event.ticket =
            work->kind == WORK_RECORD ? event_issue(work->event.event) : event_latest(work->event.event);
    }
    if (stream && epx_hooks())
        rc = epx_hooks()->call(stream, run_and_free, work);
    if (rc)
        run_and_free(work);
    return rc < 0 ? cudaErrorUnknown : cudaSuccess;
}

/* What EPX has recorded since goes first. */
static cudaError_t record(cudaStream_t stream, struct CUgraph_st *graph, const struct work *work)
{
    struct work recorded = {.kind = WORK_EPX};
    const int taken = epx_hooks() ? epx_hooks()->take(stream, &recorded.epx) : 0;
    cudaError_t error = taken < 0 ? cudaErrorUnknown : cudaSuccess;

    if (taken > 0)
        error = graph_add(graph, &recorded);
    return error == cudaSuccess && work ? graph_add(graph, work) : error;
}

static struct CUgraph_st *capture_of(cudaStream_t stream)
{
    struct CUstream_st **link;
    struct CUgraph_st *graph;

    pthread_mutex_lock(&lock);
    link = stream ? find(stream) : NULL;
    graph = link ? (*link)->capture : NULL;
    pthread_mutex_unlock(&lock);
    return graph;
}

cudaError_t work_submit(cudaStream_t stream, const struct work *work)
{
    struct CUgraph_st *graph = capture_of(stream);

    if (graph && work->kind == WORK_WAIT)
        return keep_error(cudaErrorStreamCaptureUnsupported);
    return keep_error(graph ? record(stream, graph, work) : queue(stream, work));
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn, void *userData)
{
    const struct work work = {.kind = WORK_CALL, .call = {fn, userData}};

    return fn ? work_submit(stream, &work) : keep_error(cudaErrorInvalidValue);
}

/* ---- Streams ----------------------------------------------------------------------------------------------------- */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags)
{
    struct CUstream_st *s;

    (void)flags;
    if (!stream)
        return keep_error(cudaErrorInvalidValue);
    *stream = s = calloc(1, sizeof(*s));
    if (!s)
        return keep_error(cudaErrorMemoryAllocation);
    s->device = current_device();
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
    cudaError_t error = capture_of(stream) ? cudaErrorStreamCaptureUnsupported : stream_drain(stream);
    struct CUstream_st **link;

    if (error == cudaErrorStreamCaptureUnsupported)
        return keep_error(error);
    pthread_mutex_lock(&lock);
    link = find(stream);
    if (link)
        *link = stream->next;
    pthread_mutex_unlock(&lock);
    if (!link)
        return keep_error(cudaErrorInvalidResourceHandle);
    free(stream);
    return keep_error(error);
}

/* The streams of the current device, with the lock held; `out` NULL only counts. Those that capture have nothing to
 * wait for. */
static size_t list_streams(cudaStream_t *out)
{
    const int device = current_device();
    size_t count = 0;

    for (struct CUstream_st *s = streams; s; s = s->next) {
        if (s->capture || s->device != device)
            continue;
        if (out)
            out[count] = s;
        count++;
    }
    return count;
}

/* The lock is not held while it waits: other threads may have to go on for this to end. */
cudaError_t cudaDeviceSynchronize(void)
{
    cudaError_t error;
    cudaStream_t *list;
    size_t count;

    if (!epx_hooks())
        return cudaSuccess;
    pthread_mutex_lock(&lock);
    count = list_streams(NULL);
    list = malloc((count + 1) * sizeof(cudaStream_t));
    if (list)
        list_streams(list);
    pthread_mutex_unlock(&lock);
    error = list ? stream_drain(NULL) : cudaErrorMemoryAllocation;
    for (size_t i = 0; i < count && error == cudaSuccess; i++)
        error = stream_drain(list[i]);
    free(list);
    return keep_error(error);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    if (!stream)
        return cudaDeviceSynchronize();
    return keep_error(capture_of(stream) ? cudaErrorStreamCaptureUnsupported : stream_drain(stream));
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    if (capture_of(stream))
        return keep_error(cudaErrorStreamCaptureUnsupported);
    return !epx_hooks() || epx_hooks()->call(stream, NULL, NULL) ? cudaSuccess : cudaErrorNotReady;
}

/* ---- Capture ----------------------------------------------------------------------------------------------------- */

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
    if (!status)
        return keep_error(cudaErrorInvalidValue);
    *status = capture_of(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    struct CUgraph_st *graph;
    struct CUstream_st **link;
    cudaError_t error = cudaSuccess;

    if (!stream || (unsigned int)mode > cudaStreamCaptureModeRelaxed)
        return keep_error(stream ? cudaErrorInvalidValue : cudaErrorStreamCaptureUnsupported);
    graph = graph_new();
    if (!graph)
        return keep_error(cudaErrorMemoryAllocation);
    pthread_mutex_lock(&lock);
    link = find(stream);
    if (!link)
        error = cudaErrorInvalidResourceHandle;
    else if ((*link)->capture)
        error = cudaErrorStreamCaptureUnsupported;
    else
        (*link)->capture = graph;
    pthread_mutex_unlock(&lock);
    if (error != cudaSuccess)
        graph_release(graph);
    return keep_error(error);
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    struct CUgraph_st *captured = capture_of(stream);
    cudaError_t error;

    if (!graph)
        return keep_error(cudaErrorInvalidValue);
    *graph = NULL;
    if (!captured)
        return keep_error(cudaErrorStreamCaptureUnmatched);
    error = record(stream, captured, NULL);
    pthread_mutex_lock(&lock);
    stream->capture = NULL;
    pthread_mutex_unlock(&lock);
    if (error == cudaSuccess)
        *graph = captured;
    else
        graph_release(captured);
    return keep_error(error);
}

static int is_capturing(cudaStream_t stream)
{
    return capture_of(stream) != NULL;
}

const struct epxCudart *epxCudartAttach(const struct epxCudartHooks *hooks)
{
    static const struct epxCudart own = {is_capturing, current_device};

    __atomic_store_n(&epx, hooks, __ATOMIC_RELEASE); /* pairs with epx_hooks */
    return &own;
}
