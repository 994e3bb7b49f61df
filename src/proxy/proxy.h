/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Proxies: CPU threads that take commands out of the rings of one rank, post them to the network, and count what
 * arrives. Commands are validated here and nowhere else.
 */
#ifndef EPX_PROXY_PROXY_H
#define EPX_PROXY_PROXY_H

#include "kernel/command.h"
#include "net/net.h"

struct proxy_group; /* all proxy threads of one rank in one group */

/* Which traffic a put belongs to, by the kind of its counter. Each has its own limit of messages. */
enum proxy_flow { PROXY_LOW_LATENCY, PROXY_NORMAL, PROXY_FLOWS };

/* Fixed limits beside the adaptive window; 0 = what the environment sets (EPX_IB_MAX_INFLIGHT...), else none. */
struct proxy_limits {
    uint64_t max_bytes;                 /* in flight from this rank, to all peers together */
    uint32_t max_messages[PROXY_FLOWS]; /* in flight from this rank on its card, to all peers */
};

struct cpu_env;
struct watch_window; /* util/watch.h */

struct proxy_options {
    int rank, nranks;
    int threads;    /* 0 = EPX_PROXY_THREADS, else 1; the same on all ranks */
    int ring_slots; /* power of two */
    int pin;        /* 1: pin thread i, as EPX_PROXY_PIN=1 does */
    int manual;     /* 1: no threads; the caller runs proxy_step */
    int timeout_ms;
    int open_ms; /* for opening and registering together, and for connecting; 0 = timeout_ms */
    const struct net_ops *net;
    const char *provider;
    void *world;            /* struct net_options */
    const uint8_t *key;     /* of the group, 32 bytes, for the network; NULL = none */
    const uint8_t *remote;  /* [nranks]: 1 = reached through the network */
    char pci[32];           /* of the GPU, for the choice of a card near it; "" = none */
    const uint32_t *routes; /* [nranks] or NULL: ROUTE_RING; NULL = the sum of both ranks' numbers */
    const uint8_t *absent;  /* [nranks] or NULL: 1 = lost already: not connected, and its commands are dropped */
    void *heap;             /* registered with every endpoint */
    uint64_t heap_bytes;
    int memory_kind, memory_index, dmabuf; /* of the heap, as in struct net_memory; memory_kind 0 = the host's */
    int device_kind;
    int flush;             /* 1: arrivals are counted after device->ops->flush_arrivals (device/arrivals.h) */
    struct device *device; /* whose kernels push into the rings, which are in memory that it reaches; NULL = the CPU */
    uint64_t *counters;    /* arrivals: [kinds][slots][nranks], in host memory, advanced by the proxies */
    uint64_t *sent;        /* [nranks] or NULL: commands to each peer that have completed or were dropped; likewise */
    uint64_t *aggregates;  /* [threads][kinds][slots] or NULL: of all peers of a thread, the least counter or the sum */
    uint64_t *sent_all;    /* [threads] with aggregates: the sum of `sent` of its peers */
    const uint8_t *sums;   /* [kinds] with aggregates: 1 = the sum */
    int kinds, slots;
    const uint8_t *flows;         /* [kinds]: enum proxy_flow of each; NULL = all PROXY_LOW_LATENCY */
    const uint8_t *missable;      /* [kinds], with on_given_up: 1 = others go on without a rank that misses such puts */
    int alarm_kind;               /* with on_alarm: this kind has no counters, but is a question (kernel/command.h) */
    const uint8_t *relays;        /* [nranks] or NULL: 1 = told of aborts that this rank has heard of from others */
    int grace_ms;                 /* a lost peer is reported so much later (alarm.c) */
    struct watch_window *windows; /* [nranks] or NULL: what epx top sees */
    struct doorbell *bell;        /* rung after counters or a ring's tail advance: the rank's CPU agents sleep there */
    struct proxy_limits limits;
    const struct cpu_env
        *env;            /* clock, and how agents behind `bell` wake; NULL = threads. Simulations have their own */
    uint64_t ring_start; /* first value of the ring counters: 0, except in tests of their wrap-around */
    /* An error on the group: called once per distinct fault, from a proxy thread. status is an epx_status. */
    void (*on_error)(void *context, int status, int peer, int64_t expected, int64_t seen, const char *text);
    /* In the place of on_error: the network lost `peer` because nothing came of it until the deadline (ETIMEDOUT), and
     * a put to it was given up that is not missable. NULL = on_error. It may follow on_error, with a later put. */
    void (*on_given_up)(void *context, int peer, int error, const char *text);
    /* An alarm came from `rank`; called from a proxy thread. NULL = no such kind. */
    void (*on_alarm)(void *context, int rank, uint32_t alarm);
    /* `rank` asks whom this rank waits for: the alarm to answer with. Likewise; needs on_alarm. */
    uint32_t (*on_ask)(void *context, int rank);
    /* Something came from `rank`: whether this rank goes on without it, and it should be told so. Likewise, or NULL;
     * needs on_alarm. */
    int (*goes_on_without)(void *context, int rank);
    /* The ring has been waiting for room in the queue of `peer` for another slice of a deadline. Likewise, or NULL. */
    void (*on_blocked)(void *context, int peer);
    void *context;
};

