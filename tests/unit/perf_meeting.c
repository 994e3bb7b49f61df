/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the creation of a group takes: ranks are light processes that connect over TCP on loopback. Prints the time from
 * the moment when all processes are there to the last return of epx_group_create, and the processor time of all ranks,
 * which a busy machine changes less; and that of rank 0, to which all others talk, and of the last rank in it.
 *
 *     perf_meeting [ranks [ranks_per_node [mask [repeats [before]]]]]        0 ranks per node: one node
 *
 * before: libfabric is initialised before the ranks are forked, which leaves out what its first call takes in each.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "net/net.h"
#include "tests/lib/child.h"
#include "tests/lib/fixture.h"
#include "util/clock.h"

struct shared {
    int ranks, ready, failed;
    epx_group_config config;
    uint64_t begin, created; /* the last rank's */
    double used_s[2];        /* in epx_group_create: rank 0's, the last rank's */
};

static void at_most(uint64_t *word, uint64_t value)
{
    uint64_t seen = __atomic_load_n(word, __ATOMIC_RELAXED);

    while (seen < value && !__atomic_compare_exchange_n(word, &seen, value, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
}

static epx_group_config small_config(int ranks, int per_node, int mask)
{
    epx_group_config config = fixture_config(100000);

    config.ranks_per_node = per_node;
    config.num_experts = ranks;
    config.num_agents = 1;
    config.enable_mask = mask;
    config.modes = EPX_LOW_LATENCY;
    config.max_tokens_per_rank = 2;
    snprintf(config.net, sizeof(config.net), "ofi:tcp");
    return config;
}

static double processor_s(int who)
{
    struct rusage used;

    getrusage(who, &used);
    return (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
           (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1e-6;
}

static int is_created(struct fixture *s)
{
    struct shared *shared = s->arg;

    at_most(&shared->created, clock_ns());
    if (s->rank == 0 || s->rank == s->nranks - 1)
        shared->used_s[s->rank > 0] += processor_s(RUSAGE_SELF);
    return 0;
}

static int be_rank(int rank, void *arg)
{
    struct shared *shared = arg;
    const int ranks = shared->ranks;

    if (__atomic_add_fetch(&shared->ready, 1, __ATOMIC_ACQ_REL) == ranks)
        shared->begin = clock_ns();
    while (__atomic_load_n(&shared->ready, __ATOMIC_ACQUIRE) < ranks)
        usleep(1000);
    if (rank == 0 || rank == ranks - 1)
        shared->used_s[rank > 0] = -processor_s(RUSAGE_SELF);
    return fixture_group(rank, ranks, NULL, &shared->config, is_created, shared);
}

static int meet(int ranks, int per_node, int mask)
{
    struct shared *shared = child_share(sizeof(*shared));
    const double before = processor_s(RUSAGE_CHILDREN);
    double used;
    pid_t *pids = calloc((size_t)ranks, sizeof(*pids));
    uint64_t end;

    setenv("EPX_SECRET", "0123456789abcdef0123456789abcdef", 1);
    shared->ranks = ranks;
    shared->config = small_config(ranks, per_node, mask);
    child_world(ranks);
    child_start_ranks(pids, ranks, be_rank, shared);
    shared->failed = child_failures(pids, ranks);
    end = clock_ns();
    used = processor_s(RUSAGE_CHILDREN) - before;
    printf("%4d ranks, %3d per node%s: created %8.3f s, ended %8.3f s, processor time %7.2f s (%.1f ms per rank), in "
           "epx_group_create rank 0 %.0f ms, rank %d %.0f ms%s\n",
           ranks, per_node, mask ? ", mask" : "", (double)(shared->created - shared->begin) * 1e-9,
           (double)(end - shared->begin) * 1e-9, used, used * 1e3 / ranks, shared->used_s[0] * 1e3, ranks - 1,
           shared->used_s[1] * 1e3, shared->failed ? "  FAILED" : "");
    fflush(stdout);
    free(pids);
    return shared->failed;
}

int main(int argc, char **argv)
{
    const int ranks = argc > 1 ? atoi(argv[1]) : 64, per_node = argc > 2 ? atoi(argv[2]) : 0,
              mask = argc > 3 ? atoi(argv[3]) : 0, repeats = argc > 4 ? atoi(argv[4]) : 3;
    char text[256];
    int failed = 0;

    if (argc > 5 && atoi(argv[5]) && net_ofi_ops.probe("tcp", text, sizeof(text)) != EPX_OK) {
        fprintf(stderr, "perf_meeting: %s\n", text);
        return 1;
    }
    for (int i = 0; i < repeats; i++)
        failed += meet(ranks, per_node, mask);
    return failed != 0;
}
