/* SPDX-License-Identifier: Apache-2.0 */
/*
 * High-throughput notify (handle update), epoch e, slot e % 2: after it every rank knows where each of its rows goes in
 * its node, and every relay where to forward what passes through it.
 *
 *   rank s                                            ranks d of a node, and q, the relay of s there
 *   route its tokens; cut them into rounds
 *   wait HN_DONE[node] >= e - 2  (slot free)
 *   a block for each node: descriptor, and counts
 *   for its ranks and experts alone
 *   own node: HN_DATA = e  ------------------------->  wait HN_DATA[node] >= e
 *   others: put to q, counter HN_DATA  ------------->  q: wait for its sources, then HN_TABLE = e to its node
 *                                                      wait HN_TABLE[node] >= e, read everybody's counts
 *                                                      base = rows of earlier ranks (+ zone start) at the ranks of this
 *                                                      node, of the own rows and of each source of this relay
 *   pos[t][k] = base + number, in the own node
 *                             <----------------------  HN_DONE = e, in the node
 *
 * Two slots are enough between nodes: a rank that has ended update e - 1 has counts of every other, so each of those
 * has begun e - 1 and read what it wanted of e - 2.
 */
#ifndef EPX_KERNEL_HT_NOTIFY_H
#define EPX_KERNEL_HT_NOTIFY_H

#include "kernel/ht_rounds.h"
#include "kernel/route.h"

/* Opens a block. rcount[ranks of the node], ecount[their experts], rows[rounds] follow. */
struct hn_desc {
    struct signature signature;
    int32_t ntokens;
    union {
        int32_t rounds;        /* between nodes */
        int32_t expected_rows; /* in a group of one node; 0: it does not say */
    };
};
EPX_STATIC_ASSERT(sizeof(struct hn_desc) == 32, "shared between ranks");

/* Numbers 0 to nnodes - 1 are the own blocks, nnodes + j that of source number j. */
KFN uint64_t hn_block_at(const struct group_dev *g, uint64_t epoch, int number)
{
    return g->ht.counts + ((epoch % 2) * (uint64_t)(g->nnodes + g->relay_max) + (uint64_t)number) * g->ht.counts_stride;
}

/* How many epochs up to this one have its slot. Two epochs are on their way at a time, and the later may land first:
 * the network counts them separately. */
KFN uint64_t hn_lap(uint64_t epoch)
{
    return (epoch + 1) / 2;
}

/* What `rank` says to this node. */
KFN const struct hn_desc *hn_desc_of(const struct group_dev *g, int rank, uint64_t epoch)
{
    if (is_local(g, rank))
        return (const struct hn_desc *)heap_at(g, rank, hn_block_at(g, epoch, g->node));
    return (const struct hn_desc *)heap_at(g, g->relay_of[rank],
                                           hn_block_at(g, epoch, g->nnodes + g->relay_number[rank]));
}

/* Rows of `rank` to the ranks of this node, and to each of their experts. */
KFN const int32_t *hn_rcount(const struct group_dev *g, int rank, uint64_t epoch)
{
    return (const int32_t *)(hn_desc_of(g, rank, epoch) + 1);
}

KFN const int32_t *hn_ecount(const struct group_dev *g, int rank, uint64_t epoch)
{
    return hn_rcount(g, rank, epoch) + node_size(g, g->node);
}

KFN const int32_t *hn_rounds(const struct group_dev *g, int rank, uint64_t epoch)
{
    return hn_ecount(g, rank, epoch) + node_size(g, g->node) * g->local_experts;
}

/* All of its rows, by rank: in updates that drop FLAT rows. */
KFN const int32_t *hn_all_rcount(const struct group_dev *g, int rank, uint64_t epoch)
{
    return hn_rounds(g, rank, epoch) + g->ht.rounds;
}

/* ---- Between nodes: rounds ------------------------------------------------------------------------------------- */

