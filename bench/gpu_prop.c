/* SPDX-License-Identifier: Apache-2.0 */
/* The property tests on a GPU machine, which need not have the library that make test uses:
 * gpu_prop ll|ht|mixed|nodes CASES. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support/prop.h"

/* Queues that a GPU has for the streams of a process: two streams in one wait for each other, and so would ranks. A group
 * has its default stream and two more (prop_run.c); one is for copies. */
enum { QUEUES = 32, GROUP_STREAMS = 3, OTHER_STREAMS = 1 };

static void fit_queues(struct prop_case *c, struct prop_rng *rng)
{
    (void)rng;
    if (c->nranks * c->ngroups * GROUP_STREAMS + OTHER_STREAMS > QUEUES)
        c->ngroups = 1;
}

/* Nodes cut out of the machine; what is between them passes rings, proxies and libfabric. */
static void cut_nodes(struct prop_case *c, struct prop_rng *rng)
{
    const int most = c->nranks / 2 > 0 ? c->nranks / 2 : 1;

    fit_queues(c, rng);
    c->ranks_per_node = 1 + prop_draw(rng, most);
    snprintf(c->net, sizeof(c->net), "ofi;%s", prop_chance(rng, 50) ? "tcp" : "shm");
}

int main(int argc, char **argv)
{
    const char *mode = argc > 1 ? argv[1] : "";
    const int cases = argc > 2 ? atoi(argv[2]) : 20, nodes = strcmp(mode, "nodes") == 0;
    int modes = EPX_LOW_LATENCY | EPX_HIGH_THROUGHPUT;

    if (strcmp(mode, "ll") == 0)
        modes = EPX_LOW_LATENCY;
    else if (strcmp(mode, "ht") == 0)
        modes = EPX_HIGH_THROUGHPUT;
    else if (strcmp(mode, "mixed") != 0 && !nodes) {
        fprintf(stderr, "usage: gpu_prop ll|ht|mixed|nodes [CASES]\n");
        return 2;
    }
    return prop_run("gpu_prop", mode, cases, modes, 8, nodes ? cut_nodes : fit_queues) ? 1 : 0;
}
