/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Routing of this rank's own tokens: counts per expert and per rank, and for every (token, k) its number among those.
 * Both modes start here. Deterministic whatever the number of agents:
 *
 *   1. the tokens are cut into chunks; each planner counts its own chunk in its own table
 *   2. barrier; for every key, the tables become offsets (what earlier chunks counted) and the totals are written
 *   3. barrier; each planner numbers its chunk, beginning at its offsets
 *   4. barrier; all tables of the handle are ready
 *
 * One planner alone begins with step 3. Where agents form blocks and the work is small, every block does all of it: it
 * costs less than three barriers of the launch. All of them write the same values, and only final ones.
 */
#ifndef EPX_KERNEL_ROUTE_H
#define EPX_KERNEL_ROUTE_H

#include "kernel/sync.h"

/* The i-th index as the caller gave it. */
KFN int64_t route_given(const struct route_in *in, int64_t i)
{
    return in->idx64 ? ((const int64_t *)in->topk)[i] : (int64_t)((const int32_t *)in->topk)[i];
}

KFN_STEP void route_report_bad(struct agent *ag, const struct group_dev *g, const struct route_in *in, int64_t bad)
{
    const int64_t i = bad - 1;

    report(ag, g, KSTATUS_ARGUMENT, PHASE_ROUTING, -1, g->experts, route_given(in, i), i / in->topk_n, i % in->topk_n);
}

KFN void route_total(const struct group_dev *g, const struct handle_dev *h, int key, int32_t total)
{
    if (key < g->experts)
        h->ecount[key] = total;
    else
        h->rcount[key - g->experts] = total;
}

#define ROUTE_PAIRS 32         /* least (token, k) pairs that are worth a planner of their own */
#define ROUTE_BATCH 8          /* loads in flight before the first result is used */
#define ROUTE_BLOCK_PAIRS 4096 /* most that every block counts for itself */

/* Who plans: the agents of a block, or of the launch; and their tables. */
struct planning {
    int block, planners, me, stride;
    int32_t *tables;
};

KFN struct planning route_share(struct agent *ag, const struct group_dev *g, const struct route_in *in)
{
    const int keys = g->experts + g->nranks, pairs = in->ntokens * in->topk_n;
    const int wanted = (pairs + ROUTE_PAIRS - 1) / ROUTE_PAIRS;
    const int agents = ag_count(ag) < g->max_agents ? ag_count(ag) : g->max_agents;
    struct planning plan = {0, agents, ag_index(ag), keys, g->tables};

#if AG_BLOCKS
    if (pairs <= ROUTE_BLOCK_PAIRS && ag_block_tables(ag, keys)) {
        plan.block = 1;
        plan.planners = ag_block_count(ag);
        plan.me = ag_block_index(ag);
        plan.stride = AG_BLOCK_KEYS;
        plan.tables = ag_block_tables(ag, keys);
    }
#endif
    if (wanted < plan.planners)
        plan.planners = wanted < 1 ? 1 : wanted;
    return plan;
}

KFN int route_barrier(struct agent *ag, const struct group_dev *g, const struct planning *plan)
{
    return plan->block ? block_barrier(ag, g, 0) : sync_barrier(ag, g);
}

/* Counts become offsets. `counts`: the first planner's, of this key. */
KFN_STEP void route_offsets(const struct group_dev *g, const struct handle_dev *h, int32_t *counts, int planners,
                            int stride, int key)
{
    int32_t run = 0;

    for (int first = 0; first < planners; first += ROUTE_BATCH) {
        int32_t n[ROUTE_BATCH];
        AG_UNROLL
        for (int j = 0; j < ROUTE_BATCH; j++)
            n[j] = first + j < planners ? counts[(size_t)(first + j) * (size_t)stride] : 0;
        AG_UNROLL
        for (int j = 0; j < ROUTE_BATCH; j++) {
            if (first + j < planners)
                counts[(size_t)(first + j) * (size_t)stride] = run;
            run += n[j];
        }
    }
    route_total(g, h, key, run);
}

/* The same for every planner of the launch: the lanes of one agent share out the planners of a key. */
KFN_STEP void route_offsets_all(struct agent *ag, const struct group_dev *g, const struct handle_dev *h,
                                const struct planning *plan, int keys)
{
    for (int key = ag_index(ag); key < keys; key += ag_count(ag)) {
        int32_t run = 0;
        AG_ROUNDS(ag, int, i, plan->planners)
        {
            int32_t *count = plan->tables + (size_t)(i < plan->planners ? i : 0) * (size_t)plan->stride + key;
            const int32_t n = i < plan->planners ? *count : 0;
            const int32_t before = run + (int32_t)ag_scan(ag, n);
            run += (int32_t)ag_sum(ag, n);
            if (i < plan->planners)
                *count = before;
        }
        if (ag_leader(ag))
            route_total(g, h, key, run);
    }
}

KFN_STEP int route_plan(struct agent *ag, const struct group_dev *g, struct handle_dev *h, const struct route_in *in)
{
    const int keys = g->experts + g->nranks;
    const struct planning plan = route_share(ag, g, in);
    const int mine = plan.me < plan.planners;
    const int t0 = (int)((int64_t)in->ntokens * plan.me / plan.planners);
    const int t1 = (int)((int64_t)in->ntokens * (plan.me + 1) / plan.planners);
    int32_t *table = plan.tables + (size_t)(mine ? plan.me : 0) * (size_t)plan.stride;
    struct route_kept kept;
    int64_t bad = 0;

    if (mine) {
        AG_EACH(ag, int, i, keys) table[i] = 0;
        ag_sync(ag);
    }
    if (plan.planners > 1) {
        if (mine)
            ag_route_count(ag, g, in, t0, t1, table, &kept);
        if (route_barrier(ag, g, &plan))
            return 1;
        if (plan.block)
            AG_EACH_BLOCK(ag, int, key, keys) route_offsets(g, h, plan.tables + key, plan.planners, plan.stride, key);
        else
            route_offsets_all(ag, g, h, &plan, keys);
        if (route_barrier(ag, g, &plan))
            return 1;
    }
    if (mine) {
        ag_route_number(ag, g, h, in, t0, t1, table, plan.planners > 1 ? &kept : NULL, &bad);
        if (bad)
            route_report_bad(ag, g, in, bad);
        ag_sync(ag);
        if (plan.planners == 1)
            AG_EACH(ag, int, key, keys) route_total(g, h, key, table[key]);
        if (plan.me == 0 && ag_leader(ag)) {
            h->state->ntokens = in->ntokens;
            h->state->topk = in->topk_n;
        }
    }
    return route_barrier(ag, g, &plan);
}

#endif
