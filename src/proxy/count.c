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
 * Alarms and questions (alarm.c) count nothing.
 *
 * A counter has one writer: the pair (this rank, source) always uses the same thread for it. It is never reset.
 * `sent` of a peer may have several.
 *
 * Agents that wait for all peers look at one word of each thread instead of one per peer: the aggregate of the kind and
 * slot. Of signals it is the least counter: level L means that every peer has given L signals. `reached` counts the
 * peers above L; when it is all of them, L advances. So an arrival costs O(1), and one pass over the peers per level.
 * Of rows it is the sum, which agents compare with the sum of what they expect: no peer sends rows of a later operation
 * before this rank has said that it is done with this one, so the sum is complete only when every peer's rows are.
 * (Nobody waits for aggregates of rounds, which are spread over threads: `members` are the peers of other counters.)
 */
#include "proxy/internal.h"
#include "util/log.h"

#include <stdlib.h>

#include "util/status.h"

static uint64_t *counter_word(const struct proxy_options *o, int kind, int slot, int rank)
{
    return &o->counters[((size_t)kind * (size_t)o->slots + (size_t)slot) * (size_t)o->nranks + (size_t)rank];
}

static uint64_t *aggregate_word(const struct proxy_thread *t, int kind, int slot)
{
    const struct proxy_options *o = &t->group->options;

    return &o->aggregates[((size_t)t->index * (size_t)o->kinds + (size_t)kind) * (size_t)o->slots + (size_t)slot];
}

/* Whether this thread counts this counter of peer i. */
static int counts_for(const struct proxy_thread *t, int i, int kind, int slot)
{
    return proxy_ring_of(t->group, t->peers[i].rank, COUNTER(kind, slot)) == t->index;
}

static int is_absent(const struct proxy_thread *t, int i)
{
    const struct proxy_options *o = &t->group->options;

    return o->absent && o->absent[t->peers[i].rank];
}

/* Peers whose counter is above `level`, and the least counter of all. */
static uint32_t count_above(const struct proxy_thread *t, int kind, int slot, uint64_t level, uint64_t *least)
{
    uint32_t above = 0;

    *least = UINT64_MAX >> 1; /* a thread without peers holds nobody up */
    for (int i = 0; i < t->npeers; i++) {
        const uint64_t value = *counter_word(&t->group->options, kind, slot, t->peers[i].rank);

        if (is_absent(t, i) || !counts_for(t, i, kind, slot))
            continue;
        above += value > level;
        *least = value < *least ? value : *least;
    }
    return above;
}

static void begin_aggregate(struct proxy_thread *t, int kind, int slot)
{
    const struct proxy_options *o = &t->group->options;
    uint64_t least, sum = 0;

    for (int i = 0; i < t->npeers; i++)
        if (counts_for(t, i, kind, slot))
            sum += *counter_word(o, kind, slot, t->peers[i].rank);
    count_above(t, kind, slot, 0, &least);
    *aggregate_word(t, kind, slot) = o->sums[kind] ? sum : least;
    t->reached[kind * o->slots + slot] = count_above(t, kind, slot, least, &least);
}

epx_status count_begin(struct proxy_thread *t)
{
    const struct proxy_options *o = &t->group->options;

    if (!o->aggregates)
        return EPX_OK;
    t->reached = calloc((size_t)o->kinds * (size_t)o->slots, sizeof(*t->reached));
    if (!t->reached)
        return fail(EPX_ERR_MEMORY, "proxy %d: no memory for %d aggregates", t->index, o->kinds * o->slots);
    for (int i = 0; i < t->npeers; i++)
        t->members += !is_absent(t, i) && counts_for(t, i, SIG_ABORT, 0);
    for (int kind = 0; kind < o->kinds; kind++)
        for (int slot = 0; slot < o->slots; slot++)
            begin_aggregate(t, kind, slot);
    return EPX_OK;
}

