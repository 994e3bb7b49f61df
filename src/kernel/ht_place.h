/* SPDX-License-Identifier: Apache-2.0 */
/* High-throughput dispatch: one row to all its places in this node, with what belongs to it. */
#ifndef EPX_KERNEL_HT_PLACE_H
#define EPX_KERNEL_HT_PLACE_H

#include "kernel/rows.h"
#include "kernel/sync.h"

/* The descriptors of the node's active ranks at `descs` of a heap, which do not change any more, in memory of the
 * block, by rank; NULL where it has none. The heap of one that has gone may have signals alone (map_stand_ins() of
 * group/joiner.c). */
KFN const char *ht_block_descs(struct agent *ag, const struct group_dev *g, uint64_t descs, size_t bytes)
{
#if AG_BLOCKS
    const int words = (int)(bytes / 4);
    int32_t *memory = ag_block_memory(ag, g->nranks * words);

    if (!memory)
        return NULL;
    AG_EACH_BLOCK(ag, int, i, g->nranks *words)
    {
        if (is_local(g, i / words) && is_active(g, i / words))
            memory[i] = ((const int32_t *)node_desc_at(g, i / words, descs, bytes))[i % words];
    }
    ag_block_any(ag, 0);
    return (const char *)memory;
#else
    (void)ag;
    (void)g;
    (void)descs;
    (void)bytes;
    return NULL;
#endif
}

KFN struct hd_desc *hd_desc_of(const struct group_dev *g, int rank)
{
    return (struct hd_desc *)node_desc_at(g, rank, g->ht.dispatch_descs, sizeof(struct hd_desc));
}

/* See ht_block_descs(). */
KFN const struct hd_desc *hd_descs(struct agent *ag, const struct group_dev *g)
{
    return (const struct hd_desc *)ht_block_descs(ag, g, g->ht.dispatch_descs, sizeof(struct hd_desc));
}

/* The handle's memory has a routing for it and for these tensors: the caller may have given memory that has not. */
KFN_STEP int ht_check_routing(struct agent *ag, const struct group_dev *g, const struct handle_dev *h, uint64_t key,
                              int64_t ntokens, int phase)
{
    if (h->state->key != key)
        return fail_all(ag, g, KSTATUS_USAGE, phase, -1, 1, 0);
    return h->state->ntokens != ntokens ? fail_all(ag, g, KSTATUS_USAGE, phase, -1, h->state->ntokens, ntokens) : 0;
}

/* A rank has more tokens than the group is for: all ranks know it since the update, and none of them begins. */
KFN int ht_too_many(struct agent *ag, const struct group_dev *g, const struct handle_dev *h)
{
    if (!h->state->too_many)
        return 0;
    if (ag_index(ag) == 0)
        report(ag, g, KSTATUS_OVERFLOW, PHASE_HN_DATA, -1, h->state->too_many, g->max_tokens, 0, 0);
    return 1;
}

/* On a CPU, what goes with the own rows is written for all of them, before the first: few pages are then written again
 * and again, which rows in between would displace from caches and TLB. */
#define HD_EXTRAS_FIRST (AG_ONE_LANE && !AG_STAGED)

/* A row to be written to its places in this node: the own token, or one that came through this rank as a relay. */
struct hd_row {
    const char *data, *scales;
    int64_t scale_stride;
    char *scratch;            /* not NULL: the data is the caller's, and is cast on its way */
    const int32_t *ids, *pos; /* [K] */
    const float *weights;     /* [K] or NULL */
    const int32_t *line;      /* [K] or NULL: EXPERT_MAJOR, the token's lines in source maps */
    int src_rank, src_token;
    const struct hd_desc *descs; /* [R]: the node's descriptors close at hand, or NULL */
    const struct hd_desc *own;   /* not NULL: this rank takes the row from a window, into these tensors; nobody else */
    int bare;                    /* HD_BARE_*: what goes with the row and is written elsewhere */
};
enum {
    HD_BARE_ROW = 1, /* top-k row, weight, source (hd_place_extras, hd_take_extras) */
    HD_BARE_LINE = 2 /* its line of the source map (EXPERT_MAJOR) */
};

KFN const struct hd_desc *hd_desc_for(const struct group_dev *g, const struct hd_row *r, int rank)
{
    return r->own ? r->own : r->descs ? &r->descs[rank] : hd_desc_of(g, rank);
}

/* Is the row written to rank d here? */
KFN int hd_writes_to(const struct group_dev *g, const struct hd_row *r, int d)
{
    if (r->own)
        return d == g->rank;
    return is_local(g, d) && g->mask[d] && !(hd_desc_for(g, r, d)->pulls & HD_PULLS);
}

/* The rank of this node that takes the row for entry k, whose place is `pos`, or -1. The place is read once: in a
 * window that is in use again it may change behind the comparison. */
