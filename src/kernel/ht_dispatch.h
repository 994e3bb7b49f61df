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
 * Where a rank of the node gets more rows than a receive buffer holds, it takes those of tensors in ordinary memory
 * itself: from the tokens of the other ranks if these are in reach, else from their windows (ht_window.h).
 *
 * A receiver's next descriptor comes only after this epoch's HD_DATA of all: no row can land in the wrong epoch.
 */
#ifndef EPX_KERNEL_HT_DISPATCH_H
#define EPX_KERNEL_HT_DISPATCH_H

#include "kernel/ht_receive.h"
#include "kernel/ht_take.h"

KFN struct hd_row hd_own_row(const struct ht_dispatch_params *p, int t, char *scratch, const struct hd_desc *descs)
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
    r.own = NULL;
    r.bare = HD_EXTRAS_FIRST ? HD_BARE_ROW : 0;
    return r;
}

/* The own tokens to the ranks of this node. */
KFN void hd_send_tokens(struct agent *ag, const struct ht_dispatch_params *p, char *scratch,
                        const struct hd_desc *descs)
{
    const int n = p->h->state->ntokens;

#if HD_EXTRAS_FIRST
    for (int t = ag_index(ag); t < n; t += ag_count(ag)) {
        const struct hd_row row = hd_own_row(p, t, scratch, descs);
        hd_place_extras(ag, p, &row);
    }
#endif
    for (int t = ag_index(ag); t < n; t += ag_count(ag)) {
        const struct hd_row row = hd_own_row(p, t, scratch, descs);
        hd_place_row(ag, p, &row);
    }
}

/* ---- The operation ----------------------------------------------------------------------------------------------- */

/* Counted once per operation, by one lane. `copied`: rows of this rank's own were copied once more. */
KFN_STEP void hd_count(const struct ht_dispatch_params *p, int copied)
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
    if (copied)
        ag_add_stat(&g->stats->bytes_local, (uint64_t)h->state->filled_rows * (uint64_t)p->signature.hidden_bytes);
}

/* The caller's counters, as the update has found them (hn_report_counts). One agent. */
KFN_STEP void hd_report_counts(struct agent *ag, const struct ht_dispatch_params *p)
{
    AG_EACH(ag, int, l, p->expert_counts.data ? p->g->local_experts : 0)
    index_put(&p->expert_counts, l, p->h->padded[l]);
    if (ag_leader(ag) && p->total.data)
        index_put(&p->total, 0, p->h->state->all_rows);
}

