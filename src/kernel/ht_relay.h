/* SPDX-License-Identifier: Apache-2.0 */
/*
 * High-throughput combine between nodes: what a source asks of its relays, and the sums that a relay returns, round by
 * round (ht_rounds.h). The protocol is in ht_combine.h.
 */
#ifndef EPX_KERNEL_HT_RELAY_H
#define EPX_KERNEL_HT_RELAY_H

#include "kernel/ht_holders.h"

/* A returned row: the sum, then weights. */
KFN size_t hc_wire_bytes(const struct ht_combine_params *p)
{
    return row_scales_at(&p->signature) +
           (p->signature.extra & SIGNATURE_WEIGHTS ? ((size_t)p->h->state->topk * 4 + 15) & ~(size_t)15 : 0);
}

/* Stage HC_ASK: what is asked of the relays, and the first requests. */
KFN_STEP int hc_ask(struct agent *ag, const struct ht_combine_params *p)
{
    const struct group_dev *g = p->g;
    const struct handle_dev *h = p->h;
    const int K = h->state->topk;
    const size_t record = ht_route_bytes(h);

    ht_write_headers(ag, g, h, &p->signature, record);
    for (int r = 0; r < h->state->rounds; r++) {
        const int end = ht_round_token(g, h, r + 1);
        for (int t = ht_round_token(g, h, r) + ag_index(ag); t < end; t += ag_count(ag)) {
            for (int k = 0; k < K; k++) {
                const int32_t id = h->ids[(size_t)t * K + k], i = id < 0 ? -1 : h->nidx[(size_t)t * K + k];
                const int n = i < 0 ? -1 : g->node_of[id / g->local_experts];
                if (n >= 0)
                    ht_write_route(ag, h, p->layout,
                                   net_at(g, ht_out_block(g, h, n, r, record)) + HT_HEADER_BYTES +
                                       (size_t)(i - ht_rows_before(g, h, r, n)) * record,
                                   t);
            }
        }
    }
    if (AG_STAGED ? !sync_last(ag, g, 3) : sync_barrier(ag, g))
        return !AG_STAGED;
    for (int r = 0; r < HT_SLOTS && r < h->state->rounds && (AG_STAGED || ag_index(ag) == 0); r++)
        if (ht_put_blocks(ag, g, h, SIG_HC_BLOCK, r, record))
            return 1;
    return 0;
}

/* Does the source read what a launch of p->rounds returns for this token? It knows its ids, and neither drops nor
 * masks: where it reads, a row of zeros is sent if there is no other. */
KFN int hc_is_read(const struct ht_combine_params *p, const int32_t *ids)
{
    const int d = ids[p->round] < 0 ? -1 : ids[p->round] / p->g->local_experts;

    return d >= 0 && is_local(p->g, d) && hc_place(p, ids, d, p->round) == p->round;
}

/* As a relay, rows in windows: where the node finds what is asked for in round r of source number j. `before` rows of
 * the round are shared out already. */
KFN_STEP int hc_resolve_round(struct agent *ag, const struct ht_combine_params *p, int j, int r, int64_t before)
{
    const struct group_dev *g = p->g;
    const size_t route = ht_route_bytes(p->h);
    const int n = p->h->relay_rows[(size_t)j * (size_t)g->ht.rounds + (size_t)r];

    for (int64_t i = ht_first_item(ag, before); i < n; i += ag_count(ag)) {
        char *at = net_at(g, ht_relay_block(g, j, r)) + HT_HEADER_BYTES + (size_t)i * route;
        char *record = ht_copy_record(ag, g, at, route);
        if (ht_resolve_route(ag, g, p->h, p->layout, j, record))
            return fail_all(ag, g, KSTATUS_MISMATCH, PHASE_HC_BLOCK, g->relay_sources[j], g->experts, -1);
        if (AG_STAGED)
            ag_copy(ag, at, record, route);
        if (g->ht.split) /* the slot keeps its own: this rank sums by it when the copy has the round after next */
            ag_copy(ag, heap_at(g, g->rank, ht_shown_block(g, j, r)) + HT_HEADER_BYTES + (size_t)i * route, record,
                    route);
    }
    return 0;
}