KFN int hd_taker(const struct group_dev *g, const struct hd_row *r, int k, int pos)
{
    const int d = r->ids[k] < 0 || pos < 0 ? -1 : r->ids[k] / g->local_experts;

    if (d < 0 || !hd_writes_to(g, r, d))
        return -1;
    return pos < hd_desc_for(g, r, d)->capacity ? d : -1; /* the receiver reports the overflow */
}

/* FLAT: entry k of the top-k row at row `pos` of rank d: as row_put_topk(). */
KFN void hd_put_entry(const struct ht_dispatch_params *p, const struct hd_row *r, int d, int pos, int k)
{
    const struct group_dev *g = p->g;
    const struct hd_desc *desc = hd_desc_for(g, r, d);
    const int L = g->local_experts;
    struct index_out idx;

    idx.data = desc->topk_idx ? heap_at(g, d, desc->topk_idx) : NULL;
    idx.is64 = desc->idx & IDX_64;
    row_put_entry(r->ids, r->weights, p->h->state->topk, k, d * L, d * L + L,
                  (p->compact ? TOPK_COMPACT : 0) | (desc->idx & IDX_GLOBAL ? TOPK_GLOBAL : 0), &idx,
                  desc->weights ? (float *)heap_at(g, d, desc->weights) : NULL, pos);
}

/* The top-k rows of the n takers: one lane per (taker, entry). */
KFN void hd_put_topk(struct agent *ag, const struct ht_dispatch_params *p, const struct hd_row *r,
                     const struct pair_set *takers, int n)
{
    const int K = p->h->state->topk;

    AG_ROUNDS(ag, int, i, n *K)
    {
        const struct int_pair taker = pair_set_get(ag, takers, i < n * K ? i / K : 0);
        if (i < n * K)
            hd_put_entry(p, r, taker.a, taker.b, i % K);
    }
}

/* Small outputs that go with the row of entry k at rank d. */
KFN void hd_put_meta(const struct ht_dispatch_params *p, const struct hd_row *r, int d, int k, int64_t pos)
{
    const struct group_dev *g = p->g;
    const struct hd_desc *desc = hd_desc_for(g, r, d);

    /* A rank that the others have masked may read the descriptor of a later operation. */
    if (p->layout == LAYOUT_EXPERT_MAJOR && desc->weights && r->weights)
        ((float *)heap_at(g, d, desc->weights))[pos] = r->weights[k];
    if (desc->src_rank)
        ((int32_t *)heap_at(g, d, desc->src_rank))[pos] = r->src_rank;
    if (desc->src_token)
        ((int32_t *)heap_at(g, d, desc->src_token))[pos] = r->src_token;
    if (p->layout == LAYOUT_FLAT && desc->map && pos < desc->map_lines) {
        int32_t *line = (int32_t *)heap_at(g, d, desc->map) + pos * (p->h->state->topk + 2);
        line[0] = (int32_t)((int64_t)r->src_rank * desc->source_stride + r->src_token);
        line[1] = r->src_rank;
    }
}

/* EXPERT_MAJOR: column i of the token's line in the source map of rank d. */
KFN void hd_put_column(const struct ht_dispatch_params *p, const struct hd_row *r, int d, int at, int i)
{
    const struct group_dev *g = p->g;
    const struct hd_desc *desc = hd_desc_for(g, r, d);
    int32_t *line = (int32_t *)heap_at(g, d, desc->map) + (int64_t)at * (p->h->state->topk + 2);

    if (i == 0)
        line[0] = (int32_t)((int64_t)r->src_rank * desc->source_stride + r->src_token);
    else if (i == 1)
        line[1] = r->src_rank;
    else
        line[i] = r->ids[i - 2] >= 0 && r->ids[i - 2] / g->local_experts == d ? r->pos[i - 2] : -1;
}

/* EXPERT_MAJOR: the token's line at every rank of this node that asks for it; one lane per (rank, column). */
KFN_STEP void hd_put_lines(struct agent *ag, const struct ht_dispatch_params *p, const struct hd_row *r)
{
    const struct group_dev *g = p->g;
    const int K = p->h->state->topk, columns = K + 2;
    struct pair_set lines;
    int n = 0;

    pair_set_begin(&lines);
    AG_ROUNDS(ag, int, k, K)
    {
        const int at = k < K ? r->line[k] : -1;
        int d = at >= 0 && r->ids[k] >= 0 ? r->ids[k] / g->local_experts : -1, before;
        if (d >= 0 && (!hd_writes_to(g, r, d) || !hd_desc_for(g, r, d)->map || at >= hd_desc_for(g, r, d)->map_lines))
            d = -1;
        const int all = ag_vote(ag, d >= 0, &before);
        if (d >= 0)
            pair_set_offer(&lines, n + before, d, at);
        n += all;
    }
    pair_set_settle(ag, &lines);
    AG_ROUNDS(ag, int, i, n *columns)
    {
        const struct int_pair line = pair_set_get(ag, &lines, i < n * columns ? i / columns : 0);
        if (i < n * columns)
            hd_put_column(p, r, line.a, line.b, i % columns);
    }
}

