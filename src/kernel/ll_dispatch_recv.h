/* SPDX-License-Identifier: Apache-2.0 */
/* Low-latency dispatch: the receive half. The protocol is drawn in ll_dispatch.h. */
#ifndef EPX_KERNEL_LL_DISPATCH_RECV_H
#define EPX_KERNEL_LL_DISPATCH_RECV_H

#include "kernel/ll_dispatch_send.h"

/* What came from each rank, and in all. One agent, from the tables themselves: others may not have counted yet. */
KFN_STEP void ll_count_ranks(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    const int R = g->nranks, L = g->local_experts;
    const int first = g->rank * L < g->experts ? g->rank * L : g->experts;
    const int end = first + L < g->experts ? first + L : g->experts;
    int64_t total = 0, peers = 0;

    if (ag_index(ag) != ag_count(ag) / 2) /* the first agents wait for peers, the last ones compute places */
        return;
    AG_EACH(ag, int, s, R)
    {
        const struct ll_view v = ll_view_at(g, ll_rows_of(g, s, epoch), 0, 0);
        int64_t n = 0;
        if (g->mask[s] && p->layout == LAYOUT_RANK_MAJOR)
            n = v.rcount[g->rank];
        for (int e = first; e < end && g->mask[s] && p->layout == LAYOUT_EXPERT_MAJOR; e++)
            n += v.ecount[e];
        if (p->rank_counts.data)
            index_put(&p->rank_counts, s, n);
        total += n;
        peers += g->mask[s] && s != g->rank && is_local(g, s) ? v.rcount[g->rank] : 0;
    }
    total = ag_sum(ag, total);
    peers = ag_sum(ag, peers);
    if (!ag_leader(ag))
        return;
    if (p->total.data)
        index_put(&p->total, 0, total);
    ag_add_stat(&g->stats->rows_received, (uint64_t)total);
    ag_add_stat(&g->stats->bytes_peer, (uint64_t)peers * (uint64_t)p->signature.hidden_bytes);
}

/* at[i * stride] = base + sum of counts[0] to counts[i - 1]. Each lane takes neighbours: one scan for all. */
KFN_STEP void ll_add_up(struct agent *ag, const int32_t *counts, int n, int64_t base, int32_t *at, int stride)
{
    const int per = (n + AG_LANES - 1) / AG_LANES, first = ag_lane(ag) * per;
    const int end = first + per < n ? first + per : n;
    int64_t sum = 0;

    for (int i = first; i < end; i++)
        sum += counts[i];
    sum = base + ag_scan(ag, sum);
    for (int i = first; i < end; i++) {
        at[i * stride] = (int32_t)sum;
        sum += counts[i];
    }
}

/*
 * Where combined rows land at their source: by expert (or rank), then by number among its rows. What one rank returns
 * is then one piece, in the order in which that rank has it: `back` at the source, `source` at the rank that returns.
 */
KFN void ll_places(struct agent *ag, const struct ll_dispatch_params *p)
{
    if (p->layout == LAYOUT_EXPERT_MAJOR)
        ll_add_up(ag, p->h->ecount, p->g->experts, 0, p->h->back, 1);
    else
        ll_add_up(ag, p->h->rcount, p->g->nranks, 0, p->h->back, 1);
}

/* What source s gets back begins here, in its receive buffer. */
KFN_STEP void ll_source_places(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch, int s)
{
    const struct group_dev *g = p->g;
    const int R = g->nranks, by_expert = p->layout == LAYOUT_EXPERT_MAJOR;
    const int keys = by_expert ? g->experts : R, wanted = by_expert ? g->rank * g->local_experts : g->rank;
    const int first = wanted < keys ? wanted : keys, n = by_expert ? g->local_experts : 1;
    const struct ll_view v = ll_open(g, s, epoch);
    const int32_t *count = by_expert ? v.ecount : v.rcount;
    int64_t run = 0;

    AG_EACH(ag, int, i, first) run += count[i];
    run = ag_sum(ag, run);
    const int there = n < keys - first ? n : keys - first; /* the last rank may have fewer experts */
    ll_add_up(ag, count + first, there, run, p->h->source + s, R);
    AG_EACH(ag, int, l, n - there) p->h->source[(there + l) * R + s] = 0;
}

