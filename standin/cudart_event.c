/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Events: each record takes the next ticket, and the stream that comes to it writes down ticket and time. Who waits
 * waits for the ticket that was the latest when he asked. Work in a stream holds its event: destroying one that is
 * still on its way only lets go of it.
 */
#include "standin/cudart.h"

#include <pthread.h>
#include <stdlib.h>

#include "util/clock.h"

struct CUevent_st {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int holders;
    uint64_t issued, reached; /* tickets */
    uint64_t ns;              /* when `reached` was */
};

void event_hold(struct CUevent_st *event)
{
    pthread_mutex_lock(&event->lock);
    event->holders++;
    pthread_mutex_unlock(&event->lock);
}

void event_release(struct CUevent_st *event)
{
    int left;

    pthread_mutex_lock(&event->lock);
    left = --event->holders;
    pthread_mutex_unlock(&event->lock);
    if (left)
        return;
    pthread_cond_destroy(&event->changed);
    pthread_mutex_destroy(&event->lock);
    free(event);
}

uint64_t event_issue(struct CUevent_st *event)
{
    uint64_t ticket;

    pthread_mutex_lock(&event->lock);
    ticket = ++event->issued;
    pthread_mutex_unlock(&event->lock);
    return ticket;
}

uint64_t event_latest(struct CUevent_st *event)
{
    uint64_t ticket;

    pthread_mutex_lock(&event->lock);
    ticket = event->issued;
    pthread_mutex_unlock(&event->lock);
    return ticket;
}

void event_reach(struct CUevent_st *event, uint64_t ticket)
{
    pthread_mutex_lock(&event->lock);
    if (ticket > event->reached) {
        event->reached = ticket;
        event->ns = clock_ns();
    }
    pthread_cond_broadcast(&event->changed);
    pthread_mutex_unlock(&event->lock);
}

/* Ends: the deadlines of EPX's operations bound what streams do. */
void event_await(struct CUevent_st *event, uint64_t ticket)
{
    pthread_mutex_lock(&event->lock);
    while (event->reached < ticket)
        pthread_cond_wait(&event->changed, &event->lock);
    pthread_mutex_unlock(&event->lock);
}

/* ---- The calls --------------------------------------------------------------------------------------------------- */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags)
{
    (void)flags;
    if (!event)
        return keep_error(cudaErrorInvalidValue);
    *event = calloc(1, sizeof(**event));
    if (!*event || known_add(KNOWN_EVENT, *event)) {
        free(*event);
        *event = NULL;
        return keep_error(cudaErrorMemoryAllocation);
    }
    (*event)->holders = 1;
    pthread_mutex_init(&(*event)->lock, NULL);
    pthread_cond_init(&(*event)->changed, NULL);
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event)
{
    return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    if (!known_remove(KNOWN_EVENT, event))
        return keep_error(cudaErrorInvalidResourceHandle);
    event_release(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    const struct work work = {.kind = WORK_RECORD, .event = {.event = event}};

    return known_has(KNOWN_EVENT, event) ? work_submit(stream, &work) : keep_error(cudaErrorInvalidResourceHandle);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags)
{
    const struct work work = {.kind = WORK_WAIT, .event = {.event = event}};

    if (!known_has(KNOWN_EVENT, event))
        return keep_error(cudaErrorInvalidResourceHandle);
    if (flags)
        return keep_error(cudaErrorInvalidValue);
    return work_submit(stream, &work);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    if (!known_has(KNOWN_EVENT, event))
        return keep_error(cudaErrorInvalidResourceHandle);
    event_await(event, event_latest(event));
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    int done;

    if (!known_has(KNOWN_EVENT, event))
        return keep_error(cudaErrorInvalidResourceHandle);
    pthread_mutex_lock(&event->lock);
    done = event->reached == event->issued;
    pthread_mutex_unlock(&event->lock);
    return done ? cudaSuccess : cudaErrorNotReady;
}

/* NotReady while a record is on its way; InvalidResourceHandle where there was none. */
static cudaError_t event_time(cudaEvent_t event, uint64_t *ns)
{
    cudaError_t error = cudaErrorInvalidResourceHandle;

    if (!known_has(KNOWN_EVENT, event))
        return error;
    pthread_mutex_lock(&event->lock);
    if (event->issued)
        error = event->reached == event->issued ? cudaSuccess : cudaErrorNotReady;
    *ns = event->ns;
    pthread_mutex_unlock(&event->lock);
    return error;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end)
{
    uint64_t from = 0, to = 0;
    cudaError_t error;

    if (!ms)
        return keep_error(cudaErrorInvalidValue);
    error = event_time(start, &from);
    if (error == cudaSuccess)
        error = event_time(end, &to);
    if (error == cudaSuccess)
        *ms = (float)((double)(int64_t)(to - from) / 1e6);
    return keep_error(error);
}
