/* SPDX-License-Identifier: Apache-2.0 */
/*
 * High-throughput combine: the sums of the own tokens, out[t] = bias + rows, in one of four orders.
 *
 *   hc_sum_token()         node by node, ascending
 *   hc_sum_token_ranks()   SUM_ROUND_RANKS alone: the same, with a rounded sum of each rank in the place of its rows
 *   hc_sum_token_topk()    SUM_TOPK_ORDER: by last entries in the token's top-k
 *   hc_sum_token_rounds()  the same where sums of other nodes may not be rounded: their rows come one by one
 *
 * ht_combine.h says what each order adds and where it rounds.
 */
#ifndef EPX_KERNEL_HT_SUM_H
#define EPX_KERNEL_HT_SUM_H

#include "kernel/ht_return_weights.h"

/* The next token's rows will be wanted soon. */
KFN void hc_look_ahead(const struct ht_combine_params *p, int64_t t)
{
    const struct group_dev *g = p->g;
    const int K = p->h->state->topk;
    const int32_t *ids = p->h->ids + t * K, *pos = p->h->pos + t * K;

    for (int k = 0; t < p->h->state->ntokens && k < K; k++) {
        int d = 0;
        const struct hc_desc *desc = hc_row_desc(g, NULL, ids, pos, k, &d);
        if (desc)
            AG_PREFETCH(hc_row_at(g, d, desc, hc_row_number(p, desc, ids, pos, k)));
    }
}

/* Adds the sums that the other nodes returned for token t; `own` rows are of this node. Bit i of *ends: the i-th of the
 * set is one of them. Returns how many there are. */
KFN int hc_put_node_sums(struct agent *ag, const struct ht_combine_params *p, int r, int t, int own,
                         struct sum_set *set, uint32_t *ends)
{
    const struct group_dev *g = p->g;
    int sums = 0;

    for (int k = 0; g->nnodes > 1 && k < p->h->state->topk; k++) {
        int n = 0;
        const char *row = hc_back_row(p, r, t, k, &n);
        if (!row)
            continue;
        const int at = hc_back_before(p, r, t, n) + (n > g->node ? own : 0);
        sum_set_put(ag, set, at, row, 1.0f, 0);
        *ends |= 1u << at;
        sums++;
    }
    return sums;
}

/* Row t of the caller's bias `which`, or NULL. */
KFN const char *hc_bias(const struct ht_combine_params *p, int which, int t)
{
    return p->bias[which] ? p->bias[which] + t * p->bias_stride[which] : NULL;
}

/* Returns how many rows there were. */
KFN_STEP int hc_sum_token(struct agent *ag, const struct ht_combine_params *p, const struct hc_desc *descs, int r,
                          int t)
{
    const struct group_dev *g = p->g;
    const int K = p->h->state->topk;
    struct pair_set holders;
    struct sum_set set;
    /* Node by node, ascending: the rows of the own node one by one, in the place of its sum. */
    const int before = g->nnodes == 1 ? 0 : hc_back_before(p, r, t, g->node);
    const int own = hc_holders(ag, p, descs, p->h->ids + (size_t)t * K, p->h->pos + (size_t)t * K, &holders);
    uint32_t ends = 0; /* not looked at: nothing is rounded in between */

    sum_set_begin(&set);
    hc_offer_rows(ag, p, descs, &holders, own, &set, before);
    sum_set_settle(ag, &set);
    const int rows = own + hc_put_node_sums(ag, p, r, t, own, &set, &ends);
    ag_reduce(ag, p->out + t * p->out_stride, p->dtype, p->hidden, &set, rows, 0, hc_bias(p, 0, t), hc_bias(p, 1, t));
    return rows;
}

