/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How an operation fails: the error record for the host, then the abort words, which wake all waiters.
 *
 *   rank that fails                                          others
 *   error record, release state = ERROR_SET  ------------->  acquire in error_read(), of the own host
 *   release abort word of each rank of the node  --------->  acquires in ag_wait_ge and kernel_end()
 *   put_abort(): its proxies tell the other nodes  ------->  there a proxy stores the abort word
 */
#ifndef EPX_KERNEL_ABORT_H
#define EPX_KERNEL_ABORT_H

#include "kernel/put.h"
#include "kernel/signal_words.h"

/* Records an error for the host; the first one wins. Does not stop anything by itself. */
KFN_STEP void report(struct agent *ag, const struct group_dev *g, int status, int phase, int peer, int64_t expected,
                     int64_t seen, int64_t detail0, int64_t detail1)
{
    if (!ag_leader(ag) || !ag_claim(&g->state->reported, 0, 1))
        return;
    g->error->status = status;
    g->error->phase = phase;
    g->error->peer = peer;
    g->error->expected = expected;
    g->error->seen = seen;
    g->error->detail[0] = detail0;
    g->error->detail[1] = detail1;
    ag_store_release32(&g->error->state, ERROR_SET); /* pairs with the host's acquire in error_read() */
}

/* One rank of the node, this one included; its first word stays. By each lane for itself. */
KFN void set_abort_word(struct agent *ag, const struct group_dev *g, int rank, uint64_t word)
{
    struct control *c = control_of(g, rank);

    if (!ag_peek(&c->abort_word))
        ag_store_release(&c->abort_word, word); /* pairs with the acquires in ag_wait_ge and kernel_end() */
    ag_ring(ag, &c->bell);
}

/* The other ranks of the node. Always before this rank ends anything: what they read here may then be reused. */
KFN_STEP void tell_node(struct agent *ag, const struct group_dev *g, uint64_t word)
{
    AG_EACH(ag, int, i, g->node_size)
    if (node_rank(g, i) != g->rank)
        set_abort_word(ag, g, node_rank(g, i), word);
    ag_sync(ag);
}

/* This rank's operation ends because of its abort word, which says who is the culprit: never this rank itself. */
KFN_STEP void report_abort(struct agent *ag, const struct group_dev *g, int phase, int64_t expected, int64_t seen,
                           uint64_t word)
{
    const int culprit = ABORT_CULPRIT(word);

    report(ag, g, KSTATUS_PEER, phase, culprit == g->rank ? -1 : culprit, expected, seen, ABORT_STATUS(word),
           (int64_t)word);
}

/* Ends the operation on every rank: abort words wake all waiters. The own one comes last: another agent, or the host,
 * may end this rank's operation as soon as it sees it. */
KFN_STEP int fail_all(struct agent *ag, const struct group_dev *g, int status, int phase, int peer, int64_t expected,
                      int64_t seen)
{
    const int others = peer >= 0 && (status == KSTATUS_TIMEOUT || status == KSTATUS_MISMATCH);
    const uint64_t word = ABORT_CAUSED(status, phase, g->rank, others ? peer : g->rank);

    /* -1: invalid data. check_signature() reports fields of signatures that differ before it comes here. */
    report(ag, g, status, phase, peer, expected, seen, status == KSTATUS_MISMATCH ? -1 : 0, 0);
    tell_node(ag, g, word);
    if (ag_leader(ag))
        set_abort_word(ag, g, g->rank, word);
    ag_sync(ag);
    put_abort(ag, g, word);
    return 1;
}

#endif
