/* SPDX-License-Identifier: Apache-2.0 */
/* Shared by the files of the simulated network: sim.c is the table that proxies call, world.c handles events. */
#ifndef EPX_SIM_NET_WORLD_H
#define EPX_SIM_NET_WORLD_H

#include "sim/net.h"

enum { SIM_NET_PIECES = 4 };

/* Between its posting and its completion. */
struct flight {
    struct flight *next; /* of the same sender and peer, in the order of posting */
    uint32_t from, to;   /* endpoints */
    struct net_put put;
    uint64_t held_until; /* 0 = it was not held */
    int completed;
};

/* What an endpoint knows of a peer. */
struct sim_peer {
    uint32_t endpoint; /* 0 = not connected */
    uint64_t region_bytes;
    uint64_t last_arrival; /* ordered worlds */
    uint64_t moved;        /* when a put to it was last completed, or posted behind none */
    int lost;
    struct flight *first, *last;
};

struct queued_event {
    struct net_event event;
    struct queued_event *next;
};

struct sim_endpoint {
    struct net base;
    struct sim_net *world;
    uint32_t id;
    int rank, index, nranks;
    int process; /* whose process it is: struct sim_net_options */
    int in_flight;
    uint64_t send_free, receive_free; /* when the card is */
    uint64_t timeout_ns;
    char *heap;
    uint64_t heap_bytes;
    struct sim_peer *peers;
    struct queued_event *head, *tail;
};

enum sim_event_kind { PUT_ARRIVES, PIECE_LANDS, PUT_LANDS, PUT_COMPLETES, PUT_FAILS, PEER_LOST };

struct sim_event {
    uint64_t at, number; /* the number decides between events of one time */
    enum sim_event_kind kind;
    uint32_t endpoint; /* that the event belongs to */
    int peer, error;
    uint32_t offset, bytes;
    struct flight *flight;
};

struct sim_net {
    struct sim_net_options o;
    uint64_t rng, now, numbers;
    struct sim_event *events; /* a heap by (at, number) */
    int nevents, events_room;
    struct sim_event *held; /* until the process that they are for runs again, in their order */
    int nheld, held_room;
    struct sim_endpoint **endpoints; /* by id; NULL = closed */
    uint32_t nendpoints, endpoints_room;
    uint8_t *dead; /* [nranks]: by process */
    struct sim_net_totals totals;
};

uint64_t world_now(struct sim_net *w);
uint64_t world_draw(struct sim_net *w, uint64_t n);
/* The new endpoint's id, never 0, or 0 without memory. */
uint32_t world_add(struct sim_net *w, struct sim_endpoint *e);
void world_remove(struct sim_net *w, struct sim_endpoint *e);
/* 0 or -ENOMEM. */
int world_post(struct sim_net *w, struct sim_endpoint *e, const struct net_put *put);
/* The endpoint loses the peers to which nothing has completed until now for its timeout. */
void world_lose_silent(struct sim_net *w, struct sim_endpoint *e);

#endif
