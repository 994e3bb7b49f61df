/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The wait for one word of one peer, and what becomes of a wait that ends without it: the peer is masked if the group
 * and the phase allow it, otherwise the operation fails on all ranks. waiting_for.h finds who is the culprit.
 */
#ifndef EPX_KERNEL_WAIT_WORD_H
#define EPX_KERNEL_WAIT_WORD_H

#include "kernel/waiting_for.h"
#include "kernel/late_writes.h"

/* May a wait in this phase end by masking the peer? */
KFN int phase_masks(int phase)
{
    return (int)(MASKABLE_PHASES >> phase & 1);
}

KFN_STEP int wait_failed_by_word(struct agent *ag, const struct group_dev *g, int phase, uint64_t target, uint64_t seen)
{
    report_abort(ag, g, phase, (int64_t)target, (int64_t)seen, ag_load_acquire(&control_of(g, g->rank)->abort_word));
    return 1; /* kernel_end() tells the others */
}

/* The others have gone on without `left`, and this rank has not: its operation is not good, theirs are. It cannot catch
 * up with them by itself, for its caller stops here. So the operation ends on all ranks, and they recover together. */
KFN_STEP uint64_t fail_left(struct agent *ag, const struct group_dev *g, int left)
{
    report_abort(ag, g, PHASE_MASKS, 0, 0, ABORT_CAUSED(KSTATUS_TIMEOUT, PHASE_MASKS, g->rank, left));
    if (INJECT_BUG(BUG_FAILS_ALONE, 0, 1))
        fail_all(ag, g, KSTATUS_TIMEOUT, PHASE_MASKS, left, 0, 0);
    return ag_load_acquire(&control_of(g, g->rank)->abort_word);
}

/* A wait that ended without its word. `culprit` keeps `peer` from answering; most often it is `peer` itself. */
KFN_STEP int wait_failed(struct agent *ag, const struct group_dev *g, enum wait_result why, int phase, int peer,
                         int culprit, uint64_t target, uint64_t seen)
{
    if (why == WAIT_ABORTED)
        return wait_failed_by_word(ag, g, phase, target, seen);
    if (why == WAIT_LEFT) {
        fail_left(ag, g, peer);
        return 1;
    }
    if (why == WAIT_LOST)
        culprit = peer;
    if (ag_leader(ag))
        ag_add_stat(&g->stats->timeouts, 1);
    if (has_masks(g) && peer >= 0 && culprit >= 0 && phase_masks(phase)) {
        /* If it is late rather than dead, what it reads from now on may belong to a later operation. */
        if (is_local(g, peer) && ag_leader(ag))
            set_abort_word(ag, g, peer, ABORT_CAUSED(KSTATUS_TIMEOUT, phase, g->rank, peer) | ABORT_LEFT_OUT);
        ag_sync(ag);
        const enum wait_result ended = is_local(g, peer) ? still_writes(ag, g, peer) : still_read(ag, g, peer);
        if (ended == WAIT_ABORTED)
            return wait_failed_by_word(ag, g, phase, target, seen);
        if (ended == WAIT_OK) {
            report(ag, g, KSTATUS_TIMEOUT, phase, peer, (int64_t)target, (int64_t)seen, 1, 0);
            if (ag_leader(ag)) { /* proxy threads read them: pairs with mask_by_deadline() and mask_read() */
                ag_store_release32(&g->by_deadline[peer], 1);
                ag_store_release32((uint32_t *)&g->mask[peer], 0);
            }
            AG_GOES_ON(ag, g, peer);
            ag_sync(ag);
            return 0;
        }
        culprit = peer; /* it stopped, or ended, in the midst of rows: nobody can go on without a recovery */
    }
    report(ag, g, KSTATUS_TIMEOUT, phase, culprit, (int64_t)target, (int64_t)seen, 0, peer);
    return fail_all(ag, g, KSTATUS_TIMEOUT, phase, culprit, (int64_t)target, (int64_t)seen);
}

