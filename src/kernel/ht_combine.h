/* SPDX-License-Identifier: Apache-2.0 */
/*
 * High-throughput combine, epoch e.
 *
 *   expert rank d                                     source s of the node
 *   rows in epx_alloc memory, or in a region that
 *   all peers imported (group/region.h): describe where they are
 *   otherwise copy them to the own receive buffer first (more than it holds: windows, ht_window.h)
 *   signal HC_DATA = e  ---------------------------->  wait HC_DATA[node] >= e
 *                                                      out[t] = bias + sum of its rows, read where they are
 *   wait HC_DONE[node] >= e  <-----------------------  signal HC_DONE = e
 *
 * Between nodes a source asks its relays for the sums of its tokens there, in rounds (ht_rounds.h). A relay sums the
 * rows of its node for a token in fp32 and rounds; out[t] = bias + node by node, ascending: the rows of the own node
 * one by one, or the sum that a relay sent.
 *
 * SUM_TOPK_ORDER (epx.h): a rank and a node have the place of their last entry in the token's top-k; the sums of ranks
 * and of nodes, the own one too, are rounded where SUM_ROUND_* says so. Where nodes' sums are not, every row of another
 * node comes by itself: a round of the above for each k brings the rows whose place is k, and the last one adds.
 *
 * The wait for HC_DONE makes the caller's tensor and the receive buffer free again when the operation completes.
 */
#ifndef EPX_KERNEL_HT_COMBINE_H
#define EPX_KERNEL_HT_COMBINE_H

#include "kernel/ht_relay.h"

KFN_STEP void hc_stage(struct agent *ag, const struct ht_combine_params *p)
{
    const struct group_dev *g = p->g;
    char *heap = heap_at(g, g->rank, 0);
    const int64_t rows = p->h->state->recv_rows < p->desc.rows ? p->h->state->recv_rows : p->desc.rows;
    const int K = p->layout == LAYOUT_FLAT ? p->h->state->topk : 1;

    if (p->h->state->windowed)
        return;
    if (p->tokens) {
        for (int64_t row = ag_index(ag); row < rows; row += ag_count(ag))
            ag_copy(ag, heap + p->desc.tokens + (uint64_t)row * p->desc.token_stride, p->tokens + row * p->stride,
                    (size_t)p->signature.hidden_bytes);
        if (ag_index(ag) == 0 && ag_leader(ag))
            ag_add_stat(&g->stats->bytes_local, (uint64_t)rows * (uint64_t)p->signature.hidden_bytes);
    }
    if (p->weights)
        AG_EACH_ALL(ag, int64_t, i, rows * K)((float *)(heap + p->desc.weights))[i] = p->weights[i];
}

/* ---- The own tokens ------------------------------------------------------------------------------------------- */

/* What returned for entry k of token t, of round r, or NULL; *n is the node. */
KFN const char *hc_back_row(const struct ht_combine_params *p, int r, int64_t t, int k, int *n)
{
    const struct group_dev *g = p->g;
    const struct handle_dev *h = p->h;
    const int64_t at = t * h->state->topk + k;
    const int i = g->nnodes == 1 || h->ids[at] < 0 ? -1 : h->nidx[at];

    if (i < 0)
        return NULL;
    *n = g->node_of[h->ids[at] / g->local_experts];
    if (!ht_sends_to(g, *n))
        return NULL;
    return net_at(g, ht_back_slot(g, g->node, *n, r)) + (size_t)(i - ht_rows_before(g, h, r, *n)) * hc_wire_bytes(p);
}

/* What node n returned for token t, of round r, or NULL. */
KFN const char *hc_back_of_node(const struct ht_combine_params *p, int r, int64_t t, int n)
{
    const char *row = NULL;
    int other = -1;

    for (int k = 0; k < p->h->state->topk && !row; k++) {
        row = hc_back_row(p, r, t, k, &other);
        row = other == n ? row : NULL;
    }
    return row;
}

/* Nodes that returned something for token t and come before node n. */
KFN int hc_back_before(const struct ht_combine_params *p, int r, int64_t t, int n)
{
    int before = 0, other = 0;

    for (int k = 0; k < p->h->state->topk; k++)
        before += hc_back_row(p, r, t, k, &other) != NULL && other < n;
    return before;
}

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

