/* SPDX-License-Identifier: Apache-2.0 */
/*
 * High-throughput dispatch between nodes: the rows that a source sends to relays, and what a relay forwards, round by
 * round (ht_rounds.h). The protocol is in ht_dispatch.h.
 */
#ifndef EPX_KERNEL_HT_FORWARD_H
#define EPX_KERNEL_HT_FORWARD_H

#include "kernel/ht_place.h"
#include "kernel/ht_rounds.h"

/* Long rows of scales have no room in a record: they follow their token, in rows that hold both. */
KFN int hd_long_scales(const struct ht_dispatch_params *p)
{
    return (uint64_t)p->signature.scale_bytes > p->g->ht.scale_pitch;
}

KFN size_t hd_row_bytes(const struct ht_dispatch_params *p)
{
    return row_scales_at(&p->signature) + (hd_long_scales(p) ? up16((size_t)p->signature.scale_bytes) : 0);
}

/* A record: where the row goes (ht_rounds.h), then its scales and weights, each from a multiple of 16. */
KFN size_t hd_scales_at(const struct ht_dispatch_params *p)
{
    return ht_route_bytes(p->h);
}

KFN size_t hd_weights_at(const struct ht_dispatch_params *p)
{
    return hd_scales_at(p) + (hd_long_scales(p) ? 0 : up16((size_t)p->signature.scale_bytes));
}

KFN size_t hd_record_bytes(const struct ht_dispatch_params *p)
{
    return hd_weights_at(p) + (p->signature.extra & SIGNATURE_WEIGHTS ? up16((size_t)p->h->state->topk * 4) : 0);
}

/* Where the network reads row t: in the caller's tensor, or staged. Staged rows touch where no scales lie between them,
 * so that puts of neighbours merge. */
KFN uint64_t hd_row_at(const struct ht_dispatch_params *p, int64_t t)
{
    return p->in_place
               ? p->in_place + (uint64_t)(t * p->in.stride)
               : p->g->ht.stage + (uint64_t)t * (row_scales_at(&p->signature) + up16((size_t)p->signature.scale_bytes));
}

KFN void hd_write_record(struct agent *ag, const struct ht_dispatch_params *p, char *to, int64_t t)
{
    const int K = p->h->state->topk;
    const char *staged = net_at(p->g, hd_row_at(p, t));

    ht_write_route(ag, p->h, p->layout, to, t);
    if (p->in.nscales && !hd_long_scales(p))
        row_copy_scales(ag, to + hd_scales_at(p), 4, p->in.scales + t * p->in.scale_row_stride, p->in.scale_stride,
                        p->in.nscales);
    else if (p->signature.scale_bytes && !hd_long_scales(p))
        ag_copy(ag, to + hd_scales_at(p), staged + row_scales_at(&p->signature), (size_t)p->signature.scale_bytes);
    if (p->signature.extra & SIGNATURE_WEIGHTS)
        ag_copy(ag, to + hd_weights_at(p), p->weights + t * K, (size_t)K * 4);
}

/* Token t of round r for other nodes: staged if need be, and its records written. */
KFN_STEP void hd_stage_token(struct agent *ag, const struct ht_dispatch_params *p, int r, int64_t t)
{
    const struct group_dev *g = p->g;
    const struct handle_dev *h = p->h;
    const int K = h->state->topk;
    const size_t record = hd_record_bytes(p);
    int staged = p->in_place != 0;

    for (int k = 0; k < K; k++) {
        const int32_t id = h->ids[t * K + k];
        if (id < 0 || h->nidx[t * K + k] < 0)
            continue;
        const int n = g->node_of[id / g->local_experts], i = h->nidx[t * K + k] - ht_rows_before(g, h, r, n);
        if (!staged) {
            row_stage(ag, net_at(g, hd_row_at(p, t)), &p->in, &p->signature, t);
            ag_sync(ag);
        }
        staged = 1;
        hd_write_record(ag, p, net_at(g, ht_out_block(g, h, n, r, record)) + HT_HEADER_BYTES + (size_t)i * record, t);
    }
}

