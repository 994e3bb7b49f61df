/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The first and the last lines of every kernel. How an operation ends (docs/design.md, "Completion"): its caller may
 * use the memory again, good or not.
 *
 *   good      all reads of other ranks' memory; own abort word still 0 (kernel_end); the kernel ends
 *   not good  abort words of the node are set; the network reads no memory of this rank any more (network_stop);
 *             the kernel ends
 *
 * So whoever reads memory of a rank that has given up finds its own abort word set when it looks behind the reads.
 */
#ifndef EPX_KERNEL_BEGIN_END_H
#define EPX_KERNEL_BEGIN_END_H

#include "kernel/barrier.h"

/* First lines of every kernel: non-zero if the group has failed and the kernel must not run. That is an error of this
 * rank too: the operation must not be reported as done. */
KFN int kernel_begin(struct agent *ag, const struct group_dev *g)
{
    AG_MARK(ag, MARK_BEGIN);
    ag_begin(ag, g->timeout_ns, control_of(g, g->rank));
    /* Nothing is read behind it. One agent of a block looks for all: the word may lie across a bus. */
    const int looks = block_first(ag);
    const int stops = block_decides(ag, looks && ag_look(&control_of(g, g->rank)->abort_word) != 0);
    if (stops && looks)
        report_abort(ag, g, PHASE_NONE, 0, 0, ag_load_acquire(&control_of(g, g->rank)->abort_word));
    return stops;
}

/* `odd` is masked on this rank, and still is a member: or it is -1, where another agent has seen one. The others are
 * told of that rank, which is why this one cannot go on, and not that this one has failed. */
KFN_STEP void fail_not_agreed(struct agent *ag, const struct group_dev *g, int odd)
{
    const int32_t member = odd < 0 ? 0 : g->members[odd], active = odd < 0 ? 0 : g->mask[odd];

    const int silent = INJECT_BUG(BUG_SELF_NAMED, 0, odd >= 0 && !active);

    report(ag, g, KSTATUS_USAGE, PHASE_MASKS, odd, member, active, 0, 0);
    fail_all(ag, g, silent ? KSTATUS_TIMEOUT : KSTATUS_USAGE, PHASE_MASKS, odd, member, active);
}

/* The same for high throughput, which needs a membership that all ranks agreed on (group/recover.c): other ranks still
 * count, and relay for, a rank that is masked here alone. */
KFN_STEP int kernel_begin_agreed(struct agent *ag, const struct group_dev *g)
{
    int odd = -1;

    if (kernel_begin(ag, g))
        return 1;
    for (int r = 0; has_masks(g) && r < g->nranks && odd < 0; r++)
        if (g->mask[r] != g->members[r])
            odd = r;
    if (!has_masks(g) || !block_decides(ag, odd >= 0))
        return 0;
    if (ag_index(ag) == 0)
        fail_not_agreed(ag, g, odd);
    return 1;
}

enum { STOP_WAITS = 8 }; /* several: a process that was stopped meanwhile has lost one of them, not all */

/* The proxies stop (proxy/stop.c): when this returns, the network reads no memory of this rank any more, unless a
 * proxy is stuck in the network's library for half a deadline. They stop side by side, and share the waits. */
KFN_STEP void network_stop(struct agent *ag, const struct group_dev *g)
{
    int waits = INJECT_BUG(BUG_NO_STOP, 0, STOP_WAITS);

    for (int i = 0; i < g->nrings; i++) {
        if (ag_leader(ag))
            ag_store_release(g->rings[i].stop, 1); /* pairs with the acquire in stop_asked() */
        ag_ring(ag, g->rings[i].bell);
    }
    for (int i = 0; i < g->nrings; i++) {
        if (ag_leader(ag))
            ag->abort_word = g->rings[i].stopped; /* the group's would end the wait at once */
        ag_sync(ag);
        /* Acquire: pairs with the release in stop_progress(). */
        for (; waits > 0 && !ag_load_acquire(g->rings[i].stopped); waits--)
            ag_wait_ge(ag, g->rings[i].stopped, 1, g->timeout_ns / (2 * STOP_WAITS));
        /* The stages that follow do not wait for it again. Should it stop just now, that costs a warning. */
        if (INJECT_BUG(BUG_NO_STOP, 0, 1) && ag_leader(ag) && !ag_peek(g->rings[i].stopped))
            ag_store_release(g->rings[i].stopped, 2); /* pairs with the acquire in proxy_stop() */
    }
}

