/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Aborts, questions and their answers, and what else names the culprit (kernel/waiting_for.h). A ring may be full, or
 * wait for a peer that is gone: what a failing rank has to say does not pass through it.
 *
 *   kernel, host                     this thread                                   peers' proxies
 *   ring.alarm = alarm ----------->  the alarm to all peers, or to the relays -->  on_alarm: set the abort word
 *   ring.ask = rank    ----------->  a question to one peer  ------------------->  on_ask
 *   on_alarm: a reply  <--------------------------------------------------------  the alarm that on_ask returned
 *
 * A rank that was masked while it was late, and goes on to send, is told so: an alarm with itself as the culprit.
 *
 * An endpoint that is closed after a failure first waits until its aborts have left.
 *
 * The network loses a peer: it may have ended because of a failure of which this rank has not heard yet, so that is
 * reported after a grace period. A peer that has said goodbye (goodbye.c) is not lost, nor is one that was only asked.
 */
#include <stdio.h>
#include <string.h>

#include "proxy/internal.h"
#include "util/pause.h"

#define TELL_NS 250000000u
#define TELL_POLL_NS 50000

/* An alarm, or a question if it is ALARM_NONE. No kernel has pushed it: it counts as no command. */
int send_alarm(struct proxy_thread *t, struct peer *peer, uint32_t alarm)
{
    const struct pending put = {.counter = (uint16_t)COUNTER(t->group->options.alarm_kind, 0), .alarm = alarm};

    return peer->dead || peer->left || put_enqueue(t, peer, &put);
}

/* A peer whose queue is full gets it in a later iteration. */
static int take_alarm(struct proxy_thread *t, uint64_t alarm)
{
    const uint8_t *relays = t->group->options.relays;
    int n = 0;

    for (; t->alarm_next < t->npeers; t->alarm_next++, n++) {
        struct peer *peer = &t->peers[t->alarm_next];

        if (!(alarm & ALARM_ALL) && relays && !relays[peer->rank])
            continue;
        if (!send_alarm(t, peer, (uint32_t)alarm))
            break;
    }
    return n;
}

static int take_ask(struct proxy_thread *t)
{
    /* Acquire: pairs with the release in put_question() of kernel/waiting_for.h. */
    const uint64_t word = __atomic_load_n(t->ring.dev.ask, __ATOMIC_ACQUIRE);
    const uint32_t rank = (uint32_t)WAITS_PEER(word);

    if (word == t->asked_word)
        return 0;
    t->asked_word = word;
    __atomic_store_n(t->ring.dev.asked, word, __ATOMIC_RELEASE); /* for trail_ask() */
    if (rank < (uint32_t)t->group->options.nranks && t->by_rank[rank] >= 0) {
        t->peers[t->by_rank[rank]].asked = 1;
        send_alarm(t, &t->peers[t->by_rank[rank]], ALARM_NONE); /* without room: it will be asked again */
    }
    return 1;
}

int alarm_progress(struct proxy_thread *t)
{
    const uint64_t alarm = __atomic_load_n(t->ring.dev.alarm, __ATOMIC_ACQUIRE); /* pairs as in alarm_waits() */

    return take_ask(t) | (alarm ? take_alarm(t, alarm) : 0);
}

void alarm_reply(struct proxy_thread *t, int rank)
{
    const struct proxy_options *o = &t->group->options;

    if (o->on_ask)
        send_alarm(t, &t->peers[t->by_rank[rank]], o->on_ask(o->context, rank));
}

/* Each bug, also that of rows which are on their way when the alarm comes, counts on a rank that is not told. */
#define TELLS(right) INJECT_BUG(BUG_NOT_TOLD, 0, INJECT_BUG(BUG_RECV_HALF, 0, right))

void alarm_left_out(struct proxy_thread *t, int rank)
{
    const struct proxy_options *o = &t->group->options;
    struct peer *peer = &t->peers[t->by_rank[rank]];

    if (o->goes_on_without && !peer->told_left && TELLS(o->goes_on_without(o->context, rank)))
        peer->told_left = send_alarm(t, peer, ALARM(rank, PHASE_MASKS)) != 0;
}

