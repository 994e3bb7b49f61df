/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dispatch   [low latency: MPI_Allgather of the indices -> plan]
 *            rows (and scales, weights) to their ranks; in the expert-major layout then a copy to each expert's zone
 * combine    rows back; float sum, rounded once
 *
 * The fp8 cast and the sum are EPX's own vectorised routines: the two programs differ in how they move data, and in
 * nothing else.
 */
#include "baseline.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/cpu/math.h"

/* Ways of dispatch and combine by variant; the last dispatch variant of the expert-major layout moves pairs. */
static const enum way expert_ways[] = {WAY_ALLTOALLV, WAY_ISEND, WAY_TYPES, WAY_TYPES};
static const char *const expert_dispatch[] = {"pack+Alltoallv+expand", "pack+Isend+expand", "datatypes+expand",
                                              "datatypes in place"};
static const char *const expert_combine[] = {"pack+Alltoallv", "pack+Isend", "datatypes"};
static const char *const row_dispatch[] = {"pack+Alltoallv", "pack+Isend", "datatypes"};
static const char *const row_combine[] = {"Alltoallv", "Isend"};
#define COUNT(a) ((int)(sizeof(a) / sizeof((a)[0])))
#define VARIANT_IN_PLACE 3

static int expert_major(const struct bench_config *c)
{
    return c->layout == EPX_EXPERT_MAJOR;
}

static void name_variants(struct bench_team *team, enum bench_op op, const char *const *names, int count)
{
    int i;

    team->variants[op] = count;
    for (i = 0; i < count; i++)
        snprintf(team->variant_name[op][i], sizeof(team->variant_name[op][i]), "%s", names[i]);
}

void baseline_variants(const struct bench_config *config, struct bench_team *team)
{
    static const char *const update[] = {"Allgather"};

    name_variants(team, BENCH_UPDATE, update, config->mode == EPX_HIGH_THROUGHPUT);
    if (expert_major(config)) {
        name_variants(team, BENCH_DISPATCH, expert_dispatch, COUNT(expert_dispatch));
        name_variants(team, BENCH_COMBINE, expert_combine, COUNT(expert_combine));
    } else {
        name_variants(team, BENCH_DISPATCH, row_dispatch, COUNT(row_dispatch));
        name_variants(team, BENCH_COMBINE, row_combine, COUNT(row_combine));
    }
}

int baseline_open(struct baseline *b, const struct bench_config *c, struct bench_work *work)
{
    size_t row = (size_t)c->hidden * 2, own = (size_t)c->tokens, all = own * (size_t)c->ranks, k = (size_t)c->topk;
    size_t scales = (size_t)bench_work_scales(c), most = (size_t)(c->topk > c->ranks ? c->topk : c->ranks);

    memset(b, 0, sizeof(*b));
    b->config = c;
    b->work = work;
    /* A rank sends at most K rows per token, and returns at most as many rows as it received. */
    if (exchange_open(&b->exchange, c->ranks, work->rank, all * k * row + 1) != 0)
        return -1;
    if (plan_open(&b->plan, c, work->rank) != 0)
        return -1;
    b->all_idx = malloc(all * k * sizeof(int32_t));
    b->stage = malloc(all * row);
    b->returned = malloc(own * most * row);
    b->stage_scales = malloc(all * scales * sizeof(float) + 1);
    b->stage_weights = malloc(all * k * sizeof(float));
    b->cast = malloc(own * row);
    b->cast_scales = malloc(own * scales * sizeof(float) + 1);
    return b->all_idx && b->stage && b->returned && b->stage_scales && b->stage_weights && b->cast && b->cast_scales
               ? 0
               : -1;
}

/* ---- Routing ------------------------------------------------------------------------------------------------- */

int baseline_update(void *self)
{
    struct baseline *b = self;
    struct plan *plan = &b->plan;
    int n = b->config->tokens * b->config->topk;

    MPI_Allgather(b->work->idx.data, n, MPI_INT32_T, b->all_idx, n, MPI_INT32_T, MPI_COMM_WORLD);
    plan_build(plan, b->all_idx);
    memcpy(b->work->expert_counts.data, plan->expert_counts, (size_t)plan->local_experts * sizeof(int));
    memcpy(b->work->rank_counts.data, plan->copies.in.count, (size_t)b->config->ranks * sizeof(int));
    return 0;
}

/* ---- Dispatch ------------------------------------------------------------------------------------------------ */

