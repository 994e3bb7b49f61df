/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What agents look at while they wait does not grow with the number of ranks: the words of their node, and one
 * aggregate of each proxy (proxy/count.c). The simulation counts the looks of whole low-latency operations, at 8 ranks
 * per node.
 * One thread: nothing for ThreadSanitizer. ctest: labels=notsan
 */
#include <stdio.h>

#include "tests/lib/fixture.h"
#include "tests/lib/unit_sim.h"

/* AGAIN: looks of an operation that has to look again, because what it waits for comes later among more ranks. */
enum { ROUNDS = 3, NODE = 8, AGAIN = 4 };

static int rounds(struct fixture *s)
{
    int rc = 0;

    for (int i = 0; i < ROUNDS && !rc; i++)
        rc = fixture_ll(s); /* checked against the oracle */
    return rc;
}

static int rank_main(int rank, int n, epx_bootstrap *boot, void *arg)
{
    epx_group_config config = fixture_config(200000);

    config.modes = EPX_LOW_LATENCY;
    config.ranks_per_node = NODE;
    config.num_agents = 2;
    snprintf(config.net, sizeof(config.net), "sim");
    return fixture_rank(rank, n, boot, &config, rounds, arg);
}

/* Looks of a rank in one operation. */
static double looks(int ranks)
{
    struct sim_outcome *outcome = unit_sim_ranks(ranks, rank_main, NULL);
    const double each = (double)outcome->totals.looks / ranks / (2 * ROUNDS);

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

UNIT_TESTS(looks_do_not_grow_with_ranks)