/* This rank was left out, and the others go on: it must not end their operations. But a rank that has not left it out
 * may be reading its memory, and looks at this in node_left(). */
KFN_STEP void tell_left_out(struct agent *ag, const struct group_dev *g)
{
    AG_EACH(ag, int, i, g->node_size)
    if (node_rank(g, i) != g->rank)
        ag_store_release(signal_at(g, node_rank(g, i), SIG_ABORT, 0, g->rank),
                         1); /* pairs with ag_peeked() in node_left() */
    ag_sync(ag);
}

/* With masks: has a rank of the node that this rank counts on been left out by others, and given up? Then what was
 * read of it may have been reused. Where the group has no masks nobody is left out. The rank, or -1. */
KFN int node_left(struct agent *ag, const struct group_dev *g)
{
    int left = 0;

    if (!has_masks(g))
        return -1;
    AG_EACH(ag, int, p, g->nranks)
    if (p != g->rank && in_scope(g, SCOPE_NODE, p) && ag_peek(signal_at(g, g->rank, SIG_ABORT, 0, p)))
        left = 1;
    if (!ag_any(ag, left))
        return -1;
    ag_peeked(ag);
    for (int p = 0; p < g->nranks; p++)
        if (p != g->rank && in_scope(g, SCOPE_NODE, p) && ag_load_acquire(signal_at(g, g->rank, SIG_ABORT, 0, p)))
            return p;
    return -1;
}

/* This operation is not good: other ranks may have stopped waiting for this one, or reused what it has read. */
KFN_STEP void give_up(struct agent *ag, const struct group_dev *g, uint64_t word)
{
    report_abort(ag, g, PHASE_NONE, 0, 0, word);
    if (word & ABORT_LEFT_OUT) {
        tell_left_out(ag, g);
    } else {
        if (INJECT_BUG(BUG_NO_TELL, 0, 1))
            tell_node(ag, g, word);
        if (ag_load_acquire(&control_of(g, g->rank)->abort_told) != word)
            put_abort(ag, g, word);
    }
    if (has_nodes(g))
        network_stop(ag, g);
}

/* The last look of a kernel: behind all that this agent, and those for which it looks, have read of other ranks. */
KFN void look_behind(struct agent *ag, const struct group_dev *g)
{
    const int gone = AG_GONE(ag, g);
    uint64_t word = INJECT_BUG(BUG_NO_RECHECK, 0, ag_look_behind(&control_of(g, g->rank)->abort_word));
    const int left = word ? -1 : node_left(ag, g);

    AG_LOOKED(ag, g, gone, word != 0 || left >= 0);
    if (left >= 0)
        word = fail_left(ag, g, left);
    if (word)
        give_up(ag, g, word);
    AG_ENDS(ag, g, word, word != 0 || left >= 0);
}

/* Last lines of every kernel. Where agents form blocks, the last one of each block looks for all of it: the word may
 * lie across a bus, where hundreds of loads of one word come one after the other. */
KFN void kernel_end(struct agent *ag, const struct group_dev *g)
{
#if AG_BLOCKS
    if (ag_block_last(ag))
        look_behind(ag, g);
#else
    look_behind(ag, g);
#endif
    if (ag->waits && ag_leader(ag)) {
        ag_add_stat(&g->stats->waits, ag->waits);
        ag_add_stat(&g->stats->wait_ns, ag->wait_ns);
    }
}

#endif
