/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What authentication costs, on and off in one run: the start of 8 ranks (processes: rendezvous over TCP, a group on
 * one node and on two, its end), with the processor time of all ranks, which a busy machine changes less; and an
 * operation (dispatch and combine of low latency between two nodes).
 *
 *     perf_auth [starts [rounds]]
 *
 * Off and on take turns (off, on, on, off), and each is compared with the one beside it: what else the machine does
 * changes slowly and touches both. Of the differences the median counts, with the interval in which the true median
 * lies in 95 of 100 runs (order statistics: nothing is assumed of the distribution). A bar is held when the interval
 * ends below it, missed when it begins above it, and otherwise open: more starts or rounds make it narrower. Exit 1: a
 * bar is missed.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "util/clock.h"
#include "tests/lib/child.h"
#include "tests/lib/fixture.h"
#include "tests/lib/thread_boot.h"

enum { RANKS = 8, MOST = 20000 };
/* The bars. A start is judged by the processor time of its 8 ranks, which share at least two cores: on a busy machine
 * every message waits for a core, and the wall clock shows what others do. Two more messages pass per connection, which
 * take 0.1 ms. */
#define START_MS 5.0
#define CORES 2
#define OPERATION_PERCENT 1.0

static const char *const secrets[2] = {"none", "0123456789abcdef0123456789abcdef"};

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static void show(const char *what, const char *unit, double times[2][MOST], int count)
{
    for (int on = 0; on < 2; on++)
        qsort(times[on], (size_t)count, sizeof(double), ascending);
    for (int at = 0; at < 3; at++) {
        static const char *const names[] = {"least", "10 %", "median"};
        const int i = at == 0 ? 0 : at == 1 ? count / 10 : count / 2;
        printf("%-10s %-6s of %5d: off %9.3f %s, on %9.3f %s, difference %+8.3f %s (%+.2f %%)\n", what, names[at],
               count, times[0][i], unit, times[1][i], unit, times[1][i] - times[0][i], unit,
               (times[1][i] / times[0][i] - 1) * 100);
    }
}

/* The median of on - off, pair by pair, in units or in percent of off, and what that says of the bar. */
static int judge(const char *what, const char *unit, double times[2][MOST], int count, double bar)
{
    static double differences[MOST];
    const int relative = unit[0] == '%';
    const int reach = (int)(0.98 * sqrt((double)count)) + 1;
    const int low = count / 2 - reach < 0 ? 0 : count / 2 - reach;
    const int high = count / 2 + reach >= count ? count - 1 : count / 2 + reach;

    for (int i = 0; i < count; i++)
        differences[i] = (times[1][i] - times[0][i]) * (relative ? 100 / times[0][i] : 1);
    qsort(differences, (size_t)count, sizeof(double), ascending);
    printf("%-22s %+9.3f %-2s (%+.3f to %+.3f), at most %g %s: %s\n", what, differences[count / 2], unit,
           differences[low], differences[high], bar, unit,
           differences[high] <= bar  ? "held"
           : differences[low] <= bar ? "open: too few, or the machine is too busy"
                                     : "MISSED");
    return differences[low] > bar;
}

/* ---- Starts ------------------------------------------------------------------------------------------------------ */

static epx_group_config small_config(int ranks_per_node)
{
    epx_group_config config = fixture_config(60000);

    config.ranks_per_node = ranks_per_node;
    config.num_experts = RANKS;
    snprintf(config.net, sizeof(config.net), "ofi:tcp");
    return config;
}

static int be_rank(int rank, void *ranks_per_node)
{
    const epx_group_config config = small_config(*(const int *)ranks_per_node);

    return fixture_group(rank, RANKS, NULL, &config, NULL, NULL);
}