/* Both, for the combine that follows, by the agents that have the least other work: the last ones. */
KFN void ll_all_places(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    const int A = ag_count(ag), me = A - 1 - ag_index(ag);

    if (g->nranks % A == me)
        ll_places(ag, p);
    for (int s = me; s < g->nranks; s += A)
        if (g->mask[s])
            ll_source_places(ag, p, epoch, s);
}

/*
 * begin[l][s] and count[l][s] for this rank's experts; the caller's counters. A token has one row at an expert, however
 * often it names it, so that R*M rows are enough, unless tables of another node are invalid: those are checked here.
 */
KFN_STEP int ll_count_experts(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    const struct handle_dev *h = p->h;
    const int R = g->nranks, L = g->local_experts;
    const int64_t room = (int64_t)R * g->max_tokens;
    const uint64_t offset = ll_counts_offset(g, epoch);

    for (int l = ag_index(ag); l < L; l += ag_count(ag)) {
        const int e = g->rank * L + l;
        int64_t run = 0;
        AG_ROUNDS(ag, int, s, R)
        {
            const int there = s < R && g->mask[s] && e < g->experts;
            const int64_t n = there ? ll_counts_of(g, s, epoch, offset)[e] : 0, begin = run + ag_scan(ag, n);
            if (s < R) {
                h->begin[l * R + s] = (int32_t)begin;
                h->count[l * R + s] = (int32_t)n;
                if (p->layout_range)
                    p->layout_range[l * R + s] = begin << 32 | n;
            }
            run += ag_sum(ag, n);
        }
        if (ag_leader(ag) && p->expert_counts.data)
            index_put(&p->expert_counts, l, run);
        if (ag_leader(ag) && p->expert_stats)
            p->expert_stats[l] += (int32_t)run;
        if (run > room)
            return fail_all(ag, g, KSTATUS_OVERFLOW, PHASE_LL_DATA, -1, run, room);
    }
    return 0;
}

/* What the tables say. */
KFN int ll_count(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch)
{
    if (p->layout == LAYOUT_EXPERT_MAJOR && ll_count_experts(ag, p, epoch))
        return 1;
    ll_count_ranks(ag, p, epoch);
    ll_all_places(ag, p, epoch);
    return 0;
}

KFN const char *ll_row(const struct ll_view *v, int t)
{
    return v->rows + (size_t)(v->desc->ordered ? v->pos[t] : t) * v->desc->row_stride;
}

/* The k-th index of row i of source s's list, whose row has been written: where it came from. By each lane. */
KFN void ll_name_row(const struct ll_dispatch_params *p, const struct ll_view *v, int s, int i, int k)
{
    const struct group_dev *g = p->g;
    const int L = g->local_experts, t = v->list[i];
    const size_t pair = (size_t)t * (size_t)p->route.topk_n + (size_t)k;
    const int32_t id = v->ids[pair], number = v->eidx[pair], l = id - g->rank * L;

    if (id < 0 || l < 0 || l >= L)
        return;
    const int64_t place = (int64_t)l * p->outer_rows + p->h->begin[l * g->nranks + s] + number;
    if (p->src_rank)
        p->src_rank[place] = s;
    if (p->src_token)
        p->src_token[place] = t;
}

/* Where the scales of row `row` of block `outer` begin. */
KFN char *ll_scales_at(const struct ll_dispatch_params *p, int64_t outer, int64_t row)
{
    char *block = p->out.scales + outer * p->out.scale_outer_stride;

    if (!p->scale_tiles)
        return block + row * p->out.scale_row_stride;
    return block + row / 128 * p->out.scale_row_stride + row % 32 * 16 + row % 128 / 32 * 4;
}

