/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who keeps a rank from answering? A rank that does not answer may itself be waiting for the rank that is gone.
 * So whoever waits long says for whom, again and again (publish_waits()), and whoever's deadline expires follows these
 * words from rank to rank (find_culprit()): the culprit is the first rank that does not wait, or does not run.
 *
 *   rank 1                       rank 0                       rank 3
 *   waits for 0: waits = (n, 0)  waits for 3: waits = (n, 3)  gone: its word does not change
 *   expires; the word of 0 changes and names 3, that of 3 does not change: abort word with the culprit 3
 *
 * The word is in the control block, for the ranks of the node. For those of others the rank's proxy, which runs as long
 * as its process does, answers questions:
 *
 *   kernel                    own proxy          network           proxy of `rank`
 *   ring.ask = (n, rank) -->  question     ---------------------->  reads control.waits, or the abort word
 *   counters[SIG_ABORT][rank] = (m, reply)  <---------------------  alarm (kernel/command.h)
 */
#ifndef EPX_KERNEL_WAITING_FOR_H
#define EPX_KERNEL_WAITING_FOR_H

#include "kernel/agent.h"
#include "kernel/command.h"
#include "kernel/signal_words.h"

KFN struct control *waiting_control(const struct group_dev *g, int rank)
{
    return (struct control *)g->heap[rank];
}

/* Whoever waits for this rank, and does not get its word in time, finds here why. */
KFN_STEP void publish_waits(struct agent *ag, const struct group_dev *g, int peer)
{
    uint64_t *waits = &waiting_control(g, g->rank)->waits;

    if (ag_leader(ag) && peer >= 0)
        ag_store_release(waits, WAITS_WORD(WAITS_BEAT(ag_peek(waits)) + 1, peer)); /* pairs with next_beat() */
    ag_sync(ag);
}

/* With masks: has this rank of the node been left out by others, and given up (tell_left_out() in kernel/begin_end.h)?
 * What is awaited of it does not come. */
KFN int has_left(struct agent *ag, const struct group_dev *g, int peer)
{
    const struct signal *own = (const struct signal *)(g->heap[g->rank] + g->signals);

    return peer >= 0 && peer != g->rank && is_local(g, peer) &&
           ag_any(ag, ag_load_acquire(&own[signal_index(g, SIG_ABORT, 0, peer)].value) != 0);
}

/* How often a rank that waits says so. */
KFN uint64_t wait_slice(const struct group_dev *g)
{
    const uint64_t slice = g->timeout_ns / WAIT_SLICES;

    return slice < WAIT_SLICE_MAX_NS ? slice : WAIT_SLICE_MAX_NS;
}

/* How long the last wait_aloud() or find_culprit() took. It is in the agent: all lanes have one value, by which they
 * decide alike, and no registers are needed for it. */
KFN void set_spent(struct agent *ag, uint64_t ns)
{
    ag_sync(ag); /* all lanes have read it */
    if (ag_leader(ag))
        ag->wait_spent = ns;
    ag_sync(ag);
}

/* The next slice of a wait. */
KFN uint64_t next_slice(const struct agent *ag, const struct group_dev *g, uint64_t limit)
{
    const uint64_t left = limit - ag->wait_spent, slice = wait_slice(g);

    return left < slice ? left : slice;
}

/* ag_wait_ge in slices: a wait that takes longer than one says for whom. Time in which the process was stopped counts
 * as one slice at most: who has slept itself does not name others for it. */
KFN_STEP enum wait_result wait_aloud(struct agent *ag, const struct group_dev *g, const uint64_t *word, uint64_t target,
                                     int peer, uint64_t limit)
{
    set_spent(ag, 0);
    for (;;) {
        if (ag_leader(ag))
            ag->wait_before = ag_now(ag);
        const enum wait_result why = ag_wait_ge(ag, word, target, next_slice(ag, g, limit));
        const uint64_t ns = next_slice(ag, g, limit), took = ag_now(ag) - ag->wait_before;

        set_spent(ag, ag->wait_spent + (why == WAIT_TIMEOUT || took > ns ? ns : took));
        if (has_masks(g) && why == WAIT_TIMEOUT && has_left(ag, g, peer))
            return WAIT_LEFT;
        if (why != WAIT_TIMEOUT || ag->wait_spent == limit)
            return why;
        publish_waits(ag, g, peer);
    }
}

