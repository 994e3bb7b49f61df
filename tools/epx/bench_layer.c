/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `epx bench layer`: what a model calls, and nothing that it would not have. A layer is
 *
 *      routing that no earlier layer had -> epx_handle_update -> number of rows -> epx_dispatch with weights and
 *      indices -> (experts) -> epx_combine with weights
 *
 * with rows in ordinary memory. The host does not wait for the stream between layers, as a model does not; in high
 * throughput it waits for the number of rows, without which nobody can allocate the receive tensors.
 *
 *      round    barrier | 10 layers | sync | barrier        wall clock until the last rank is there, per layer
 *      host     of these layers, the time until the last call has returned, and how much of it waited for the number
 */
#include <stdlib.h>

#include "bench.h"
#include "bench_worker.h"
#include "util/clock.h"

enum { ROUTINGS = 8, CHECKED = 2 };

struct layer_run {
    struct bench_rank *rank;
    epx_tensor idx[ROUTINGS], weights[ROUTINGS];
    epx_tensor weights_back; /* [B,K] */
    int next;                /* routing */
    uint64_t host_ns, count_ns;
};

static int is_ll(const struct bench_rank *rank)
{
    return rank->config->mode == EPX_LOW_LATENCY;
}

/* ---- Routings ------------------------------------------------------------ */

static int make_routing(struct layer_run *run, int i, int32_t *idx, float *weights)
{
    struct bench_rank *rank = run->rank;
    const struct bench_config *c = rank->config;
    const size_t bytes = (size_t)c->tokens * (size_t)c->topk * 4;
    void *to_idx = bench_tensor_alloc(rank, bytes), *to_weights = bench_tensor_alloc(rank, bytes);

    if (to_idx == NULL || to_weights == NULL)
        return bench_complain(rank, "no memory for routing %d", i);
    bench_work_routing(&rank->work, c->seed + (uint64_t)i, idx, weights);
    run->idx[i] = epx_tensor_make(to_idx, EPX_INT32, 2, c->tokens, c->topk, 0, 0);
    run->weights[i] = epx_tensor_make(to_weights, EPX_FP32, 2, c->tokens, c->topk, 0, 0);
    return bench_tensor_copy(rank, to_idx, idx, bytes) != 0 || bench_tensor_copy(rank, to_weights, weights, bytes) != 0;
}

static int make_routings(struct layer_run *run)
{
    const struct bench_config *c = run->rank->config;
    const size_t bytes = (size_t)c->tokens * (size_t)c->topk * 4;
    int32_t *idx = malloc(bytes);
    float *weights = malloc(bytes);
    void *back = bench_tensor_alloc(run->rank, bytes);
    int i, failed = idx == NULL || weights == NULL || back == NULL;

    run->weights_back = epx_tensor_make(back, EPX_FP32, 2, c->tokens, c->topk, 0, 0);
    for (i = 0; i < ROUTINGS && !failed; i++)
        failed = make_routing(run, i, idx, weights);
    free(idx);
    free(weights);
    return failed ? -1 : 0;
}

/* ---- One layer ------------------------------------------------------------ */

static void set_rows(const epx_tensor *tensor, int64_t rows)
{
    if (tensor != NULL)
        ((epx_tensor *)(uintptr_t)tensor)->shape[0] = rows;
}

static int issue_update(struct layer_run *run, const epx_tensor *idx, int64_t *rows)
{
    struct bench_rank *rank = run->rank;
    epx_layout_info info = bench_work_layout_info(&rank->work);
    uint64_t before;

    if (bench_call(rank, "epx_handle_update",
                   epx_handle_update(rank->handle, idx, is_ll(rank) ? NULL : &info, rank->stream)) != 0)
        return -1;
    if (is_ll(rank))
        return 0;
    before = clock_ns();
    if (bench_call(rank, "epx_handle_recv_count", epx_handle_recv_count(rank->handle, rows, NULL)) != 0)
        return -1;
    run->count_ns += clock_ns() - before;
    return 0;
}

static int issue_dispatch(struct layer_run *run, const epx_tensor *weights, int64_t rows)
{
    struct bench_rank *rank = run->rank;
    epx_dispatch_inputs in = bench_work_dispatch_inputs(&rank->work);
    epx_dispatch_outputs out = bench_work_dispatch_outputs(&rank->work);
    epx_layout_info info = bench_work_layout_info(&rank->work);

    if (in.topk_weights != NULL)
        in.topk_weights = weights;
    if (!is_ll(rank)) {
        set_rows(out.tokens, rows);
        set_rows(out.scales, rows);
        set_rows(out.topk_weights, rows);
        set_rows(out.topk_idx, rows);
    }
    return bench_call(rank, "epx_dispatch",
                      epx_dispatch(rank->handle, &in, &out, is_ll(rank) ? &info : NULL, NULL, rank->stream));
}