/* Puts one copy of token t to each node that wants it, through one ring: commands of one ring are pushed together. */
KFN void hd_put_token(struct agent *ag, const struct ht_dispatch_params *p, struct put_batch *batch, int ring, int r,
                      int64_t t)
{
    const struct group_dev *g = p->g;
    const struct handle_dev *h = p->h;
    const int K = h->state->topk;
    const size_t bytes = hd_row_bytes(p);

    for (int k = 0; k < K; k++) {
        const int32_t id = h->ids[t * K + k];
        const int n = id < 0 || h->nidx[t * K + k] < 0 ? -1 : g->node_of[id / g->local_experts];
        if (n < 0 || !ht_sends_to(g, n) || ring_of(g, g->relay_rank[n], COUNTER(SIG_HD_ROWS, ht_slot(r))) != ring)
            continue;
        put(ag, g, batch, g->relay_rank[n], COUNTER(SIG_HD_ROWS, ht_slot(r)), hd_row_at(p, t),
            ht_relay_slot(g, g->relay_slot[n], r) + (uint64_t)(h->nidx[t * K + k] - ht_rows_before(g, h, r, n)) * bytes,
            (uint32_t)bytes);
    }
}

/* The slots of round r are free at all relays. One agent. */
KFN_STEP int hd_wait_credits(struct agent *ag, const struct ht_dispatch_params *p, int r)
{
    const struct group_dev *g = p->g;
    const uint64_t start = ag_now(ag);

    while (r >= HT_SLOTS) {
        int mine = -1;
        AG_EACH(ag, int, n, g->nnodes)
        {
            if (mine < 0 && ht_sends_to(g, n) && !ht_there(g, SIG_HD_FREE, r, g->relay_rank[n], ht_laps(r)))
                mine = n;
        }
        const int late = ht_missing(ag, mine);
        if (late < 0)
            break;
        if (ht_wait_counter(ag, g, SIG_HD_FREE, r, g->relay_rank[late], ht_laps(r), PHASE_HD_FREE, start))
            return 1;
    }
    return 0;
}

/* Puts the rows of tokens [begin, end), which begin in round r. */
KFN_STEP int hd_put_tokens(struct agent *ag, const struct ht_dispatch_params *p, int r, int64_t begin, int64_t end)
{
    const struct group_dev *g = p->g;
    struct put_batch batch;

    put_begin(&batch);
    for (int ring = 0; ring < g->nrings; ring++) {
        int at = r;
        for (int64_t t = begin; t < end; t++) {
            while (t >= ht_round_token(g, p->h, at + 1))
                at++;
            hd_put_token(ag, p, &batch, ring, at, t);
        }
    }
    return put_flush(ag, g, &batch) ? push_failed(ag, g, batch.failed) : 0;
}

#define HD_RUN 4 /* least tokens that an agent puts: the proxy merges neighbours */

/* Where each stage is a launch: rows leave as soon as a run of them is written, and blocks when all records are.
 * hd_landed() has waited for credits. point: of sync_last(), another one in each call of a launch. */
KFN_STEP int hd_send_runs(struct agent *ag, const struct ht_dispatch_params *p, int first, int end, int point)
{
    const struct group_dev *g = p->g;
    const int64_t from = ht_round_token(g, p->h, first), to = ht_round_token(g, p->h, end);
    const int64_t step = (int64_t)ht_writers(ag, to - from) * HT_RUN;
    int r = first;

    for (int64_t begin = from + (int64_t)ag_index(ag) * HT_RUN; begin < to && ag_index(ag) * HT_RUN < step;
         begin += step) {
        const int64_t stop = begin + HT_RUN < to ? begin + HT_RUN : to;
        while (begin >= ht_round_token(g, p->h, r + 1))
            r++;
        int at = r;
        for (int64_t t = begin; t < stop; t++) {
            while (t >= ht_round_token(g, p->h, at + 1))
                at++;
            hd_stage_token(ag, p, at, t);
        }
        ag_sync(ag);
        if (hd_put_tokens(ag, p, r, begin, stop))
            return 1;
    }
    if (!sync_last(ag, g, point))
        return 0;
    for (r = first; r < end; r++)
        if (ht_put_blocks(ag, g, p->h, SIG_HD_BLOCK, r, hd_record_bytes(p)))
            return 1;
    return 0;
}

