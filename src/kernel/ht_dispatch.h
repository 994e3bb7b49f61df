/* SPDX-License-Identifier: Apache-2.0 */
/*
 * High-throughput dispatch, epoch e. Routing is known (ht_notify.h): every row has its final place.
 *
 *   sender s                                          receiver d of the node
 *                                                     descriptor: where its tensors are (the caller's own in epx_alloc
 *   wait HD_READY[node] >= e  <---------------------    memory, else the receive buffer); signal HD_READY = e
 *   read each row once, write it straight to its      zero its padding, mark the rows past the end
 *     place at every destination of the node
 *   signal HD_DATA = e  ---------------------------->  wait HD_DATA[node] >= e
 *                                                      copy from the receive buffer, if it was used
 *
 * Between nodes ONE copy of a row goes to each node that wants it: to a relay there, in rounds (ht_rounds.h), with a
 * record of where it goes. The relay writes it straight to its places in its node, as if it were its own row; its
 * HD_DATA = e to the node covers what it forwarded.
 *
 * Where a rank of the node gets more rows than a receive buffer holds, those of tensors in ordinary memory pass through
 * windows instead (ht_window.h).
 *
 * A receiver's next descriptor comes only after this epoch's HD_DATA of all: no row can land in the wrong epoch.
 */
#ifndef EPX_KERNEL_HT_DISPATCH_H
#define EPX_KERNEL_HT_DISPATCH_H

#include "kernel/ht_place.h"
#include "kernel/ht_receive.h"
#include "kernel/ht_rounds.h"
#include "kernel/ht_take.h"

KFN void hd_send_token(struct agent *ag, const struct ht_dispatch_params *p, int t, char *scratch,
                       const struct hd_desc *descs)
{
    const int K = p->h->state->topk;
    struct hd_row r;

    r.ids = p->h->ids + (size_t)t * K;
    r.pos = p->h->pos + (size_t)t * K;
    r.weights = p->weights ? p->weights + (size_t)t * K : NULL;
    r.line = p->signature.extra & SIGNATURE_MAP && p->h->line ? p->h->line + (size_t)t * K : NULL;
    r.src_rank = p->g->rank;
    r.src_token = t;
    r.data = row_tokens(&p->in, t);
    r.scales = p->in.scales + t * p->in.scale_row_stride;
    r.scale_stride = p->in.scale_stride;
    r.scratch = scratch;
    r.descs = descs;
    r.near = NULL;
    hd_place_row(ag, p, &r);
}

/* The descriptors of the node, which do not change any more, in memory of the block; NULL where it has none. */
KFN const struct hd_desc *hd_descs(struct agent *ag, const struct group_dev *g)
{
#if AG_BLOCKS
    const int words = (int)(sizeof(struct hd_desc) / 4);
    int32_t *memory = ag_block_memory(ag, g->nranks * words);

    if (!memory)
        return NULL;
    AG_EACH_BLOCK(ag, int, i, g->nranks *words)
    {
        if (is_local(g, i / words))
            memory[i] = ((const int32_t *)hd_desc_of(g, i / words))[i % words];
    }
    ag_block_any(ag, 0);
    return (const struct hd_desc *)memory;
#else
    (void)ag;
    (void)g;
    return NULL;
#endif
}

/* ---- Between nodes -------------------------------------------------------------------------------------------- */

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
    return put_flush(ag, g, &batch) ? push_failed(ag, g) : 0;
}

#define HD_RUN 4 /* least tokens that an agent puts: the proxy merges neighbours */

/* Rounds [first, end) of the own tokens to the relays: their records, one barrier, then commands. Each agent has a run
 * of tokens. One agent waits for credits; where each stage is a launch, hd_landed() has waited. */
KFN_STEP int hd_send_some(struct agent *ag, const struct ht_dispatch_params *p, int first, int end)
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
    for (r = first; r < end && !AG_STAGED && ag_index(ag) == 0; r++)
        if (hd_wait_credits(ag, p, r))
            return 1;
    if (sync_barrier(ag, g))
        return 1;
    for (r = first; r < end && ag_index(ag) == ag_count(ag) - 1; r++)
        if (ht_put_blocks(ag, g, p->h, SIG_HD_BLOCK, r, hd_record_bytes(p)))
            return 1;
    return begin < stop ? hd_put_tokens(ag, p, first, begin, stop) : 0;
}

