/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Low latency on a GPU, inside a node where nobody is masked: a launch waits for late peers with all its blocks only
 * for a while. Then the first few go on as a smaller launch (ag_narrow), and the others leave their SMs to whoever
 * computes. Nothing is launched for it: an empty launch behind each operation, for the rest of it, took 4 us in a graph
 * of the H200 with eight ranks under MPS.
 *
 * All blocks go on, or only the first ones do: ll_verdict.h. A block that finds all signals at once pays one atomic
 * operation for it.
 *
 * A rank that went on with few blocks is late in its next operation, and would make others go on with few there, and so
 * on. So a rank that did so waits longer for a while: its peers need few SMs' time once, and then all are in step.
 */
#ifndef EPX_KERNEL_LL_WIDE_WAIT_H
#define EPX_KERNEL_LL_WIDE_WAIT_H

#include "kernel/sync.h"

#if AG_BLOCKS

#include "kernel/ll_verdict.h"

enum { LL_NARROW_FOR_NS = 2000000, LL_WAIT_LONGER = 10 }; /* for so long after it, so many times as long */

enum ll_waited { LL_ALL_GO_ON, LL_FEW_GO_ON, LL_WAIT_FAILED };

/* Does the launch still have blocks to give away? */
KFN int ll_waits_wide(const struct agent *ag, const struct ll_wide_wait *wide_wait)
{
    return wide_wait->us && !ag_is_narrow(ag);
}

/* What the blocks have agreed on; `has`: this one has all signals. */
KFN enum ll_waited ll_agree(struct agent *ag, const struct group_dev *g, int op, uint64_t epoch, int has)
{
    uint64_t *word = &g->state->verdict[op];
    int few = 0;

    if (ag_leader(ag))
        few = has ? verdict_with_signals(word, epoch) : verdict_without(word, epoch);
    return ag_any(ag, few) ? LL_FEW_GO_ON : LL_ALL_GO_ON;
}

/* One agent of a launch that has given blocks away has all signals now. */
KFN void ll_mark_narrow(struct agent *ag, const struct group_dev *g)
{
    if (ag_leader(ag))
        ag_store_release_device(&g->state->narrowed, ag_now(ag));
}

/* Peers are late: for how long does this launch wait with all blocks? */
KFN uint64_t ll_wide_ns(const struct group_dev *g, const struct ll_wide_wait *wide_wait, uint64_t now)
{
    const uint64_t ns = (uint64_t)wide_wait->us * 1000;

    return now - ag_look(&g->state->narrowed) < LL_NARROW_FOR_NS ? LL_WAIT_LONGER * ns : ns;
}

/* Peers are late. */
KFN_STEP enum ll_waited ll_wait_late(struct agent *ag, const struct group_dev *g, int op, int kind, uint64_t epoch,
                                     int phase, const struct ll_wide_wait *wide_wait)
{
    const uint64_t start = ag_now(ag), limit = ll_wide_ns(g, wide_wait, start);

    while (!glance_peers(ag, g, SCOPE_NODE, kind, slot_of(g, epoch), lap_of(g, epoch), phase)) {
        if (ag_any(ag, ag_look(&control_of(g, g->rank)->abort_word) != 0)) {
            wait_failed(ag, g, WAIT_ABORTED, phase, -1, -1, lap_of(g, epoch), 0);
            return LL_WAIT_FAILED;
        }
        const int decided = ag_look(&g->state->verdict[op]) > 2 * epoch;
        if (!ag_any(ag, decided || ag_now(ag) - start > limit))
            continue;
        if (ll_agree(ag, g, op, epoch, 0) == LL_FEW_GO_ON)
            return LL_FEW_GO_ON;
        /* Another block has all signals. */
        return wait_each(ag, g, SCOPE_NODE, kind, slot_of(g, epoch), lap_of(g, epoch), phase, NULL) ? LL_WAIT_FAILED
                                                                                                    : LL_ALL_GO_ON;
    }
    return ll_agree(ag, g, op, epoch, 1);
}

/* Waits for the signals of all peers, with all blocks for a while. One agent of each block. */
KFN_STEP enum ll_waited ll_wait(struct agent *ag, const struct group_dev *g, int op, int kind, uint64_t epoch,
                                int phase, const struct ll_wide_wait *wide_wait, int64_t *wait_ns)
{
    if (!ll_waits_wide(ag, wide_wait)) {
        if (wait_each(ag, g, SCOPE_NODE, kind, slot_of(g, epoch), lap_of(g, epoch), phase, wait_ns))
            return LL_WAIT_FAILED;
        if (ag_is_narrow(ag))
            ll_mark_narrow(ag, g);
        return LL_ALL_GO_ON;
    }
    if (glance_peers(ag, g, SCOPE_NODE, kind, slot_of(g, epoch), lap_of(g, epoch), phase))
        return ll_agree(ag, g, op, epoch, 1);
    return ll_wait_late(ag, g, op, kind, epoch, phase, wide_wait);
}

/* For all agents of a block; the one that waited has `waited`, the others LL_ALL_GO_ON. False: the block leaves. */
KFN int ll_block_goes_on(struct agent *ag, const struct ll_wide_wait *wide_wait, enum ll_waited waited)
{
    if (!block_decides(ag, waited != LL_ALL_GO_ON))
        return 1;
    return !block_decides(ag, waited == LL_WAIT_FAILED) && ag_narrow(ag, wide_wait->few_blocks);
}

#endif
#endif