/* Row i of source s's list, to each of its local experts. */
KFN_STEP void ll_expand(struct agent *ag, const struct ll_dispatch_params *p, const struct ll_view *v, int s, int i)
{
    const struct group_dev *g = p->g;
    const int R = g->nranks, L = g->local_experts, K = p->route.topk_n;
    const int t = v->list[i];
    const int32_t *ids = v->ids + (size_t)t * K;
    const char *row = ll_row(v, t);
    struct copy_set set;
    int n = 0;

    copy_set_begin(&set);
    AG_ROUNDS(ag, int, k, K)
    {
        const int here = k < K && ids[k] >= 0 && ids[k] / L == g->rank;
        int before;
        const int all = ag_vote(ag, here, &before);
        if (here) {
            const int l = ids[k] - g->rank * L;
            const int64_t at = p->h->begin[l * R + s] + v->eidx[(size_t)t * K + k];
            const int64_t place = (int64_t)l * p->outer_rows + at;
            copy_set_offer(&set, n + before, p->out.tokens + l * p->out.outer_stride + at * p->out.stride);
            if (p->src_rank)
                p->src_rank[place] = s;
            if (p->src_token)
                p->src_token[place] = t;
        }
        n += all;
    }
    copy_set_settle(ag, &set);
    ag_copy_many(ag, &set, n, row, (size_t)p->signature.hidden_bytes);
    for (int k = 0; k < K && p->signature.scale_bytes; k++) {
        if (ids[k] < 0 || ids[k] / L != g->rank)
            continue;
        const int l = ids[k] - g->rank * L;
        const int64_t at = p->h->begin[l * R + s] + v->eidx[(size_t)t * K + k];
        row_copy_scales(ag, ll_scales_at(p, l, at), p->out.scale_stride, row + row_scales_at(&p->signature), 4,
                        p->signature.scale_bytes / 4);
    }
}

/* Row i of source s's list, at its place in s's block. */
KFN_STEP void ll_place(struct agent *ag, const struct ll_dispatch_params *p, const struct ll_view *v, int s, int i,
                       int written)
{
    const struct group_dev *g = p->g;
    const int L = g->local_experts, K = p->route.topk_n;
    const int t = v->list[i];
    const int32_t *ids = v->ids + (size_t)t * K;
    const int64_t place = (int64_t)s * p->outer_rows + i;

    if (!written) {
        const char *row = ll_row(v, t);
        ag_copy(ag, p->out.tokens + s * p->out.outer_stride + i * p->out.stride, row,
                (size_t)p->signature.hidden_bytes);
        if (p->signature.scale_bytes)
            row_copy_scales(ag, ll_scales_at(p, s, i), p->out.scale_stride, row + row_scales_at(&p->signature), 4,
                            p->signature.scale_bytes / 4);
    }
    row_put_topk(ag, ids, v->weights + (size_t)t * K, K, g->rank * L, g->rank * L + L, p->topk_form, &p->out_idx,
                 p->out_weights, place);
    if (ag_leader(ag)) {
        if (p->src_rank)
            p->src_rank[place] = s;
        if (p->src_token)
            p->src_token[place] = t;
    }
}

/* RANK_MAJOR: rows of source s from `first` on carry no expert. */
KFN void ll_mark_tail(struct agent *ag, const struct ll_dispatch_params *p, int s, int first, int nth, int step)
{
    const int K = p->route.topk_n;

    if (p->layout != LAYOUT_RANK_MAJOR || !p->out_idx.data)
        return;
    for (int i = first + nth; i < p->outer_rows; i += step)
        AG_EACH(ag, int, k, K) index_put(&p->out_idx, ((int64_t)s * p->outer_rows + i) * K + k, -1);
}

/* What came from source s, by agents `nth`, nth + step, ... of those that serve it. */
KFN void ll_take_source(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch, int s, int nth, int step)
{
    const struct group_dev *g = p->g;
    const int first = nth == 0 && ag_leader(ag);

    if (!g->mask[s]) {
        if (first && p->layout == LAYOUT_RANK_MAJOR)
            p->h->count[s] = 0;
        ll_mark_tail(ag, p, s, 0, nth, step);
        return;
    }
    const struct ll_view v = ll_open(g, s, epoch);
    const int n = v.rcount[g->rank], written = v.desc->written;
    if (p->layout == LAYOUT_EXPERT_MAJOR && written) { /* a lane for each index: nothing waits for the one before */
        const int K = p->route.topk_n;
        for (int i = nth * AG_LANES + ag_lane(ag); i < n * K; i += step * AG_LANES)
            ll_name_row(p, &v, s, i / K, i % K);
        return;
    }
    for (int i = nth; i < n; i += step) {
        if (p->layout == LAYOUT_RANK_MAJOR)
            ll_place(ag, p, &v, s, i, written);
        else
            ll_expand(ag, p, &v, s, i);
    }
    if (first && p->layout == LAYOUT_RANK_MAJOR)
        p->h->count[s] = n;
    ll_mark_tail(ag, p, s, n, nth, step);
}

