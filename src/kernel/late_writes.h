/* SPDX-License-Identifier: Apache-2.0 */
/* With masks: a rank that the others go on without writes no more rows into their memory, however late it wakes up. */
#ifndef EPX_KERNEL_LATE_WRITES_H
#define EPX_KERNEL_LATE_WRITES_H

#include "kernel/abort.h"
#include "kernel/waiting_for.h"

/* Ranks of the node may wait until this one does not write. */
KFN void ring_writes_ended(struct agent *ag, const struct group_dev *g)
{
    AG_EACH(ag, int, i, g->node_size)
    if (node_rank(g, i) != g->rank)
        ag_ring(ag, &control_of(g, node_rank(g, i))->bell);
}

/*
 * Rows that are written into memory of other ranks of the node, where ranks may be masked (docs/design.md, "Masks"):
 *
 *   this rank                                       whoever goes on without it
 *   not_writing -= 1; full fence                    sets this rank's abort word; full fence
 *   abort word 0? rows                              not_writing 0? it goes on
 *   not_writing += 1
 *
 * One of the two sees what the other did first. So a rank that the others go on without, and that wakes up later,
 * writes nothing any more. Nothing between begin and end waits for anybody. Non-zero: the group has failed.
 *
 * One word: it is 0 only while no agent writes. Two counts, of begins and of ends, would not say that: an agent that
 * begins after the look at the first, and ends at once, stands for one that still writes.
 */
KFN_STEP int writes_begin(struct agent *ag, const struct group_dev *g, int phase)
{
    struct control *own = control_of(g, g->rank);

    if (!has_masks(g))
        return 0;
    /* Pairs with the fences in still_writes() and group_await_writers(). */
    ag_add_fenced(ag, &own->not_writing, (uint64_t)-1);
    const uint64_t word = INJECT_BUG(BUG_LATE_WRITES, 0, ag_look(&own->abort_word));
    if (!word)
        return 0;
    ag_add_fenced(ag, &own->not_writing, INJECT_BUG(BUG_OTHER_WRITES, 2, 1));
    ring_writes_ended(ag, g);
    report_abort(ag, g, phase, 0, 0, word);
    return 1;
}

KFN_STEP void writes_end(struct agent *ag, const struct group_dev *g)
{
    struct control *own = control_of(g, g->rank);

    if (!has_masks(g))
        return;
    ag_add_fenced(ag, &own->not_writing, 1); /* release: pairs with the acquire of the wait in still_writes() */
    if (ag_look(&own->abort_word))
        ring_writes_ended(ag, g);
}

/* Before this rank goes on without `peer`: a whole deadline for the last of what concerns it. This wait says for whom,
 * as others do: ranks of other nodes would mask this one, which says nothing, in the place of `peer`. */
KFN_STEP enum wait_result wait_for_last(struct agent *ag, const struct group_dev *g, const uint64_t *word,
                                        uint64_t target, int peer)
{
    for (uint64_t left = g->timeout_ns;;) {
        const uint64_t ns = left < wait_slice(g) ? left : wait_slice(g);
        const enum wait_result why = ag_wait_ge(ag, word, target, ns);

        left -= ns;
        if (why != WAIT_TIMEOUT || !left)
            return why;
        publish_waits(ag, g, peer);
    }
}

/* `peer`, of the node, has its abort word: does it still write into memory of others? */
KFN_STEP enum wait_result still_writes(struct agent *ag, const struct group_dev *g, int peer)
{
    ag_add_fenced(ag, &control_of(g, g->rank)->not_writing, 0); /* pairs with the fence in writes_begin() */
    return wait_for_last(ag, g, &control_of(g, peer)->not_writing, 0, peer);
}

/* Does the network still read memory of this rank, for puts to `peer` of another node? It would send what a later
 * operation writes there to a rank that has only slept. A put counts as sent when it has arrived, or cannot any
 * more. */
KFN_STEP enum wait_result still_read(struct agent *ag, const struct group_dev *g, int peer)
{
    if (INJECT_BUG(BUG_GOES_ON, 1, 0))
        return WAIT_OK;
    return wait_for_last(ag, g, &g->sent[peer], ag_load_acquire(&g->pushed[peer]), peer);
}

#endif
