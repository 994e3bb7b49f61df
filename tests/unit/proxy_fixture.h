/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fixture of the proxy tests: ranks over chaos_net, a network that is driven step by step. Its puts land and
 * complete in any order; it refuses, fails, reports false events and loses peers when a test says so. Each test
 * includes this file once.
 */
#ifndef EPX_TESTS_UNIT_PROXY_FIXTURE_H
#define EPX_TESTS_UNIT_PROXY_FIXTURE_H

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "device/cpu/prims.h"
#include "kernel/ring.h"
#include "proxy/internal.h"
#include "util/clock.h"
#include "tests/lib/unit.h"

#define MS 1000000ull
enum { RANKS = 5, THREADS_MOST = 64, KINDS = 4, SLOTS = 3, HEAP = 1 << 16, FLYING = 4096 };

/* ---- The chaos network -------------------------------------------------------------------------------------- */

struct flight {
    struct net_put put;
    int from, index;
};

struct chaos_world;
struct chaos_net {
    struct net base;
    struct chaos_world *world;
    int rank, index;
    struct net_event inbox[FLYING]; /* what its next polls find */
    int events;
};

struct chaos_world {
    struct chaos_net *ends[RANKS][THREADS_MOST];
    char *heaps[RANKS];
    uint64_t heap_bytes;
    struct flight flying[FLYING]; /* posted, neither landed nor completed */
    int nflying;
    uint32_t random;
    int puts, most_flying;
    uint64_t most_bytes;
    struct net_put last;
    int hold;                 /* 1: nothing lands */
    int in_order;             /* 1: the oldest lands first; else any */
    int refuse[RANKS];        /* puts to this rank get this (an errno value) */
    int room;                 /* puts beyond so many in flight get EAGAIN; 0 = any number */
    int flushes, flush_error; /* times; what flush returns, once */
    int poll_error;
    int descriptor; /* 1 + what wait_fd says; 0 = none */
    uint64_t now_ns;
};

static inline uint32_t draw(struct chaos_world *w, uint32_t n)
{
    w->random = w->random * 1664525u + 1013904223u;
    return (w->random >> 8) % n;
}

static inline epx_status chaos_open(const struct net_options *o, struct net **net)
{
    struct chaos_net *end = calloc(1, sizeof(*end));
    extern const struct net_ops chaos_ops;

    assert_non_null(end);
    end->base.ops = &chaos_ops;
    end->world = o->world;
    end->rank = o->rank;
    end->index = o->index;
    end->world->ends[o->rank][o->index] = end;
    *net = &end->base;
    return EPX_OK;
}

static inline epx_status chaos_probe(const char *provider, char *text, size_t bytes)
{
    (void)provider;
    snprintf(text, bytes, "for this test");
    return EPX_OK;
}

static inline unsigned chaos_caps(struct net *net)
{
    (void)net;
    return NET_KNOWN_SENDERS;
}

static inline epx_status chaos_address(struct net *net, struct net_address *address)
{
    (void)net;
    address->version = 1;
    return EPX_OK;
}

static inline epx_status chaos_add_region(struct net *net, const struct net_memory *memory, struct net_region *region)
{
    struct chaos_net *end = (struct chaos_net *)net;

    end->world->heaps[end->rank] = memory->base;
    end->world->heap_bytes = memory->bytes;
    region->bytes = memory->bytes;
    return EPX_OK;
}

static inline epx_status chaos_connect(struct net *net, int peer, const struct net_address *a,
                                       const struct net_region *r)
{
    (void)net;
    (void)r;
    assert_in_range(peer, 0, RANKS - 1);
    assert_int_equal(a->version, 1);
    return EPX_OK;
}

static inline int chaos_put(struct net *net, const struct net_put *put)
{
    struct chaos_net *end = (struct chaos_net *)net;
    struct chaos_world *w = end->world;
    uint64_t bytes = put->bytes;
    int i;

    if (w->refuse[put->peer])
        return -w->refuse[put->peer];
    if ((w->room && w->nflying >= w->room) || w->nflying == FLYING)
        return -EAGAIN;
    assert_true(put->source + put->bytes <= w->heap_bytes);
    assert_true(put->target + put->bytes <= w->heap_bytes);
    w->flying[w->nflying++] = (struct flight){.put = *put, .from = end->rank, .index = end->index};
    w->puts++;
    w->last = *put;
    for (i = 0; i < w->nflying - 1; i++)
        bytes += w->flying[i].put.bytes;
    w->most_flying = w->nflying > w->most_flying ? w->nflying : w->most_flying;
    w->most_bytes = bytes > w->most_bytes ? bytes : w->most_bytes;
    return 0;
}

static inline void tell(struct chaos_net *end, struct net_event event)
{
    assert_true(end->events < FLYING);
    end->inbox[end->events++] = event;
}