struct proxy_stats {
    uint64_t commands, puts, signals; /* taken from rings; writes posted (merged); of these, without bytes */
    uint64_t bytes, arrivals;         /* posted; counted immediates */
    uint64_t window_waits;            /* times that a peer's puts began to wait for its window or for the network */
    uint64_t sleeps, wakes;           /* sleeps begun; those that a producer or the network ended */
    uint64_t refused;                 /* bad commands and bad immediates */
    uint64_t dropped;                 /* commands to peers that are lost */
    uint64_t stuck;                   /* threads that were blocked in the network when last checked */
};

/* What ranks exchange to connect: one per thread, through the bootstrap. */
struct proxy_address {
    struct net_address address;
    struct net_region region;
};

/*
 * The thread of an endpoint makes every call of the network's library, and the caller waits for it with a deadline.
 * EPX_ERR_TIMEOUT: a thread has not returned from the library; the message names the call. After that only
 * proxy_stats_read and proxy_close may be called.
 */
epx_status proxy_open(const struct proxy_options *options, struct proxy_group **proxies);
/* addresses[threads] of this rank. */
epx_status proxy_addresses(struct proxy_group *proxies, struct proxy_address *addresses);
/* addresses[nranks][threads]. The threads run their loops from now on. */
epx_status proxy_connect(struct proxy_group *proxies, const struct proxy_address *addresses);
/* EPX_PROXY_THREADS, or 1. */
int proxy_threads_asked(void);
/* Rings of this rank, one per thread; options.routes says who uses which. */
int proxy_ring_count(const struct proxy_group *proxies);
const struct ring_dev *proxy_ring(const struct proxy_group *proxies, int index);
/* Simulation: one iteration of thread `index`; non-zero if it did something. */
int proxy_step(struct proxy_group *proxies, int index);
/* Of one thread; index -1: of all together. */
void proxy_ring_stats_read(const struct proxy_group *proxies, int index, struct proxy_stats *stats);
void proxy_stats_read(const struct proxy_group *proxies, struct proxy_stats *stats);
/* Waits until all pushed commands are posted and completed. EPX_ERR_TIMEOUT at the deadline; the message names the
 * peer. In a simulation: one iteration of each thread, and EPX_ERR_NOT_READY until nothing is left. */
epx_status proxy_quiet(struct proxy_group *proxies);
/* The same, and all peers are told that this rank ends its group in order: from then on they do not miss it. */
epx_status proxy_leave(struct proxy_group *proxies);
/* Sends an alarm to all peers, or to the relays alone: once, the first one. From any thread; does not wait. */
void proxy_alarm(struct proxy_group *proxies, uint32_t alarm, int to_all);
/* This rank has given up: drops what is not posted, aborts excepted, and waits until the network reads no memory of
 * this rank any more, at most half of timeout_ms. 0: a thread has not come back from the network by then. */
int proxy_stop(struct proxy_group *proxies);
/*
 * Threads have half of timeout_ms, and at least PROXY_CLOSE_MS, to leave their loops and to close their endpoints.
 * EPX_OK: all is freed. EPX_ERR_TIMEOUT: a thread has not returned from the library. It is abandoned, and may return at
 * any time: `proxies` and everything that `options` named must stay allocated until the process ends.
 */
enum { PROXY_CLOSE_MS = 2000 };
epx_status proxy_close(struct proxy_group *proxies);
/* Does every thread begin another iteration within `ms`? If not, `text` names the blocked thread and its call. */
int proxy_responsive(struct proxy_group *proxies, int ms, char *text, size_t bytes);
/* Runs fn(arg), which calls a network's library, on a thread of its own. EPX_ERR_TIMEOUT with *left = 1: fn has not
 * returned within `ms`, and what it uses must stay allocated. `what` begins the message. */
epx_status proxy_guard(const char *what, int ms, epx_status (*fn)(void *arg), void *arg, int *left);

/* Runs the proxies in place of threads: runtime()->proxies (util/runtime.h). */
struct proxy_driver {
    epx_status (*start)(struct proxy_group *proxies, int index); /* from now on, call proxy_step repeatedly */
    void (*wake)(struct proxy_group *proxies, int index);        /* call proxy_step soon */
    void (*stop)(struct proxy_group *proxies, int index);        /* returns when no proxy_step will follow */
};

#endif
