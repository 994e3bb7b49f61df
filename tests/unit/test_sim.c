/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Deterministic simulation: the scheduler itself, and 2,000 seeds (times EPX_TEST_SCALE) of exchanges on one node and
 * across nodes, with and without faults. `epx sim` runs more of the same. All of it on one thread:
 * ThreadSanitizer has nothing to find. ctest: cost=14 labels=notsan
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "tests/lib/sim_case.h"
#include "tests/lib/unit_sim.h"

enum { BOTH = EPX_LOW_LATENCY | EPX_HIGH_THROUGHPUT, FAULTS = SIM_FAULT_DELAY | SIM_FAULT_DEATH };

/* ---- Tasks ---------------------------------------------------------------------------------------------------- */

static const struct sim_options plain = {.seed = 1, .nranks = 2, .point_every = 1, .step_ns = 10, .max_steps = 100000};
static char order[64];
static int norder;

static void append(void *letter)
{
    for (int i = 0; i < 8; i++) {
        order[norder++] = *(const char *)letter;
        sim_yield();
    }
}

/* Two tasks that each append their letter eight times. */
static void two_speakers(uint64_t seed)
{
    struct sim_options options = plain;
    char a = 'a', b = 'b';

    options.seed = seed;
    norder = 0;
    unit_sim_tasks(&options, append, &a, append, &b);
    order[norder] = 0;
    assert_int_equal(norder, 16);
}

static void the_seed_decides_the_order(void **state)
{
    char first[64], second[64];

    (void)state;
    two_speakers(1);
    memcpy(first, order, sizeof(first));
    two_speakers(2);
    memcpy(second, order, sizeof(second));
    assert_string_not_equal(first, second);
    two_speakers(1);
    assert_string_equal(first, order);
}

static uint64_t woken_at;

static void sleeps_a_second(void *key)
{
    const uint64_t start = sim_now();

    assert_int_equal(sim_park(key, start + 1000000000u, "sleeps"), 0);
    woken_at = sim_now() - start;
}

static void time_jumps_when_all_wait(void **state)
{
    char why[400];
    int key;

    (void)state;
    assert_int_equal(sim_begin(&plain), 0);
    assert_int_equal(sim_spawn(SIM_PROGRAM, 0, 0, sleeps_a_second, &key), 0);
    assert_int_equal(sim_run(why, sizeof(why)), 0);
    sim_end();
    assert_in_range(woken_at, 1000000000u, 1000001000u);
}

static void waits_for_ever(void *key)
{
    sim_park(key, SIM_NEVER, "waits for Godot");
}

static void who_waits_for_ever_is_named(void **state)
{
    char why[400] = "";
    int key;

    (void)state;
    assert_int_equal(sim_begin(&plain), 0);
    assert_int_equal(sim_spawn(SIM_PROGRAM, 1, 0, waits_for_ever, &key), 0);
    assert_int_equal(sim_run(why, sizeof(why)), -1);
    sim_end();
    assert_non_null(strstr(why, "rank 1 program 0: waits for Godot"));
}

static void goes_round(void *arg)
{
    (void)arg;
    for (;;)
        sim_yield();
}

static void what_does_not_end_is_ended(void **state)
{
    char why[400] = "";

    (void)state;
    assert_int_equal(sim_begin(&plain), 0);
    assert_int_equal(sim_spawn(SIM_PROGRAM, 0, 0, goes_round, NULL), 0);
    assert_int_equal(sim_run(why, sizeof(why)), -1);
    sim_end();
    assert_non_null(strstr(why, "does not end"));
}

/* ---- Ranks ---------------------------------------------------------------------------------------------------- */

static int gather_ranks(int rank, int n, epx_bootstrap *boot, void *arg)
{
    int all[4] = {-1, -1, -1, -1};

    (void)arg;
    for (int round = 0; round < 50; round++) {
        const int mine = rank + 10 * round;

        if (boot->allgather(boot->context, &mine, all, sizeof(mine)))
            return 1;
        for (int r = 0; r < n; r++)
            assert_int_equal(all[r], r + 10 * round);
    }
    return 0;
}

