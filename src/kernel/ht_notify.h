/* SPDX-License-Identifier: Apache-2.0 */
/*
 * High-throughput notify (handle update), epoch e, slot e % 2: after it every rank knows where each of its rows goes,
 * and every relay knows where to forward what passes through it.
 *
 *   rank s                                            rank d
 *   route its tokens
 *   wait HN_DONE[*] >= e - 2  (slot free)
 *   slot: descriptor, ecount[E], rcount[R];
 *   HN_DATA = e (put to other nodes,
 *     counted for each slot)  ---------------------->  wait HN_DATA[*] >= e, read everybody's counts
 *                                                      base[key] = rows of earlier ranks (+ zone start) at the
 *                                                      destination; totals, offsets and padding of its own zones
 *   pos[t][k] = base[key] + number
 *   put ids[B*K], pos[B*K] (and line[B*K], where source
 *     maps are kept), counter HN_TABLE  ------------->  the relay of s in each other node keeps them in its handle
 *                             <----------------------  HN_DONE = e
 */
#ifndef EPX_KERNEL_HT_NOTIFY_H
#define EPX_KERNEL_HT_NOTIFY_H

#include "kernel/route.h"
#include "kernel/rows.h"

struct hn_desc {
    struct signature signature;
    int32_t ntokens;
    int32_t reserved;
};
EPX_STATIC_ASSERT(sizeof(struct hn_desc) == 32, "shared between ranks");

/* Number 0 is the own block, 1 + n that of the n-th rank of other nodes. */
KFN uint64_t hn_counts_at(const struct group_dev *g, uint64_t epoch, int number)
{
    return g->ht.counts + ((epoch % 2) * (uint64_t)(1 + g->remotes) + (uint64_t)number) * g->ht.counts_stride;
}

KFN uint64_t hn_table_at(const struct group_dev *g, uint64_t epoch, int number)
{
    return g->ht.tables + ((epoch % 2) * (uint64_t)(1 + g->relay_max) + (uint64_t)number) * g->ht.table_stride;
}

/* How many epochs up to this one have its slot. Two epochs are on their way at a time, and the later may land first:
 * the network counts them separately. */
KFN uint64_t hn_lap(uint64_t epoch)
{
    return (epoch + 1) / 2;
}

KFN const struct hn_desc *hn_desc_of(const struct group_dev *g, int rank, uint64_t epoch)
{
    if (is_local(g, rank))
        return (const struct hn_desc *)heap_at(g, rank, hn_counts_at(g, epoch, 0));
    return (const struct hn_desc *)heap_at(g, g->rank, hn_counts_at(g, epoch, 1 + g->recv_index_of[rank]));
}

KFN const int32_t *hn_ecount(const struct group_dev *g, int rank, uint64_t epoch)
{
    return (const int32_t *)(hn_desc_of(g, rank, epoch) + 1);
}

KFN const int32_t *hn_rcount(const struct group_dev *g, int rank, uint64_t epoch)
{
    return hn_ecount(g, rank, epoch) + g->experts;
}

KFN_STEP void hn_put_counts(struct agent *ag, const struct group_dev *g, uint64_t epoch)
{
    const uint32_t bytes =
        (uint32_t)((sizeof(struct hn_desc) + (size_t)(g->experts + g->nranks) * 4 + 15) & ~(size_t)15);
    struct put_batch batch;

    put_begin(&batch);
    for (int d = 0; d < g->nranks; d++)
        if (in_scope(g, SCOPE_REMOTE, d))
            put(ag, g, &batch, d, COUNTER(SIG_HN_DATA, epoch % 2), hn_counts_at(g, epoch, 0),
                hn_counts_at(g, epoch, 1 + g->recv_index_at[d]), bytes);
    if (put_flush(ag, g, &batch))
        push_failed(ag, g); /* as in signal_peers() */
}

