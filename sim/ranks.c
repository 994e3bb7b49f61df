/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One all-gather: every rank copies what it gives into the table of this round; the last one to come wakes the others,
 * and each reads the whole table. Two tables take turns: a rank can be one round ahead of another, never two.
 */
#include "sim/ranks.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/device.h"
#include "sim/device.h"
#include "sim/conn.h"
#include "sim/proxy.h"
#include "sim/rules.h"
#include "util/runtime.h"

struct gather;

struct rank_task {
    struct gather *gather;
    int rank, result;
    epx_bootstrap boot;
};

struct gather {
    int nranks, arrived, failed;
    uint64_t round, timeout_ns;
    size_t bytes;
    char *table[2];
    size_t room[2];
    struct rank_task *tasks;
    int (*fn)(int rank, int n, epx_bootstrap *boot, void *arg);
    void *arg;
};

static void gather_fail(struct gather *m)
{
    m->failed = 1;
    sim_wake(m);
}

/* Puts this rank's part into the table; non-zero when it does not fit the others'. */
static int give(struct gather *m, int rank, const void *send, size_t bytes)
{
    const int turn = (int)(m->round & 1);

    if (m->arrived == 0) {
        m->bytes = bytes;
        if (m->room[turn] < bytes * (size_t)m->nranks) {
            free(m->table[turn]);
            m->room[turn] = bytes * (size_t)m->nranks;
            m->table[turn] = malloc(m->room[turn]);
        }
    }
    if (m->bytes != bytes || !m->table[turn])
        return -1;
    memcpy(m->table[turn] + (size_t)rank * bytes, send, bytes);
    return 0;
}

static int gather(void *context, const void *send, void *recv, size_t bytes)
{
    struct rank_task *task = context;
    struct gather *m = task->gather;
    const uint64_t round = m->round, deadline = sim_now() + m->timeout_ns;

    sim_point();
    if (m->failed)
        return 1;
    if (give(m, task->rank, send, bytes) != 0) {
        gather_fail(m);
        return 1;
    }
    if (++m->arrived == m->nranks) {
        m->arrived = 0;
        m->round++;
        sim_wake(m);
        sim_point();
    }
    while (m->round == round && !m->failed) {
        if (!sim_park(m, deadline, "waits for the other ranks in the all-gather") && m->round == round)
            gather_fail(m);
    }
    if (m->round == round)
        return 1;
    memcpy(recv, m->table[round & 1], bytes * (size_t)m->nranks);
    return 0;
}

static void rank_main(void *arg)
{
    struct rank_task *task = arg;
    struct gather *m = task->gather;

    task->result = m->fn(task->rank, m->nranks, &task->boot, m->arg);
    if (task->result && task->rank < m->nranks)
        gather_fail(m); /* those that wait for it need not */
}

static int tasks_make(struct gather *m, int count)
{
    m->tasks = calloc((size_t)count, sizeof(*m->tasks));
    if (!m->tasks)
        return -1;
    for (int r = 0; r < count; r++) {
        struct rank_task *task = &m->tasks[r];

        task->gather = m;
        task->rank = r;
        task->boot = (epx_bootstrap)EPX_BOOTSTRAP_INIT;
        task->boot.rank = r;
        task->boot.nranks = m->nranks;
        task->boot.allgather = r < m->nranks ? gather : NULL;
        task->boot.context = task;
        if (sim_spawn(SIM_PROGRAM, r, 0, rank_main, task) != 0)
            return -1;
    }
    return 0;
}

static struct {
    uint64_t end, ns;
} naps[SIM_MAX_RANKS]; /* of this run */

/* Whoever sleeps again and again sleeps longer and longer, up to a point: the wait for a rank that never comes takes
 * few steps. */
static void nap(uint64_t ns)
{
    const uint64_t most = 50000000;
    const int rank = sim_rank();
    const int again = naps[rank].end <= sim_now() && sim_now() - naps[rank].end < 100000;

    naps[rank].ns = again && naps[rank].ns < most ? naps[rank].ns + naps[rank].ns / 16 : again ? most : ns;
    if (naps[rank].ns < ns)
        naps[rank].ns = ns;
    sim_park(&naps[rank], sim_now() + naps[rank].ns, "sleeps");
    naps[rank].end = sim_now();
}

/* ---- The network -------------------------------------------------------------------------------------------- */

static uint64_t net_clock(void *context)
{
    (void)context;
    return sim_now();
}

static int net_process(void *context)
{
    (void)context;
    return sim_rank();
}

static int net_is_stopped(void *context, int process)
{
    (void)context;
    return sim_is_stopped(process);
}

static void net_notify(void *context, int rank, int index)
{
    (void)context;
    sim_proxy_notify(rank, index);
}

