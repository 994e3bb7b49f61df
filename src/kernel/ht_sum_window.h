/* SPDX-License-Identifier: Apache-2.0 */
/* High-throughput combine through windows (ht_window.h): a rank writes its rows into the windows of their readers. */
#ifndef EPX_KERNEL_HT_SUM_WINDOW_H
#define EPX_KERNEL_HT_SUM_WINDOW_H

#include "kernel/ht_window.h"

/* The tokens of `rank`: how many; ids[M][K] and rows[M][K] follow. */
KFN int32_t *hc_tokens_of(const struct group_dev *g, int rank)
{
    return (int32_t *)heap_at(g, rank, g->ht.window_routes);
}

KFN int32_t *hc_routes_of(const struct group_dev *g, int rank)
{
    return hc_tokens_of(g, rank) + HW_HEADER_BYTES / 4;
}

/* Where row number i of the window of `rank` is: entry (token, k) of all its tokens, modulo two halves. */
KFN char *hc_window_row(const struct group_dev *g, int rank, int64_t i)
{
    return heap_at(g, rank, g->ht.window + (uint64_t)i * g->ht.cpitch);
}

KFN int64_t hc_window_number(const struct group_dev *g, const struct handle_dev *h, int64_t entry)
{
    return entry % ((int64_t)2 * g->ht.sum_tokens * h->state->topk);
}

/* Step 0: what owners of rows have to know of the own tokens. */
KFN_STEP void hc_show_routes(struct agent *ag, const struct ht_combine_params *p)
{
    const struct group_dev *g = p->g;
    const struct handle_dev *h = p->h;
    const int64_t entries = (int64_t)h->state->ntokens * h->state->topk;
    int32_t *routes = hc_routes_of(g, g->rank);

    if (ag_index(ag) == 0 && ag_leader(ag))
        *hc_tokens_of(g, g->rank) = h->state->ntokens;
    AG_EACH_ALL(ag, int64_t, i, entries)
    {
        routes[i] = h->ids[i];
        routes[(int64_t)g->max_tokens * g->max_topk + i] = h->pos[i];
    }
}

/* Row `row` of the caller's tensors to entry number `entry` of rank s. */
KFN void hc_push_row(struct agent *ag, const struct ht_combine_params *p, int s, int64_t entry, int32_t row)
{
    const int n = p->layout == LAYOUT_FLAT ? p->h->state->topk : 1;
    char *to = hc_window_row(p->g, s, hc_window_number(p->g, p->h, entry));

    AG_WRITES(ag, p->g, s);
    ag_copy(ag, to, p->own_tokens + (int64_t)row * p->stride, (size_t)p->signature.hidden_bytes);
    if (p->signature.extra & SIGNATURE_WEIGHTS)
        AG_EACH(ag, int, i, n)
    ((float *)(to + row_scales_at(&p->signature)))[i] = p->own_weights[(int64_t)row * n + i];
}

/* The rows of this rank for tokens [first, end) of rank s: an agent looks at several entries together. */
KFN_STEP void hc_push_to(struct agent *ag, const struct ht_combine_params *p, int s, int first, int end)
{
    const struct group_dev *g = p->g;
    const int K = p->h->state->topk, L = g->local_experts;
    const int32_t *ids = hc_routes_of(g, s), *rows = ids + (int64_t)g->max_tokens * g->max_topk;
    const int64_t last = (int64_t)end * K;

    for (int64_t at = (int64_t)first * K + (int64_t)ag_index(ag) * HW_ENTRIES; at < last;
         at += (int64_t)ag_count(ag) * HW_ENTRIES) {
        const int many = last - at < HW_ENTRIES ? (int)(last - at) : HW_ENTRIES;
        struct pair_set found;
        int n = 0;
        pair_set_begin(&found);
        AG_ROUNDS(ag, int, e, many)
        {
            const int32_t id = e < many ? ids[at + e] : -1, row = id < 0 || id / L != g->rank ? -1 : rows[at + e];
            const int mine = row >= 0 && row < p->desc.rows;
            int before;
            const int all = ag_vote(ag, mine, &before);
            if (mine)
                pair_set_offer(&found, n + before, e, row);
            n += all;
        }
        pair_set_settle(ag, &found);
        for (int i = 0; i < n; i++) {
            const struct int_pair entry = pair_set_get(ag, &found, i);
            hc_push_row(ag, p, s, at + entry.a, entry.b);
        }
    }
}

/* What this rank has for window k of every rank of the node, where it is in no reach of them. */
KFN_STEP int hc_push_window(struct agent *ag, const struct ht_combine_params *p, int k)
{
    const struct group_dev *g = p->g;
    const int first = k * g->ht.sum_tokens;
    int failed;

    if (!p->tokens && !p->weights)
        return 0;
    failed = writes_begin(ag, g, PHASE_HC_STEP);
    for (int i = 0; i < g->node_size && !failed; i++) {
        const int s = hw_rank(g, i), n = g->mask[s] ? *hc_tokens_of(g, s) : 0;
        const int end = first + g->ht.sum_tokens < n ? first + g->ht.sum_tokens : n;
        hc_push_to(ag, p, s, first, end);
    }
    if (!failed)
        writes_end(ag, g);
    return block_decides(ag, failed);
}

#endif