/* The number of each token among those that go to node n, and how many there are before each block of tokens. */
KFN_STEP void hn_number_node(struct agent *ag, const struct ht_notify_params *p, int n)
{
    const struct group_dev *g = p->g;
    struct handle_dev *h = p->h;
    const int B = p->route.ntokens, K = p->route.topk_n, per = g->ht.block_tokens, N = g->nnodes;
    const int blocks = (B + per - 1) / per;
    int32_t run = 0;

    for (int b = 0; b < blocks; b++) {
        const int first = b * per, many = B - first < per ? B - first : per;
        if (ag_leader(ag))
            h->block_start[(size_t)b * (size_t)N + (size_t)n] = run;
        AG_ROUNDS(ag, int, i, many)
        {
            const int64_t at = (int64_t)(first + i) * K;
            int goes = -1;
            for (int k = 0; i < many && k < K; k++) {
                const int32_t id = h->ids[at + k];
                if (id < 0 || g->node_of[id / g->local_experts] != n)
                    continue;
                h->nidx[at + k] = -1;
                goes = goes < 0 && n != g->node ? k : goes;
            }
            const int before = (int)ag_scan(ag, goes >= 0);
            if (goes >= 0)
                h->nidx[at + goes] = run + before;
            run += (int32_t)ag_sum(ag, goes >= 0);
        }
    }
    if (ag_leader(ag))
        h->block_start[(size_t)blocks * (size_t)N + (size_t)n] = run;
}

/* Blocks of tokens become rounds: as many as fit into a slot of every node. One agent. */
KFN_STEP void hn_cut_rounds(struct agent *ag, const struct ht_notify_params *p)
{
    const struct group_dev *g = p->g;
    struct handle_dev *h = p->h;
    const int per = g->ht.block_tokens, N = g->nnodes, blocks = (p->route.ntokens + per - 1) / per;
    int rounds = 0, first = 0, rows = 0;

    for (int b = 1; b < blocks; b++) {
        int full = 0;
        AG_EACH(ag, int, n, N)
        full |= h->block_start[(size_t)(b + 1) * (size_t)N + (size_t)n] -
                    h->block_start[(size_t)first * (size_t)N + (size_t)n] >
                g->ht.round_rows;
        if (!ag_any(ag, full))
            continue;
        first = b;
        rounds++;
        if (ag_leader(ag))
            h->round_block[rounds] = first;
    }
    if (!ag_leader(ag))
        return;
    h->round_block[0] = 0;
    h->round_block[rounds + 1] = blocks;
    h->state->rounds = rounds + 1;
    for (int n = 0; n < N; n++) {
        h->node_first[n] = rows;
        rows += h->block_start[(size_t)blocks * (size_t)N + (size_t)n];
    }
}

/* Stage HN_ROUTE, between nodes. */
KFN_STEP int hn_number(struct agent *ag, const struct ht_notify_params *p)
{
    const struct group_dev *g = p->g;

    for (int n = ag_index(ag); n < g->nnodes; n += ag_count(ag))
        hn_number_node(ag, p, n);
    if (sync_barrier(ag, g))
        return 1;
    if (ag_index(ag) == 0)
        hn_cut_rounds(ag, p);
    return sync_barrier(ag, g);
}

/* ---- Counts ---------------------------------------------------------------------------------------------------- */

KFN void hn_write_block(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch, int n)
{
    const struct group_dev *g = p->g;
    const struct handle_dev *h = p->h;
    const int P = node_size(g, n), L = g->local_experts;
    int32_t *counts = (int32_t *)((struct hn_desc *)heap_at(g, g->rank, hn_block_at(g, epoch, n)) + 1);

    AG_EACH_ALL(ag, int, i, P) counts[i] = h->rcount[node_member(g, n, i)];
    AG_EACH_ALL(ag, int, i, P *L)
    {
        const int e = node_member(g, n, i / L) * L + i % L;
        counts[P + i] = e < g->experts ? h->ecount[e] : 0;
    }
    AG_EACH_ALL(ag, int, r, n == g->node ? 0 : h->state->rounds) counts[P + P * L + r] = ht_round_rows(g, h, r, n);
    AG_EACH_ALL(ag, int, r, p->drop &DROP_FLAT ? g->nranks : 0) counts[P + P * L + g->ht.rounds + r] = h->rcount[r];
}

