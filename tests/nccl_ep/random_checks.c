/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "random.h"

/* ---- The caller's experts ---------------------------------------------------------------------------------------- */

static unsigned char *row_at(const struct tensor *t, int row)
{
    return t->data + (size_t)row * t->sizes[t->t.ndim - 1] * type_bytes(t->t.datatype);
}

static int64_t number_at(const struct tensor *t, int64_t i)
{
    return t->t.datatype == ncclInt64 ? ((const int64_t *)(const void *)t->data)[i]
                                      : ((const int32_t *)(const void *)t->data)[i];
}

static float weight_at(const struct tensor *t, int64_t i)
{
    return ((const float *)(const void *)t->data)[i];
}

/* RANK_MAJOR and FLAT: the sum of what its experts make of the row. */
static void reduce_row(struct run *run, int row)
{
    const struct plan *p = &run->plan;
    unsigned char *at = row_at(&run->out, row);

    for (int h = 0; h < p->H; h++) {
        const size_t width = type_bytes(p->type);
        const float x = load_value(p->type, at + (size_t)h * width);
        float sum = 0;

        for (int k = 0; k < p->K; k++) {
            const int64_t id = number_at(&run->out_idx, (int64_t)row * p->K + k);
            if (id >= 0)
                sum += weight_at(&run->out_weights, (int64_t)row * p->K + k) *
                       expert_value((int)id + (p->global_ids ? 0 : run->rank * p->L), x);
        }
        store_value(p->type, sum, at + (size_t)h * width);
    }
}

static void expert_row(struct run *run, int row, int expert)
{
    const struct plan *p = &run->plan;
    unsigned char *at = row_at(&run->out, row);

    for (int h = 0; h < p->H; h++) {
        unsigned char *value = at + (size_t)h * type_bytes(p->type);
        store_value(p->type, expert_value(run->rank * p->L + expert, load_value(p->type, value)), value);
    }
}

/* In stream order: only what dispatch has written is looked at. */
void run_experts(void *arg)
{
    struct run *run = arg;
    const struct plan *p = &run->plan;
    const struct received *v = &run->received[run->rank];

    if (p->low && p->layout == NCCL_EP_LAYOUT_EXPERT_MAJOR) {
        for (int e = 0; e < p->L; e++)
            for (int i = 0; i < number_at(&run->counts, e); i++)
                expert_row(run, e * p->R * p->M + i, e);
    } else if (p->low) {
        for (int r = 0; r < p->R; r++)
            for (int i = 0; i < number_at(&run->rank_counts, r); i++)
                reduce_row(run, r * p->M + i);
    } else {
        for (int row = 0; row < v->rows; row++) {
            if (p->layout == NCCL_EP_LAYOUT_FLAT)
                reduce_row(run, row);
            else if (v->token[row] >= 0)
                expert_row(run, row, v->expert[row]);
        }
    }
}

/* ---- Checks ------------------------------------------------------------------------------------------------------ */

static int bytes_are(const unsigned char *at, int byte, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        if (at[i] != byte)
            return 0;
    return 1;
}

/* The bytes and scales that a token arrives as. */
static void expected_row(const struct run *run, int token, unsigned char *row, unsigned char *scales)
{
    const struct plan *p = &run->plan;
    const unsigned char *sent = run->in.rows + (size_t)token * row_bytes(p);

    if (p->recipe == NCCL_EP_DISP_QUANT_DS_FP8E3M4) {
        model_cast(p, sent, row, (float *)(void *)scales);
        return;
    }
    memcpy(row, sent, row_bytes(p));
    if (scale_bytes(p))
        memcpy(scales, run->in.scales + (size_t)token * scale_bytes(p), scale_bytes(p));
}

static size_t received_bytes(const struct tensor *t)
{
    return t->data ? t->sizes[t->t.ndim - 1] * type_bytes(t->t.datatype) : 0;
}

