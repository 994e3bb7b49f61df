/* SPDX-License-Identifier: Apache-2.0 */
/*
 * High-throughput combine: the weights that return with the sums (out->topk_weights), of the own tokens.
 * Inside a node the lanes of an agent find those of several tokens together; between nodes each lane has one.
 */
#ifndef EPX_KERNEL_HT_RETURN_WEIGHTS_H
#define EPX_KERNEL_HT_RETURN_WEIGHTS_H

#include "kernel/ht_returned.h"

/* The weight of (t, k) that node by node, ascending, returned. */
KFN float hc_token_weight(const struct ht_combine_params *p, const struct hc_desc *descs, int r, int64_t t, int k)
{
    const struct group_dev *g = p->g;
    const int K = p->h->state->topk, all = hc_back_before(p, r, t, g->nnodes);
    const int own = hc_back_before(p, r, t, g->node);
    float sum = 0.0f;

    for (int place = 0; place <= all; place++) {
        int n = 0;
        if (place == own)
            sum += hc_weight(p, descs, p->h->ids + t * K, p->h->pos + t * K, k);
        for (int e = 0; e < K && place < all; e++) {
            const char *row = hc_back_row(p, r, t, e, &n);
            if (row && hc_back_before(p, r, t, n) == place)
                sum += ((const float *)(row + row_scales_at(&p->signature)))[k];
        }
    }
    return sum;
}

#define HC_WEIGHTS 32     /* (token, k) whose weights are found together: the places of a pair_set */
#define HC_WEIGHT_ROUND 8 /* rows of a token whose weights are loaded together */

/* Of one holder's row, the weight for place k of the token; 0 where that row has none for it. Where it is not added to
 * others, 0 is added: -0 returns as +0 in every layout. */
KFN float hc_row_weight(const struct ht_combine_params *p, const struct hc_desc *descs, const int32_t *ids, int k,
                        struct int_pair holder)
{
    const struct hc_desc *desc = hc_desc_for(p->g, descs, holder.a);
    const float *w = hc_weights_at(p, holder.a, desc, holder.b);
    const int K = p->h->state->topk, L = p->g->local_experts;

    if (p->layout == LAYOUT_EXPERT_MAJOR)
        return w[0];
    if (!p->compact)
        return w[k];
    if (ids[k] < 0 || ids[k] / L != holder.a)
        return 0.0f;
    return w[hc_compact_place(ids, K, k, L)];
}

/* The holders of several tokens, each token's by ascending rank from place (its number) * K on: as hc_holders, with a
 * lane for each pair of all of them. `all` has them in the order of k. */
KFN void hc_weight_holders(struct agent *ag, const struct ht_combine_params *p, const struct hc_desc *descs,
                           const int32_t *ids, const int32_t *pos, int items, struct pair_set *all,
                           struct pair_set *sorted)
{
    const int K = p->h->state->topk;

    pair_set_begin(all);
    pair_set_begin(sorted);
    AG_EACH(ag, int, i, items)
    {
        int d = -1;
        const struct hc_desc *desc = hc_row_desc(p->g, descs, ids, pos, i, &d);
        pair_set_offer(all, i, desc ? d : -1, desc ? hc_row_number(p, desc, ids, pos, i) : -1);
    }
    pair_set_settle(ag, all);
    AG_ROUNDS(ag, int, i, items)
    {
        const int at = i < items ? i : 0, base = at - at % K;
        const struct int_pair mine = pair_set_get(ag, all, at);
        int place = base;
        for (int j = 0; j < K; j++) {
            const int other = pair_set_get(ag, all, base + j).a;
            place += other >= 0 && other < mine.a;
        }
        if (i < items && mine.a >= 0)
            pair_set_offer(sorted, place, mine.a, mine.b);
    }
    pair_set_settle(ag, sorted);
}

/* What item i gets: FLAT sums over the token's rows, by ascending rank; EXPERT_MAJOR has one row. All loads of a round
 * are in flight together. */
