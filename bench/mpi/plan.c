/* SPDX-License-Identifier: Apache-2.0 */
#include "plan.h"

#include <stdlib.h>
#include <string.h>

#include "epx/epx.h"

static int *ints(int64_t n)
{
    return malloc((size_t)(n > 0 ? n : 1) * sizeof(int));
}

static int side_open(struct side *side, int ranks, int64_t rows)
{
    side->count = ints(ranks);
    side->disp = ints(ranks);
    side->start = ints(ranks);
    side->row = ints(rows);
    side->type = malloc((size_t)ranks * sizeof(*side->type));
    side->typed = 0;
    return side->count && side->disp && side->start && side->row && side->type ? 0 : -1;
}

int plan_open(struct plan *plan, const struct bench_config *c, int rank)
{
    int64_t b = c->tokens, all = b * c->ranks, pairs = all * c->topk;

    memset(plan, 0, sizeof(*plan));
    plan->config = c;
    plan->rank = rank;
    plan->local_experts = (c->experts + c->ranks - 1) / c->ranks;
    if (side_open(&plan->copies.out, c->ranks, b * c->topk) != 0 || side_open(&plan->copies.in, c->ranks, all) != 0 ||
        side_open(&plan->pairs.out, c->ranks, b * c->topk) != 0 || side_open(&plan->pairs.in, c->ranks, pairs) != 0)
        return -1;
    plan->expand_first = ints(all + 1);
    plan->expand = ints(pairs);
    plan->sum_slot = ints(b * c->topk);
    plan->sum_k = ints(b * c->topk);
    plan->expert_counts = ints(plan->local_experts);
    plan->expert_offsets = ints(plan->local_experts);
    plan->expert_rows = ints(plan->local_experts);
    plan->zone = ints((int64_t)c->experts + 1);
    return plan->expand_first && plan->expand && plan->sum_slot && plan->sum_k && plan->expert_counts &&
                   plan->expert_offsets && plan->expert_rows && plan->zone
               ? 0
               : -1;
}

static int expert_major(const struct plan *plan)
{
    return plan->config->layout == EPX_EXPERT_MAJOR;
}

static void drop_types(struct side *side, int ranks)
{
    int r;

    for (r = 0; side->typed && r < ranks; r++)
        MPI_Type_free(&side->type[r]);
    side->typed = 0;
}

void plan_drop_types(struct plan *plan)
{
    drop_types(&plan->copies.out, plan->config->ranks);
    drop_types(&plan->copies.in, plan->config->ranks);
    drop_types(&plan->pairs.out, plan->config->ranks);
    drop_types(&plan->pairs.in, plan->config->ranks);
}

static void side_displacements(struct side *side, int ranks)
{
    int r;

    side->total = 0;
    for (r = 0; r < ranks; r++) {
        side->disp[r] = side->total;
        side->total += side->count[r];
    }
}

/* Does entry k name a rank that no earlier entry names? */
static int first_for_rank(const int32_t *idx, int k, int local)
{
    int j;

    for (j = 0; j < k; j++)
        if (idx[j] >= 0 && idx[j] / local == idx[k] / local)
            return 0;
    return idx[k] >= 0;
}

/* Copies that this rank sends: (destination, token). */
static void build_copies_out(struct plan *plan, const int32_t *mine)
{
    struct side *out = &plan->copies.out;
    int ranks = plan->config->ranks, topk = plan->config->topk, local = plan->local_experts;
    int t, k, r;

    memset(out->count, 0, (size_t)ranks * sizeof(int));
    for (t = 0; t < plan->config->tokens; t++)
        for (k = 0; k < topk; k++)
            if (first_for_rank(mine + t * topk, k, local))
                out->count[mine[t * topk + k] / local]++;
    side_displacements(out, ranks);
    for (r = 0; r < ranks; r++)
        out->start[r] = out->disp[r];
    for (t = 0; t < plan->config->tokens; t++)
        for (k = 0; k < topk; k++)
            if (first_for_rank(mine + t * topk, k, local))
                out->row[out->start[mine[t * topk + k] / local]++] = t;
    out->contiguous = 0;
}

/* Where the zone of each local expert begins in the tokens tensor. counts: rows per local expert. */
static void build_zones(struct plan *plan)
{
    const struct bench_config *c = plan->config;
    int l, offset = 0, align = c->alignment;

    for (l = 0; l < plan->local_experts; l++) {
        if (c->mode == EPX_LOW_LATENCY) {
            plan->expert_offsets[l] = l * c->ranks * c->tokens;
            continue;
        }
        plan->expert_offsets[l] = offset;
        plan->expert_counts[l] = (plan->expert_counts[l] + align - 1) / align * align;
        offset += plan->expert_counts[l];
    }
}

