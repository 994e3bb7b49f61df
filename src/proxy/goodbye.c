/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goodbye. A rank that ends its group in order closes its endpoints, and others may still be at work: their last
 * signals to it would fail, and they would take it for one that has died (docs/design.md, "Culprits").
 *
 *   rank that ends its group                           a peer
 *   its operations have completed: all that others
 *   need of it is posted
 *   goodbye  ------------------------------------->    sends it nothing any more: what it would send counts as sent
 *   all is answered, or the deadline has passed
 *   closes its endpoints  . . . . . . . . . . . . .    the network loses it: that is no failure
 *
 * A goodbye needs no order. What it overtakes still arrives, for the endpoint is closed when all has been answered. A
 * loss that overtakes it is reported after the grace period (alarm.c), and by then the goodbye has come. Two ranks that
 * leave at the same time do not wait for each other's answers. A peer to which this rank has sent nothing, and from
 * which nothing has come, is not told: it would have to be connected first. Where nodes have different sizes, a rank
 * sends to a relay that sends it nothing; when the relay ends first, the rank's own goodbye would find nobody and take
 * a whole deadline. A peer that this rank has masked, and that was late rather than dead, is told that instead: it has
 * missed operations.
 */
#include "proxy/internal.h"

static uint32_t goodbye_for(const struct proxy_thread *t, const struct peer *peer)
{
    const struct proxy_options *o = &t->group->options;

    if (o->goes_on_without && o->goes_on_without(o->context, peer->rank))
        return ALARM(peer->rank, PHASE_MASKS);
    return ALARM(o->rank, ALARM_GOODBYE);
}

static int need_not_be_told(const struct peer *peer)
{
    return (peer->next == 0 && !peer->heard) || peer->told_left || INJECT_BUG(BUG_NO_GOODBYE, 1, 0);
}

/* A peer whose queue is full is told in a later iteration, and keeps nobody else waiting. */
int goodbye_progress(struct proxy_thread *t)
{
    int n = 0;

    for (int i = 0; i < t->npeers; i++) {
        struct peer *peer = &t->peers[i];

        if (peer->told_bye)
            continue;
        peer->told_bye = need_not_be_told(peer) || send_alarm(t, peer, goodbye_for(t, peer));
        n += peer->told_bye;
    }
    return n;
}

void goodbye_take(struct proxy_thread *t, int rank)
{
    struct peer *peer = &t->peers[t->by_rank[rank]];

    if (peer->left)
        return;
    peer->left = 1;
    for (uint32_t i = peer->head; i != peer->tail; i++)
        commands_drop(t, peer, peer->queue[i & (t->depth - 1)].count);
    peer->head = peer->tail;
}
