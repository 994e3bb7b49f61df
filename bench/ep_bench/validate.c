/* SPDX-License-Identifier: Apache-2.0 */
/*
 * --validate: every row says which token of which rank it is (data.c), so that each zone of what was received can be
 * compared with the set that the routing of all ranks demands, and each row with the bytes that were sent. Combined
 * tokens are compared with sums made here: low latency byte by byte, high throughput by calc_diff.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ep_bench.h"

#define HT_MOST 2.5e-5

struct check {
    const struct bench *b;
    const struct shape *s;
    struct routing *all; /* [R] */
    unsigned char *rows, *scales, *seen;
    unsigned char *row, *row_scales; /* expected */
    int64_t bad;
};

static int is_ll(const struct check *c)
{
    return c->s->o->algorithm == NCCL_EP_ALGO_LOW_LATENCY;
}

static int is_cast(const struct check *c)
{
    return c->s->o->dispatch_quant == NCCL_EP_DISP_QUANT_DS_FP8E3M4;
}

/* Counts a fault; the first few are printed. */
static void wrong(struct check *c, const char *what, int64_t where, double got, double expected)
{
    if (c->bad++ < 4)
        fprintf(stderr, "epx ep-bench: rank %d: %s %lld: expected %g, got %g\n", world.rank, what, (long long)where,
                expected, got);
}

static const int64_t *idx_of(const struct check *c, int rank, int token)
{
    return c->all[rank].idx + (size_t)token * (size_t)c->s->K;
}

/* ---- Rows -------------------------------------------------------------------------------------------------------- */

static size_t row_bytes(const struct check *c)
{
    return is_cast(c) ? (size_t)c->s->H : c->s->token_bytes;
}

static size_t row_scale_bytes(const struct check *c)
{
    return is_cast(c) ? 4 * (size_t)c->s->H / 128 : c->s->scale_bytes;
}

static float value_at(const struct check *c, const unsigned char *row, const unsigned char *scales, int column)
{
    float scale;

    if (!is_cast(c))
        return load_float(c->s->token, row + (size_t)column * dtype_size(c->s->token));
    memcpy(&scale, scales + 4 * (size_t)(column / 128), sizeof(scale));
    return load_float(E4M3, row + column) * scale;
}

static void row_who(const struct check *c, const unsigned char *row, const unsigned char *scales, int *rank, int *token)
{
    const int H = c->s->H;
    uint32_t who[2];

    if (c->s->S) {
        memcpy(who, row, sizeof(who));
        *rank = (int)who[0];
        *token = (int)who[1];
        return;
    }
    *rank = (int)lrintf(value_at(c, row, scales, 0)) + 128;
    *token = (int)lrintf(value_at(c, row, scales, H - 128)) * 256 + (int)lrintf(value_at(c, row, scales, H - 1));
}

/* What the cast makes of the row: 128 values share a scale. */
static void cast_row(struct check *c, int rank, int token)
{
    unsigned char *plain = malloc(c->s->token_bytes);

    if (!plain)
        failed("malloc", 0, "no memory");
    token_row(c->s, rank, token, plain);
    for (int block = 0; block < c->s->H / 128; block++) {
        float most = 1e-4f, stored;

        for (int i = 0; i < 128; i++)
            most = fmaxf(most, fabsf(load_float(BF16, plain + 2 * (block * 128 + i))));
        for (int i = 0; i < 128; i++)
            store_float(E4M3, c->row + block * 128 + i,
                        load_float(BF16, plain + 2 * (block * 128 + i)) * (448.0f / most));
        stored = most * (1.0f / 448.0f);
        memcpy(c->row_scales + 4 * (size_t)block, &stored, sizeof(stored));
    }
    free(plain);
}