/* One put lands: bytes, immediate, completion. */
static inline void land(struct chaos_world *w)
{
    const int which = w->in_order ? 0 : (int)draw(w, (uint32_t)w->nflying);
    const struct flight f = w->flying[which];
    struct chaos_net *to = w->ends[f.put.peer][f.index];

    if (w->in_order)
        memmove(w->flying, w->flying + 1, (size_t)--w->nflying * sizeof(f));
    else
        w->flying[which] = w->flying[--w->nflying];
    if (to) {
        memcpy(w->heaps[f.put.peer] + f.put.target, w->heaps[f.from] + f.put.source, f.put.bytes);
        tell(to, (struct net_event){.kind = NET_ARRIVED, .peer = -1, .immediate = f.put.immediate});
    }
    tell(w->ends[f.from][f.index],
         (struct net_event){.kind = NET_SENT, .peer = f.put.peer, .count = 1, .cookie = f.put.cookie});
}

static inline int chaos_poll(struct net *net, struct net_event *events, int max)
{
    struct chaos_net *end = (struct chaos_net *)net;
    struct chaos_world *w = end->world;
    int n = 0, i;

    if (w->poll_error)
        return -w->poll_error;
    for (i = 0; i < 8 && w->nflying > 0 && !w->hold; i++)
        land(w);
    while (n < max && end->events > 0) {
        const int which = w->in_order ? 0 : (int)draw(w, (uint32_t)end->events);

        events[n++] = end->inbox[which];
        memmove(&end->inbox[which], &end->inbox[which + 1], (size_t)(--end->events - which) * sizeof(struct net_event));
    }
    return n;
}

static inline int chaos_flush(struct net *net)
{
    struct chaos_world *w = ((struct chaos_net *)net)->world;
    const int error = w->flush_error;

    w->flush_error = 0;
    w->flushes++;
    return -error;
}

static inline int chaos_wait_fd(struct net *net)
{
    return ((struct chaos_net *)net)->world->descriptor - 1;
}

static inline int chaos_arm(struct net *net)
{
    (void)net;
    return 0;
}

static inline void chaos_close(struct net *net)
{
    struct chaos_net *end = (struct chaos_net *)net;

    end->world->ends[end->rank][end->index] = NULL;
    free(end);
}

const struct net_ops chaos_ops = {.name = "chaos_net",
                                  .probe = chaos_probe,
                                  .open = chaos_open,
                                  .caps = chaos_caps,
                                  .address = chaos_address,
                                  .add_region = chaos_add_region,
                                  .connect = chaos_connect,
                                  .put = chaos_put,
                                  .flush = chaos_flush,
                                  .poll = chaos_poll,
                                  .wait_fd = chaos_wait_fd,
                                  .arm = chaos_arm,
                                  .close = chaos_close};

/* ---- A world of ranks --------------------------------------------------------------------------------------- */

struct rank {
    struct proxy_group *proxies;
    char *heap;
    uint64_t counters[KINDS * SLOTS * RANKS], sent[RANKS];
    struct doorbell bell;
    struct agent agent;
    int errors, status, peer; /* on_error: how often, and the last one */
    int64_t expected, seen;
    char text[200], first[200]; /* the last one, and the first */
};

struct proxy_fixture {
    struct chaos_world chaos;
    struct cpu_env env;
    struct rank ranks[RANKS];
    struct proxy_options options; /* changed by a test before proxy_fixture_open */
    int threads, opened;
    int spread; /* all pairs are those of ranks and their relays */
};

static inline void on_error(void *context, int status, int peer, int64_t expected, int64_t seen, const char *text)
{
    struct rank *rank = context;

    if (!rank->errors++)
        snprintf(rank->first, sizeof(rank->first), "%s", text);
    rank->status = status;
    rank->peer = peer;
    rank->expected = expected;
    rank->seen = seen;
    snprintf(rank->text, sizeof(rank->text), "%s", text);
}

static inline uint64_t proxy_fixture_now(void *self)
{
    return ((struct proxy_fixture *)self)->chaos.now_ns;
}

static inline void proxy_fixture_wake(void *self, struct doorbell *bell)
{
    (void)self;
    (void)bell;
}

static inline int setup(void **state)
{
    struct proxy_fixture *s = calloc(1, sizeof(*s));

    if (!s)
        return -1;
    s->chaos.random = 1;
    s->chaos.now_ns = 1000;
    s->env = (struct cpu_env){.now_ns = proxy_fixture_now, .wake = proxy_fixture_wake, .self = s};
    s->options = (struct proxy_options){.nranks = RANKS,
                                        .threads = 1,
                                        .ring_slots = 4096,
                                        .timeout_ms = 200,
                                        .net = &chaos_ops,
                                        .world = &s->chaos,
                                        .heap_bytes = HEAP,
                                        .device_kind = EPX_DEVICE_CPU,
                                        .kinds = KINDS,
                                        .slots = SLOTS,
                                        .env = &s->env};
    *state = s;
    return 0;
}

/* Ranks 0 and 1 are one node, each of the others is one by itself. */
static inline int is_remote(int a, int b)
{
    return a != b && !(a < 2 && b < 2);
}