/* Of one holder's row, the weight for place k of the token; 0 where that row has none for it. */
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
        return i < items && mine.a >= 0 ? hc_row_weight(p, descs, ids + base, k, mine) : 0.0f;
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

/* The weights of tokens [first, end) of round r, each by one lane: beside the sums they would cost registers, and most
 * lanes would look on. */
KFN_STEP void hc_return_weights(struct agent *ag, const struct ht_combine_params *p, const struct hc_desc *descs, int r,
                                int first, int end)
{
    const int K = p->h->state->topk;

    if (p->g->nnodes == 1 && !p->sum) {
        hc_node_weights(ag, p, descs, first, end);
        return;
    }
    AG_EACH_ALL(ag, int64_t, i, (int64_t)(end - first) * K)
    {
        const int64_t t = first + i / K, k = i % K;
        p->out_weights[t * K + k] = hc_token_weight(p, descs, r, t, (int)k);
    }
}

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
    int rows = own;
    sum_set_begin(&set);
    hc_offer_rows(ag, p, descs, &holders, own, &set, before);
    sum_set_settle(ag, &set);
    for (int k = 0; g->nnodes > 1 && k < K; k++) {
        int n = 0;
        const char *row = hc_back_row(p, r, t, k, &n);
        if (!row)
            continue;
        sum_set_put(ag, &set, hc_back_before(p, r, t, n) + (n > g->node ? own : 0), row, 1.0f, 0);
        rows++;
    }
    ag_reduce(ag, p->out + t * p->out_stride, p->dtype, p->hidden, &set, rows, 0,
              p->bias[0] ? p->bias[0] + t * p->bias_stride[0] : NULL,
              p->bias[1] ? p->bias[1] + t * p->bias_stride[1] : NULL);
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
    hc_reduce(ag, p, out, set, n, (uint32_t)(((uint64_t)1 << n) - 1),
              p->bias[0] ? p->bias[0] + t * p->bias_stride[0] : NULL,
              p->bias[1] ? p->bias[1] + t * p->bias_stride[1] : NULL);
    return n;
}

/* SUM_TOPK_ORDER. Returns how many rows there were, a sum of another node counted as one. */
KFN_STEP int hc_sum_token_topk(struct agent *ag, const struct ht_combine_params *p, const struct hc_desc *descs, int r,
                               int t)
{
    const int K = p->h->state->topk, nodes = p->g->nnodes > 1;
    const int own =
        hc_sum_node(ag, p, descs, p->h->ids + (size_t)t * K, p->h->pos + (size_t)t * K, -1, p->out + t * p->out_stride,
                    p->bias[0] && !nodes ? p->bias[0] + t * p->bias_stride[0] : NULL,
                    p->bias[1] && !nodes ? p->bias[1] + t * p->bias_stride[1] : NULL);

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
    hc_reduce(ag, p, p->out + t * p->out_stride, set, n, ends, p->bias[0] ? p->bias[0] + t * p->bias_stride[0] : NULL,
              p->bias[1] ? p->bias[1] + t * p->bias_stride[1] : NULL);
    return n;
}

/* The own rows are in place: signals the node. One agent. */
KFN_STEP int hc_publish(struct agent *ag, const struct ht_combine_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    if (ag_leader(ag)) {
        struct hc_desc *desc = (struct hc_desc *)heap_at(g, g->rank, g->ht.combine_desc);
        *desc = p->desc;
        if (p->h->state->windowed && (p->tokens || p->weights))
            desc->tokens_in = desc->weights_in = IN_WINDOW;
        g->state->epoch[OP_HT_COMBINE] = epoch;
    }
    ag_sync(ag);
    signal_peers(ag, g, SCOPE_NODE, SIG_HC_DATA, 0, epoch);
    if (g->nnodes == 1)
        return 0;
    /* Requests are written where the last dispatch had its blocks: its relays must have taken them. */
    return ht_wait_all_free(ag, g);
}

/* Rows that this rank has read of other ranks of its node, for its own tokens and as a relay, and sums that it has
 * returned. One agent. */
