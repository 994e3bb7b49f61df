/* SPDX-License-Identifier: Apache-2.0 */
/* High-throughput notify: what an update reports to its caller and to the host (ht_notify.h). */
#ifndef EPX_KERNEL_HT_REPORT_H
#define EPX_KERNEL_HT_REPORT_H

#include "kernel/ht_counts.h"

/* Of so many rows of zones, those that are not dropped. */
KFN int64_t hn_kept(const struct ht_notify_params *p, int64_t rows)
{
    return p->drop & DROP_ZONES && rows > p->drop_rows ? p->drop_rows : rows;
}

/* Padded and plain counts per local expert, by the lanes of one agent. Returns all rows, padding included; *used: where
 * the last row that carries a token ends. */
KFN_STEP int64_t hn_report_experts(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch, int64_t *used)
{
    const struct group_dev *g = p->g;
    struct handle_dev *h = p->h;
    const int L = g->local_experts, align = p->alignment, flat = p->layout == LAYOUT_FLAT;
    const int place = place_in_node(g, g->rank);
    int64_t all = 0, ends = 0;

    *used = 0;
    AG_ROUNDS(ag, int, l, L)
    {
        const int e = g->rank * L + l;
        const int64_t n = l < L && e < g->experts ? hn_expert_rows(g, epoch, place * L + l) : 0;
        const int64_t zone = (n + align - 1) / align * align, padded = flat ? n : zone;
        const int64_t offset = all + ag_scan(ag, padded), before = ends + ag_scan(ag, zone);
        all += ag_sum(ag, padded);
        ends += ag_sum(ag, zone);
        const int64_t last = ag_sum(ag, n && offset + padded == all ? offset + n : 0); /* at most one lane has it */
        *used = last ? last : *used;
        if (l >= L)
            continue;
        h->info->expert_counts[l] = n;
        if (e >= g->experts && !flat && !AG_ONE_LANE) { /* hn_base_zones() of one lane has them too */
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
    const int32_t *rows = hn_ecount(g, s, epoch) + place * L;
    for (int first = 0; first < L; first += HN_BATCH) {
        int32_t some[HN_BATCH];
        AG_UNROLL
        for (int j = 0; j < HN_BATCH; j++)
            some[j] = first + j < L ? rows[first + j] : 0;
        AG_UNROLL
        for (int j = 0; j < HN_BATCH; j++)
            n += some[j];
    }
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

/* The rows that rank d expected, or that a receive buffer holds; -1: any number. */
KFN int64_t hn_bound(const struct group_dev *g, int d, int expected, uint64_t epoch)
{
    if (!g->mask[d])
        return -1;
    if (!expected)
        return g->ht.rows;
    return hn_desc_of(g, d, epoch)->expected_rows > 0 ? hn_desc_of(g, d, epoch)->expected_rows : -1;
}

/* Of so many rows of rank d, with `kept` those that it does not drop. */
KFN int64_t hn_rows_kept(const struct ht_notify_params *p, int d, int kept, uint64_t epoch, int64_t rows)
{
    const int64_t most = kept && p->drop & DROP_ZONES ? hn_desc_of(p->g, d, epoch)->drop_rows : rows;

    return rows < most ? rows : most;
}

#if AG_ONE_LANE
/* Does a rank of the node get more rows than that? All ranks of the node find the same, for they read the same counts.
 * Rows that are dropped need no tensor, but lines of source maps pass through the buffer too: one for each token. */
KFN_STEP int hn_more(struct agent *ag, const struct ht_notify_params *p, int expected, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    const int flat = p->layout == LAYOUT_FLAT, L = flat ? 1 : g->local_experts, align = flat ? 1 : p->alignment;
    const int end = g->node_size * L;
    int place = 0, l = 0, bounds = 0;
    int64_t sum = 0;

    (void)ag;
    for (int i = 0; i < g->node_size; i++)
        bounds += hn_bound(g, node_rank(g, i), expected, epoch) >= 0;
    for (int at = 0; at < end && bounds; at += HN_CHUNK) {
        const int n = end - at < HN_CHUNK ? end - at : HN_CHUNK;
        int32_t rows[HN_CHUNK] = {0};
        hn_add_counts(g, epoch, 0, g->nranks, flat ? at : g->node_size + at, n, rows);
        for (int i = 0; i < n; i++) {
            sum += (rows[i] + align - 1) / align * align;
            if (++l < L)
                continue;
            const int d = node_rank(g, place++);
            const int64_t bound = hn_bound(g, d, expected, epoch);
            if (bound >= 0 && (flat ? sum : hn_rows_kept(p, d, expected, epoch, sum)) > bound)
                return 1;
            sum = l = 0;
        }
    }
    return 0;
}
#else
/* FLAT rows that rank d of the node receives from all ranks. */
KFN int64_t hn_flat_rows_at(const struct group_dev *g, int d, uint64_t epoch)
{
    const int place = place_in_node(g, d);
    int64_t rows = 0;

    for (int s = 0; s < g->nranks; s++)
        rows += g->mask[s] ? hn_rcount(g, s, epoch)[place] : 0;
    return rows;
}

/* EXPERT_MAJOR rows, padding included; with `kept` without those that rank d drops. By all lanes. */
KFN_STEP int64_t hn_zone_rows_at(struct agent *ag, const struct ht_notify_params *p, int d, int kept, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    const int L = g->local_experts, align = p->alignment, first = place_in_node(g, d) * L;
    const int left = g->experts - d * L;
    int64_t rows = 0;

    AG_EACH(ag, int, l, left < L ? left : L)
    rows += (hn_expert_rows(g, epoch, first + l) + align - 1) / align * align;
    return hn_rows_kept(p, d, kept, epoch, ag_sum(ag, rows));
}

/* As above, by all lanes. */
KFN_STEP int hn_more(struct agent *ag, const struct ht_notify_params *p, int expected, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    int more = 0;

    for (int i = 0; p->layout != LAYOUT_FLAT && i < g->node_size && !more; i++) {
        const int64_t bound = hn_bound(g, node_rank(g, i), expected, epoch);
        more = bound >= 0 && hn_zone_rows_at(ag, p, node_rank(g, i), expected, epoch) > bound;
    }
    AG_EACH(ag, int, i, p->layout == LAYOUT_FLAT ? g->node_size : 0)
    {
        const int64_t bound = hn_bound(g, node_rank(g, i), expected, epoch);
        more |= bound >= 0 && hn_flat_rows_at(g, node_rank(g, i), epoch) > bound;
    }
    return ag_any(ag, more);
}
#endif

/* Does any rank get more rows than it expected? Ranks of several nodes do not see all counts: there nothing is as
 * expected. */
KFN int hn_unexpected(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    return p->g->nnodes > 1 || hn_more(ag, p, 1, epoch);
}

/* Does a rank of the node get more rows than a receive buffer holds? */
KFN int hn_windowed(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    return p->g->ht.window && hn_more(ag, p, 0, epoch);
}

/* The most rounds of any rank. */
KFN_STEP int hn_all_rounds(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    int most = 0;

    (void)ag;
    for (int s = 0; s < g->nranks && g->nnodes > 1 && g->ht.window; s++) {
        const int n = g->mask[s] ? hn_desc_of(g, s, epoch)->rounds : 0;
        most = n > most ? n : most;
    }
    return most;
}

/* The most tokens of a rank of the node. */
KFN int64_t hn_most_tokens(const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    int64_t most = 0;

    for (int i = 0; i < g->node_size; i++) {
        const int s = node_rank(g, i);
        const int64_t n = g->mask[s] ? hn_desc_of(g, s, epoch)->ntokens : 0;
        most = n > most ? n : most;
    }
    return most;
}

/* The most tokens of a rank, where these are more than max_tokens; else 0. All ranks find the same. */
KFN_STEP int64_t hn_too_many(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch, int *rank)
{
    const struct group_dev *g = p->g;
    int64_t most = g->max_tokens;

    (void)ag;
    *rank = -1;
    for (int s = 0; s < g->nranks; s++) {
        if (!g->mask[s] || hn_desc_of(g, s, epoch)->ntokens <= most)
            continue;
        most = hn_desc_of(g, s, epoch)->ntokens;
        *rank = s;
    }
    return *rank < 0 ? 0 : most;
}

/* The caller's counters and what the host will ask for. One agent. */
KFN_STEP void hn_report_counts(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    struct handle_dev *h = p->h;
    int64_t used;
    const int64_t padded = hn_report_experts(ag, p, epoch, &used), tokens = hn_report_sources(ag, p, epoch);
    int many_rank;
    const int64_t too_many = hn_too_many(ag, p, epoch, &many_rank);
    const int unexpected = hn_unexpected(ag, p, epoch) || too_many;
    const int windowed = hn_windowed(ag, p, epoch), all_rounds = hn_all_rounds(ag, p, epoch);
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
        h->state->all_rows = padded;
        h->state->used_rows = p->layout == LAYOUT_FLAT ? total : hn_kept(p, used);
        h->info->rows = h->state->recv_rows;
        h->info->used_rows = h->state->used_rows;
        h->state->most_rounds = hn_most_rounds(p, epoch);
        h->info->windowed = h->state->windowed = windowed;
        h->info->most_tokens = h->state->most_tokens = hn_most_tokens(p, epoch);
        h->info->all_rounds = h->state->all_rounds = all_rounds;
        h->state->drop = p->drop;
        h->info->rounds = h->state->most_rounds;
        h->info->unexpected = h->state->unexpected = unexpected;
        h->info->too_many = h->state->too_many = too_many;
        h->info->too_many_rank = many_rank;
        if (p->total.data)
            index_put(&p->total, 0, p->layout == LAYOUT_FLAT ? total : padded);
    }
    ag_sync(ag);
    /* A graph may run an update that was recorded before the last one, any number of times: that is not the last one's
     * end. */
    if (ag_leader(ag) && h->info->epoch < p->number)
        ag_store_release(&h->info->epoch, p->number); /* pairs with handle_poll_update() */
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

#endif
