/* SPDX-License-Identifier: Apache-2.0 */
/* What cases on the simulator begin and end with. */
#ifndef EPX_TESTS_LIB_UNIT_SIM_H
#define EPX_TESTS_LIB_UNIT_SIM_H

#include "sim/ranks.h"
#include "tests/lib/unit.h"

/* Two tasks, of rank 0 and of rank 1, run until both have ended. */
static inline void unit_sim_tasks(const struct sim_options *options, void (*first)(void *), void *first_arg,
                                  void (*second)(void *), void *second_arg)
{
    char why[400];

    assert_int_equal(sim_begin(options), 0);
    assert_int_equal(sim_spawn(SIM_PROGRAM, 0, 0, first, first_arg), 0);
    assert_int_equal(sim_spawn(SIM_PROGRAM, 1, 0, second, second_arg), 0);
    assert_int_equal(sim_run(why, sizeof(why)), 0);
    sim_end();
}

/* All ranks succeed over a network that delays puts. The caller frees what is returned. */
static inline struct sim_outcome *unit_sim_ranks(int ranks, int (*fn)(int rank, int n, epx_bootstrap *boot, void *arg),
                                                 void *arg)
{
    const struct sim_net_options net = {
        .seed = 1, .nranks = ranks, .latency_ns = 2000, .jitter_ns = 4000, .depth = 64, .death_ns = SIM_NET_NEVER};
    const struct sim_setup setup = {
        .sched = {.seed = 1, .nranks = ranks, .point_every = 64, .step_ns = 100, .max_steps = 200000000},
        .net = &net,
        .gather_ns = 800000000000u};
    struct sim_outcome *outcome = calloc(1, sizeof(*outcome));

    assert_non_null(outcome);
    assert_int_equal(sim_run_ranks(&setup, fn, arg, outcome), 0);
    assert_string_equal(outcome->stuck, "");
    assert_int_equal(outcome->failures, 0);
    return outcome;
}

#endif
