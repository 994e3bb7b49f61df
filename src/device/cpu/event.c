/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Events. Each record makes a MARK, which the stream reaches in its turn; the event points to its latest mark. Whoever
 * waits holds the mark that was current when he asked, so recording anew moves the event without moving him, also when
 * the records are on different streams. Marks are counted: the event, the queue and waiters hold one reference each.
 */
#include <stdlib.h>

#include "device/cpu/cpu.h"
#include "util/status.h"

struct mark {
    int refs; /* atomic */
    int done; /* atomic; set under the lock, read without */
    const struct device_stream *stream;
    pthread_mutex_t lock;
    pthread_cond_t reached;
};

struct device_event {
    pthread_mutex_t lock;
    struct mark *mark;
};

static struct mark *mark_new(const struct device_stream *stream)
{
    struct mark *mark = calloc(1, sizeof(*mark));

    if (!mark)
        return NULL;
    mark->refs = 1;
    mark->stream = stream;
    pthread_mutex_init(&mark->lock, NULL);
    pthread_cond_init(&mark->reached, NULL);
    return mark;
}

static struct mark *mark_get(struct mark *mark)
{
    __atomic_fetch_add(&mark->refs, 1, __ATOMIC_RELAXED); /* the caller's own reference keeps it alive */
    return mark;
}

void mark_put(struct mark *mark)
{
    /* Release what this holder did; the last one acquires it all before it frees. */
    if (!mark || __atomic_sub_fetch(&mark->refs, 1, __ATOMIC_ACQ_REL) > 0)
        return;
    pthread_cond_destroy(&mark->reached);
    pthread_mutex_destroy(&mark->lock);
    free(mark);
}

void mark_reach(struct mark *mark)
{
    pthread_mutex_lock(&mark->lock);
    __atomic_store_n(&mark->done, 1, __ATOMIC_RELEASE); /* pairs with mark_reached: the stream's work is visible */
    pthread_cond_broadcast(&mark->reached);
    pthread_mutex_unlock(&mark->lock);
}

int mark_reached(struct mark *mark)
{
    return __atomic_load_n(&mark->done, __ATOMIC_ACQUIRE); /* pairs with mark_reach */
}

/* Ends when the stream gets there. Its work is bounded by the kernels' deadlines, and a mark can only be waited for
 * once it is queued, so that streams never wait in a circle. */
void mark_wait(struct mark *mark)
{
    if (mark_reached(mark))
        return;
    pthread_mutex_lock(&mark->lock);
    while (!mark_reached(mark))
        pthread_cond_wait(&mark->reached, &mark->lock);
    pthread_mutex_unlock(&mark->lock);
}

const struct device_stream *mark_stream(const struct mark *mark)
{
    return mark->stream;
}

/* ---- Events ------------------------------------------------------------------------------------------------- */

epx_status cpu_event_create(struct device *device, struct device_event **event)
{
    (void)device;
    *event = calloc(1, sizeof(**event));
    if (!*event)
        return fail(EPX_ERR_MEMORY, "cpu device: no memory for an event");
    pthread_mutex_init(&(*event)->lock, NULL);
    return EPX_OK;
}

void cpu_event_destroy(struct device *device, struct device_event *event)
{
    (void)device;
    if (!event)
        return;
    mark_put(event->mark);
    pthread_mutex_destroy(&event->lock);
    free(event);
}

epx_status cpu_event_record(struct device *device, struct device_event *event, struct device_stream *stream)
{
    struct mark *mark = mark_new(stream), *old;
    epx_status status;

    (void)device;
    if (!mark)
        return fail(EPX_ERR_MEMORY, "cpu device: no memory to record an event");
    /* Queue and replace under one lock: two threads that record one event leave the mark of the later one. */
    pthread_mutex_lock(&event->lock);
    status = stream_queue_mark(stream, mark_get(mark));
    if (status == EPX_OK) {
        old = event->mark;
        event->mark = mark;
    } else {
        mark_put(mark); /* the queue's */
        old = mark;
    }
    pthread_mutex_unlock(&event->lock);
    mark_put(old);
    return status;
}

struct mark *event_mark(struct device_event *event)
{
    struct mark *mark;

    pthread_mutex_lock(&event->lock);
    mark = event->mark ? mark_get(event->mark) : NULL;
    pthread_mutex_unlock(&event->lock);
    return mark;
}

epx_status cpu_event_sync(struct device *device, struct device_event *event)
{
    struct mark *mark = event_mark(event);
    epx_status status = EPX_OK;

    (void)device;
    if (!mark)
        return EPX_OK;
    if (!mark_reached(mark) && stream_runs_here(mark_stream(mark)))
        status = fail(EPX_ERR_USAGE, "event: a call queued on a stream may not wait for later work of that stream");
    else
        mark_wait(mark);
    mark_put(mark);
    return status;
}

epx_status cpu_event_query(struct device *device, struct device_event *event)
{
    struct mark *mark = event_mark(event);
    int done = !mark || mark_reached(mark);

    (void)device;
    mark_put(mark);
    return done ? EPX_OK : EPX_ERR_NOT_READY;
}
