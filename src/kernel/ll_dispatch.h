/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Low-latency dispatch, epoch e, slot (e - 1) % W, lap v of that slot. Rows are ordered by (source rank, source
 * token).
 *
 *   sender s                                          receiver d of the node
 *   wait LL_DONE[*] >= v - 1   (slot free)
 *   route its tokens; slot: counts per expert and
 *     rank, per-rank list of tokens, ids, numbers,
 *     weights; descriptor: where its own receive tensors are
 *   signal LL_DATA = v  ---------------------------->  wait LL_DATA[*] >= v
 *                                                      begin[l][s] = sum over s' < s of s' counts for expert l
 *   If all ranks' receive tensors can be written (in the heaps, nothing staged, one node, nobody masked):
 *   wait LL_DATA[*] >= v, begin of all experts
 *   read each row once, write it, cast, to its places
 *     at all its experts on all ranks
 *   signal LL_ROWS = v  ---------------------------->  wait LL_ROWS[*] >= v; the small outputs
 *   Otherwise:
 *   stage each row, cast, ONCE (or leave the caller's
 *     tensor in place); signal LL_ROWS = v  -------->  wait LL_ROWS[*] >= v; for every token of s for d: read the row
 *                                                      once, write it to its local experts at begin[l][s] + number
 *   (in place: wait LL_DONE[*] >= v)  <--------------  signal LL_DONE = v
 *
 *                                                     receiver d of another node
 *   put d's header, counter LL_DATA  --------------->  wait LL_DATA[s] >= v: it is in s's receive buffer here
 *   put each row for d, with its record,
 *     counter LL_ROWS  ----------------------------->  wait LL_ROWS[s] >= expected so far + what the header says
 *                                                      the same expansion, reading the receive buffer (ll_remote.h)
 *   LL_DONE counted                <-----------------  put of no bytes, counter LL_DONE
 *
 * Between nodes no round comes before the data, and rows are staged in an order in which those for one destination are
 * neighbours (ll_order), so that the proxy merges them. Inside a node the round is two cache lines per pair of ranks,
 * and saves reading every row again at every receiver.
 */
#ifndef EPX_KERNEL_LL_DISPATCH_H
#define EPX_KERNEL_LL_DISPATCH_H

#include "kernel/ll_block.h"

/* Send and receive in one operation. */
KFN int ll_dispatch_whole(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
#if AG_BLOCKS
    struct ll_block_plan *room = ll_block_memory(ag, p);

    if (room) {
        enum ll_block_result result = ll_dispatch_block(ag, p, epoch, room);
        if (result == LL_BLOCK_AGAIN) /* with fewer agents */
            result = ll_dispatch_block(ag, p, epoch, room);
        if (result != LL_BLOCK_ELSEWHERE)
            return result == LL_BLOCK_FAILED || (result == LL_BLOCK_CLOSED && ll_stage_rows(ag, p, epoch)) ||
                   ll_receive(ag, p, epoch, result == LL_BLOCK_WRITTEN);
    }
#endif
    const int failed = ll_send_tables(ag, p, epoch) || (has_nodes(g) && ll_stage_rows(ag, p, epoch));
    if (has_nodes(g)) /* an agent whose ring stays full fails alone */
        return block_decides(ag, failed) || ll_dispatch_recv(ag, p, epoch);
    if (failed || ll_wait_tables(ag, p, epoch))
        return 1;
    AG_MARK(ag, MARK_DATA);
    const int open = ll_all_open(ag, g, epoch);
    if (open ? ll_write_rows(ag, p, epoch) : ll_stage_rows(ag, p, epoch))
        return 1;
    return ll_receive(ag, p, epoch, open);
}

KFN void kernel_ll_dispatch(struct agent *ag, const struct ll_dispatch_params *p)
{
    const struct group_dev *g = p->g;
    const uint64_t next = g->state->epoch[OP_LL_DISPATCH] + 1;

    if (!kernel_begin(ag, g)) {
        if (p->steps == (STEP_SEND | STEP_RECV))
            ll_dispatch_whole(ag, p, next);
        else if (p->steps == STEP_SEND)
            ll_dispatch_send(ag, p, next);
        else if (p->steps == STEP_WAIT)
            ll_dispatch_wait(ag, p, p->h->state->epoch);
        else
            ll_dispatch_recv(ag, p, p->h->state->epoch);
    }
    kernel_end(ag, g);
}

#endif
