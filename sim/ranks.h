/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A whole simulation: ranks are tasks with an all-gather of the simulation's own. The simulated device, clock,
 * connections and network take the place of the real ones (util/runtime.h) until all ranks have ended.
 */
#ifndef EPX_SIM_RANKS_H
#define EPX_SIM_RANKS_H

#include "epx/epx.h"
#include "sim/net.h"
#include "sim/cost.h"
#include "sim/sched.h"

struct sim_setup {
    struct sim_options sched;
    const struct sim_net_options *net; /* NULL = none */
    uint64_t gather_ns;                /* how long one all-gather waits for the other ranks */
    int watch_rows;                    /* of combine: by whom they were written (sim/rules.h) */
    int repeat;                        /* ranks recover until all have */
    int rouse;                         /* a rank that is masked most often wakes up soon */
    const uint8_t *node_of;            /* [nranks]: which machine each rank is on; NULL = all on one */
    const struct cost_setup *cost;     /* NULL = virtual time means nothing; else see sim/cost.h */
    int spares;                        /* processes behind the ranks, without a bootstrap: they may join */
    int deaths_seen;                   /* connections (boot/conn.h) of a dead rank are closed; else they hang */
    const int *remote_rows;            /* or NULL: as in struct runtime */
};

struct sim_outcome {
    int failures; /* ranks that returned non-zero */
    struct sim_totals totals;
    struct sim_net_totals net;
    char stuck[1500]; /* "" or who waits for what */
    char broken[240]; /* "" or how the rule of completion was broken (sim/rules.h) */
};

/* Runs fn(rank, n, boot, arg) for every rank, and with rank = n and more for spares. Returns 0 when all have ended,
 * whatever they returned. */
int sim_run_ranks(const struct sim_setup *setup, int (*fn)(int rank, int n, epx_bootstrap *boot, void *arg), void *arg,
                  struct sim_outcome *outcome);

#endif
