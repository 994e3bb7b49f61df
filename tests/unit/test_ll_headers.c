/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What low-latency dispatch hands to the network besides rows does not grow with the number of ranks: a destination
 * gets a header and a record with each of its rows (kernel/ll_remote.h). The simulation counts the bytes of whole
 * dispatches at 8 ranks per node. Rows are short here, and the bytes that do not belong to them are compared with rows
 * of 7168 channels in FP8, with their scales. Rank-major with weights has the longest records.
 * One thread: nothing for ThreadSanitizer. ctest: cost=20 labels=noasan,notsan,noclang
 */
#include <stdio.h>
#include <stdlib.h>

#include "tests/lib/compare.h"
#include "tests/lib/fixture.h"
#include "tests/lib/unit_sim.h"
#include "tests/lib/workload.h"

enum { NODE = 8, TOKENS = 8, TOPK = 8, HIDDEN = 16, ROW = 7168 + 7168 / 128 * 4, PERCENT = 5 };

/* Of all ranks; they run on one thread. */
struct counted {
    uint64_t rows, bytes;
};

struct run {
    epx_group *group;
    epx_handle *handle;
    epx_tensor idx, tokens, weights, out, out_idx, out_weights;
};

static void make(epx_tensor *t, epx_dtype dtype, int ndim, int64_t d0, int64_t d1, int64_t d2)
{
    const int64_t n = d0 * d1 * (ndim > 2 ? d2 : 1);

    *t = epx_tensor_make(calloc((size_t)n, tensor_element_size(dtype)), dtype, ndim, d0, d1, d2, 0);
}

static void fill(struct run *r, int rank, int ranks, int experts)
{
    const struct workload w = {.seed = 3, .nranks = ranks, .experts = experts, .topk = TOPK, .hidden = HIDDEN};

    make(&r->idx, EPX_INT32, 2, TOKENS, TOPK, 0);
    make(&r->tokens, EPX_BF16, 2, TOKENS, HIDDEN, 0);
    make(&r->weights, EPX_FP32, 2, TOKENS, TOPK, 0);
    make(&r->out, EPX_BF16, 3, ranks, TOKENS, HIDDEN);
    make(&r->out_idx, EPX_INT32, 3, ranks, TOKENS, TOPK);
    make(&r->out_weights, EPX_FP32, 3, ranks, TOKENS, TOPK);
    for (int t = 0; t < TOKENS; t++)
        workload_topk(&w, rank, t, tensor_row(&r->idx, t));
}

static epx_group_config config_of(int experts)
{
    epx_group_config config = fixture_config_of(200000, experts, TOKENS, HIDDEN * 2, TOPK);

    config.num_agents = 1;
    config.max_inflight = 1;
    config.alloc_bytes = 1 << 12;
    config.modes = EPX_LOW_LATENCY;
    config.ranks_per_node = NODE;
    snprintf(config.net, sizeof(config.net), "sim");
    return config;
}

static int open_handle(struct run *r, epx_group *group)
{
    const epx_handle_config handle = fixture_handle_config(EPX_LOW_LATENCY, EPX_RANK_MAJOR, TOPK);

    r->group = group;
    return epx_handle_create(&r->handle, group, &handle) != EPX_OK;
}

static int dispatch(struct run *r)
{
    epx_dispatch_inputs in = EPX_DISPATCH_INPUTS_INIT;
    epx_dispatch_outputs out = EPX_DISPATCH_OUTPUTS_INIT;

    in.tokens = &r->tokens;
    in.topk_weights = &r->weights;
    out.tokens = &r->out;
    out.topk_idx = &r->out_idx;
    out.topk_weights = &r->out_weights;
    return epx_handle_update(r->handle, &r->idx, NULL, NULL) != EPX_OK ||
           epx_dispatch(r->handle, &in, &out, NULL, NULL, NULL) != EPX_OK || epx_stream_sync(r->group, NULL) != EPX_OK;
}

/* All ranks have received, so all has been handed over. */
static int count(struct fixture *s)
{
    epx_stats stats = EPX_STATS_INIT;
    struct counted *c = s->arg;

    if (fixture_meet(s) || epx_group_stats(s->group, &stats) != EPX_OK)
        return 1;
    c->rows += stats.rows_remote;
    c->bytes += stats.net_bytes;
    return 0;
}

static int experts_of(int ranks)
{
    return ranks > 256 ? ranks : 256;
}

static int dispatch_and_count(struct fixture *s)
{
    struct run r = {0};
    int rc;

    fill(&r, s->rank, s->nranks, experts_of(s->nranks));
    rc = open_handle(&r, s->group) || dispatch(&r) || count(s);
    if (rc)
        fixture_fail(s, "dispatch");
    epx_tensor *tensors[] = {&r.idx, &r.tokens, &r.weights, &r.out, &r.out_idx, &r.out_weights};
    for (size_t i = 0; i < sizeof(tensors) / sizeof(*tensors); i++)
        free(tensors[i]->data);
    return rc ? -1 : 0;
}

static int rank_main(int rank, int ranks, epx_bootstrap *boot, void *arg)
{
    const epx_group_config config = config_of(experts_of(ranks));

    return fixture_group(rank, ranks, boot, &config, dispatch_and_count, arg);
}

/* Bytes that do not belong to rows, in per cent of rows of 7168 channels. */
static double headers(int ranks)
{
    struct counted c = {0, 0};
    double part;

    free(unit_sim_ranks(ranks, rank_main, &c));
    assert_true(c.rows > 0 && c.bytes > c.rows * HIDDEN * 2);
    part = 100.0 * (double)(c.bytes - c.rows * HIDDEN * 2) / ((double)c.rows * ROW);
    print_message("%d ranks: %llu rows, %.1f bytes besides each, %.2f %% of a row\n", ranks, (unsigned long long)c.rows,
                  part * ROW / 100, part);
    return part;
}

static void headers_are_a_small_part_at_any_number_of_ranks(void **state)
{
    (void)state;
    assert_true(headers(2 * NODE) < PERCENT);
    assert_true(headers(8 * NODE) < PERCENT);
    assert_true(headers(64 * NODE) < PERCENT);
}

UNIT_TESTS(headers_are_a_small_part_at_any_number_of_ranks)
