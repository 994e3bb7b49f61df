/* SPDX-License-Identifier: Apache-2.0 */
/* High-throughput combine through windows (ht_window.h): a rank writes its rows into the windows of their readers. */
#ifndef EPX_KERNEL_HT_SUM_WINDOW_H
#define EPX_KERNEL_HT_SUM_WINDOW_H

#include "kernel/ht_take.h"

/* The tokens of `rank`: how many; ids[M][K] and rows[M][K] follow. */
KFN int32_t *hc_tokens_of(const struct group_dev *g, int rank)
{
    return (int32_t *)heap_at(g, rank, g->ht.window_routes);
}

KFN int32_t *hc_routes_of(const struct group_dev *g, int rank)
{
    return hc_tokens_of(g, rank) + HW_HEADER_BYTES / 4;
}

/* Between nodes, where the rounds of its tokens begin: their number and one more. */
KFN int32_t *hc_round_tokens_of(const struct group_dev *g, int rank)
{
    return hc_routes_of(g, rank) + 2 * (int64_t)g->max_tokens * g->max_topk;
}

/* In a number of a row: it is one that the rank sums as a relay. */
#define HC_RELAYED (1 << 30)

/* Where row number i of the windows of `rank` is. */
KFN char *hc_window_row(const struct group_dev *g, int rank, int64_t i)
{
    const uint64_t start = i & HC_RELAYED ? g->ht.relay_window : g->ht.window;
    return heap_at(g, rank, start + (uint64_t)(i & ~(int64_t)HC_RELAYED) * g->ht.cpitch);
}

/* Of an own token: entry (token, k) of all tokens, modulo two windows. Those of two rounds, one behind the other, have
 * room there too. */

KFN int64_t hc_window_number(const struct group_dev *g, const struct handle_dev *h, int64_t entry)
{
    return entry % ((int64_t)2 * g->ht.sum_tokens * h->state->topk);
}

/* As a relay: entry 0 of row i of (source number j, round r). */
KFN int64_t hc_relayed_number(const struct group_dev *g, const struct handle_dev *h, int j, int r, int i)
{
    const int64_t row = ((int64_t)(r % 2) * g->relay_max + j) * g->ht.round_rows + i;
    return HC_RELAYED + row * h->state->topk;
}

/* Step 0: what owners of rows have to know of the own tokens. */
KFN_STEP void hc_show_routes(struct agent *ag, const struct ht_combine_params *p)
{
    const struct group_dev *g = p->g;
    const struct handle_dev *h = p->h;
    const int64_t entries = (int64_t)h->state->ntokens * h->state->topk;
    int32_t *routes = hc_routes_of(g, g->rank);

    if (ag_index(ag) == 0 && ag_leader(ag)) {
        hc_tokens_of(g, g->rank)[0] = h->state->ntokens;
        hc_tokens_of(g, g->rank)[1] = h->state->rounds;
    }
    AG_EACH_ALL(ag, int, r, g->nnodes > 1 ? h->state->rounds + 1 : 0)
    hc_round_tokens_of(g, g->rank)[r] = ht_round_token(g, h, r);
    AG_EACH_ALL(ag, int64_t, i, entries)
    {
        routes[i] = h->ids[i];
        routes[(int64_t)g->max_tokens * g->max_topk + i] = h->pos[i];
    }
}

/* Row `row` of the caller's tensors to row number `number` of the windows of rank s. */
KFN void hc_push_row(struct agent *ag, const struct ht_combine_params *p, int s, int64_t number, int32_t row)
{
    const int n = p->layout == LAYOUT_FLAT ? p->h->state->topk : 1;
    char *to = hc_window_row(p->g, s, number);

    AG_WRITES(ag, p->g, s);
    ag_copy(ag, to, p->own_tokens + (int64_t)row * p->stride, (size_t)p->signature.hidden_bytes);
    if (p->signature.extra & SIGNATURE_WEIGHTS)
        AG_EACH(ag, int, i, n)
    ((float *)(to + row_scales_at(&p->signature)))[i] = p->own_weights[(int64_t)row * n + i];
}

/* Items whose rows are asked for, K entries each: ids[K] of item i are at ids + i * stride, the rows behind them. */
struct hc_asked {
    const int32_t *ids;
    int64_t stride, rows;
    int64_t number; /* of the first entry, in the windows of who asks */
};

/* The rows of this rank for `items` items that rank s asks for: an agent looks at several entries together. `before`
 * such parts are shared out already; returns how many are then. */
