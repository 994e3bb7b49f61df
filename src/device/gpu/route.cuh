/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Counting and numbering of top-k indices by a warp: a step takes the pairs of as many whole tokens as it has lanes
 * for, one pair per lane. The pairs of a token find each other by shuffles (a match of all lanes costs far more), and
 * the tokens of a step take their turns at the table. The result is that of the loop in device/cpu/prims.h. The tables
 * of a block lie in shared memory.
 */
#ifndef EPX_DEVICE_GPU_ROUTE_CUH
#define EPX_DEVICE_GPU_ROUTE_CUH

#ifndef ROUTE_SMEM_KEYS
#define ROUTE_SMEM_KEYS 512 /* experts and ranks whose counts fit shared memory */
#endif
#define AG_BLOCK_KEYS ROUTE_SMEM_KEYS

KFN int32_t *ag_block_tables(struct agent *ag, int keys)
{
    return keys <= ROUTE_SMEM_KEYS ? ag->counts : NULL;
}

KFN int32_t *ag_block_memory(struct agent *ag, int words)
{
    return words <= LAUNCH_WARPS * ROUTE_SMEM_KEYS ? ag->counts : NULL;
}

KFN int64_t route_index(const struct route_in *in, int64_t i)
{
    return in->idx64 ? ((const int64_t *)in->topk)[i] : (int64_t)((const int32_t *)in->topk)[i];
}

/* A step's result in one lane; numbers count from the table of the counting agent. */
struct routed {
    int id, eidx, ridx, rord;
};

#define ROUTE_STEPS 2 /* of which everything is kept between counting and numbering */
struct route_kept {
    int64_t bad;
    struct routed step[ROUTE_STEPS];
};

KFN int route_per_step(const struct route_in *in)
{
    return WARP / in->topk_n;
}

/* Tokens t.., as many as a step has lanes for; `wide` is the lane's index. Returns 1 + the place of the first bad one,
 * or 0. */
KFN int64_t route_step(const struct group_dev *g, const struct route_in *in, int t, int64_t wide, int32_t *table,
                       struct routed *out)
{
    const int K = in->topk_n, E = g->experts, L = g->local_experts;
    const int token = lane_id() / K, k = lane_id() % K, base = lane_id() - k;
    const int wrong = wide < -1 || wide >= E;
    int id = wrong ? -1 : (int)wide, rank = id < 0 ? -1 : id / L;
    lanes_t same_expert = 0, same_rank = 0; /* bit j: the token's pair j names the same expert; the same rank */

    if (id >= 0 && !g->mask[rank])
        id = rank = -1;
    ROLLED
    for (int j = 0; j < K; j++) {
        const int lane = (base + j) & (WARP - 1);
        const int other = __shfl_sync(ALL_LANES, id, lane), at = __shfl_sync(ALL_LANES, rank, lane);
        same_expert |= (lanes_t)(other == id) << j;
        same_rank |= (lanes_t)(at == rank) << j;
    }
    const lanes_t before = ((lanes_t)1 << k) - 1;
    const lanes_t wrongs = __ballot_sync(ALL_LANES, wrong);
    const int first = rank >= 0 && !(same_rank & before);
    const lanes_t firsts = __ballot_sync(ALL_LANES, first);
    int smaller = 0;
    ROLLED
    for (int j = 0; j < K; j++) {
        const int lane = (base + j) & (WARP - 1), at = __shfl_sync(ALL_LANES, rank, lane);
        smaller += (firsts >> lane & 1) && at < rank;
    }
    /* Token after token; within one, those that name an expert share what the table says. */
    int eidx = -1, ridx = -1;
    ROLLED
    for (int u = 0; u < WARP / K; u++) {
        if (token == u && id >= 0) {
            eidx = table[id] + (in->shared ? 0 : lanes_count(same_expert & before));
            ridx = first ? table[E + rank] : -1;
        }
        __syncwarp();
        if (token == u && id >= 0 && !(same_expert & before))
            table[id] = eidx + (in->shared ? 1 : lanes_count(same_expert));
        if (token == u && first)
            table[E + rank] = ridx + 1;
        __syncwarp();
    }
    *out = {id, eidx, ridx, first ? smaller : -1};
    return wrongs ? (int64_t)(t + lanes_first(wrongs) / K) * K + lanes_first(wrongs) % K + 1 : 0;
}