/* The row must be that of a token that `wanted` says belongs here, and must be there once. */
static void check_row(struct check *c, int64_t at, int (*wanted)(const struct check *c, int rank, int token, int zone),
                      int zone, int *rank, int *token)
{
    const unsigned char *row = c->rows + (size_t)at * row_bytes(c);
    const unsigned char *scales = c->scales ? c->scales + (size_t)at * row_scale_bytes(c) : NULL;

    row_who(c, row, scales, rank, token);
    if (*rank < 0 || *rank >= c->s->R || *token < 0 || *token >= c->all[*rank].tokens ||
        !wanted(c, *rank, *token, zone)) {
        wrong(c, "a token that does not belong in row", at, *token, -1);
        *rank = -1;
        return;
    }
    if (c->seen[(size_t)*rank * (size_t)c->s->M + (size_t)*token]++)
        wrong(c, "a token that was received before, in row", at, *token, -1);
    if (is_cast(c)) {
        cast_row(c, *rank, *token);
    } else {
        token_row(c->s, *rank, *token, c->row);
        if (c->s->S)
            scale_row(c->s, *rank, *token, c->row_scales);
    }
    if (memcmp(row, c->row, row_bytes(c)) || (scales && memcmp(scales, c->row_scales, row_scale_bytes(c))))
        wrong(c, "bytes of row", at, *token, *token);
}

static int64_t count_wanted(const struct check *c, int (*wanted)(const struct check *c, int rank, int token, int zone),
                            int zone)
{
    int64_t count = 0;

    for (int rank = 0; rank < c->s->R; rank++)
        for (int t = 0; t < c->all[rank].tokens; t++)
            count += wanted(c, rank, t, zone) != 0;
    return count;
}

static int wanted_by_expert(const struct check *c, int rank, int token, int expert)
{
    int found = 0;

    for (int k = 0; k < c->s->K; k++)
        found |= idx_of(c, rank, token)[k] == (int64_t)world.rank * c->s->L + expert;
    return found;
}

/* zone: the source's rank, or -1: any. */
static int wanted_here(const struct check *c, int rank, int token, int zone)
{
    int found = 0;

    for (int k = 0; k < c->s->K; k++)
        found |= expert_rank(c->s, idx_of(c, rank, token)[k]) == world.rank;
    return found && (zone < 0 || zone == rank);
}

static void clear_seen(struct check *c)
{
    memset(c->seen, 0, (size_t)c->s->R * (size_t)c->s->M);
}

/* ---- Dispatch, by layout ----------------------------------------------------------------------------------------- */

static void check_experts(struct check *c, const int32_t *counters, const int32_t *offsets)
{
    const int64_t stride = (int64_t)c->s->R * c->s->M, align = c->s->o->alignment;

    for (int e = 0; e < c->s->L; e++) {
        const int64_t count = count_wanted(c, wanted_by_expert, e);
        const int64_t padded = offsets ? (count + align - 1) / align * align : count;
        const int64_t at = offsets ? offsets[e] : e * stride;
        int rank, token;

        clear_seen(c);
        if (counters[e] != padded) {
            wrong(c, "rows of expert", e, counters[e], (double)padded);
            continue;
        }
        for (int64_t i = 0; i < count; i++)
            check_row(c, at + i, wanted_by_expert, e, &rank, &token);
        for (size_t i = (size_t)(at + count) * row_bytes(c); i < (size_t)(at + padded) * row_bytes(c); i++)
            if (c->rows[i])
                wrong(c, "padding of expert", e, c->rows[i], 0);
    }
}

static int64_t received_id(const struct check *c, int64_t expert)
{
    if (expert_rank(c->s, expert) != world.rank)
        return -1;
    return c->s->o->id_kind == NCCL_EP_EXPERT_ID_GLOBAL ? expert : expert % c->s->L;
}

static void check_rank_major(struct check *c, const int32_t *counters)
{
    float *weights = buffer_to_host(&c->b->received_weights);
    int32_t *ids = buffer_to_host(&c->b->received_idx);
    const int K = c->s->K;

    clear_seen(c);
    for (int from = 0; from < c->s->R; from++) {
        const int64_t count = count_wanted(c, wanted_here, from);
        int rank, token;

        if (counters[from] != count)
            wrong(c, "rows of rank", from, counters[from], (double)count);
        for (int64_t i = 0; i < count && counters[from] == count; i++) {
            const int64_t at = (int64_t)from * c->s->M + i;

            check_row(c, at, wanted_here, from, &rank, &token);
            for (int k = 0; k < K && rank >= 0; k++) {
                const float weight = c->all[rank].weights[(size_t)token * (size_t)K + (size_t)k];

                if (ids[at * K + k] != received_id(c, idx_of(c, rank, token)[k]))
                    wrong(c, "id of row", at, ids[at * K + k], (double)received_id(c, idx_of(c, rank, token)[k]));
                if (fabsf(weights[at * K + k] - weight) > 1e-5f * weight)
                    wrong(c, "weight of row", at, weights[at * K + k], weight);
            }
        }
    }
    free(weights);
    free(ids);
}

