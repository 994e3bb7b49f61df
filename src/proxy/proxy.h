/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Proxies: CPU threads that take commands out of the rings of one rank, post them to the network, and count what
 * arrives. The one place where a command's words are believed or refused.
 */
#ifndef EPX_PROXY_PROXY_H
#define EPX_PROXY_PROXY_H

#include "kernel/command.h"
#include "net/net.h"

struct proxy_group; /* all proxy threads of one rank in one group */

struct proxy_limits {
    uint64_t max_bytes;    /* in flight per peer; 0 = adaptive only */
    uint32_t max_messages; /* likewise */
};

struct proxy_options {
    int rank, nranks;
    int threads;    /* >= 1 */
    int ring_slots; /* power of two */
    int pin;        /* 1: pin thread i (EPX_PROXY_PIN) */
    int timeout_ms;
    const struct net_ops *net;
    const char *provider;
    void *world;           /* for the sim network */
    const uint8_t *remote; /* [nranks]: 1 = reached through the network */
    void *heap;            /* registered with every endpoint */
    uint64_t heap_bytes;
    int device_kind;
    uint64_t *counters; /* arrivals: [kinds][slots][nranks], in host memory, advanced by the proxies */
    int kinds, slots;
    struct doorbell *bell; /* rung after counters advance: the rank's CPU agents sleep there */
    struct proxy_limits limits;
    /* An error on the group: called once per distinct fault, from a proxy thread. status is an epx_status. */
    void (*on_error)(void *context, int status, int peer, int64_t expected, int64_t seen, const char *text);
    void *context;
};

struct proxy_stats {
    uint64_t commands, puts, signals; /* taken from rings; writes posted (merged); of these, without bytes */
    uint64_t bytes, arrivals;         /* posted; counted immediates */
    uint64_t window_waits, sleeps, wakes;
    uint64_t refused; /* bad commands and bad immediates */
};

/* What ranks exchange to connect: one per thread, through the bootstrap. */
struct proxy_card {
    struct net_address address;
    struct net_region region;
};

epx_status proxy_open(const struct proxy_options *options, struct proxy_group **proxies);
/* cards[threads] of this rank. */
epx_status proxy_cards(struct proxy_group *proxies, struct proxy_card *cards);
/* cards[nranks][threads]; then threads start. With `manual` no thread starts: proxy_step is called instead. */
epx_status proxy_connect(struct proxy_group *proxies, const struct proxy_card *cards, int manual);
/* Rings of this rank, ring_count of them (= threads); the pair (rank, peer) always uses ring (rank + peer) % count. */
int proxy_ring_count(const struct proxy_group *proxies);
const struct ring_dev *proxy_ring(const struct proxy_group *proxies, int index);
/* Simulation: one turn of thread `index`; non-zero if it did something. */
int proxy_step(struct proxy_group *proxies, int index);
void proxy_stats_read(const struct proxy_group *proxies, struct proxy_stats *stats);
/* All posted puts answered, or the deadline: EPX_ERR_TIMEOUT naming the peer. */
epx_status proxy_quiet(struct proxy_group *proxies);
void proxy_close(struct proxy_group *proxies);

#endif
