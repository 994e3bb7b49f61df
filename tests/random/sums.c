/* SPDX-License-Identifier: Apache-2.0 */
/* What combine returns: which rows are added in which order, and where sums are rounded. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "model.h"
#include "tests/lib/oracle.h"

/* Rows that are added for one token. */
struct item {
    int owner, expert, k, place;
    float weight;
};

struct sums {
    const struct routing *r;
    const struct step *s;
    int rank, token, n;
    struct item item[EPX_MAX_TOPK];
    _Alignas(4) char row[MOST_H * 4];
    float *bound, off[MOST_H];
};

static void push(struct sums *c, int owner, int expert, int k, int place, float weight)
{
    c->item[c->n++] = (struct item){owner, expert, k, place, weight};
}

static int first_with(const int32_t *idx, int k)
{
    for (int j = 0; j < k; j++)
        if (idx[j] == idx[k])
            return j;
    return k;
}

static void list_experts(struct sums *c, const int32_t *idx)
{
    for (int k = 0; k < c->r->h->K; k++)
        if (idx[k] >= 0 && !model_skips(c->s, c->rank, c->token, k))
            push(c, idx[k] / c->r->p->L, idx[k], is_low(c->r->h) ? first_with(idx, k) : k, k,
                 is_low(c->r->h) ? model_weight(c->s, c->rank, c->token, k) : 1);
}

/* Ranks: by the first k that names them in low latency; by number, or by the last k. */
static void list_ranks(struct sums *c, const int32_t *idx)
{
    for (int owner = 0; owner < c->r->p->R; owner++) {
        int first = -1, last = -1;

        for (int k = 0; k < c->r->h->K; k++)
            if (idx[k] >= 0 && idx[k] / c->r->p->L == owner) {
                first = first < 0 ? k : first;
                last = k;
            }
        if (first >= 0)
            push(c, owner, -1, -1, is_low(c->r->h) ? first : c->s->sum & EPX_SUM_TOPK_ORDER ? last : owner, 1);
    }
}

static int by_place(const void *a, const void *b)
{
    return ((const struct item *)a)->place - ((const struct item *)b)->place;
}

/* docs/formats.md: code * ((s * (1 / G)) * weight), 1 / G being 1 where it is infinite. */
static void add_nvfp4(struct sums *c, const struct item *i, float *sum)
{
    const int H = c->s->f.H;
    const uint16_t *row = (const uint16_t *)(const void *)c->row;
    const float scale = model_row_scale(row, H), back = isinf(1 / scale) ? 1 : 1 / scale;
    uint8_t codes[MOST_H / 2], scales[MOST_H / 16];

    model_nvfp4(row, H, scale, codes, scales);
    for (int e = 0; e < H; e++)
        sum[e] = fmaf(model_e2m1(codes[e / 2] >> (e % 2 * 4) & 15),
                      (oracle_e4m3_to_float(scales[e / 16]) * back) * i->weight, sum[e]);
}

static void add_item(struct sums *c, const struct item *i, float *sum)
{
    const struct format *f = &c->s->f;

    model_result(c->s, i->owner, i->expert, c->rank, c->token, i->k, c->row);
    if (f->logfmt) {
        model_logfmt((const uint16_t *)(const void *)c->row, f->H, c->off);
        for (int e = 0; e < f->H; e++)
            c->bound[e] += fabsf(i->weight) * c->off[e] + (c->off[e] > 0 ? fabsf(sum[e]) * 0x1p-20f : 0);
    }
    if (f->nvfp4) {
        add_nvfp4(c, i, sum);
        return;
    }
    for (int e = 0; e < f->H; e++)
        sum[e] = fmaf(i->weight, load_value(f->dtype, c->row + (size_t)e * dtype_bytes(f->dtype)), sum[e]);
}

static void round_sum(const struct format *f, float *sum)
{
    char at[4];

    for (int e = 0; e < f->H; e++) {
        store_value(f->dtype, sum[e], at);
        sum[e] = load_value(f->dtype, at);
    }
}

/* The items of one rank (or -1: all ranks) of one node (or -1: all). */
static int belongs(const struct sums *c, const struct item *i, int node, int owner)
{
    return (node < 0 || node_of(c->r->p, i->owner) == node) && (owner < 0 || i->owner == owner);
}

