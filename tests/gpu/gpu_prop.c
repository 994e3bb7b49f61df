/* SPDX-License-Identifier: Apache-2.0 */
/* The property tests on a GPU machine, which need not have the library that make test uses:
 * gpu_prop ll|ht|mixed|nodes|late|late-nodes CASES. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/lib/prop.h"

enum { BOTH = EPX_LOW_LATENCY | EPX_HIGH_THROUGHPUT };

/* Queues that a GPU has for the streams of a process at most: streams that share one may wait for each other, and so
 * would ranks. A group has its default stream and two more (prop_run.c); one is for copies. */
enum { QUEUES = 32, GROUP_STREAMS = 3, OTHER_STREAMS = 1 };

static void fit_queues(struct prop_case *c, struct prop_rng *rng)
{
    (void)rng;
    if (c->nranks * c->ngroups * GROUP_STREAMS + OTHER_STREAMS > QUEUES)
        c->ngroups = 1;
}

/* Nodes cut out of the machine; what is between them passes rings, proxies and libfabric: over tcp, for ranks are
 * threads here, and shm is for processes. */
static void cut_nodes(struct prop_case *c, struct prop_rng *rng)
{
    const int most = c->nranks / 2 > 0 ? c->nranks / 2 : 1;

    fit_queues(c, rng);
    c->ranks_per_node = 1 + prop_draw(rng, most);
    snprintf(c->net, sizeof(c->net), "ofi:tcp");
}

/* One rank comes too late to one of its operations: a status on all ranks or right results, and those that mask it go
 * on. */
static void come_late(struct prop_case *c, struct prop_rng *rng)
{
    fit_queues(c, rng);
    c->ngroups = 1;
    c->registered = 0;
    c->timeout_ms = 400;
    c->late = 1 + prop_draw(rng, c->nranks);
    c->late_from = prop_draw(rng, 3);
    c->may_fail = 1;
    c->recover = c->enable_mask;
}

static void come_late_between_nodes(struct prop_case *c, struct prop_rng *rng)
{
    cut_nodes(c, rng);
    come_late(c, rng);
    c->timeout_ms = 800; /* connecting is part of it */
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        int modes;
        void (*change)(struct prop_case *c, struct prop_rng *rng);
    } kinds[] = {
        {"ll", EPX_LOW_LATENCY, fit_queues}, {"ht", EPX_HIGH_THROUGHPUT, fit_queues},
        {"mixed", BOTH, fit_queues},         {"nodes", BOTH, cut_nodes},
        {"late", BOTH, come_late},           {"late-nodes", BOTH, come_late_between_nodes},
    };
    const char *name = argc > 1 ? argv[1] : "";
    const int cases = argc > 2 ? atoi(argv[2]) : 20;
    uint64_t ranks = 0, rounds = 0;
    int failed;

    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        if (strcmp(name, kinds[i].name) != 0)
            continue;
        failed = prop_run("gpu_prop", name, cases, kinds[i].modes, 8, kinds[i].change);
        prop_recoveries(&ranks, &rounds);
        printf("%llu operations ended with a status, %llu ranks went on for %llu rounds\n",
               (unsigned long long)prop_excused(), (unsigned long long)ranks, (unsigned long long)rounds);
        if (strncmp(name, "late", 4) == 0 && !prop_excused()) {
            fprintf(stderr, "gpu_prop, %s: no rank was late\n", name);
            return 1;
        }
        return failed != 0;
    }
    fprintf(stderr, "usage: gpu_prop ll|ht|mixed|nodes|late|late-nodes [CASES]\n");
    return 2;
}