/* SUM_ROUND_RANKS alone: as hc_sum_token(), of ranks' sums, ascending. Relays have rounded theirs. */
KFN_STEP int hc_sum_token_ranks(struct agent *ag, const struct ht_combine_params *p, const struct hc_desc *descs, int r,
                                int t)
{
    const struct group_dev *g = p->g;
    const int K = p->h->state->topk;
    struct pair_set holders;
    struct sum_set set;
    uint32_t own_ends = 0;
    const int before = g->nnodes == 1 ? 0 : hc_back_before(p, r, t, g->node);
    const int own =
        hc_holders_placed(ag, p, descs, p->h->ids + (size_t)t * K, p->h->pos + (size_t)t * K, -1, &holders, &own_ends);
    uint32_t ends = own ? own_ends << before : 0; /* `before` may be all of K, which is 32 at most */

    sum_set_begin(&set);
    hc_offer_rows(ag, p, descs, &holders, own, &set, before);
    sum_set_settle(ag, &set);
    const int rows = own + hc_put_node_sums(ag, p, r, t, own, &set, &ends);
    hc_reduce(ag, p, p->out + t * p->out_stride, set, rows, ends, hc_bias(p, 0, t), hc_bias(p, 1, t));
    return rows;
}

/* SUM_TOPK_ORDER, several nodes: adds what the nodes returned for token t, by their last entries in its top-k. The sum
 * of the own node is in place of the result. Returns how many sums there were. */
KFN_STEP int hc_sum_nodes(struct agent *ag, const struct ht_combine_params *p, int r, int t, int own)
{
    const struct group_dev *g = p->g;
    const int K = p->h->state->topk;
    const int32_t *ids = p->h->ids + (size_t)t * K;
    char *out = p->out + t * p->out_stride;
    struct sum_set set;
    int n = 0;

    sum_set_begin(&set);
    for (int k = 0; k < K; k++) {
        const int node = ids[k] < 0 ? -1 : g->node_of[ids[k] / g->local_experts];
        int later = node < 0;
        for (int j = k + 1; j < K && !later; j++)
            later = ids[j] >= 0 && g->node_of[ids[j] / g->local_experts] == node;
        const char *row = later ? NULL : node != g->node ? hc_back_of_node(p, r, t, node) : own ? out : NULL;
        if (row)
            sum_set_put(ag, &set, n++, row, 1.0f, 0);
    }
    ag_sync(ag); /* the own sum is written */
    /* Each is the last of its sum: they are rounded already. */
    hc_reduce(ag, p, out, set, n, (uint32_t)(((uint64_t)1 << n) - 1), hc_bias(p, 0, t), hc_bias(p, 1, t));
    return n;
}

/* SUM_TOPK_ORDER. Returns how many rows there were, a sum of another node counted as one. */
KFN_STEP int hc_sum_token_topk(struct agent *ag, const struct ht_combine_params *p, const struct hc_desc *descs, int r,
                               int t)
{
    const int K = p->h->state->topk, nodes = p->g->nnodes > 1;
    const int own =
        hc_sum_node(ag, p, descs, p->h->ids + (size_t)t * K, p->h->pos + (size_t)t * K, -1, p->out + t * p->out_stride,
                    nodes ? NULL : hc_bias(p, 0, t), nodes ? NULL : hc_bias(p, 1, t));

    return nodes ? own + hc_sum_nodes(ag, p, r, t, own) - (own > 0) : own;
}

/* Rounds: the row of another node that this round brought for token t, or NULL. */
KFN const char *hc_round_row(const struct ht_combine_params *p, int r, int t, int place)
{
    const struct group_dev *g = p->g;
    const int32_t *ids = p->h->ids + (size_t)t * (size_t)p->h->state->topk;
    const int d = ids[place] < 0 ? g->rank : ids[place] / g->local_experts;

    if (is_local(g, d) || hc_place(p, ids, d, place) != place)
        return NULL;
    return hc_back_of_node(p, r, t, g->node_of[d]);
}

KFN char *hc_kept_row(const struct ht_combine_params *p, int t, int place)
{
    return p->kept + ((int64_t)t * p->h->state->topk + place) * p->kept_stride;
}

