/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Property tests: a case is drawn from one number, run with ranks as threads, and every output compared with the
 * oracle. What a case does, for each of its handles and in the same order on all ranks:
 *
 *      for each update: new routing
 *          for each pair: dispatch -> (complete) -> check, make results -> combine -> (complete) -> check
 *
 * The handles' operations interleave: all dispatches, then all combines. Choices that ranks may make on their own (in
 * which memory a tensor lies, how wide an index is, how many rows there are to spare) differ from rank to rank.
 */
#ifndef EPX_TESTS_LIB_PROP_H
#define EPX_TESTS_LIB_PROP_H

#include <stdint.h>

#include "epx/epx.h"
#include "oracle.h"
#include "workload.h"

#define PROP_MAX_HANDLES 3
#define PROP_MAX_GROUPS 2
#define PROP_MAX_UPDATES 3
#define PROP_MAX_RANKS 512
#define PROP_MAX_SPARES 2

struct prop_rng {
    uint64_t state;
};

/* 0 .. n-1, and 1 with `percent` of 100. */
int prop_draw(struct prop_rng *rng, int n);
int prop_chance(struct prop_rng *rng, int percent);

enum prop_streams { PROP_DEFAULT_STREAM = 0, PROP_OWN_STREAM = 1, PROP_TWO_STREAMS = 2 };

struct prop_handle {
    struct workload w;
    int mode, layout, alignment;
    uint32_t flags;
    int out_dtype;       /* of dispatched tokens: w.dtype, or fp8 */
    int out_scale_dtype; /* EPX_FP32, EPX_INT32 */
    int round_scale;
    int own_scales; /* the caller's own fp8: 0 = as many scales as a cast makes, else so many, as far as they fit */
    int result_dtype;
    int weights; /* ask for weights (dispatch) and return some (combine) */
    int idx_out, src_out;
    int biases, logfmt, backward;
    int round_ranks; /* high throughput, EXPERT_MAJOR: EPX_SUM_ROUND_RANKS */
    int staged_dispatch, staged_combine;
    int async; /* check and make results in stream order, on EPX's thread */
    enum prop_streams streams;
    int in_epx_alloc; /* percent of tensors in memory from epx_alloc */
    int recv_tensor;  /* high throughput: receive into EPX's own buffer */
    int in_reach; /* percent of dispatches whose tokens are in memory from epx_alloc on all ranks, whatever the rest */
};

struct prop_case {
    uint64_t seed;
    int nranks, nhandles, ngroups; /* handle i belongs to group i % ngroups */
    int updates, pairs;
    int num_agents, max_inflight;
    int spare_tokens; /* max_tokens_per_rank of the group beyond the workloads' */
    int bounded;      /* max_recv_tokens = what is really needed */
    uint64_t ht_buffer_bytes, ht_node_bytes;
    int enable_mask;
    int apart;          /* prop_widen() */
    int registered;     /* EPX_REGISTER: ranks read tensors in each other's ordinary memory in place */
    uint32_t modes;     /* of the groups */
    int ranks_per_node; /* 0 = one node, or uneven ones */
    int uneven;         /* nodes of different sizes, which the machine has: node_of */
    uint8_t node_of[PROP_MAX_RANKS];
    int timeout_ms; /* 0 = the tests' usual one */
    int may_fail;   /* ranks stall or die: a call may end with a status, but what is reported as good must be right */
    int recover; /* after such an end, ranks mask whom they name, clear the error and go on with those that are left */
    int repeat;  /* ... and do so again, so often at the most, while that or what follows fails */
    int cleans;  /* all of them recover by epx_mask_clean, though nothing has failed */
    int lingers; /* ranks that are through look at their groups again, some of them later than others end */
    int goes_on; /* low latency: ranks that mask another go on without a recovery; results are not compared then */
    int spares;  /* processes that ask for the places of these ranks, some time after the group exists */
    int replaces[PROP_MAX_SPARES];
    int late;      /* 1 + the rank that comes too late to an operation, by more than the deadline; 0 = none */
    int late_from; /* its operation from which on that is so */
    char net[16];
    struct prop_handle handle[PROP_MAX_HANDLES];
};