static int row_equals(const struct run *run, int row, int token)
{
    union {
        unsigned char bytes[512];
        float floats[128];
    } scales;
    unsigned char expected[4096];

    expected_row(run, token, expected, scales.bytes);
    return !memcmp(row_at(&run->out, row), expected, received_bytes(&run->out)) &&
           (!run->out_scales.data ||
            !memcmp(row_at(&run->out_scales, row), scales.bytes, received_bytes(&run->out_scales)));
}

static int row_is(const struct run *run, int row, int byte)
{
    return bytes_are(row_at(&run->out, row), byte, received_bytes(&run->out)) &&
           (!run->out_scales.data || bytes_are(row_at(&run->out_scales, row), byte, received_bytes(&run->out_scales)));
}

/* Low latency: the rows of a zone are `tokens[count]` in some order. */
static int check_set(struct run *run, int first, int zone, const int *tokens, int count)
{
    for (int i = 0; i < count; i++) {
        int found = 0;

        for (int row = first; row < first + count; row++)
            found |= row_equals(run, row, tokens[i]);
        CHECK(found);
    }
    for (int row = first + count; row < first + zone; row++)
        CHECK(row_is(run, row, FILL));
    return 0;
}

static int check_low_expert(struct run *run)
{
    const struct plan *p = &run->plan;
    int tokens[128];

    for (int e = 0; e < p->L; e++) {
        int count = 0;

        for (int token = 0; token < p->R * p->M; token++) {
            int wanted = 0;
            for (int k = 0; goes_to(&run->in, token, run->rank) && k < p->K; k++)
                wanted |= run->in.idx[token * p->K + k] == run->rank * p->L + e;
            if (wanted)
                tokens[count++] = token;
        }
        CHECK(number_at(&run->counts, e) == count);
        if (check_set(run, e * p->R * p->M, p->R * p->M, tokens, count))
            return -1;
    }
    return 0;
}

/* Ids and weights of a row of RANK_MAJOR: all K weights; ids in the order of k, -1 where the expert is elsewhere. */
static int check_ids_low(struct run *run, int row, int token)
{
    const struct plan *p = &run->plan;
    const int first = run->rank * p->L;

    for (int k = 0; k < p->K; k++) {
        const int id = token < 0 ? -1 : run->in.idx[token * p->K + k];
        const int here = id >= first && id < first + p->L;
        const int64_t at = (int64_t)row * p->K + k;

        CHECK(number_at(&run->out_idx, at) == (here ? id - (p->global_ids ? 0 : first) : -1));
        CHECK(token < 0 ? bytes_are(run->out_weights.data + 4 * at, FILL, 4)
                        : weight_at(&run->out_weights, at) == run->in.weight[token * p->K + k]);
    }
    return 0;
}

static int check_low_rank(struct run *run)
{
    const struct plan *p = &run->plan;
    int tokens[128];

    for (int r = 0; r < p->R; r++) {
        int count = 0;

        for (int token = r * p->M; token < (r + 1) * p->M; token++)
            if (goes_to(&run->in, token, run->rank))
                tokens[count++] = token;
        CHECK(number_at(&run->rank_counts, r) == count);
        if (check_set(run, r * p->M, p->M, tokens, count))
            return -1;
        for (int i = 0; i < p->M; i++)
            if (check_ids_low(run, r * p->M + i, i < count ? tokens[i] : -1))
                return -1;
    }
    return 0;
}

/* FLAT: ids ascending, then -1, with their weights. */
static int check_ids_flat(struct run *run, int row, int token)
{
    const struct plan *p = &run->plan;
    int at = row * p->K;

    for (int e = 0; token >= 0 && e < p->L; e++)
        for (int k = 0; k < p->K; k++)
            if (run->in.idx[token * p->K + k] == run->rank * p->L + e) {
                CHECK(number_at(&run->out_idx, at) == e + (p->global_ids ? run->rank * p->L : 0));
                CHECK(weight_at(&run->out_weights, at++) == run->in.weight[token * p->K + k]);
            }
    for (; at < (row + 1) * p->K; at++)
        CHECK(number_at(&run->out_idx, at) == -1 && weight_at(&run->out_weights, at) == 0);
    return 0;
}

