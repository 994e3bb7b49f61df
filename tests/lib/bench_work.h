/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One rank's share of a benchmark: tensors, made-up data and the check against the oracle. EPX and the MPI baseline use
 * the same, so that both do the same work and both are checked.
 */
#ifndef EPX_TESTS_LIB_BENCH_WORK_H
#define EPX_TESTS_LIB_BENCH_WORK_H

#include <stddef.h>
#include <stdint.h>

#include "bench_config.h"
#include "compare.h"
#include "epx/epx.h"
#include "oracle.h"
#include "workload.h"

/* Where tensors come from; NULL when there is no memory. Nothing is freed before the process ends. */
typedef void *(*bench_alloc_fn)(void *context, size_t bytes);

#define BENCH_PARTS 11

struct bench_work {
    const struct bench_config *config;
    int rank;
    int local_experts;
    struct workload workload;
    struct oracle_route route;
    struct oracle_recv recv;
    struct oracle_data data;
    int routed;         /* route and recv hold something */
    int ranks_per_node; /* sums are rounded per node: set by whoever does that; 0 = not */
    int logfmt;         /* rows travelled as LogFMT-10: set by whoever does that */

    epx_tensor x, idx, weights; /* what the rank gives: bf16 [B,H], int32 [B,K], fp32 [B,K] */

    epx_tensor tokens, scales, out_weights, out_idx; /* what dispatch delivers; data NULL where the layout has none */
    epx_tensor expert_counts, rank_counts;           /* int32 [L], [R] */

    epx_tensor results;  /* combine's input, bf16, shaped as tokens */
    epx_tensor combined; /* combine's output, bf16 [B,H] */

    /* Where the device's memory is not the host's: the tensors above are the host's copies of these. */
    int (*copy)(void *context, void *to, const void *from, size_t bytes);
    void *copy_context;
    struct bench_part {
        void *host, *device;
        size_t bytes;
    } parts[BENCH_PARTS];
    epx_tensor on_device[BENCH_PARTS]; /* descriptors of the device's */
};

/* Most rows of the tokens tensor, whatever the routing. */
int64_t bench_work_max_rows(const struct bench_config *config);
/* Bytes that bench_work_open will ask the allocator for, in all. */
size_t bench_work_bytes(const struct bench_config *config);
int bench_ranks_per_node(const struct bench_config *config);
int bench_work_scales(const struct bench_config *config); /* per row; 0 without fp8 */

/* 0, or -1 without memory. */
int bench_work_open(struct bench_work *work, const struct bench_config *config, int rank, bench_alloc_fn alloc,
                    void *context);
/* The same with tensors that only `copy` (0 or -1) reaches: what is given is copied in by bench_work_seed and _poison,
 * what was delivered is copied out by bench_work_check. */
int bench_work_open_device(struct bench_work *work, const struct bench_config *config, int rank, bench_alloc_fn alloc,
                           int (*copy)(void *context, void *to, const void *from, size_t bytes), void *context);
void bench_work_close(struct bench_work *work);
/* Routing and data of a seed; tensors get the row counts that this routing has. 0, or -1 without memory. */
int bench_work_seed(struct bench_work *work, uint64_t seed);
/* Overwrites what dispatch and combine deliver, so that results of an earlier run cannot pass for new ones. */
void bench_work_poison(struct bench_work *work);
/* Flips one bit of a delivered token (combine = 0) or of a combined one: shows that the check can fail. */
void bench_work_corrupt(struct bench_work *work, int combine);
/* Compares everything that was delivered with the oracle; 0 or -1 with `m` filled. */
int bench_work_check(struct bench_work *work, struct mismatch *m);

/* The routing of a seed, for any rank. */
struct workload bench_work_workload(const struct bench_config *config, uint64_t seed);

/* Routing of a seed alone, for this rank: int32 [B,K], fp32 [B,K] in the host's memory. */
void bench_work_routing(const struct bench_work *work, uint64_t seed, int32_t *idx, float *weights);

/* Descriptors as EPX's calls want them; the structs point into `work`. */
epx_tensor *bench_work_idx(struct bench_work *work);
epx_tensor *bench_work_weights(struct bench_work *work);
epx_dispatch_inputs bench_work_dispatch_inputs(struct bench_work *work);
epx_dispatch_outputs bench_work_dispatch_outputs(struct bench_work *work);
epx_layout_info bench_work_layout_info(struct bench_work *work);
epx_combine_inputs bench_work_combine_inputs(struct bench_work *work);
epx_combine_outputs bench_work_combine_outputs(struct bench_work *work);

/* Routing, dispatch, combine, and the wait for them. EPX_OK or the first failure. */
epx_status bench_work_exchange(struct bench_work *work, epx_group *group, epx_handle *handle);

/* Rows of all ranks together, for bandwidths: of a routing, exactly. */
struct bench_traffic {
    int64_t pairs;  /* (token, expert) */
    int64_t copies; /* (token, destination rank) */
    /* Between nodes: (token, destination rank) in low latency, (token, node) in high throughput; in the expert-major
     * layout of low latency combine returns (token, expert). */
    int64_t remote, remote_back;
};
void bench_work_traffic(const struct bench_config *config, uint64_t seed, struct bench_traffic *traffic);

#endif