static void ranks_meet(void **state)
{
    struct sim_setup setup = {.sched = plain, .gather_ns = 1000000};
    struct sim_outcome outcome;

    (void)state;
    setup.sched.nranks = 4;
    assert_int_equal(sim_run_ranks(&setup, gather_ranks, NULL, &outcome), 0);
    assert_int_equal(outcome.failures, 0);
}

/* A rank that dies between two meetings: the others are told at the deadline, and it cleans up after them. */
static void the_living_do_not_wait_for_the_dead(void **state)
{
    struct sim_setup setup = {.sched = plain, .gather_ns = 1000000000};
    struct sim_outcome outcome;

    (void)state;
    setup.sched.nranks = 4;
    setup.sched.nfaults = 1;
    setup.sched.fault[0] = (struct sim_fault){.at = 100, .ns = SIM_NEVER, .rank = 2};
    assert_int_equal(sim_run_ranks(&setup, gather_ranks, NULL, &outcome), 0);
    assert_int_equal(outcome.totals.deaths, 1);
    assert_int_equal(outcome.failures, 4);
    assert_in_range(outcome.totals.now_ns, 1000000000u, 1100000000u);
}

/* ---- Seeds ---------------------------------------------------------------------------------------------------- */

/* Ranks that were told of a failure, and those of them that did not name a rank with a fault. The wrong ones of a seed
 * are not independent: the variance of their sum is that of the seeds, not of the ranks. */
struct named {
    int all, wrong;
    double variance;
};

static struct named run_seeds(const char *name, uint64_t from, int seeds, struct sim_case_options options)
{
    struct sim_report *report = malloc(sizeof(*report));
    const int count = (int)(seeds * prop_scale()) > 0 ? (int)(seeds * prop_scale()) : 1;
    struct named sum = {0, 0, 0};

    assert_non_null(report);
    for (uint64_t seed = from; seed < from + (uint64_t)count; seed++) {
        struct sim_case c;

        sim_case_draw(&c, seed, &options);
        if (sim_case_run(&c, report) != 0) {
            print_error("%s: seed %llu: %s\n", name, (unsigned long long)seed, report->error);
            sim_case_print(&c);
            fail_msg("seed %llu failed", (unsigned long long)seed);
        }
        sum.all += report->named;
        sum.wrong += report->misnamed;
        sum.variance += (double)report->misnamed * report->misnamed;
    }
    free(report);
    return sum;
}

/* Those behind the usual ones, where EPX_TEST_SEED asks for others. */
static struct named draw_seeds(const char *name, uint64_t usual, int seeds, struct sim_case_options options)
{
    return run_seeds(name, prop_seed(0) + usual, seeds, options);
}

static void on_one_node(void **state)
{
    (void)state;
    draw_seeds("on_one_node", 1, 400, (struct sim_case_options){.modes = BOTH, .nodes = 1});
}

static void low_latency_across_nodes(void **state)
{
    (void)state;
    draw_seeds("low_latency_across_nodes", 10001, 400, (struct sim_case_options){.modes = EPX_LOW_LATENCY, .nodes = 2});
}

static void high_throughput_across_nodes(void **state)
{
    (void)state;
    draw_seeds("high_throughput_across_nodes", 20001, 400,
               (struct sim_case_options){.modes = EPX_HIGH_THROUGHPUT, .nodes = 2});
}

/* Dispatches take rows from the tokens of other ranks, which these overwrite as soon as they may. */
static void rows_taken_where_they_are(void **state)
{
    struct sim_case_options options = {.modes = EPX_HIGH_THROUGHPUT, .nodes = 1, .in_reach = 1};

    (void)state;
    draw_seeds("rows_taken_where_they_are", 26001, 200, options);
    options.faults = FAULTS;
    draw_seeds("rows_taken_where_they_are, faults", 26501, 150, options);
    options.faults = SIM_FAULT_STOP;
    draw_seeds("rows_taken_where_they_are, stops", 27001, 50, options);
}