/* The place of the last entry of a rank, or of a node, in EXPERT_MAJOR of dropped ones too; -1: no row is left. */
static int last_place(const struct sums *c, int node, int owner)
{
    const int32_t *idx =
        is_major(c->r->h) ? routing_idx(c->r, c->rank, c->token) : routing_left(c->r, c->rank, c->token);
    int last = -1, rows = 0;

    for (int i = 0; i < c->n; i++)
        rows += belongs(c, &c->item[i], node, owner);
    for (int k = 0; k < c->r->h->K && rows; k++) {
        const struct item entry = {.owner = idx[k] / c->r->p->L};
        if (idx[k] >= 0 && belongs(c, &entry, node, owner))
            last = k;
    }
    return last;
}

/* Adds the rows of a node, or each rank's sum. */
static void add_rows(struct sums *c, int node, float *sum)
{
    const struct format *f = &c->s->f;
    const int topk = (c->s->sum & EPX_SUM_TOPK_ORDER) != 0, K = topk ? c->r->h->K : 1;
    float *part;

    if (!(c->s->sum & EPX_SUM_ROUND_RANKS) || !is_major(c->r->h)) {
        for (int i = 0; i < c->n; i++)
            if (belongs(c, &c->item[i], node, -1))
                add_item(c, &c->item[i], sum);
        return;
    }
    part = malloc(MOST_H * sizeof(float));
    for (int at = 0; at < K; at++)
        for (int owner = 0; owner < c->r->p->R; owner++) {
            const int last = last_place(c, node, owner);
            if (last < 0 || (topk && last != at))
                continue;
            memset(part, 0, MOST_H * sizeof(float));
            for (int i = 0; i < c->n; i++)
                if (belongs(c, &c->item[i], node, owner))
                    add_item(c, &c->item[i], part);
            round_sum(f, part);
            for (int e = 0; e < f->H; e++)
                sum[e] += part[e];
        }
    free(part);
}

static void add_node(struct sums *c, int node, float *sum)
{
    float *part = calloc(MOST_H, sizeof(float));

    add_rows(c, node, part);
    round_sum(&c->s->f, part);
    for (int e = 0; e < c->s->f.H; e++)
        sum[e] += part[e];
    free(part);
}

/* High throughput between nodes. */
static void add_nodes(struct sums *c, float *sum)
{
    const int nodes = node_of(c->r->p, c->r->p->R - 1) + 1;

    if (c->s->sum & EPX_SUM_TOPK_ORDER) {
        for (int at = 0; at < c->r->h->K; at++)
            for (int node = 0; node < nodes; node++)
                if (last_place(c, node, -1) == at)
                    add_node(c, node, sum);
        return;
    }
    for (int node = 0; node < nodes; node++)
        if (node == node_of(c->r->p, c->rank))
            add_rows(c, node, sum);
        else
            add_node(c, node, sum);
}

void model_combine(const struct routing *r, const struct step *s, int rank, int token, void *row, float *bound)
{
    struct sums *c = calloc(1, sizeof(*c));
    float *sum = calloc(MOST_H, sizeof(*sum));
    const int32_t *idx = routing_left(r, rank, token);
    const int several = node_of(r->p, r->p->R - 1) > 0;
    const size_t size = dtype_bytes(s->f.dtype);

    memset(bound, 0, (size_t)s->f.H * sizeof(*bound));
    *c = (struct sums){.r = r, .s = s, .rank = rank, .token = token, .bound = bound};
    if (is_major(r->h))
        list_experts(c, idx);
    else
        list_ranks(c, idx);
    qsort(c->item, (size_t)c->n, sizeof(c->item[0]), by_place);
    for (int i = 0; i < s->biases; i++) {
        model_bias(s, i, rank, token, c->row);
        for (int e = 0; e < s->f.H; e++)
            sum[e] += load_value(s->f.dtype, c->row + (size_t)e * size);
    }
    if (is_low(r->h) || !several || (s->sum & EPX_SUM_TOPK_ORDER && !(s->sum & EPX_SUM_ROUND_NODES)))
        add_rows(c, -1, sum);
    else
        add_nodes(c, sum);
    for (int e = 0; e < s->f.H; e++)
        store_value(s->f.dtype, sum[e], (char *)row + (size_t)e * size);
    free(sum);
    free(c);
}
