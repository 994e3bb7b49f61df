/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a rank of a group shows to `epx top`: a page of shared memory (group/watch.c) that only its user can read. Its
 * own agents, calls and proxies write it with plain stores, as they go; who looks reads it at any time, also when the
 * group hangs, and believes no single number too much. Where agents cannot write it, a thread does when asked
 * (group/watch_sample.c).
 */
#ifndef EPX_UTIL_WATCH_H
#define EPX_UTIL_WATCH_H

#include "kernel/params.h"
#include "kernel/times.h"

#define WATCH_MAGIC 0x706f7478706500u
enum { WATCH_VERSION = 2, WATCH_AGENTS = 64, WATCH_KERNELS = 16, WATCH_BUCKETS = TIME_BUCKETS };

/* An agent that waits. */
struct watch_wait {
    uint64_t since_ns; /* CLOCK_MONOTONIC; 0: it does not wait */
    int32_t peer;      /* -1: no single one */
    int32_t phase;     /* enum kernel_phase; PHASE_NONE: not known, and since_ns may be too late */
};

/* What is on its way to a peer of another node. */
struct watch_window {
    uint64_t bytes, bytes_limit;
    uint32_t messages, messages_limit;
    uint32_t pending; /* puts that wait for the window */
    uint32_t is_used;
    uint64_t sent_bytes; /* so far */
};

struct watch {
    uint64_t magic;
    uint32_t version, bytes; /* of the page, arrays included */
    int32_t pid, rank, nranks, node, nnodes, timeout_ms;
    uint64_t group; /* the same on all ranks */
    uint64_t created_ns;
    char device[16], net[32];
    int32_t is_sampled; /* 1: counters are those of the last sample; ask for a new one by `looks` */
    uint32_t looks;     /* whoever looks adds 1, and wakes who sleeps on it */
    uint32_t sampled;   /* the value of `looks` when the last sample was asked for */
    uint32_t reserved;
    /* The host's calls. */
    uint64_t calls;
    uint64_t inside_ns; /* since when a call runs; 0: none does */
    char function[40];  /* the last one */
    /* Operations, by kernel_id; agent 0 writes. */
    uint64_t running_ns; /* since when one runs; 0: none does */
    uint32_t running;    /* which */
    uint32_t failed;     /* 1: the group has an error */
    uint64_t count[WATCH_KERNELS], total_ns[WATCH_KERNELS];
    uint32_t times[WATCH_KERNELS][WATCH_BUCKETS]; /* how many took so long: time_bucket() */
    struct device_stats stats;                    /* as in struct group_dev */
    struct watch_wait waits[WATCH_AGENTS];
    /* Behind it: struct watch_window [nranks], int32_t mask[nranks]. */
};

/* The middle of a bucket. */
static inline double watch_bucket_ns(int bucket)
{
    const int power = bucket / 8 + 2;

    return bucket < 8 ? bucket : (double)((uint64_t)(8 + bucket % 8) << (power - 3)) * 1.0625;
}

static inline struct watch_window *watch_windows(const struct watch *w)
{
    return (struct watch_window *)((uintptr_t)(w + 1));
}

static inline int32_t *watch_mask(const struct watch *w)
{
    return (int32_t *)(watch_windows(w) + w->nranks);
}

#endif