KFN_STEP void hn_put_blocks(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    struct put_batch batch;

    put_begin(&batch);
    for (int n = 0; n < g->nnodes; n++) {
        const int more = p->drop & DROP_FLAT ? g->ht.rounds + g->nranks : p->h->state->rounds;
        const size_t words = (size_t)node_size(g, n) * (size_t)(1 + g->local_experts) + (size_t)more;
        if (ht_sends_to(g, n))
            put(ag, g, &batch, g->relay_rank[n], COUNTER(SIG_HN_DATA, epoch % 2), hn_block_at(g, epoch, n),
                hn_block_at(g, epoch, g->nnodes + g->relay_slot[n]),
                (uint32_t)up16(sizeof(struct hn_desc) + words * 4));
    }
    if (put_flush(ag, g, &batch))
        push_failed(ag, g); /* as in signal_peers() */
}

KFN_STEP void hn_publish(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    for (int n = 0; n < g->nnodes; n++)
        hn_write_block(ag, p, epoch, n);
    if (!sync_last(ag, g, 0))
        return;
    AG_EACH(ag, int, n, g->nnodes)
    {
        struct hn_desc *desc = (struct hn_desc *)heap_at(g, g->rank, hn_block_at(g, epoch, n));
        desc->signature = p->signature;
        desc->ntokens = p->route.ntokens;
        desc->rounds = g->nnodes > 1 ? p->h->state->rounds : (int32_t)p->expected_rows;
    }
    if (ag_leader(ag)) {
        p->h->state->key = 0; /* until hn_done() */
        g->state->epoch[OP_HT_NOTIFY] = epoch;
    }
    ag_sync(ag);
    if (g->nnodes > 1)
        hn_put_blocks(ag, p, epoch);
    signal_peers(ag, g, SCOPE_NODE, SIG_HN_DATA, 0, epoch);
}

/* Where this rank keeps the base of the rows of rank s: its own, or as the relay of s; NULL: neither. */
KFN int32_t *hn_base_of(const struct ht_notify_params *p, int s)
{
    const struct group_dev *g = p->g;

    if (s == g->rank)
        return p->h->base;
    if (is_local(g, s) || g->relay_of[s] != g->rank)
        return NULL;
    return p->h->relay_base + (size_t)g->relay_number[s] * g->ht.base_stride;
}

/* Of FLAT rows, and of lines of source maps: those of earlier ranks at each destination of this node. */
KFN_STEP void hn_base_flat(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    const int first = p->layout == LAYOUT_FLAT ? 0 : ht_line_base(g);

    AG_EACH_ALL(ag, int, i, node_size(g, g->node))
    {
        int32_t run = 0;
        for (int s = 0; s < g->nranks; s++) {
            int32_t *base = g->mask[s] ? hn_base_of(p, s) : NULL;
            if (base)
                base[first + i] = run;
            run += g->mask[s] ? hn_rcount(g, s, epoch)[i] : 0;
        }
    }
}

/* EXPERT_MAJOR: zone start of each expert at its rank, plus rows of earlier ranks. */
KFN_STEP void hn_base_zones(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    const int L = g->local_experts, align = p->alignment;

    AG_EACH_ALL(ag, int, i, node_size(g, g->node))
    {
        const int mine = node_member(g, g->node, i) == g->rank;
        int32_t start = 0;
        for (int l = 0; l < L && node_member(g, g->node, i) * L + l < g->experts; l++) {
            int32_t run = start;
            for (int s = 0; s < g->nranks; s++) {
                int32_t *base = g->mask[s] ? hn_base_of(p, s) : NULL;
                if (base)
                    base[i * L + l] = run;
                run += g->mask[s] ? hn_ecount(g, s, epoch)[i * L + l] : 0;
            }
            if (mine) {
                p->h->zone[l] = start;
                p->h->filled[l] = run - start;
            }
            start += (run - start + align - 1) / align * align;
        }
    }
}

/* Among the tokens of all ranks that come to the rank of entry i, the number of this one. */
KFN int64_t hn_token_number(const struct ht_notify_params *p, int64_t i)
{
    const struct group_dev *g = p->g;
    const struct handle_dev *h = p->h;
    const int K = p->route.topk_n, L = g->local_experts, d = h->ids[i] / L;
    const int64_t base = p->drop & DROP_FLAT ? h->far_base[d] : h->base[ht_line_base(g) + place_in_node(g, d)];

    for (int64_t j = i / K * K; j < i; j++)
        if (h->ids[j] >= 0 && h->ids[j] / L == d && h->ridx[j] >= 0)
            return base + h->ridx[j];
    return base + h->ridx[i];
}