static inline void open_rank(struct proxy_fixture *s, int r, int manual, struct proxy_address *addresses)
{
    struct rank *rank = &s->ranks[r];
    struct proxy_options o = s->options;
    uint8_t remote[RANKS];
    uint32_t routes[RANKS];
    int p;

    for (p = 0; p < RANKS; p++) {
        remote[p] = (uint8_t)is_remote(r, p);
        routes[p] = (uint32_t)(r + p) | ROUTE_SPREAD;
    }
    o.routes = s->spread ? routes : NULL;
    rank->heap = malloc(HEAP);
    assert_non_null(rank->heap);
    memset(rank->heap, 0, HEAP);
    o.rank = r;
    o.manual = manual;
    o.remote = remote;
    o.heap = rank->heap;
    o.counters = rank->counters;
    o.sent = rank->sent;
    o.bell = &rank->bell;
    o.on_error = on_error;
    o.context = rank;
    assert_int_equal(proxy_open(&o, &rank->proxies), EPX_OK);
    assert_int_equal(proxy_addresses(rank->proxies, &addresses[r * o.threads]), EPX_OK);
    rank->agent = (struct agent){.count = 1, .env = &cpu_thread_env, .bell = &rank->bell, .timeout_ns = 60000 * MS};
}

static inline void proxy_fixture_open(struct proxy_fixture *s, int ranks, int manual)
{
    struct proxy_address addresses[RANKS * THREADS_MOST];
    int r;

    s->threads = s->options.threads;
    memset(addresses, 0, sizeof(addresses));
    for (r = 0; r < ranks; r++)
        open_rank(s, r, manual, addresses);
    for (; r < RANKS * s->threads;
         r++) /* ranks that are not there: their addresses are, for networks that do not care */
        if (r >= ranks * s->threads)
            addresses[r] = addresses[0];
    for (r = 0; r < ranks; r++)
        assert_int_equal(proxy_connect(s->ranks[r].proxies, addresses), EPX_OK);
    s->opened = ranks;
}

static inline int teardown(void **state)
{
    struct proxy_fixture *s = *state;
    int r;

    for (r = 0; r < RANKS; r++) {
        assert_int_equal(proxy_close(s->ranks[r].proxies), EPX_OK);
        free(s->ranks[r].heap);
    }
    free(s);
    return 0;
}

static inline struct proxy_fixture *open_chaos(void **state)
{
    struct proxy_fixture *s = *state;

    proxy_fixture_open(s, RANKS, 1);
    return s;
}

/* Where rank 2 takes nothing until chaos.refuse[2] is 0. */
static inline struct proxy_fixture *open_refusing(void **state)
{
    struct proxy_fixture *s = open_chaos(state);

    s->chaos.refuse[2] = EAGAIN;
    return s;
}

static inline void push_raw(struct proxy_fixture *s, int from, int ring, struct command c)
{
    assert_int_equal(ag_push(&s->ranks[from].agent, proxy_ring(s->ranks[from].proxies, ring), &c, 1), WAIT_OK);
}

static inline void push(struct proxy_fixture *s, int from, int to, uint32_t counter, uint64_t source, uint64_t target,
                        uint32_t bytes)
{
    push_raw(s, from, (from + to) % s->threads, command_pack((uint32_t)to, counter, source, target, bytes));
}

static inline void step(struct proxy_fixture *s, int rank)
{
    int i;

    for (i = 0; i < s->threads; i++)
        proxy_step(s->ranks[rank].proxies, i);
    s->chaos.now_ns += 1000;
}

static inline void steps(struct proxy_fixture *s, int n)
{
    int r;

    while (n-- > 0)
        for (r = 0; r < s->opened; r++)
            step(s, r);
}

static inline uint64_t counter_at(const struct proxy_fixture *s, int owner, uint32_t counter, int from)
{
    return s->ranks[owner].counters[(COUNTER_KIND(counter) * SLOTS + COUNTER_SLOT(counter)) * RANKS + (uint32_t)from];
}

/* Rank 0 sends rank 2 its first message, which arrives. */
static inline void first_arrives(struct proxy_fixture *s, uint32_t bytes)
{
    push(s, 0, 2, 0, 0, 0, bytes);
    steps(s, 20);
    assert_int_equal(counter_at(s, 2, 0, 0), 1);
}

static inline struct proxy_stats stats_of(const struct proxy_fixture *s, int rank)
{
    struct proxy_stats stats;

    proxy_stats_read(s->ranks[rank].proxies, &stats);
    return stats;
}

static inline void expect_nothing_wrong(const struct proxy_fixture *s)
{
    int r;

    for (r = 0; r < s->opened; r++) {
        if (s->ranks[r].errors)
            fail_msg("rank %d: %s", r, s->ranks[r].text);
        assert_int_equal(stats_of(s, r).refused, 0);
        assert_int_equal(stats_of(s, r).dropped, 0);
    }
}

/* Puts that do not touch each other. */
static inline void push_apart(struct proxy_fixture *s, int to, uint32_t counter, int n, uint32_t bytes)
{
    int i;

    for (i = 0; i < n; i++)
        push(s, 0, to, counter, 0, (uint64_t)i * 64, bytes);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

#endif