static int check_weight_zone(struct run *run, int row, int token, int expert)
{
    const struct plan *p = &run->plan;
    float expected = 0;

    for (int k = 0; token >= 0 && k < p->K; k++)
        if (run->in.idx[token * p->K + k] == run->rank * p->L + expert)
            expected = run->in.weight[token * p->K + k];
    CHECK(weight_at(&run->out_weights, row) == expected);
    return 0;
}

static int check_counters(struct run *run, const struct received *v)
{
    const int major = run->plan.layout == NCCL_EP_LAYOUT_EXPERT_MAJOR;

    CHECK(number_at(&run->total, 0) == v->total);
    for (int e = 0; e < run->plan.L; e++) {
        CHECK(number_at(&run->counts, e) == v->counts[e]);
        CHECK(!major || number_at(&run->offsets, e) == v->offsets[e]);
    }
    return 0;
}

int check_high(struct run *run, int backward)
{
    const struct plan *p = &run->plan;
    const struct received *v = &run->received[run->rank];
    const int major = p->layout == NCCL_EP_LAYOUT_EXPERT_MAJOR, end = p->room == EAGER ? v->rows : p->T;

    if (check_counters(run, v))
        return -1;
    for (int row = 0; row < end; row++) {
        const int token = row < v->rows ? v->token[row] : -1;

        CHECK(token < 0 || row_equals(run, row, token));
        CHECK(token >= 0 || row >= v->rows || row_is(run, row, 0));                /* padding, phantom rows */
        CHECK(row < v->rows || p->room != ENOUGH || row_is(run, row, FILL));       /* behind the last one */
        CHECK(row < v->rows || p->room != DROPS || !major || row_is(run, row, 0)); /* which DROP clears */
        if (!backward && (major ? check_weight_zone(run, row, token, v->expert[row < v->rows ? row : 0])
                                : check_ids_flat(run, row, token)))
            return -1;
    }
    for (int row = end; row < receive_rows(run); row++)
        CHECK(row_is(run, row, FILL) &&
              (backward || bytes_are(run->out_weights.data + (size_t)row * 4 * (size_t)(major ? 1 : p->K), FILL, 4)));
    return 0;
}

int check_dispatch(struct run *run, int backward)
{
    if (!run->plan.low)
        return check_high(run, backward);
    return run->plan.layout == NCCL_EP_LAYOUT_EXPERT_MAJOR ? check_low_expert(run) : check_low_rank(run);
}

int check_combine(struct run *run, int backward)
{
    const struct plan *p = &run->plan;
    float expected[1024];

    for (int t = 0; t < run->in.tokens[run->rank]; t++) {
        model_combine(&run->in, run->received, run->rank * p->M + t, backward, expected);
        for (int h = 0; h < p->H; h++)
            CHECK(load_value(p->type, row_at(&run->back, t) + (size_t)h * type_bytes(p->type)) == expected[h]);
    }
    return 0;
}

/* The backward pass returns weights in the order of the forward k, 0 where the assignment was dropped. */
int check_back_weights(struct run *run)
{
    const struct plan *p = &run->plan;

    for (int t = 0; t < run->in.tokens[run->rank]; t++)
        for (int k = 0; k < p->K; k++) {
            const int token = run->rank * p->M + t, id = run->in.idx[token * p->K + k], rank = id / p->L;
            const struct received *v = &run->received[id < 0 ? 0 : rank];
            const int row = id < 0                             ? -1
                            : p->layout == NCCL_EP_LAYOUT_FLAT ? v->row_of[token]
                                                               : v->row_of[token * p->L + id % p->L];

            CHECK(weight_at(&run->back_weights, t * p->K + k) == (row < 0 ? 0 : run->in.weight[token * p->K + k]));
        }
    return 0;
}