/* The same for as many rounds as there are. On a CPU one by one: a relay forwards a round while the next one comes. */
KFN_STEP int hd_send_rounds(struct agent *ag, const struct ht_dispatch_params *p, int first, int end)
{
    const int last = end < p->h->state->rounds ? end : p->h->state->rounds, step = AG_STAGED ? HT_SLOTS : 1;

    for (int r = first; r < last; r += step)
        if (hd_send_some(ag, p, r, r + step < last ? r + step : last))
            return 1;
    return 0;
}

/* Row i of round r of source number j, in its slot. */
KFN int hd_forward_row(struct agent *ag, const struct ht_dispatch_params *p, const struct hd_desc *descs, int j, int r,
                       int i)
{
    const struct group_dev *g = p->g;
    const int K = p->h->state->topk, s = g->relay_sources[j];
    const size_t bytes = hd_record_bytes(p);
    char *record =
        ht_near_record(ag, g, net_at(g, ht_relay_block(g, j, r)) + HT_HEADER_BYTES + (size_t)i * bytes, bytes);
    struct hd_row row;

    if (ht_resolve_route(ag, g, p->h, p->layout, j, record))
        return fail_all(ag, g, KSTATUS_MISMATCH, PHASE_HD_ROWS, s, g->experts, -1);
    row.ids = (const int32_t *)record + 1;
    row.pos = (const int32_t *)record + 1 + K;
    row.weights = p->signature.extra & SIGNATURE_WEIGHTS ? (const float *)(record + hd_weights_at(p)) : NULL;
    row.line = p->signature.extra & SIGNATURE_MAP && p->h->line ? row.pos + K : NULL;
    row.src_rank = s;
    row.src_token = *(const int32_t *)record;
    row.data = net_at(g, ht_relay_slot(g, j, r)) + (size_t)i * hd_row_bytes(p);
    row.scales = hd_long_scales(p) ? row.data + row_scales_at(&p->signature) : record + hd_scales_at(p);
    row.scale_stride = 4;
    row.scratch = NULL;
    row.descs = descs;
    row.near = NULL;
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
    return put_flush(ag, g, &batch) ? push_failed(ag, g) : 0;
}

/* Block and rows of (source number j, round r) are there. One agent. */
KFN_STEP int hd_wait_round(struct agent *ag, const struct ht_dispatch_params *p, int j, int r, uint64_t start)
{
    const struct group_dev *g = p->g;

    return ht_wait_block(ag, g, SIG_HD_BLOCK, PHASE_HD_ROWS, j, r, &p->signature, start) ||
           ht_wait_counter(ag, g, SIG_HD_ROWS, r, g->relay_sources[j], ht_rows_expected(g, p->h, j, r), PHASE_HD_ROWS,
                           start);
}

/* Rows of round r of source number j, as they land. One launch for all stages: one agent, which gives the credit at
 * once. Else all agents, and hd_release_turn() gives it; `before` rows of other rounds are shared out already. */
KFN_STEP int hd_forward_round(struct agent *ag, const struct ht_dispatch_params *p, const struct hd_desc *descs, int j,
                              int r, int64_t before)
{
    const struct group_dev *g = p->g;
    const int n = p->h->relay_rows[(size_t)j * (size_t)g->ht.rounds + (size_t)r];
    const int A = AG_STAGED ? ag_count(ag) : 1, me = AG_STAGED ? (int)ht_first_item(ag, before) : 0;

    if (!AG_STAGED && (r * g->relay_count + j) % ag_count(ag) != ag_index(ag))
        return 0;
    if (!AG_STAGED && hd_wait_round(ag, p, j, r, ag_now(ag)))
        return 1;
    if (INJECT_BUG(BUG_EARLY_CREDIT, p->h->relay_rounds[j] > HT_SLOTS, 0) && hd_credit_now(ag, g, j, r))
        return 1;
    if (writes_begin(ag, g, PHASE_HD_ROWS))
        return 1;
    int odd = 0;
    for (int i = me; i < n && !odd; i += A)
        odd = hd_forward_row(ag, p, descs, j, r, i);
    writes_end(ag, g);
    if (odd)
        return 1;
    if (AG_STAGED || INJECT_BUG(BUG_EARLY_CREDIT, 1, p->h->relay_rounds[j] <= HT_SLOTS))
        return 0;
    ag_sync(ag);
    return hd_credit_now(ag, g, j, r);
}

