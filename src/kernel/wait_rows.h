/* SPDX-License-Identifier: Apache-2.0 */
/* Between nodes: waits for rows that were put to this rank, and for its own puts, whose source may then be reused. */
#ifndef EPX_KERNEL_WAIT_ROWS_H
#define EPX_KERNEL_WAIT_ROWS_H

#include "kernel/wait_peers.h"

/* `n` more rows of a counter of rows. One agent per (kind, slot, peer); the others learn of it at the next barrier. */
KFN_STEP int wait_rows(struct agent *ag, const struct group_dev *g, int kind, int slot, int peer, uint64_t n, int phase)
{
    const size_t i = signal_index(g, kind, slot, peer);
    const uint64_t target = g->expected[i] + n;

    ag_sync(ag);
    if (ag_leader(ag))
        g->expected[i] = target;
    return wait_word(ag, g, &g->counters[i], target, phase, peer);
}

/* So many more rows are expected of a peer: late_rows() finds who is late. One agent per (kind, slot, peer). */
KFN void expect_rows(struct agent *ag, const struct group_dev *g, int kind, int slot, int peer, uint64_t n)
{
    if (ag_leader(ag))
        g->expected[signal_index(g, kind, slot, peer)] += n;
}

/* The first rank elsewhere of which rows are missing; -1: none. */
KFN_STEP int late_rows(const struct group_dev *g, int kind, int slot)
{
    for (int p = 0; p < g->nranks; p++) {
        const size_t i = signal_index(g, kind, slot, p);
        if (!is_local(g, p) && (int64_t)(ag_load_acquire(&g->counters[i]) - g->expected[i]) < 0)
            return p;
    }
    return -1;
}

/* `rows` more from all ranks of a ring together. One agent per (kind, slot); a group without masks. */
KFN_STEP int wait_ring_rows(struct agent *ag, const struct group_dev *g, int ring, uint64_t rows, int kind, int slot,
                            int phase)
{
    const size_t i = aggregate_index(g, ring, kind, slot), first = signal_index(g, kind, slot, 0);
    const uint64_t target = g->expected_all[i] + rows;
    int late;

    ag_sync(ag);
    if (ag_leader(ag))
        g->expected_all[i] = target;
    AG_WAITS(ag, phase, -1);
    if (ag_wait_ge(ag, &g->aggregates[i], target, g->timeout_ns / AGGREGATE_PART) == WAIT_OK)
        return 0;
    while ((late = late_rows(g, kind, slot)) >= 0)
        if (wait_word(ag, g, &g->counters[first + (size_t)late], g->expected[first + (size_t)late], phase, late))
            return 1;
    return wait_word(ag, g, &g->aggregates[i], target, phase, -1);
}

/* The first rank elsewhere with puts that the network has not read; -1: none. Acquire of `sent`: pairs with the
 * releases in count_sent() of proxy/count.c. `pushed` is counted without order: who pushed has met this agent since. */
KFN_STEP int late_sent(const struct group_dev *g)
{
    for (int r = 0; r < g->nranks; r++)
        if (!is_local(g, r) && (int64_t)(ag_load_acquire(&g->sent[r]) - ag_load_acquire(&g->pushed[r])) < 0)
            return r;
    return -1;
}

/* All puts through a ring have been read. Nobody pushes meanwhile: the sum is complete when each of its parts is. */
KFN_STEP int wait_ring_sent(struct agent *ag, const struct group_dev *g, int ring, int phase)
{
    int late;

    AG_WAITS(ag, phase, -1);
    if (ag_wait_ge(ag, &g->sent_all[ring], ag_load_acquire(&g->pushed_all[ring]), g->timeout_ns / AGGREGATE_PART) ==
        WAIT_OK)
        return 0;
    while ((late = late_sent(g)) >= 0)
        if (wait_word(ag, g, &g->sent[late], ag_load_acquire(&g->pushed[late]), phase, late))
            return 1;
    return 0;
}

/* All puts to ranks elsewhere that were pushed so far have been read from this rank's memory. One agent, or each. */
KFN_STEP int wait_sent(struct agent *ag, const struct group_dev *g, int phase)
{
    waits_begin(ag, g);
    for (int r = 0; r < g->nranks; r++)
        if (!is_local(g, r) && is_active(g, r) &&
            wait_word(ag, g, &g->sent[r], ag_load_acquire(&g->pushed[r]), phase, r))
            return 1;
    return 0;
}

/* The same by one look at each ring, while no agent pushes: a later put to one rank would count for one to another.
 * With masks the puts to some ranks are never read. */
KFN_STEP int wait_all_sent(struct agent *ag, const struct group_dev *g, int phase)
{
    waits_begin(ag, g);
    if (has_masks(g))
        return wait_sent(ag, g, phase);
    for (int i = 0; i < g->nrings; i++)
        if (wait_ring_sent(ag, g, i, phase))
            return 1;
    return 0;
}

#endif