/* The rows of place `place` of token t: of this node where they are, of others where they came. */
KFN int hc_put_place(struct agent *ag, const struct ht_combine_params *p, const struct hc_desc *descs, int r, int t,
                     int place, struct sum_set *set, int n)
{
    const struct group_dev *g = p->g;
    const int K = p->h->state->topk, L = g->local_experts;
    const int32_t *ids = p->h->ids + (size_t)t * K, *pos = p->h->pos + (size_t)t * K;
    const char *came = hc_round_row(p, r, t, place);

    if (came)
        sum_set_put(ag, set, n++, place == p->round ? came : hc_kept_row(p, t, place), 1.0f, 0);
    for (int k = 0; k <= place && !came && ids[place] >= 0; k++) {
        int d = 0;
        if (ids[k] < 0 || ids[k] / L != ids[place] / L || hc_place(p, ids, ids[k] / L, k) != place)
            continue;
        const struct hc_desc *desc = hc_row_desc(g, descs, ids, pos, k, &d);
        if (desc)
            sum_set_put(ag, set, n++, hc_row_at(g, d, desc, hc_row_number(p, desc, ids, pos, k)), 1.0f, 0);
    }
    return n;
}

/* Rounds: keeps what this one brought for token t; the last one adds. Returns how many rows were summed. */
KFN_STEP int hc_sum_token_rounds(struct agent *ag, const struct ht_combine_params *p, const struct hc_desc *descs,
                                 int r, int t)
{
    const char *came = hc_round_row(p, r, t, p->round);
    struct sum_set set;
    uint32_t ends = 0;
    int n = 0;

    if (p->round < p->rounds - 1) {
        if (came) { /* a sum of one row: the functions that copy rows would need registers here */
            sum_set_begin(&set);
            sum_set_put(ag, &set, 0, came, 1.0f, 0);
            hc_reduce(ag, p, hc_kept_row(p, t, p->round), set, 1, 1, NULL, NULL);
        }
        return 0;
    }
    sum_set_begin(&set);
    for (int place = 0; place < p->rounds; place++) {
        const int before = n;
        n = hc_put_place(ag, p, descs, r, t, place, &set, n);
        ends |= n > before ? 1u << (n - 1) : 0;
    }
    hc_reduce(ag, p, p->out + t * p->out_stride, set, n, ends, hc_bias(p, 0, t), hc_bias(p, 1, t));
    return n;
}

/* The own tokens [first, end), of round r; `before` others of the turn are shared out already. */
KFN_STEP void hc_sum_tokens(struct agent *ag, const struct ht_combine_params *p, const struct hc_desc *descs, int r,
                            int first, int end, int before)
{
    uint64_t rows = 0;

    if (p->out_weights)
        hc_return_weights(ag, p, descs, r, first, end);
    for (int t = first + (int)ht_first_item(ag, before); t < end; t += ag_count(ag)) {
        if (AG_LOOK_AHEAD)
            hc_look_ahead(p, (int64_t)t + ag_count(ag));
        rows += (uint64_t)(p->rounds                 ? hc_sum_token_rounds(ag, p, descs, r, t)
                           : !p->sum                 ? hc_sum_token(ag, p, descs, r, t)
                           : p->sum & SUM_TOPK_ORDER ? hc_sum_token_topk(ag, p, descs, r, t)
                                                     : hc_sum_token_ranks(ag, p, descs, r, t));
    }
    count_returned(ag, p->g, rows);
}

/* The own tokens of `many` rounds. */
KFN_STEP void hc_sum_turn(struct agent *ag, const struct ht_combine_params *p, const struct hc_desc *descs, int first,
                          int many)
{
    const struct group_dev *g = p->g;

    for (int r = first; first >= 0 && r < first + many && r < p->h->state->rounds; r++)
        hc_sum_tokens(ag, p, descs, r, ht_round_token(g, p->h, r), ht_round_token(g, p->h, r + 1),
                      ht_round_token(g, p->h, r) - ht_round_token(g, p->h, first));
}

#endif
