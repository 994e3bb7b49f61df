/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Routing of this rank's own tokens: counts per expert and per rank, and for every (token, k) its number among those.
 * Both modes start here. Deterministic whatever the number of agents:
 *
 *   1. the tokens are cut into chunks; each planner counts and numbers its own chunk in its own table
 *   2. barrier; for every key, the tables become offsets (what earlier chunks counted) and the totals are written
 *   3. barrier; each planner adds its offsets to its chunk's numbers
 *   4. barrier; all tables of the handle are ready
 */
#ifndef EPX_KERNEL_ROUTE_H
#define EPX_KERNEL_ROUTE_H

#include "kernel/sync.h"

KFN int32_t *route_table(const struct group_dev *g, int planner)
{
    return g->tables + (size_t)planner * (size_t)(g->experts + g->nranks);
}

KFN_STEP void route_report_bad(struct agent *ag, const struct group_dev *g, const struct route_in *in, int64_t bad)
{
    const int64_t i = bad - 1;
    const int64_t value = in->idx64 ? ((const int64_t *)in->topk)[i] : ((const int32_t *)in->topk)[i];
    report(ag, g, KSTATUS_ARGUMENT, PHASE_ROUTING, -1, g->experts, value, i / in->topk_n, i % in->topk_n);
}

KFN void route_total(const struct group_dev *g, const struct handle_dev *h, int key, int32_t total)
{
    if (key < g->experts)
        h->ecount[key] = total;
    else
        h->rcount[key - g->experts] = total;
}

#define ROUTE_PAIRS 32 /* least (token, k) pairs that are worth a planner of their own */
#define ROUTE_BATCH 8  /* tables that are read before the first is looked at */

KFN_STEP int route_plan(struct agent *ag, const struct group_dev *g, struct handle_dev *h, const struct route_in *in)
{
    const int keys = g->experts + g->nranks;
    const int wanted = (in->ntokens * in->topk_n + ROUTE_PAIRS - 1) / ROUTE_PAIRS;
    const int most = ag_count(ag) < g->max_agents ? ag_count(ag) : g->max_agents;
    const int planners = wanted < 1 ? 1 : wanted < most ? wanted : most;
    const int me = ag_index(ag);
    const int t0 = (int)((int64_t)in->ntokens * me / planners);
    const int t1 = (int)((int64_t)in->ntokens * (me + 1) / planners);
    int64_t bad = 0;

    if (me < planners) {
        int32_t *table = route_table(g, me);
        AG_EACH(ag, int, i, keys) table[i] = 0;
        ag_sync(ag);
        ag_route_chunk(ag, g, h, in, t0, t1, table, &bad);
        if (bad)
            route_report_bad(ag, g, in, bad);
    }
    if (me == 0 && ag_leader(ag)) {
        h->ntokens = in->ntokens;
        h->topk = in->topk_n;
    }
    if (sync_barrier(ag, g))
        return 1;
    AG_EACH_ALL(ag, int, key, keys)
    {
        int32_t run = 0;
        for (int first = 0; first < planners; first += ROUTE_BATCH) {
            int32_t n[ROUTE_BATCH];
            AG_UNROLL
            for (int j = 0; j < ROUTE_BATCH; j++)
                n[j] = first + j < planners ? route_table(g, first + j)[key] : 0;
            AG_UNROLL
            for (int j = 0; j < ROUTE_BATCH; j++) {
                if (first + j < planners)
                    route_table(g, first + j)[key] = run;
                run += n[j];
            }
        }
        route_total(g, h, key, run);
    }
    if (sync_barrier(ag, g))
        return 1;
    if (me > 0 && me < planners) {
        const int32_t *table = route_table(g, me);
        const int K = in->topk_n;
        AG_EACH(ag, int64_t, j, (int64_t)(t1 - t0) * K)
        {
            const int64_t i = (int64_t)t0 * K + j;
            const int32_t id = h->ids[i];
            if (id >= 0)
                h->eidx[i] += table[id];
            if (h->ridx[i] >= 0)
                h->ridx[i] += table[g->experts + id / g->local_experts];
        }
    }
    return planners > 1 ? sync_barrier(ag, g) : 0;
}

#endif