/* A random case for the given epx_mode bits. */
void prop_draw_case(struct prop_case *c, uint64_t seed, int modes, int max_ranks);
/* The same with a given number of ranks. */
void prop_draw_case_of(struct prop_case *c, uint64_t seed, int modes, int ranks);
/* Rows of tokens with gaps between them and from any element on, zones of other sizes than powers of two, and more
 * outputs or fewer. The simulation does without: its seeds mean what they meant. */
void prop_widen(struct prop_case *c);
/* Makes sizes small enough after a test has changed something. */
void prop_shrink(struct prop_case *c);
/* 0, or -1 with the failing rank's sentence. */
int prop_run_case(const struct prop_case *c, char *error, size_t bytes);
/* The same with ranks as something else than threads: `ranks` runs fn on each and returns how many failed. */
typedef int (*prop_rank_fn)(int rank, int n, epx_bootstrap *boot, void *arg);
int prop_run_case_on(const struct prop_case *c, int (*ranks)(int n, prop_rank_fn fn, void *arg), char *error,
                     size_t bytes);
void prop_print_case(const struct prop_case *c);
/* How many ranks have gone on after a failure, and how many checked rounds they have run since, in this process. */
void prop_recoveries(uint64_t *ranks, uint64_t *rounds);
/* How many processes have joined, and how many checked rounds they have run since. */
void prop_joins(uint64_t *processes, uint64_t *rounds);
/* What is told of a case while it runs; NULL: nothing. */
struct prop_hooks {
    void (*joined)(epx_group *group); /* a process has joined */
    /* A process ends its program; group NULL: it could not create one. */
    void (*leaves)(int rank, epx_group *group);
    void (*recovered)(epx_group *group);               /* a rank has recovered: what its group says of members is new */
    void (*starts_over)(epx_group *group, int cleans); /* before epx_mask_clean, or epx_group_error_clear */
    /* With `repeat`: before a rank recovers, when that has failed, and when it is through, with this mask: what
     * followed went well. */
    void (*recovers)(int rank);
    void (*not_recovered)(int rank, epx_status status);
    void (*through)(int rank, const int32_t *mask);
    void (*reuses)(epx_group *group); /* before a rank uses its tensors for something else, while its group exists */
    void (*told)(epx_group *group, int rank); /* a rank was told of a failure that faults excuse: whom does it name? */
    void (*masks)(int rank, int peer);        /* `rank` masks `peer`, which it names, before it recovers */
};
extern struct prop_hooks prop_hooks;
/* How often an operation ended in a way that faults excuse. */
uint64_t prop_excused(void);

/* Runs `cases` (times EPX_TEST_SCALE) cases of which `change` may restrict or force something. Prints how to repeat the
 * first failure; returns how many failed (it stops at the first). */
typedef void (*prop_change_fn)(struct prop_case *c, struct prop_rng *rng);
int prop_run(const char *program, const char *name, int cases, int modes, int max_ranks, prop_change_fn change);
/* Changes that several programs make: one handle, bf16, the default stream; casts to fp8; fp8 of the caller's own, with
 * any number of scales; 9 to 64 ranks. */
void prop_force_plain(struct prop_case *c, struct prop_rng *rng);
void prop_force_cast(struct prop_case *c, struct prop_rng *rng);
void prop_force_own_fp8(struct prop_case *c, struct prop_rng *rng);
/* More rows than the receive buffer holds, into ordinary memory, of tokens that the other ranks often reach: receivers
 * take them from there (kernel/ht_take.h). */
void prop_force_in_reach(struct prop_case *c, struct prop_rng *rng);
void prop_force_many_ranks(struct prop_case *c, struct prop_rng *rng, int max_tokens);
/* EPX_TEST_SEED, or the usual one. */
uint64_t prop_seed(uint64_t usual);
/* EPX_TEST_SCALE, 1 by default. */
double prop_scale(void);

#endif
