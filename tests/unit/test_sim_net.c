/* SPDX-License-Identifier: Apache-2.0 */
/* What the simulated network does beyond what every network must do (test_net_sim.c): time, tearing, loss, death. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "sim/net.h"
#include "tests/lib/unit.h"

enum { HEAP = 1 << 16 };

/* Two ranks, one endpoint each, connected. */
struct pair {
    struct sim_net *world;
    struct net *net[2];
    unsigned char heap[2][HEAP];
};

static struct pair *open_pair(struct sim_net_options options)
{
    struct pair *p = calloc(1, sizeof(*p));
    struct net_address address[2];
    struct net_region region[2];

    assert_non_null(p);
    options.nranks = 2;
    options.seed = options.seed ? options.seed : 3;
    options.depth = options.depth ? options.depth : 1000;
    p->world = sim_net_create(&options);
    assert_non_null(p->world);
    for (int r = 0; r < 2; r++) {
        const struct net_options mine = {.rank = r, .nranks = 2, .timeout_ms = 1000, .provider = "", .world = p->world};
        assert_int_equal(net_sim_ops.open(&mine, &p->net[r]), EPX_OK);
        const struct net_memory memory = {.base = p->heap[r], .bytes = HEAP, .kind = EPX_DEVICE_CPU, .dmabuf = -1};
        assert_int_equal(net_sim_ops.add_region(p->net[r], &memory, &region[r]), EPX_OK);
        assert_int_equal(net_sim_ops.address(p->net[r], &address[r]), EPX_OK);
    }
    for (int r = 0; r < 2; r++)
        assert_int_equal(net_sim_ops.connect(p->net[r], 1 - r, &address[1 - r], &region[1 - r]), EPX_OK);
    return p;
}

static void close_pair(struct pair *p)
{
    net_sim_ops.close(p->net[0]);
    net_sim_ops.close(p->net[1]);
    sim_net_destroy(p->world);
    free(p);
}

static int put(struct pair *p, int from, uint64_t at, uint32_t bytes, uint32_t immediate)
{
    const struct net_put put = {
        .peer = 1 - from, .source = at, .target = at, .bytes = bytes, .immediate = immediate, .cookie = immediate};

    return net_sim_ops.put(p->net[from], &put);
}

/* Without bytes; their immediates are 0 to 99. */
static void put_a_hundred(struct pair *p)
{
    for (uint32_t i = 0; i < 100; i++)
        assert_int_equal(put(p, 0, 0, 0, i), 0);
}

/* The next event of a rank of this kind, and when it came. Others are dropped. */
static uint64_t wait_for(struct pair *p, int rank, enum net_event_kind kind, struct net_event *event)
{
    uint64_t now = 0;

    for (;;) {
        while (net_sim_ops.poll(p->net[rank], event, 1) == 1)
            if (event->kind == kind)
                return now;
        now = sim_net_next(p->world);
        assert_true(now != SIM_NET_NEVER);
        sim_net_advance(p->world, now);
    }
}

static void a_put_takes_what_its_card_and_way_take(void **state)
{
    /* 1 us for the message, 4096 bytes at 1024 per us, on both cards; 10 us on the way. */
    struct pair *p = open_pair((struct sim_net_options){.latency_ns = 10000, .message_ns = 1000, .bytes_per_us = 1024});
    struct net_event event;

    (void)state;
    assert_int_equal(put(p, 0, 0, 4096, 7), 0);
    assert_int_equal(wait_for(p, 1, NET_ARRIVED, &event), 10000 + 2 * (1000 + 4000));
    assert_int_equal(event.immediate, 7);
    close_pair(p);
}

