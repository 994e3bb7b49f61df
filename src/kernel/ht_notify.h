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

#include "kernel/ht_counts.h"
#include "kernel/ht_cut.h"
#include "kernel/ht_report.h"
#include "kernel/route.h"

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

#if AG_ONE_LANE
/* Rows of earlier ranks at n destinations, from number `at` of a rank's counts on, to `to` of each base that this rank
 * keeps. With `rows` also those of all ranks. */
KFN_STEP void hn_base_chunk(const struct ht_notify_params *p, uint64_t epoch, int at, int n, int to, int32_t *rows)
{
    const struct group_dev *g = p->g;
    int32_t run[HN_CHUNK] = {0};
    int from = 0;

    for (int s = 0; s < g->nranks; s++) {
        int32_t *base = g->mask[s] ? hn_base_of(p, s) : NULL;
        if (!base)
            continue;
        hn_add_counts(g, epoch, from, s, at, n, run);
        from = s;
        for (int i = 0; i < n; i++)
            base[to + i] = run[i];
    }
    if (!rows)
        return;
    hn_add_counts(g, epoch, from, g->nranks, at, n, run);
    for (int i = 0; i < n; i++)
        rows[i] = run[i];
}

/* Of FLAT rows, and of lines of source maps: those of earlier ranks at each destination of this node. */
KFN_STEP void hn_base_flat(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    const int P = node_size(g, g->node), first = p->layout == LAYOUT_FLAT ? 0 : ht_line_base(g);
    const int end = P * (ag_index(ag) + 1) / ag_count(ag);

    for (int i = P * ag_index(ag) / ag_count(ag); i < end; i += HN_CHUNK)
        hn_base_chunk(p, epoch, i, end - i < HN_CHUNK ? end - i : HN_CHUNK, first + i, NULL);
}
#else
/* The same by lanes that have a destination each. */
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
#endif

/* The zone of expert `at` begins at row `start`. */
KFN void hn_base_move(const struct ht_notify_params *p, int at, int32_t start)
{
    const struct group_dev *g = p->g;

    for (int j = -1; j < (g->nnodes > 1 ? g->relay_count : 0); j++) {
        const int s = j < 0 ? g->rank : g->relay_sources[j];
        if (g->mask[s])
            hn_base_of(p, s)[at] += start;
    }
}

/* What this rank knows of its own zones. */
KFN void hn_keep_zone(const struct ht_notify_params *p, int l, int32_t start, int32_t rows)
{
    p->h->zone[l] = start;
    p->h->filled[l] = rows;
}

#if AG_ONE_LANE
/* EXPERT_MAJOR: zone start of each expert at its rank, plus rows of earlier ranks. An agent has ranks of the node. */
KFN_STEP void hn_base_zones(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    const int P = node_size(g, g->node), L = g->local_experts, align = p->alignment;
    const int end = P * (ag_index(ag) + 1) / ag_count(ag) * L;
    int place = P * ag_index(ag) / ag_count(ag), l = 0;
    int32_t rows[HN_CHUNK], start = 0;

    for (int at = place * L, n = 0; at < end; at += n) {
        n = end - at < HN_CHUNK ? end - at : HN_CHUNK;
        hn_base_chunk(p, epoch, P + at, n, at, rows);
        for (int i = 0; i < n; i++) {
            hn_base_move(p, at + i, start);
            if (node_member(g, g->node, place) == g->rank)
                hn_keep_zone(p, l, start, rows[i]);
            start += (rows[i] + align - 1) / align * align;
            if (++l < L)
                continue;
            place++;
            l = start = 0;
        }
    }
}
#else
/* Before the rows of rank s there are `run` of earlier ranks, for expert `at` of this node's. */
KFN_STEP void hn_base_put(const struct ht_notify_params *p, int s, int at, int32_t run)
{
    int32_t *base = s < p->g->nranks && p->g->mask[s] ? hn_base_of(p, s) : NULL;

    if (base)
        base[at] = run;
}

/* EXPERT_MAJOR, for expert `at` of this node's: the rows of earlier ranks, to each base that this rank keeps. Returns
 * those of all ranks. */
KFN_STEP int32_t hn_base_expert(const struct ht_notify_params *p, uint64_t epoch, int at)
{
    const struct group_dev *g = p->g;
    int32_t run = 0;

    for (int first = 0; first < g->nranks; first += HN_BATCH) {
        int32_t rows[HN_BATCH];
        hn_ecounts(g, epoch, at, first, rows);
        AG_UNROLL
        for (int j = 0; j < HN_BATCH; j++) {
            hn_base_put(p, first + j, at, run);
            run += rows[j];
        }
    }
    return run;
}

/* EXPERT_MAJOR: zone start of each expert at its rank, plus rows of earlier ranks. An agent has a rank of the node, and
 * each of its lanes an expert there. */
KFN_STEP void hn_base_zones(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    const int L = g->local_experts, align = p->alignment;

    for (int i = ag_index(ag); i < node_size(g, g->node); i += ag_count(ag)) {
        const int d = node_member(g, g->node, i), left = g->experts - d * L, n = left < L ? left : L;
        int32_t zones = 0;
        AG_ROUNDS(ag, int, l, n)
        {
            const int32_t rows = l < n ? hn_base_expert(p, epoch, i * L + l) : 0;
            const int32_t zone = (rows + align - 1) / align * align, start = zones + (int32_t)ag_scan(ag, zone);
            zones += (int32_t)ag_sum(ag, zone);
            if (l >= n)
                continue;
            hn_base_move(p, i * L + l, start);
            if (d == g->rank)
                hn_keep_zone(p, l, start, rows);
        }
    }
}
#endif

