/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A random program for epx.h: the group, its handles and the steps of all ranks, drawn from one seed. Nothing in a plan
 * differs from rank to rank; what ranks may choose on their own (where a tensor lies, how wide an index is) they draw
 * when they run.
 */
#ifndef EPX_TESTS_RANDOM_PLAN_H
#define EPX_TESTS_RANDOM_PLAN_H

#include <stdint.h>
#include <stdio.h>

#include "epx/epx.h"
#include "tests/lib/workload.h"

enum {
    MOST_H = 4096,
    MOST_RANKS = 9,
    MOST_LOCAL = 8,
    MOST_TOKENS = 40,
    MOST_HANDLES = 3,
    MOST_STEPS = 40,
    MOST_GROUPS = 2
};

/* A sequence of numbers that depends on nothing but where it starts. */
struct draw {
    uint64_t state;
};

static inline int draw(struct draw *d, int n)
{
    d->state = workload_hash(d->state, 0x6e617469);
    return n > 0 ? (int)((d->state >> 33) % (uint64_t)n) : 0;
}

static inline int chance(struct draw *d, int percent)
{
    return draw(d, 100) < percent;
}

/* MASK: all ranks but one mask that one, which does nothing until CLEAN, by all ranks. CLEAR: the others agree on the
 * mask, for high throughput. JOIN: one rank destroys its group, and another takes its place. */
enum kind { UPDATE, DISPATCH, COMBINE, COMPLETE, SYNC, MASK, CLEAR, CLEAN, JOIN };

/* What travels. */
struct format {
    int dtype, out; /* of the sender's rows and of the receiver's */
    int H;
    int scale_dtype, scales; /* fp8: of a row of the receiver */
    int round_scale;
    int special; /* infinities and NaN too */
    int nvfp4;   /* EPX_NVFP4_*, of a dispatch; 1: of a combine */
    int logfmt;
    enum workload_values values;
};

struct step {
    enum kind kind;
    int handle;
    uint64_t seed; /* of values; UPDATE: of the routing */
    struct format f;
    int busy; /* epx.h refuses it: EPX_ERR_BUSY */
    int staged, backward, weights, idx, src, map, global_ids;
    int biases, skips, signals;
    int recv; /* tokens in EPX's own receive buffer, on ranks that like it */
    uint32_t sum;
    int stream;        /* 0: the group's own */
    int counts;        /* UPDATE: the host waits for the number of rows */
    int expect;        /* UPDATE: ranks say how many rows they expect; 2: some of them too few */
    int if_expected;   /* DISPATCH: of such an update */
    int rank;          /* MASK: which */
    int again;         /* MASK: it becomes active again at once; CLEAR: by epx_mask_clean_active; CLEAN: ranks meet
                          before it, as they must after CLEAR */
    int with_dispatch; /* UPDATE in low latency: the indices are given with the dispatch that follows */
};

struct handle_plan {
    int group, mode, layout, K, alignment;
    uint32_t flags;
    uint64_t drop; /* 0, or the seed of each rank's drop_rows */
};

struct plan {
    uint64_t seed;
    int R, per_node, E, L, M, K, bytes; /* bytes: max_hidden_bytes */
    int ngroups, nhandles, nsteps;
    uint32_t modes;
    int inflight, agents, mask, bounded;
    int registered; /* EPX_REGISTER: ranks read tensors in each other's ordinary memory in place */
    uint64_t ht_buffer, ht_node;
    char net[16];
    struct handle_plan handle[MOST_HANDLES];
    struct step step[MOST_STEPS];
};

/* net: of groups of several nodes; ranks: 0 = drawn. */
void plan_draw(struct plan *p, uint64_t seed, int ranks, const char *net);
void plan_print(const struct plan *p, FILE *to);

static inline int node_of(const struct plan *p, int rank)
{
    return p->per_node ? rank / p->per_node : 0;
}

static inline int is_low(const struct handle_plan *h)
{
    return h->mode == EPX_LOW_LATENCY;
}

static inline int is_major(const struct handle_plan *h)
{
    return h->layout == EPX_EXPERT_MAJOR;
}

#endif