/* What crosses between nodes is in memory that the node does not reach. */
static void high_throughput_with_split_memory(void **state)
{
    (void)state;
    setenv("EPX_GPU_HEAP", "split", 1);
    draw_seeds("high_throughput_with_split_memory", 25001, 200,
               (struct sim_case_options){.modes = EPX_HIGH_THROUGHPUT, .nodes = 2});
    unsetenv("EPX_GPU_HEAP");
}

static void anything_without_faults(void **state)
{
    (void)state;
    draw_seeds("anything_without_faults", 30001, 400, (struct sim_case_options){.modes = BOTH});
}

static void anything_with_faults(void **state)
{
    const struct named named =
        draw_seeds("anything_with_faults", 40001, 600, (struct sim_case_options){.modes = BOTH, .faults = FAULTS});
    const double most = 0.01 * named.all; /* one of 100, in the mean of many more seeds than these */

    (void)state;
    print_message("%d of %d failures were told with a wrong rank, deviation %.1f\n", named.wrong, named.all,
                  sqrt(named.variance));
    assert_true(named.wrong <= most + 3 * sqrt(named.variance > most ? named.variance : most));
}

/* All others name it, although the machine is busy. */
static void a_rank_that_stops_is_named(void **state)
{
    const struct named named = draw_seeds("a_rank_that_stops_is_named", 80001, 300,
                                          (struct sim_case_options){.modes = BOTH, .faults = SIM_FAULT_STOP});

    (void)state;
    assert_true(named.all > 0);
}

static void faults_in_a_recovery(void **state)
{
    (void)state;
    draw_seeds("faults_in_a_recovery", 70001, 100,
               (struct sim_case_options){.modes = BOTH, .faults = SIM_FAULT_RECOVER});
}

static void many_ranks(void **state)
{
    (void)state;
    draw_seeds("many_ranks", 50001, 4, (struct sim_case_options){.modes = BOTH, .ranks = 32, .nodes = 4});
    /* More than the rules know all about. */
    run_seeds("72 ranks", 1, 1, (struct sim_case_options){.modes = EPX_LOW_LATENCY, .ranks = 72, .nodes = 9});
}

/* Each has found something once: a relay that was left behind forwards by the descriptor of another operation; a rank
 * whose gather failed took part in the next one, where others were a step behind it; a relay sent on sums of rows that
 * a rank which had failed used for something else; a group without high throughput wrote down more sources of a relay
 * than it had room for. Of the next nine, three combined memory of ranks of their node that had given up without
 * telling them; one received rows that the network read after their rank had given up; in five a rank masked itself,
 * while it waited for its own agents. Then the oracle was wrong: large rows that cancel left less than the rounding of
 * the sums between. In the last one a rank that was left out in a combine followed the descriptor of a later operation
 * out of its memory. */
static void seeds_that_have_found_something(void **state)
{
    static const struct {
        uint64_t seed;
        uint32_t modes;
    } seeds[] = {{26794, EPX_HIGH_THROUGHPUT},
                 {16881, EPX_HIGH_THROUGHPUT},
                 {50214, EPX_HIGH_THROUGHPUT},
                 {103922, EPX_LOW_LATENCY}, /* AddressSanitizer sees it */
                 {216592134, BOTH},
                 {612143682, BOTH},
                 {612170264, BOTH},
                 {612181270, BOTH},
                 {216581278, BOTH},
                 {216592532, BOTH},
                 {1339773862, BOTH},
                 {1339779666, BOTH},
                 {1339784452, BOTH},
                 {120000000344, EPX_LOW_LATENCY},
                 {269000000595, BOTH}};

    (void)state;
    for (size_t i = 0; i < sizeof(seeds) / sizeof(*seeds); i++)
        run_seeds("seeds_that_have_found_something", seeds[i].seed, 1,
                  (struct sim_case_options){.modes = seeds[i].modes, .faults = FAULTS});
}

/* The same with late ranks: in each but the last three a healthy rank masked another one. In two a rank gave those
 * behind one that came late, or after its own sleep, no time to come; in four it waited for a rank of its node that had
 * been left out and had given up; in two agents overwrote each other's questions. In the first of the last three an
 * agent of a rank that was left out still wrote rows, and another agent, which had not begun, was taken for it when it
 * gave up. In the second a rank heard while it ended its group that some had masked it: it said no goodbye, and another
 * one lost it. In the third a rank closed its network before its abort had left: the late one recovered alone, too. */