/* Of all ranks that have ended, in milliseconds. */
static double processor_ms(void)
{
    struct rusage used;

    getrusage(RUSAGE_CHILDREN, &used);
    return (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) * 1e3 +
           (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1e-3;
}

/* Milliseconds. */
static double start_all(int on, int ranks_per_node)
{
    const uint64_t begin = clock_ns();
    pid_t pids[RANKS];
    int failed;

    setenv("EPX_SECRET", secrets[on], 1);
    setenv("EPX_MASTER_PORTS", "17", 1);
    child_world(RANKS);
    child_start_ranks(pids, RANKS, be_rank, &ranks_per_node);
    failed = child_failures(pids, RANKS);
    if (failed)
        fprintf(stderr, "%d ranks failed\n", failed);
    return (double)(clock_ns() - begin) * 1e-6;
}

/* ---- Operations -------------------------------------------------------------------------------------------------- */

static double times[2][MOST], processor[2][MOST];

struct operations {
    int rounds, first; /* which group is created first: that alone makes a difference, which two runs cancel */
};

/* Both groups exist at once, and take turns. */
static int operate(int rank, int n, epx_bootstrap *boot, void *arg)
{
    const struct operations *run = arg;
    const int rounds = run->rounds;
    epx_group_config config = fixture_config(60000);
    struct fixture *s[2] = {calloc(1, sizeof(**s)), calloc(1, sizeof(**s))};
    char mine = 0, all[16];
    int rc = 0;

    config.ranks_per_node = 1;
    snprintf(config.net, sizeof(config.net), "ofi:tcp");
    for (int i = 0; i < 2 && !rc; i++) {
        const int on = i ^ run->first;
        if (rank == 0)
            setenv("EPX_SECRET", secrets[on], 1);
        rc = boot->allgather(boot->context, &mine, all, 1) || fixture_open(s[on], rank, n, boot, &config) ||
             boot->allgather(boot->context, &mine, all, 1);
    }
    for (int i = 0; i < rounds && !rc; i++) {
        const int on = (i ^ i >> 1) & 1; /* off, on, on, off */
        const uint64_t begin = clock_ns();

        rc = fixture_ll(s[on]);
        if (rank == 0)
            times[on][i / 2] = (double)(clock_ns() - begin) * 1e-3;
    }
    for (int on = 0; on < 2; on++) {
        if (rc)
            fprintf(stderr, "rank %d: %s\n", rank, s[on]->why);
        fixture_close(s[on]);
        free(s[on]);
    }
    return rc;
}

/* Two runs; a pair of the one is added to that of the other. */
static int measure_operations(int rounds)
{
    static double before[2][MOST];
    struct operations run = {.rounds = rounds};

    for (; run.first < 2; run.first++) {
        if (run_ranks(2, operate, &run))
            return -1;
        for (int on = 0; on < 2; on++)
            for (int i = 0; i < rounds / 2; i++) {
                times[on][i] = run.first ? (times[on][i] + before[on][i]) / 2 : times[on][i];
                before[on][i] = times[on][i];
            }
    }
    return 0;
}

int main(int argc, char **argv)
{
    const int starts = argc > 1 ? atoi(argv[1]) : 60;
    int rounds = argc > 2 ? atoi(argv[2]) : 20000, missed = 0;

    rounds = rounds > MOST ? MOST : rounds / 4 * 4;
    for (int ranks_per_node = 0; ranks_per_node <= 4 && starts; ranks_per_node += 4) {
        for (int i = 0; i < 2 * starts; i++) {
            const int on = (i ^ i >> 1) & 1;
            const double before = processor_ms();
            times[on][i / 2] = start_all(on, ranks_per_node);
            processor[on][i / 2] = processor_ms() - before;
        }
        missed += judge(ranks_per_node ? "start, 2 nodes" : "start, 1 node", "ms", processor, starts, START_MS * CORES);
        show(ranks_per_node ? "2 nodes" : "1 node", "ms", times, starts);
        show("processor", "ms", processor, starts);
    }
    if (rounds && measure_operations(rounds))
        return 1;
    if (rounds) {
        missed += judge("operation", "%", times, rounds / 2, OPERATION_PERCENT);
        show("operation", "us", times, rounds / 2);
    }
    return missed != 0;
}
