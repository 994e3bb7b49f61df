/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The simulated network: all ranks in one process, one virtual clock, every choice drawn from a seed.
 *
 *   put ---> card of the sender (busy: message cost + bytes / bandwidth) ---> latency + jitter ---> card of the
 *   receiver
 *                 bytes are read and written when they LAND, maybe in pieces at several times; then the immediate
 *   sender <--- completion, some time after that
 *
 * What a process that is stopped gets is an option. A card writes into its memory all the same. Over TCP its own
 * process does that (SIM_NET_SHUTS, SIM_NET_READS): puts to it are neither read nor completed before it runs again.
 *
 * Puts land in any order, unless `ordered` is set. A put that reads its source too late, or lands in a slot that is in
 * use again, corrupts data here as it would on a wire. Not safe with threads.
 */
#ifndef EPX_NET_SIM_SIM_H
#define EPX_NET_SIM_SIM_H

#include "net/net.h"

extern const struct net_ops net_sim_ops; /* runtime_swap() makes it the network of groups */

struct sim_net; /* a world: what net_options.world points to */

/* Instead of the options below: when a put posted now by endpoint `index` of rank `from` reaches the card of rank `to`,
 * and when a put that has reached it is in memory; what posting a put, and polling n events, takes of whoever does
 * it. */
struct sim_net_costs {
    void (*put)(void);
    void (*events)(int n);
    uint64_t (*depart)(int from, int index, int to, const struct net_put *put, uint64_t now_ns);
    uint64_t (*land)(int from, int to, int index, const struct net_put *put, uint64_t now_ns);
};

/* What happens to puts to a process that is stopped, and to its connection when none of them has completed for the
 * timeout of the endpoint (struct net_options): the peer is lost then. */
enum sim_net_stopped {
    SIM_NET_TAKES, /* they land */
    SIM_NET_SHUTS, /* they land when it runs again; the connection of a lost peer is shut first: no more lands there */
    SIM_NET_READS  /* it is not shut: they still land then, unless the endpoint is closed (NET_FAILED with `reads`) */
};

struct sim_net_options {
    uint64_t seed;
    int nranks;
    uint64_t latency_ns, jitter_ns;
    uint64_t message_ns;   /* time that a card needs per message, */
    uint64_t bytes_per_us; /* and for its bytes; 0 = none */
    int depth;             /* puts in flight of one endpoint; more = -EAGAIN */
    int ordered;           /* puts from one endpoint to another land in the order they were posted */
    int torn_percent;      /* of the puts land in several pieces */
    int refuse_percent;    /* of the puts get -EAGAIN although there is room */
    int anonymous;         /* arrivals do not say from whom */
    uint64_t lose_one_in;  /* puts, one is lost: an error at its sender, to whom the peer is lost; 0 = none */
    uint64_t death_ns;     /* after which the peers of a dead rank are told; SIM_NET_NEVER = never */
    enum sim_net_stopped stopped;
    const struct sim_net_costs *costs; /* or NULL */
    uint64_t (*clock)(void *context);  /* NULL = the world has its own, moved by sim_net_advance alone */
    /* Which process opens an endpoint now, of 0..nranks-1; NULL = that of its rank. A process that takes the place of a
     * rank has another number than the one before. */
    int (*process)(void *context);
    /* Does this process not run now? NULL = it does. sim_net_runs() says when it runs again. */
    int (*is_stopped)(void *context, int process);
    /* Endpoint `index` of process `process` has something to poll. May be NULL. */
    void (*notify)(void *context, int process, int index);
    /* Bytes of rank `from` have been written `at` bytes into the heap of rank `to`, or into other memory of it that its
     * network has (split). May be NULL. */
    void (*landed)(void *context, int from, int to, int split, uint64_t at, uint32_t bytes);
    /* The control block of the rank whose other memory this is, or NULL. May be NULL. */
    const struct control *(*control)(void *context, const void *memory);
    void *context;
};

#define SIM_NET_NEVER UINT64_MAX

struct sim_net_totals {
    uint64_t puts, bytes, pieces, lost, refused, hash;
    uint64_t held, silent; /* events that waited for a process to run; peers that were lost because nothing completed */
    uint64_t late_reads;   /* of memory of ranks that had given up (struct control) */
    int late_from, late_to; /* the first: whose memory, and for whom */
};

/* NULL without memory. */
struct sim_net *sim_net_create(const struct sim_net_options *options);
/* After all endpoints are closed; those that are not are left alone. */
void sim_net_destroy(struct sim_net *world);
/* Time of the next event; SIM_NET_NEVER = there is none. */
uint64_t sim_net_next(struct sim_net *world);
/* Handles all events that are due at now_ns. */
void sim_net_advance(struct sim_net *world, uint64_t now_ns);
/* From now on nothing leaves this process, and nothing reaches it. */
void sim_net_kill(struct sim_net *world, int process);
/* This process was stopped, and runs now. */
void sim_net_runs(struct sim_net *world, int process);
void sim_net_totals(const struct sim_net *world, struct sim_net_totals *totals);

#endif