/* The own descriptor, and the signal that it is written. One agent. */
KFN_STEP int hd_open(struct agent *ag, const struct ht_dispatch_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    if (g->nnodes > 1 && ht_wait_all_free(ag, g))
        return 1;
    if (ag_leader(ag)) {
        struct hd_desc *desc = hd_desc_of(g, g->rank);
        *desc = p->desc;
        desc->pulls =
            (p->buffered && p->h->state->windowed ? HD_PULLS : 0) | (p->shown.rows_in != IN_WINDOW ? HD_IN_REACH : 0);
    }
    ag_sync(ag);
    signal_peers(ag, g, SCOPE_NODE, SIG_HD_READY, 0, epoch);
    hd_report_counts(ag, p);
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
    if (check_node(ag, g, &p->signature, g->ht.dispatch_descs, sizeof(struct hd_desc), PHASE_HD_READY))
        return 1;
#if AG_STAGED
    return hd_block_pulls(ag, p) && hd_in_gate(p, hd_is_wide(ag, p)) && hd_windows(ag, p, epoch);
#else
    return 0;
#endif
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
    const int pulled = hd_any_pulls(ag, p); /* not after the signal: descriptors may be those of the next operation */
    const int copied = p->buffered & BUFFERED_TOKENS && !(pulled && hd_is_wide(ag, p));
    if (ag_leader(ag))
        g->state->pulled = pulled;
    if (INJECT_BUG(BUG_EARLY_TAKEN, !pulled || !hd_is_wide(ag, p), 1))
        signal_peers(ag, g, SCOPE_NODE, SIG_HD_DATA, 0, epoch);
    if (g->nnodes > 1 && !pulled)
        hd_release(ag, p);
    if (ag_leader(ag)) {
        if (g->nnodes > 1)
            hd_count_rounds(p);
        hd_count(p, copied);
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
    hd_send_tokens(ag, p, scratch, descs);
    writes_end(ag, g);
    return 0;
}

/* Rows were taken from slots of relays until all ranks of the node had them: the credits that hd_step_begin() has not
 * given. One agent. */
KFN_STEP int hd_release_pulled(struct agent *ag, const struct ht_dispatch_params *p)
{
    if (hd_release_rounds(ag, p, hd_steps(p, 0, 0).count - 2, p->h->state->all_rounds))
        return 1;
    hd_release(ag, p);
    return 0;
}

/* Stage HD_DATA: all rows of this rank are there, and the network has read those that it sends from the caller's
 * tensor. */
KFN_STEP int hd_data(struct agent *ag, const struct ht_dispatch_params *p, uint64_t epoch, int pulled)
{
    const struct group_dev *g = p->g;

    if (wait_peers(ag, g, SCOPE_NODE, SIG_HD_DATA, 0, epoch, PHASE_HD_DATA, NULL))
        return 1;
    if (p->nodes && pulled && ag_index(ag) == 0 && hd_release_pulled(ag, p))
        return 1;
    const int64_t lines = p->h->state->windowed ? p->own.map_lines : p->desc.map_lines;
    if (p->h->state->recv_rows > hd_capacity(p))
        report(ag, g, KSTATUS_OVERFLOW, PHASE_HD_DATA, -1, p->h->state->recv_rows, hd_capacity(p), 0, 0);
    else if (p->signature.extra & SIGNATURE_MAP && p->h->state->tokens > lines)
        report(ag, g, KSTATUS_OVERFLOW, PHASE_HD_DATA, -1, p->h->state->tokens, lines, 0, 0);
    if (!p->in_place || ag_index(ag) != 0)
        return 0;
    /* In one launch the agent that came last may still be giving credits (hd_rows_done). */
    return AG_STAGED ? wait_all_sent(ag, g, PHASE_HD_SENT) : wait_sent(ag, g, PHASE_HD_SENT);
}

#if AG_STAGED
/* Stage HD_LANDED: turns of rounds, or steps of windows. One agent. */
KFN int hd_gate(struct agent *ag, const struct ht_dispatch_params *p, uint64_t epoch, int turn)
{
    const int many = ht_turn(p->h), first = turn * many;

    if (hd_any_pulls(ag, p))
        return hd_step_gate(ag, p, epoch, turn);
    return p->nodes &&
           hd_landed(ag, p, first, many, turn > 0 ? first - many + HT_SLOTS : first + HT_SLOTS, first + HT_SLOTS);
}

/* Stage HD_FORWARD, likewise. */
KFN int hd_work(struct agent *ag, const struct ht_dispatch_params *p, uint64_t epoch, int turn)
{
    if (hd_block_pulls(ag, p))
        return hd_step_work(ag, p, epoch, turn);
    return p->nodes && hd_turn(ag, p, turn);
}
#endif

KFN int hd_run(struct agent *ag, const struct ht_dispatch_params *p, uint64_t epoch)
{
    if (stage_runs(ag, HD_READY) && hd_ready(ag, p, epoch))
        return 1;
    AG_WILL_WRITE(ag, (uint64_t)p->g->node_size * (uint64_t)p->h->state->filled_rows *
                          (uint64_t)p->signature.hidden_bytes); /* if the others receive as many rows */
    STAGE_MARK(ag, HD_READY, MARK_READY);
    if (stage_runs(ag, HD_ROWS) && hd_rows(ag, p))
        return 1;
    STAGE_MARK(ag, HD_ROWS, MARK_ROWS);
#if AG_STAGED
    const int pulled = p->g->state->pulled;
    if (stage_runs(ag, HD_LANDED) && hd_gate(ag, p, epoch, stage_turn(ag)))
        return 1;
    STAGE_MARK(ag, HD_LANDED, MARK_LANDED);
    if (stage_runs(ag, HD_FORWARD) && hd_work(ag, p, epoch, stage_turn(ag)))
        return 1;
    STAGE_MARK(ag, HD_FORWARD, MARK_FORWARD);
    if (p->turns ? stage_runs(ag, HD_FORWARD) && stage_turn(ag) == p->turns - 1 : stage_runs(ag, HD_ROWS))
        hd_rows_done(ag, p, epoch);
#else
    const int pulled = hd_any_pulls(ag, p);
    for (int turn = 0; p->nodes && !pulled && turn * ht_turn(p->h) < p->h->state->most_rounds; turn++)
        if (hd_turn(ag, p, turn))
            return 1;
    if (pulled && hd_windows(ag, p, epoch))
        return 1;
    AG_MARK(ag, MARK_FORWARD);
    hd_rows_done(ag, p, epoch);
#endif
    if (stage_runs(ag, HD_DATA) && hd_data(ag, p, epoch, pulled))
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