KFN_STEP int64_t hc_push_items(struct agent *ag, const struct ht_combine_params *p, int s, struct hc_asked asked,
                               int64_t items, int64_t before)
{
    const struct group_dev *g = p->g;
    const int K = p->h->state->topk, L = g->local_experts;
    const int64_t last = items * K, parts = (last + HW_ENTRIES - 1) / HW_ENTRIES;

    for (int64_t part = ht_first_item(ag, before); part < parts; part += ag_count(ag)) {
        const int64_t at = part * HW_ENTRIES;
        const int many = last - at < HW_ENTRIES ? (int)(last - at) : HW_ENTRIES;
        struct pair_set found;
        int n = 0;
        pair_set_begin(&found);
        AG_ROUNDS(ag, int, e, many)
        {
            const int32_t *entry = asked.ids + (at + (e < many ? e : 0)) / K * asked.stride + (at + e) % K;
            const int32_t id = e < many ? *entry : -1, row = id < 0 || id / L != g->rank ? -1 : entry[asked.rows];
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
            hc_push_row(ag, p, s, asked.number + at + entry.a, entry.b);
        }
    }
    return before + parts;
}

/* The rows of this rank for tokens [first, end) of rank s. `before`: as in hc_push_items(). */
KFN int64_t hc_push_tokens(struct agent *ag, const struct ht_combine_params *p, int s, int first, int end,
                           int64_t before)
{
    const struct group_dev *g = p->g;
    const int64_t K = p->h->state->topk, two = (int64_t)2 * g->ht.sum_tokens;
    struct hc_asked asked;

    while (first < end) { /* places begin again behind two windows */
        const int64_t room = two - first % two, many = end - first < room ? end - first : room;
        asked.ids = hc_routes_of(g, s) + first * K;
        asked.stride = K;
        asked.rows = (int64_t)g->max_tokens * g->max_topk;
        asked.number = hc_window_number(g, p->h, first * K);
        before = hc_push_items(ag, p, s, asked, many, before);
        first += (int)many;
    }
    return before;
}

/* What this rank has for window k of every rank of the node, where it is in no reach of them. */
KFN void hc_push_windows(struct agent *ag, const struct ht_combine_params *p, int k)
{
    const struct group_dev *g = p->g;
    const int first = k * g->ht.sum_tokens;
    int64_t before = 0;

    for (int i = 0; i < g->node_size; i++) {
        const int s = hw_rank(g, i), n = g->mask[s] ? *hc_tokens_of(g, s) : 0;
        before = hc_push_tokens(ag, p, s, first, first + g->ht.sum_tokens < n ? first + g->ht.sum_tokens : n, before);
    }
}

/* Between nodes: for round r of the own tokens of every rank of the node. */
KFN void hc_push_rounds(struct agent *ag, const struct ht_combine_params *p, int r)
{
    const struct group_dev *g = p->g;
    int64_t before = 0;

    for (int i = 0; i < g->node_size && r >= 0; i++) {
        const int s = hw_rank(g, i);
        if (g->mask[s] && r < hc_tokens_of(g, s)[1])
            before = hc_push_tokens(ag, p, s, hc_round_tokens_of(g, s)[r], hc_round_tokens_of(g, s)[r + 1], before);
    }
}

/* And for round r of all ranks elsewhere, to their relays. */
KFN void hc_push_relays(struct agent *ag, const struct ht_combine_params *p, int r)
{
    const struct group_dev *g = p->g;
    struct hc_asked asked;
    int64_t before = 0;

    asked.stride = (int64_t)ht_route_bytes(p->h) / 4;
    asked.rows = p->h->state->topk;
    for (int i = 0; i < g->nranks && r >= 0; i++) {
        const int s = (g->rank + i) % g->nranks;
        if (is_local(g, s) || !g->mask[s])
            continue;
        const int relay = g->relay_of[s], j = g->relay_number[s];
        asked.ids = (const int32_t *)(heap_at(g, relay, ht_shown_block(g, j, r)) + HT_HEADER_BYTES) + 1;
        asked.number = hc_relayed_number(g, p->h, j, r, 0);
        before = hc_push_items(ag, p, relay, asked, *hw_shown_rows(g, relay, r, j), before);
    }
}

/* Step k: what this rank writes into windows of others, if it does. */
KFN_STEP int hc_push(struct agent *ag, const struct ht_combine_params *p, int k)
{
    const struct group_dev *g = p->g;
    int failed;

    if (!p->tokens && !p->weights)
        return 0;
    failed = writes_begin(ag, g, PHASE_HC_STEP);
    if (!failed && p->nodes) {
        hc_push_relays(ag, p, k - 1);
        hc_push_rounds(ag, p, k - 2);
    } else if (!failed) {
        hc_push_windows(ag, p, k - 1);
    }
    if (!failed)
        writes_end(ag, g);
    return block_decides(ag, failed);
}

#endif