/* A push that did not go through: its ring stayed full for a whole deadline, or the group has failed meanwhile. Other
 * rings may wait for other peers, and for a moment only. `failed`: of struct put_batch, and not the batch itself, which
 * stays in registers. */
KFN_STEP int push_failed(struct agent *ag, const struct group_dev *g, int failed)
{
    struct awaited own = {-1, NULL, 0};
    enum wait_result why = ag_look(&control_of(g, g->rank)->abort_word) ? WAIT_ABORTED : WAIT_TIMEOUT;
    int culprit = -1;

    if (why == WAIT_TIMEOUT) /* pairs with the release in report_blocked() */
        own.peer = (int)ag_look(g->rings[failed - 1].blocked) - 1;
    set_wait_left(ag, g->timeout_ns / 2);
    if (own.peer >= 0)
        why = follow(ag, g, own, has_masks(g) && phase_masks(PHASE_RING), &culprit);
    return wait_failed(ag, g, why, PHASE_RING, own.peer, culprit, 0, 0);
}

KFN uint64_t whole_wait(const struct group_dev *g)
{
    return g->timeout_ns + g->timeout_ns / 2;
}

/* Before the first of several words. */
KFN void waits_begin(struct agent *ag, const struct group_dev *g)
{
    set_wait_left(ag, whole_wait(g));
}

/* The same for one word, with a deadline by the clock: where no peer is masked. */
KFN void waits_began(struct agent *ag, const struct group_dev *g, uint64_t start)
{
    const uint64_t spent = ag_now(ag) - start;

    set_wait_left(ag, spent < whole_wait(g) ? whole_wait(g) - spent : 0);
}

enum { GIVEN = 2 }; /* deadlines: until it masks another rank, and until that one does not write any more */

/* follow(), and with `masks`: a rank that waits for another one is not masked in its place. It is given time to mask
 * that one, and asked again: where that one has stopped while it wrote rows, this takes a deadline more, as long as the
 * time that it was given (still_writes()). */
KFN_STEP enum wait_result follow_to_mask(struct agent *ag, const struct group_dev *g, struct awaited own, int masks,
                                         int *culprit)
{
    for (int given = 0;; given++) {
        enum wait_result why = follow(ag, g, own, masks, culprit);

        if (why != WAIT_TIMEOUT || !masks || *culprit < 0 || *culprit == own.peer || given == GIVEN)
            return why;
        why = wait_aloud(ag, g, own.word, own.target, own.peer, g->timeout_ns);
        if (why != WAIT_TIMEOUT)
            return why;
        set_wait_left(ag, g->timeout_ns / 2);
    }
}

/* One word of one peer, after waits_begin(): one deadline for all peers that are waited for together. A peer that came
 * after it leaves those behind it time to be followed: what kept it has kept them too. Non-zero: failed. */
KFN_STEP int wait_word(struct agent *ag, const struct group_dev *g, const uint64_t *word, uint64_t target, int phase,
                       int peer)
{
    const int masks = has_masks(g) && phase_masks(phase);
    const uint64_t half = g->timeout_ns / 2, later = half + (peer >= 0 ? follow_ns(g) : 0);
    int culprit = peer;
    AG_WAITS(ag, phase, peer);
    enum wait_result why = wait_aloud(ag, g, word, target, peer, ag->wait_left > later ? ag->wait_left - later : 0);

    pay_wait(ag);
    if (why == WAIT_TIMEOUT && peer >= 0 && ag->wait_left > 0) {
        const struct awaited own = {peer, word, target};

        why = follow_to_mask(ag, g, own, masks, &culprit);
        if (why == WAIT_OK && ag->wait_left < half)
            set_wait_left(ag, half);
    }
    return why == WAIT_OK ? 0 : wait_failed(ag, g, why, phase, peer, culprit, target, ag_load_acquire(word));
}

KFN_STEP int wait_word_since(struct agent *ag, const struct group_dev *g, const uint64_t *word, uint64_t target,
                             int phase, int peer, uint64_t start)
{
    waits_began(ag, g, start);
    return wait_word(ag, g, word, target, phase, peer);
}

#endif
