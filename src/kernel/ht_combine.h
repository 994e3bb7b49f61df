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
 * SUM_ROUND_RANKS without SUM_TOPK_ORDER: sources and relays sum each rank's rows and round, then do as above; so
 * EXPERT_MAJOR gives what FLAT gives of rows that are such sums.
 *
 * The wait for HC_DONE makes the caller's tensor and the receive buffer free again when the operation completes.
 */
#ifndef EPX_KERNEL_HT_COMBINE_H
#define EPX_KERNEL_HT_COMBINE_H

#include "kernel/ht_sum_steps.h"

KFN_STEP void hc_stage(struct agent *ag, const struct ht_combine_params *p)
{
    const struct group_dev *g = p->g;
    char *heap = heap_at(g, g->rank, 0);
    const int64_t rows = p->h->state->used_rows < p->desc.rows ? p->h->state->used_rows : p->desc.rows;
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

/* The own rows are in place: signals the node. One agent. */
KFN_STEP int hc_publish(struct agent *ag, const struct ht_combine_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    if (ag_leader(ag)) {
        struct hc_desc *desc = hc_desc_of(g, g->rank);
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
    const struct hc_desc *descs;
    const int many = ht_turn(p->h), first = turn * many;
    const int relayed = hc_relay_first(p, turn), end = hc_relay_end(p, turn);

    if (hc_take_descs(ag, g, &descs) || hc_relay_turn(ag, p, descs, relayed, end, 0))
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

    /* Others would add up what is there, and call it good. */
    if (p->h->state->used_rows > p->desc.rows)
        return fail_all(ag, g, KSTATUS_OVERFLOW, PHASE_HC_DATA, -1, p->h->state->used_rows, p->desc.rows);
    if (sync_last(ag, g, 0) && hc_publish(ag, p, epoch))
        return 1;
    if (wait_peers(ag, g, SCOPE_NODE, SIG_HC_DATA, 0, epoch, PHASE_HC_DATA, NULL) ||
        check_node(ag, g, &p->signature, g->ht.combine_descs, sizeof(struct hc_desc), PHASE_HC_DATA))
        return 1;
    return AG_STAGED && !p->turns && hc_block_pushes(ag, p) && hc_windows(ag, p, epoch);
}

/* Stage HC_SUM: the own tokens; between nodes turn by turn, through windows step by step. */
KFN int hc_sum(struct agent *ag, const struct ht_combine_params *p, uint64_t epoch)
{
    int last = 1;

#if AG_STAGED
    last = stage_turn(ag) == p->turns;
#endif
    if (hc_block_pushes(ag, p)) {
#if AG_STAGED
        /* Without turns hc_data() has taken all steps. */
        if (p->turns && hc_step_work(ag, p, epoch, stage_turn(ag)))
            return 1;
#else
        if (hc_windows(ag, p, epoch))
            return 1;
#endif
    } else if (!p->nodes) {
        const struct hc_desc *descs;
        if (hc_take_descs(ag, p->g, &descs))
            return 1;
        hc_sum_tokens(ag, p, descs, 0, 0, last ? p->h->state->ntokens : 0, 0);
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