KFN_STEP void hc_count_peer(struct agent *ag, const struct ht_combine_params *p)
{
    const struct group_dev *g = p->g;
    const struct handle_dev *h = p->h;
    int64_t rows = 0, relayed = 0;

    AG_EACH(ag, int, r, p->layout == LAYOUT_FLAT ? g->nranks : 0)
    rows += r != g->rank && is_local(g, r) && g->mask[r] ? h->rcount[r] : 0;
    AG_EACH(ag, int, e, p->layout == LAYOUT_FLAT ? 0 : g->experts)
    {
        const int r = e / g->local_experts;
        rows += r != g->rank && is_local(g, r) && g->mask[r] ? h->ecount[e] : 0;
    }
    AG_EACH(ag, int, j, g->nnodes > 1 ? g->relay_count : 0)
    {
        rows += h->relay_peer[j];
        relayed += h->relay_n[j];
    }
    rows = ag_sum(ag, rows);
    relayed = ag_sum(ag, relayed);
    if (!ag_leader(ag))
        return;
    ag_add_stat(&g->stats->bytes_peer, (uint64_t)rows * (uint64_t)p->signature.hidden_bytes);
    if (relayed)
        ag_add_stat(&g->stats->rows_remote, (uint64_t)relayed);
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
        rows += (uint64_t)(p->rounds ? hc_sum_token_rounds(ag, p, descs, r, t)
                           : p->sum  ? hc_sum_token_topk(ag, p, descs, r, t)
                                     : hc_sum_token(ag, p, descs, r, t));
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

/* This rank has read all rows that it reads of others. */
KFN_STEP void hc_all_read(struct agent *ag, const struct ht_combine_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    if (!sync_last(ag, g, 1))
        return;
    if (p->nodes && ag_leader(ag))
        hc_count_rounds(p);
    ag_sync(ag);
    signal_peers(ag, g, SCOPE_NODE, SIG_HC_DONE, 0, epoch);
    report_returned(ag, g);
    hc_count_peer(ag, p);
}

/* Stage HC_SUM between nodes: the sums that this rank relays in a turn, and its own tokens of the turn before. */
KFN_STEP int hc_turn(struct agent *ag, const struct ht_combine_params *p, int turn)
{
    const struct group_dev *g = p->g;
    const struct hc_desc *descs = hc_descs(ag, g);
    const int many = ht_turn(p->h), first = turn * many;
    const int relayed = hc_relay_first(p, turn), end = hc_relay_end(p, turn);

    if (hc_relay_turn(ag, p, descs, relayed, end, 0))
        return 1;
#if AG_STAGED
    hc_sum_turn(ag, p, descs, first - many, many);
    return sync_last(ag, g, 2) && (hc_relay_done(ag, p, relayed, end) || hc_ask_more(ag, p, first - many, many));
#else
    if ((ag_index(ag) == 0 && hc_wait_back(ag, p, first - many, many)) || sync_barrier(ag, g))
        return 1;
    /* Behind the barrier: all agents have read the rows of this turn, and summed those of two turns before. */
    if (ag_index(ag) == 0 && (hc_relay_done(ag, p, relayed, end) || hc_ask_more(ag, p, first - 2 * many, many)))
        return 1;
    hc_sum_turn(ag, p, descs, first - many, many);
    return 0;
#endif
}

/* Does a rank of the node write rows into windows? As hd_any_pulls(). */
KFN_STEP int hc_any_pushes(struct agent *ag, const struct ht_combine_params *p)
{
    const struct group_dev *g = p->g;
    int pushes = 0;

    AG_EACH(ag, int, i, p->h->state->windowed ? g->node_size : 0)
    {
        const int r = node_rank(g, i);
        pushes |= g->mask[r] && hc_desc_of(g, r)->tokens_in == IN_WINDOW;
    }
    return ag_any(ag, pushes);
}

/* Window k - 1 is written in step k, and summed in the one after it. Between nodes rounds are windows, and the own
 * tokens of a round come a step later than what this rank sums as a relay: relays elsewhere do that first. */
KFN struct hw_steps hc_steps(const struct ht_combine_params *p, uint64_t epoch)
{
    const int windows = hw_windows(p->h, p->g->ht.sum_tokens);
    const struct hw_steps s = {epoch, SIG_HC_STEP, PHASE_HC_STEP, p->nodes ? p->h->state->all_rounds + 3 : windows + 2};
    return s;
}

/* Between nodes, as a relay: the requests of round k, for the node to look at. */
KFN_STEP int hc_step_requests(struct agent *ag, const struct ht_combine_params *p, int k)
{
    const struct group_dev *g = p->g;
    const uint64_t start = ag_now(ag);
    int64_t before = 0;

    hw_show_rounds(ag, g, p->h, k);
    for (int j = 0; j < g->relay_count; j++) {
        if (!ht_relays(g, p->h, j, k))
            continue;
        if (!AG_STAGED && ht_wait_block(ag, g, SIG_HC_BLOCK, PHASE_HC_BLOCK, j, k, &p->signature, start))
            return 1;
        if (hc_resolve_round(ag, p, j, k, before))
            return 1;
        before += p->h->relay_rows[(size_t)j * (size_t)g->ht.rounds + (size_t)k];
    }
    return 0;
}

/* Stage HC_SUM of windows: step k. Where one launch takes all steps, its agents meet before the own sums. */
KFN_STEP int hc_step(struct agent *ag, const struct ht_combine_params *p, int k)
{
    const struct group_dev *g = p->g;
    const int each = g->ht.sum_tokens, ntokens = p->h->state->ntokens, first = (k - 2) * each;
    const int end = first + each < ntokens ? first + each : ntokens;
    const struct hc_desc *descs = hc_descs(ag, g);

    if (k == 0)
        hc_show_routes(ag, p);
    if (p->nodes && hc_step_requests(ag, p, k))
        return 1;
    if (k > 0 && hc_push(ag, p, k))
        return 1;
    if (!p->nodes) {
        if (k > 1)
            hc_sum_tokens(ag, p, descs, 0, first < end ? first : end, end, 0);
        return 0;
    }
    if (hc_relay_turn(ag, p, descs, k - 2, k - 1, 1))
        return 1;
#if !AG_STAGED
    if ((ag_index(ag) == 0 && hc_wait_back(ag, p, k - 3, 1)) || sync_barrier(ag, g))
        return 1;
#endif
    hc_sum_turn(ag, p, descs, k - 3, 1);
    return 0;
}

/* After step k, between nodes: what this rank has returned as a relay, and the next request. One agent, when all are
 * through. */
KFN_STEP int hc_step_done(struct agent *ag, const struct ht_combine_params *p, int k)
{
    return p->nodes && (hc_relay_done(ag, p, k - 2, k - 1) || hc_ask_more(ag, p, k - 3, 1));
}

/* All steps in one launch. */
KFN_STEP int hc_windows(struct agent *ag, const struct ht_combine_params *p, uint64_t epoch)
{
    const struct hw_steps s = hc_steps(p, epoch);

    for (int k = 0; k < s.count; k++) {
        if (hw_begin(ag, p->g, &s, k) || hc_step(ag, p, k))
            return 1;
        if (p->nodes && (sync_barrier(ag, p->g) || (ag_index(ag) == 0 && hc_step_done(ag, p, k))))
            return 1;
        if (hw_end(ag, p->g, &s, k))
            return 1;
    }
    return 0;
}

#if AG_STAGED
/* Stage HC_LANDED: turns of rounds, or steps of windows. One agent. */
KFN int hc_gate(struct agent *ag, const struct ht_combine_params *p, uint64_t epoch, int turn)
{
    const struct hw_steps s = hc_steps(p, epoch);
    const int many = ht_turn(p->h);

    if (!hc_any_pushes(ag, p))
        return p->nodes && hc_landed(ag, p, hc_relay_first(p, turn), hc_relay_end(p, turn) - hc_relay_first(p, turn),
                                     (turn - 1) * many, many);
    if (turn >= s.count)
        return 0;
    return hw_begin(ag, p->g, &s, turn) || (p->nodes && hc_landed(ag, p, turn, 1, turn - 3, 1));
}

KFN int hc_step_work(struct agent *ag, const struct ht_combine_params *p, uint64_t epoch, int k)
{
    const struct hw_steps s = hc_steps(p, epoch);

    if (k >= s.count)
        return 0;
    if (hc_step(ag, p, k))
        return 1;
    if (!sync_last(ag, p->g, 2))
        return 0;
    if (hc_step_done(ag, p, k))
        return 1;
    hw_signal(ag, p->g, &s, k);
    return 0;
}
#endif

/* Stage HC_DATA: the rows of the node can be read. */
KFN_STEP int hc_data(struct agent *ag, const struct ht_combine_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    if (p->h->state->recv_rows > p->desc.rows)
        report(ag, g, KSTATUS_OVERFLOW, PHASE_HC_DATA, -1, p->h->state->recv_rows, p->desc.rows, 0, 0);
    if (sync_last(ag, g, 0) && hc_publish(ag, p, epoch))
        return 1;
    if (wait_peers(ag, g, SCOPE_NODE, SIG_HC_DATA, 0, epoch, PHASE_HC_DATA, NULL) ||
        check_node(ag, g, &p->signature, g->ht.combine_desc, PHASE_HC_DATA))
        return 1;
    return AG_STAGED && !p->turns && hc_any_pushes(ag, p) && hc_windows(ag, p, epoch);
}

/* Stage HC_SUM: the own tokens; between nodes turn by turn, through windows step by step. */
KFN int hc_sum(struct agent *ag, const struct ht_combine_params *p, uint64_t epoch)
{
    int last = 1;

#if AG_STAGED
    last = stage_turn(ag) == p->turns;
#endif
    if (hc_any_pushes(ag, p)) {
#if AG_STAGED
        /* Without turns hc_data() has taken all steps. */
        if (p->turns && hc_step_work(ag, p, epoch, stage_turn(ag)))
            return 1;
#else
        if (hc_windows(ag, p, epoch))
            return 1;
#endif
    } else if (!p->nodes) {
        hc_sum_tokens(ag, p, hc_descs(ag, p->g), 0, 0, last ? p->h->state->ntokens : 0, 0);
    } else {
#if AG_STAGED
        if (hc_turn(ag, p, stage_turn(ag)))
            return 1;
#else
        for (int turn = 0; (turn - 1) * ht_turn(p->h) < p->h->state->most_rounds; turn++)
            if (hc_turn(ag, p, turn))
                return 1;
#endif
    }
    if (last)
        hc_all_read(ag, p, epoch);
    return 0;
}

KFN int hc_run(struct agent *ag, const struct ht_combine_params *p, uint64_t epoch)
{
    if (stage_runs(ag, HC_STAGE)) {
        if (ht_check_routing(ag, p->g, p->h, p->key, p->ntokens, PHASE_HC_DATA))
            return 1;
        hc_stage(ag, p);
    }
    STAGE_MARK(ag, HC_STAGE, MARK_STAGE);
    if (stage_runs(ag, HC_DATA) && hc_data(ag, p, epoch))
        return 1;
    STAGE_MARK(ag, HC_DATA, MARK_DATA);
    if (p->nodes && stage_runs(ag, HC_ASK) && hc_ask(ag, p))
        return 1;
#if AG_STAGED
    if (stage_runs(ag, HC_LANDED) && hc_gate(ag, p, epoch, stage_turn(ag)))
        return 1;
    STAGE_MARK(ag, HC_LANDED, MARK_LANDED);
#endif
    if (stage_runs(ag, HC_SUM) && hc_sum(ag, p, epoch))
        return 1;
    STAGE_MARK(ag, HC_SUM, MARK_SUM);
    if (stage_runs(ag, HC_DONE) && wait_peers(ag, p->g, SCOPE_NODE, SIG_HC_DONE, 0, epoch, PHASE_HC_DONE, NULL))
        return 1;
    STAGE_MARK(ag, HC_DONE, MARK_DONE);
    return 0;
}

KFN void kernel_ht_combine(struct agent *ag, const struct ht_combine_params *p)
{
    const uint64_t epoch = stage_epoch(ag, p->g, OP_HT_COMBINE, HC_DATA);

    if (!kernel_begin_agreed(ag, p->g) && !ht_too_many(ag, p->g, p->h))
        hc_run(ag, p, epoch);
    kernel_end(ag, p->g);
}

#endif