/* Agents that wait for room in the ring wait for the peer whose queue is full. */
void report_blocked(struct proxy_thread *t)
{
    const struct proxy_options *o = &t->group->options;
    const uint64_t slice_ns = (uint64_t)o->timeout_ms * 1000000u / WAIT_SLICES;

    /* Release: pairs with the acquire in push_failed() of kernel/wait_word.h. */
    __atomic_store_n(t->ring.dev.blocked, t->blocked ? (uint64_t)t->blocked_by + 1 : 0, __ATOMIC_RELEASE);
    if (!t->blocked) {
        t->blocked_ns = 0;
    } else if (!t->blocked_ns) {
        t->blocked_ns = loop_now(t);
    } else if (loop_now(t) - t->blocked_ns >= (slice_ns < WAIT_SLICE_MAX_NS ? slice_ns : WAIT_SLICE_MAX_NS)) {
        t->blocked_ns = loop_now(t);
        if (o->on_blocked)
            o->on_blocked(o->context, t->blocked_by);
    }
}

/* "No alarm waits" would not be enough: a kernel may ask for the stop when another agent, or the host, has not set the
 * alarm yet, and the endpoint be closed before the iteration that would find it. */
void alarm_report(struct proxy_thread *t)
{
    const int told = t->nbusy == 0 && t->messages_in_flight == 0 && t->alarm_next == t->npeers;

    __atomic_store_n(&t->told, told, __ATOMIC_RELEASE); /* pairs with the acquire in alarm_wait() */
}

static int has_told(struct proxy_thread *t)
{
    if (t->group->manual)
        proxy_progress(t);
    return t->abandoned || __atomic_load_n(&t->told, __ATOMIC_ACQUIRE); /* pairs with alarm_report() */
}

void alarm_wait(struct proxy_group *g)
{
    const uint64_t eighth = (uint64_t)g->options.timeout_ms * 1000000u / 8;
    const uint64_t deadline = g->env->now_ns(g->env->self) + (eighth < TELL_NS ? eighth : TELL_NS);

    for (int i = 0; g->connected && i < g->options.threads; i++) {
        struct proxy_thread *t = &g->threads[i];

        if (!__atomic_load_n(t->ring.dev.alarm, __ATOMIC_ACQUIRE)) /* pairs as in alarm_waits() */
            continue;
        while (!has_told(t) && !g->manual && g->env->now_ns(g->env->self) < deadline)
            pause_ns(TELL_POLL_NS);
    }
}

static int was_only_asked(const struct peer *peer)
{
    return peer->asked && !peer->needed && !peer->heard;
}

/* One that was only asked, and never met, may have ended in order: it says goodbye to those that it has met. Those that
 * wait for it have met it, or are of its node, and know. */
void report_loss(struct proxy_thread *t, const struct peer *peer)
{
    const struct proxy_options *o = &t->group->options;
    char text[160];

    if (was_only_asked(peer) && o->on_alarm) {
        o->on_alarm(o->context, peer->rank, ALARM(peer->rank, ALARM_GOODBYE));
        return;
    }
    snprintf(text, sizeof(text), "the network (%s) lost rank %d: %s", t->ops->name, peer->rank, strerror(peer->error));
    if (peer->left)
        return;
    if (o->on_given_up && peer->missed)
        o->on_given_up(o->context, peer->rank, peer->error, text);
    else if (o->on_error)
        o->on_error(o->context, EPX_ERR_PEER, peer->rank, 0, peer->error, text);
}

/* Losses whose grace period is over. */
void report_losses(struct proxy_thread *t)
{
    const uint64_t grace_ns = (uint64_t)t->group->options.grace_ms * 1000000u;
    int i;

    for (i = 0; i < t->npeers; i++) {
        struct peer *peer = &t->peers[i];

        if (!peer->unreported || loop_now(t) - peer->lost_ns < grace_ns)
            continue;
        peer->unreported = 0;
        t->unreported--;
        report_loss(t, peer);
    }
}
