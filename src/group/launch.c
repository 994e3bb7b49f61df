/* SPDX-License-Identifier: Apache-2.0 */
/* Launching: one order for all operations of a group, and of groups that share turns, whatever streams they are given.
 */
#include "group/launch.h"

#include <pthread.h>
#include <stdlib.h>

#include "util/status.h"
#include "util/trace.h"

/* Groups whose operations run in one order. The lock is held from the ordering of an operation to its launch: what is
 * put after a stream comes after its last operation. */
struct launch_turns {
    pthread_mutex_t lock;
    struct epx_group *last; /* of the last operation; NULL: none */
    struct captured captured;
    int groups;
};

static pthread_mutex_t sharing = PTHREAD_MUTEX_INITIALIZER; /* held by who changes the turns of a group */

/* NULL: the group has none. */
static struct launch_turns *turn_begin(const struct epx_group *group)
{
    struct launch_turns *turns = __atomic_load_n(&group->turns, __ATOMIC_ACQUIRE);

    if (turns)
        pthread_mutex_lock(&turns->lock);
    return turns;
}

static void turn_end(struct launch_turns *turns)
{
    if (turns)
        pthread_mutex_unlock(&turns->lock);
}

static struct launch_turns *make_turns(void)
{
    struct launch_turns *turns = calloc(1, sizeof(*turns));

    if (turns)
        pthread_mutex_init(&turns->lock, NULL);
    return turns;
}

static void join_turns(struct epx_group *group, struct launch_turns *turns)
{
    if (group->turns == turns)
        return;
    pthread_mutex_lock(&turns->lock);
    turns->groups++;
    if (!turns->last && group->last_stream)
        turns->last = group;
    pthread_mutex_unlock(&turns->lock);
    __atomic_store_n(&group->turns, turns, __ATOMIC_RELEASE);
}

static epx_status share_turns(struct epx_group *group, struct epx_group *other)
{
    struct launch_turns *turns = other->turns ? other->turns : group->turns;

    if (group->turns && other->turns && group->turns != other->turns)
        return fail(EPX_ERR_USAGE, "epx_group_order_with: both groups are ordered with others already; expected one "
                                   "that is not");
    if (!turns)
        turns = make_turns();
    if (!turns)
        return fail(EPX_ERR_MEMORY, "no memory for the order of two groups");
    join_turns(group, turns);
    join_turns(other, turns);
    return EPX_OK;
}

epx_status launch_share_turns(struct epx_group *group, struct epx_group *other)
{
    epx_status status;

    pthread_mutex_lock(&sharing);
    status = share_turns(group, other);
    pthread_mutex_unlock(&sharing);
    return status;
}

static int find_capture(const struct captured *c, uint64_t capture)
{
    int i = 0;

    while (i < CAPTURES && c->in[i] != capture)
        i++;
    return i;
}

/* NULL: no operation is in this capture yet. */
static struct device_stream *last_captured(const struct captured *c, uint64_t capture)
{
    const int i = find_capture(c, capture);

    return i < CAPTURES ? c->last[i] : NULL;
}

static void note_captured(struct captured *c, uint64_t capture, struct device_stream *stream)
{
    int i = find_capture(c, capture);

    if (i == CAPTURES) {
        i = c->next;
        c->next = (i + 1) % CAPTURES;
    }
    c->in[i] = capture;
    c->last[i] = stream;
}

static void forget_captured(struct captured *c, const struct device_stream *stream)
{
    for (int i = 0; i < CAPTURES; i++)
        if (c->last[i] == stream)
            c->last[i] = NULL;
}

/* Returns how many groups are left. */
static int leave_turns(const struct epx_group *group, struct launch_turns *turns)
{
    int left;

    pthread_mutex_lock(&turns->lock);
    if (turns->last == group)
        turns->last = NULL;
    forget_captured(&turns->captured, group->default_stream);
    left = --turns->groups;
    pthread_mutex_unlock(&turns->lock);
    return left;
}

void launch_leave_turns(struct epx_group *group)
{
    struct launch_turns *turns;

    pthread_mutex_lock(&sharing);
    turns = group->turns;
    group->turns = NULL;
    if (turns && leave_turns(group, turns) == 0) {
        pthread_mutex_destroy(&turns->lock);
        free(turns);
    }
    pthread_mutex_unlock(&sharing);
}

void launch_forget_stream(struct epx_group *group, const struct device_stream *stream)
{
    struct launch_turns *turns = turn_begin(group);

    if (group->last_stream == stream)
        group->last_stream = NULL;
    forget_captured(&group->captured, stream);
    if (turns)
        forget_captured(&turns->captured, stream);
    turn_end(turns);
}

/* What `stream` is given from now on runs after what `earlier` has been given. */
static epx_status put_after(struct epx_group *group, struct device_stream *stream, struct device_stream *earlier)
{
    const struct device_ops *ops = group->device->ops;
    epx_status status = EPX_OK;

    if (!earlier || earlier == stream)
        return EPX_OK;
    status = ops->event_record(group->device, group->order_event, earlier);
    return status == EPX_OK ? ops->stream_wait(group->device, stream, group->order_event) : status;
}

/* The caller decides when a graph runs: it does not wait for work that is queued now, and later work does not wait for
 * it. Within it the operations keep the order of their calls, on whatever streams: kernels count operations when they
 * run, and branches of a graph that run side by side would begin in another order on each rank. */