#if AG_STAGED
KFN int hd_round_there(const struct ht_dispatch_params *p, int j, int r)
{
    const struct group_dev *g = p->g;
    const int s = g->relay_sources[j];

    return ht_there(g, SIG_HD_BLOCK, r, s, ht_laps(r) + 1) &&
           ht_there(g, SIG_HD_ROWS, r, s, ht_rows_expected(g, p->h, j, r));
}

/* Stage HD_LANDED: what this turn forwards has landed, and what it sends has slots. One agent. */
KFN_STEP int hd_landed(struct agent *ag, const struct ht_dispatch_params *p, int turn)
{
    const struct group_dev *g = p->g;
    const int many = ht_turn(p->h), first = turn * many;
    const uint64_t start = ag_now(ag);

    for (;;) {
        int mine = -1;
        AG_EACH(ag, int, i, many * g->relay_count)
        {
            const int j = ht_item_source(g, i), r = ht_item_round(g, first, i);
            if (mine < 0 && ht_relays(g, p->h, j, r) && !hd_round_there(p, j, r))
                mine = i;
        }
        const int late = ht_missing(ag, mine);
        if (late < 0)
            break;
        if (hd_wait_round(ag, p, ht_item_source(g, late), ht_item_round(g, first, late), start))
            return 1;
    }
    if (ht_check_blocks(ag, g, p->h, first, first + many, &p->signature, PHASE_HD_ROWS))
        return 1;
    for (int r = first - many + HT_SLOTS; turn > 0 && r < first + HT_SLOTS && r < p->h->state->rounds; r++)
        if (hd_wait_credits(ag, p, r))
            return 1;
    return 0;
}

/* The slots that this turn has forwarded. One agent, when all are through. */
KFN_STEP int hd_release_turn(struct agent *ag, const struct ht_dispatch_params *p, int turn)
{
    const struct group_dev *g = p->g;
    struct put_batch batch;

    put_begin(&batch);
    for (int r = turn * ht_turn(p->h); r < (turn + 1) * ht_turn(p->h); r++)
        for (int j = 0; j < g->relay_count; j++)
            if (ht_relays(g, p->h, j, r) && p->h->relay_rounds[j] > HT_SLOTS)
                hd_put_credit(ag, g, &batch, j, r);
    return put_flush(ag, g, &batch) ? push_failed(ag, g) : 0;
}
#endif

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
            if (hd_forward_round(ag, p, descs, j, r, before))
                return 1;
            before += p->h->relay_rows[(size_t)j * (size_t)g->ht.rounds + (size_t)r];
        }
    }
#if AG_STAGED
    if (sync_last(ag, g, 2))
        return hd_release_turn(ag, p, turn);
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
        push_failed(ag, g); /* as in signal_peers() */
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

/* ---- The operation ----------------------------------------------------------------------------------------------- */