/* The lane's index in the step that begins with token t; -1: none. */
KFN int64_t route_load(const struct route_in *in, int t, int t1)
{
    const int token = lane_id() / in->topk_n, mine = token < route_per_step(in) && t + token < t1;

    return mine ? route_index(in, (int64_t)t * in->topk_n + lane_id()) : -1;
}

KFN void route_store(const struct handle_dev *h, const struct route_in *in, int t, int t1, const struct routed &r)
{
    const int token = lane_id() / in->topk_n;
    const int64_t i = (int64_t)t * in->topk_n + lane_id();

    if (token >= route_per_step(in) || t + token >= t1)
        return;
    h->ids[i] = r.id;
    h->eidx[i] = r.eidx;
    h->ridx[i] = r.ridx;
    h->rord[i] = r.rord;
}

/* All steps; the first ones are kept, or all are stored. Returns 1 + the place of the first bad index, or 0. */
KFN_STEP int64_t route_tokens(const struct group_dev *g, const struct handle_dev *h, const struct route_in *in, int t0,
                              int t1, int32_t *table, struct route_kept *kept)
{
    const int per = route_per_step(in);
    int64_t bad = 0, ahead[ROUTE_STEPS];

#pragma unroll
    for (int j = 0; j < ROUTE_STEPS; j++)
        ahead[j] = route_load(in, t0 + j * per, t1);
    for (int t = t0, n = 0; t < t1; t += per, n++) {
        const int64_t wide = n == 0 ? ahead[0] : n == 1 ? ahead[1] : route_load(in, t, t1);
        struct routed r;
        const int64_t wrong = route_step(g, in, t, wide, table, &r);
        bad = bad ? bad : wrong;
        if (h)
            route_store(h, in, t, t1, r);
        else if (n == 0)
            kept->step[0] = r;
        else if (n == 1)
            kept->step[1] = r;
    }
    return bad;
}

/* The agent's table in shared memory, if it fits, with the contents of `table`. */
KFN_STEP int32_t *route_smem(struct agent *ag, int keys, int32_t *table)
{
    int32_t *smem = ag_block_tables(ag, keys);

    smem = smem ? smem + ag_block_index(ag) * ROUTE_SMEM_KEYS : NULL;
    ROLLED
    for (int i = lane_id(); smem && smem != table && i < keys; i += WARP)
        smem[i] = table[i];
    __syncwarp();
    return smem ? smem : table;
}

KFN_STEP void ag_route_count(struct agent *ag, const struct group_dev *g, const struct route_in *in, int t0, int t1,
                             int32_t *table, struct route_kept *kept)
{
    const int keys = g->experts + g->nranks;
    const int32_t *counts = route_smem(ag, keys, table);

    kept->bad = route_tokens(g, NULL, in, t0, t1, (int32_t *)counts, kept);
    ROLLED
    for (int i = lane_id(); i < keys && counts != table; i += WARP)
        table[i] = counts[i];
    __syncwarp();
}

KFN_STEP void ag_route_number(struct agent *ag, const struct group_dev *g, const struct handle_dev *h,
                              const struct route_in *in, int t0, int t1, int32_t *table, const struct route_kept *kept,
                              int64_t *bad)
{
    const int keys = g->experts + g->nranks, per = route_per_step(in);

    if (!kept || t1 - t0 > ROUTE_STEPS * per) {
        int32_t *counts = route_smem(ag, keys, table);
        *bad = route_tokens(g, h, in, t0, t1, counts, NULL);
        ROLLED
        for (int i = lane_id(); i < keys && counts != table; i += WARP)
            table[i] = counts[i];
        __syncwarp();
        return;
    }
    *bad = kept->bad;
#pragma unroll
    for (int n = 0; n < ROUTE_STEPS; n++) {
        struct routed r = kept->step[n];
        const int there = t0 + n * per < t1;
        if (there && r.id >= 0)
            r.eidx += table[r.id];
        if (there && r.ridx >= 0)
            r.ridx += table[g->experts + r.id / g->local_experts];
        if (there)
            route_store(h, in, t0 + n * per, t1, r);
    }
}

#endif