static void a_card_sends_one_after_the_other(void **state)
{
    struct pair *p = open_pair((struct sim_net_options){.latency_ns = 10000, .message_ns = 500});
    struct net_event event;
    uint64_t last = 0;

    (void)state;
    put_a_hundred(p);
    for (uint32_t i = 0; i < 100; i++) {
        const uint64_t now = wait_for(p, 1, NET_ARRIVED, &event);
        last = now ? now : last;
    }
    assert_int_equal(last, 10000 + 100 * 500 + 500);
    close_pair(p);
}

static void jitter_reorders(void **state)
{
    struct pair *p = open_pair((struct sim_net_options){.latency_ns = 1000, .jitter_ns = 100000});
    struct net_event event;
    int swapped = 0;
    uint32_t most = 0;

    (void)state;
    put_a_hundred(p);
    for (uint32_t i = 0; i < 100; i++) {
        wait_for(p, 1, NET_ARRIVED, &event);
        swapped += event.immediate < most;
        most = event.immediate > most ? event.immediate : most;
    }
    assert_true(swapped > 20);
    close_pair(p);
}

static void bytes_are_read_when_they_land(void **state)
{
    struct pair *p = open_pair((struct sim_net_options){.latency_ns = 1000});
    struct net_event event;

    (void)state;
    memset(p->heap[0], 1, 64);
    assert_int_equal(put(p, 0, 0, 64, 0), 0);
    memset(p->heap[0], 2, 64); /* too early: it was not completed */
    wait_for(p, 1, NET_ARRIVED, &event);
    assert_int_equal(p->heap[1][0], 2);
    close_pair(p);
}

/* Of a torn put some bytes are there before the immediate; with it, all. */
static void a_torn_put_is_whole_when_its_immediate_comes(void **state)
{
    struct pair *p = open_pair((struct sim_net_options){.latency_ns = 100000, .torn_percent = 100});
    struct net_event event;
    int early = 0;

    (void)state;
    memset(p->heap[0], 5, HEAP);
    assert_int_equal(put(p, 0, 0, HEAP, 0), 0);
    while (net_sim_ops.poll(p->net[1], &event, 1) == 0) {
        for (int i = 0; i < HEAP && !early; i++)
            early = p->heap[1][i] == 5;
        sim_net_advance(p->world, sim_net_next(p->world));
    }
    assert_true(early);
    assert_memory_equal(p->heap[0], p->heap[1], HEAP);
    close_pair(p);
}

static void a_lost_put_loses_the_peer(void **state)
{
    struct pair *p = open_pair((struct sim_net_options){.latency_ns = 1000, .lose_one_in = 1});
    struct net_event event;

    (void)state;
    memset(p->heap[0], 5, 64);
    assert_int_equal(put(p, 0, 0, 64, 0), 0);
    wait_for(p, 0, NET_FAILED, &event);
    assert_int_equal(event.peer, 1);
    assert_int_equal(event.error, EIO);
    assert_int_equal(p->heap[1][0], 0);
    assert_int_equal(put(p, 0, 0, 64, 0), -ENOTCONN);
    close_pair(p);
}

static void a_death_is_told_after_a_while(void **state)
{
    struct pair *p = open_pair((struct sim_net_options){.latency_ns = 1000, .death_ns = 50000});
    struct net_event event;
    uint64_t told;

    (void)state;
    assert_int_equal(put(p, 0, 0, 64, 0), 0);
    sim_net_kill(p->world, 1);
    told = wait_for(p, 0, NET_FAILED, &event);
    assert_in_range(told, 50000, 100000);
    assert_int_equal(event.peer, 1);
    assert_int_equal(net_sim_ops.poll(p->net[0], &event, 1), 0);
    assert_int_equal(net_sim_ops.poll(p->net[1], &event, 1), -ENETDOWN);
    assert_int_equal(put(p, 1, 0, 0, 0), -ENETDOWN);
    close_pair(p);
}

static int stopped;

static int is_stopped(void *context, int process)
{
    (void)context;
    return process == 1 && stopped;
}

