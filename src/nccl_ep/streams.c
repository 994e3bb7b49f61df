/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A caller's streams, on the CPU device: names, to which every group has a stream of its own.
 *
 *      stream S --> group A's stream for S   (pair)     work of S is in the order it was given: a group's stream first
 *               --> group B's stream for S   (pair)     waits for what another group has on S; what libepx_cudart.so
 *               `-> used: who was last on S             puts between goes behind the last one (queue_call)
 *
 * The stream NULL is that of one rank: groups of a communicator share it, and each has its own default stream for it.
 *
 * While S captures (cudaStreamBeginCapture of libepx_cudart.so), the group's stream records a graph of its own; these
 * are handed over as one node (take_recorded). On a GPU streams are the vendor's, and all this is too.
 */
#include "nccl_ep/compat.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>

#include "nccl_ep/capture.h"

struct segment { /* what one group has recorded */
    struct ncclEpGroup *group;
    epx_graph *graph;
    struct segment *next;
};

struct used_stream { /* lives as long as the process */
    cudaStream_t given;
    ncclComm_t comm;          /* whose NULL stream it is; NULL: a stream with a name */
    struct ncclEpGroup *last; /* who has used it last; NULL: nobody that still exists */
    epx_stream last_own;
    struct ncclEpGroup *recording; /* whose stream captures now */
    epx_stream recording_own;
    struct segment *recorded, **recorded_end;
    struct used_stream *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of what follows, and of groups' pairs */
static struct used_stream *used_streams;
static const struct epxCudart *cudart; /* the stand-in, where it is in the process; set with the first group */

/* With the lock held. `comm`: of the NULL stream. */
static struct used_stream *used_stream_find(cudaStream_t stream, ncclComm_t comm, int create)
{
    struct used_stream *used = used_streams;

    comm = stream ? NULL : comm;
    while (used && (used->given != stream || used->comm != comm))
        used = used->next;
    if (used || !create)
        return used;
    used = calloc(1, sizeof(*used));
    if (used) {
        used->given = stream;
        used->comm = comm;
        used->recorded_end = &used->recorded;
        used->next = used_streams;
        used_streams = used;
    }
    return used;
}

static struct stream_pair *find_pair(const struct ncclEpGroup *group, cudaStream_t stream)
{
    struct stream_pair *pair = group->streams;

    while (pair && pair->given != stream)
        pair = pair->next;
    return pair;
}

static ncclResult_t own_stream(struct ncclEpGroup *group, cudaStream_t stream, const char *call, epx_stream *out)
{
    struct stream_pair *pair = find_pair(group, stream);
    epx_status status;

    *out = NULL;
    if (!stream)
        return ncclSuccess;
    if (!pair) {
        pair = calloc(1, sizeof(*pair));
        if (!pair)
            return compat_fail(ncclSystemError, "%s: no memory for a stream", call);
        status = epx_stream_create(group->group, &pair->own);
        if (status != EPX_OK) {
            free(pair);
            return compat_result(status, call);
        }
        pair->given = stream;
        pair->next = group->streams;
        group->streams = pair;
    }
    *out = pair->own;
    return ncclSuccess;
}

/* ---- Order between groups ---------------------------------------------------------------------------------------- */

/* Puts `own` behind what another group has on the stream. Not by a call that waits on a thread of EPX: the event is the
 * other group's, whose calls a thread may have that waits for this very stream. A stream that waits for the event does
 * so also when the event has gone. */
static epx_status follow(const struct used_stream *used, struct ncclEpGroup *group, epx_stream own)
{
    epx_event *event;
    epx_status status;

    if (!used->last || used->last == group || epx_stream_query(used->last->group, used->last_own) == EPX_OK)
        return EPX_OK;
    status = epx_event_create(used->last->group, &event);
    if (status != EPX_OK)
        return status;
    status = epx_event_record(event, used->last_own);
    if (status == EPX_OK)
        status = epx_stream_wait_event(group->group, own, event);
    (void)epx_event_destroy(event);
    return status;
}

/* ---- Capture ----------------------------------------------------------------------------------------------------- */

/* Ends what is being recorded and keeps it. */
static epx_status end_segment(struct used_stream *used)
{
    struct segment *segment = calloc(1, sizeof(*segment));
    struct ncclEpGroup *group = used->recording;
    epx_graph *graph = NULL;
    epx_status status;

    if (!group) {
        free(segment);
        return EPX_OK;
    }
    used->recording = NULL;
    status = epx_graph_end(group->group, used->recording_own, &graph);
    if (status != EPX_OK || !segment) {
        if (graph)
            (void)epx_graph_destroy(graph);
        free(segment);
        return status != EPX_OK ? status : EPX_ERR_MEMORY;
    }
    *segment = (struct segment){.group = group, .graph = graph};
    *used->recorded_end = segment;
    used->recorded_end = &segment->next;
    return EPX_OK;
}

static epx_status record_on(struct used_stream *used, struct ncclEpGroup *group, epx_stream own)
{
    epx_status status;

    if (used->recording == group)
        return EPX_OK;
    status = end_segment(used);
    if (status == EPX_OK)
        status = epx_graph_begin(group->group, own);
    if (status == EPX_OK) {
        used->recording = group;
        used->recording_own = own;
    }
    return status;
}

static void destroy_segments(void *context)
{
    while (context) {
        struct segment *segment = context;

        context = segment->next;
        if (segment->graph)
            (void)epx_graph_destroy(segment->graph); /* refused where its group has destroyed it */
        free(segment);
    }
}

static int launch_segments(void *context, cudaStream_t stream)
{
    static const char call[] = "cudaGraphLaunch";

    for (const struct segment *segment = context; segment; segment = segment->next) {
        epx_stream own;
        ncclResult_t result = group_need(segment->group, call);

        if (result == ncclSuccess)
            result = compat_stream(segment->group, stream, call, &own);
        if (result == ncclSuccess)
            result = compat_result(epx_graph_launch(segment->graph, own), call);
        if (result != ncclSuccess)
            return (int)result;
    }
    return 0;
}

static int take_recorded(cudaStream_t stream, struct capture_node *node)
{
    struct used_stream *used;
    epx_status status = EPX_OK;
    int taken = 0;

    pthread_mutex_lock(&lock);
    used = used_stream_find(stream, NULL, 0);
    if (used)
        status = end_segment(used);
    if (used && used->recorded) {
        *node = (struct capture_node){used->recorded, launch_segments, destroy_segments};
        used->recorded = NULL;
        used->recorded_end = &used->recorded;
        taken = 1;
    }
    pthread_mutex_unlock(&lock);
    return status == EPX_OK ? taken : -1;
}

/* ---- For the calls ----------------------------------------------------------------------------------------------- */

/* A stream of a GPU is taken as it is; NULL, there the default stream, has a name of its own, for EPX's NULL is
 * another. */
static epx_stream gpu_stream(cudaStream_t stream)
{
    return stream ? (epx_stream)stream : (epx_stream)(uintptr_t)1;
}

ncclResult_t compat_stream(struct ncclEpGroup *group, cudaStream_t stream, const char *call, epx_stream *out)
{
    struct used_stream *used;
    epx_status status;
    ncclResult_t result;
    int recorded;

    *out = NULL;
    if (!group->is_cpu) {
        *out = gpu_stream(stream);
        return ncclSuccess;
    }
    recorded = stream && cudart && cudart->is_capturing(stream);
    pthread_mutex_lock(&lock);
    used = used_stream_find(stream, group->comm.comm, 1);
    result = used ? own_stream(group, stream, call, out) : compat_fail(ncclSystemError, "%s: no memory", call);
    if (result == ncclSuccess) {
        status = recorded ? record_on(used, group, *out) : follow(used, group, *out);
        result = compat_result(status, call);
    }
    if (result == ncclSuccess && !recorded) {
        used->last = group;
        used->last_own = *out;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

void streams_forget(struct ncclEpGroup *group)
{
    pthread_mutex_lock(&lock);
    for (struct used_stream *used = used_streams; used; used = used->next) {
        if (used->last == group)
            used->last = NULL;
        if (used->recording == group)
            used->recording = NULL;
    }
    while (group->streams) {
        struct stream_pair *pair = group->streams;

        group->streams = pair->next;
        free(pair);
    }
    pthread_mutex_unlock(&lock);
}

/* ---- For libepx_cudart.so ---------------------------------------------------------------------------------------- */

static int queue_call(cudaStream_t stream, void (*fn)(void *arg), void *arg)
{
    epx_status status = EPX_OK;
    struct used_stream *used;
    int idle = 1;

    pthread_mutex_lock(&lock);
    used = used_stream_find(stream, NULL, 0);
    if (used && used->last) {
        idle = epx_stream_query(used->last->group, used->last_own) == EPX_OK;
        if (!idle && fn)
            status = epx_stream_call(used->last->group, used->last_own, fn, arg);
    }
    pthread_mutex_unlock(&lock);
    return status != EPX_OK ? -1 : idle;
}

struct waiting { /* the group has a waiter more: it does not end meanwhile */
    struct ncclEpGroup *group;
    epx_stream stream;
};

/* Of every group that has been on the stream; NULL: of every group of the device (-1: of any). `out` NULL only
 * counts. */
static size_t find_waiting(struct ncclEpGroup *groups, cudaStream_t stream, int device, struct waiting *out)
{
    size_t count = 0;

    for (struct ncclEpGroup *group = groups; group; group = group->next) {
        const struct stream_pair *pair = find_pair(group, stream);

        if (!group->is_cpu || (stream ? !pair : device >= 0 && group->device != device))
            continue;
        if (out) {
            group->waiters++;
            out[count] = (struct waiting){group, stream ? pair->own : NULL};
        }
        count++;
    }
    return count;
}

/* Idle is what is asked for: what the group thinks of what ran is ncclEpGetAsyncError's to say. */
static epx_status wait_idle(const struct waiting *w)
{
    const epx_status status = epx_stream_sync(w->group->group, w->stream);

    return epx_stream_query(w->group->group, w->stream) == EPX_OK ? EPX_OK : status;
}

static ncclResult_t synchronize_streams(const char *call, cudaStream_t stream, int device)
{
    epx_status status = EPX_OK;
    struct ncclEpGroup *groups;
    struct waiting *list;
    size_t count;

    groups = group_list_lock();
    pthread_mutex_lock(&lock);
    count = find_waiting(groups, stream, device, NULL);
    list = malloc((count + 1) * sizeof(*list));
    if (list)
        find_waiting(groups, stream, device, list);
    pthread_mutex_unlock(&lock);
    group_list_unlock();
    if (!list)
        return compat_fail(ncclSystemError, "%s: no memory", call);
    for (size_t i = 0; i < count; i++) {
        const epx_status one = status == EPX_OK ? wait_idle(&list[i]) : EPX_OK;

        group_waiter_leave(list[i].group);
        status = status == EPX_OK ? one : status;
    }
    free(list);
    return compat_result(status, call);
}

ncclResult_t ncclEpxStreamSynchronize(cudaStream_t stream)
{
    return synchronize_streams("ncclEpxStreamSynchronize", stream, -1);
}

static int synchronize(cudaStream_t stream, int device)
{
    return (int)synchronize_streams("cudaStreamSynchronize", stream, device);
}

static void find_cudart(void)
{
    static const struct epxCudartHooks hooks = {synchronize, queue_call, take_recorded};
    const struct epxCudart *(*attach)(const struct epxCudartHooks *hooks);
    void *library = RTLD_DEFAULT;

    *(void **)&attach = dlsym(library, "epxCudartAttach");
    if (!attach) { /* opened out of sight, as Python does */
        library = dlopen("libepx_cudart.so.0", RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
        if (library)
            *(void **)&attach = dlsym(library, "epxCudartAttach");
    }
    if (attach)
        cudart = attach(&hooks);
}

int streams_attach(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, find_cudart);
    return cudart ? cudart->current_device() : 0;
}