KFN float hc_item_weight(struct agent *ag, const struct ht_combine_params *p, const struct hc_desc *descs,
                         const int32_t *ids, int i, int items, const struct pair_set *all,
                         const struct pair_set *sorted)
{
    const int K = p->h->state->topk, at = i < items ? i : 0, k = at % K, base = at - k;
    const struct int_pair mine = pair_set_get(ag, all, at);
    float sum = 0.0f;
    int n = 0;

    if (p->layout == LAYOUT_EXPERT_MAJOR)
        return i < items && mine.a >= 0 ? 0.0f + hc_row_weight(p, descs, ids + base, k, mine) : 0.0f;
    for (int j = 0; j < K; j++)
        n += pair_set_get(ag, all, base + j).a >= 0;
    for (int first = 0; first < K; first += HC_WEIGHT_ROUND) {
        float weight[HC_WEIGHT_ROUND];
        AG_UNROLL
        for (int j = 0; j < HC_WEIGHT_ROUND; j++) {
            const struct int_pair holder = pair_set_get(ag, sorted, first + j < K ? base + first + j : base);
            weight[j] = i < items && first + j < n ? hc_row_weight(p, descs, ids + base, k, holder) : 0.0f;
        }
        AG_UNROLL
        for (int j = 0; j < HC_WEIGHT_ROUND; j++)
            if (first + j < n)
                sum += weight[j];
    }
    return sum;
}

/* One node, the weights of tokens [first, end): those of HC_WEIGHTS / K tokens are found by an agent together, with a
 * lane for each. */
KFN_STEP void hc_node_weights(struct agent *ag, const struct ht_combine_params *p, const struct hc_desc *descs,
                              int first, int end)
{
    const int K = p->h->state->topk, each = HC_WEIGHTS / K;

    for (int64_t t = first + (int64_t)ag_index(ag) * each; t < end; t += (int64_t)ag_count(ag) * each) {
        const int items = (t + each < end ? each : end - (int)t) * K;
        const int32_t *ids = p->h->ids + t * K;
        struct pair_set all, sorted;
        hc_weight_holders(ag, p, descs, ids, p->h->pos + t * K, items, &all, &sorted);
        AG_ROUNDS(ag, int, i, items)
        {
            const float weight = hc_item_weight(ag, p, descs, ids, i, items, &all, &sorted);
            if (i < items)
                p->out_weights[t * K + i] = weight;
        }
    }
}

/* SUM_TOPK_ORDER: what item i gets, from the rank of its expert alone. FLAT: one of that rank's entries has its row. */
KFN float hc_item_owner_weight(struct agent *ag, const struct ht_combine_params *p, const struct hc_desc *descs,
                               const int32_t *ids, int i, int items, const struct pair_set *ranks)
{
    const int K = p->h->state->topk, at = i < items ? i : 0, k = at % K, base = at - k;
    const struct int_pair mine = pair_set_get(ag, ranks, at);
    struct int_pair holder = {mine.b, mine.a};

    for (int j = 0; j < K && p->layout == LAYOUT_FLAT; j++) {
        const struct int_pair other = pair_set_get(ag, ranks, base + j);
        holder.b = holder.b == HC_NO_ROW && other.b == mine.b ? other.a : holder.b;
    }
    return i < items && holder.a >= 0 && holder.b != HC_NO_ROW ? 0.0f + hc_row_weight(p, descs, ids + base, k, holder)
                                                               : 0.0f;
}

/* As hc_node_weights(), of SUM_TOPK_ORDER. */
KFN_STEP void hc_owner_weights(struct agent *ag, const struct ht_combine_params *p, const struct hc_desc *descs,
                               int first, int end)
{
    const int K = p->h->state->topk, each = HC_WEIGHTS / K;

    for (int64_t t = first + (int64_t)ag_index(ag) * each; t < end; t += (int64_t)ag_count(ag) * each) {
        const int items = (t + each < end ? each : end - (int)t) * K;
        const int32_t *ids = p->h->ids + t * K;
        struct pair_set ranks;
        hc_gather_ranks(ag, p, descs, ids, p->h->pos + t * K, items, &ranks);
        AG_ROUNDS(ag, int, i, items)
        {
            const float weight = hc_item_owner_weight(ag, p, descs, ids, i, items, &ranks);
            if (i < items)
                p->out_weights[t * K + i] = weight;
        }
    }
}

/* The weights of tokens [first, end) of round r, each by one lane: beside the sums they would cost registers, and most
 * lanes would look on. */
KFN_STEP void hc_return_weights(struct agent *ag, const struct ht_combine_params *p, const struct hc_desc *descs, int r,
                                int first, int end)
{
    const int K = p->h->state->topk;

    if (p->g->nnodes == 1 && p->sum & SUM_TOPK_ORDER) {
        hc_owner_weights(ag, p, descs, first, end);
        return;
    }
    if (p->g->nnodes == 1) {
        hc_node_weights(ag, p, descs, first, end);
        return;
    }
    AG_EACH_ALL(ag, int64_t, i, (int64_t)(end - first) * K)
    {
        const int64_t t = first + i / K, k = i % K;
        p->out_weights[t * K + k] = hc_token_weight(p, descs, r, t, (int)k);
    }
}

#endif