/* Rank 0 sends to rank 1, which has stopped, and stores something else there `ns` later. Then rank 1 runs again. */
static struct pair *send_to_the_stopped(enum sim_net_stopped how, uint64_t ns, struct net_event *event)
{
    struct pair *p = open_pair(
        (struct sim_net_options){.latency_ns = 1000, .torn_percent = 100, .stopped = how, .is_stopped = is_stopped});

    stopped = 1;
    memset(p->heap[0], 1, HEAP);
    assert_int_equal(put(p, 0, 0, 64, 7), 0);
    sim_net_advance(p->world, ns);
    assert_int_equal(p->heap[1][0], 0);
    *event = (struct net_event){0};
    net_sim_ops.poll(p->net[0], event, 1);
    memset(p->heap[0], 2, HEAP);
    stopped = 0;
    sim_net_runs(p->world, 1);
    return p;
}

static void who_has_stopped_receives_when_it_runs_again(void **state)
{
    struct net_event event;
    struct pair *p = send_to_the_stopped(SIM_NET_SHUTS, 500000000, &event);

    (void)state;
    wait_for(p, 1, NET_ARRIVED, &event);
    assert_int_equal(event.immediate, 7);
    for (int i = 0; i < 64; i++)
        assert_int_equal(p->heap[1][i], 2);
    wait_for(p, 0, NET_SENT, &event);
    close_pair(p);
}

static void nothing_arrives_where_the_connection_was_shut(void **state)
{
    struct net_event event;
    struct pair *p = send_to_the_stopped(SIM_NET_SHUTS, 1500000000, &event);

    (void)state;
    assert_int_equal(event.kind, NET_FAILED);
    assert_int_equal(event.error, ETIMEDOUT);
    assert_int_equal(event.reads, 0);
    sim_net_advance(p->world, 3000000000);
    assert_int_equal(net_sim_ops.poll(p->net[1], &event, 1), 0);
    assert_int_equal(p->heap[1][0], 0);
    close_pair(p);
}

static void where_it_was_not_what_was_given_up_is_read(void **state)
{
    struct net_event event;
    struct pair *p = send_to_the_stopped(SIM_NET_READS, 1500000000, &event);

    (void)state;
    assert_int_equal(event.kind, NET_FAILED);
    assert_int_equal(event.reads, 1);
    wait_for(p, 1, NET_ARRIVED, &event);
    assert_int_equal(p->heap[1][0], 2);
    assert_int_equal(net_sim_ops.poll(p->net[0], &event, 1), 0); /* it does not complete */
    close_pair(p);
}

static void no_more_are_taken_than_fit(void **state)
{
    struct pair *p = open_pair((struct sim_net_options){.latency_ns = 1000, .depth = 2});
    struct net_event event;

    (void)state;
    assert_int_equal(put(p, 0, 0, 0, 0), 0);
    assert_int_equal(put(p, 0, 0, 0, 1), 0);
    assert_int_equal(put(p, 0, 0, 0, 2), -EAGAIN);
    wait_for(p, 0, NET_SENT, &event);
    assert_int_equal(put(p, 0, 0, 0, 2), 0);
    close_pair(p);
}

static void there_is_no_network_without_a_world(void **state)
{
    const struct net_options options = {.rank = 0, .nranks = 2, .provider = ""};
    struct net *net;

    (void)state;
    assert_int_equal(net_sim_ops.open(&options, &net), EPX_ERR_UNSUPPORTED);
    assert_null(net);
}

UNIT_TESTS(a_put_takes_what_its_card_and_way_take, a_card_sends_one_after_the_other, jitter_reorders,
           bytes_are_read_when_they_land, a_torn_put_is_whole_when_its_immediate_comes, a_lost_put_loses_the_peer,
           a_death_is_told_after_a_while, who_has_stopped_receives_when_it_runs_again,
           nothing_arrives_where_the_connection_was_shut, where_it_was_not_what_was_given_up_is_read,
           no_more_are_taken_than_fit, there_is_no_network_without_a_world)
