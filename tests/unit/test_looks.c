/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What agents look at while they wait does not grow with the number of ranks: the words of their node, and one
 * aggregate of each proxy (proxy/count.c). The simulation counts the looks of whole low-latency operations, at 8 ranks
 * per node.
 * One thread: nothing for ThreadSanitizer. ctest: labels=notsan
 */
#include <stdio.h>
#include <string.h>

#include "sim/ranks.h"
#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"

/* AGAIN: looks of an operation that has to look again, because what it waits for comes later among more ranks. */
enum { ROUNDS = 3, NODE = 8, AGAIN = 4 };

static int rounds(int rank, int n, epx_bootstrap *boot, void *arg)
{
    struct fixture *s = calloc(1, sizeof(*s));
    epx_group_config config = fixture_config(200000);
    int rc;

    (void)arg;
    if (!s)
        return -1;
    config.modes = EPX_LOW_LATENCY;
    config.ranks_per_node = NODE;
    config.num_agents = 2;
    snprintf(config.net, sizeof(config.net), "sim");
    rc = fixture_open(s, rank, n, boot, &config);
    for (int i = 0; i < ROUNDS && !rc; i++)
        rc = fixture_ll(s); /* checked against the oracle */
    if (rc)
        print_message("rank %d: %s\n", rank, s->why);
    fixture_close(s);
    free(s);
    return rc;
}

/* Looks of a rank in one operation. */
static double looks(int ranks)
{
    const struct sim_net_options net = {
        .seed = 1, .nranks = ranks, .latency_ns = 2000, .jitter_ns = 4000, .depth = 64, .death_ns = SIM_NET_NEVER};
    const struct sim_setup setup = {
        .sched = {.seed = 1, .nranks = ranks, .point_every = 64, .step_ns = 100, .max_steps = 200000000},
        .net = &net,
        .gather_ns = 800000000000u};
    struct sim_outcome *outcome = calloc(1, sizeof(*outcome));
    double each;

    assert_non_null(outcome);
    assert_int_equal(sim_run_ranks(&setup, rounds, NULL, outcome), 0);
    assert_string_equal(outcome->stuck, "");
    assert_int_equal(outcome->failures, 0);
    each = (double)outcome->totals.looks / ranks / (2 * ROUNDS);
    print_message("%d ranks: %.1f looks of a rank in an operation\n", ranks, each);
    free(outcome);
    return each;
}

static void looks_do_not_grow_with_ranks(void **state)
{
    const char *more = getenv("EPX_TEST_LOOKS"); /* as many ranks as that, for a run by hand */
    const double few = looks(2 * NODE);

    (void)state;
    assert_true(few > 0);
    assert_true(looks(4 * NODE) < few + AGAIN);
    assert_true(looks(8 * NODE) < few + AGAIN);
    if (more)
        assert_true(looks(atoi(more)) < few + AGAIN);
}

UNIT_MAIN(cmocka_unit_test(looks_do_not_grow_with_ranks))
