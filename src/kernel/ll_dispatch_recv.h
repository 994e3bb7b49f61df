/* SPDX-License-Identifier: Apache-2.0 */
/* Low-latency dispatch: the receive half. The protocol is drawn in ll_dispatch.h. */
#ifndef EPX_KERNEL_LL_DISPATCH_RECV_H
#define EPX_KERNEL_LL_DISPATCH_RECV_H

#include "kernel/ll_dispatch_send.h"

/* How many rows source s has for this rank, once its LL_DATA has arrived. */
KFN_STEP int ll_rows_from(const struct group_dev *g, int s, uint64_t epoch)
{
    if (!is_local(g, s))
        return ll_header_of(g, s, epoch)->rows;
    return ll_view_at(g, ll_rows_of(g, s, epoch), 0, 0).rcount[g->rank];
}

/* The same for each expert of this rank. `offset` is ll_counts_offset(). */
KFN const int32_t *ll_counts_from(const struct group_dev *g, int s, uint64_t epoch, uint64_t offset)
{
    if (!is_local(g, s))
        return ll_header_counts(ll_header_of(g, s, epoch));
    return (const int32_t *)heap_at(g, s, offset) + g->rank * g->local_experts;
}

/* What came from each rank, and in all. One agent, from the tables themselves: others may not have counted yet. */
KFN_STEP void ll_count_ranks(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    const int R = g->nranks, L = g->local_experts, left = g->experts - g->rank * L;
    const int n_experts = left < 0 ? 0 : left < L ? left : L;
    const uint64_t offset = ll_counts_offset(g, epoch);
    int64_t total = 0, peers = 0;

    if (ag_index(ag) != ag_count(ag) / 2) /* the first agents wait for peers, the last ones compute places */
        return;
    AG_EACH(ag, int, s, R)
    {
        const int rows = is_active(g, s) ? ll_rows_from(g, s, epoch) : 0;
        int64_t n = p->layout == LAYOUT_RANK_MAJOR ? rows : 0;
        for (int l = 0; l < n_experts && is_active(g, s) && p->layout == LAYOUT_EXPERT_MAJOR; l++)
            n += ll_counts_from(g, s, epoch, offset)[l];
        if (p->rank_counts.data)
            index_put(&p->rank_counts, s, n);
        total += n;
        peers += s != g->rank && is_local(g, s) ? rows : 0;
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

/* What source s gets back begins here, in its receive buffer. */
KFN_STEP void ll_source_places(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch, int s)
{
    const struct group_dev *g = p->g;
    const int R = g->nranks, by_expert = p->layout == LAYOUT_EXPERT_MAJOR, local = is_local(g, s);
    const int keys = by_expert ? g->experts : R, wanted = by_expert ? g->rank * g->local_experts : g->rank;
    const int first = wanted < keys ? wanted : keys, n = by_expert ? g->local_experts : 1;
    const struct ll_view v = ll_view_at(g, ll_rows_of(g, local ? s : g->rank, epoch), 0, 0);
    const struct ll_header *header = local ? NULL : ll_header_of(g, s, epoch);
    const int32_t *all = by_expert ? v.ecount : v.rcount;
    const int32_t *count = local ? all + first : by_expert ? ll_header_counts(header) : &header->rows;
    int64_t run = 0;

    AG_EACH(ag, int, i, local ? first : 0) run += all[i];
    run = local ? ag_sum(ag, run) + ll_recv_half_row(g, v.desc->recv_half) : header->place;
    const int there = n < keys - first ? n : keys - first; /* the last rank may have fewer experts */
    ll_add_up(ag, count, there, run, p->h->source + s, R);
    AG_EACH(ag, int, l, n - there) p->h->source[(there + l) * R + s] = 0;
}

/* Both, for the combine that follows, by the agents that have the least other work: the last ones. */
KFN void ll_all_places(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    const int A = ag_count(ag), me = A - 1 - ag_index(ag);

    if (g->nranks % A == me && !has_nodes(g)) /* between nodes the headers have them: ll_send_tables() */
        ll_places(ag, p);
    for (int s = me; s < g->nranks; s += A)
        if (is_active(g, s))
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
            const int there = s < R && is_active(g, s) && e < g->experts;
            const int64_t n = there ? ll_counts_from(g, s, epoch, offset)[l] : 0, begin = run + ag_scan(ag, n);
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

/* A number from memory of another rank that leads to a place among `n`. A rank that the others have gone on without may
 * read anything there. Its operation is not good then, and it must not leave its bounds either ("Masks" in
 * docs/design.md). On a GPU nobody looks, as in lc_is_stale(). */
KFN int64_t ll_within(int64_t number, int64_t n)
{
    return !AG_ONE_LANE || (number >= 0 && number < n) ? number : 0;
}

/* Row i of the list of a source of the node. */
KFN struct ll_row ll_local_row(const struct ll_view *v, int K, int i)
{
    const int t = (int)ll_within(v->list[i], v->desc->ntokens);
    const size_t first = (size_t)t * (size_t)K;
    struct ll_row row;

    row.data = v->rows + (v->desc->ordered ? ll_within(v->pos[t], v->desc->ntokens) : t) * v->desc->row_stride;
    row.ids = v->ids + first;
    row.number = v->eidx + first;
    row.weights = v->weights + first;
    row.token = t;
    row.place = i;
    return row;
}

/* The k-th index of row i of source s's list, whose row has been written: where it came from. By each lane. */
KFN void ll_name_row(const struct ll_dispatch_params *p, const struct ll_view *v, int s, int i, int k)
{
    const struct group_dev *g = p->g;
    const int L = g->local_experts, t = (int)ll_within(v->list[i], v->desc->ntokens);
    const size_t pair = (size_t)t * (size_t)p->route.topk_n + (size_t)k;
    const int32_t id = v->ids[pair], number = v->eidx[pair], l = id - g->rank * L;

    if (id < 0 || l < 0 || l >= L)
        return;
    /* Entries that share a row: the first names it. Lanes of a GPU store the same twice, which costs less. */
    for (int before = 0; AG_ONE_LANE && before < k; before++)
        if (v->ids[pair - (size_t)k + (size_t)before] == id)
            return;
    const int64_t at = ll_within((int64_t)p->h->begin[l * g->nranks + s] + number, p->outer_rows);
    const int64_t place = (int64_t)l * p->outer_rows + at;
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

/* A row of source s, to each of its local experts. */
KFN_STEP void ll_expand(struct agent *ag, const struct ll_dispatch_params *p, const struct ll_row *row, int s)
{
    const struct group_dev *g = p->g;
    const int R = g->nranks, L = g->local_experts, K = p->route.topk_n;
    const int32_t *ids = row->ids;
    struct copy_set set;
    int n = 0;

    copy_set_begin(&set);
    AG_ROUNDS(ag, int, k, K)
    {
        const int id = k < K ? ids[k] : -1, here = id >= 0 && id / L == g->rank;
        int before;
        const int all = ag_vote(ag, here, &before);
        if (here) {
            const int l = id - g->rank * L;
            const int64_t at = ll_within((int64_t)p->h->begin[l * R + s] + row->number[k], p->outer_rows);
            const int64_t place = (int64_t)l * p->outer_rows + at;
            copy_set_offer(&set, n + before, p->out.tokens + l * p->out.outer_stride + at * p->out.stride);
            if (p->src_rank)
                p->src_rank[place] = s;
            if (p->src_token)
                p->src_token[place] = row->token;
        }
        n += all;
    }
    copy_set_settle(ag, &set);
    ag_copy_many(ag, &set, n, row->data, (size_t)p->signature.hidden_bytes);
    for (int k = 0; k < K && p->signature.scale_bytes; k++) {
        const int id = ids[k];
        if (id < 0 || id / L != g->rank)
            continue;
        const int l = id - g->rank * L;
        const int64_t at = ll_within((int64_t)p->h->begin[l * R + s] + row->number[k], p->outer_rows);
        row_copy_scales(ag, ll_scales_at(p, l, at), p->out.scale_stride, row->data + row_scales_at(&p->signature), 4,
                        p->signature.scale_bytes / 4);
    }
}

/* A row of source s, at its place in s's block. */
KFN_STEP void ll_place(struct agent *ag, const struct ll_dispatch_params *p, const struct ll_row *row, int s,
                       int written)
{
    const struct group_dev *g = p->g;
    const int L = g->local_experts, K = p->route.topk_n;
    const int64_t i = row->place, place = (int64_t)s * p->outer_rows + i;

    if (!written) {
        ag_copy(ag, p->out.tokens + s * p->out.outer_stride + i * p->out.stride, row->data,
                (size_t)p->signature.hidden_bytes);
        if (p->signature.scale_bytes)
            row_copy_scales(ag, ll_scales_at(p, s, i), p->out.scale_stride, row->data + row_scales_at(&p->signature), 4,
                            p->signature.scale_bytes / 4);
    }
    row_put_topk(ag, row->ids, row->weights, K, g->rank * L, g->rank * L + L, p->topk_form, &p->out_idx, p->out_weights,
                 place);
    if (ag_leader(ag)) {
        if (p->src_rank)
            p->src_rank[place] = s;
        if (p->src_token)
            p->src_token[place] = row->token;
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

/* Rows nth, nth + step, ... of source s of another node. Non-zero: one of them is invalid. */
KFN int ll_take_remote(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch, int s, int nth, int step)
{
    const struct ll_header *header = ll_header_of(p->g, s, epoch);
    const int rows = header->rows;

    for (int i = nth; i < rows; i += step) {
        const struct ll_row row = ll_remote_row(p, epoch, s, i);
        if (ll_record_unsound(ag, p, header, &row))
            return fail_all(ag, p->g, KSTATUS_MISMATCH, PHASE_LL_ROWS, s, 0, 0);
        if (p->layout == LAYOUT_RANK_MAJOR)
            ll_place(ag, p, &row, s, 0);
        else
            ll_expand(ag, p, &row, s);
    }
    return 0;
}

/* The same of a source of the node. Whoever goes on without this rank sets its abort word before it changes anything:
 * without the word, the descriptor that was read before is that of this operation, and says how large the tables are.
 * Non-zero: failed. */
KFN int ll_take_local(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch, int s, int nth, int step)
{
    const struct group_dev *g = p->g;
    struct ll_desc desc;
    const struct ll_view v = ll_open(g, s, epoch, &desc);
    const int n = (int)ll_within(v.rcount[g->rank], (int64_t)g->max_tokens + 1), written = desc.written;
    const int K = p->route.topk_n;

    if (AG_ONE_LANE && has_masks(g) && ag_look_behind(&control_of(g, g->rank)->abort_word))
        return wait_failed_by_word(ag, g, PHASE_LL_ROWS, 0, 0);
    if (p->layout == LAYOUT_EXPERT_MAJOR && written) { /* a lane for each index: nothing waits for the one before */
        for (int i = nth * AG_LANES + ag_lane(ag); i < n * K; i += step * AG_LANES)
            ll_name_row(p, &v, s, i / K, i % K);
        return 0;
    }
    for (int i = nth; i < n; i += step) {
        const struct ll_row row = ll_local_row(&v, K, i);
        if (p->layout == LAYOUT_RANK_MAJOR)
            ll_place(ag, p, &row, s, written);
        else
            ll_expand(ag, p, &row, s);
    }
    return 0;
}

/* What came from source s, by agents `nth`, nth + step, ... of those that serve it. Non-zero: failed. */
KFN int ll_take_source(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch, int s, int nth, int step)
{
    const struct group_dev *g = p->g;
    const int n = is_active(g, s) ? ll_rows_from(g, s, epoch) : 0;

    if (nth == 0 && ag_leader(ag) && p->layout == LAYOUT_RANK_MAJOR)
        p->h->count[s] = n;
    if (n > 0 &&
        (is_local(g, s) ? ll_take_local(ag, p, epoch, s, nth, step) : ll_take_remote(ag, p, epoch, s, nth, step)))
        return 1;
    ll_mark_tail(ag, p, s, n, nth, step);
    return 0;
}

/* Each source is served by its own share of the agents: an agent reads as few tables as possible. No source has more
 * than max_tokens rows. */
KFN_STEP int ll_take_rows(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch)
{
    const int R = p->g->nranks, A = ag_count(ag), me = ag_index(ag);

    if (A >= R)
        return ll_take_source(ag, p, epoch, me % R, me / R, A / R + (me % R < A % R));
    for (int s = me; s < R; s += A)
        if (ll_take_source(ag, p, epoch, s, 0, 1))
            return 1;
    return 0;
}

/* What source s says it does, and how many tokens or rows it has. */
KFN struct signature ll_signature_of(const struct group_dev *g, int s, uint64_t epoch, int32_t *rows)
{
    if (is_local(g, s)) {
        *rows = ll_desc_of(g, s, epoch)->ntokens;
        return ll_desc_of(g, s, epoch)->signature;
    }
    *rows = ll_header_there(g, s, epoch)->rows;
    return ll_header_signature(ll_header_there(g, s, epoch));
}

/* The descriptors of peers match this rank's signature and are within the limits of the group. */
KFN_STEP int ll_check_descs(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    int32_t rows;
    int odd = 0;

    AG_EACH(ag, int, s, g->nranks)
    if (is_active(g, s)) { /* the heap of a masked rank may be gone */
        const struct signature theirs = ll_signature_of(g, s, epoch, &rows);
        odd |= signature_differs(&p->signature, &theirs) || rows < 0 || rows > g->max_tokens;
    }
    if (!ag_any(ag, odd))
        return 0;
    for (int s = 0; s < g->nranks; s++) {
        if (!is_active(g, s))
            continue;
        const struct signature theirs = ll_signature_of(g, s, epoch, &rows);
        if (check_signature(ag, g, &p->signature, &theirs, PHASE_LL_DATA, s))
            return 1;
        if (rows < 0 || rows > g->max_tokens)
            return fail_all(ag, g, KSTATUS_MISMATCH, PHASE_LL_DATA, s, g->max_tokens, rows);
    }
    return 0;
}

/* Counts and small outputs; and the rows, where senders have not `written` them. */
KFN_STEP int ll_receive(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch, int written)
{
    const struct group_dev *g = p->g;
    const int slot = slot_of(g, epoch);
    const uint64_t lap = lap_of(g, epoch);

    if (has_nodes(g) && (ll_wait_remote(ag, p, epoch) || sync_barrier(ag, g)))
        return 1;
    if (ll_count(ag, p, epoch))
        return 1;
    AG_MARK(ag, MARK_COUNT);
    /* Agents that compute places of rows read the counts of all agents. */
    const int places = !written || p->src_rank || (p->src_token && !p->open_src_token);
    if (places && sync_barrier(ag, g))
        return 1;
    const int takes = places || p->layout == LAYOUT_RANK_MAJOR;
    if (takes ? wait_peers(ag, g, SCOPE_NODE, SIG_LL_ROWS, slot, lap, PHASE_LL_ROWS, NULL)
              : wait_peers_end(ag, g, SCOPE_NODE, SIG_LL_ROWS, slot, lap, PHASE_LL_ROWS))
        return 1;
    AG_MARK(ag, MARK_WRITTEN);
    if (takes && ll_take_rows(ag, p, epoch))
        return 1;
    if (sync_last(ag, g, 2))
        signal_peers(ag, g, SCOPE_ALL, SIG_LL_DONE, slot, lap);
    /* The caller may change its tensor once this operation has completed, so all must have read it. */
    return p->in_place && !ll_own_view(p, epoch).desc->written
               ? wait_peers_end(ag, g, SCOPE_ALL, SIG_LL_DONE, slot, lap, PHASE_LL_DONE)
               : 0;
}

/* All tables are written and match this rank's signature. Between nodes one agent compares, and the others meet it
 * before they use a row: tables may lie across a bus, where loads of one word by many agents come one after the
 * other. */
KFN_STEP int ll_wait_tables(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    return wait_peers(ag, g, SCOPE_ALL, SIG_LL_DATA, slot_of(g, epoch), lap_of(g, epoch), PHASE_LL_DATA, p->wait_ns) ||
           ((!has_nodes(g) || ag_index(ag) == 0) && ll_check_descs(ag, p, epoch));
}

/* Waits for all that the receive half needs, but for rows from other nodes. */
KFN_STEP int ll_dispatch_wait(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    return ll_wait_tables(ag, p, epoch) ||
           wait_peers(ag, g, SCOPE_NODE, SIG_LL_ROWS, slot_of(g, epoch), lap_of(g, epoch), PHASE_LL_ROWS, NULL);
}

KFN_STEP int ll_dispatch_recv(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch)
{
    return ll_wait_tables(ag, p, epoch) || ll_receive(ag, p, epoch, 0);
}

#endif
