/* SPDX-License-Identifier: Apache-2.0 */
/* The events in memory. trace_write.c has the file. */
#include "util/trace.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "util/env.h"
#include "util/log.h"
#include "util/trace_internal.h"

int trace_enabled;

struct trace_state trace_state = {.lock = PTHREAD_MUTEX_INITIALIZER};
static _Thread_local struct trace_buffer *own;

void trace_open(void)
{
    const char *path;

    pthread_mutex_lock(&trace_state.lock);
    path = trace_state.opened ? NULL : env_string("EPX_TRACE");
    trace_state.opened = 1;
    if (path) {
        clock_gettime(CLOCK_REALTIME_COARSE, &trace_state.started); /* the clock of files' times */
        trace_state.path = strdup(path);
        trace_state.pid = getpid();
        __atomic_store_n(&trace_enabled, trace_state.path != NULL, __ATOMIC_RELAXED);
    }
    pthread_mutex_unlock(&trace_state.lock);
}

void trace_switch(int on)
{
    __atomic_store_n(&trace_enabled, on, __ATOMIC_RELAXED);
}

void trace_align(int64_t ns, uint64_t error_ns)
{
    pthread_mutex_lock(&trace_state.lock);
    trace_state.ahead_ns = ns;
    trace_state.error_ns = error_ns;
    pthread_mutex_unlock(&trace_state.lock);
}

/* Buffers stay when their threads end: their events are still to be written. */
struct trace_buffer *trace_track(const char *name)
{
    struct trace_buffer *b = calloc(1, sizeof(*b));

    if (!b)
        return NULL;
    snprintf(b->thread, sizeof(b->thread), "%s", name);
    pthread_mutex_lock(&trace_state.lock);
    b->number = ++trace_state.buffers;
    b->next = trace_state.first;
    trace_state.first = b;
    pthread_mutex_unlock(&trace_state.lock);
    return b;
}

static struct trace_buffer *make_buffer(void)
{
    char name[16];

    if (pthread_getname_np(pthread_self(), name, sizeof(name)) != 0 || strncmp(name, "epx-", 4) != 0)
        strcpy(name, "host");
    return trace_track(name);
}

void trace_track_clock(struct trace_buffer *track, uint64_t at_ns, int64_t ahead_ns, uint64_t error_ns)
{
    const int last = track->clocks > 0;

    pthread_mutex_lock(&trace_state.lock);
    track->clock_at_ns[last] = at_ns;
    track->clock_ahead_ns[last] = ahead_ns;
    if (error_ns > track->clock_error_ns)
        track->clock_error_ns = error_ns;
    track->clocks = last + 1;
    pthread_mutex_unlock(&trace_state.lock);
}

static struct trace_chunk *add_chunk(struct trace_buffer *b)
{
    struct trace_chunk *chunk = NULL;

    if (__atomic_add_fetch(&trace_state.chunks, 1, __ATOMIC_RELAXED) <= TRACE_MOST_CHUNKS)
        chunk = calloc(1, sizeof(*chunk));
    if (!chunk)
        return NULL;
    if (b->last)
        __atomic_store_n(&b->last->next, chunk, __ATOMIC_RELEASE); /* pairs with the acquire in trace_each() */
    else
        __atomic_store_n(&b->chunk, chunk, __ATOMIC_RELEASE); /* likewise */
    b->last = chunk;
    return chunk;
}

void trace_add(const struct trace_event *event)
{
    trace_add_to(own ? own : (own = make_buffer()), event);
}

void trace_add_to(struct trace_buffer *b, const struct trace_event *event)
{
    struct trace_chunk *chunk = b ? b->last : NULL;

    if (b && (!chunk || chunk->count == TRACE_CHUNK))
        chunk = b->full ? NULL : add_chunk(b);
    if (!chunk) {
        if (b)
            b->full = 1;
        __atomic_add_fetch(&trace_state.lost, 1, __ATOMIC_RELAXED);
        return;
    }
    chunk->events[chunk->count] = *event;
    __atomic_store_n(&chunk->count, chunk->count + 1, __ATOMIC_RELEASE); /* pairs with the acquire in trace_each() */
}

/* Every event of a buffer from number `from` on; returns the number behind the last one. */
uint64_t trace_each(const struct trace_buffer *b, uint64_t from,
                    void (*fn)(void *context, const struct trace_buffer *b, const struct trace_event *e), void *context)
{
    uint64_t at = 0;

    /* Acquire: pairs with the releases in trace_add() and add_chunk(). */
    for (const struct trace_chunk *c = __atomic_load_n(&b->chunk, __ATOMIC_ACQUIRE); c;
         c = __atomic_load_n(&c->next, __ATOMIC_ACQUIRE)) {
        const uint32_t count = __atomic_load_n(&c->count, __ATOMIC_ACQUIRE);

        for (uint32_t i = 0; i < count; i++, at++)
            if (at >= from)
                fn(context, b, &c->events[i]);
    }
    return at;
}

/* ---- Phases ------------------------------------------------------------ */

enum { MOST_PHASES = 64 };

struct phase_sums {
    int rank, count;
    struct {
        const char *of, *name;
        uint64_t ns, n;
    } phases[MOST_PHASES];
};

static void add_phase(void *context, const struct trace_buffer *b, const struct trace_event *e)
{
    struct phase_sums *sums = context;
    int i = 0;

    (void)b;
    if (e->kind != TRACE_SPAN || e->rank != sums->rank || !e->of || strcmp(e->category, "phase") != 0 || e->value[0])
        return;
    while (i < sums->count && (strcmp(sums->phases[i].of, e->of) != 0 || strcmp(sums->phases[i].name, e->name) != 0))
        i++;
    if (i == MOST_PHASES)
        return;
    if (i == sums->count) {
        sums->count++;
        sums->phases[i].of = e->of;
        sums->phases[i].name = e->name;
        sums->phases[i].ns = sums->phases[i].n = 0;
    }
    sums->phases[i].ns += e->end_ns - e->begin_ns;
    sums->phases[i].n++;
}

void trace_phases(int rank,
                  void (*fn)(void *context, const char *operation, const char *phase, uint64_t ns, uint64_t n),
                  void *context)
{
    struct phase_sums sums = {.rank = rank};

    pthread_mutex_lock(&trace_state.lock);
    for (const struct trace_buffer *b = trace_state.first; b; b = b->next)
        (void)trace_each(b, 0, add_phase, &sums);
    pthread_mutex_unlock(&trace_state.lock);
    for (int i = 0; i < sums.count; i++)
        fn(context, sums.phases[i].of, sums.phases[i].name, sums.phases[i].ns, sums.phases[i].n);
}
