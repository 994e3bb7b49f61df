/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Barriers between the agents of one launch, and of one block of it.
 *
 *   sync_barrier()    all agents wait for all; the last one to arrive advances the generation
 *   block_barrier()   those of a block, on devices that have blocks
 *   sync_last()       nobody waits: the last one to arrive sees the work of all, and does what follows once
 */
#ifndef EPX_KERNEL_BARRIER_H
#define EPX_KERNEL_BARRIER_H

#include "kernel/wait_word.h"

/* A decision that may differ from agent to agent, because it depends on a word that others change. All agents of a
 * block take the same way, or those that stay would wait at the block's next barrier for those that left. */
KFN int block_decides(struct agent *ag, int v)
{
#if AG_BLOCKS
    return ag_block_any(ag, v);
#else
    (void)ag;
    return v;
#endif
}

/* Is this agent the first of its block? Where there are no blocks, each is. */
KFN int block_first(struct agent *ag)
{
#if AG_BLOCKS
    return ag_block_index(ag) == 0;
#else
    (void)ag;
    return 1;
#endif
}

/* For agents of this rank: a wait for a peer, questions, waits until another is masked (follow_to_mask()), and until it
 * does not write any more; more for those behind. */
enum { OWN_DEADLINES = 9 };

/* Non-zero: the operation has failed, as far as this agent knows. */
KFN int sync_wait(struct agent *ag, const struct group_dev *g)
{
    struct group_state *st = g->state;
    const uint64_t generation = ag_load_acquire(&st->barrier); /* pairs with the release below, of the barrier before */

    ag_sync(ag);
    if (ag_count(ag) == 1)
        return 0;
    if (ag_last(ag, &st->arrived, 0)) {
        if (ag_leader(ag))
            ag_store_release_device(&st->barrier, generation + 1); /* pairs with the acquire of the waits below */
        ag_ring(ag, &control_of(g, g->rank)->bell);
        ag_sync(ag);
        return 0;
    }
    AG_WAITS(ag, PHASE_AGENTS, -1);
    /* Agent 0 may be spending a whole deadline on a peer, and more on finding out why (wait_word()). */
    const enum wait_result why = ag_wait_ge(ag, &st->barrier, generation + 1, OWN_DEADLINES * g->timeout_ns);
    if (why == WAIT_OK)
        return 0;
    return wait_failed(ag, g, why, PHASE_AGENTS, -1, -1, generation + 1, ag_load_acquire(&st->barrier));
}

/*
 * Barrier of all agents of the launch. Non-zero: the operation has failed. An abort that comes while the last ones
 * arrive ends the waits of some agents, and others go on: those of a block do the same, for they share tables that each
 * of them fills in part.
 */
KFN_STEP int sync_barrier(struct agent *ag, const struct group_dev *g)
{
    return block_decides(ag, sync_wait(ag, g));
}

/*
 * Barrier of the agents of a block: what one of them did or saw is visible to the others. Non-zero: one of them has
 * failed. It does not order blocks: an agent that needs the work of another block waits for a signal that its rank
 * gives after sync_last(), or calls sync_barrier().
 */
KFN int block_barrier(struct agent *ag, const struct group_dev *g, int failed)
{
#if AG_BLOCKS
    (void)g;
    return ag_block_any(ag, failed);
#else
    return sync_barrier(ag, g) || failed;
#endif
}

/* True for the agent that comes last to `point` (0..3, each once per kernel): all others' work is visible to it. */
KFN int sync_last(struct agent *ag, const struct group_dev *g, int point)
{
    ag_sync(ag);
    if (ag_count(ag) == 1)
        return 1;
    return ag_last(ag, &g->state->ticket[point], 1 + point);
}

/* Statistics lie in the host's memory: agents add up in device memory, and the last one (sync_last) passes it on. */
KFN void count_returned(struct agent *ag, const struct group_dev *g, uint64_t rows)
{
    if (rows)
        ag_fetch_add64(ag, &g->state->returned, rows);
}

KFN void report_returned(struct agent *ag, const struct group_dev *g)
{
    if (!ag_leader(ag))
        return;
    ag_add_stat(&g->stats->rows_returned, g->state->returned);
    g->state->returned = 0;
}

#endif
