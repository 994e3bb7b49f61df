/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who keeps a rank from answering? A rank that does not answer may itself be waiting for the rank that is gone.
 * So whoever waits long says for whom, again and again (publish_waits()), and whoever's deadline comes near follows
 * these words from rank to rank (follow()): the culprit is the first rank that does not wait, or does not run. It is
 * named some slices after the deadline, when it has said nothing for half of one.
 *
 *   rank 1                       rank 0                       rank 3
 *   waits for 0: waits = (n, 0)  waits for 3: waits = (n, 3)  gone: its word does not change
 *   follows: the word of 0 changes and names 3, that of 3 does not change: abort word with the culprit 3
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
        ag_store_release(waits, WAITS_WORD(WAITS_BEAT(ag_peek(waits)) + 1, peer)); /* for trail_look() */
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

/* Where this rank's proxy stores what the proxy of `rank` answers. */
KFN const uint64_t *reply_word(const struct group_dev *g, int rank)
{
    return &g->counters[(size_t)SIG_ABORT * (size_t)g->sig_slots * (size_t)g->nranks + (size_t)rank];
}

/* `rank`, of another node, has ended its group in order, or nobody is at its address and this rank has never needed it.
 * It has sent all that others wait for, or those know that it is gone: whoever seems to wait for it has slept. */
KFN_STEP int has_gone(const struct group_dev *g, int rank)
{
    return !g->heap[rank] && ALARM_CAUSE((uint32_t)ag_look(reply_word(g, rank))) == ALARM_GOODBYE;
}

/* With masks: the network has lost this rank of another node. */
KFN int is_lost(struct agent *ag, const struct group_dev *g, int peer)
{
    return peer >= 0 && !g->heap[peer] && ag_any(ag, ALARM_CAUSE((uint32_t)ag_look(reply_word(g, peer))) == ALARM_LOST);
}

/* How often a rank that waits says so. */
KFN uint64_t wait_slice(const struct group_dev *g)
{
    const uint64_t slice = g->timeout_ns / WAIT_SLICES;

    return slice < WAIT_SLICE_MAX_NS ? slice : WAIT_SLICE_MAX_NS;
}

/* How long the last wait_aloud() took. It is in the agent: all lanes have one value, by which they decide alike, and no
 * registers are needed for it. */
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
        if (has_masks(g) && why == WAIT_TIMEOUT && is_lost(ag, g, peer))
            return WAIT_LOST;
        if (why != WAIT_TIMEOUT || ag->wait_spent == limit)
            return why;
        publish_waits(ag, g, peer);
    }
}

/*
 * One deadline for the words of many peers, and half of one more for who is followed: what is left of both, in the
 * agent. Only what this rank has waited counts, not time in which it was stopped: it would mask at once whoever has not
 * come meanwhile.
 */
KFN void set_wait_left(struct agent *ag, uint64_t ns)
{
    ag_sync(ag); /* all lanes have read it */
    if (ag_leader(ag))
        ag->wait_left = ns;
    ag_sync(ag);
}

/* What the last wait_aloud() took. */
KFN void pay_wait(struct agent *ag)
{
    const uint64_t left = ag->wait_left, spent = ag->wait_spent;

    set_wait_left(ag, left > spent ? left - spent : 0);
}

enum {
    LOOKS = 8,         /* in a slice: agents that follow others at the same time overwrite each other's questions */
    FOLLOW_SLICES = 8, /* of a deadline are left when a wait begins to follow */
    SILENT_SLICES = 8, /* a rank that says nothing for so long does not wait: a busy machine makes ranks late */
    SILENT_MASKED = 3, /* ... where others go on without it, and those behind it have the same deadline */
    GRACE_SLICES = 2 /* after the deadline: a rank may still wait in the creation of the group, or in a recovery, where
                        * it says nothing, and be about to report who keeps it */
};

KFN uint64_t follow_ns(const struct group_dev *g)
{
    return FOLLOW_SLICES * wait_slice(g);
}

/* What this rank waits for, and goes on saying so while it follows. word NULL: nothing that can come. */
struct awaited {
    int peer;
    const uint64_t *word;
    uint64_t target;
};

/* Where following has come to. */
struct trail {
    int at;            /* this rank */
    int looks;         /* at it, since it came here or since `at` last said that it waits */
    int known;         /* `word` is what `at` said first, or last */
    int taken;         /* `at` is elsewhere: the own proxy has taken questions since it was first asked */
    int missed;        /* ... and `at` has not answered within the last slice */
    int back;          /* `at` said last that it waits for this rank */
    uint64_t word;     /* WAITS_WORD, or a beat that differs as that of the word does */
    uint64_t replies;  /* `at` is elsewhere: how many it had given before */
    uint64_t answers;  /* ... and when the last slice began */
    uint64_t question; /* ... and the last question to it; 0: none yet */
};

KFN const struct ring_dev *question_ring(const struct group_dev *g, int rank)
{
    return &g->rings[ROUTE_RING(g->routes[rank], COUNTER(SIG_ABORT, 0), g->nrings)];
}

/* Returns the word by which the proxy says that it has taken the question. */
KFN_STEP uint64_t put_question(struct agent *ag, const struct ring_dev *ring, int rank)
{
    const uint64_t word = WAITS_WORD(WAITS_BEAT(ag_look(ring->ask)) + 1, rank);

    if (ag_leader(ag))
        ag_store_release(ring->ask, word); /* pairs with take_ask() */
    ag_sync(ag);
    ag_ring(ag, ring->bell);
    return word;
}

