/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Low latency between nodes, with masks: where combined rows return to when a rank elsewhere was masked that is only
 * late. Its rows are on their way, or it posts them when it wakes up, and nobody can stop them: they land where it was
 * told to return them, in whatever slot that combine has. So after a mask nobody else is told of a place there: rows of
 * later dispatches return to the other half of the receive rows.
 *
 *   receive rows of each slot     [0, M*K)                      [M*K, 2*M*K)
 *   dispatch                      until a rank was masked       from then on
 *   combine of an older dispatch  its rows are beside those of the masked rank: but not in a slot whose last
 *                                 combine has not got all of its rows ("dirty")
 *
 * The second half begins behind M*K rows of the largest size: rows of a handle may be smaller than those of another.
 *
 * A second loss would need a third part: from then on operations fail until a recovery, which closes the network and
 * so ends all puts. `lost` counts the ranks elsewhere that were masked since the last one.
 */
#ifndef EPX_KERNEL_LL_RECV_HALF_H
#define EPX_KERNEL_LL_RECV_HALF_H

#include "kernel/inject_bug.h"
#include "kernel/sync.h"

KFN int ll_has_halves(const struct group_dev *g)
{
    return !FLAVOUR_ONE_NODE && g->ll.halves > 1;
}

KFN int ll_is_lost(const struct group_dev *g, int rank)
{
    return !is_local(g, rank) && g->members[rank] && !is_active(g, rank);
}

/* How many ranks elsewhere were masked since the last recovery. */
KFN_STEP int ll_lost(struct agent *ag, const struct group_dev *g)
{
    int64_t lost = 0;

    AG_EACH(ag, int, r, g->nranks) lost += ll_is_lost(g, r);
    return (int)ag_sum(ag, lost);
}

/* The operation cannot go on without a recovery; the first rank that was lost is the culprit. */
KFN_STEP int ll_fail_lost(struct agent *ag, const struct group_dev *g, int phase)
{
    int rank = 0;

    while (rank < g->nranks && !ll_is_lost(g, rank))
        rank++;
    return fail_all(ag, g, KSTATUS_TIMEOUT, phase, rank < g->nranks ? rank : -1, 0, 0);
}

/* Chooses where the rows of this dispatch return to. One agent; non-zero: failed. */
KFN_STEP int ll_choose_recv_half(struct agent *ag, const struct group_dev *g, struct handle_state *handle)
{
    struct group_state *st = g->state;

    if (!ll_has_halves(g))
        return 0;
    const int lost = ll_lost(ag, g), more = lost > st->lost;
    if (more && st->recv_half && INJECT_BUG(BUG_RECV_HALF, 0, 1))
        return ll_fail_lost(ag, g, PHASE_LL_SLOT);
    ag_sync(ag);
    if (ag_leader(ag)) {
        st->lost = lost;
        st->recv_half += INJECT_BUG(BUG_RECV_HALF, 0, more);
        handle->lost = lost;
    }
    ag_sync(ag);
    return 0;
}

/* The first row of that. */
KFN int64_t ll_recv_half_row(const struct group_dev *g, int recv_half)
{
    return (int64_t)recv_half * g->max_tokens * g->max_topk;
}

/* May ranks that were lost since the dispatch put rows of an earlier combine into this slot? Non-zero: failed. */
KFN_STEP int ll_check_recv_half(struct agent *ag, const struct group_dev *g, const struct handle_state *handle,
                                int slot)
{
    if (!ll_has_halves(g) || !(g->state->dirty >> slot & 1) || ll_lost(ag, g) == handle->lost)
        return 0;
    return INJECT_BUG(BUG_RECV_HALF, 0, 1) ? ll_fail_lost(ag, g, PHASE_LC_SLOT) : 0;
}

/* This combine has all the rows that it waits for. One agent. */
KFN_STEP void ll_record_recv_half(struct agent *ag, const struct group_dev *g, const struct handle_state *handle,
                                  int slot)
{
    if (!ll_has_halves(g))
        return;
    const int lost = ll_lost(ag, g);
    if (ag_leader(ag) && lost > handle->lost)
        g->state->dirty |= (uint64_t)1 << slot;
    ag_sync(ag);
}

#endif