enum {
    BEAT_SLICES = 3, /* a rank that says nothing for so long does not wait */
    ASK_SLICES = 2,
    ASK_PARTS = 8, /* of a slice: agents whose deadlines expire together overwrite each other's questions */
    BEAT_TRIES = 3,
    MOST_HOPS = 8
};

/* What this rank waits for, and goes on saying so, in all that follows. word NULL: nothing that can come. */
struct awaited {
    int peer;
    const uint64_t *word;
    uint64_t target;
};

/* The peer was only late, and may wait for this rank by now: nobody is at fault. */
KFN int has_come(struct agent *ag, struct awaited own)
{
    return own.word && ag_any(ag, (int64_t)(ag_look(own.word) - own.target) >= 0);
}

/* The next word that `rank`, of this node, stores while it waits, or 0: it does not wait, or does not run. */
KFN_STEP uint64_t next_beat(struct agent *ag, const struct group_dev *g, int rank, uint64_t before, struct awaited own)
{
    const uint64_t *waits = &waiting_control(g, rank)->waits;
    const uint64_t next = WAITS_WORD(WAITS_BEAT(before) + 1, 0);

    for (int i = 0; i < BEAT_SLICES && !has_come(ag, own); i++) {
        const enum wait_result why = wait_aloud(ag, g, waits, next, own.peer, wait_slice(g));

        publish_waits(ag, g, own.peer);
        if (why == WAIT_OK)
            return ag_load_acquire(waits); /* pairs with the release in publish_waits() */
        if (why != WAIT_TIMEOUT)
            break;
    }
    return 0;
}

/* Where this rank's proxy stores what the proxy of `rank` answers. */
KFN const uint64_t *reply_word(const struct group_dev *g, int rank)
{
    return &g->counters[(size_t)SIG_ABORT * (size_t)g->sig_slots * (size_t)g->nranks + (size_t)rank];
}

/* Has the own proxy taken a question since `word` was stored? Otherwise it is stuck, and so is this rank. */
KFN int question_taken(const struct ring_dev *ring, uint64_t word)
{
    /* Acquire: pairs with the release in take_ask() of proxy/alarm.c. */
    return (int64_t)(WAITS_BEAT(ag_load_acquire(ring->asked)) - WAITS_BEAT(word)) >= 0;
}

/* ... or that of another agent in its place? */
KFN int is_overwritten(const struct ring_dev *ring, uint64_t word)
{
    return question_taken(ring, word) && ag_load_acquire(ring->asked) != word;
}

enum { NO_REPLY = 0, OWN_PROXY_STUCK = 1 }; /* instead of a word, whose beat is 1 or more */

KFN const struct ring_dev *question_ring(const struct group_dev *g, int rank)
{
    return &g->rings[ROUTE_RING(g->routes[rank], COUNTER(SIG_ABORT, 0), g->nrings)];
}

/* Returns the word by which the proxy says that it has taken the question. */
KFN_STEP uint64_t put_question(struct agent *ag, const struct ring_dev *ring, int rank)
{
    const uint64_t word = WAITS_WORD(WAITS_BEAT(ag_load_acquire(ring->ask)) + 1, rank);

    if (ag_leader(ag))
        ag_store_release(ring->ask, word); /* pairs with take_ask() */
    ag_sync(ag);
    ag_ring(ag, ring->bell);
    return word;
}

