/* SPDX-License-Identifier: Apache-2.0 */
/*
 * --timing events: the operations of one rank, timed in steady state by the device's time stamps.
 *
 *      check     dispatch and combine of a seed, compared with the oracle; then by replays of graphs, with other
 *                routing
 *                and data (low latency) or the same (high throughput, where a graph has the row counts of its routing)
 *      measure   one graph of [ stamp | dispatch | stamp | combine ] * iterations: the rows dispatch and combine.
 *                Low latency also by graphs with a stamp after every tenth operation only, because a stamp takes time
 *                too: `pair` of dispatch and combine in turn, `dispatches` and `combines` of one kind in a row.
 *                High throughput also times the update, between two stamps and without a graph.
 *
 * On a device without graphs the same operations are queued directly. Between phases all ranks meet: ranks
 * that are threads share a context, in which setting up a graph may wait for kernels that run.
 */
#include <stdlib.h>

#include "bench.h"
#include "bench_worker.h"

enum { SERIES = 10, CALLS_UNTIL_IMPORTED = 3 };

/* The series of a rank, and where their stamps go. */
struct measurement {
    struct device_timers *timers;
    struct bench_series dispatch, combine; /* one operation each */
    struct bench_series rounds;            /* all rounds of dispatch and combine */
    struct bench_series tenths[3];         /* BENCH_EVENT_PAIR, _DISPATCHES, _COMBINES */
};

/* Series are issued through a function of the rank alone; ranks may be threads. */
static _Thread_local struct measurement *current;

static int is_ll(const struct bench_rank *rank)
{
    return rank->config->mode == EPX_LOW_LATENCY;
}

void bench_set_stage(struct bench_rank *rank, enum bench_stage stage)
{
    if (rank->self.rank == 0)
        __atomic_store_n(&rank->self.shm->stage, (uint32_t)stage, __ATOMIC_RELAXED);
}

/* ---- Series ----------------------------------------------------------------------------------------------------- */

int bench_series_make(struct bench_rank *rank, struct bench_series *series, int (*issue)(struct bench_rank *rank))
{
    struct device *device = bench_device(rank);
    epx_status status;
    int failed;

    *series = (struct bench_series){.issue = issue};
    if (!(device->ops->caps & DEVICE_GRAPHS))
        return 0;
    if (bench_call(rank, "capture", device->ops->graph_begin(device, rank->stream)) != 0)
        return -1;
    failed = issue(rank);
    status = device->ops->graph_end(device, rank->stream, &series->graph);
    bench_shm_step(&rank->self); /* of a long series, this alone takes seconds */
    return failed ? -1 : bench_call(rank, "end of capture", status);
}

int bench_series_run(struct bench_rank *rank, const struct bench_series *series)
{
    struct device *device = bench_device(rank);

    if (series->graph == NULL)
        return series->issue(rank);
    return bench_call(rank, "graph launch", device->ops->graph_launch(device, series->graph, rank->stream));
}

void bench_series_free(struct bench_rank *rank, struct bench_series *series)
{
    struct device *device = bench_device(rank);

    if (series->graph != NULL)
        device->ops->graph_destroy(device, series->graph);
    series->graph = NULL;
}

static int stamp(struct bench_rank *rank, int i)
{
    struct device *device = bench_device(rank);

    return bench_call(rank, "time stamp", device->ops->timers_record(device, current->timers, i, rank->stream));
}

static int issue_rounds(struct bench_rank *rank)
{
    const int rounds = rank->config->iters + rank->config->warmup;
    int i;

    for (i = 0; i < rounds; i++) {
        if (stamp(rank, 2 * i) != 0 || bench_issue_dispatch(rank) != 0 || stamp(rank, 2 * i + 1) != 0 ||
            bench_issue_combine(rank) != 0)
            return -1;
        bench_shm_step(&rank->self);
    }
    return stamp(rank, 2 * rounds);
}

/* A stamp after every tenth. */
static int issue_tenths(struct bench_rank *rank, int dispatch, int combine)
{
    const int count = (rank->config->iters + rank->config->warmup) * SERIES;
    int i;

    if (stamp(rank, 0) != 0)
        return -1;
    for (i = 1; i <= count; i++) {
        if ((dispatch && bench_issue_dispatch(rank) != 0) || (combine && bench_issue_combine(rank) != 0) ||
            (i % SERIES == 0 && stamp(rank, i / SERIES) != 0))
            return -1;
        bench_shm_step(&rank->self);
    }
    return 0;
}

static int issue_pairs(struct bench_rank *rank)
{
    return issue_tenths(rank, 1, 1);
}

static int issue_dispatches(struct bench_rank *rank)
{
    return issue_tenths(rank, 1, 0);
}

static int issue_combines(struct bench_rank *rank)
{
    return issue_tenths(rank, 0, 1);
}