KFN_STEP void hn_publish(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    struct hn_desc *desc = (struct hn_desc *)heap_at(g, g->rank, hn_counts_at(g, epoch, 0));
    int32_t *counts = (int32_t *)(desc + 1);

    AG_EACH_ALL(ag, int, e, g->experts) counts[e] = p->h->ecount[e];
    AG_EACH_ALL(ag, int, r, g->nranks) counts[g->experts + r] = p->h->rcount[r];
    if (!sync_last(ag, g, 0))
        return;
    if (ag_leader(ag)) {
        desc->signature = p->signature;
        desc->ntokens = p->route.ntokens;
        p->h->state->key = 0; /* until hn_done() */
        g->state->epoch[OP_HT_NOTIFY] = epoch;
    }
    ag_sync(ag);
    if (g->nnodes > 1)
        hn_put_counts(ag, g, epoch);
    signal_peers(ag, g, SCOPE_NODE, SIG_HN_DATA, 0, epoch);
}

/* Of FLAT rows, and of lines of source maps: those of earlier ranks at each destination. */
KFN_STEP void hn_base_flat(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    int32_t *base = p->h->base + (p->layout == LAYOUT_FLAT ? 0 : g->experts);

    AG_EACH_ALL(ag, int, d, g->nranks)
    {
        int32_t run = 0;
        for (int s = 0; s < g->rank; s++)
            run += g->mask[s] ? hn_rcount(g, s, epoch)[d] : 0;
        base[d] = run;
    }
}

/* EXPERT_MAJOR: zone start of each expert at its rank, plus rows of earlier ranks. */
KFN_STEP void hn_base_zones(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    const int L = g->local_experts, align = p->alignment;

    AG_EACH_ALL(ag, int, d, g->nranks)
    {
        int32_t start = 0;
        for (int e = d * L; e < d * L + L && e < g->experts; e++) {
            int32_t total = 0, earlier = 0;
            for (int s = 0; s < g->nranks; s++) {
                const int32_t n = g->mask[s] ? hn_ecount(g, s, epoch)[e] : 0;
                earlier += s < g->rank ? n : 0;
                total += n;
            }
            p->h->base[e] = start + earlier;
            if (d == g->rank) {
                p->h->zone[e - d * L] = start;
                p->h->filled[e - d * L] = total;
            }
            start += (total + align - 1) / align * align;
        }
    }
}

/* Among the tokens of all ranks that come to the rank of entry k, the number of this one. */
KFN int64_t hn_token_number(const struct ht_notify_params *p, int64_t i)
{
    const struct handle_dev *h = p->h;
    const int K = p->route.topk_n, L = p->g->local_experts, d = h->ids[i] / L;
    const int32_t *base = h->base + (p->layout == LAYOUT_FLAT ? 0 : p->g->experts);

    for (int64_t j = i / K * K; j < i; j++)
        if (h->ids[j] >= 0 && h->ids[j] / L == d && h->ridx[j] >= 0)
            return (int64_t)base[d] + h->ridx[j];
    return (int64_t)base[d] + h->ridx[i];
}

/* What becomes of entry i, which has an expert, when rows are dropped. */
KFN int32_t hn_drop(const struct ht_notify_params *p, int64_t i, int32_t pos)
{
    if (p->drop & DROP_FLAT)
        return hn_token_number(p, i) < p->drop_rows ? p->h->ids[i] : -1;
    if (pos >= p->drop_rows)
        return -1;
    return p->drop & DROP_TOKENS && hn_token_number(p, i) >= p->drop_rows ? PHANTOM(pos) : pos;
}

/* The row of every (token, k) at its destination. */
KFN_STEP void hn_positions(struct agent *ag, const struct ht_notify_params *p)
{
    const struct group_dev *g = p->g;
    struct handle_dev *h = p->h;
    const int flat = p->layout == LAYOUT_FLAT;

    AG_EACH_ALL(ag, int64_t, i, (int64_t)p->route.ntokens * p->route.topk_n)
    {
        const int32_t id = h->ids[i];
        if (id < 0)
            h->pos[i] = -1;
        else if (flat)
            h->pos[i] = h->ridx[i] < 0 ? -1 : h->base[id / g->local_experts] + h->ridx[i];
        else
            h->pos[i] = h->base[id] + h->eidx[i];
        if (p->drop && id >= 0)
            h->pos[i] = hn_drop(p, i, h->pos[i]);
        if (h->line)
            h->line[i] = id < 0 || h->ridx[i] < 0 ? -1 : h->base[g->experts + id / g->local_experts] + h->ridx[i];
    }
}