/* Rows of this node that have lost this token are zero. */
KFN_STEP void hd_place_zeros(struct agent *ag, const struct ht_dispatch_params *p, const struct hd_row *r)
{
    const struct group_dev *g = p->g;

    for (int k = 0; k < p->h->state->topk; k++) {
        const int64_t pos = r->pos[k], row = PHANTOM(pos);
        const int d = r->ids[k] < 0 || pos >= -1 ? -1 : r->ids[k] / g->local_experts;
        if (d < 0 || !hd_writes_to(g, r, d) || row >= hd_desc_for(g, r, d)->capacity)
            continue;
        const struct hd_desc *desc = hd_desc_for(g, r, d);
        char *scales = heap_at(g, d, desc->scales + (uint64_t)row * desc->scale_row_stride);
        ag_zero(ag, heap_at(g, d, desc->tokens + (uint64_t)row * desc->token_stride),
                (size_t)p->signature.hidden_bytes);
        AG_EACH(ag, int, i, p->signature.scale_bytes / 4)
        *(uint32_t *)(scales + (uint64_t)i * desc->scale_stride) = 0;
        if (!ag_leader(ag))
            continue;
        if (desc->weights && r->weights)
            ((float *)heap_at(g, d, desc->weights))[row] = 0.0f;
        if (desc->src_rank)
            ((int32_t *)heap_at(g, d, desc->src_rank))[row] = -1;
        if (desc->src_token)
            ((int32_t *)heap_at(g, d, desc->src_token))[row] = -1;
    }
}

#if HD_EXTRAS_FIRST
/* What goes with the row, without the row itself. */
KFN_STEP void hd_place_extras(struct agent *ag, const struct ht_dispatch_params *p, const struct hd_row *r)
{
    const int K = p->h->state->topk;

    (void)ag; /* AG_WRITES names it in the simulation alone */
    for (int k = 0; k < K; k++) {
        const int pos = r->pos[k], d = hd_taker(p->g, r, k, pos);
        if (d < 0)
            continue;
        AG_WRITES(ag, p->g, d);
        hd_put_meta(p, r, d, k, pos);
        for (int i = 0; i < K && p->layout == LAYOUT_FLAT; i++)
            hd_put_entry(p, r, d, pos, i);
    }
}
#endif

/* Reads the row once, writes it to all its places in this node. */
KFN_STEP void hd_place_row(struct agent *ag, const struct ht_dispatch_params *p, const struct hd_row *r)
{
    const struct group_dev *g = p->g;
    const int K = p->h->state->topk;
    struct copy_set set;
    struct word_set words;
    struct pair_set takers;
    int n = 0, topk = 0;

    copy_set_begin(&set);
    word_set_begin(&words);
    pair_set_begin(&takers);
    AG_ROUNDS(ag, int, k, K)
    {
        const int pos = k < K ? r->pos[k] : -1, d = k < K ? hd_taker(g, r, k, pos) : -1;
        int before;
        const int all = ag_vote(ag, d >= 0, &before);
        if (d >= 0) {
            const struct hd_desc *desc = hd_desc_for(g, r, d);
            AG_WRITES(ag, g, d);
            pair_set_offer(&takers, n + before, d, pos);
            copy_set_offer(&set, n + before, heap_at(g, d, desc->tokens + (uint64_t)pos * desc->token_stride));
            word_set_offer(&words, n + before, heap_at(g, d, desc->scales + (uint64_t)pos * desc->scale_row_stride),
                           (int64_t)desc->scale_stride);
            if (!(r->bare & HD_BARE_ROW)) {
                hd_put_meta(p, r, d, k, pos);
                topk |= desc->topk_idx || desc->weights;
            }
        }
        n += all;
    }
    copy_set_settle(ag, &set);
    if (p->signature.scale_bytes)
        word_set_settle(ag, &words);
    if (r->scratch)
        ag_cast_fp8_many(ag, &set, &words, n, r->scratch, p->in.scale_ue8m0, p->in.round_scale, r->data, p->in.dtype,
                         p->in.hidden);
    else
        ag_copy_many(ag, &set, n, r->data, (size_t)p->signature.hidden_bytes);
    if (p->signature.scale_bytes && !r->scratch)
        ag_copy_words(ag, &words, n, r->scales, r->scale_stride, p->signature.scale_bytes / 4);
    if (p->layout == LAYOUT_FLAT && ag_any(ag, topk)) {
        pair_set_settle(ag, &takers);
        hd_put_topk(ag, p, r, &takers, n);
    }
    if (r->line && p->layout == LAYOUT_EXPERT_MAJOR && !(r->bare & HD_BARE_LINE))
        hd_put_lines(ag, p, r);
    if (p->drop & DROP_TOKENS)
        hd_place_zeros(ag, p, r);
}

#endif