static int make_series(struct bench_rank *rank, struct measurement *m)
{
    static int (*const tenths[3])(struct bench_rank *) = {issue_pairs, issue_dispatches, issue_combines};
    struct device *device = bench_device(rank);
    int i;

    bench_set_stage(rank, BENCH_CAPTURING);
    if (bench_series_make(rank, &m->dispatch, bench_issue_dispatch) != 0 ||
        bench_series_make(rank, &m->combine, bench_issue_combine) != 0)
        return -1;
    if (rank->config->iters == 0)
        return 0;
    if (bench_call(
            rank, "time stamps",
            device->ops->timers_create(device, (rank->config->iters + rank->config->warmup) * 2 + 1, &m->timers)) != 0)
        return -1;
    if (bench_series_make(rank, &m->rounds, issue_rounds) != 0)
        return -1;
    for (i = 0; i < 3 && is_ll(rank); i++)
        if (bench_series_make(rank, &m->tenths[i], tenths[i]) != 0)
            return -1;
    return 0;
}

static void free_series(struct bench_rank *rank, struct measurement *m)
{
    struct device *device = bench_device(rank);
    int i;

    bench_series_free(rank, &m->dispatch);
    bench_series_free(rank, &m->combine);
    bench_series_free(rank, &m->rounds);
    for (i = 0; i < 3; i++)
        bench_series_free(rank, &m->tenths[i]);
    if (m->timers != NULL)
        device->ops->timers_destroy(device, m->timers);
}

/* ---- Check ------------------------------------------------------------------------------------------------------ */

/* One dispatch and combine of a seed. *copied: bytes that combine copied before other ranks read them. */
static int run_once(struct bench_rank *rank, uint64_t seed, const struct measurement *m, uint64_t *copied)
{
    epx_stats before = EPX_STATS_INIT, after = EPX_STATS_INIT;

    if (bench_work_seed(&rank->work, seed) != 0)
        return bench_complain(rank, "no memory for the workload");
    bench_work_poison(&rank->work);
    if (bench_issue_update(rank) != 0 || bench_sync(rank, "update") != 0)
        return -1;
    if ((m != NULL ? bench_series_run(rank, &m->dispatch) : bench_issue_dispatch(rank)) != 0)
        return -1;
    if (bench_sync(rank, "dispatch") != 0 ||
        bench_call(rank, "epx_group_stats", epx_group_stats(rank->group, &before)) != 0)
        return -1;
    if ((m != NULL ? bench_series_run(rank, &m->combine) : bench_issue_combine(rank)) != 0)
        return -1;
    if (bench_sync(rank, "combine") != 0 ||
        bench_call(rank, "epx_group_stats", epx_group_stats(rank->group, &after)) != 0)
        return -1;
    *copied = after.bytes_local - before.bytes_local;
    bench_shm_step(&rank->self);
    return 0;
}

/* m: by graphs; NULL: by plain calls. */
static int check(struct bench_rank *rank, uint64_t seed, const struct measurement *m, uint64_t *copied)
{
    const struct bench_config *c = rank->config;
    struct mismatch mismatch = {{0}};
    int last = rank->self.rank == c->ranks - 1;

    if (run_once(rank, seed, m, copied) != 0)
        return -1;
    if (c->check && last && (c->corrupt == 1 || c->corrupt == 2))
        bench_work_corrupt(&rank->work, c->corrupt == 2);
    if (!c->check || bench_work_check(&rank->work, &mismatch) == 0)
        return 0;
    bench_shm_fail(rank->self.shm, BENCH_MISMATCH, "epx rank %d, seed %llu%s: %s", rank->self.rank,
                   (unsigned long long)seed, m != NULL ? ", replayed" : "", mismatch.text);
    return -1;
}

/* --expect-zero-copy: the caller's memory is read in place once all ranks have imported it, which takes some calls. */
static int expect_zero_copy(struct bench_rank *rank, uint64_t copied)
{
    if (!rank->config->zero_copy || copied == 0)
        return 0;
    return bench_complain(rank, "combine copied %llu bytes before other ranks read them; --expect-zero-copy expects 0",
                          (unsigned long long)copied);
}

static int check_calls(struct bench_rank *rank)
{
    const int calls = rank->config->zero_copy ? CALLS_UNTIL_IMPORTED : 1;
    uint64_t copied = 0;
    int i;

    bench_set_stage(rank, BENCH_CHECKING);
    for (i = 0; i < calls; i++)
        if (check(rank, rank->config->seed, NULL, &copied) != 0)
            return -1;
    return expect_zero_copy(rank, copied);
}

static int check_graphs(struct bench_rank *rank, const struct measurement *m)
{
    const uint64_t seed = rank->config->seed;
    uint64_t copied = 0;

    if (!rank->config->check)
        return 0;
    bench_set_stage(rank, BENCH_CHECKING);
    if (is_ll(rank) && check(rank, seed + 1, m, &copied) != 0)
        return -1;
    return check(rank, seed, m, &copied) != 0 ? -1 : expect_zero_copy(rank, copied);
}

/* ---- Measure ---------------------------------------------------------------------------------------------------- */