/* Counted once per operation, by one lane. */
KFN_STEP void hd_count(const struct ht_dispatch_params *p)
{
    const struct group_dev *g = p->g;
    const struct handle_dev *h = p->h;
    uint64_t all = 0, remote = 0;

    for (int n = 0; n < g->nnodes && g->nnodes > 1; n++)
        remote += ht_sends_to(g, n) ? (uint64_t)ht_rows_before(g, h, h->state->rounds, n) : 0;
    if (remote)
        ag_add_stat(&g->stats->rows_remote, remote);
    for (int e = 0; e < g->experts && p->layout == LAYOUT_EXPERT_MAJOR; e++)
        all += (uint64_t)h->ecount[e];
    for (int r = 0; r < g->nranks && p->layout == LAYOUT_FLAT; r++)
        all += (uint64_t)h->rcount[r];
    ag_add_stat(&g->stats->rows_sent, all);
    ag_add_stat(&g->stats->bytes_peer, (uint64_t)h->state->peer_rows * (uint64_t)p->signature.hidden_bytes);
    ag_add_stat(&g->stats->rows_received, (uint64_t)h->state->filled_rows);
    if (p->buffered & BUFFERED_TOKENS)
        ag_add_stat(&g->stats->bytes_local, (uint64_t)h->state->filled_rows * (uint64_t)p->signature.hidden_bytes);
}

/* The own descriptor, and the signal that it is written. One agent. */
KFN_STEP int hd_open(struct agent *ag, const struct ht_dispatch_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    if (g->nnodes > 1 && ht_wait_all_free(ag, g))
        return 1;
    if (ag_leader(ag)) {
        struct hd_desc *desc = (struct hd_desc *)heap_at(g, g->rank, g->ht.dispatch_desc);
        *desc = p->desc;
        desc->pulls = p->buffered && p->h->state->windowed;
    }
    ag_sync(ag);
    signal_peers(ag, g, SCOPE_NODE, SIG_HD_READY, 0, epoch);
    return 0;
}

/* Stage HD_READY: the descriptors of the node are written, and agree. */
KFN_STEP int hd_ready(struct agent *ag, const struct ht_dispatch_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    if (ht_check_routing(ag, g, p->h, p->key, p->ntokens, PHASE_HD_READY))
        return 1;
    if (ag_index(ag) == 0 && hd_open(ag, p, epoch))
        return 1;
    if (wait_peers(ag, g, SCOPE_NODE, SIG_HD_READY, 0, epoch, PHASE_HD_READY, NULL))
        return 1;
    if (check_node(ag, g, &p->signature, g->ht.dispatch_desc, PHASE_HD_READY))
        return 1;
    return AG_STAGED && !p->turns && hd_any_pulls(ag, p) && hd_windows(ag, p, epoch);
}

/* All rows that this rank writes into its node are written. */
KFN void hd_rows_done(struct agent *ag, const struct ht_dispatch_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    if (!sync_last(ag, g, 0))
        return;
    if (ag_leader(ag))
        g->state->epoch[OP_HT_DISPATCH] = epoch;
    ag_sync(ag);
    signal_peers(ag, g, SCOPE_NODE, SIG_HD_DATA, 0, epoch);
    if (g->nnodes > 1)
        hd_release(ag, p);
    if (ag_leader(ag)) {
        if (g->nnodes > 1)
            hd_count_rounds(p);
        hd_count(p);
    }
}

/* Stage HD_ROWS: the own tokens. */
KFN int hd_rows(struct agent *ag, const struct ht_dispatch_params *p)
{
    const struct group_dev *g = p->g;
    const struct hd_desc *descs = hd_descs(ag, g);
    char *scratch = NULL;

    if (p->in.cast &&
        !(scratch = (char *)ag_scratch(ag, row_scales_at(&p->signature) + (size_t)p->signature.scale_bytes)))
        return fail_all(ag, g, KSTATUS_MEMORY, PHASE_HD_READY, -1, p->signature.hidden_bytes, 0);
    if (p->layout == LAYOUT_EXPERT_MAJOR)
        hd_zero_padding(ag, p);
    else
        hd_mark_tail(ag, p);
    if (g->nnodes > 1) {
        ht_write_headers(ag, g, p->h, &p->signature, hd_record_bytes(p));
        if (hd_send_rounds(ag, p, 0, HT_SLOTS))
            return 1;
    }
    if (writes_begin(ag, g, PHASE_HD_DATA))
        return 1;
    for (int t = ag_index(ag); t < p->h->state->ntokens; t += ag_count(ag))
        hd_send_token(ag, p, t, scratch, descs);
    writes_end(ag, g);
    return 0;
}

