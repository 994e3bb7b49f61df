/* SPDX-License-Identifier: Apache-2.0 */
/*
 * High-throughput combine: which ranks of a node hold the rows of a token, in which order they are added, and the
 * weights that return with them. The protocol is in ht_combine.h.
 */
#ifndef EPX_KERNEL_HT_HOLDERS_H
#define EPX_KERNEL_HT_HOLDERS_H

#include "kernel/ht_dispatch.h"
#include "kernel/ht_sum_window.h"

KFN struct hc_desc *hc_desc_of(const struct group_dev *g, int rank)
{
    return (struct hc_desc *)node_desc_at(g, rank, g->ht.combine_descs, sizeof(struct hc_desc));
}

/* The descriptors of the node, by rank, for the sums that follow; *descs NULL: where they are. Non-zero: failed.
 *
 * With masks the others may have gone on without this rank, which slept: what it reads of them is of a later operation
 * then, and no address follows from it. They set its abort word first. On a GPU nobody looks, see lc_is_stale(). */
KFN_STEP int hc_take_descs(struct agent *ag, const struct group_dev *g, const struct hc_desc **descs)
{
#if AG_ONE_LANE
    struct hc_desc *copy = NULL;

    *descs = NULL;
    if (!has_masks(g))
        return 0;
    copy = (struct hc_desc *)ag_scratch(ag, (size_t)g->nranks * sizeof(*copy));
    if (!copy)
        return fail_all(ag, g, KSTATUS_MEMORY, PHASE_HC_DATA, -1, g->nranks, 0);
    for (int i = 0; i < g->node_size; i++)
        if (is_active(g, node_rank(g, i))) /* the heap of one that has gone is not mapped */
            copy[node_rank(g, i)] = *hc_desc_of(g, node_rank(g, i));
    *descs = copy;
    return ag_look_behind(&control_of(g, g->rank)->abort_word)
               ? wait_failed(ag, g, WAIT_ABORTED, PHASE_HC_DATA, -1, -1, 0, 0)
               : 0;
#else
    *descs = (const struct hc_desc *)ht_block_descs(ag, g, g->ht.combine_descs, sizeof(struct hc_desc));
    return 0;
#endif
}

KFN const struct hc_desc *hc_desc_for(const struct group_dev *g, const struct hc_desc *descs, int rank)
{
    return descs ? &descs[rank] : hc_desc_of(g, rank);
}

KFN const char *hc_row_at(const struct group_dev *g, int rank, const struct hc_desc *desc, int32_t row)
{
    if (desc->tokens_in == IN_WINDOW)
        return hc_window_row(g, g->rank, row);
    return reach_at(g, rank, desc->tokens_in, desc->tokens + (uint64_t)row * desc->token_stride);
}

/* The number of the row of entry k: at its rank, or in the own window. */
KFN int32_t hc_row_number(const struct ht_combine_params *p, const struct hc_desc *desc, const int32_t *ids,
                          const int32_t *pos, int k)
{
    if (desc->tokens_in != IN_WINDOW || pos[k] & HC_RELAYED)
        return pos[k];
    return (int32_t)hc_window_number(p->g, p->h, ids - p->h->ids + k);
}

/* The weights of that row: one, or (FLAT) K. */
KFN const float *hc_weights_at(const struct ht_combine_params *p, int rank, const struct hc_desc *desc, int32_t row)
{
    const int n = p->layout == LAYOUT_EXPERT_MAJOR ? 1 : p->h->state->topk;

    if (desc->tokens_in == IN_WINDOW)
        return (const float *)(hc_window_row(p->g, p->g->rank, row) + row_scales_at(&p->signature));
    return (const float *)reach_at(p->g, rank, desc->weights_in, desc->weights) + (int64_t)row * n;
}

/* In a compact top-k row of rank d, the place of this token's k-th id. */
KFN int hc_compact_place(const int32_t *ids, int K, int k, int local_experts)
{
    const int d = ids[k] / local_experts;
    int place = 0;
    for (int j = 0; j < K; j++) {
        if (ids[j] < 0 || ids[j] / local_experts != d)
            continue;
        place += ids[j] < ids[k] || (ids[j] == ids[k] && j < k);
    }
    return place;
}