/* Copies that this rank receives, and in the expert-major layout where each of them has to be expanded to. */
static void build_copies_in(struct plan *plan, const int32_t *idx)
{
    const struct bench_config *c = plan->config;
    struct side *in = &plan->copies.in;
    int low = plan->rank * plan->local_experts, high = low + plan->local_experts;
    int s, t, k, copies = 0, pairs = 0;

    memset(plan->expert_counts, 0, (size_t)plan->local_experts * sizeof(int));
    for (s = 0; s < c->ranks; s++) {
        in->disp[s] = copies;
        in->start[s] = c->layout == EPX_RANK_MAJOR ? s * c->tokens : copies;
        for (t = 0; t < c->tokens; t++) {
            int before = pairs;

            for (k = 0; k < c->topk; k++, idx++)
                if (*idx >= low && *idx < high) {
                    plan->expert_counts[*idx - low]++;
                    plan->expand[pairs++] = *idx - low;
                }
            if (pairs > before)
                plan->expand_first[copies++] = before;
        }
        in->count[s] = copies - in->disp[s];
    }
    in->total = copies;
    in->contiguous = 1;
    plan->expand_first[copies] = pairs;
    memcpy(plan->expert_rows, plan->expert_counts, (size_t)plan->local_experts * sizeof(int));
    build_zones(plan);
    memcpy(plan->zone, plan->expert_offsets, (size_t)plan->local_experts * sizeof(int));
    for (k = 0; k < pairs; k++) /* from the expert to its next free row: sources and tokens come in order */
        plan->expand[k] = plan->zone[plan->expand[k]]++;
}

/* Pairs that this rank sends: (expert, token), which is (destination, expert, token). */
static void build_pairs_out(struct plan *plan, const int32_t *mine)
{
    const struct bench_config *c = plan->config;
    struct side *out = &plan->pairs.out;
    int *next = plan->zone, n = c->tokens * c->topk;
    int i, e, total = 0;

    memset(next, 0, (size_t)(c->experts + 1) * sizeof(int));
    memset(out->count, 0, (size_t)c->ranks * sizeof(int));
    for (i = 0; i < n; i++)
        if (mine[i] >= 0) {
            next[mine[i]]++;
            out->count[mine[i] / plan->local_experts]++;
        }
    side_displacements(out, c->ranks);
    for (e = 0; e < c->experts; e++) {
        int rows = next[e];

        next[e] = total;
        total += rows;
    }
    for (i = 0; i < n; i++) {
        plan->sum_slot[i] = -1;
        if (mine[i] >= 0) {
            plan->sum_slot[i] = next[mine[i]]++;
            out->row[plan->sum_slot[i]] = i / c->topk;
        }
    }
    out->contiguous = 0;
}

/* Pairs that this rank receives: (source, expert, token); within a zone the rows of one source follow each other. */
static void build_pairs_in(struct plan *plan, const int32_t *idx)
{
    const struct bench_config *c = plan->config;
    struct side *in = &plan->pairs.in;
    int low = plan->rank * plan->local_experts, local = plan->local_experts, per_rank = c->tokens * c->topk;
    int *rows = plan->zone;
    int s, i, l, j, total = 0;

    /* expert_offsets walk through the zones, and are put back at the end */
    for (s = 0; s < c->ranks; s++, idx += per_rank) {
        in->disp[s] = total;
        memset(rows, 0, (size_t)local * sizeof(int));
        for (i = 0; i < per_rank; i++)
            if (idx[i] >= low && idx[i] < low + local)
                rows[idx[i] - low]++;
        for (l = 0; l < local; l++)
            for (j = 0; j < rows[l]; j++)
                in->row[total++] = plan->expert_offsets[l]++;
        in->count[s] = total - in->disp[s];
    }
    in->total = total;
    in->contiguous = 0;
    build_zones(plan);
}

/* The rows that make up a token: pairs in k-order, or copies in the order of ranks. */
static void build_sums(struct plan *plan)
{
    const struct bench_config *c = plan->config;
    int t, k, n, r, j;

    if (expert_major(plan)) {
        for (t = 0; t < c->tokens; t++) {
            int *slot = plan->sum_slot + t * c->topk, *entry = plan->sum_k + t * c->topk;

            for (k = n = 0; k < c->topk; k++)
                if (slot[k] >= 0) {
                    entry[n] = k;
                    slot[n++] = slot[k];
                }
            for (; n < c->topk; n++)
                slot[n] = -1;
        }
        return;
    }
    memset(plan->sum_slot, -1, (size_t)(c->tokens * c->topk) * sizeof(int));
    memset(plan->sum_k, 0, (size_t)(c->tokens * c->topk) * sizeof(int));
    for (r = 0; r < c->ranks; r++)
        for (j = plan->copies.out.disp[r]; j < plan->copies.out.disp[r] + plan->copies.out.count[r]; j++) {
            t = plan->copies.out.row[j] * c->topk;
            plan->sum_slot[t + plan->sum_k[t]++] = j; /* sum_k[t * K] counts here; copies need no k */
        }
}

void plan_build(struct plan *plan, const int32_t *idx)
{
    const int32_t *mine = idx + (size_t)plan->rank * (size_t)(plan->config->tokens * plan->config->topk);

    plan_drop_types(plan);
    build_copies_out(plan, mine);
    build_copies_in(plan, idx);
    if (expert_major(plan)) {
        build_pairs_out(plan, mine);
        build_pairs_in(plan, idx);
    }
    build_sums(plan);
}