/* Each source is served by its own share of the agents: an agent reads as few tables as possible. No source has more
 * than max_tokens rows. */
KFN_STEP void ll_take_rows(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch)
{
    const int R = p->g->nranks, A = ag_count(ag), me = ag_index(ag);

    if (A >= R)
        ll_take_source(ag, p, epoch, me % R, me / R, A / R + (me % R < A % R));
    else
        for (int s = me; s < R; s += A)
            ll_take_source(ag, p, epoch, s, 0, 1);
}

/* Is token t of the tables invalid: a row, an expert or a number out of range? */
KFN int ll_token_unsound(const struct group_dev *g, const struct ll_view *v, int B, int K, int t)
{
    int odd = v->pos[t] < 0 || v->pos[t] >= B;

    for (int k = 0; k < K; k++) {
        const int32_t id = v->ids[t * K + k], number = v->eidx[t * K + k];
        odd |= id < -1 || id >= g->experts;
        if (!odd && id >= 0 && id / g->local_experts == g->rank)
            odd |= number < 0 || number >= v->ecount[id];
    }
    return odd;
}

/* Tables from a network decide where this rank writes: every value is checked. Zero: the tables are valid. */
KFN_STEP int ll_tables_unsound(struct agent *ag, const struct group_dev *g, const struct ll_view *v, int K)
{
    const int B = v->desc->ntokens;
    int64_t pairs = 0;
    int odd = 0;

    AG_EACH(ag, int, e, g->experts)
    {
        odd |= v->ecount[e] < 0;
        pairs += v->ecount[e];
    }
    AG_EACH(ag, int, r, g->nranks) odd |= v->rcount[r] < 0 || v->rcount[r] > B;
    if (ag_any(ag, odd) || ag_sum(ag, pairs) > (int64_t)B * K)
        return 1;
    AG_EACH(ag, int, t, B) odd |= ll_token_unsound(g, v, B, K, t);
    return ag_any(ag, odd);
}

/* The tokens of source s that come here, in order; how many. */
KFN int ll_list_remote(struct agent *ag, const struct group_dev *g, const struct ll_view *v, int K, int32_t *list)
{
    const int B = v->desc->ntokens;
    int found = 0;

    AG_ROUNDS(ag, int, t, B)
    {
        const int comes = t < B && ll_goes_to(g, v->ids, K, t, g->rank);
        const int before = (int)ag_scan(ag, comes);
        if (comes)
            list[found + before] = t;
        found += (int)ag_sum(ag, comes);
    }
    return found;
}

/* All rows from other nodes, through each ring. One agent; what others find wrong in the tables ends the wait. */
KFN_STEP int ll_wait_all_rows(struct agent *ag, const struct group_dev *g, uint64_t epoch, uint64_t start)
{
    for (int ring = 0; ring < g->nrings; ring++) {
        int64_t rows = 0;
        AG_EACH(ag, int, s, g->nranks)
        if (!is_local(g, s) && ring_of(g, s, COUNTER(SIG_LL_ROWS, 0)) == ring)
            rows += ll_view_at(g, ll_rows_of(g, s, epoch), 0, 0).rcount[g->rank];
        rows = ag_sum(ag, rows);
        if (wait_ring_rows(ag, g, ring, (uint64_t)rows, SIG_LL_ROWS, slot_of(g, epoch), PHASE_LL_ROWS, start))
            return 1;
    }
    return 0;
}