/* Does token t have an expert on `node`? */
KFN int hn_goes_to_node(const struct group_dev *g, const int32_t *ids, int K, int64_t t, int node)
{
    for (int k = 0; k < K; k++) {
        const int32_t id = ids[t * K + k];
        if (id >= 0 && g->node_of[id / g->local_experts] == node)
            return 1;
    }
    return 0;
}

/* Between nodes: the own table to the relays, and each token's number among those that go to a node. */
KFN_STEP int hn_send_tables(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    struct handle_dev *h = p->h;
    const int B = p->route.ntokens, K = p->route.topk_n;
    const size_t half = ((size_t)B * (size_t)K * 4 + 15) & ~(size_t)15;
    char *table = heap_at(g, g->rank, hn_table_at(g, epoch, 0));
    struct put_batch batch;

    AG_EACH_ALL(ag, int64_t, i, (int64_t)B * K)
    {
        ((int32_t *)table)[i] = h->ids[i];
        ((int32_t *)(table + half))[i] = h->pos[i];
        if (h->line)
            ((int32_t *)(table + 2 * half))[i] = h->line[i];
    }
    for (int n = ag_index(ag); n < g->nnodes; n += ag_count(ag)) {
        int32_t run = 0;
        AG_ROUNDS(ag, int, t, n != g->node ? B : 0)
        {
            const int goes = t < B && hn_goes_to_node(g, h->ids, K, t, n);
            const int before = (int)ag_scan(ag, goes);
            if (t < B)
                h->nidx[(size_t)n * (size_t)g->max_tokens + (size_t)t] = goes ? run + before : -1;
            run += (int32_t)ag_sum(ag, goes);
        }
        if (ag_leader(ag))
            h->ncount[n] = run;
    }
    if (sync_barrier(ag, g))
        return 1;
    if (ag_index(ag) != 0)
        return 0;
    put_begin(&batch);
    for (int n = 0; n < g->nnodes; n++)
        if (n != g->node && g->mask[g->relay_rank[n]])
            put(ag, g, &batch, g->relay_rank[n], COUNTER(SIG_HN_TABLE, epoch % 2), hn_table_at(g, epoch, 0),
                hn_table_at(g, epoch, 1 + g->relay_slot[n]), (uint32_t)((h->line ? 3 : 2) * half));
    return put_flush(ag, g, &batch) ? push_failed(ag, g) : 0;
}

