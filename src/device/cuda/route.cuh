/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Counting and numbering of top-k indices by a warp: a step takes the pairs of as many whole tokens as it has lanes for,
 * one pair per lane. Lanes that name the same expert find each other by a match; a lane's number is what the table says
 * plus how many of them come before it. The result is that of the loop in device/cpu/prims.h.
 */
#ifndef EPX_DEVICE_CUDA_ROUTE_CUH
#define EPX_DEVICE_CUDA_ROUTE_CUH

#define ROUTE_NEAR 512 /* experts and ranks whose counts fit shared memory */

KFN int64_t route_index(const struct route_in *in, int64_t i)
{
    return in->idx64 ? ((const int64_t *)in->topk)[i] : (int64_t)((const int32_t *)in->topk)[i];
}

/* The lane's number under `key` (negative: none) among `lanes` and what the table counts already; counts them. */
KFN int route_number(int32_t *table, int key, lanes_t lanes)
{
    const lanes_t below = lanes_below();
    const lanes_t same = __match_any_sync(ALL_LANES, lanes >> lane_id() & 1 ? key : -1 - lane_id()) & lanes;
    int number = -1;

    if (lanes >> lane_id() & 1)
        number = table[key] + lanes_count(same & below);
    __syncwarp();
    if ((lanes >> lane_id() & 1) && !(same & below))
        table[key] = number + lanes_count(same);
    __syncwarp();
    return number;
}

/* Returns 1 + the place of the first bad index, or 0. */
KFN_STEP int64_t route_tokens(const struct group_dev *g, const struct handle_dev *h, const struct route_in *in, int t0,
                              int t1, int32_t *table)
{
    const int K = in->topk_n, E = g->experts, L = g->local_experts, per = WARP / K;
    const int token = lane_id() / K, k = lane_id() % K;
    int64_t bad = 0;

    for (int t = t0; t < t1; t += per) {
        const int mine = token < per && t + token < t1;
        const int64_t i = (int64_t)(t + token) * K + k;
        int64_t wide = mine ? route_index(in, i) : -1;
        int wrong = wide < -1 || wide >= E;
        int id = wrong ? -1 : (int)wide;
        if (id >= 0 && !g->mask[id / L])
            id = -1;
        /* The same expert earlier in the same token. */
        const lanes_t twins = __match_any_sync(ALL_LANES, id < 0 ? -1 - lane_id() : id * WARP + token);
        if (in->once && id >= 0 && (twins & lanes_below())) {
            wrong = 1;
            id = -1;
        }
        const lanes_t wrongs = __ballot_sync(ALL_LANES, wrong);
        if (wrongs && bad == 0)
            bad = (int64_t)(t + lanes_first(wrongs) / K) * K + lanes_first(wrongs) % K + 1;
        const int rank = id < 0 ? -1 : id / L;
        /* The first of the token's pairs that names its rank. */
        const lanes_t mates = __match_any_sync(ALL_LANES, rank < 0 ? -1 - lane_id() : rank * WARP + token);
        const lanes_t firsts = __ballot_sync(ALL_LANES, rank >= 0 && !(mates & lanes_below()));
        const int first = firsts >> lane_id() & 1;
        const int eidx = route_number(table, id, __ballot_sync(ALL_LANES, id >= 0));
        const int ridx = route_number(table + E, rank, firsts);
        int smaller = 0;
        for (int j = 0; j < K; j++) {
            const int lane = (lane_id() - k + j) & (WARP - 1), other = __shfl_sync(ALL_LANES, rank, lane);
            smaller += (firsts >> lane & 1) && other < rank;
        }
        if (!mine)
            continue;
        h->ids[i] = id;
        h->eidx[i] = eidx;
        h->ridx[i] = ridx;
        h->rord[i] = first ? smaller : -1;
    }
    return bad;
}

KFN void ag_route_chunk(struct agent *ag, const struct group_dev *g, const struct handle_dev *h,
                        const struct route_in *in, int t0, int t1, int32_t *table, int64_t *bad)
{
    const int keys = g->experts + g->nranks, near = ag->counts && keys <= ROUTE_NEAR;
    int32_t *counts = near ? ag->counts : table;

    for (int i = lane_id(); i < keys && near; i += WARP)
        counts[i] = 0;
    __syncwarp();
    *bad = route_tokens(g, h, in, t0, t1, counts);
    for (int i = lane_id(); i < keys && near; i += WARP)
        table[i] = counts[i];
    __syncwarp();
}

#endif