/* Rows from other nodes: as many as the tables say (checked against what is possible); and the list of their tokens. */
KFN_STEP int ll_wait_remote(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    const uint64_t start = ag_now(ag);
    const int K = p->route.topk_n;

    for (int s = 0; s < g->nranks; s++) {
        if (is_local(g, s) || !g->mask[s] || g->recv_index_of[s] % ag_count(ag) != ag_index(ag))
            continue;
        const struct ll_view v = ll_open(g, s, epoch);
        const int32_t n = v.rcount[g->rank];
        if (ll_tables_unsound(ag, g, &v, K))
            return fail_all(ag, g, KSTATUS_MISMATCH, PHASE_LL_ROWS, s, 0, 0);
        const int found = ll_list_remote(ag, g, &v, K, g->lists + (size_t)g->recv_index_of[s] * (size_t)g->max_tokens);
        if (found != n)
            return fail_all(ag, g, KSTATUS_MISMATCH, PHASE_LL_ROWS, s, found, n);
        if (!g->enable_mask)
            expect_rows(ag, g, SIG_LL_ROWS, slot_of(g, epoch), s, (uint64_t)n);
        else if (wait_rows(ag, g, SIG_LL_ROWS, slot_of(g, epoch), s, (uint64_t)n, PHASE_LL_ROWS, start))
            return 1;
    }
    return !g->enable_mask && ag_index(ag) == 0 && ll_wait_all_rows(ag, g, epoch, start);
}

/* The descriptors of peers match this rank's signature and are within the limits of the group. */
KFN_STEP int ll_check_descs(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    int odd = 0;

    AG_EACH(ag, int, s, g->nranks)
    {
        const struct ll_desc *desc = ll_desc_of(g, s, epoch);
        odd |= g->mask[s] && (signature_differs(&p->signature, &desc->signature) || desc->ntokens < 0 ||
                              desc->ntokens > g->max_tokens);
    }
    if (!ag_any(ag, odd))
        return 0;
    for (int s = 0; s < g->nranks; s++) {
        if (!g->mask[s])
            continue;
        const struct ll_desc *desc = ll_desc_of(g, s, epoch);
        if (check_signature(ag, g, &p->signature, &desc->signature, PHASE_LL_DATA, s))
            return 1;
        if (desc->ntokens < 0 || desc->ntokens > g->max_tokens)
            return fail_all(ag, g, KSTATUS_MISMATCH, PHASE_LL_DATA, s, g->max_tokens, desc->ntokens);
    }
    return 0;
}

/* Counts and small outputs; and the rows, where senders have not `written` them. */
KFN_STEP int ll_receive(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch, int written)
{
    const struct group_dev *g = p->g;
    const int slot = slot_of(g, epoch);
    const uint64_t lap = lap_of(g, epoch);

    if (g->nnodes > 1 && (ll_wait_remote(ag, p, epoch) || sync_barrier(ag, g)))
        return 1;
    if (ll_count(ag, p, epoch))
        return 1;
    AG_MARK(ag, "count");
    /* Agents that compute places of rows read the counts of all agents. */
    const int places = !written || p->src_rank || (p->src_token && !p->open_src_token);
    if (places && sync_barrier(ag, g))
        return 1;
    if (wait_peers(ag, g, SCOPE_NODE, SIG_LL_ROWS, slot, lap, PHASE_LL_ROWS, NULL))
        return 1;
    AG_MARK(ag, "written");
    if (places || p->layout == LAYOUT_RANK_MAJOR)
        ll_take_rows(ag, p, epoch);
    if (sync_last(ag, g, 2))
        signal_peers(ag, g, SCOPE_ALL, SIG_LL_DONE, slot, lap);
    /* The caller may change its tensor once this operation has completed, so all must have read it. */
    return p->in_place && !ll_own_view(p, epoch).desc->written
               ? wait_peers(ag, g, SCOPE_ALL, SIG_LL_DONE, slot, lap, PHASE_LL_DONE, NULL)
               : 0;
}

/* All tables are written and match this rank's signature. */
KFN_STEP int ll_wait_tables(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    return wait_peers(ag, g, SCOPE_ALL, SIG_LL_DATA, slot_of(g, epoch), lap_of(g, epoch), PHASE_LL_DATA, p->wait_ns) ||
           ll_check_descs(ag, p, epoch);
}

KFN_STEP int ll_dispatch_recv(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch)
{
    return ll_wait_tables(ag, p, epoch) || ll_receive(ag, p, epoch, 0);
}

#endif