/* As a relay: take the table of source number j into the handle. */
KFN_STEP int hn_take_table(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch, int j)
{
    const struct group_dev *g = p->g;
    struct handle_dev *h = p->h;
    const int s = g->relay_sources[j], K = p->route.topk_n;
    const size_t M = (size_t)g->max_tokens;
    int32_t *ids = h->relay_ids + (size_t)j * M * (size_t)K, *pos = h->relay_pos + (size_t)j * M * (size_t)K;
    int32_t *list = h->relay_list + (size_t)j * M;
    int run = 0;

    if (!g->mask[s]) {
        if (ag_leader(ag))
            h->relay_n[j] = h->relay_peer[j] = 0;
        return 0;
    }
    if (wait_word(ag, g, signal_from(g, SIG_HN_TABLE, (int)(epoch % 2), s), hn_lap(epoch), PHASE_HN_TABLE, s,
                  ag_now(ag)))
        return 1;
    const int B = hn_desc_of(g, s, epoch)->ntokens;
    const size_t half = ((size_t)B * (size_t)K * 4 + 15) & ~(size_t)15;
    const char *table = heap_at(g, g->rank, hn_table_at(g, epoch, 1 + j));
    ag_copy(ag, ids, table, (size_t)B * (size_t)K * 4);
    ag_copy(ag, pos, table + half, (size_t)B * (size_t)K * 4);
    if (h->relay_line)
        ag_copy(ag, h->relay_line + (size_t)j * M * (size_t)K, table + 2 * half, (size_t)B * (size_t)K * 4);
    ag_sync(ag);
    /* A table from a network decides where this rank writes: every value is checked. */
    int odd = 0;
    AG_EACH(ag, int64_t, i, (int64_t)B * K)
    odd |= ids[i] < -1 || ids[i] >= g->experts || (pos[i] < -1 && !(p->drop & DROP_TOKENS));
    AG_EACH(ag, int64_t, i, h->relay_line ? (int64_t)B * K : 0)
    odd |= h->relay_line[(size_t)j * M * (size_t)K + (size_t)i] < -1;
    if (ag_any(ag, odd))
        return fail_all(ag, g, KSTATUS_MISMATCH, PHASE_HN_TABLE, s, g->experts, -1);
    AG_ROUNDS(ag, int, t, B)
    {
        const int comes = t < B && hn_goes_to_node(g, ids, K, t, g->node);
        const int before = (int)ag_scan(ag, comes);
        if (comes)
            list[run + before] = t;
        run += (int)ag_sum(ag, comes);
    }
    int64_t peer = 0;
    AG_EACH(ag, int64_t, i, (int64_t)B * K)
    {
        const int d = ids[i] < 0 || pos[i] < 0 ? g->rank : ids[i] / g->local_experts;
        peer += d != g->rank && is_local(g, d) && g->mask[d];
    }
    peer = ag_sum(ag, peer);
    if (ag_leader(ag)) {
        h->relay_n[j] = run;
        h->relay_peer[j] = (int32_t)peer;
    }
    return 0;
}

/* Of so many rows of zones, those that are not dropped. */
KFN int64_t hn_kept(const struct ht_notify_params *p, int64_t rows)
{
    return p->drop & DROP_ZONES && rows > p->drop_rows ? p->drop_rows : rows;
}

/* Padded and plain counts per local expert, by the lanes of one agent. Returns all rows, padding included. */
KFN_STEP int64_t hn_report_experts(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    struct handle_dev *h = p->h;
    const int L = g->local_experts, align = p->alignment, flat = p->layout == LAYOUT_FLAT;
    int64_t all = 0, ends = 0;

    AG_ROUNDS(ag, int, l, L)
    {
        const int e = g->rank * L + l;
        int64_t n = 0;
        for (int s = 0; s < g->nranks && l < L && e < g->experts; s++)
            n += g->mask[s] ? hn_ecount(g, s, epoch)[e] : 0;
        const int64_t zone = (n + align - 1) / align * align, padded = flat ? n : zone;
        const int64_t offset = all + ag_scan(ag, padded), before = ends + ag_scan(ag, zone);
        all += ag_sum(ag, padded);
        ends += ag_sum(ag, zone);
        if (l >= L)
            continue;
        h->info->expert_counts[l] = n;
        if (e >= g->experts && !flat) {
            h->zone[l] = (int32_t)offset;
            h->filled[l] = 0;
        }
        const int64_t start = hn_kept(p, offset), kept = hn_kept(p, offset + padded) - start;
        h->padded[l] = (int32_t)kept;
        if (p->expert_counts.data)
            index_put(&p->expert_counts, l, kept);
        if (p->expert_offsets.data)
            index_put(&p->expert_offsets, l, start);
        if (p->expert_rows.data)
            index_put(&p->expert_rows, l, n);
        if (p->expert_ends.data)
            index_put(&p->expert_ends, l, before + (flat ? zone : n));
        if (p->expert_stats)
            p->expert_stats[l] += (int32_t)n;
    }
    return all;
}