/* Copies the rows of `stage` to their experts' zones. */
static void expand(const struct plan *plan, void *to, const void *stage, size_t bytes)
{
    int j, i;

    for (j = 0; j < plan->copies.in.total; j++)
        for (i = plan->expand_first[j]; i < plan->expand_first[j + 1]; i++)
            memcpy((char *)to + (size_t)plan->expand[i] * bytes, (const char *)stage + (size_t)j * bytes, bytes);
}

/* Weights of the local experts stay, the others become 0 and their index -1: one row. */
static void localise(const struct plan *plan, const int32_t *idx, float *weights, int32_t *out)
{
    int k, low = plan->rank * plan->local_experts;

    for (k = 0; k < plan->config->topk; k++) {
        int local = idx[k] >= low && idx[k] < low + plan->local_experts;

        out[k] = local ? idx[k] - low : -1;
        weights[k] = local ? weights[k] : 0;
    }
}

/* Is any of the token's experts here? */
static int comes_here(const struct plan *plan, const int32_t *idx)
{
    int k, low = plan->rank * plan->local_experts;

    for (k = 0; k < plan->config->topk; k++)
        if (idx[k] >= low && idx[k] < low + plan->local_experts)
            return 1;
    return 0;
}

/* FLAT and RANK_MAJOR: weights straight to their place, indices from the known routing. */
static void deliver_weights(struct baseline *b)
{
    const struct bench_config *c = b->config;
    struct plan *plan = &b->plan;
    struct bench_work *work = b->work;
    const int32_t *idx = b->all_idx;
    int s, t, row;

    exchange_rows(&b->exchange, WAY_ALLTOALLV, &plan->copies.out, work->weights.data, &plan->copies.in,
                  work->out_weights.data, PLACE_START, c->topk * 4);
    for (s = 0; s < c->ranks; s++) {
        row = plan->copies.in.start[s];
        for (t = 0; t < c->tokens; t++, idx += c->topk)
            if (comes_here(plan, idx)) {
                localise(plan, idx, (float *)work->out_weights.data + (size_t)row * (size_t)c->topk,
                         (int32_t *)work->out_idx.data + (size_t)row * (size_t)c->topk);
                row++;
            }
        /* RANK_MAJOR: rows that a source leaves free say so */
        for (; c->mode == EPX_LOW_LATENCY && row < plan->copies.in.start[s] + c->tokens; row++)
            memset((int32_t *)work->out_idx.data + (size_t)row * (size_t)c->topk, 0xff, (size_t)c->topk * 4);
    }
}

/* High throughput, EXPERT_MAJOR: one weight per row. Zones take copies in order, so a walk over them finds the rows. */
static void expand_weights(struct baseline *b)
{
    const struct bench_config *c = b->config;
    struct plan *plan = &b->plan;
    const int32_t *idx = b->all_idx;
    float *out = b->work->out_weights.data;
    int low = plan->rank * plan->local_experts, i, k, copy = 0, pair = 0;

    exchange_rows(&b->exchange, WAY_ALLTOALLV, &plan->copies.out, b->work->weights.data, &plan->copies.in,
                  b->stage_weights, PLACE_PACKED, c->topk * 4);
    for (i = 0; i < c->ranks * c->tokens; i++, idx += c->topk) {
        if (!comes_here(plan, idx))
            continue;
        for (k = 0; k < c->topk; k++)
            if (idx[k] >= low && idx[k] < low + plan->local_experts)
                out[plan->expand[pair++]] = b->stage_weights[(size_t)copy * (size_t)c->topk + (size_t)k];
        copy++;
    }
}

/* High throughput, EXPERT_MAJOR: zeros between the last row of a zone and the next zone. */
static void zero_padding(struct baseline *b, size_t row)
{
    const struct plan *plan = &b->plan;
    size_t scales = (size_t)bench_work_scales(b->config) * 4;
    int l;

    for (l = 0; l < plan->local_experts; l++) {
        size_t first = (size_t)plan->expert_offsets[l] + (size_t)plan->expert_rows[l];
        size_t rows = (size_t)(plan->expert_counts[l] - plan->expert_rows[l]);

        if (rows == 0)
            continue;
        memset((char *)b->work->tokens.data + first * row, 0, rows * row);
        memset((float *)b->work->out_weights.data + first, 0, rows * 4);
        if (scales)
            memset((char *)b->work->scales.data + first * scales, 0, rows * scales);
    }
}