/* The same in the step where they are summed: rows that were written into this rank's window have their number
 * there. */
KFN_STEP void hc_window_route(struct agent *ag, const struct ht_combine_params *p, const struct hc_desc *descs,
                              const int32_t *ids, int32_t *pos, int64_t number)
{
    AG_EACH(ag, int, k, p->h->state->topk)
    {
        int d = 0;
        const struct hc_desc *desc = hc_row_desc(p->g, descs, ids, pos, k, &d);
        if (!desc)
            pos[k] = -1;
        else if (desc->tokens_in == IN_WINDOW)
            pos[k] = (int32_t)number + k;
    }
    ag_sync(ag);
}

/* As a relay: the sum of this node for row i of (source number j, round r); `pushed`: its rows are in the window, or in
 * reach. */
KFN_STEP int hc_relay_row(struct agent *ag, const struct ht_combine_params *p, const struct hc_desc *descs,
                          struct put_batch *batch, int j, int r, int i, int pushed)
{
    const struct group_dev *g = p->g;
    const int K = p->h->state->topk, s = g->relay_sources[j];
    const size_t bytes = hc_wire_bytes(p);
    const uint64_t out = ht_relay_slot(g, j, r) + (uint64_t)i * bytes;
    const size_t route = ht_route_bytes(p->h);
    char *record =
        ht_copy_record(ag, g, net_at(g, ht_relay_block(g, j, r)) + HT_HEADER_BYTES + (size_t)i * route, route);
    const int32_t *ids = (const int32_t *)record + 1, *pos = ids + K;
    char *row = net_at(g, out);

    if (pushed)
        hc_window_route(ag, p, descs, ids, (int32_t *)record + 1 + K, hc_relayed_number(g, p->h, j, r, i));
    else if (ht_resolve_route(ag, g, p->h, p->layout, j, record))
        return fail_all(ag, g, KSTATUS_MISMATCH, PHASE_HC_BLOCK, s, g->experts, -1);
    hc_sum_node(ag, p, descs, ids, pos, p->rounds ? p->round : -1, row, NULL, NULL);
    if (p->signature.extra & SIGNATURE_WEIGHTS)
        AG_EACH(ag, int, k, K)
    ((float *)(row + row_scales_at(&p->signature)))[k] = hc_weight(p, descs, ids, pos, k);
    ag_sync(ag);
    put(ag, g, batch, s, COUNTER(SIG_HC_ROWS, ht_slot(r)), out,
        ht_back_slot(g, g->node_of[s], g->node, r) + (uint64_t)i * bytes,
        !p->rounds || hc_is_read(p, ids) || p->signature.extra & SIGNATURE_WEIGHTS ? (uint32_t)bytes : 0);
    return 0;
}

/* As a relay: the rounds of a turn. Where none waits for a credit all are asked for at once, and summed in the first:
 * the sums of its own tokens, turn by turn, then wait for nothing but the network. */
KFN int hc_relay_first(const struct ht_combine_params *p, int turn)
{
    if (ht_all_at_once(p->h))
        return turn > 0 ? HT_SLOTS : 0;
    return turn * ht_turn(p->h);
}

KFN int hc_relay_end(const struct ht_combine_params *p, int turn)
{
    return ht_all_at_once(p->h) ? HT_SLOTS : (turn + 1) * ht_turn(p->h);
}

/* As a relay: how many rows rounds [first, end) have. */
KFN int64_t hc_turn_rows(const struct ht_combine_params *p, int first, int end)
{
    const struct group_dev *g = p->g;
    int64_t rows = 0;

    for (int r = first; r < end; r++)
        for (int j = 0; j < g->relay_count; j++)
            rows += ht_relays(g, p->h, j, r) ? p->h->relay_rows[(size_t)j * (size_t)g->ht.rounds + (size_t)r] : 0;
    return rows;
}