static void seeds_with_late_ranks_that_have_found_something(void **state)
{
    static const struct {
        uint64_t seed;
        uint32_t modes;
    } seeds[] = {{99300003238, BOTH},
                 {99810004996, BOTH},
                 {99810018052, BOTH},
                 {99810003768, EPX_LOW_LATENCY},
                 {99810014788, EPX_LOW_LATENCY},
                 {99810016395, EPX_LOW_LATENCY},
                 {99810004097, EPX_HIGH_THROUGHPUT},
                 {99810018873, EPX_HIGH_THROUGHPUT},
                 {157200003372, BOTH},
                 {202200000353, EPX_LOW_LATENCY},
                 {230000005789, BOTH},
                 {264200012416, EPX_LOW_LATENCY}};

    (void)state;
    for (size_t i = 0; i < sizeof(seeds) / sizeof(*seeds); i++)
        run_seeds("seeds_with_late_ranks_that_have_found_something", seeds[i].seed, 1,
                  (struct sim_case_options){.modes = seeds[i].modes, .faults = SIM_FAULT_LATE});
}

/* The same with faults in a recovery. In the first the leader stopped, and erased, when it went on, the abort words of
 * ranks that had given up meanwhile. In the second a rank died while it wrote rows; the one that waited for it was
 * masked in its place. */
static void seeds_of_a_recovery_that_have_found_something(void **state)
{
    static const uint64_t seeds[] = {125500000258, 230100000831};

    (void)state;
    for (size_t i = 0; i < sizeof(seeds) / sizeof(*seeds); i++)
        run_seeds("seeds_of_a_recovery_that_have_found_something", seeds[i], 1,
                  (struct sim_case_options){.modes = EPX_LOW_LATENCY, .faults = SIM_FAULT_RECOVER});
}

/* The same with processes that join: a late rank woke up in the midst of a dispatch, when those of its node had gone on
 * without it, took the tables of a later one for its own, and followed them out of its memory. In the second a rule was
 * wrong: a process whose place was taken gave a signal to its old network, which the others had by a recovery. In the
 * third a combine copied the descriptor of a rank that had gone, and whose heap was not mapped any more. In the
 * fourth a rule was wrong again: each part of a group that the network had cut admitted a process for one place. */
static void seeds_of_a_join_that_have_found_something(void **state)
{
    static const struct {
        uint64_t seed;
        uint32_t modes;
    } seeds[] = {{190000000549, EPX_LOW_LATENCY},
                 {261700004241, EPX_LOW_LATENCY},
                 {291000000044, BOTH},
                 {294000004259, EPX_LOW_LATENCY}};

    (void)state;
    for (size_t i = 0; i < sizeof(seeds) / sizeof(*seeds); i++)
        run_seeds("seeds_of_a_join_that_have_found_something", seeds[i].seed, 1,
                  (struct sim_case_options){.modes = seeds[i].modes, .faults = SIM_FAULT_DEATH | SIM_FAULT_JOIN});
}

/* The same with ranks that stop: a healthy one ran for less than a slice between two stalls, and answered then. What it
 * was silent before and after was added up, and it was named for the one that had stopped. */
static void a_seed_of_a_stop_that_has_found_something(void **state)
{
    (void)state;
    run_seeds("a_seed_of_a_stop_that_has_found_something", 160600010998, 1,
              (struct sim_case_options){.modes = BOTH, .faults = SIM_FAULT_STOP});
}

/* The same with late ranks that receive nothing while they have stopped. In the first four, in networks that cannot
 * shut a connection, others gave up their puts to such a rank, and counted them as sent, for they go on without it:
 * their dispatch ended well. When the rank went on it got what they had stored there since, and its own dispatch ended
 * well, too. Where connections are shut, it waited for those that had given it up, and they for it, or for its node. In
 * the last four one had given it up, and was through with an operation of high throughput: its neighbours waited for
 * the rank, and named the one that was well. */