/* Rounds [first, end) of the own tokens to the relays: their records, one barrier, then commands. Each agent has a run
 * of tokens. One agent waits for credits. */
KFN_STEP int hd_send_at_once(struct agent *ag, const struct ht_dispatch_params *p, int first, int end)
{
    const struct group_dev *g = p->g;
    const int64_t from = ht_round_token(g, p->h, first), to = ht_round_token(g, p->h, end);
    const int64_t each = (to - from + ag_count(ag) - 1) / ag_count(ag), run = each < HD_RUN ? HD_RUN : each;
    const int64_t begin = from + run * ag_index(ag), stop = begin + run < to ? begin + run : to;
    int r = first;

    for (int64_t t = from + ag_index(ag); t < to; t += ag_count(ag)) {
        while (t >= ht_round_token(g, p->h, r + 1))
            r++;
        hd_stage_token(ag, p, r, t);
    }
    for (r = first; r < end && ag_index(ag) == 0; r++)
        if (hd_wait_credits(ag, p, r))
            return 1;
    if (sync_barrier(ag, g))
        return 1;
    for (r = first; r < end && ag_index(ag) == ag_count(ag) - 1; r++)
        if (ht_put_blocks(ag, g, p->h, SIG_HD_BLOCK, r, hd_record_bytes(p)))
            return 1;
    return begin < stop ? hd_put_tokens(ag, p, first, begin, stop) : 0;
}

/* The same for as many rounds as there are, of at most HT_SLOTS. On a CPU one by one: a relay forwards a round while
 * the next one comes. In launches a turn at a time, for the same reason: blocks that came after the rows of all slots
 * would keep the relay from its first turn until the network has nothing left to send. */
KFN_STEP int hd_send_rounds(struct agent *ag, const struct ht_dispatch_params *p, int first, int end)
{
    const int last = end < p->h->state->rounds ? end : p->h->state->rounds, step = AG_STAGED ? HT_TURN_STAGED : 1;

    for (int r = first; r < last; r += step) {
        const int to = r + step < last ? r + step : last;
        if (AG_STAGED ? hd_send_runs(ag, p, r, to, 3 - (r - first) / step) : hd_send_at_once(ag, p, r, to))
            return 1;
    }
    return 0;
}

/* Does a rank of the node take the row of these ids itself? */
KFN int hd_is_taken(struct agent *ag, const struct ht_dispatch_params *p, const struct hd_desc *descs,
                    const int32_t *ids)
{
    const struct group_dev *g = p->g;
    int taken = 0;

    AG_EACH(ag, int, k, p->h->state->topk)
    {
        const int d = ids[k] < 0 ? -1 : ids[k] / g->local_experts;
        taken |= d >= 0 && is_local(g, d) && g->mask[d] && (descs ? &descs[d] : hd_desc_of(g, d))->pulls & HD_PULLS;
    }
    return ag_any(ag, taken);
}

/* For those that take row i of round r of source number j themselves: its record, and, where they do not reach the
 * slot, a copy of the row. Where this rank reads the row from now on: the slot may be across a bus. */
KFN_STEP const char *hd_show_relayed(struct agent *ag, const struct ht_dispatch_params *p, const struct hd_desc *descs,
                                     const char *record, int j, int r, int i)
{
    const struct group_dev *g = p->g;
    const size_t bytes = hd_record_bytes(p), at = HT_HEADER_BYTES + (size_t)i * bytes;
    const char *row = net_at(g, ht_relay_slot(g, j, r)) + (size_t)i * hd_row_bytes(p);
    char *copy = heap_at(g, g->rank, ht_shown_slot(g, j, r)) + (size_t)i * hd_row_bytes(p);

    if (!g->ht.split) {
        if (AG_STAGED)
            ag_copy(ag, net_at(g, ht_relay_block(g, j, r)) + at, record, ht_route_bytes(p->h));
        return row;
    }
    ag_copy(ag, heap_at(g, g->rank, ht_shown_block(g, j, r)) + at, record, bytes);
    if (!hd_is_taken(ag, p, descs, (const int32_t *)record + 1))
        return row;
    ag_copy(ag, copy, row, hd_row_bytes(p));
    ag_sync(ag);
    return copy;
}