/* Ids as a set, each with its weight. */
static void check_flat_row(struct check *c, int64_t at, int rank, int token, const int64_t *ids, const float *weights)
{
    const int K = c->s->K;

    for (int k = 0; k < K; k++) {
        const int64_t id = received_id(c, idx_of(c, rank, token)[k]);
        int j = 0;

        while (id >= 0 && j < K && ids[at * K + j] != id)
            j++;
        if (id >= 0 && (j == K || weights[at * K + j] != c->all[rank].weights[(size_t)token * (size_t)K + (size_t)k]))
            wrong(c, "ids and weights of row", at, -1, (double)id);
    }
}

static void check_flat(struct check *c, int32_t total)
{
    float *weights = buffer_to_host(&c->b->received_weights);
    int64_t *ids = buffer_to_host(&c->b->received_idx);
    const int64_t count = count_wanted(c, wanted_here, -1);
    int rank, token;

    clear_seen(c);
    if (total != count)
        wrong(c, "rows received by rank", world.rank, total, (double)count);
    for (int64_t at = 0; at < count && total == count; at++) {
        check_row(c, at, wanted_here, -1, &rank, &token);
        if (rank >= 0)
            check_flat_row(c, at, rank, token, ids, weights);
    }
    free(weights);
    free(ids);
}

static void check_dispatch(struct check *c)
{
    const struct bench *b = c->b;
    int32_t *counters = buffer_to_host(&b->counters);
    int32_t *total = b->total.tensor ? buffer_to_host(&b->total) : NULL;
    int32_t *offsets = b->offsets.tensor ? buffer_to_host(&b->offsets) : NULL;

    c->rows = buffer_to_host(&b->received);
    c->scales = b->received_scales.tensor ? buffer_to_host(&b->received_scales) : NULL;
    if (c->s->o->layout == NCCL_EP_LAYOUT_EXPERT_MAJOR)
        check_experts(c, counters, offsets);
    else if (is_ll(c))
        check_rank_major(c, counters);
    else
        check_flat(c, total[0]);
    free(counters);
    free(total);
    free(offsets);
    free(c->rows);
    free(c->scales);
}

/* ---- Combine ----------------------------------------------------------------------------------------------------- */

static float rounded(const struct check *c, float value)
{
    unsigned char bytes[4];

    store_float((enum dtype)c->s->o->datatype, bytes, value);
    return load_float((enum dtype)c->s->o->datatype, bytes);
}

/* Experts return what they got. The order and the roundings are those of docs/nccl_ep.md. */
static float expected_sum(const struct check *c, const int64_t *idx, const float *weights, float x)
{
    const int em = c->s->o->layout == NCCL_EP_LAYOUT_EXPERT_MAJOR;
    float sum = 0;

    for (int k = 0; k < c->s->K; k++) {
        const int to = expert_rank(c->s, idx[k]);
        int first = 1, slots = 0;

        for (int j = 0; j < c->s->K; j++) {
            slots += expert_rank(c->s, idx[j]) == to;
            first &= j >= k || expert_rank(c->s, idx[j]) != to;
        }
        if (to < 0)
            continue;
        if (is_ll(c) && em)
            sum = fmaf(x, weights[k], sum);
        else if (first)
            sum += is_ll(c) || !em ? x : rounded(c, (float)slots * x);
    }
    return rounded(c, sum);
}

struct difference {
    double product, squares;
    int64_t unequal;
    double worst; /* the largest difference of one value: where, and what */
    int token, column;
    float got, expected;
};

static void keep_worst(struct difference *d, int token, int column, float got, float expected)
{
    const double by = fabs((double)got - (double)expected);

    if (by > d->worst || !(by <= d->worst) || !d->squares) {
        d->worst = by;
        d->token = token;
        d->column = column;
        d->got = got;
        d->expected = expected;
    }
}

