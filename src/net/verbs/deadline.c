/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Puts that do not complete. A card gives up no put for want of receives (RNR), and finds a dead peer up to four times
 * later than it was told. So the endpoint has a clock of its own:
 *
 *   no put to a peer completes for the group's timeout:  the peer is lost, ETIMEDOUT
 *   it does not reply to a hello for so long (hello.c):  likewise
 *   a peer is lost, for this or any other reason:        RC: its queue pair goes to the error state
 *   its puts have all completed, most of them flushed:   NET_FAILED
 *   some do not, for an eighth of the timeout:           NET_FAILED with `reads`: the card may still read their memory
 *
 * A card owns the memory of a put until its completion was polled, whatever state its queue pair is in. Before that the
 * loss is not told: who hears of it gives the memory to others. What the peer's card has taken before may still land,
 * and is what was put.
 *
 * The clock counts time in which the endpoint was polled. A process that was stopped finds completions when it goes on:
 * what has completed until the clock was read is polled before anything is decided by it.
 *
 *   poll:  reads the clock -- takes completions, until the queue is empty or as many as it holds -- decides
 *   arm:   decides nothing; the poll behind the sleep reads the clock
 */
#include "net/verbs/verbs.h"

#if EPX_HAVE_VERBS

#include <errno.h>

#include "util/clock.h"
#include "util/log.h"

enum { CHECKS = 64, STEPS = 16, DRAIN = 8 }; /* parts of the timeout: between checks; most of a step; to complete */
enum { POLLS = 64 };                         /* between two looks at the clock */

static uint64_t timeout_ns(const struct verbs_net *net)
{
    return (uint64_t)net->timeout_ms * 1000000u;
}

static void tell(struct verbs_net *net, struct verbs_peer *p)
{
    p->drains = 0;
    net->draining--;
    p->report = 1;
    net->reports++;
}

void verbs_deadline_lost(struct verbs_net *net, int peer)
{
    struct verbs_peer *p = &net->peers[peer];

    p->drains = 1;
    p->moved = 1;
    net->draining++;
    if (!net->transport->in_flight(net, peer))
        tell(net, p);
}

void verbs_deadline_drained(struct verbs_net *net)
{
    for (int i = 0; i < net->nranks && net->draining; i++)
        if (net->peers[i].drains && !net->transport->in_flight(net, i))
            tell(net, &net->peers[i]);
}

/* Puts to the peer are in flight. */
static void check_peer(struct verbs_net *net, int peer)
{
    struct verbs_peer *p = &net->peers[peer];
    const uint64_t since = net->polled_ns - p->since_ns;

    if (p->moved) {
        p->moved = 0;
        p->since_ns = net->polled_ns;
    } else if (p->drains && since >= timeout_ns(net) / DRAIN) {
        log_line(LOG_WARN, "verbs: %s: puts to rank %d neither complete nor fail", net->card.device, peer);
        p->reads = 1;
        tell(net, p);
    } else if (!p->error && since >= timeout_ns(net)) {
        verbs_peer_lost(net, peer, ETIMEDOUT, "no put completed until the deadline");
    }
}

/* All that completed until `at` was taken. */
static void check(struct verbs_net *net, uint64_t at)
{
    const uint64_t passed = at - net->checked_ns, most = timeout_ns(net) / STEPS;

    if (passed < timeout_ns(net) / CHECKS)
        return;
    net->checked_ns = at;
    net->polled_ns += passed < most ? passed : most;
    for (int i = 0; i < net->nranks; i++)
        if (net->transport->in_flight(net, i))
            check_peer(net, i);
    net->transport->expire(net);
}

void verbs_deadline_begin(struct verbs_net *net)
{
    if (net->look_ns || net->polls++ < POLLS)
        return;
    net->polls = 0;
    net->look_ns = clock_ns();
    net->untaken = net->cq->cqe;
}

void verbs_deadline_polled(struct verbs_net *net, int taken, int asked)
{
    net->untaken -= taken;
    if (taken == asked && net->untaken > 0)
        return;
    check(net, net->look_ns);
    net->look_ns = 0;
}

void verbs_deadline_sleep(struct verbs_net *net)
{
    net->polls = POLLS;
}

#endif
