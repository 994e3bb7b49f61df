/* SPDX-License-Identifier: Apache-2.0 */
/* The seam for simulation (util/runtime.h): real by default, swapped as a whole by a simulation, real again
 * afterwards. */

#include "device/cpu/agent.h"
#include "sim/conn.h"
#include "sim/device.h"
#include "sim/proxy.h"
#include "sim/ranks.h"
#include "util/clock.h"
#include "util/pause.h"
#include "util/runtime.h"
#include "tests/lib/unit.h"

static void expect_real(void)
{
    const uint64_t before = clock_ns();
    const uint64_t now = host_now_ns();

    assert_true(before <= now && now <= clock_ns());
    pause_ns(1000000);
    assert_true(clock_ns() - now >= 1000000 / 2);
    assert_ptr_equal(cpu_env_current(), &cpu_thread_env);
    assert_null(runtime()->device);
    assert_null(runtime()->conns);
    assert_null(runtime()->proxies);
    assert_null(runtime()->net_world);
    assert_null(runtime()->net_guest);
}

static void all_is_real_at_first(void **state)
{
    (void)state;
    expect_real();
}

static uint64_t frozen(void)
{
    return 42;
}

static void a_test_swaps_one_part(void **state)
{
    (void)state;
    runtime_swap(&(const struct runtime){.now_ns = frozen});
    assert_int_equal(host_now_ns(), 42);
    pause_ns(1); /* still the real one */
    assert_ptr_equal(cpu_env_current(), &cpu_thread_env);
    runtime_swap(NULL);
    expect_real();
}

/* On the simulation's stack, where cmocka cannot leave: counts what is not the simulation's. */
static int rank_looks(int rank, int n, epx_bootstrap *boot, void *arg)
{
    const struct runtime *r = runtime();
    int *wrong = arg;

    (void)rank;
    (void)n;
    (void)boot;
    *wrong += r->device != &sim_device_ops || r->conns != &sim_conn_ops || r->env != &sim_cpu_env;
    *wrong += r->proxies != &sim_proxy_driver || cpu_env_current() != &sim_cpu_env;
    *wrong += !r->net_world || r->net_guest != &net_sim_ops;
    *wrong += host_now_ns() != sim_now();
    return 0;
}

static void a_simulation_swaps_all_parts_and_back(void **state)
{
    const struct sim_net_options net = {.latency_ns = 1000, .depth = 64, .nranks = 2};
    const struct sim_setup setup = {
        .sched = {.seed = 1, .nranks = 2, .step_ns = 100, .max_steps = 10000}, .net = &net, .gather_ns = 1000000000};
    struct sim_outcome outcome;
    int wrong = 0;

    (void)state;
    assert_int_equal(sim_run_ranks(&setup, rank_looks, &wrong, &outcome), 0);
    assert_int_equal(outcome.failures, 0);
    assert_int_equal(wrong, 0);
    expect_real();
}

UNIT_TESTS(all_is_real_at_first, a_test_swaps_one_part, a_simulation_swaps_all_parts_and_back)
