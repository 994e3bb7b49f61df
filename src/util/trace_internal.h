/* SPDX-License-Identifier: Apache-2.0 */
/* What trace.c and trace_write.c share. */
#ifndef EPX_UTIL_TRACE_INTERNAL_H
#define EPX_UTIL_TRACE_INTERNAL_H

#include <pthread.h>
#include <sys/types.h>
#include <time.h>

#include "util/trace.h"

enum { TRACE_CHUNK = 1024, TRACE_MOST_CHUNKS = 1024 }; /* about 100 bytes an event: at most 100 MB a process */

struct trace_chunk {
    struct trace_chunk *next;
    uint32_t count; /* complete ones */
    struct trace_event events[TRACE_CHUNK];
};

/* One thread appends, trace_flush() reads. */
struct trace_buffer {
    struct trace_buffer *next;
    struct trace_chunk *chunk, *last;
    int number, full;
    uint64_t written; /* events; the lock protects it */
    uint64_t named;   /* ranks below 64 under which this thread has its name in the file; likewise */
    uint64_t tried;   /* both as they were before the file was written; likewise */
    uint64_t named_before;
    char thread[16];
    /* Of a track: its clock, at two times of it; the lock protects it. */
    int clocks;
    uint64_t clock_at_ns[2], clock_error_ns;
    int64_t clock_ahead_ns[2];
};

struct trace_state {
    pthread_mutex_t lock; /* the list of buffers, and the file */
    int opened;
    pid_t pid; /* of who opened it: a child of fork() has its parent's events, and does not write them again */
    char *path;
    struct timespec started;
    struct trace_buffer *first;
    int buffers;
    uint64_t chunks, lost;
    int64_t ahead_ns;
    uint64_t error_ns;
    int warned;
};
extern struct trace_state trace_state;

uint64_t trace_each(const struct trace_buffer *b, uint64_t from,
                    void (*fn)(void *context, const struct trace_buffer *b, const struct trace_event *e),
                    void *context);

#endif
