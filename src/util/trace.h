/* SPDX-License-Identifier: Apache-2.0 */
/*
 * EPX_TRACE=FILE: what happened when, in the JSON of chrome://tracing and Perfetto.
 *
 *   every thread     appends events to a buffer of its own: no lock, no system call
 *   trace_flush()    writes what is new, of all threads, when a group ends and when the process ends
 *
 *   FILE             one for all ranks of a machine. Whoever writes holds its lock, puts its events before the closing
 *                    brackets, and leaves it complete: it can be opened at any time. A file that is older than this
 *                    process is begun anew.
 *
 * Processes of the trace are ranks, and its threads are theirs. Times are CLOCK_MONOTONIC of rank 0's machine
 * (trace_align). Nothing is recorded, and nothing is measured, where EPX_TRACE is not set: trace_on() is one load.
 */
#ifndef EPX_UTIL_TRACE_H
#define EPX_UTIL_TRACE_H

#include <stdint.h>

enum trace_kind {
    TRACE_SPAN,    /* of its thread: spans of one thread nest */
    TRACE_PUT,     /* from post to completion: may overlap with others */
    TRACE_COUNTER, /* value[0], value[1] at begin_ns */
    TRACE_SIGNAL   /* a moment; waits for the same `what` end after it */
};

/* Names and categories live as long as the library does. */
struct trace_event {
    uint64_t begin_ns, end_ns;
    const char *category, *name;
    const char *of;       /* of a phase: its operation; of a wait: what for; or NULL */
    const char *label[2]; /* of the values; NULL: none */
    uint64_t value[2];
    uint64_t what; /* TRACE_WHAT, or 0 */
    int32_t rank;
    int32_t peer;  /* -1: none */
    int32_t ranks; /* TRACE_SIGNAL: of the group */
    int32_t kind;
};

/* A signal: its kind, slot and value. */
#define TRACE_WHAT(kind, slot, value) \
    ((uint64_t)((kind) + 1) << 56 | (uint64_t)((slot)&0xff) << 48 | ((uint64_t)(value)&0xffffffffffffu))

extern int trace_enabled;

static inline int trace_on(void)
{
    return __builtin_expect(__atomic_load_n(&trace_enabled, __ATOMIC_RELAXED), 0);
}

/* Begins to record if EPX_TRACE is set; every call but the first does nothing. */
void trace_open(void);
/* Records, or stops to; without EPX_TRACE in memory only, for trace_phases(). */
void trace_switch(int on);
void trace_add(const struct trace_event *event);
/* Events of something that has no thread here, and a clock of its own. NULL: no memory. One thread adds at a time. */
struct trace_buffer *trace_track(const char *name);
void trace_add_to(struct trace_buffer *track, const struct trace_event *event);
/* At `at_ns` of its clock, that is `ahead_ns` ahead of this process's, give or take `error_ns`. What lies between the
 * first such time and the last is interpolated. */
void trace_track_clock(struct trace_buffer *track, uint64_t at_ns, int64_t ahead_ns, uint64_t error_ns);
/* This process's clock is `ns` ahead of rank 0's, give or take `error_ns`. */
void trace_align(int64_t ns, uint64_t error_ns);
/* Writes what is new. Warns once if it cannot. */
void trace_flush(void);

/* Calls fn with the number, the summed time and the name of each phase of each operation that `rank` recorded on
 * threads whose spans have agent 0. */
void trace_phases(int rank,
                  void (*fn)(void *context, const char *operation, const char *phase, uint64_t ns, uint64_t n),
                  void *context);

#endif