/* Rows that carry tokens of rank s to this one. */
KFN int64_t hn_rows_from(const struct ht_notify_params *p, int s, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    const int L = g->local_experts;
    int64_t n = 0;

    if (!g->mask[s])
        return 0;
    if (p->layout == LAYOUT_FLAT)
        return hn_rcount(g, s, epoch)[g->rank];
    for (int e = g->rank * L; e < g->rank * L + L && e < g->experts; e++)
        n += hn_ecount(g, s, epoch)[e];
    return n;
}

/* Tokens with an expert here, and the inclusive sums that the caller asked for: by source rank modulo their number. */
KFN_STEP int64_t hn_report_sources(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    const int n = p->source_ends.data ? p->source_ends_n : g->nranks;
    int64_t all = 0;

    AG_ROUNDS(ag, int, i, n)
    {
        int64_t mine = 0;
        for (int s = i; s < g->nranks && i < n; s += n)
            mine += g->mask[s] ? hn_rcount(g, s, epoch)[g->rank] : 0;
        const int64_t end = all + ag_scan(ag, mine) + mine;
        all += ag_sum(ag, mine);
        if (i < n && p->source_ends.data)
            index_put(&p->source_ends, i, end);
    }
    return all;
}

/* The caller's counters and what the host will ask for. One agent. */
KFN_STEP void hn_report_counts(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    struct handle_dev *h = p->h;
    const int64_t padded = hn_report_experts(ag, p, epoch), tokens = hn_report_sources(ag, p, epoch);
    int64_t total = 0, mine = 0;

    AG_EACH(ag, int, s, g->nranks)
    {
        const int64_t n = hn_rows_from(p, s, epoch);
        if (p->rank_counts.data)
            index_put(&p->rank_counts, s, n);
        total += n;
        mine += s == g->rank ? n : 0;
    }
    AG_EACH(ag, int, j, g->nnodes > 1 ? g->relay_count : 0) /* these this rank forwards to itself */
    mine += hn_rows_from(p, g->relay_sources[j], epoch);
    total = ag_sum(ag, total);
    mine = ag_sum(ag, mine);
    if (ag_leader(ag)) {
        h->state->filled_rows = total;
        h->state->peer_rows = total - mine;
        h->state->recv_rows = p->layout == LAYOUT_FLAT ? total : hn_kept(p, padded);
        h->state->tokens = h->info->tokens = tokens;
        h->info->rows = h->state->recv_rows;
        if (p->total.data)
            index_put(&p->total, 0, p->layout == LAYOUT_FLAT ? total : padded);
    }
    ag_sync(ag);
    if (ag_leader(ag))
        ag_store_release(&h->info->epoch, h->info->epoch + 1); /* pairs with the host's acquire, recv_count */
}

/* What every rank learns of all ranks. */
KFN_STEP void hn_report_ranks(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    const int R = g->nranks;

    if (p->rank_matrix.data)
        AG_EACH_ALL(ag, int, i, R *R)
    index_put(&p->rank_matrix, i, g->mask[i / R] ? hn_rcount(g, i / R, epoch)[i % R] : 0);
    if (p->rank_tokens.data)
        AG_EACH_ALL(ag, int, s, R) index_put(&p->rank_tokens, s, g->mask[s] ? hn_desc_of(g, s, epoch)->ntokens : 0);
}

/* What passes through this rank. One lane of one agent, when all tables have been taken. */
KFN void hn_report_relay(const struct ht_notify_params *p)
{
    const struct group_dev *g = p->g;

    if (!p->relay_counts.data)
        return;
    for (int s = 0; s < g->nranks; s++)
        index_put(&p->relay_counts, s, 0);
    for (int j = 0; j < g->relay_count; j++)
        index_put(&p->relay_counts, g->relay_sources[j], p->h->relay_n[j]);
}

KFN_STEP int hn_check_descs(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    for (int s = 0; s < g->nranks; s++) {
        if (!g->mask[s])
            continue;
        const struct hn_desc *desc = hn_desc_of(g, s, epoch);
        if (check_signature(ag, g, &p->signature, &desc->signature, PHASE_HN_DATA, s))
            return 1;
        if (desc->ntokens < 0 || desc->ntokens > g->max_tokens)
            return fail_all(ag, g, KSTATUS_MISMATCH, PHASE_HN_DATA, s, g->max_tokens, desc->ntokens);
    }
    return 0;
}

