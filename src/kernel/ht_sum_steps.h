/* SPDX-License-Identifier: Apache-2.0 */
/*
 * High-throughput combine where rows pass through windows (ht_window.h), step by step: in step k this rank writes rows
 * into its readers' window k - 1, and sums what lies in its own window of the step before. Between nodes it also shows
 * the requests of round k to its node, and returns what it has summed as a relay.
 */
#ifndef EPX_KERNEL_HT_SUM_STEPS_H
#define EPX_KERNEL_HT_SUM_STEPS_H

#include "kernel/ht_sum.h"

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

/* As hd_block_pulls(). */
KFN int hc_block_pushes(struct agent *ag, const struct ht_combine_params *p)
{
    const int pushes = hc_any_pushes(ag, p);

    return has_masks(p->g) ? block_decides(ag, pushes) : pushes;
}

/* Window k - 1 is written in step k, and summed in the one after it. Between nodes rounds are windows, and the own
 * tokens of a round come a step later than what this rank sums as a relay: relays elsewhere do that first. */
KFN struct hw_steps hc_steps(const struct ht_combine_params *p, uint64_t epoch)
{
    const int windows = hw_windows(p->h, p->g->ht.sum_tokens);
    const int count = p->nodes ? p->h->state->all_rounds + 3 : windows + 2;
    const struct hw_steps s = {epoch, SIG_HC_STEP, PHASE_HC_STEP, count,
                               HW_HINT | (p->tokens || p->weights ? 0 : HW_HINT_OTHERS)};
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
    const struct hc_desc *descs;

    if (hc_take_descs(ag, g, &descs)) /* agents of a block meet there: none has failed in this step yet */
        return 1;
    if (k == 0)
        hc_show_routes(ag, p);
    if (p->nodes && block_decides(ag, hc_step_requests(ag, p, k))) /* the block meets again in hc_push() */
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

#endif