/* The descriptor of the rank of this node that holds the row of (ids[k], pos[k]); NULL if there is no such row. */
KFN const struct hc_desc *hc_row_desc(const struct group_dev *g, const struct hc_desc *descs, const int32_t *ids,
                                      const int32_t *pos, int k, int *rank)
{
    const int d = ids[k] < 0 || pos[k] < 0 ? -1 : ids[k] / g->local_experts;

    if (d < 0 || !is_local(g, d) || !g->mask[d])
        return NULL;
    const struct hc_desc *desc = hc_desc_for(g, descs, d);
    *rank = d;
    /* Else rank d has too few rows, and has ended the operation. What a relay finds in its window has no row there. */
    return pos[k] < desc->rows || pos[k] & HC_RELAYED ? desc : NULL;
}

/* The weight that returns to place k of a token from this node: FLAT in k-order sums over ranks, ascending. */
KFN_STEP float hc_node_weight(const struct ht_combine_params *p, const struct hc_desc *descs, const int32_t *ids,
                              const int32_t *pos, int k)
{
    const struct group_dev *g = p->g;
    const int K = p->h->state->topk, L = g->local_experts;
    float sum = 0.0f;
    int last = -1;

    for (;;) {
        int next = -1, at = 0, d = 0;
        for (int j = 0; j < K; j++) {
            const int one = p->layout == LAYOUT_EXPERT_MAJOR ? j == k && last < 0 : 1;
            if (!one || !hc_row_desc(g, descs, ids, pos, j, &d) || d <= last || (next >= 0 && d >= next))
                continue;
            next = d;
            at = j;
        }
        if (next < 0)
            return sum;
        const struct hc_desc *desc = hc_desc_for(g, descs, next);
        const float *w = hc_weights_at(p, next, desc, hc_row_number(p, desc, ids, pos, at));
        if (p->layout == LAYOUT_EXPERT_MAJOR)
            return w[0];
        if (!p->compact)
            sum += w[k];
        else if (ids[k] >= 0 && ids[k] / L == next)
            sum += w[hc_compact_place(ids, K, k, L)];
        last = next;
    }
}

/* SUM_TOPK_ORDER: the weight of place k of a token, from the rank of its expert alone. */
KFN float hc_owner_weight(const struct ht_combine_params *p, const struct hc_desc *descs, const int32_t *ids,
                          const int32_t *pos, int k)
{
    const struct group_dev *g = p->g;
    const int K = p->h->state->topk, L = g->local_experts;

    for (int j = 0; j < K && ids[k] >= 0; j++) { /* FLAT: the row is that of the rank's first entry */
        int d = 0;
        if (ids[j] < 0 || ids[j] / L != ids[k] / L || (p->layout == LAYOUT_EXPERT_MAJOR && j != k))
            continue;
        const struct hc_desc *desc = hc_row_desc(g, descs, ids, pos, j, &d);
        if (!desc)
            continue;
        const float *w = hc_weights_at(p, d, desc, hc_row_number(p, desc, ids, pos, j));
        if (p->layout == LAYOUT_EXPERT_MAJOR)
            return w[0];
        return w[p->compact ? hc_compact_place(ids, K, k, L) : k];
    }
    return 0.0f;
}

KFN float hc_weight(const struct ht_combine_params *p, const struct hc_desc *descs, const int32_t *ids,
                    const int32_t *pos, int k)
{
    return p->sum & SUM_TOPK_ORDER ? hc_owner_weight(p, descs, ids, pos, k) : hc_node_weight(p, descs, ids, pos, k);
}

/* The last entry of a token whose expert is on rank d. */
KFN int hc_last_entry(const int32_t *ids, int K, int d, int local_experts)
{
    int last = K - 1;

    while (last > 0 && (ids[last] < 0 || ids[last] / local_experts != d))
        last--;
    return last;
}

/* Do the rows of a rank have one place together? Else each has its own. */
KFN int hc_by_rank(const struct ht_combine_params *p)
{
    return p->layout == LAYOUT_FLAT || p->sum & SUM_ROUND_RANKS;
}

/* SUM_TOPK_ORDER: the place of entry k, whose expert is on rank d. */
KFN int hc_place(const struct ht_combine_params *p, const int32_t *ids, int d, int k)
{
    return hc_by_rank(p) ? hc_last_entry(ids, p->h->state->topk, d, p->g->local_experts) : k;
}

#define HC_NO_ROW INT32_MIN