/* What becomes of entry i, which has an expert, when rows are dropped: FLAT of any node, else of this one. */
KFN int32_t hn_drop(const struct ht_notify_params *p, int64_t i, int32_t pos)
{
    if (p->drop & DROP_FLAT)
        return hn_token_number(p, i) < p->drop_rows ? p->h->ids[i] : -1;
    if (pos >= p->drop_rows)
        return -1;
    return p->drop & DROP_TOKENS && hn_token_number(p, i) >= p->drop_rows ? PHANTOM(pos) : pos;
}

/* FLAT rows are dropped at the source: rows of earlier ranks at all destinations. */
KFN_STEP void hn_base_far(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    AG_EACH_ALL(ag, int, d, g->nranks)
    {
        int32_t run = 0;
        for (int s = 0; s < g->rank; s++)
            run += g->mask[s] ? hn_all_rcount(g, s, epoch)[d] : 0;
        p->h->far_base[d] = run;
    }
}

/* The row of every (token, k) of this node at its destination. */
KFN_STEP void hn_positions(struct agent *ag, const struct ht_notify_params *p)
{
    const struct group_dev *g = p->g;
    struct handle_dev *h = p->h;
    const int flat = p->layout == LAYOUT_FLAT, L = g->local_experts;

    AG_EACH_ALL(ag, int64_t, i, (int64_t)p->route.ntokens * p->route.topk_n)
    {
        const int32_t id = h->ids[i];
        const int d = id < 0 ? -1 : id / L, place = d < 0 || !is_local(g, d) ? -1 : place_in_node(g, d);
        if (place < 0)
            h->pos[i] = -1;
        else if (flat)
            h->pos[i] = h->ridx[i] < 0 ? -1 : h->base[place] + h->ridx[i];
        else
            h->pos[i] = h->base[place * L + id % L] + h->eidx[i];
        if (p->drop && id >= 0 && (place >= 0 || p->drop & DROP_FLAT))
            h->pos[i] = hn_drop(p, i, h->pos[i]);
        if (h->line)
            h->line[i] = place < 0 || h->ridx[i] < 0 ? -1 : h->base[ht_line_base(g) + place] + h->ridx[i];
    }
}