static epx_status order_captured(struct epx_group *group, struct launch_turns *turns, struct device_stream *stream,
                                 uint64_t capture)
{
    struct device_stream *own = last_captured(&group->captured, capture);
    struct device_stream *other = turns ? last_captured(&turns->captured, capture) : NULL;
    epx_status status = put_after(group, stream, own);

    if (status == EPX_OK && other != own)
        status = put_after(group, stream, other);
    note_captured(&group->captured, capture, stream);
    if (turns)
        note_captured(&turns->captured, capture, stream);
    return status;
}

/* An event of a stream that captures by now would pull `stream` into that capture, and nothing else says when the work
 * that it had before has ended. */
static epx_status put_after_last(struct epx_group *group, struct device_stream *stream)
{
    struct device_stream *last = group->last_stream;

    if (last && last != stream && group->device->ops->stream_captures(group->device, last))
        return fail(EPX_ERR_USAGE, "the stream of the group's last operation captures a graph; expected the end of the "
                                   "capture first, or a call on that stream");
    return put_after(group, stream, last);
}

/* The last operation of another group. One whose stream captures by now is no reason to fail: who begins a capture has
 * waited for the stream, as torch does. */
static epx_status put_after_others(struct epx_group *group, struct launch_turns *turns, struct device_stream *stream)
{
    struct device_stream *last = turns && turns->last && turns->last != group ? turns->last->last_stream : NULL;

    if (last && group->device->ops->stream_captures(group->device, last))
        last = NULL;
    return put_after(group, stream, last);
}

/* Call between turn_begin() and turn_end(). */
static epx_status order(struct epx_group *group, struct launch_turns *turns, struct device_stream **stream)
{
    epx_status status;
    uint64_t capture;

    if (!*stream)
        *stream = group->default_stream;
    capture = group->device->ops->stream_captures(group->device, *stream);
    if (capture)
        return order_captured(group, turns, *stream, capture);
    status = put_after_last(group, *stream);
    if (status == EPX_OK)
        status = put_after_others(group, turns, *stream);
    if (status != EPX_OK)
        return status;
    group->last_stream = *stream;
    if (turns)
        turns->last = group;
    return EPX_OK;
}

epx_status launch_order(struct epx_group *group, struct device_stream **stream)
{
    struct launch_turns *turns = turn_begin(group);
    const epx_status status = order(group, turns, stream);

    turn_end(turns);
    return status;
}

epx_status launch_await(struct epx_group *group, struct device_stream *stream, const char *call)
{
    const struct device_ops *ops = group->device->ops;

    if (!stream)
        return EPX_OK;
    if (ops->stream_captures(group->device, stream))
        return fail(EPX_ERR_USAGE,
                    "%s: it waits for a stream that captures a graph; expected the end of the capture first", call);
    return ops->stream_sync(group->device, stream); /* fails inside its own calls */
}

/* cudaStreamPerThread and HIP's: a name for another stream in each thread. */
static int is_of_thread(const struct epx_group *group, const struct device_stream *stream)
{
    return (uintptr_t)stream == 2 && !(group->device->ops->caps & DEVICE_HOST_ACCESS);
}

/* After an operation on the stream of this thread: other threads cannot name it, neither to order what they issue nor
 * to wait. They find the default stream, which is behind it from now on. */
static epx_status hand_over(struct epx_group *group, struct device_stream *stream)
{
    const struct device_ops *ops = group->device->ops;
    epx_status status;

    if (!is_of_thread(group, stream) || ops->stream_captures(group->device, stream) ||
        ops->stream_captures(group->device, group->default_stream))
        return EPX_OK;
    status = put_after(group, group->default_stream, stream);
    if (status == EPX_OK)
        group->last_stream = group->default_stream;
    return status;
}

epx_status launch_agents(struct epx_group *group, struct device_stream *stream, enum kernel_id id, const void *params,
                         size_t bytes, int most)
{
    struct launch_turns *turns = turn_begin(group);
    epx_status status = order(group, turns, &stream);

    group->device->marks = trace_on() ? group->marks.device : NULL;
    if (status == EPX_OK)
        status = group->device->ops->launch(group->device, stream, id, params, bytes,
                                            most < group->set.agents ? most : group->set.agents);
    if (status == EPX_OK)
        status = hand_over(group, stream);
    turn_end(turns);
    return status;
}

epx_status launch_graph(struct epx_graph *graph, struct device_stream *stream)
{
    struct epx_group *group = graph->group;
    struct launch_turns *turns = turn_begin(group);
    epx_status status = order(group, turns, &stream);

    if (status == EPX_OK)
        status = group->device->ops->graph_launch(group->device, graph->graph, stream);
    if (status == EPX_OK)
        status = hand_over(group, stream);
    turn_end(turns);
    return status;
}

epx_status launch_ordered(struct epx_group *group, struct device_stream *stream, enum kernel_id id, const void *params,
                          size_t bytes)
{
    return launch_agents(group, stream, id, params, bytes, group->set.agents);
}

epx_status launch_sms(struct epx_group *group, struct device_stream *stream, enum kernel_id id, const void *params,
                      size_t bytes, int sms)
{
    const int per_sm = group->device->ops->agents_per_sm;
    const int most = sms > 0 && per_sm && sms < group->set.agents / per_sm ? sms * per_sm : group->set.agents;

    return launch_agents(group, stream, id, params, bytes, most);
}
