/* SPDX-License-Identifier: Apache-2.0 */
/* One rank of a case of the network suite: what cases are written with. */
#ifndef EPX_TESTS_LIB_NET_SUITE_RANK_H
#define EPX_TESTS_LIB_NET_SUITE_RANK_H

#include <stdatomic.h>
#include <stddef.h>

#include "tests/lib/net_suite.h"

enum {
    SUITE_RANKS = 4,
    SUITE_HEAP = 8 << 20,
    SUITE_GUARD = 4096,    /* bytes beyond both ends of the heap that nobody may touch */
    SUITE_PUTS = 1 << 16,  /* most puts from one rank to another in a case */
    SUITE_LIMIT_MS = 60000 /* of every wait, times suite_time_scale(); a case that works takes far less */
};

/* EPX_TEST_TIME_SCALE, 1 by default: how many times slower than usual this machine may be, an emulated one say. */
int suite_time_scale(void);
/* How many of n where much is done: a quarter on such a machine. */
uint32_t suite_share(uint32_t n);

/* In memory that all ranks share. */
struct suite_shared {
    atomic_int arrived, round; /* barrier */
    atomic_int stop;           /* a rank failed: the others give up */
    atomic_int gone[SUITE_RANKS];
    atomic_int pids[SUITE_RANKS];
    atomic_int word; /* for cases */
    int outcome;     /* of the first that failed or skipped */
    char text[512];
    atomic_int reported;
    struct net_address addresses[SUITE_RANKS];
    struct net_region regions[SUITE_RANKS];
};

struct suite_rank {
    const struct net_suite *suite;
    struct suite_shared *shared;
    void *world;
    int rank, nranks;
    int timeout_ms; /* given to the network */
    int no_key;     /* likewise: arrivals are not checked */
    int strangers;  /* arrivals may be refused */
    struct net *net;
    uint8_t *memory, *heap;
    uint32_t posted[SUITE_RANKS], completed[SUITE_RANKS]; /* puts to a peer */
    uint32_t arrived[SUITE_RANKS];                        /* immediates of a peer */
    int lost[SUITE_RANKS];                                /* errno of NET_FAILED */
    uint8_t *seen[SUITE_RANKS];                           /* [SUITE_PUTS]: this immediate of that peer came */
    /* What must be visible when immediate `index` of `peer` arrives; NULL: nothing is checked. */
    int (*check)(struct suite_rank *self, int peer, uint32_t index);
    uint64_t again; /* how often put said -EAGAIN */
    int idle;       /* polls without an event, in a row */
};

struct suite_case {
    const char *name;
    int nranks;
    int (*body)(struct suite_rank *self);
    int needs_kill;
    int timeout_ms; /* of the network; 0 = SUITE_LIMIT_MS */
    int loses;      /* it ends by the loss of a peer; timeout_ms counts where that is found by the deadline */
};
extern const struct suite_case suite_cases[];
extern const int suite_case_count;

/* Runs a case that is not one of those: what only one network can be asked. */
enum net_suite_outcome suite_run_case(const struct net_suite *suite, const struct suite_case *what, char *text,
                                      size_t bytes);

/* Both return -1, so that a body says: return suite_fail(self, "..."). Only the first is kept. */
int suite_fail(struct suite_rank *self, const char *format, ...) __attribute__((format(printf, 2, 3)));
int suite_skip(struct suite_rank *self, const char *format, ...) __attribute__((format(printf, 2, 3)));
#define SUITE_CHECK(self, condition)                                                            \
    do {                                                                                        \
        if (!(condition))                                                                       \
            return suite_fail(self, "%s:%d: %s does not hold", __func__, __LINE__, #condition); \
    } while (0)
#define SUITE_TRY(call) \
    do {                \
        if (call)       \
            return -1;  \
    } while (0)

/* Opens the endpoint, exchanges addresses and regions, connects to all others. */
int suite_open(struct suite_rank *self);
/* The parts of it. */
int suite_open_alone(struct suite_rank *self);
int suite_publish(struct suite_rank *self);
int suite_connect(struct suite_rank *self);
void suite_close(struct suite_rank *self);

/* Polls once, counts events, checks them. Lets others run. */
int suite_step(struct suite_rank *self);
/* Waits for all ranks that live; polls meanwhile. */
int suite_barrier(struct suite_rank *self);
/* Immediates are numbered per pair by the suite. -EAGAIN is waited out; 0 or -1 after suite_fail. */
int suite_put(struct suite_rank *self, int peer, uint64_t source, uint64_t target, uint32_t bytes, int more);
/* The same, once: 0, or what put said. */
int suite_try_put(struct suite_rank *self, int peer, uint64_t source, uint64_t target, uint32_t bytes, int more);
int suite_wait_arrived(struct suite_rank *self, int peer, uint32_t count);
/* Until every put to living peers has completed. */
int suite_wait_completed(struct suite_rank *self);

/* A pattern that differs by source, index and place. */
void suite_fill(uint8_t *at, uint32_t bytes, int source, uint32_t index);
/* Offset of the first byte that is not the pattern's, or -1. */
int64_t suite_differs(const uint8_t *at, uint32_t bytes, int source, uint32_t index);
/* Whether nothing was written outside the heap. */
int suite_guards_hold(const struct suite_rank *self);
/* The end of a case in which all puts complete: they have, and nothing was written outside the heap. */
int suite_finish(struct suite_rank *self);
/* Gives the processor, or the coroutine, to others. */
void suite_yield(struct suite_rank *self);

/* The runner's: switches coroutines; NULL elsewhere. */
extern void (*suite_switch)(void);

#endif