/* As a relay: how many rows each round of source number j brings. */
KFN_STEP void hn_take_rounds(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch, int j)
{
    const struct group_dev *g = p->g;
    struct handle_dev *h = p->h;
    const int s = g->relay_sources[j], active = g->mask[s], flat = p->layout == LAYOUT_FLAT, L = g->local_experts;
    const int rounds = active ? hn_desc_of(g, s, epoch)->rounds : 0, P = active ? node_size(g, g->node) : 0;
    int64_t rows = 0, peer = 0;

    AG_EACH(ag, int, r, rounds)
    {
        const int32_t n = hn_rounds(g, s, epoch)[r];
        h->relay_rows[(size_t)j * (size_t)g->ht.rounds + (size_t)r] = n;
        rows += n;
    }
    AG_EACH(ag, int, i, flat ? P : P *L)
    {
        const int d = node_member(g, g->node, flat ? i : i / L);
        if (d != g->rank && g->mask[d])
            peer += flat ? hn_rcount(g, s, epoch)[i] : hn_ecount(g, s, epoch)[i];
    }
    rows = ag_sum(ag, rows);
    peer = ag_sum(ag, peer);
    if (ag_leader(ag)) {
        h->relay_rounds[j] = rounds;
        h->relay_n[j] = (int32_t)rows;
        h->relay_peer[j] = (int32_t)peer;
    }
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
    const int place = place_in_node(g, g->rank);
    int64_t all = 0, ends = 0;

    AG_ROUNDS(ag, int, l, L)
    {
        const int e = g->rank * L + l;
        int64_t n = 0;
        for (int s = 0; s < g->nranks && l < L && e < g->experts; s++)
            n += g->mask[s] ? hn_ecount(g, s, epoch)[place * L + l] : 0;
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
    const int L = g->local_experts, place = place_in_node(g, g->rank);
    int64_t n = 0;

    if (!g->mask[s])
        return 0;
    if (p->layout == LAYOUT_FLAT)
        return hn_rcount(g, s, epoch)[place];
    for (int l = 0; l < L; l++)
        n += hn_ecount(g, s, epoch)[place * L + l];
    return n;
}

/* Tokens with an expert here, and the inclusive sums that the caller asked for: by source rank modulo their number. */
KFN_STEP int64_t hn_report_sources(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    const int n = p->source_ends.data ? p->source_ends_n : g->nranks, place = place_in_node(g, g->rank);
    int64_t all = 0;

    AG_ROUNDS(ag, int, i, n)
    {
        int64_t mine = 0;
        for (int s = i; s < g->nranks && i < n; s += n)
            mine += g->mask[s] ? hn_rcount(g, s, epoch)[place] : 0;
        const int64_t end = all + ag_scan(ag, mine) + mine;
        all += ag_sum(ag, mine);
        if (i < n && p->source_ends.data)
            index_put(&p->source_ends, i, end);
    }
    return all;
}

/* Rounds that this rank has a part in. */
KFN int hn_most_rounds(const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    int most = g->nnodes > 1 ? p->h->state->rounds : 0;

    for (int j = 0; g->nnodes > 1 && j < g->relay_count; j++) {
        const int s = g->relay_sources[j], n = g->mask[s] ? hn_desc_of(g, s, epoch)->rounds : 0;
        most = n > most ? n : most;
    }
    return most;
}

/* Rows that rank d receives from all ranks, padding included. */
KFN int64_t hn_rows_at(const struct ht_notify_params *p, int d, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    const int L = g->local_experts, align = p->alignment;
    int64_t rows = 0;

    for (int s = 0; s < g->nranks && p->layout == LAYOUT_FLAT; s++)
        rows += g->mask[s] ? hn_rcount(g, s, epoch)[d] : 0;
    for (int e = d * L; p->layout != LAYOUT_FLAT && e < d * L + L && e < g->experts; e++) {
        int64_t n = 0;
        for (int s = 0; s < g->nranks; s++)
            n += g->mask[s] ? hn_ecount(g, s, epoch)[e] : 0;
        rows += (n + align - 1) / align * align;
    }
    return rows;
}

/* Does any rank get more rows than it expected? All ranks of a node find the same: they read the same counts. Ranks of
 * several nodes do not see them all: there nothing is as expected. */
KFN_STEP int hn_unexpected(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    int more = 0;

    AG_EACH(ag, int, d, g->nnodes == 1 ? g->nranks : 0)
    {
        const int32_t expected = g->mask[d] ? hn_desc_of(g, d, epoch)->expected_rows : 0;
        more |= expected > 0 && hn_rows_at(p, d, epoch) > expected;
    }
    return g->nnodes > 1 || ag_any(ag, more);
}

/* The caller's counters and what the host will ask for. One agent. */
KFN_STEP void hn_report_counts(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    struct handle_dev *h = p->h;
    const int64_t padded = hn_report_experts(ag, p, epoch), tokens = hn_report_sources(ag, p, epoch);
    const int unexpected = hn_unexpected(ag, p, epoch);
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
        h->state->most_rounds = hn_most_rounds(p, epoch);
        h->state->drop = p->drop;
        h->state->drop_rows = p->drop_rows;
        h->info->rounds = h->state->most_rounds;
        h->info->unexpected = h->state->unexpected = unexpected;
        if (p->total.data)
            index_put(&p->total, 0, p->layout == LAYOUT_FLAT ? total : padded);
    }
    ag_sync(ag);
    if (ag_leader(ag))
        ag_store_release(&h->info->epoch, h->info->epoch + 1); /* pairs with the host's acquire, recv_count */
}