/* Stage HD_DATA: all rows of this rank are there, and the network has read those that it sends from the caller's
 * tensor. */
KFN_STEP int hd_data(struct agent *ag, const struct ht_dispatch_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    if (wait_peers(ag, g, SCOPE_NODE, SIG_HD_DATA, 0, epoch, PHASE_HD_DATA, NULL))
        return 1;
    const int64_t lines = p->h->state->windowed ? p->near.map_lines : p->desc.map_lines;
    if (p->h->state->recv_rows > hd_capacity(p))
        report(ag, g, KSTATUS_OVERFLOW, PHASE_HD_DATA, -1, p->h->state->recv_rows, hd_capacity(p), 0, 0);
    else if (p->signature.extra & SIGNATURE_MAP && p->h->state->tokens > lines)
        report(ag, g, KSTATUS_OVERFLOW, PHASE_HD_DATA, -1, p->h->state->tokens, lines, 0, 0);
    if (!p->in_place || ag_index(ag) != 0)
        return 0;
    /* In one launch the agent that came last may still be giving credits (hd_rows_done). */
    return AG_STAGED ? wait_all_sent(ag, g, PHASE_HD_SENT) : wait_sent(ag, g, PHASE_HD_SENT);
}

KFN int hd_run(struct agent *ag, const struct ht_dispatch_params *p, uint64_t epoch)
{
    if (stage_runs(ag, HD_READY) && hd_ready(ag, p, epoch))
        return 1;
    STAGE_MARK(ag, HD_READY, MARK_READY);
    if (stage_runs(ag, HD_ROWS) && hd_rows(ag, p))
        return 1;
    STAGE_MARK(ag, HD_ROWS, MARK_ROWS);
#if AG_STAGED
    if (stage_runs(ag, HD_LANDED) &&
        (p->nodes ? hd_landed(ag, p, stage_turn(ag)) : hd_step_gate(ag, p, epoch, stage_turn(ag))))
        return 1;
    STAGE_MARK(ag, HD_LANDED, MARK_LANDED);
    if (stage_runs(ag, HD_FORWARD) && p->nodes && hd_turn(ag, p, stage_turn(ag)))
        return 1;
    if (stage_runs(ag, HD_FORWARD) && !p->nodes && hd_step_work(ag, p, epoch, stage_turn(ag)))
        return 1;
    STAGE_MARK(ag, HD_FORWARD, MARK_FORWARD);
    if (p->turns ? stage_runs(ag, HD_FORWARD) && stage_turn(ag) == p->turns - 1 : stage_runs(ag, HD_ROWS))
        hd_rows_done(ag, p, epoch);
#else
    for (int turn = 0; p->nodes && turn * ht_turn(p->h) < p->h->state->most_rounds; turn++)
        if (hd_turn(ag, p, turn))
            return 1;
    if (hd_any_pulls(ag, p) && hd_windows(ag, p, epoch))
        return 1;
    AG_MARK(ag, MARK_FORWARD);
    hd_rows_done(ag, p, epoch);
#endif
    if (stage_runs(ag, HD_DATA) && hd_data(ag, p, epoch))
        return 1;
    STAGE_MARK(ag, HD_DATA, MARK_DATA);
    if (stage_runs(ag, HD_COPY_OUT) && p->buffered && !p->h->state->windowed)
        hd_copy_recv_buf(ag, p);
    STAGE_MARK(ag, HD_COPY_OUT, MARK_COPY_OUT);
    return 0;
}

KFN void kernel_ht_dispatch(struct agent *ag, const struct ht_dispatch_params *p)
{
    const uint64_t epoch = stage_epoch(ag, p->g, OP_HT_DISPATCH, HD_FORWARD);

    if (!kernel_begin_agreed(ag, p->g) && !(p->if_expected && p->h->state->unexpected) && !ht_too_many(ag, p->g, p->h))
        hd_run(ag, p, epoch);
    kernel_end(ag, p->g);
}

#endif
