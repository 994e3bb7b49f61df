/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The simulation's clocks and costs: the earliest task runs, what is charged takes its time, and a small row costs what
 * a large one does. All of it on one thread. ctest: labels=notsan
 */
#include <string.h>

#include "kernel/command.h"
#include "sim/cost.h"
#include "sim/cost_memory.h"
#include "sim/sched.h"
#include "tests/lib/unit_sim.h"

/* ---- Clocks ----------------------------------------------------------------------------------------------------- */

static const struct sim_options clocks = {.seed = 1, .nranks = 2, .policy = SIM_EARLIEST, .max_steps = 100000};
static char order[64];
static int norder;

struct speaker {
    char letter;
    uint64_t ns;
};

static void speak(void *arg)
{
    const struct speaker *s = arg;

    for (int i = 0; i < 3; i++) {
        sim_spend(s->ns);
        sim_point();
        order[norder++] = s->letter;
    }
}

static void the_earliest_runs(void **state)
{
    struct speaker slow = {'s', 100}, fast = {'f', 30};

    (void)state;
    norder = 0;
    unit_sim_tasks(&clocks, speak, &slow, speak, &fast);
    order[norder] = 0;
    assert_string_equal(order, "fffsss"); /* at 30, 60, 90; 100, 200, 300 */
}

static uint64_t slept, woken;
static int key;

static uint64_t half_a_microsecond(enum sim_kind from, int from_rank, enum sim_kind to, int to_rank)
{
    (void)from, (void)from_rank, (void)to, (void)to_rank;
    return 500;
}

static void sleeper(void *arg)
{
    (void)arg;
    slept = sim_now();
    assert_int_equal(sim_park(&key, SIM_NEVER, "sleeps"), 1);
    woken = sim_now();
}

static void waker(void *arg)
{
    (void)arg;
    sim_spend(2000);
    sim_point();
    sim_wake(&key);
}

static void a_wake_up_takes_its_time(void **state)
{
    struct sim_options options = clocks;

    (void)state;
    options.wake_ns = half_a_microsecond;
    unit_sim_tasks(&options, sleeper, NULL, waker, NULL);
    assert_int_equal(woken - slept, 2500);
}

/* ---- The network ------------------------------------------------------------------------------------------------- */

/* Round numbers: 1000 bytes take a microsecond of a card, 500 ns of a bus. */
static const struct cost_machine machine = {.ranks_per_gpu = 1,
                                            .gpus_per_node = 1,
                                            .sms = 1,
                                            .warps_per_sm = 1,
                                            .sm_rate = 1000,
                                            .memory_rate = 1000000,
                                            .bus_rate = 2000,
                                            .proxies = 1,
                                            .cards_per_rank = 1,
                                            .card_rate = 1000,
                                            .message_ns = 100,
                                            .wire_ns = 5000};

static void costs_begin_on(const struct cost_machine *m)
{
    const struct cost_setup setup = {.machine = m,
                                     .nranks = 4,
                                     .agents = 1,
                                     .hidden_small = 8,
                                     .hidden_large = 800,
                                     .dispatch = {16, 1600},
                                     .combine = {16, 1600}};

    assert_int_equal(cost_begin(&setup), 0);
}

static int costs_begin(void **state)
{
    (void)state;
    costs_begin_on(&machine);
    return 0;
}

static int costs_end(void **state)
{
    (void)state;
    cost_end();
    return 0;
}

static struct net_put put_of(int kind, uint32_t count, uint32_t bytes)
{
    return (struct net_put){.peer = 1, .bytes = bytes, .immediate = immediate_pack(0, COUNTER(kind, 0), count)};
}

static void a_put_takes_bytes_over_rate_and_the_next_one_waits(void **state)
{
    const struct net_put put = put_of(SIG_LL_DATA, 1, 4000);
    uint64_t first, second;

    (void)state;
    first = cost_depart(0, 0, 1, &put, 1000000);
    second = cost_depart(0, 0, 1, &put, 1000000);
    assert_int_equal(first, 1000000 + 4000 + 100 + 5000);
    assert_int_equal(second, first + 4000); /* the card began it while it sent the bytes of the first */
    /* It streams through the receiver's card, which is free: no time is added. */
    assert_int_equal(cost_land(0, 1, 0, &put, first), first);
}

static void two_senders_share_the_receivers_card(void **state)
{
    const struct net_put put = put_of(SIG_LL_DATA, 1, 4000);
    uint64_t first, second;

    (void)state;
    first = cost_land(0, 1, 0, &put, 1000000);
    second = cost_land(0, 1, 0, &put, 1000000);
    assert_int_equal(first, 1000000);
    assert_int_equal(second, first + 4000);
}

/* A node without a limit of its own: a short put of one rank leaves and lands while a long one of another, or through
 * another card, is still on its way. */
static void a_long_put_delays_only_its_own_cards(void **state)
{
    const struct net_put large = put_of(SIG_LL_DATA, 1, 40000), small = put_of(SIG_LL_DATA, 1, 1000);
    struct cost_machine node = machine;

    (void)state;
    node.gpus_per_node = node.cards_per_rank = 2;
    costs_begin_on(&node);
    cost_depart(0, 0, 2, &large, 1000000);
    assert_int_equal(cost_depart(1, 0, 2, &small, 1000000), 1000000 + 1000 + 100 + 5000);
    cost_land(0, 2, 0, &large, 1050000);
    assert_int_equal(cost_land(3, 2, 0, &large, 1050000), 1050000 + 40000);
    /* The bus has been given 81000 bytes by now, half of its time. */
    assert_int_equal(cost_land(1, 2, 1, &small, 1060000), 1070500);
    cost_end();
}

static void small_rows_are_charged_as_large_ones(void **state)
{
    const struct net_put rows = put_of(SIG_LL_ROWS, 3, 3 * 16), table = put_of(SIG_LL_DATA, 1, 3 * 16);
    struct cost_traffic traffic;

    (void)state;
    cost_depart(0, 0, 1, &rows, 0);
    cost_depart(0, 0, 1, &table, 0);
    cost_traffic(0, &traffic);
    assert_int_equal(traffic.messages, 2);
    assert_int_equal(traffic.bytes, 3 * 1600 + 48);
    assert_int_equal(traffic.header_bytes, 48);
}

/* ---- Memory ------------------------------------------------------------------------------------------------------ */

static void memory_knows_whose_it_is(void **state)
{
    char *device, *host;
    int other;

    (void)state;
    device = cost_memory(1, 100000, 0);
    host = cost_memory(0, 100, 1);
    assert_non_null(device);
    assert_int_equal(cost_memory_owner(device + 99999, 7), 1);
    assert_int_equal(cost_memory_owner(host, 7), 0);
    assert_int_equal(cost_memory_owner(&other, 7), 7);
    assert_false(cost_memory_is_host(device));
    assert_true(cost_memory_is_host(host));
    assert_int_equal(cost_memory_used(1), 102400);
    assert_null(cost_memory(0, (size_t)1 << 40, 0));
}

#define WITH_COSTS(name) cmocka_unit_test_setup_teardown(name, costs_begin, costs_end)
UNIT_MAIN(cmocka_unit_test(the_earliest_runs), cmocka_unit_test(a_wake_up_takes_its_time),
          WITH_COSTS(a_put_takes_bytes_over_rate_and_the_next_one_waits),
          WITH_COSTS(two_senders_share_the_receivers_card), cmocka_unit_test(a_long_put_delays_only_its_own_cards),
          WITH_COSTS(small_rows_are_charged_as_large_ones), WITH_COSTS(memory_knows_whose_it_is))