/* Nanoseconds as whole numbers: bench_percentile sorts those. */
static void store(struct bench_rank *rank, enum bench_event_op op, uint64_t *ns, int n)
{
    struct bench_event_times *times = &rank->self.shm->event_times[op][rank->self.rank];

    times->p50 = bench_percentile(ns, n, 50) / 1e3;
    times->p99 = bench_percentile(ns, n, 99) / 1e3;
    times->least = (double)ns[0] / 1e3;
}

/* Every `step`-th interval after the warm-up, from stamp `first` on; each has `per` operations. */
static int store_intervals(struct bench_rank *rank, enum bench_event_op op, int first, int step, int per, uint64_t *ns)
{
    struct device *device = bench_device(rank);
    int i;

    for (i = 0; i < rank->config->iters; i++) {
        const int from = (i + rank->config->warmup) * step + first;
        double us = 0;

        if (bench_call(rank, "time stamps",
                       device->ops->timers_elapsed(device, current->timers, from, from + 1, &us)) != 0)
            return -1;
        ns[i] = us > 0 ? (uint64_t)(us * 1e3 / per) : 0;
    }
    store(rank, op, ns, rank->config->iters);
    return 0;
}

static int measure_updates(struct bench_rank *rank, uint64_t *ns)
{
    struct device *device = bench_device(rank);
    int i;

    for (i = 0; i < rank->config->iters; i++) {
        double us = 0;

        if (stamp(rank, 0) != 0 || bench_issue_update(rank) != 0 || stamp(rank, 1) != 0 ||
            bench_sync(rank, "update") != 0 ||
            bench_call(rank, "time stamps", device->ops->timers_elapsed(device, current->timers, 0, 1, &us)) != 0)
            return -1;
        ns[i] = us > 0 ? (uint64_t)(us * 1e3) : 0;
        bench_shm_step(&rank->self);
    }
    store(rank, BENCH_EVENT_UPDATE, ns, rank->config->iters);
    return 0;
}

static int measure(struct bench_rank *rank, const struct measurement *m, uint64_t *ns)
{
    int i;

    bench_set_stage(rank, BENCH_MEASURING);
    if (bench_series_run(rank, &m->rounds) != 0 || bench_sync_series(rank, "measured operations") != 0 ||
        store_intervals(rank, BENCH_EVENT_DISPATCH, 0, 2, 1, ns) != 0 ||
        store_intervals(rank, BENCH_EVENT_COMBINE, 1, 2, 1, ns) != 0)
        return -1;
    if (!is_ll(rank))
        return measure_updates(rank, ns);
    for (i = 0; i < 3; i++)
        if (bench_series_run(rank, &m->tenths[i]) != 0 || bench_sync_series(rank, "measured operations") != 0 ||
            store_intervals(rank, BENCH_EVENT_PAIR + (unsigned)i, 0, 1, SERIES, ns) != 0)
            return -1;
    return 0;
}

static int check_and_measure(struct bench_rank *rank, struct measurement *m)
{
    uint64_t *ns = calloc((size_t)rank->config->iters + 1, sizeof(*ns));
    int failed;

    current = m;
    failed = ns == NULL || bench_shm_barrier(&rank->self) != 0 || check_calls(rank) != 0 ||
             bench_shm_barrier(&rank->self) != 0 || make_series(rank, m) != 0 || bench_shm_barrier(&rank->self) != 0 ||
             check_graphs(rank, m) != 0 || (rank->config->iters > 0 && measure(rank, m, ns) != 0);
    free(ns);
    return failed ? -1 : 0;
}

/* ---- The rank --------------------------------------------------------------------------------------------------- */

static int run_replays(struct bench_rank *rank)
{
    if (bench_shm_barrier(&rank->self) != 0 || check_calls(rank) != 0 || bench_shm_barrier(&rank->self) != 0)
        return -1;
    bench_set_stage(rank, BENCH_REPLAYING);
    return bench_replay_run(rank);
}

static int run_measurement(struct bench_rank *rank)
{
    struct measurement m = {0};
    const int failed = check_and_measure(rank, &m);

    /* Queued time stamps are written until the stream is done, also after a failure. */
    if (epx_stream_sync(rank->group, rank->stream) == EPX_OK || !failed)
        free_series(rank, &m);
    return failed;
}

int bench_events_run(struct bench_rank *rank)
{
    struct bench_command command;
    int failed = 0;

    if (bench_call(rank, "epx_stream_create", epx_stream_create(rank->group, &rank->stream)) != 0)
        return -1;
    while (!failed && bench_shm_next(&rank->self, &command) == 0 && !command.quit) {
        failed = rank->config->replays > 0 ? run_replays(rank) : run_measurement(rank);
        if (!failed)
            bench_shm_done(&rank->self);
    }
    if (!failed)
        failed = bench_call(rank, "epx_stream_destroy", epx_stream_destroy(rank->group, rank->stream));
    rank->stream = NULL;
    return failed;
}
