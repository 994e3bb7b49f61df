/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What things cost: the model under `epx predict`. Kernels, proxies and network run as in any simulation, on clocks of
 * their own (SIM_EARLIEST), and charge what they do to a machine:
 *
 *   agent    launches, barriers, loops, words ---> time of the agent's own clock
 *            rows ---> SMs of its rank | memory of each GPU | links out and in of each GPU      (servers)
 *   proxy    commands, puts, events ---> its own clock
 *   put      bus out | card out | uplink ---> wire ---> uplink | card in | bus in               (servers)
 *            a card begins messages, and sends bytes: two servers, one behind the other
 *
 * A server does one thing after the other at its rate: what is asked of it waits for what was asked before. Whoever
 * moves rows goes on when its own SMs and links are done with them, and waits for the other servers where it must: at
 * the next barrier or signal, which release its stores.
 *
 * Rows of the simulation are small; they are charged as if they had the bytes of the model's rows (struct cost_row).
 * Few agents of the simulation may stand for many of the GPU: each then charges one in so many of its steps in full,
 * so that the agents' time is that of the many.
 */
#ifndef EPX_SIM_COST_H
#define EPX_SIM_COST_H

#include <stddef.h>
#include <stdint.h>

#include "net/net.h"
#include "sim/sched.h"

/* Rates in bytes per microsecond (that is, MB per second), times in nanoseconds. A rate of 0 is no limit. */
struct cost_machine {
    char name[64];
    /* Device. */
    uint64_t ranks_per_gpu, gpus_per_node, sms, warps_per_sm;
    uint64_t sm_rate;     /* what one SM loads and stores */
    uint64_t memory_rate; /* what a GPU's memory loads and stores */
    uint64_t launch_ns;   /* from one kernel of a stream to the next */
    uint64_t barrier_ns;  /* of all agents of a launch */
    uint64_t item_ns;     /* of a row: from its address to its last store, beside the bytes' time */
    uint64_t loop_ns;     /* of 32 lanes that each load and store a word */
    uint64_t route_ns;    /* of counting, or numbering, 32 (token, expert) pairs */
    uint64_t word_ns;     /* one lane reads or changes a word of device memory */
    uint64_t fence_ns;    /* stores become visible to other ranks */
    /* Links between the GPUs of a node. */
    uint64_t link_rate; /* out of, and into, each GPU; 0 = none: ranks share one GPU */
    uint64_t link_ns;   /* until another rank sees a word */
    /* Bus between GPU, host and cards. */
    uint64_t bus_rate, bus_ns;
    /* Proxies. */
    uint64_t proxies; /* threads per rank */
    uint64_t command_ns, put_ns, event_ns;
    /* Cards. */
    uint64_t cards_per_rank, card_rate, message_ns, wire_ns;
    uint64_t ordered; /* 1: puts of one endpoint to another land in their order */
    /* Switch: what all ranks of a node together send to, and receive from, other nodes. */
    uint64_t uplink_rate;
};

/* How a row between ranks is charged: its bytes in the simulation, and in the model. */
struct cost_row {
    uint64_t small, large;
};

struct cost_setup {
    const struct cost_machine *machine;
    int nranks;
    int agents;                          /* of each rank in the simulation */
    uint64_t hidden_small, hidden_large; /* channels of a row */
    struct cost_row dispatch, combine;   /* payload */
    struct cost_row scales;              /* of a dispatched row; 0 = none */
    uint64_t extras;                     /* of a token that travel apart from its row, here: scales and weights */
};

/* What a rank gave to the network and to the links so far, as charged. */
struct cost_traffic {
    uint64_t messages, signals; /* puts; of these, without bytes */
    uint64_t bytes;             /* of the puts */
    uint64_t header_bytes;      /* of these, not rows */
    uint64_t link_bytes;        /* to other GPUs of the node */
    uint64_t commands;          /* that proxies took */
    uint64_t looks;             /* words that agents looked at, for waits */
};

/* 0, or -1 without memory. */
int cost_begin(const struct cost_setup *setup);
void cost_end(void);
/* NULL: no model; the simulation draws. */
const struct cost_setup *cost_model(void);
void cost_traffic(int rank, struct cost_traffic *traffic);
/* For struct sim_options. */
uint64_t cost_wake_ns(enum sim_kind from, int from_rank, enum sim_kind to, int to_rank);
int cost_ready(const void *agent);

/* ---- What agents charge ------------------------------------------------------------------------------------------ */

/* Of one agent. */
struct cost_agent {
    int rank;
    uint32_t items, loops; /* since its last barrier or wait */
    uint64_t drain_ps;     /* when what it moved is where it belongs */
    const uint64_t *word;  /* that it waits for, or NULL */
    const uint64_t *abort_word;
    uint64_t target;
};

/* A launch begins; the agent runs as the current task. */
void cost_begins(struct cost_agent *a, int rank);
/* From one launch to the next. */
void cost_launch(void);
/* Payload of a row: read_bytes from each of nfrom places, write_bytes to each of nto, all as in the simulation. */
void cost_move(struct cost_agent *a, const void *const *from, int nfrom, uint64_t read_bytes, void *const *to, int nto,
               uint64_t write_bytes);
/* Bytes that may be a row, or a table. */
void cost_copy(struct cost_agent *a, const void *from, void *to, uint64_t bytes);
/* Bytes of a row, or of several, as the model has them. */
uint64_t cost_row_bytes(uint64_t bytes);
/* A loop of n steps over `lanes` lanes. */
void cost_loop(struct cost_agent *a, uint64_t n, uint64_t lanes);
/* Tokens that are counted, or numbered, by their experts. */
void cost_route(struct cost_agent *a, uint64_t pairs);
/* Warps of a launch on the machine. */
uint64_t cost_agents(void);
/* The next three are of the running agent. A word is read or changed by one lane; by each of 32. */
void cost_word(const void *word);
void cost_peek(const void *word);
/* What was moved is where it belongs: before a barrier (other = 0), or a signal to other ranks. */
void cost_release(int other);
/* Commands go to a ring. */
void cost_push(void);
/* The launch ends. */
void cost_ends(struct cost_agent *a);

/* ---- What proxies charge ----------------------------------------------------------------------------------------- */

void cost_commands(uint64_t n);
void cost_put(void);
void cost_events(int n);

/* ---- What the network charges ------------------------------------------------------------------------------------ */

/* When the last byte of a put that is posted now reaches the card of `to`; when it is in memory there. */
uint64_t cost_depart(int from, int endpoint, int to, const struct net_put *put, uint64_t now_ns);
uint64_t cost_land(int from, int to, int endpoint, const struct net_put *put, uint64_t now_ns);

#endif