/* Among the tokens of all ranks that come to the rank of entry i, the number of this one. */
KFN int64_t hn_token_number(const struct ht_notify_params *p, int64_t i)
{
    const struct group_dev *g = p->g;
    const struct handle_dev *h = p->h;
    const int K = p->route.topk_n, L = g->local_experts, d = h->ids[i] / L;
    const int64_t base = p->drop & DROP_FLAT ? h->drop_base[d] : h->base[ht_line_base(g) + place_in_node(g, d)];

    for (int64_t j = i / K * K; j < i; j++)
        if (h->ids[j] >= 0 && h->ids[j] / L == d && h->ridx[j] >= 0)
            return base + h->ridx[j];
    return base + h->ridx[i];
}

/* What becomes of entry i, which has an expert, when rows are dropped: FLAT of any node, else of this one. */
KFN int32_t hn_drop(const struct ht_notify_params *p, int64_t i, int32_t pos)
{
    const int32_t limit = p->h->limits[p->h->ids[i] / p->g->local_experts];

    if (p->drop & DROP_FLAT)
        return hn_token_number(p, i) < limit ? p->h->ids[i] : -1;
    if (pos >= limit)
        return -1;
    return p->drop & DROP_TOKENS && hn_token_number(p, i) >= limit ? PHANTOM(pos) : pos;
}

/* The rows that each rank takes, which it has said itself. */
KFN_STEP void hn_limits(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    AG_EACH_ALL(ag, int, d, g->nranks) p->h->limits[d] = g->mask[d] ? hn_desc_of(g, d, epoch)->drop_rows : 0;
}

/* FLAT rows are dropped at the source: rows of earlier ranks at all destinations. */
KFN_STEP void hn_drop_base(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    AG_EACH_ALL(ag, int, d, g->nranks)
    {
        int32_t run = 0;
        for (int s = 0; s < g->rank; s++)
            run += g->mask[s] ? hn_all_rcount(g, s, epoch)[d] : 0;
        p->h->drop_base[d] = run;
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

KFN_STEP int hn_check_descs(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    for (int s = 0; s < g->nranks; s++) {
        if (!g->mask[s])
            continue;
        const struct hn_desc *desc = hn_desc_of(g, s, epoch);
        if (check_signature(ag, g, &p->signature, &desc->signature, PHASE_HN_DATA, s))
            return 1;
        if (desc->ntokens < 0) /* more than max_tokens: hn_too_many() */
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
    const int slot = (int)(epoch % 2);
    const uint64_t start = ag_now(ag);

    for (;;) {
        int mine = -1;
        AG_EACH(ag, int, j, g->relay_count)
        {
            const int s = g->relay_sources[j];
            if (mine < 0 && g->mask[s] &&
                (int64_t)(ag_peek(&g->counters[signal_index(g, SIG_HN_DATA, slot, s)]) - hn_lap(epoch)) < 0)
                mine = j;
        }
        const int late = ht_missing(ag, mine), s = late < 0 ? -1 : g->relay_sources[late];
        if (late < 0)
            break;
        if (wait_word_since(ag, g, &g->counters[signal_index(g, SIG_HN_DATA, slot, s)], hn_lap(epoch), PHASE_HN_DATA, s,
                            start))
            return 1;
    }
    for (int j = 0; g->ht.split && j < g->relay_count; j++) /* to where the node can read it */
        if (g->mask[g->relay_sources[j]])
            ag_copy(ag, heap_at(g, g->rank, hn_block_at(g, epoch, g->nnodes + j)),
                    net_at(g, hn_net_block_at(g, epoch, g->nnodes + j)), g->ht.counts_stride);
    ag_sync(ag);
    signal_peers(ag, g, SCOPE_NODE, SIG_HN_TABLE, 0, epoch);
    return 0;
}

/* Between nodes: counts of all ranks elsewhere. All agents. */
KFN_STEP int hn_remote_counts(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    const int failed =
        ag_index(ag) == 0 &&
        (hn_relay_counts(ag, p, epoch) || wait_each(ag, g, SCOPE_NODE, SIG_HN_TABLE, 0, epoch, PHASE_HN_TABLE, NULL));

    if (sync_barrier(ag, g) || failed)
        return 1;
    /* Where agent 0 has failed, the others know it by the abort word, which it set before they met. */
    if (ag_look(&control_of(g, g->rank)->abort_word))
        return wait_failed(ag, g, WAIT_ABORTED, PHASE_HN_TABLE, -1, -1, epoch, 0);
#if AG_STAGED
    hn_fetch(ag, p, epoch);
#endif
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
    if (p->drop)
        hn_limits(ag, p, epoch);
    if (p->drop & DROP_FLAT)
        hn_drop_base(ag, p, epoch);
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
        p->h->state->key = p->h->state->too_many ? 0 : p->key;
    }
    ag_sync(ag);
    signal_peers(ag, p->g, SCOPE_NODE, SIG_HN_DONE, 0, epoch);
}

KFN int hn_run(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    if (stage_runs(ag, HN_ROUTE) && (route_plan(ag, p->g, p->h, &p->route) || (p->nodes && hn_number(ag, p))))
        return 1;
    STAGE_MARK(ag, HN_ROUTE, MARK_ROUTE);
    if (stage_runs(ag, HN_COUNTS) && hn_counts(ag, p, epoch))
        return 1;
    STAGE_MARK(ag, HN_COUNTS, MARK_COUNTS);
    if (stage_runs(ag, HN_PLACES)) {
        if (hn_places(ag, p, epoch))
            return 1;
        hn_done(ag, p, epoch);
    }
    STAGE_MARK(ag, HN_PLACES, MARK_PLACES);
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