static void check_token(struct check *c, int token, const unsigned char *out, struct difference *d)
{
    const struct shape *s = c->s;
    const size_t element = dtype_size(s->token);

    token_row(s, world.rank, token, c->row);
    for (int h = 0; h < s->H; h++) {
        const float x = load_float(s->token, c->row + (size_t)h * element);
        const float expected =
            expected_sum(c, idx_of(c, world.rank, token), c->all[world.rank].weights + (size_t)token * (size_t)s->K, x);
        const float got = load_float(s->token, out + ((size_t)token * (size_t)s->H + (size_t)h) * element);

        keep_worst(d, token, h, got, expected);
        d->product += 2.0 * ((double)got + 1) * ((double)expected + 1);
        d->squares += ((double)got + 1) * ((double)got + 1) + ((double)expected + 1) * ((double)expected + 1);
        d->unequal += got != expected;
    }
}

static void check_combine(struct check *c)
{
    unsigned char *out = buffer_to_host(&c->b->out);
    struct difference d = {0};
    double diff;

    for (int t = 0; t < c->b->mine.tokens; t++)
        check_token(c, t, out, &d);
    diff = d.squares > 0 ? 1 - d.product / d.squares : 0;
    if (is_ll(c) && !c->s->o->combine_quant && d.unequal)
        wrong(c, "combined values that are not byte-exact", d.unequal, diff, 0);
    else if (!(diff < (c->s->o->combine_quant ? 1e-2 : HT_MOST)))
        wrong(c, "calc_diff of combined tokens of rank", world.rank, diff, HT_MOST);
    if (getenv("NCCL_EP_BENCH_VERBOSE_VALIDATION") && c->b->mine.tokens)
        printf("rank %d: combine: calc_diff %g, worst element: token %d, column %d: expected %g, got %g\n", world.rank,
               diff, d.token, d.column, (double)d.expected, (double)d.got);
    free(out);
}

/* ---- All --------------------------------------------------------------------------------------------------------- */

static void check_open(struct check *c, const struct bench *b)
{
    *c = (struct check){.b = b, .s = &b->shape};
    c->all = malloc((size_t)c->s->R * sizeof(*c->all));
    c->seen = malloc((size_t)c->s->R * (size_t)c->s->M);
    c->row = malloc((size_t)c->s->H * 4);
    c->row_scales = malloc((size_t)c->s->H * 4);
    if (!c->all || !c->seen || !c->row || !c->row_scales)
        failed("malloc", 0, "no memory");
    for (int r = 0; r < c->s->R; r++)
        c->all[r] = routing_make(c->s, r);
}

static void check_close(struct check *c)
{
    for (int r = 0; r < c->s->R; r++)
        routing_free(&c->all[r]);
    free(c->all);
    free(c->seen);
    free(c->row);
    free(c->row_scales);
}

static void poison(const struct buffer *b)
{
    if (b->bytes)
        CUDA(cudaMemset(b->memory, 0x5a, b->bytes));
}

/* Every rank's faults together. */
static int verdict(const char *what, int64_t bad)
{
    double *all = malloc((size_t)world.nranks * sizeof(*all)), sum = 0;

    if (!all)
        failed("malloc", 0, "no memory");
    world_gather((double)bad, all);
    for (int r = 0; r < world.nranks; r++)
        sum += all[r];
    free(all);
    if (!world.rank)
        printf("%s validation: %s\n", what, sum > 0 ? "FAILED" : "PASSED");
    return sum > 0 ? EXIT_INVALID : EXIT_GOOD;
}

int validate(struct bench *b)
{
    struct check c;
    int result;

    check_open(&c, b);
    poison(&b->received);
    world_barrier();
    bench_dispatch(b);
    CUDA(cudaStreamSynchronize(world.stream));
    if (getenv("EPX_BENCH_CORRUPT"))
        CUDA(cudaMemset((char *)b->received.memory + 8, 0x33, 1)); /* a test shows that the check can fail */
    check_dispatch(&c);
    result = verdict("Dispatch", c.bad);
    if (!b->shape.o->dispatch_only) {
        c.bad = 0;
        poison(&b->out);
        if (b->combine_scales.tensor)
            bench_set_combine_scales(b);
        bench_combine(b);
        CUDA(cudaStreamSynchronize(world.stream));
        check_combine(&c);
        result |= verdict("Combine", c.bad);
    }
    check_close(&c);
    return result;
}
