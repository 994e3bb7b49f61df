/* SPDX-License-Identifier: Apache-2.0 */
/*
 * High throughput, where a rank gets more rows than a receive buffer holds: rows pass through windows of a fixed size,
 * whatever the number of ranks. Only rows of tensors that peers do not reach do; the others go straight from and to
 * their places as always. Whether an operation has windows is known to all ranks of the node since the update (struct
 * handle_state.windowed), and to nobody elsewhere.
 *
 * Every rank has a window of two halves. Window k is a run of consecutive tokens of each rank, in half k % 2.
 *
 *   dispatch   source                                  receiver whose tensors are not in reach
 *   step k     its tokens of window k: ids, places,
 *              and the rows that such a receiver wants
 *              take window k - 1 of every rank         (all ranks do both)
 *              HD_STEP = k + 1  --------------------->  wait HD_STEP[node] >= k before step k
 *
 *   combine    owner of such rows                      source
 *   step 0                                             show ids and rows of all its tokens
 *   step k     for each source: read its ids and rows
 *              of window k - 1, write the rows into    sum the own tokens of window k - 2 there
 *              its window, each at its (token, k)
 *              HC_STEP = k + 1  --------------------->  wait HC_STEP[node] >= k before step k
 *
 * On one node without masks the tokens of a dispatch may be in reach themselves (in the heap, or in a region that all
 * peers have imported; struct hd_shown). Their rows are taken from there, and the window has only ids, places, lines
 * and weights. Where that is so of all ranks (hd_is_wide), windows are of many more tokens, and mostly one is enough:
 * step 0 shows it, step 1 takes it.
 *
 * The credit: HD_STEP = k of all ranks means that window k - 1 is there, and that nobody needs window k - 2 any more,
 * whose half has window k; HC_STEP = k the same of windows k - 2 and k - 3. All ranks of a node have the same number of
 * steps. What step k waits for, the others have given at the end of their step k - 1: the rank that is furthest behind
 * can always go on.
 *
 * Rows of other nodes are in the slots of relays (ht_rounds.h), which are windows too: one round per step. Where the
 * node does not reach these, it finds the round in a copy of the slot (ht_shown_slot), one of two, from the step in
 * which its records are resolved to the end of the next.
 *
 *   dispatch, step k   relay: records of round k say where its rows go; those in reach are written there
 *                      take round k - 1 from the slots of all relays of the node
 *                      send the own round k + 6
 *   before step k + 2  relay: credit for round k to its source; then wait for other nodes
 *
 *   combine, step k    relay: records of round k say whose rows are asked for
 *                      owner: write the rows of round k - 1 into the relays' windows, each at its (source, row, k);
 *                      those of round k - 2 of the node's own tokens into their windows
 *                      relay: sum and return round k - 2
 *                      sum the own tokens of round k - 3, whose sums of other nodes were returned in step k - 1 there
 *                      ask for round k + 5
 *
 * Where each stage is a launch, a step is a gate and a work stage. On one node the host launches no steps (`turns` is
 * 0) where for a while no operation of the group had any, and those of many tokens where for a while none had rows in
 * windows (group_dev.windows). Should there be more than it has launched, one agent takes them all in the gate before
 * them, which is slow and right.
 *
 * Between operations: a rank signals HD_DATA when it has taken all its rows, and HC_DONE when it has read its window;
 * an operation ends when all have. So windows are free when the next one begins, of either kind.
 *
 * A signal's value is epoch << HW_STEP_BITS | steps: a later operation's is larger, and nothing is reset.
 */
#ifndef EPX_KERNEL_HT_WINDOW_H
#define EPX_KERNEL_HT_WINDOW_H

#include "kernel/rows.h"
#include "kernel/sync.h"

#define HW_STEP_BITS 24
#define HW_HEADER_BYTES 64 /* opens a half (dispatch) and the table of tokens (combine): how many tokens there are */
#define HW_ENTRIES 32      /* (token, k) that an agent looks at together: the places of a pair_set */

KFN uint64_t hw_value(uint64_t epoch, int steps)
{
    return (epoch << HW_STEP_BITS) + (uint64_t)steps;
}

/* Windows of `each` tokens that the node needs. */
KFN int hw_windows(const struct handle_dev *h, int each)
{
    return (int)((h->state->most_tokens + each - 1) / each);
}

/* Rank number i of the node, from this one on: not all ranks begin with the same. */
KFN int hw_rank(const struct group_dev *g, int i)
{
    int own = 0;

    while (node_rank(g, own) != g->rank)
        own++;
    return node_rank(g, (own + i) % g->node_size);
}

/* The steps of one operation: the signal that counts them, how many there are, and what the host is told of them. */
struct hw_steps {
    uint64_t epoch;
    int kind, phase, count;
    uint64_t hint;
};

/* After step k, when all agents are through. One agent. The operation's own signal follows the last step. */
KFN void hw_signal(struct agent *ag, const struct group_dev *g, const struct hw_steps *s, int k)
{
    if (k < s->count - 1)
        signal_peers(ag, g, SCOPE_NODE, s->kind, 0, hw_value(s->epoch, k + 1));
}

/* Before step k: all ranks have done step k - 1. All agents; one, where each stage is a launch. */
KFN int hw_begin(struct agent *ag, const struct group_dev *g, const struct hw_steps *s, int k)
{
    if (k == 0 && ag_index(ag) == 0 && ag_leader(ag))
        ag_store_release(g->windows, *g->windows + s->hint); /* a hint: the host's look at it pairs with nothing */
    if (k > 0 && wait_peers(ag, g, SCOPE_NODE, s->kind, 0, hw_value(s->epoch, k), s->phase, NULL))
        return 1;
    if (INJECT_BUG(BUG_EARLY_WINDOW, ag_index(ag) == 0, 0))
        hw_signal(ag, g, s, k);
    return 0;
}

/* After step k, where one launch takes all steps. */
KFN_STEP int hw_end(struct agent *ag, const struct group_dev *g, const struct hw_steps *s, int k)
{
    if (k == s->count - 1)
        return 0;
    if (sync_barrier(ag, g))
        return 1;
    if (INJECT_BUG(BUG_EARLY_WINDOW, 0, ag_index(ag) == 0))
        hw_signal(ag, g, s, k);
    return 0;
}

#endif