/* What the proxy of `rank`, of another node, says about its word. */
KFN_STEP uint64_t ask_waits(struct agent *ag, const struct group_dev *g, int rank, struct awaited own)
{
    const uint64_t next = WAITS_WORD(WAITS_BEAT(ag_load_acquire(reply_word(g, rank))) + 1, 0);
    uint64_t word = 0;
    int taken = 0;

    for (int i = 0; i < ASK_SLICES * ASK_PARTS || (!taken && i < BEAT_SLICES * ASK_PARTS); i++) {
        if (i % ASK_PARTS == 0 || ag_any(ag, is_overwritten(question_ring(g, rank), word)))
            word = put_question(ag, question_ring(g, rank), rank);
        const enum wait_result why = wait_aloud(ag, g, reply_word(g, rank), next, own.peer, wait_slice(g) / ASK_PARTS);
        if (why == WAIT_OK || i % ASK_PARTS == ASK_PARTS - 1)
            publish_waits(ag, g, own.peer);
        if (why == WAIT_OK)
            return ag_load_acquire(reply_word(g, rank)); /* pairs with the release in on_alarm() of group/net.c */
        if (why != WAIT_TIMEOUT || has_come(ag, own))
            return NO_REPLY;
        taken |= question_taken(question_ring(g, rank), word);
    }
    return taken ? NO_REPLY : OWN_PROXY_STUCK;
}

/* As next_beat(), for a rank of another node. Its proxy answers although nothing has changed: it is asked again a slice
 * later. */
KFN_STEP uint64_t next_reply(struct agent *ag, const struct group_dev *g, int rank, uint64_t before, struct awaited own)
{
    for (int i = 0; WAITS_BEAT(before) && i < ASK_SLICES; i++) {
        /* Nobody answers for this rank: a pause, which the abort word ends. */
        if (wait_aloud(ag, g, reply_word(g, g->rank), 1, own.peer, wait_slice(g)) > WAIT_TIMEOUT || has_come(ag, own))
            return NO_REPLY;
        const uint64_t next = ask_waits(ag, g, rank, own);
        if (!WAITS_BEAT(next) || ALARM_CAUSE((uint32_t)next) != ALARM_CAUSE((uint32_t)before))
            return next;
    }
    return before == OWN_PROXY_STUCK ? OWN_PROXY_STUCK : NO_REPLY;
}

/* Whom `rank` waits for; -1: it does not wait, run or answer. *stuck: this rank cannot ask. Agents of a rank may wait
 * for different ranks: those that wait for this one, which waits itself, do not count as long as there are others. */
KFN_STEP int waits_for(struct agent *ag, const struct group_dev *g, int rank, struct awaited own, int *stuck)
{
    const int local = g->heap[rank] != NULL;
    uint64_t word = local ? ag_load_acquire(&waiting_control(g, rank)->waits) : ask_waits(ag, g, rank, own);
    int whom = -1;

    /* ag_any: lanes that did not agree would part for good. */
    for (int i = 0; i < BEAT_TRIES && ag_any(ag, whom < 0 || whom == g->rank); i++) {
        word = local ? next_beat(ag, g, rank, word, own) : next_reply(ag, g, rank, word, own);
        if (ag_any(ag, !WAITS_BEAT(word)))
            break;
        whom = local ? WAITS_PEER(word) : ALARM_CULPRIT((uint32_t)word);
        if (whom >= g->nranks) /* from another rank's memory, or from the network */
            whom = -1;
    }
    *stuck = !local && word == OWN_PROXY_STUCK;
    return whom;
}

/* The rank that keeps a peer from answering: the peer itself, if it waits for nobody else; -1: this rank, whose own
 * proxy is stuck. Any rank if what is awaited has come. */
KFN_STEP int find_culprit(struct agent *ag, const struct group_dev *g, struct awaited own)
{
    const uint64_t start = ag_now(ag);
    int at = own.peer, stuck = 0;

    for (int i = 0; i < MOST_HOPS && ag_any(ag, ag_now(ag) - start < g->timeout_ns / 2); i++) {
        const int next = waits_for(ag, g, at, own, &stuck);

        if (ag_any(ag, next < 0 || next == g->rank || next == at))
            break;
        at = next;
    }
    set_spent(ag, ag_now(ag) - start);
    return stuck ? -1 : at;
}

#endif
