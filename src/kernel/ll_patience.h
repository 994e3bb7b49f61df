/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Low latency on a GPU, inside a node where nobody is masked: a launch waits for late peers with all its blocks only
 * for a while. Then the first few go on as a smaller launch (ag_narrow), and the others leave their SMs to whoever
 * computes. Nothing is launched for it: an empty launch behind each operation, for the rest of it, took 4 us in a graph
 * of the H200 with eight ranks under MPS.
 *
 * All blocks go on, or only the first ones do. Each block looks at the signals of all peers and, with the same load, at
 * `asked`:
 *
 *   block that has waited enough                           any other block
 *   asked = epoch  (the first one only: compare and swap)  all signals there, not asked: goes on
 *   waits LL_GRACE_NS, looks again                         asked: waits for the verdict
 *   verdict = 2 * epoch + (1: few go on)  -------------->  does what it says
 *
 * A block that has gone on had seen all signals before `asked` was there to be seen: long before the grace was over,
 * after which the first one looks again and sees them too. Signals only grow, so the verdict is then that all go on.
 * Epochs never come back: nothing is reset.
 */
#ifndef EPX_KERNEL_LL_PATIENCE_H
#define EPX_KERNEL_LL_PATIENCE_H

#include "kernel/sync.h"

#if AG_BLOCKS

#define LL_GRACE_NS 20000 /* longer than any load takes */
#define LL_LOOKS 16       /* between two looks at the clock and the abort word */

enum ll_waited { LL_ALL_GO_ON, LL_FEW_GO_ON, LL_WAIT_FAILED };

/* Does the launch still have blocks to give away? */
KFN int ll_patient(const struct agent *ag, const struct ll_patience *patience)
{
    return patience->us && !ag_is_narrow(ag);
}

/* One look at all signals and at `asked`: 1 = all are there, 0 = not, -1 = somebody has asked. *late: a rank that this
 * lane misses. */
KFN_STEP int ll_glance(struct agent *ag, const struct group_dev *g, int op, int kind, uint64_t epoch, int *late)
{
    const uint64_t value = lap_of(g, epoch);
    int missing = -1, asked = 0;

    AG_EACH(ag, int, n, g->node_size + 1)
    {
        const int p = n < g->node_size ? node_rank(g, n) : -1;
        const uint64_t seen = ag_peek(p < 0 ? &g->state->asked[op] : signal_at(g, g->rank, kind, slot_of(g, epoch), p));
        if (p < 0)
            asked = seen == (uint32_t)epoch;
        else if ((int64_t)(seen - value) < 0)
            missing = p;
    }
    if (ag_any(ag, asked))
        return -1;
    if (ag_any(ag, missing >= 0)) {
        *late = missing;
        return 0;
    }
    ag_peeked(ag);
    return 1;
}

/* This agent has asked first: it decides for the launch. */
KFN_STEP enum ll_waited ll_decide(struct agent *ag, const struct group_dev *g, int op, int kind, uint64_t epoch)
{
    uint64_t *verdict = &g->state->verdict[op];
    int missing = 0;

    ag_wait_ge(ag, verdict, 2 * epoch, LL_GRACE_NS); /* nobody else stores it: a pause */
    AG_EACH(ag, int, n, g->node_size)
    {
        const uint64_t *word = signal_at(g, g->rank, kind, slot_of(g, epoch), node_rank(g, n));
        missing |= (int64_t)(ag_peek(word) - lap_of(g, epoch)) < 0;
    }
    missing = ag_any(ag, missing);
    if (ag_leader(ag))
        ag_store_release_device(verdict, 2 * epoch + (uint64_t)missing); /* pairs with the wait in ll_ask() */
    ag_sync(ag);
    return missing ? LL_FEW_GO_ON : LL_ALL_GO_ON;
}

/* This agent has waited enough, or another has. */
KFN_STEP enum ll_waited ll_ask(struct agent *ag, const struct group_dev *g, int op, int kind, uint64_t epoch)
{
    uint64_t *asked = &g->state->asked[op], *verdict = &g->state->verdict[op];
    const uint32_t before = (uint32_t)ag_load_acquire(asked);
    int first = 0;

    /* Half of the word: epochs that differ by 2^32 are not in flight together. */
    if (ag_leader(ag) && before != (uint32_t)epoch)
        first = ag_claim((uint32_t *)asked, before, (uint32_t)epoch);
    if (ag_any(ag, first))
        return ll_decide(ag, g, op, kind, epoch);
    const enum wait_result why = ag_wait_ge(ag, verdict, 2 * epoch, OWN_DEADLINES * g->timeout_ns);
    const uint64_t said = ag_load_acquire(verdict);
    if (why != WAIT_OK && wait_failed(ag, g, why, PHASE_AGENTS, -1, -1, 2 * epoch, said))
        return LL_WAIT_FAILED;
    return said & 1 ? LL_FEW_GO_ON : LL_ALL_GO_ON;
}

/* Waits for the signals of all peers, with patience. One agent of each block. */
KFN_STEP enum ll_waited ll_wait_patient(struct agent *ag, const struct group_dev *g, int op, int kind, uint64_t epoch,
                                        int phase, const struct ll_patience *patience)
{
    const uint64_t start = ag_now(ag);
    int seen = 0, late = -1;

    AG_GLANCES_BEGIN(ag);
    for (;;) {
        for (int i = 0; i < LL_LOOKS && !seen; i++)
            seen = ll_glance(ag, g, op, kind, epoch, &late);
        if (seen > 0) {
            AG_GLANCED(ag, phase, late, kind, slot_of(g, epoch), lap_of(g, epoch));
            return LL_ALL_GO_ON;
        }
        if (ag_any(ag, ag_look(&control_of(g, g->rank)->abort_word) != 0)) {
            wait_failed(ag, g, WAIT_ABORTED, phase, -1, -1, lap_of(g, epoch), 0);
            return LL_WAIT_FAILED;
        }
        if (ag_any(ag, seen < 0 || ag_now(ag) - start > (uint64_t)patience->us * 1000))
            break;
    }
    return ll_ask(ag, g, op, kind, epoch);
}

/* For all agents of a block; the one that waited has `waited`, the others LL_ALL_GO_ON. False: the block leaves. */
KFN int ll_block_goes_on(struct agent *ag, const struct ll_patience *patience, enum ll_waited waited)
{
    if (!block_decides(ag, waited != LL_ALL_GO_ON))
        return 1;
    return !block_decides(ag, waited == LL_WAIT_FAILED) && ag_narrow(ag, patience->few_blocks);
}

#endif
#endif