KFN_STEP void trail_move(struct trail *t, const struct group_dev *g, int rank)
{
    const int local = g->heap[rank] != NULL;

    t->at = rank;
    t->looks = 0;
    t->known = local;
    t->taken = 0;
    t->missed = 0;
    t->back = 0;
    t->word = local ? ag_look(&waiting_control(g, rank)->waits) : 0;
    t->replies = t->answers = local ? 0 : WAITS_BEAT(ag_look(reply_word(g, rank)));
    t->question = 0;
}

/* A rank that answers after a slice without an answer was stopped meanwhile: it could not say that it waits. So its
 * silence begins again: that of a process that is stopped and that of one that runs do not add up. */
KFN_STEP void trail_woke(struct trail *t, uint64_t answers)
{
    if (t->missed && answers != t->answers)
        t->looks = t->missed = 0;
    if (t->looks % LOOKS)
        return;
    t->missed = t->looks && t->taken && answers == t->answers;
    t->answers = answers;
}

/* What the proxy of t->at says about its word (on_alarm() of group/net.c), 0 if it has not answered yet. It is asked
 * once in a slice, and again when the own proxy has taken the question of another agent in the place of this one. */
KFN_STEP uint64_t trail_ask(struct agent *ag, const struct group_dev *g, struct trail *t)
{
    const struct ring_dev *ring = question_ring(g, t->at);
    const uint64_t reply = ag_look(reply_word(g, t->at)), asked = ag_look(ring->asked);
    const int taken = t->question && (int64_t)(WAITS_BEAT(asked) - WAITS_BEAT(t->question)) >= 0;

    t->taken |= taken;
    trail_woke(t, WAITS_BEAT(reply));
    if (t->looks % LOOKS == 0 || (taken && asked != t->question))
        t->question = put_question(ag, ring, t->at);
    if (WAITS_BEAT(reply) == t->replies || has_gone(g, t->at))
        return 0;
    return WAITS_WORD(ALARM_CAUSE((uint32_t)reply), ALARM_CULPRIT((uint32_t)reply));
}

/* Looks at t->at, and goes on to the rank for which that waits; from one that has gone, to the `first` again. Agents
 * of a rank may wait for different ranks: one that waits for this rank, which waits itself, may have others. */
KFN_STEP void trail_look(struct agent *ag, const struct group_dev *g, struct trail *t, int first)
{
    const uint64_t word = g->heap[t->at] ? ag_look(&waiting_control(g, t->at)->waits) : trail_ask(ag, g, t);
    const int waits = INJECT_BUG(BUG_NO_FOLLOW, 0, 1) && t->known && word && WAITS_BEAT(word) != WAITS_BEAT(t->word);
    const int whom = WAITS_PEER(word); /* from another rank's memory, or from the network */

    t->looks++;
    if (word) {
        t->known = 1;
        t->word = word;
    }
    if (waits) {
        t->looks = 0;
        t->back = whom == g->rank;
    }
    if (t->at != first && has_gone(g, t->at))
        trail_move(t, g, first);
    else if (waits && whom >= 0 && whom < g->nranks && whom != g->rank && whom != t->at && !has_gone(g, whom))
        trail_move(t, g, whom);
}

/* The culprit; -1: this rank, whose own proxy does not take its questions. */
KFN int trail_end(const struct group_dev *g, const struct trail *t)
{
    return !g->heap[t->at] && !t->taken && t->looks >= SILENT_MASKED * LOOKS ? -1 : t->at;
}

/* Waits on, and finds who keeps the peer from answering: most often the peer itself. It ends when the deadline and a
 * little more is over, and the last rank that was come to has been silent long enough; or what is left for that is used
 * up. With `masks` some of it is left for other peers. */
KFN_STEP enum wait_result follow(struct agent *ag, const struct group_dev *g, struct awaited own, int masks,
                                 int *culprit)
{
    const uint64_t half = g->timeout_ns / 2, asks = ag->wait_left < half ? ag->wait_left : half;
    const uint64_t least = masks && asks > half / 2 ? asks - half / 2 : 0;
    const uint64_t named = half > GRACE_SLICES * wait_slice(g) ? half - GRACE_SLICES * wait_slice(g) : 0;
    const int silent = LOOKS * (masks ? SILENT_MASKED : SILENT_SLICES);
    enum wait_result why;
    struct trail t;

    trail_move(&t, g, own.peer);
    publish_waits(ag, g, own.peer);
    for (int n = 1;; n++) {
        /* Nobody answers for this rank: a pause, which the abort word ends. */
        why = wait_aloud(ag, g, own.word ? own.word : reply_word(g, g->rank), own.word ? own.target : 1, own.peer,
                         wait_slice(g) / LOOKS);
        pay_wait(ag);
        if (why != WAIT_TIMEOUT)
            break;
        if (n % LOOKS == 0)
            publish_waits(ag, g, own.peer);
        trail_look(ag, g, &t, own.peer);
        if ((ag->wait_left <= named && t.looks >= silent) || (ag->wait_left <= half && ag->wait_left <= least))
            break;
    }
    /* In a circle nobody is silent: one was left out, and could not be told. With masks that is between two ranks. */
    *culprit = why == WAIT_LOST || (masks && t.back && t.looks < silent) ? own.peer : trail_end(g, &t);
    return why;
}

#endif