/* A peer's counter has gone from `before` to `after`. */
static void count_aggregate(struct proxy_thread *t, int kind, int slot, uint64_t before, uint64_t after)
{
    const struct proxy_options *o = &t->group->options;
    const uint32_t all = (uint32_t)INJECT_BUG(BUG_AGGREGATE, t->members > 1 ? t->members - 1 : 1, t->members);
    uint64_t *word = aggregate_word(t, kind, slot), level = *word, least;
    uint32_t *reached = &t->reached[kind * o->slots + slot];

    if (o->sums[kind]) {
        level += after - before;
    } else {
        *reached += before <= level && after > level;
        while (*reached >= all)
            *reached = count_above(t, kind, slot, ++level, &least);
    }
    /* Release: pairs with the acquire of the agents that wait for it; the bytes of all peers came before. */
    if (level != *word)
        __atomic_store_n(word, level, __ATOMIC_RELEASE);
}

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
    const uint32_t alarm = immediate_alarm(imm);
    uint64_t *word, before;

    if (immediate_version(imm) != IMMEDIATE_VERSION) {
        refuse(t, event, IMMEDIATE_VERSION, immediate_version(imm), "an immediate arrived with an unknown version");
        return;
    }
    if (rank >= (uint32_t)o->nranks || t->by_rank[rank] < 0 || (event->peer >= 0 && event->peer != (int)rank)) {
        refuse(t, event, event->peer, rank, "an immediate arrived from a rank that is no peer of this endpoint");
        return;
    }
    t->peers[t->by_rank[rank]].heard = 1;
    if (alarm != ALARM_NONE && o->on_alarm && ALARM_CULPRIT(alarm) < o->nranks) {
        stat_add(&t->stats.arrivals, 1);
        if (ALARM_CAUSE(alarm) == ALARM_GOODBYE)
            goodbye_take(t, (int)rank);
        o->on_alarm(o->context, (int)rank, alarm);
        t->ring_bell = 1;
        return;
    }
    alarm_left_out(t, (int)rank);
    if (alarm != ALARM_NONE || !counter_exists(o, counter)) {
        refuse(t, event, COUNTER(o->kinds, 0), counter, "an immediate arrived for a counter that does not exist");
        return;
    }
    if (is_alarm(o, counter)) {
        stat_add(&t->stats.arrivals, 1);
        alarm_reply(t, (int)rank);
        return;
    }
    if (proxy_ring_of(t->group, (int)rank, counter) != t->index) {
        refuse(t, event, proxy_ring_of(t->group, (int)rank, counter), t->index,
               "an immediate arrived for a counter of another endpoint");
        return;
    }
    stat_add(&t->stats.arrivals, 1);
    word = counter_word(o, (int)COUNTER_KIND(counter), (int)COUNTER_SLOT(counter), (int)rank);
    before = *word;
    /* Release: pairs with the acquire of the agents that wait for it; the bytes came before. One writer: no add. */
    __atomic_store_n(word, before + immediate_count(imm), __ATOMIC_RELEASE);
    if (o->aggregates)
        count_aggregate(t, (int)COUNTER_KIND(counter), (int)COUNTER_SLOT(counter), before,
                        before + immediate_count(imm));
    t->ring_bell = 1;
}

void count_sent(struct proxy_thread *t, const struct peer *peer, uint64_t commands)
{
    uint64_t *sent = t->group->options.sent, *all = t->group->options.sent_all;

    if (!sent || commands == 0)
        return;
    /* Release: pairs with the acquire of agents that wait to use the bytes' memory again. A peer may have several
     * threads, and each adds its own: an agent that sees the sum has seen the release of each of them. */
    if (t->group->routes[peer->rank] & ROUTE_SPREAD && t->group->options.threads > 1)
        __atomic_fetch_add(&sent[peer->rank], commands, __ATOMIC_RELEASE);
    else
        __atomic_store_n(&sent[peer->rank], sent[peer->rank] + commands, __ATOMIC_RELEASE);
    if (all) /* likewise; one writer: no add */
        __atomic_store_n(&all[t->index], all[t->index] + commands, __ATOMIC_RELEASE);
    t->ring_bell = 1;
}