/* As a relay: the runs of this agent among the rows of (source number j, round r), which come behind `before` others.
 * Each leaves when it is written. `pushed`: rows may be in the window. */
KFN_STEP int hc_relay_runs(struct agent *ag, const struct ht_combine_params *p, const struct hc_desc *descs, int j,
                           int r, int64_t before, int64_t writers, int pushed)
{
    const int64_t n = p->h->relay_rows[(size_t)j * (size_t)p->g->ht.rounds + (size_t)r], first = before / HT_RUN;
    struct put_batch batch;

    if (ag_index(ag) >= writers)
        return 0;
    put_begin(&batch);
    for (int64_t run = first + (ag_index(ag) - first % writers + writers) % writers; run * HT_RUN < before + n;
         run += writers) {
        const int64_t begin = run * HT_RUN - before, end = begin + HT_RUN < n ? begin + HT_RUN : n;
        for (int64_t i = begin < 0 ? 0 : begin; i < end; i++)
            if (hc_relay_row(ag, p, descs, &batch, j, r, (int)i, pushed))
                return 1;
        if (put_flush(ag, p->g, &batch))
            return push_failed(ag, p->g, batch.failed);
    }
    return 0;
}

/* The same where the launch waits for single rounds: this agent's share. */
KFN int hc_relay_share(struct agent *ag, const struct ht_combine_params *p, const struct hc_desc *descs, int j, int r,
                       int pushed, uint64_t start)
{
    const int64_t n = p->h->relay_rows[(size_t)j * (size_t)p->g->ht.rounds + (size_t)r];
    const int64_t end = n * (ag_index(ag) + 1) / ag_count(ag);
    struct put_batch batch;

    if (!pushed && ht_wait_block(ag, p->g, SIG_HC_BLOCK, PHASE_HC_BLOCK, j, r, &p->signature, start))
        return 1;
    put_begin(&batch);
    for (int64_t i = n * ag_index(ag) / ag_count(ag); i < end; i++)
        if (hc_relay_row(ag, p, descs, &batch, j, r, (int)i, pushed))
            return 1;
    return put_flush(ag, p->g, &batch) ? push_failed(ag, p->g, batch.failed) : 0;
}

/* As a relay: the rows of rounds [first, last), shared out among the agents. `pushed`: nothing is waited for, and rows
 * may be in the window. */
KFN_STEP int hc_relay_turn(struct agent *ag, const struct ht_combine_params *p, const struct hc_desc *descs, int first,
                           int last, int pushed)
{
    const struct group_dev *g = p->g;
    const int64_t writers = AG_STAGED ? ht_writers(ag, hc_turn_rows(p, first < 0 ? 0 : first, last)) : 0;
    const uint64_t start = ag_now(ag);
    int64_t before = 0;

    for (int r = first < 0 ? 0 : first; r < last; r++) {
        for (int j = 0; j < g->relay_count; j++) {
            if (!ht_relays(g, p->h, j, r))
                continue;
            if (AG_STAGED ? hc_relay_runs(ag, p, descs, j, r, before, writers, pushed)
                          : hc_relay_share(ag, p, descs, j, r, pushed, start))
                return 1;
            before += p->h->relay_rows[(size_t)j * (size_t)g->ht.rounds + (size_t)r];
        }
    }
    return 0;
}

/* One count more than rows, to every source of rounds [first, end): this relay is through, and whoever gets no row
 * knows that too. One agent, when all have read their rows. A rank of the node that has failed since may have used the
 * memory of its rows for something else, but not before it had set the abort words: then the sources, which may hear of
 * it later, must not take what they got. */
