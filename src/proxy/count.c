/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Arrivals: the immediate of a put says which counter of which source advances, and by how much.
 *
 *   peer's proxy                              this thread                               agents of this rank
 *   put(bytes, immediate) ---- network --->   bytes are in the heap
 *                                             counter[kind][slot][source] += count  --> wait until it is what I expect
 *                                             (release)                                 (acquire), read the bytes
 *                                             ring the rank's bell
 *
 * sent[peer] counts the commands that have completed, or that were dropped because the peer is lost: agents wait for it
 * before they reuse the memory of the source bytes, and must not wait for what will never complete.
 *
 * Notes and questions (alarm.c) count nothing.
 *
 * A counter has one writer: the pair (this rank, source) always uses the same thread. It is never reset.
 */
#include "proxy/internal.h"
#include "util/log.h"

static void refuse(struct proxy_thread *t, const struct net_event *event, int64_t expected, int64_t seen,
                   const char *text)
{
    const int rank = (int)immediate_rank(event->immediate);
    const int peer = event->peer >= 0 ? event->peer : rank < t->group->options.nranks ? rank : -1;

    stat_add(&t->stats.refused, 1);
    if (!(t->ops->caps(t->net) & NET_KNOWN_SENDERS)) { /* it may be anybody's: not a reason to end the job */
        if (t->stats.refused == 1)
            log_line(LOG_WARN, "%s; it is ignored, as all that follow: anybody can send here", text);
        return;
    }
    proxy_fault(t, FAULT_ARRIVAL, EPX_ERR_MISMATCH, peer, expected, seen, text);
}

void count_arrival(struct proxy_thread *t, const struct net_event *event)
{
    const struct proxy_options *o = &t->group->options;
    const uint32_t imm = event->immediate, rank = immediate_rank(imm), counter = immediate_counter(imm);
    const uint32_t note = immediate_note(imm);
    uint64_t *word;

    if (immediate_version(imm) != IMMEDIATE_VERSION) {
        refuse(t, event, IMMEDIATE_VERSION, immediate_version(imm), "an immediate arrived with an unknown version");
        return;
    }
    if (rank >= (uint32_t)o->nranks || t->by_rank[rank] < 0 || (event->peer >= 0 && event->peer != (int)rank)) {
        refuse(t, event, event->peer, rank, "an immediate arrived from a rank that is no peer of this endpoint");
        return;
    }
    if (note != NOTE_NONE && o->on_alarm && NOTE_CULPRIT(note) < o->nranks) {
        stat_add(&t->stats.arrivals, 1);
        o->on_alarm(o->context, (int)rank, note);
        t->ring_bell = 1;
        return;
    }
    if (note != NOTE_NONE || !counter_exists(o, counter)) {
        refuse(t, event, COUNTER(o->kinds, 0), counter, "an immediate arrived for a counter that does not exist");
        return;
    }
    stat_add(&t->stats.arrivals, 1);
    if (is_alarm(o, counter)) {
        alarm_answer(t, (int)rank);
        return;
    }
    word = &o->counters[((size_t)COUNTER_KIND(counter) * (size_t)o->slots + COUNTER_SLOT(counter)) * (size_t)o->nranks +
                        rank];
    /* Release: pairs with the acquire of the agents that wait for it; the bytes came before. One writer: no add. */
    __atomic_store_n(word, *word + immediate_count(imm), __ATOMIC_RELEASE);
    t->ring_bell = 1;
}

void count_sent(struct proxy_thread *t, const struct peer *peer, uint64_t commands)
{
    uint64_t *sent = t->group->options.sent;

    if (!sent || commands == 0)
        return;
    /* Release: pairs with the acquire of agents that wait to use the bytes' memory again. One writer: no add. */
    __atomic_store_n(&sent[peer->rank], sent[peer->rank] + commands, __ATOMIC_RELEASE);
    t->ring_bell = 1;
}