/* Stage HN_COUNTS: the counts of all ranks are there. */
KFN_STEP int hn_counts(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    if (epoch > 2 && wait_peers(ag, g, SCOPE_ALL, SIG_HN_DONE, 0, epoch - 2, PHASE_HN_SLOT, NULL))
        return 1;
    hn_publish(ag, p, epoch);
    if (wait_peers(ag, g, SCOPE_NODE, SIG_HN_DATA, 0, epoch, PHASE_HN_DATA, NULL))
        return 1;
    if (g->nnodes > 1 &&
        wait_peers(ag, g, SCOPE_REMOTE, SIG_HN_DATA, (int)(epoch % 2), hn_lap(epoch), PHASE_HN_DATA, NULL))
        return 1;
    if (hn_check_descs(ag, p, epoch))
        return 1;
    if (ag_index(ag) == 0)
        hn_report_counts(ag, p, epoch);
    return 0;
}

/* Stage HN_PLACES: the row of every (token, k); between nodes, the tables for the relays. */
KFN int hn_places(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    hn_report_ranks(ag, p, epoch);
    if (p->layout == LAYOUT_FLAT)
        hn_base_flat(ag, p, epoch);
    else
        hn_base_zones(ag, p, epoch);
    if (p->h->line || p->drop & DROP_TOKENS)
        hn_base_flat(ag, p, epoch);
    if (sync_barrier(ag, g))
        return 1;
    hn_positions(ag, p);
    return g->nnodes > 1 && (sync_barrier(ag, g) || hn_send_tables(ag, p, epoch));
}

#if AG_STAGED
/* Stage HN_TABLES: the tables that this relay takes have landed. One agent. */
KFN_STEP int hn_tables(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    const uint64_t start = ag_now(ag);

    for (int j = 0; j < g->relay_count; j++) {
        const int s = g->relay_sources[j];
        if (g->mask[s] && wait_word(ag, g, signal_from(g, SIG_HN_TABLE, (int)(epoch % 2), s), hn_lap(epoch),
                                    PHASE_HN_TABLE, s, start))
            return 1;
    }
    return 0;
}
#endif

/* The last stage: this rank has read what the others published. */
KFN void hn_done(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    if (!sync_last(ag, p->g, 1))
        return;
    if (ag_leader(ag)) {
        hn_report_relay(p);
        p->h->state->key = p->key;
    }
    ag_sync(ag);
    signal_peers(ag, p->g, SCOPE_ALL, SIG_HN_DONE, 0, epoch);
}

KFN int hn_run(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    if (stage_runs(ag, HN_ROUTE) && route_plan(ag, g, p->h, &p->route))
        return 1;
    if (stage_runs(ag, HN_COUNTS) && hn_counts(ag, p, epoch))
        return 1;
    if (stage_runs(ag, HN_PLACES) && hn_places(ag, p, epoch))
        return 1;
#if AG_STAGED
    if (stage_runs(ag, HN_TABLES) && hn_tables(ag, p, epoch))
        return 1;
#endif
    for (int j = ag_index(ag); stage_runs(ag, HN_TAKE) && j < g->relay_count; j += ag_count(ag))
        if (hn_take_table(ag, p, epoch, j))
            return 1;
    if (stage_runs(ag, p->nodes ? HN_TAKE : HN_PLACES))
        hn_done(ag, p, epoch);
    return 0;
}

KFN void kernel_ht_notify(struct agent *ag, const struct ht_notify_params *p)
{
    const uint64_t epoch = stage_epoch(ag, p->g, OP_HT_NOTIFY, HN_COUNTS);

    if (!kernel_begin_agreed(ag, p->g))
        hn_run(ag, p, epoch);
    kernel_end(ag, p->g);
}

#endif