static void cast_tokens(struct baseline *b)
{
    size_t h = (size_t)b->config->hidden, scales = (size_t)bench_work_scales(b->config), t;

    for (t = 0; t < (size_t)b->config->tokens; t++)
        math_cast_fp8(b->cast + t * h, b->cast_scales + t * scales, SCALE_FLOAT, 0,
                      (const uint16_t *)b->work->x.data + t * h, EPX_BF16, b->config->hidden);
}

static void dispatch_expert_major(struct baseline *b, int variant, const void *from, int row)
{
    const struct bench_config *c = b->config;
    struct plan *plan = &b->plan;
    int scales = bench_work_scales(c) * 4;

    if (variant == VARIANT_IN_PLACE) {
        exchange_rows(&b->exchange, WAY_TYPES, &plan->pairs.out, from, &plan->pairs.in, b->work->tokens.data,
                      PLACE_ROWS, row);
    } else {
        exchange_rows(&b->exchange, expert_ways[variant], &plan->copies.out, from, &plan->copies.in, b->stage,
                      PLACE_PACKED, row);
        expand(plan, b->work->tokens.data, b->stage, (size_t)row);
    }
    if (scales) {
        exchange_rows(&b->exchange, WAY_ALLTOALLV, &plan->copies.out, b->cast_scales, &plan->copies.in, b->stage_scales,
                      PLACE_PACKED, scales);
        expand(plan, b->work->scales.data, b->stage_scales, (size_t)scales);
    }
    if (c->mode == EPX_HIGH_THROUGHPUT) {
        expand_weights(b);
        zero_padding(b, (size_t)row);
    }
}

static void dispatch_rows(struct baseline *b, int variant, const void *from, int row)
{
    struct plan *plan = &b->plan;
    int scales = bench_work_scales(b->config) * 4;

    exchange_rows(&b->exchange, expert_ways[variant], &plan->copies.out, from, &plan->copies.in, b->work->tokens.data,
                  PLACE_START, row);
    if (scales)
        exchange_rows(&b->exchange, WAY_ALLTOALLV, &plan->copies.out, b->cast_scales, &plan->copies.in,
                      b->work->scales.data, PLACE_START, scales);
    deliver_weights(b);
}

int baseline_dispatch(void *self, int variant)
{
    struct baseline *b = self;
    const struct bench_config *c = b->config;
    const void *from = b->work->x.data;
    int row = c->hidden * 2;

    if (c->mode == EPX_LOW_LATENCY)
        baseline_update(b);
    if (c->fp8) {
        cast_tokens(b);
        from = b->cast;
        row = c->hidden;
    }
    if (expert_major(c))
        dispatch_expert_major(b, variant % COUNT(expert_dispatch), from, row);
    else
        dispatch_rows(b, variant % COUNT(row_dispatch), from, row);
    return 0;
}

/* ---- Combine ------------------------------------------------------------------------------------------------- */

static void sum_tokens(struct baseline *b)
{
    const struct bench_config *c = b->config;
    const float *weights = b->work->weights.data;
    int weighted = c->mode == EPX_LOW_LATENCY && expert_major(c);
    size_t h = (size_t)c->hidden;
    struct reduce_row rows[EPX_MAX_TOPK];
    int t, n;

    for (t = 0; t < c->tokens; t++) {
        const int *slot = b->plan.sum_slot + t * c->topk, *entry = b->plan.sum_k + t * c->topk;

        for (n = 0; n < c->topk && slot[n] >= 0; n++) {
            rows[n].data = (const uint16_t *)b->returned + (size_t)slot[n] * h;
            rows[n].weight = weighted ? weights[t * c->topk + entry[n]] : 1;
            rows[n].format = ROW_PLAIN;
        }
        math_reduce((uint16_t *)b->work->combined.data + (size_t)t * h, EPX_BF16, c->hidden, rows, n, weighted, NULL,
                    NULL);
    }
}

int baseline_combine(void *self, int variant)
{
    struct baseline *b = self;
    struct flow *flow = expert_major(b->config) ? &b->plan.pairs : &b->plan.copies;
    int ways = expert_major(b->config) ? COUNT(expert_combine) : COUNT(row_combine);

    exchange_rows(&b->exchange, expert_ways[variant % ways], &flow->in, b->work->results.data, &flow->out, b->returned,
                  PLACE_PACKED, b->config->hidden * 2);
    sum_tokens(b);
    return 0;
}