/* Entry by entry of a token, or of several: the row in this node, or HC_NO_ROW; the rank of its expert, or -1. */
KFN void hc_gather_ranks(struct agent *ag, const struct ht_combine_params *p, const struct hc_desc *descs,
                         const int32_t *ids, const int32_t *pos, int entries, struct pair_set *ranks)
{
    pair_set_begin(ranks);
    AG_EACH(ag, int, k, entries)
    {
        int d = -1;
        const struct hc_desc *desc = hc_row_desc(p->g, descs, ids, pos, k, &d);
        pair_set_offer(ranks, k, desc ? hc_row_number(p, desc, ids, pos, k) : HC_NO_ROW,
                       ids[k] < 0 ? -1 : ids[k] / p->g->local_experts);
    }
    pair_set_settle(ag, ranks);
}

/* SUM_TOPK_ORDER of FLAT: as hc_holders(), each rank in the place of its last entry. `only`: a place, or -1 for all. */
KFN_STEP int hc_holders_last(struct agent *ag, const struct ht_combine_params *p, const struct hc_desc *descs,
                             const int32_t *ids, const int32_t *pos, int only, struct pair_set *holders)
{
    const int K = p->h->state->topk;
    struct pair_set ranks; /* of the entries of a rank one has the row */
    int n = 0;

    hc_gather_ranks(ag, p, descs, ids, pos, K, &ranks);
    pair_set_begin(holders);
    AG_ROUNDS(ag, int, k, K)
    {
        const int rank = pair_set_get(ag, &ranks, k < K ? k : 0).b;
        int row = HC_NO_ROW, later = 0, before;
        for (int j = 0; j < K; j++) {
            const struct int_pair other = pair_set_get(ag, &ranks, j);
            row = other.b == rank && other.a != HC_NO_ROW ? other.a : row;
            later |= other.b == rank && j > k;
        }
        const int counts = k < K && rank >= 0 && !later && row != HC_NO_ROW && (only < 0 || k == only);
        const int all = ag_vote(ag, counts, &before);
        if (counts)
            pair_set_offer(holders, n + before, rank, row);
        n += all;
    }
    pair_set_settle(ag, holders);
    return n;
}

/* With p->sum: as hc_holders(), in the order of places, and of k inside a place. SUM_TOPK_ORDER: hc_place(); else the
 * rank. `only`: a place, or -1 for all. Bit i of *ends: row i is the last of a sum to be rounded. */
KFN_STEP int hc_holders_placed(struct agent *ag, const struct ht_combine_params *p, const struct hc_desc *descs,
                               const int32_t *ids, const int32_t *pos, int only, struct pair_set *holders,
                               uint32_t *ends)
{
    const int K = p->h->state->topk, topk = p->sum & SUM_TOPK_ORDER, by_last = topk && hc_by_rank(p);
    struct pair_set ranks, keys; /* a key orders the entries; -1: none */
    int64_t last_rows = 0;
    int n = 0;

    hc_gather_ranks(ag, p, descs, ids, pos, K, &ranks);
    pair_set_begin(&keys);
    pair_set_begin(holders);
    /* The place of an entry is hc_place(): the lanes look at each other's ranks rather than at memory. */
    AG_ROUNDS(ag, int, k, K)
    {
        const struct int_pair mine = pair_set_get(ag, &ranks, k < K ? k : 0);
        int place = topk ? k : mine.b;
        for (int j = 0; j < K && by_last; j++)
            place = pair_set_get(ag, &ranks, j).b == mine.b && j > place ? j : place;
        if (k < K)
            pair_set_offer(&keys, k,
                           mine.a == HC_NO_ROW || (only >= 0 && place != only) ? -1 : place * KERNEL_MAX_TOPK + k, 0);
    }
    pair_set_settle(ag, &keys);
    AG_ROUNDS(ag, int, k, K)
    {
        const struct int_pair mine = pair_set_get(ag, &ranks, k < K ? k : 0);
        const int own = pair_set_get(ag, &keys, k < K ? k : 0).a;
        int place = 0, later = 0, before;
        for (int j = 0; j < K; j++) {
            const int key = pair_set_get(ag, &keys, j).a;
            place += key >= 0 && key < own;
            later |= key > own && key / KERNEL_MAX_TOPK == own / KERNEL_MAX_TOPK;
        }
        n += ag_vote(ag, k < K && own >= 0, &before);
        if (k < K && own >= 0) {
            pair_set_offer(holders, place, mine.b, mine.a);
            last_rows |= later ? 0 : (int64_t)1 << place; /* the rank's last entry may have been dropped */
        }
    }
    pair_set_settle(ag, holders);
    *ends = p->layout == LAYOUT_EXPERT_MAJOR ? (uint32_t)ag_sum(ag, last_rows) : 0; /* see hc_reduce() */
    return n;
}

