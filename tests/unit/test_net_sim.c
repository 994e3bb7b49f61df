/* SPDX-License-Identifier: Apache-2.0 */
/* The network suite over the simulated network, in worlds of several kinds. Ranks are coroutines of one thread: nothing
 * for ThreadSanitizer. ctest: cost=15 labels=notsan */
#include "tests/unit/net_suite_cmocka.h"

#include "sim/net.h"
#include "util/runtime.h"

static struct sim_net *make_world(int nranks, struct sim_net_options options)
{
    struct sim_net *world;

    options.seed = 7;
    options.nranks = nranks;
    world = sim_net_create(&options);
    runtime_swap(&(const struct runtime){.net_guest = &net_sim_ops, .net_world = world});
    return world;
}

static void *quick(int nranks)
{
    return make_world(nranks,
                      (struct sim_net_options){.latency_ns = 1000, .depth = 64, .ordered = 1, .death_ns = 1000});
}

/* Nothing comes in order, nor in one piece. */
static void *unordered_world(int nranks)
{
    return make_world(nranks, (struct sim_net_options){.latency_ns = 2000,
                                                       .jitter_ns = 200000,
                                                       .message_ns = 100,
                                                       .bytes_per_us = 10000,
                                                       .depth = 200,
                                                       .torn_percent = 50,
                                                       .refuse_percent = 10,
                                                       .death_ns = 100000});
}

/* One put at a time, and nobody says who sent it. */
static void *narrow(int nranks)
{
    return make_world(nranks, (struct sim_net_options){.latency_ns = 5000,
                                                       .jitter_ns = 5000,
                                                       .message_ns = 1000,
                                                       .bytes_per_us = 100,
                                                       .depth = 1,
                                                       .anonymous = 1,
                                                       .death_ns = 100000});
}

static void close_world(void *world)
{
    sim_net_destroy(world);
    runtime_swap(NULL);
}

static void idle(void *world)
{
    const uint64_t next = sim_net_next(world);

    if (next != SIM_NET_NEVER)
        sim_net_advance(world, next);
}

static void kill_rank(void *world, int rank)
{
    sim_net_kill(world, rank);
}

#define SUITE(name, open)                                             \
    static const struct net_suite name = {.label = "sim_" #name,      \
                                          .ops = &net_sim_ops,        \
                                          .provider = "",             \
                                          .ranks = NET_SUITE_FIBERS,  \
                                          .world_open = open,         \
                                          .world_close = close_world, \
                                          .world_idle = idle,         \
                                          .world_kill = kill_rank}
SUITE(ordered, quick);
SUITE(unordered, unordered_world);
SUITE(one_at_a_time, narrow);

int main(void)
{
    static struct CMUnitTest tests[NET_SUITE_TESTS];
    int count = 0;

    count = net_suite_add(&ordered, suite_cases, suite_case_count, tests, count);
    count = net_suite_add(&unordered, suite_cases, suite_case_count, tests, count);
    count = net_suite_add(&one_at_a_time, suite_cases, suite_case_count, tests, count);
    return _cmocka_run_group_tests("net_sim", tests, (size_t)count, NULL, NULL);
}
