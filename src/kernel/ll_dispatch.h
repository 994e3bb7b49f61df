/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Low-latency dispatch, epoch e, slot e % W.
 *
 *   sender s                                          receiver d
 *   wait LL_DONE[*] >= e - W   (slot free)
 *   route its tokens
 *   slot: counts per expert and rank, per-rank list
 *     of tokens, ids, numbers, weights; rows, cast,
 *     each ONCE (or the caller's own tensor in place)
 *   signal LL_DATA = e  ---------------------------->  wait LL_DATA[*] >= e
 *                                                      begin[l][s] = sum over s' < s of s' counts for expert l
 *                                                      for every token in s's list for d: read the row once, write it
 *                                                      to each of its local experts at begin[l][s] + number
 *   (in place: wait LL_DONE[*] >= e)  <--------------  signal LL_DONE = e
 *
 * No round before the data, no atomics that decide an order: rows stand by (source rank, source token).
 */
#ifndef EPX_KERNEL_LL_DISPATCH_H
#define EPX_KERNEL_LL_DISPATCH_H

#include "kernel/route.h"
#include "kernel/rows.h"

/* A source's slot as this rank sees it. */
struct ll_view {
    const struct ll_post *post;
    const int32_t *ecount, *rcount, *list, *ids, *eidx;
    const float *weights;
    const char *rows;
};

KFN char *ll_slot(const struct group_dev *g, int rank, uint64_t epoch)
{
    return heap_at(g, rank, g->ll.slots + (uint64_t)slot_of(g, epoch) * g->ll.slot_stride);
}

KFN struct ll_view ll_open(const struct group_dev *g, int rank, uint64_t epoch)
{
    const char *slot = ll_slot(g, rank, epoch);
    struct ll_view v;

    v.post = (const struct ll_post *)slot;
    v.ecount = (const int32_t *)(slot + g->ll.ecount);
    v.rcount = (const int32_t *)(slot + g->ll.rcount);
    v.list = (const int32_t *)(slot + g->ll.list) + (size_t)g->rank * (size_t)g->max_tokens;
    v.ids = (const int32_t *)(slot + g->ll.ids);
    v.eidx = (const int32_t *)(slot + g->ll.eidx);
    v.weights = (const float *)(slot + g->ll.weights);
    v.rows = heap_at(g, rank, v.post->rows);
    return v;
}

KFN void ll_fill_tables(struct agent *ag, const struct ll_dispatch_params *p, char *slot)
{
    const struct group_dev *g = p->g;
    const struct handle_dev *h = p->h;
    const int K = p->route.topk_n;
    int32_t *list = (int32_t *)(slot + g->ll.list);

    AG_EACH_ALL(ag, int, e, g->experts)((int32_t *)(slot + g->ll.ecount))[e] = h->ecount[e];
    AG_EACH_ALL(ag, int, r, g->nranks)((int32_t *)(slot + g->ll.rcount))[r] = h->rcount[r];
    AG_EACH_ALL(ag, int64_t, i, (int64_t)p->route.ntokens * K)
    {
        ((int32_t *)(slot + g->ll.ids))[i] = h->ids[i];
        ((int32_t *)(slot + g->ll.eidx))[i] = h->eidx[i];
        if (p->weights)
            ((float *)(slot + g->ll.weights))[i] = p->weights[i];
        if (h->ridx[i] >= 0)
            list[(size_t)(h->ids[i] / g->local_experts) * (size_t)g->max_tokens + (size_t)h->ridx[i]] =
                (int32_t)(i / K);
    }
}

KFN void ll_write_post(const struct ll_dispatch_params *p, uint64_t epoch, char *slot)
{
    const struct group_dev *g = p->g;
    struct ll_post *post = (struct ll_post *)slot;

    post->agree = p->agree;
    post->ntokens = p->route.ntokens;
    post->rows = p->in_place ? p->in_place : g->ll.slots + (uint64_t)slot_of(g, epoch) * g->ll.slot_stride + g->ll.rows;
    post->row_stride = p->in_place ? (uint64_t)p->in.stride : g->ll.pitch;
}

KFN uint64_t ll_rows_to_peers(const struct group_dev *g, const struct handle_dev *h)
{
    uint64_t n = 0;
    for (int r = 0; r < g->nranks; r++)
        n += (uint64_t)h->rcount[r];
    return n;
}

KFN int ll_dispatch_send(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    char *slot = ll_slot(g, g->rank, epoch);

    if (epoch > (uint64_t)g->inflight &&
        wait_all(ag, g, SIG_LL_DONE, slot_of(g, epoch), epoch - (uint64_t)g->inflight, PHASE_LL_SLOT, NULL))
        return 1;
    if (route_plan(ag, g, p->h, &p->route))
        return 1;
    ll_fill_tables(ag, p, slot);
    if (!p->in_place) {
        for (int t = ag_index(ag); t < p->route.ntokens; t += ag_count(ag))
            row_stage(ag, slot + g->ll.rows + (size_t)t * g->ll.pitch, &p->in, &p->agree, t);
    }
    if (!sync_last(ag, g, 0))
        return 0;
    if (ag_leader(ag)) {
        const uint64_t rows = ll_rows_to_peers(g, p->h);
        ll_write_post(p, epoch, slot);
        g->state->epoch[OP_LL_DISPATCH] = epoch;
        p->h->epoch = epoch;
        ag_add_stat(&g->stats->rows_sent, rows);
        if (!p->in_place)
            ag_add_stat(&g->stats->bytes_local, (uint64_t)p->route.ntokens * (uint64_t)p->agree.hidden_bytes);
    }
    ag_sync(ag);
    signal_all(ag, g, SIG_LL_DATA, slot_of(g, epoch), epoch);
    return 0;
}

/* begin[l][s] and count[l][s] for this rank's experts; the caller's counters. */
KFN void ll_count_experts(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    const struct handle_dev *h = p->h;
    const int R = g->nranks, L = g->local_experts;

    AG_EACH_ALL(ag, int, l, L)
    {
        int32_t run = 0;
        const int e = g->rank * L + l;
        for (int s = 0; s < R; s++) {
            const int32_t n = g->mask[s] && e < g->experts ? ll_open(g, s, epoch).ecount[e] : 0;
            h->begin[l * R + s] = run;
            h->count[l * R + s] = n;
            if (p->layout_range)
                p->layout_range[l * R + s] = (int64_t)run << 32 | (int64_t)n;
            run += n;
        }
        if (p->expert_counts.data)
            index_put(&p->expert_counts, l, run);
        if (p->expert_stats)
            p->expert_stats[l] += run;
    }
}

/* What came from each rank, and in all. */
KFN void ll_count_ranks(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    const int R = g->nranks, L = g->local_experts;
    int64_t total = 0;

    if (ag_index(ag) != 0 || !ag_leader(ag))
        return;
    for (int s = 0; s < R; s++) {
        int64_t n = 0;
        if (g->mask[s] && p->layout == LAYOUT_RANK_MAJOR)
            n = ll_open(g, s, epoch).rcount[g->rank];
        for (int l = 0; l < L && p->layout == LAYOUT_EXPERT_MAJOR; l++)
            n += p->h->count[l * R + s];
        if (p->rank_counts.data)
            index_put(&p->rank_counts, s, n);
        total += n;
    }
    if (p->total.data)
        index_put(&p->total, 0, total);
    ag_add_stat(&g->stats->rows_received, (uint64_t)total);
}

/* Row i of source s's list, to all its local experts. */
KFN void ll_expand(struct agent *ag, const struct ll_dispatch_params *p, const struct ll_view *v, int s, int i)
{
    const struct group_dev *g = p->g;
    const int R = g->nranks, L = g->local_experts, K = p->route.topk_n, M = g->max_tokens;
    const int t = v->list[i];
    const char *row = v->rows + (size_t)t * v->post->row_stride;
    const char *scales = row + row_scales_at(&p->agree);
    struct copy_set set;
    int n = 0;

    for (int k = 0; k < K; k++) {
        const int32_t id = v->ids[(size_t)t * K + k];
        if (id < 0 || id / L != g->rank)
            continue;
        const int l = id - g->rank * L;
        const int64_t at = p->h->begin[l * R + s] + v->eidx[(size_t)t * K + k];
        copy_set_put(ag, &set, n++, p->out.tokens + l * p->out.outer_stride + at * p->out.stride);
        if (p->agree.scale_bytes)
            row_copy_scales(ag, p->out.scales + l * p->out.scale_outer_stride + at * p->out.scale_row_stride,
                            p->out.scale_stride, scales, 4, p->agree.scale_bytes / 4);
        if (ag_leader(ag)) {
            const int64_t place = (int64_t)l * p->outer_rows + at;
            p->h->source[(int64_t)l * R * M + at] = t * K + k;
            if (p->src_rank)
                p->src_rank[place] = s;
            if (p->src_token)
                p->src_token[place] = t;
        }
    }
    ag_copy_many(ag, &set, n, row, (size_t)p->agree.hidden_bytes);
}

/* Row i of source s's list, to its place in s's block. */
KFN void ll_place(struct agent *ag, const struct ll_dispatch_params *p, const struct ll_view *v, int s, int i)
{
    const struct group_dev *g = p->g;
    const int L = g->local_experts, K = p->route.topk_n;
    const int t = v->list[i];
    const char *row = v->rows + (size_t)t * v->post->row_stride;
    const int32_t *ids = v->ids + (size_t)t * K;
    const int64_t place = (int64_t)s * p->outer_rows + i;
    int first = 0;

    while (ids[first] < 0 || ids[first] / L != g->rank)
        first++;
    ag_copy(ag, p->out.tokens + s * p->out.outer_stride + i * p->out.stride, row, (size_t)p->agree.hidden_bytes);
    if (p->agree.scale_bytes)
        row_copy_scales(ag, p->out.scales + s * p->out.scale_outer_stride + i * p->out.scale_row_stride,
                        p->out.scale_stride, row + row_scales_at(&p->agree), 4, p->agree.scale_bytes / 4);
    row_put_topk(ag, ids, v->weights + (size_t)t * K, K, g->rank * L, g->rank * L + L, p->compact, &p->out_idx,
                 p->out_weights, place);
    if (ag_leader(ag)) {
        p->h->source[(int64_t)s * g->max_tokens + i] = t * K + first;
        if (p->src_rank)
            p->src_rank[place] = s;
        if (p->src_token)
            p->src_token[place] = t;
    }
}

/* Items (source, i) are dealt out to the agents in one sequence over all sources. */
KFN void ll_take_rows(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    const int A = ag_count(ag);
    int64_t before = 0;

    for (int s = 0; s < g->nranks; s++) {
        if (!g->mask[s])
            continue;
        const struct ll_view v = ll_open(g, s, epoch);
        const int n = v.rcount[g->rank];
        for (int i = (int)(((int64_t)ag_index(ag) - before % A + A) % A); i < n; i += A) {
            if (p->layout == LAYOUT_RANK_MAJOR)
                ll_place(ag, p, &v, s, i);
            else
                ll_expand(ag, p, &v, s, i);
        }
        if (p->layout == LAYOUT_RANK_MAJOR && ag_index(ag) == 0 && ag_leader(ag))
            p->h->count[s] = n;
        if (s != g->rank && ag_index(ag) == 0 && ag_leader(ag))
            ag_add_stat(&g->stats->bytes_peer, (uint64_t)n * (uint64_t)p->agree.hidden_bytes);
        before += n;
    }
}

KFN int ll_dispatch_recv(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    if (wait_all(ag, g, SIG_LL_DATA, slot_of(g, epoch), epoch, PHASE_LL_DATA, p->wait_ns))
        return 1;
    for (int s = 0; s < g->nranks; s++) {
        const struct agreement *theirs = &((const struct ll_post *)ll_slot(g, s, epoch))->agree;
        if (g->mask[s] && check_agreement(ag, g, &p->agree, theirs, PHASE_LL_DATA, s))
            return 1;
    }
    if (p->layout == LAYOUT_EXPERT_MAJOR)
        ll_count_experts(ag, p, epoch);
    if (sync_barrier(ag, g))
        return 1;
    ll_count_ranks(ag, p, epoch);
    ll_take_rows(ag, p, epoch);
    if (sync_last(ag, g, 1))
        signal_all(ag, g, SIG_LL_DONE, slot_of(g, epoch), epoch);
    /* The caller may change its tensor once this operation has completed: not before all have read it. */
    return p->in_place ? wait_all(ag, g, SIG_LL_DONE, slot_of(g, epoch), epoch, PHASE_LL_DONE, NULL) : 0;
}

KFN void kernel_ll_dispatch(struct agent *ag, const struct ll_dispatch_params *p)
{
    const struct group_dev *g = p->g;
    uint64_t epoch = g->state->epoch[OP_LL_DISPATCH] + 1;
    int failed = kernel_begin(ag, g);

    if (!failed && (p->steps & STEP_SEND))
        failed = ll_dispatch_send(ag, p, epoch);
    else
        epoch = p->h->epoch;
    if (!failed && (p->steps & STEP_RECV))
        failed = ll_dispatch_recv(ag, p, epoch);
    kernel_end(ag, g);
}

#endif