KFN_STEP int hc_relay_done(struct agent *ag, const struct ht_combine_params *p, int first, int end)
{
    const struct group_dev *g = p->g;
    struct put_batch batch;

    if (ag_look_behind(&control_of(g, g->rank)->abort_word))
        return wait_failed(ag, g, WAIT_ABORTED, PHASE_HC_ROWS, -1, -1, 0, 0);
    put_begin(&batch);
    for (int r = first < 0 ? 0 : first; r < end; r++)
        for (int j = 0; j < g->relay_count; j++)
            if (ht_relays(g, p->h, j, r))
                put(ag, g, &batch, g->relay_sources[j], COUNTER(SIG_HC_ROWS, ht_slot(r)), 0, 0, 0);
    return put_flush(ag, g, &batch) ? push_failed(ag, g, batch.failed) : 0;
}

/* Counts of node n in the rounds up to r that have its slot. */
KFN uint64_t hc_rows_expected(const struct ht_combine_params *p, int n, int round)
{
    uint64_t rows = 0;

    for (int r = ht_slot(round); r <= round; r += HT_SLOTS)
        rows += (uint64_t)ht_round_rows(p->g, p->h, r, n) + 1;
    return rows;
}

/* The sums that relays return to this rank in `many` rounds. One agent. */
KFN_STEP int hc_wait_back(struct agent *ag, const struct ht_combine_params *p, int first, int many)
{
    const struct group_dev *g = p->g;
    const int N = g->nnodes, left = p->h->state->rounds - first;
    const int rounds = first < 0 || left < 0 ? 0 : left < many ? left : many;
    const uint64_t start = ag_now(ag);

    for (;;) {
        int mine = -1;
        AG_EACH(ag, int, i, rounds *N)
        {
            const int r = first + i / N, n = i % N;
            if (mine < 0 && ht_sends_to(g, n) &&
                !ht_there(g, SIG_HC_ROWS, r, g->relay_rank[n], hc_rows_expected(p, n, r)))
                mine = i;
        }
        const int late = ht_missing(ag, mine), r = first + late / N, n = late % N;
        if (late < 0)
            return 0;
        if (ht_wait_counter(ag, g, SIG_HC_ROWS, r, g->relay_rank[n], hc_rows_expected(p, n, r), PHASE_HC_ROWS, start))
            return 1;
    }
}

#if AG_STAGED
/* Stage HC_LANDED: the requests of `many` rounds, and the sums of `sums` rounds from `back` on, are there. One
 * agent. */
KFN_STEP int hc_landed(struct agent *ag, const struct ht_combine_params *p, int first, int many, int back, int sums)
{
    return ht_wait_rounds(ag, p->g, p->h, SIG_HC_BLOCK, first, many, &p->signature) || hc_wait_back(ag, p, back, sums);
}
#endif

/* Requests for the rounds whose slots the sums of `many` rounds have freed. One agent. */
KFN_STEP int hc_ask_more(struct agent *ag, const struct ht_combine_params *p, int summed, int many)
{
    const int first = summed + HT_SLOTS;

    for (int r = first; summed >= 0 && r < first + many && r < p->h->state->rounds; r++)
        if (ht_put_blocks(ag, p->g, p->h, SIG_HC_BLOCK, r, ht_route_bytes(p->h)))
            return 1;
    return 0;
}

/* What the slots have counted in this operation. One lane. */
KFN_STEP void hc_count_rounds(const struct ht_combine_params *p)
{
    const struct group_dev *g = p->g;
    const struct handle_dev *h = p->h;

    for (int n = 0; n < g->nnodes; n++)
        for (int r = 0; r < h->state->rounds && ht_sends_to(g, n); r++)
            ht_count(g, SIG_HC_ROWS, ht_slot(r), g->relay_rank[n], (uint64_t)ht_round_rows(g, h, r, n) + 1);
    for (int j = 0; j < g->relay_count; j++)
        for (int slot = 0; slot < HT_SLOTS && g->mask[g->relay_sources[j]]; slot++)
            ht_count(g, SIG_HC_BLOCK, slot, g->relay_sources[j], ht_uses(h->relay_rounds[j], slot));
}

#endif
