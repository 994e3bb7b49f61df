/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where tokens would go: counts per rank, node and expert, and which ranks each token goes to. Local: nothing is sent,
 * and no mask is looked at.
 *
 *   1. each agent marks the ranks of its own tokens and counts in its table (a table of its block, where there are
 *   blocks) 2. the tables are added up in layout_counts; the agent that comes last writes the results and clears the
 *   sums
 */
#ifndef EPX_KERNEL_LAYOUT_H
#define EPX_KERNEL_LAYOUT_H

#include "kernel/route.h"

KFN int layout_node(const struct group_dev *g, int rank)
{
    return g->nnodes > 1 ? g->node_of[rank] : 0;
}

/* Is entry k the first of its token whose expert is on the same rank; on the same node? */
KFN int layout_first(const struct layout_count_params *p, int64_t t, int k, int rank, int by_node)
{
    for (int j = 0; j < k; j++) {
        const int64_t id = route_given(&p->route, t * p->route.topk_n + j);
        if (id < 0 || id >= p->experts)
            continue;
        const int other = (int)id / p->local_experts;
        if (by_node ? layout_node(p->g, other) == layout_node(p->g, rank) : other == rank)
            return 0;
    }
    return 1;
}

/* Entry i of the top-k indices. */
KFN void layout_entry(const struct layout_count_params *p, int64_t i, int64_t id, int32_t *table)
{
    const struct group_dev *g = p->g;
    const int64_t t = i / p->route.topk_n;
    const int k = (int)(i % p->route.topk_n), rank = (int)id / p->local_experts;

    ag_table_add(&table[id], 1);
    if (layout_first(p, t, k, rank, 0)) {
        ag_table_add(&table[p->experts + rank], 1);
        if (p->in_rank)
            p->in_rank[t * g->nranks + rank] = 1;
    }
    if (p->per_node && layout_first(p, t, k, rank, 1))
        ag_table_add(&table[p->experts + g->nranks + layout_node(g, rank)], 1);
}

/* This agent's tokens. Returns 1 + the place of a bad index, or 0. */
KFN_STEP int64_t layout_tokens(struct agent *ag, const struct layout_count_params *p, int32_t *table)
{
    const int64_t B = p->route.ntokens, R = p->g->nranks, A = ag_count(ag), me = ag_index(ag);
    const int64_t t0 = B * me / A, t1 = B * (me + 1) / A, K = p->route.topk_n;
    int64_t bad = 0;

    if (p->in_rank)
        ag_zero(ag, p->in_rank + t0 * R, (size_t)((t1 - t0) * R));
    ag_sync(ag);
    AG_EACH(ag, int64_t, i, (t1 - t0) * K)
    {
        const int64_t id = route_given(&p->route, t0 * K + i);
        if (id < -1 || id >= p->experts)
            bad = t0 * K + i + 1;
        else if (id >= 0)
            layout_entry(p, t0 * K + i, id, table);
    }
    return bad;
}

KFN void layout_total(const struct layout_count_params *p, int key, int32_t total)
{
    const int R = p->g->nranks;

    if (key < p->experts) {
        if (p->per_expert)
            p->per_expert[key] = total;
    } else if (key < p->experts + R) {
        if (p->per_rank)
            p->per_rank[key - p->experts] = total;
    } else if (p->per_node) {
        p->per_node[key - p->experts - R] = total;
    }
}

/* What every agent counts in: a table of its block, if it fits the block's memory, else its own. */
KFN int32_t *layout_table(struct agent *ag, const struct layout_count_params *p, int keys, int *shared)
{
    *shared = 0;
#if AG_BLOCKS
    *shared = ag_block_memory(ag, keys) != NULL;
    if (*shared)
        return ag_block_memory(ag, keys);
#endif
    return p->g->tables + (size_t)ag_index(ag) * (size_t)keys;
}

/* The agents of a block meet, where they share a table. */
KFN void layout_meet(struct agent *ag, int shared)
{
#if AG_BLOCKS
    if (shared)
        ag_block_any(ag, 0);
#else
    (void)shared;
#endif
    ag_sync(ag);
}

/* The first bad index of this agent's tokens, for the message. Rare. */
KFN_STEP void layout_report_bad(struct agent *ag, const struct layout_count_params *p)
{
    const int64_t B = p->route.ntokens, A = ag_count(ag), me = ag_index(ag), K = p->route.topk_n;
    int64_t i = B * me / A * K;
    int64_t id = route_given(&p->route, i);

    while (id >= -1 && id < p->experts && i + 1 < B * (me + 1) / A * K)
        id = route_given(&p->route, ++i);
    report(ag, p->g, KSTATUS_ARGUMENT, PHASE_ROUTING, -1, p->experts, id, i / K, i % K);
}

#define LAYOUT_BATCH 8 /* sums of a lane that are read before the first is written */

/* Sums first, first + AG_LANES, ..., which are zero afterwards, for the next launch. By each lane for itself. */
KFN void layout_write(const struct layout_count_params *p, int first, int keys)
{
    int32_t *counts = p->g->layout_counts;
    int32_t n[LAYOUT_BATCH];

    AG_UNROLL
    for (int j = 0; j < LAYOUT_BATCH; j++)
        n[j] = first + j * AG_LANES < keys ? counts[first + j * AG_LANES] : 0;
    AG_UNROLL
    for (int j = 0; j < LAYOUT_BATCH; j++) {
        if (first + j * AG_LANES >= keys)
            continue;
        layout_total(p, first + j * AG_LANES, n[j]);
        counts[first + j * AG_LANES] = 0;
    }
}

KFN void layout_run(struct agent *ag, const struct layout_count_params *p)
{
    const struct group_dev *g = p->g;
    const int keys = p->experts + g->nranks + g->nnodes;
    int shared = 0;
    int32_t *table = layout_table(ag, p, keys, &shared);

    if (shared)
        AG_EACH_BLOCK(ag, int, key, keys) table[key] = 0;
    else
        AG_EACH(ag, int, key, keys) table[key] = 0;
    layout_meet(ag, shared);
    if (ag_any(ag, layout_tokens(ag, p, table) != 0))
        layout_report_bad(ag, p);
    layout_meet(ag, shared);
    if (shared)
        AG_EACH_BLOCK(ag, int, key, keys) ag_add_device(&g->layout_counts[key], table[key]);
    else
        AG_EACH(ag, int, key, keys) ag_add_device(&g->layout_counts[key], table[key]);
    ag_sync(ag);
    if (ag_count(ag) > 1 && !ag_last(ag, (uint32_t *)&g->layout_counts[g->experts + 2 * g->nranks], 1))
        return;
    for (int first = ag_lane(ag); first < keys; first += LAYOUT_BATCH * AG_LANES)
        layout_write(p, first, keys);
}

KFN void kernel_layout_count(struct agent *ag, const struct layout_count_params *p)
{
    ag_begin(ag, p->g->timeout_ns,
             control_of(p->g, p->g->rank)); /* nothing here depends on peers: also after a failure */
    layout_run(ag, p);
}

#endif