/* What every rank learns of all ranks: how many rows they send to its node. */
KFN_STEP void hn_report_ranks(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    const int R = g->nranks;

    if (p->rank_matrix.data)
        AG_EACH_ALL(ag, int, i, R *R)
        {
            const int s = i / R, d = i % R;
            const int64_t n = !is_local(g, d) ? -1 : !g->mask[s] ? 0 : hn_rcount(g, s, epoch)[place_in_node(g, d)];
            index_put(&p->rank_matrix, i, n);
        }
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

/* As a relay: what came from a network decides where this rank looks and writes. */
KFN_STEP int hn_check_rounds(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    for (int j = 0; j < g->relay_count; j++) {
        const int s = g->relay_sources[j], rounds = g->mask[s] ? hn_desc_of(g, s, epoch)->rounds : 1;
        int odd = rounds < 1 || rounds > g->ht.rounds;
        AG_EACH(ag, int, r, odd || !g->mask[s] ? 0 : rounds)
        odd |= hn_rounds(g, s, epoch)[r] < 0 || hn_rounds(g, s, epoch)[r] > g->ht.round_rows;
        if (ag_any(ag, odd))
            return fail_all(ag, g, KSTATUS_MISMATCH, PHASE_HN_DATA, s, g->ht.rounds, rounds);
    }
    return 0;
}

/* As a relay: the counts of its sources, of which it then tells its node. One agent. */
KFN_STEP int hn_relay_counts(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    const uint64_t start = ag_now(ag);

    for (int j = 0; j < g->relay_count; j++) {
        const int s = g->relay_sources[j];
        if (g->mask[s] &&
            wait_word(ag, g, signal_from(g, SIG_HN_DATA, (int)(epoch % 2), s), hn_lap(epoch), PHASE_HN_DATA, s, start))
            return 1;
    }
    signal_peers(ag, g, SCOPE_NODE, SIG_HN_TABLE, 0, epoch);
    return 0;
}

/* Counts that came through the other relays of the node. One agent. */
KFN_STEP int hn_wait_relays(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    const uint64_t start = ag_now(ag);

    for (int q = 0; q < g->nranks; q++)
        if (in_scope(g, SCOPE_NODE, q) &&
            wait_word(ag, g, signal_from(g, SIG_HN_TABLE, 0, q), epoch, PHASE_HN_TABLE, q, start))
            return 1;
    return 0;
}

/* Between nodes: counts of all ranks elsewhere. All agents. */
KFN_STEP int hn_remote_counts(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    const int failed = ag_index(ag) == 0 && (hn_relay_counts(ag, p, epoch) || hn_wait_relays(ag, p, epoch));

    if (sync_barrier(ag, g) || failed)
        return 1;
    /* Where agent 0 has failed, the others know it by the abort word, which it set before they met. */
    if (ag_look(&control_of(g, g->rank)->abort_word))
        return wait_failed(ag, g, WAIT_ABORTED, PHASE_HN_TABLE, -1, -1, epoch, 0);
    return hn_check_rounds(ag, p, epoch);
}

/* Stage HN_COUNTS: the counts of all ranks are there. */
KFN_STEP int hn_counts(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    if (epoch > 2 && wait_peers(ag, g, SCOPE_NODE, SIG_HN_DONE, 0, epoch - 2, PHASE_HN_SLOT, NULL))
        return 1;
    hn_publish(ag, p, epoch);
    if (wait_peers(ag, g, SCOPE_NODE, SIG_HN_DATA, 0, epoch, PHASE_HN_DATA, NULL))
        return 1;
    if (g->nnodes > 1 && hn_remote_counts(ag, p, epoch))
        return 1;
    if (hn_check_descs(ag, p, epoch))
        return 1;
    if (ag_index(ag) == 0)
        hn_report_counts(ag, p, epoch);
    return 0;
}

/* Stage HN_PLACES: the row of every (token, k); between nodes, what its relay needs of each source. */
KFN int hn_places(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    hn_report_ranks(ag, p, epoch);
    if (p->layout == LAYOUT_FLAT)
        hn_base_flat(ag, p, epoch);
    else
        hn_base_zones(ag, p, epoch);
    if (p->drop & DROP_FLAT)
        hn_base_far(ag, p, epoch);
    if (p->h->line || p->drop & DROP_TOKENS)
        hn_base_flat(ag, p, epoch);
    for (int j = ag_index(ag); g->nnodes > 1 && j < g->relay_count; j += ag_count(ag))
        hn_take_rounds(ag, p, epoch, j);
    if (sync_barrier(ag, g))
        return 1;
    hn_positions(ag, p);
    return 0;
}

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
    signal_peers(ag, p->g, SCOPE_NODE, SIG_HN_DONE, 0, epoch);
}

KFN int hn_run(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    if (stage_runs(ag, HN_ROUTE) && (route_plan(ag, p->g, p->h, &p->route) || (p->nodes && hn_number(ag, p))))
        return 1;
    if (stage_runs(ag, HN_COUNTS) && hn_counts(ag, p, epoch))
        return 1;
    if (stage_runs(ag, HN_PLACES)) {
        if (hn_places(ag, p, epoch))
            return 1;
        hn_done(ag, p, epoch);
    }
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
