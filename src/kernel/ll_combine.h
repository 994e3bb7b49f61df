/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Low-latency combine, epoch e, slot (e - 1) % W, lap v of that slot.
 *
 *   expert rank d                                     source s of the node
 *   wait LC_DONE[*] >= v - 1  (receive slots free)
 *   rows in epx_alloc memory, or in a region that
 *   all peers imported (group/region.h): describe where they are   (nothing moves)
 *   otherwise: write each row, LogFMT or plain, into
 *     s's receive slot, at ll_places()
 *     (with signals: expert by expert, each row when
 *     the caller's kernel has said that it is there)
 *   signal LC_DATA = v  ---------------------------->  wait LC_DATA[*] >= v
 *                                                      out[t] = sum over k of weight * row, read where d has it
 *                                                      (LogFMT: rounded), or in the own receive slot
 *   (in place: wait LC_DONE[*] >= v)  <--------------  signal LC_DONE = v
 *
 *                                                     source s of another node
 *   put the descriptor, counter LC_DATA  ----------->  wait LC_DATA[d] >= v, compare what both do
 *   put each row from where it is, or from the stage,
 *     into s's receive slot, counter LC_ROWS  ------>  wait LC_ROWS[d] >= expected so far + rows it has there
 *     (LogFMT: without gaps, behind their lengths)      (find where each begins)
 *   LC_DONE counted                <-----------------  put of no bytes, counter LC_DONE
 *
 * Each row crosses between ranks once, by a read (in place) or by a write (receive buffer).
 */
#ifndef EPX_KERNEL_LL_COMBINE_H
#define EPX_KERNEL_LL_COMBINE_H

#include "kernel/ll_combine_recv.h"
#include "kernel/ll_combine_send.h"

KFN int lc_run(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch)
{
    if (p->steps & STEP_SEND) {
        const int failed = lc_take_slot(ag, p, epoch) || (lc_moves(p) && lc_push(ag, p, epoch));
        /* An agent that has rows may fail alone: its signal or its ring. */
        if (lc_moves(p) && p->steps & STEP_RECV ? block_decides(ag, failed) : failed)
            return 1;
    }
    if (p->steps == STEP_WAIT)
        return lc_wait(ag, p, epoch);
    if (!(p->steps & STEP_RECV))
        return 0;
    if (lc_data(ag, p, epoch) || lc_sum(ag, p, epoch))
        return 1;
    /* The caller may change its tensor once this operation has completed: not before all have read it. */
    if (!p->pulled)
        return 0;
    if (wait_peers_end(ag, p->g, SCOPE_ALL, SIG_LC_DONE, slot_of(p->g, epoch), lap_of(p->g, epoch), PHASE_LC_DONE))
        return 1;
    if (ag_index(ag) == 0 && ag_leader(ag))
        p->g->state->combined[epoch & 1] = epoch; /* read by lc_slot_known() in a later launch */
    return 0;
}

KFN void kernel_ll_combine(struct agent *ag, const struct ll_combine_params *p)
{
    const struct group_dev *g = p->g;
    const uint64_t next = g->state->epoch[OP_LL_COMBINE] + 1;

    if (LC_LOGFMT(p))
        ag_logfmt_begin(ag);
    if (!kernel_begin(ag, g))
        lc_run(ag, p, p->steps & STEP_SEND ? next : p->h->state->epoch);
    kernel_end(ag, g);
}

#endif