static int issue_combine(struct layer_run *run, const epx_tensor *weights, int64_t rows)
{
    struct bench_rank *rank = run->rank;
    epx_combine_inputs in = bench_work_combine_inputs(&rank->work);
    epx_combine_outputs out = bench_work_combine_outputs(&rank->work);
    epx_combine_config config = EPX_COMBINE_CONFIG_INIT;

    config.logfmt = rank->config->logfmt;
    if (is_ll(rank)) {
        in.topk_weights = in.topk_weights != NULL ? weights : NULL;
    } else {
        epx_dispatch_outputs received = bench_work_dispatch_outputs(&rank->work);

        set_rows(in.tokens, rows);
        set_rows(received.topk_weights, rows);
        in.topk_weights = received.topk_weights;
        out.topk_weights = &run->weights_back;
    }
    return bench_call(rank, "epx_combine", epx_combine(rank->handle, &in, &out, &config, rank->stream));
}

static int issue_layer(struct layer_run *run, const epx_tensor *idx, const epx_tensor *weights)
{
    int64_t rows = 0;

    return issue_update(run, idx, &rows) != 0 || issue_dispatch(run, weights, rows) != 0 ||
                   issue_combine(run, weights, rows) != 0
               ? -1
               : 0;
}

/* ---- Check and measure ------------------------------------------------------------ */

/* A layer of a seed that no timed layer has, compared with the oracle. */
static int check_layer(struct layer_run *run, uint64_t seed)
{
    struct bench_rank *rank = run->rank;
    const struct bench_config *c = rank->config;
    struct mismatch m = {{0}};

    if (bench_work_seed(&rank->work, seed) != 0)
        return bench_complain(rank, "no memory for the workload");
    bench_work_poison(&rank->work);
    if (bench_shm_barrier(&rank->self) != 0 ||
        issue_layer(run, bench_work_idx(&rank->work), bench_work_weights(&rank->work)) != 0 ||
        bench_sync(rank, "layer") != 0)
        return -1;
    if (c->check && rank->self.rank == c->ranks - 1 && (c->corrupt == 1 || c->corrupt == 2))
        bench_work_corrupt(&rank->work, c->corrupt == 2);
    if (!c->check || bench_work_check(&rank->work, &m) == 0)
        return 0;
    bench_shm_fail(rank->self.shm, BENCH_MISMATCH, "epx rank %d, layer of seed %llu: %s", rank->self.rank,
                   (unsigned long long)seed, m.text);
    return -1;
}

static int check_layers(struct layer_run *run, int first)
{
    const uint64_t seed = run->rank->config->seed + ROUTINGS + (uint64_t)first;
    int i;

    for (i = 0; i < (run->rank->config->check ? CHECKED : 1); i++)
        if (check_layer(run, seed + (uint64_t)i) != 0)
            return -1;
    return 0;
}

/* slot -1: warming up. */
static int run_round(struct layer_run *run, int layers, int slot)
{
    struct bench_rank *rank = run->rank;
    uint64_t start;
    int i;

    if (bench_shm_barrier(&rank->self) != 0)
        return -1;
    start = clock_ns();
    for (i = 0; i < layers; i++, run->next = (run->next + 1) % ROUTINGS)
        if (issue_layer(run, &run->idx[run->next], &run->weights[run->next]) != 0)
            return -1;
    run->host_ns += clock_ns() - start;
    if (bench_sync(rank, "layers") != 0)
        return -1;
    return bench_shm_finish(&rank->self, BENCH_WHOLE, 0, slot);
}

static int measure(struct layer_run *run)
{
    const int layers = run->rank->config->iters, rounds = bench_layer_rounds(layers);
    struct bench_host_time *host = &run->rank->self.shm->host[run->rank->self.rank];
    int round;

    if (layers == 0)
        return 0;
    bench_set_stage(run->rank, BENCH_MEASURING);
    if (run->rank->config->warmup && run_round(run, run->rank->config->warmup, -1) != 0)
        return -1;
    run->host_ns = run->count_ns = 0;
    for (round = 0; round < rounds; round++)
        if (run_round(run, bench_layer_count(layers, round), round) != 0)
            return -1;
    host->us = (double)run->host_ns / 1e3 / layers;
    host->count_us = (double)run->count_ns / 1e3 / layers;
    return 0;
}

static int check_and_measure(struct bench_rank *rank)
{
    struct layer_run run = {.rank = rank};

    bench_set_stage(rank, BENCH_CHECKING);
    if (make_routings(&run) != 0 || check_layers(&run, 0) != 0 || measure(&run) != 0)
        return -1;
    return rank->config->check ? check_layers(&run, CHECKED) : 0;
}

int bench_layer_rounds(int layers)
{
    return (layers + BENCH_LAYERS_PER_ROUND - 1) / BENCH_LAYERS_PER_ROUND;
}

int bench_layer_count(int layers, int round)
{
    const int64_t n = layers, rounds = bench_layer_rounds(layers);

    return (int)(n * (round + 1) / rounds - n * round / rounds);
}

int bench_layer_run(struct bench_rank *rank)
{
    struct bench_command command;
    int failed = 0;

    while (!failed && bench_shm_next(&rank->self, &command) == 0 && !command.quit) {
        failed = check_and_measure(rank);
        if (!failed)
            bench_shm_done(&rank->self);
    }
    return failed;
}