/* Row i of round r of source number j, in its slot. */
KFN int hd_forward_row(struct agent *ag, const struct ht_dispatch_params *p, const struct hd_desc *descs, int j, int r,
                       int i, int pulled)
{
    const struct group_dev *g = p->g;
    const int K = p->h->state->topk, s = g->relay_sources[j];
    const size_t bytes = hd_record_bytes(p);
    char *record =
        ht_copy_record(ag, g, net_at(g, ht_relay_block(g, j, r)) + HT_HEADER_BYTES + (size_t)i * bytes, bytes);
    struct hd_row row;

    if (ht_resolve_route(ag, g, p->h, p->layout, j, record))
        return fail_all(ag, g, KSTATUS_MISMATCH, PHASE_HD_ROWS, s, g->experts, -1);
    row.ids = (const int32_t *)record + 1;
    row.pos = (const int32_t *)record + 1 + K;
    row.weights = p->signature.extra & SIGNATURE_WEIGHTS ? (const float *)(record + hd_weights_at(p)) : NULL;
    row.line = p->signature.extra & SIGNATURE_MAP && p->h->line ? row.pos + K : NULL;
    row.src_rank = s;
    row.src_token = *(const int32_t *)record;
    row.data = pulled ? hd_show_relayed(ag, p, descs, record, j, r, i)
                      : net_at(g, ht_relay_slot(g, j, r)) + (size_t)i * hd_row_bytes(p);
    row.scales = hd_long_scales(p) ? row.data + row_scales_at(&p->signature) : record + hd_scales_at(p);
    row.scale_stride = 4;
    row.scratch = NULL;
    row.descs = descs;
    row.own = NULL;
    row.bare = 0;
    hd_place_row(ag, p, &row);
    return 0;
}

/* The slot of (source number j, round r) is free again. One agent. */
KFN void hd_put_credit(struct agent *ag, const struct group_dev *g, struct put_batch *batch, int j, int r)
{
    put(ag, g, batch, g->relay_sources[j], COUNTER(SIG_HD_FREE, ht_slot(r)), 0, 0, 0);
}

KFN int hd_credit_now(struct agent *ag, const struct group_dev *g, int j, int r)
{
    struct put_batch batch;

    put_begin(&batch);
    hd_put_credit(ag, g, &batch, j, r);
    return put_flush(ag, g, &batch) ? push_failed(ag, g, batch.failed) : 0;
}

/* Rows of round r of source number j, as they land. One launch for all stages: one agent, which gives the credit at
 * once. Else all agents, and hd_release_rounds() gives it; `before` rows of other rounds are shared out already.
 * `pulled`: others take rows from the slot, and hd_release_rounds() gives the credit. */
KFN_STEP int hd_forward_round(struct agent *ag, const struct ht_dispatch_params *p, const struct hd_desc *descs, int j,
                              int r, int64_t before, int pulled)
{
    const struct group_dev *g = p->g;
    const int n = p->h->relay_rows[(size_t)j * (size_t)g->ht.rounds + (size_t)r];
    const int A = AG_STAGED ? ag_count(ag) : 1, me = AG_STAGED ? (int)ht_first_item(ag, before) : 0;

    if (!AG_STAGED && (r * g->relay_count + j) % ag_count(ag) != ag_index(ag))
        return 0;
    if (!AG_STAGED && ht_wait_round(ag, g, p->h, SIG_HD_BLOCK, j, r, &p->signature, ag_now(ag)))
        return 1;
    if (INJECT_BUG(BUG_EARLY_CREDIT, p->h->relay_rounds[j] > HT_SLOTS && !pulled, 0) && hd_credit_now(ag, g, j, r))
        return 1;
    if (writes_begin(ag, g, PHASE_HD_ROWS))
        return 1;
    int odd = 0;
    for (int i = me; i < n && !odd; i += A)
        odd = hd_forward_row(ag, p, descs, j, r, i, pulled);
    writes_end(ag, g);
    if (odd)
        return 1;
    if (AG_STAGED || pulled || INJECT_BUG(BUG_EARLY_CREDIT, 1, p->h->relay_rounds[j] <= HT_SLOTS))
        return 0;
    ag_sync(ag);
    return hd_credit_now(ag, g, j, r);
}