/* The rows of a token in this node, in the order in which they are summed: by ascending rank (FLAT) or k
 * (EXPERT_MAJOR). Place i has the rank and the row there; returns how many there are. */
KFN_STEP int hc_holders(struct agent *ag, const struct ht_combine_params *p, const struct hc_desc *descs,
                        const int32_t *ids, const int32_t *pos, struct pair_set *holders)
{
    const int K = p->h->state->topk, flat = p->layout == LAYOUT_FLAT;
    struct pair_set all;
    int n = 0;

    pair_set_begin(&all);
    pair_set_begin(holders);
    AG_EACH(ag, int, k, K)
    {
        int d = -1;
        const struct hc_desc *desc = hc_row_desc(p->g, descs, ids, pos, k, &d);
        pair_set_offer(&all, k, desc ? d : -1, desc ? hc_row_number(p, desc, ids, pos, k) : -1);
    }
    pair_set_settle(ag, &all);
    AG_ROUNDS(ag, int, k, K)
    {
        const struct int_pair mine = pair_set_get(ag, &all, k < K ? k : 0);
        int place = 0, before;
        for (int j = 0; j < K; j++) {
            const int other = pair_set_get(ag, &all, j).a;
            place += other >= 0 && (flat ? other < mine.a : j < k);
        }
        n += ag_vote(ag, k < K && mine.a >= 0, &before);
        if (k < K && mine.a >= 0)
            pair_set_offer(holders, place, mine.a, mine.b);
    }
    pair_set_settle(ag, holders);
    return n;
}

/* Offers those rows to the set, from place `first` on. */
KFN void hc_offer_rows(struct agent *ag, const struct ht_combine_params *p, const struct hc_desc *descs,
                       const struct pair_set *holders, int n, struct sum_set *set, int first)
{
    AG_ROUNDS(ag, int, i, n)
    {
        const struct int_pair row = pair_set_get(ag, holders, i < n ? i : 0);
        if (i < n)
            sum_set_offer(set, first + i, hc_row_at(p->g, row.a, hc_desc_for(p->g, descs, row.a), row.b), 1.0f, 0);
    }
}

/* Sums rows, or sums of ranks if `ends` has any of more than one row. A step of its own, with the set by value: its
 * callers have many values in registers, which the sums need. */
KFN_STEP void hc_reduce(struct agent *ag, const struct ht_combine_params *p, char *out, struct sum_set set, int n,
                        uint32_t ends, const char *bias0, const char *bias1)
{
    if (p->sum & SUM_MXFP8)
        ag_reduce_mxfp8(ag, out, p->hidden, &set, n, ends, bias0, bias1);
    else if (p->layout == LAYOUT_EXPERT_MAJOR && p->sum & SUM_ROUND_RANKS && ends != (uint32_t)(((uint64_t)1 << n) - 1))
        ag_reduce_groups(ag, out, p->dtype, p->hidden, &set, n, ends, bias0, bias1);
    else
        ag_reduce(ag, out, p->dtype, p->hidden, &set, n, 0, bias0, bias1);
}

/* The sum of the rows of a token in this node, all or those of one place. Returns how many there were. */
KFN int hc_sum_node(struct agent *ag, const struct ht_combine_params *p, const struct hc_desc *descs,
                    const int32_t *ids, const int32_t *pos, int only, char *out, const char *bias0, const char *bias1)
{
    struct pair_set holders;
    struct sum_set set;
    uint32_t ends = 0;
    int n;

    if (p->layout == LAYOUT_FLAT && p->sum & SUM_TOPK_ORDER)
        n = hc_holders_last(ag, p, descs, ids, pos, only, &holders);
    else if (p->sum)
        n = hc_holders_placed(ag, p, descs, ids, pos, only, &holders, &ends);
    else
        n = hc_holders(ag, p, descs, ids, pos, &holders);

    sum_set_begin(&set);
    hc_offer_rows(ag, p, descs, &holders, n, &set, 0);
    sum_set_settle(ag, &set);
    hc_reduce(ag, p, out, set, n, ends, bias0, bias1);
    return n;
}

#endif
