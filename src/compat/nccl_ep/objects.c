/* SPDX-License-Identifier: Apache-2.0 */
/* Which groups and handles exist, and the streams of groups on the CPU device. */
#include "compat/nccl_ep/compat.h"

#include <pthread.h>
#include <stdlib.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of everything here */
static struct ncclEpGroup *groups;

void group_list_add(struct ncclEpGroup *group)
{
    pthread_mutex_lock(&lock);
    group->next = groups;
    groups = group;
    pthread_mutex_unlock(&lock);
}

void group_list_remove(struct ncclEpGroup *group)
{
    struct ncclEpGroup **link = &groups;

    pthread_mutex_lock(&lock);
    while (*link && *link != group)
        link = &(*link)->next;
    if (*link)
        *link = group->next;
    pthread_mutex_unlock(&lock);
}

void handle_list_add(struct ncclEpHandle *handle)
{
    pthread_mutex_lock(&lock);
    handle->next = handle->group->handles;
    handle->group->handles = handle;
    pthread_mutex_unlock(&lock);
}

void handle_list_remove(struct ncclEpHandle *handle)
{
    struct ncclEpHandle **link = &handle->group->handles;

    pthread_mutex_lock(&lock);
    while (*link && *link != handle)
        link = &(*link)->next;
    if (*link)
        *link = handle->next;
    pthread_mutex_unlock(&lock);
}

ncclResult_t group_need(const struct ncclEpGroup *group, const char *call)
{
    const struct ncclEpGroup *at;

    pthread_mutex_lock(&lock);
    for (at = groups; at && at != group;)
        at = at->next;
    pthread_mutex_unlock(&lock);
    if (!at)
        return compat_fail(ncclInvalidArgument, "%s: ep_group: expected one of ncclEpCreateGroup, got %p", call,
                           (const void *)group);
    return ncclSuccess;
}

ncclResult_t handle_need(const struct ncclEpHandle *handle, const char *call)
{
    const struct ncclEpHandle *found = NULL;

    pthread_mutex_lock(&lock);
    for (const struct ncclEpGroup *g = groups; g && !found; g = g->next)
        for (found = g->handles; found && found != handle;)
            found = found->next;
    pthread_mutex_unlock(&lock);
    if (!found)
        return compat_fail(ncclInvalidArgument, "%s: handle: expected one of ncclEpInitHandle, got %p", call,
                           (const void *)handle);
    return ncclSuccess;
}

/* ---- Streams ----------------------------------------------------------------------------------------------------- */

static struct stream_pair *find_pair(const struct ncclEpGroup *group, cudaStream_t stream)
{
    struct stream_pair *pair;

    pthread_mutex_lock(&lock);
    for (pair = group->streams; pair && pair->given != stream;)
        pair = pair->next;
    pthread_mutex_unlock(&lock);
    return pair;
}

/* A stream of a GPU is taken as it is; NULL, there the default stream, has a name of its own, for EPX's NULL is
 * another. On the CPU device a stream is whatever the caller calls it, and the group gets one for each name. */
ncclResult_t compat_stream(struct ncclEpGroup *group, cudaStream_t stream, const char *call, epx_stream *out)
{
    struct stream_pair *pair;
    epx_status status;

    *out = NULL;
    if (!group->is_cpu) {
        *out = stream ? (epx_stream)stream : (epx_stream)(uintptr_t)1;
        return ncclSuccess;
    }
    if (!stream)
        return ncclSuccess;
    pair = find_pair(group, stream);
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
        pthread_mutex_lock(&lock);
        pair->next = group->streams;
        group->streams = pair;
        pthread_mutex_unlock(&lock);
    }
    *out = pair->own;
    return ncclSuccess;
}

struct waiting { /* EPX looks up both before it follows them: a group may end meanwhile */
    epx_group *group;
    epx_stream stream;
};

/* Where work of this stream may be, with the lock held; `out` NULL only counts. */
static size_t find_waiting(cudaStream_t stream, struct waiting *out)
{
    size_t count = 0;

    for (const struct ncclEpGroup *group = groups; group; group = group->next) {
        const struct stream_pair *pair = group->streams;

        while (pair && pair->given != stream)
            pair = pair->next;
        if (!group->is_cpu || (stream && !pair))
            continue;
        if (out)
            out[count] = (struct waiting){group->group, stream ? pair->own : NULL};
        count++;
    }
    return count;
}

/* Idle is what is asked for: what the group thinks of what ran is ncclEpGetAsyncError's to say. */
static epx_status wait_idle(const struct waiting *w)
{
    epx_status status = epx_stream_sync(w->group, w->stream);

    return epx_stream_query(w->group, w->stream) == EPX_OK ? EPX_OK : status;
}

ncclResult_t ncclEpxStreamSynchronize(cudaStream_t stream)
{
    static const char call[] = "ncclEpxStreamSynchronize";
    epx_status status = EPX_OK;
    struct waiting *list;
    size_t count;

    pthread_mutex_lock(&lock);
    count = find_waiting(stream, NULL);
    list = malloc((count + 1) * sizeof(*list));
    if (list)
        find_waiting(stream, list);
    pthread_mutex_unlock(&lock);
    if (!list)
        return compat_fail(ncclSystemError, "%s: no memory", call);
    for (size_t i = 0; i < count && status == EPX_OK; i++)
        status = wait_idle(&list[i]);
    free(list);
    return compat_result(status, call);
}