#if AG_STAGED
/* Stage HD_LANDED: `many` rounds to forward have landed, and rounds [from, to), which are sent next, have slots. One
 * agent. */
KFN_STEP int hd_landed(struct agent *ag, const struct ht_dispatch_params *p, int first, int many, int from, int to)
{
    if (ht_wait_rounds(ag, p->g, p->h, SIG_HD_BLOCK, first, many, &p->signature))
        return 1;
    for (int r = from; r < to && r < p->h->state->rounds; r++)
        if (hd_wait_credits(ag, p, r))
            return 1;
    return 0;
}
#endif

/* The slots of rounds [first, end), which are forwarded. One agent, when all are through. */
KFN_STEP int hd_release_rounds(struct agent *ag, const struct ht_dispatch_params *p, int first, int end)
{
    const struct group_dev *g = p->g;
    struct put_batch batch;

    put_begin(&batch);
    for (int r = first < 0 ? 0 : first; r < end; r++)
        for (int j = 0; j < g->relay_count; j++)
            if (ht_relays(g, p->h, j, r) && p->h->relay_rounds[j] > HT_SLOTS)
                hd_put_credit(ag, g, &batch, j, r);
    return put_flush(ag, g, &batch) ? push_failed(ag, g, batch.failed) : 0;
}

/* Stage HD_FORWARD: the next own rounds, and, as a relay, rows of other nodes. */
KFN_STEP int hd_turn(struct agent *ag, const struct ht_dispatch_params *p, int turn)
{
    const struct group_dev *g = p->g;
    const struct hd_desc *descs = hd_descs(ag, g);
    const int first = turn * ht_turn(p->h);
    int64_t before = 0;

    if (turn > 0 && hd_send_rounds(ag, p, first - ht_turn(p->h) + HT_SLOTS, first + HT_SLOTS))
        return 1;
    for (int r = first; r < first + ht_turn(p->h); r++) {
        for (int j = 0; j < g->relay_count; j++) {
            if (!ht_relays(g, p->h, j, r))
                continue;
            if (hd_forward_round(ag, p, descs, j, r, before, 0))
                return 1;
            before += p->h->relay_rows[(size_t)j * (size_t)g->ht.rounds + (size_t)r];
        }
    }
#if AG_STAGED
    if (sync_last(ag, g, 2))
        return hd_release_rounds(ag, p, first, first + ht_turn(p->h));
#endif
    return 0;
}

/* One credit for all rounds of a source that has waited for none. One agent. */
KFN_STEP void hd_release(struct agent *ag, const struct ht_dispatch_params *p)
{
    const struct group_dev *g = p->g;
    struct put_batch batch;

    put_begin(&batch);
    for (int j = 0; j < g->relay_count; j++)
        if (ht_relays(g, p->h, j, 0) && p->h->relay_rounds[j] <= HT_SLOTS)
            hd_put_credit(ag, g, &batch, j, 0);
    if (put_flush(ag, g, &batch))
        push_failed(ag, g, batch.failed); /* as in signal_peers() */
}

/* What the slots have counted in this operation. One lane. */
KFN_STEP void hd_count_rounds(const struct ht_dispatch_params *p)
{
    const struct group_dev *g = p->g;
    const struct handle_dev *h = p->h;

    for (int n = 0; n < g->nnodes; n++)
        for (int slot = 0; slot < HT_SLOTS && ht_sends_to(g, n); slot++)
            ht_count(g, SIG_HD_FREE, slot, g->relay_rank[n], ht_credits(h->state->rounds, slot));
    for (int j = 0; j < g->relay_count; j++) {
        const int s = g->relay_sources[j];
        for (int slot = 0; slot < HT_SLOTS && g->mask[s]; slot++)
            ht_count(g, SIG_HD_BLOCK, slot, s, ht_uses(h->relay_rounds[j], slot));
        for (int r = 0; r < h->relay_rounds[j] && g->mask[s]; r++)
            ht_count(g, SIG_HD_ROWS, ht_slot(r), s,
                     (uint64_t)h->relay_rows[(size_t)j * (size_t)g->ht.rounds + (size_t)r]);
    }
}

#endif