static void net_landed(void *context, int from, int to, int split, uint64_t at, uint32_t bytes)
{
    (void)context;
    sim_rule_landed(from, to, split, at, bytes);
}

static const struct control *net_control(void *context, const void *memory)
{
    (void)context;
    return sim_rule_control(memory);
}

static uint64_t net_next(void *self)
{
    return sim_net_next(self);
}

static void net_advance(void *self, uint64_t now_ns)
{
    sim_net_advance(self, now_ns);
}

static void net_rank_dies(void *self, int rank)
{
    sim_net_kill(self, rank);
}

static void net_rank_runs(void *self, int rank)
{
    sim_net_runs(self, rank);
}

static const struct sim_net_costs net_costs = {
    .put = cost_put, .events = cost_events, .depart = cost_depart, .land = cost_land};

static struct sim_net *net_begin(const struct sim_net_options *given, int spares)
{
    struct sim_net_options options = *given;
    struct sim_source source = {.next_ns = net_next, .advance = net_advance, .rank_dies = net_rank_dies};

    options.clock = net_clock;
    options.notify = net_notify;
    options.process = net_process;
    options.is_stopped = net_is_stopped;
    options.landed = net_landed;
    options.control = net_control;
    options.nranks += spares;
    if (options.stopped != SIM_NET_TAKES)
        source.rank_runs = net_rank_runs;
    if (cost_model())
        options.costs = &net_costs;
    source.self = sim_net_create(&options);
    if (source.self)
        sim_set_source(&source);
    return source.self;
}

static void net_end(struct sim_net *world, struct sim_outcome *outcome)
{
    if (!world)
        return;
    sim_net_totals(world, &outcome->net);
    if (outcome->net.late_reads)
        sim_rule_late_read(outcome->net.late_from, outcome->net.late_to);
    sim_set_source(NULL);
    sim_net_destroy(world);
    sim_proxy_reset();
}

/* ---- The whole ---------------------------------------------------------------------------------------------- */

/* Everything that host code and kernels run on is the simulation's from here to runtime_swap(NULL). */
static void swap_runtime(struct sim_net *world, const int *remote_rows)
{
    runtime_swap(&(const struct runtime){.now_ns = sim_now,
                                         .pause_ns = nap,
                                         .env = &sim_cpu_env,
                                         .device = &sim_device_ops,
                                         .conns = &sim_conn_ops,
                                         .proxies = world ? &sim_proxy_driver : NULL,
                                         .net_guest = world ? &net_sim_ops : NULL,
                                         .net_world = world,
                                         .remote_rows = remote_rows,
                                         .last_error = sim_last_error});
}

int sim_run_ranks(const struct sim_setup *setup, int (*fn)(int rank, int n, epx_bootstrap *boot, void *arg), void *arg,
                  struct sim_outcome *outcome)
{
    struct gather m = {.nranks = setup->sched.nranks, .timeout_ns = setup->gather_ns, .fn = fn, .arg = arg};
    struct sim_options sched = setup->sched;
    struct sim_net *world = NULL;
    int rc = -1;

    sched.nranks += setup->spares;
    memset(outcome, 0, sizeof(*outcome));
    memset(naps, 0, sizeof(naps));
    sim_rules_begin(setup->watch_rows, setup->rouse);
    if (setup->repeat)
        sim_rules_repeat();
    snprintf(outcome->stuck, sizeof(outcome->stuck), "no memory for the simulation");
    if (setup->cost) {
        if (cost_begin(setup->cost) != 0)
            return -1;
        sched.policy = SIM_EARLIEST;
        sched.wake_ns = cost_wake_ns;
        sched.ready = cost_ready;
    }
    if (sim_begin(&sched) != 0) {
        cost_end();
        return -1;
    }
    if (setup->net)
        world = net_begin(setup->net, setup->spares);
    swap_runtime(world, setup->remote_rows);
    sim_machines = setup->node_of;
    sim_conns_begin(setup->deaths_seen);
    if ((!setup->net || world) && tasks_make(&m, sched.nranks) == 0) {
        outcome->stuck[0] = 0;
        rc = sim_run(outcome->stuck, sizeof(outcome->stuck));
    }
    for (int r = 0; m.tasks && r < sched.nranks; r++)
        outcome->failures += m.tasks[r].result != 0;
    sim_totals(&outcome->totals);
    runtime_swap(NULL);
    net_end(world, outcome);
    snprintf(outcome->broken, sizeof(outcome->broken), "%s", sim_rules_broken());
    sim_rules_end();
    sim_conns_end();
    sim_machines = NULL;
    sim_end();
    cost_end();
    free(m.tasks);
    free(m.table[0]);
    free(m.table[1]);
    return rc;
}