static void seeds_with_receivers_that_have_found_something(void **state)
{
    static const struct {
        uint64_t seed;
        int modes, stopped;
    } seeds[] = {{285000030761, EPX_HIGH_THROUGHPUT, SIM_NET_READS},
                 {285000030824, EPX_HIGH_THROUGHPUT, SIM_NET_READS},
                 {285000030022, EPX_LOW_LATENCY, SIM_NET_READS},
                 {285000030144, EPX_LOW_LATENCY, SIM_NET_READS},
                 {285000012025, BOTH, SIM_NET_SHUTS},
                 {285000023583, EPX_HIGH_THROUGHPUT, SIM_NET_SHUTS},
                 {285000020336, EPX_LOW_LATENCY, SIM_NET_SHUTS},
                 {285000020360, EPX_LOW_LATENCY, SIM_NET_SHUTS},
                 {285000021672, EPX_LOW_LATENCY, SIM_NET_SHUTS},
                 {292000000135, BOTH, SIM_NET_SHUTS},
                 {296110018104, BOTH, SIM_NET_SHUTS},
                 {296110019103, BOTH, SIM_NET_SHUTS},
                 {296400003076, BOTH, SIM_NET_SHUTS}};

    (void)state;
    for (size_t i = 0; i < sizeof(seeds) / sizeof(*seeds); i++)
        run_seeds("seeds_with_receivers_that_have_found_something", seeds[i].seed, 1,
                  (struct sim_case_options){
                      .modes = seeds[i].modes, .faults = SIM_FAULT_LATE, .stopped = 1 + seeds[i].stopped});
}

/* The same with delays: a rank followed the words of one that had slept to one that had ended its group in order, and
 * that it had never met. It asked that one, found nobody, and named it. */
static void a_seed_of_a_delay_that_has_found_something(void **state)
{
    (void)state;
    run_seeds("a_seed_of_a_delay_that_has_found_something", 285200000501, 1,
              (struct sim_case_options){.modes = EPX_HIGH_THROUGHPUT, .faults = SIM_FAULT_DELAY});
}

/* The same seed takes the same steps: a failure can be looked at again. */
static void a_seed_replays_exactly(void **state)
{
    const struct sim_case_options options = {.modes = BOTH, .faults = FAULTS};
    struct sim_report *first = malloc(sizeof(*first)), *second = malloc(sizeof(*second));
    uint64_t before = 0;

    (void)state;
    assert_true(first && second);
    for (uint64_t seed = 60001; seed < 60031; seed++) {
        struct sim_case c;

        sim_case_draw(&c, seed, &options);
        assert_int_equal(sim_case_run(&c, first), 0);
        assert_int_equal(sim_case_run(&c, second), 0);
        assert_true(first->outcome.totals.steps == second->outcome.totals.steps);
        assert_true(first->outcome.totals.hash == second->outcome.totals.hash);
        assert_true(first->outcome.net.hash == second->outcome.net.hash);
        assert_true(first->outcome.totals.hash != before);
        before = first->outcome.totals.hash;
    }
    free(first);
    free(second);
}

static int set_up(void **state)
{
    (void)state;
    setenv("EPX_LOG", "error", 0);
    return 0;
}

UNIT_TESTS_WITHIN(set_up, NULL, the_seed_decides_the_order, time_jumps_when_all_wait, who_waits_for_ever_is_named,
                  what_does_not_end_is_ended, ranks_meet, the_living_do_not_wait_for_the_dead,
                  seeds_that_have_found_something, seeds_with_late_ranks_that_have_found_something,
                  seeds_of_a_recovery_that_have_found_something, seeds_of_a_join_that_have_found_something,
                  a_seed_of_a_stop_that_has_found_something, seeds_with_receivers_that_have_found_something,
                  a_seed_of_a_delay_that_has_found_something, a_seed_replays_exactly, on_one_node,
                  low_latency_across_nodes, high_throughput_across_nodes, high_throughput_with_split_memory,
                  rows_taken_where_they_are, anything_without_faults, anything_with_faults, a_rank_that_stops_is_named,
                  faults_in_a_recovery, many_ranks)
