/* SPDX-License-Identifier: Apache-2.0 */
/* High-throughput dispatch through windows (ht_window.h): what a rank shows of its tokens, and takes of others'. */
#ifndef EPX_KERNEL_HT_TAKE_H
#define EPX_KERNEL_HT_TAKE_H

#include "kernel/ht_forward.h"
#include "kernel/ht_window.h"

KFN uint64_t hd_half(const struct group_dev *g, int k)
{
    return g->ht.window + (uint64_t)(k % 2) * g->ht.half;
}

/* Are the rows of all tokens of the node taken where they are? All ranks find the same, as in hd_any_pulls(). Then a
 * window has routes alone, of so many tokens that a dispatch has hardly ever more than one. */
KFN_STEP int hd_is_wide(struct agent *ag, const struct ht_dispatch_params *p)
{
    const struct group_dev *g = p->g;
    int rows = p->nodes;

    AG_EACH(ag, int, i, p->nodes ? 0 : g->node_size)
    {
        const int r = node_rank(g, i);
        rows |= g->mask[r] && !(hd_desc_of(g, r)->pulls & HD_IN_REACH);
    }
    return !ag_any(ag, rows);
}

KFN int hd_window_tokens(const struct group_dev *g, int wide)
{
    return wide ? g->ht.wide_tokens : g->ht.take_tokens;
}

/* What opens window k of `rank`. */
KFN struct hd_shown *hd_shown(const struct group_dev *g, int rank, int k)
{
    return (struct hd_shown *)heap_at(g, rank, hd_half(g, k));
}

/* ids[K] and rows[K] of token i of the window. */
KFN int32_t *hd_shown_route(const struct group_dev *g, const struct handle_dev *h, int rank, int k, int i)
{
    return (int32_t *)heap_at(g, rank, hd_half(g, k) + HW_HEADER_BYTES) + (size_t)i * 2 * (size_t)h->state->topk;
}

/* Its row as it travels, where rows are in the window; then lines[K] and weights[K]. */
KFN char *hd_shown_row(const struct group_dev *g, int rank, int k, int i)
{
    const uint64_t routes = up16((size_t)g->ht.take_tokens * 2 * (size_t)g->max_topk * 4);

    return heap_at(g, rank, hd_half(g, k) + HW_HEADER_BYTES + routes + (uint64_t)i * g->ht.window_row);
}

KFN int32_t *hd_shown_lines(const struct group_dev *g, int rank, int k, int i, int wide)
{
    const uint64_t each = 2 * (uint64_t)g->max_topk * 4, routes = up16((size_t)g->ht.wide_tokens * each);

    if (wide)
        return (int32_t *)heap_at(g, rank, hd_half(g, k) + HW_HEADER_BYTES + routes + (uint64_t)i * each);
    return (int32_t *)(hd_shown_row(g, rank, k, i) + g->ht.window_row) - 2 * g->max_topk;
}

KFN_STEP void hd_show_token(struct agent *ag, const struct ht_dispatch_params *p, int k, int t, int wide)
{
    const struct group_dev *g = p->g;
    const struct handle_dev *h = p->h;
    const int K = h->state->topk, i = t - k * hd_window_tokens(g, wide);
    int32_t *route = hd_shown_route(g, h, g->rank, k, i), *lines = hd_shown_lines(g, g->rank, k, i, wide);
    int wanted = 0;

    AG_EACH(ag, int, e, K)
    {
        const int32_t id = h->ids[(size_t)t * K + e];
        const int d = id < 0 ? -1 : id / g->local_experts;
        route[e] = id;
        route[K + e] = h->pos[(size_t)t * K + e];
        wanted |= d >= 0 && is_local(g, d) && g->mask[d] && hd_desc_of(g, d)->pulls & HD_PULLS;
    }
    if (!ag_any(ag, wanted))
        return;
    AG_EACH(ag, int, e, K)
    {
        lines[e] = h->line ? h->line[(size_t)t * K + e] : -1;
        if (p->weights)
            ((float *)lines)[K + e] = p->weights[(size_t)t * K + e];
    }
    if (p->shown.rows_in == IN_WINDOW)
        row_stage(ag, hd_shown_row(g, g->rank, k, i), &p->in, &p->signature, t);
}

KFN_STEP void hd_show_window(struct agent *ag, const struct ht_dispatch_params *p, int k, int wide)
{
    const int ntokens = p->h->state->ntokens, each = hd_window_tokens(p->g, wide), first = k * each;
    const int end = first + each < ntokens ? first + each : ntokens;

    if (ag_index(ag) == 0 && ag_leader(ag)) {
        struct hd_shown *shown = hd_shown(p->g, p->g->rank, k);
        *shown = p->shown;
        shown->tokens = end > first ? end - first : 0;
    }
    for (int t = first + ag_index(ag); t < end; t += ag_count(ag))
        hd_show_token(ag, p, k, t, wide);
}

/* Token i of window k of rank s, whose row goes to places in this rank's tensors; what goes with it is written by
 * hd_take_extras(). */
KFN struct hd_row hd_shown_token(const struct ht_dispatch_params *p, int s, int k, int i, int wide)
{
    const struct group_dev *g = p->g;
    const int K = p->h->state->topk, t = k * hd_window_tokens(g, wide) + i;
    const struct hd_shown *shown = hd_shown(g, s, k);
    const int32_t *lines = hd_shown_lines(g, s, k, i, wide);
    struct hd_row r;

    r.ids = hd_shown_route(g, p->h, s, k, i);
    r.pos = r.ids + K;
    r.weights = p->signature.extra & SIGNATURE_WEIGHTS ? (const float *)lines + K : NULL;
    r.line = p->own.map && p->h->line ? lines : NULL;
    r.src_rank = s;
    r.src_token = t;
    /* With masks all rows are there, and the window may be in use again: see hd_take_from(). */
    if (has_masks(g) || shown->rows_in == IN_WINDOW) {
        r.data = hd_shown_row(g, s, k, i);
        r.scales = r.data + row_scales_at(&p->signature);
        r.scale_stride = 4;
    } else {
        r.data = reach_at(g, s, shown->rows_in, shown->rows + (uint64_t)t * shown->row_stride);
        r.scales = reach_at(g, s, shown->scales_in, shown->scales + (uint64_t)t * shown->scale_row_stride);
        r.scale_stride = (int64_t)shown->scale_stride;
    }
    r.scratch = NULL;
    r.descs = NULL;
    r.own = &p->own;
    r.bare = HD_BARE_ROW | HD_BARE_LINE;
    return r;
}

/* Entry k of a token that is taken: what goes with its own row, its part of the top-k row (FLAT), or of the line in the
 * source map (EXPERT_MAJOR). Places are read once, as in hd_taker(). */
KFN void hd_take_entry(const struct ht_dispatch_params *p, const struct hd_row *r, int k)
{
    const struct group_dev *g = p->g;
    const int K = p->h->state->topk, flat = p->layout == LAYOUT_FLAT, pos = r->pos[k];
    int row = -1, line = -1;

    if (hd_taker(g, r, k, pos) >= 0)
        hd_put_meta(p, r, g->rank, k, pos);
    for (int j = 0; j < K && flat && row < 0; j++) { /* the first entry of a rank has the row */
        const int at = r->pos[j];
        row = hd_taker(g, r, j, at) >= 0 ? at : -1;
    }
    if (row >= 0)
        hd_put_entry(p, r, g->rank, row, k);
    for (int j = 0; j < K && !flat && r->line && line < 0; j++) { /* and the line */
        const int at = r->line[j];
        line = at >= 0 && at < p->own.map_lines && r->ids[j] >= 0 && r->ids[j] / g->local_experts == g->rank ? at : -1;
    }
    if (line < 0)
        return;
    hd_put_column(p, r, g->rank, line, k + 2);
    for (int i = 0; i < 2 && k == 0; i++)
        hd_put_column(p, r, g->rank, line, i);
}

/* Tokens of window k of rank s: what its half says, or as many as it has room for. */
KFN int hd_shown_count(const struct group_dev *g, int s, int k, int wide)
{
    const int shown = hd_shown(g, s, k)->tokens, room = hd_window_tokens(g, wide);

    return shown < room ? shown : room;
}

/* What goes with the rows that this rank takes from window k of rank s: a lane has an entry. Not row by row, where each
 * would wait for what its own few lanes load. `before`: as in hd_take_from(). */
KFN_STEP int64_t hd_take_extras(struct agent *ag, const struct ht_dispatch_params *p, int s, int k, int wide,
                                int64_t before)
{
    const int K = p->h->state->topk;
    const int64_t entries = (int64_t)hd_shown_count(p->g, s, k, wide) * K, parts = (entries + AG_LANES - 1) / AG_LANES;

    for (int64_t part = ht_first_item(ag, before); part < parts; part += ag_count(ag)) {
        const int64_t first = part * AG_LANES, left = entries - first;
        AG_EACH(ag, int, i, left < AG_LANES ? (int)left : AG_LANES)
        {
            const struct hd_row r = hd_shown_token(p, s, k, (int)((first + i) / K), wide);
            AG_WRITES(ag, p->g, p->g->rank);
            hd_take_entry(p, &r, (int)((first + i) % K));
        }
    }
    return before + parts;
}

/* What rank s has for this one in window k: an agent looks at several tokens together. `before` such parts of the
 * window are shared out already; returns how many are then. Where the others went on without this rank, the window may
 * be in use again, and have anything in it. */
KFN_STEP int64_t hd_take_from(struct agent *ag, const struct ht_dispatch_params *p, int s, int k, int wide,
                              int64_t before)
{
    const struct group_dev *g = p->g;
    const int K = p->h->state->topk, each = HW_ENTRIES / K, L = g->local_experts;
    const int n = hd_shown_count(g, s, k, wide), parts = (n + each - 1) / each;

    for (int64_t part = ht_first_item(ag, before); part < parts; part += ag_count(ag)) {
        const int first = (int)part * each, many = first + each < n ? each : n - first;
        uint32_t mine = 0;
        AG_EACH(ag, int, e, many *K)
        {
            const int32_t id = hd_shown_route(g, p->h, s, k, first + e / K)[e % K];
            mine |= id >= 0 && id / L == g->rank ? 1u << (e / K) : 0;
        }
        for (int i = 0; i < many; i++) {
            if (!ag_any(ag, (int)(mine >> i & 1)))
                continue;
            const struct hd_row r = hd_shown_token(p, s, k, first + i, wide);
            hd_place_row(ag, p, &r);
        }
    }
    return before + parts;
}

/* Does a rank of the node take its rows from windows? All ranks of the node find the same, once descriptors are there:
 * else there are no steps. */
KFN_STEP int hd_any_pulls(struct agent *ag, const struct ht_dispatch_params *p)
{
    const struct group_dev *g = p->g;
    int pulls = 0;

    AG_EACH(ag, int, i, p->h->state->windowed ? g->node_size : 0)
    {
        const int r = node_rank(g, i);
        pulls |= g->mask[r] && hd_desc_of(g, r)->pulls & HD_PULLS;
    }
    return ag_any(ag, pulls);
}

/* The same for all agents of a block, who call it together: a rank may be masked meanwhile. */
KFN int hd_block_pulls(struct agent *ag, const struct ht_dispatch_params *p)
{
    const int pulls = hd_any_pulls(ag, p);

    return has_masks(p->g) ? block_decides(ag, pulls) : pulls;
}

/* ---- Rows of other nodes, in the slots of relays ---------------------------------------------------------------- */

/* Rows of source number j of relay `rank` in round r. */
KFN int32_t *hw_shown_rows(const struct group_dev *g, int rank, int r, int j)
{
    return (int32_t *)heap_at(g, rank, g->ht.window_shown) + (r % 2) * g->relay_max + j;
}

/* As a relay: how many rows of each source the node finds in round r. */
KFN void hw_show_rounds(struct agent *ag, const struct group_dev *g, const struct handle_dev *h, int r)
{
    AG_EACH_ALL(ag, int, j, g->relay_count)
    *hw_shown_rows(g, g->rank, r, j) =
        ht_relays(g, h, j, r) ? h->relay_rows[(size_t)j * (size_t)g->ht.rounds + (size_t)r] : 0;
}

/* Row i of round r of rank s, in the slot of its relay, to its places in this rank's tensors. */
KFN_STEP void hd_take_relayed(struct agent *ag, const struct ht_dispatch_params *p, int s, int r, int i)
{
    const struct group_dev *g = p->g;
    const int relay = g->relay_of[s], j = g->relay_number[s], K = p->h->state->topk;
    const char *record = heap_at(g, relay, ht_shown_block(g, j, r)) + HT_HEADER_BYTES + (size_t)i * hd_record_bytes(p);
    struct hd_row row;

    row.ids = (const int32_t *)record + 1;
    row.pos = row.ids + K;
    row.weights = p->signature.extra & SIGNATURE_WEIGHTS ? (const float *)(record + hd_weights_at(p)) : NULL;
    row.line = p->own.map && p->h->line ? row.pos + K : NULL;
    row.src_rank = s;
    row.src_token = *(const int32_t *)record;
    row.data = heap_at(g, relay, ht_shown_slot(g, j, r)) + (size_t)i * hd_row_bytes(p);
    row.scales = hd_long_scales(p) ? row.data + row_scales_at(&p->signature) : record + hd_scales_at(p);
    row.scale_stride = 4;
    row.scratch = NULL;
    row.descs = NULL;
    row.own = &p->own;
    row.bare = 0;
    hd_place_row(ag, p, &row);
}

/* What round r of rank s has for this one. `before` rows of the round are shared out already. */
KFN_STEP void hd_take_round(struct agent *ag, const struct ht_dispatch_params *p, int s, int r, int64_t before)
{
    const struct group_dev *g = p->g;
    const int K = p->h->state->topk, L = g->local_experts, n = *hw_shown_rows(g, g->relay_of[s], r, g->relay_number[s]);
    const char *records = heap_at(g, g->relay_of[s], ht_shown_block(g, g->relay_number[s], r)) + HT_HEADER_BYTES;
    const size_t bytes = hd_record_bytes(p);

    for (int64_t i = ht_first_item(ag, before); i < n; i += ag_count(ag)) {
        const int32_t *ids = (const int32_t *)(records + (size_t)i * bytes) + 1;
        int mine = 0;
        AG_EACH(ag, int, k, K) mine |= ids[k] >= 0 && ids[k] / L == g->rank;
        if (ag_any(ag, mine))
            hd_take_relayed(ag, p, s, r, (int)i);
    }
}

/* What relays of the node have for this rank in round r. */
KFN_STEP void hd_take_rounds(struct agent *ag, const struct ht_dispatch_params *p, int r)
{
    const struct group_dev *g = p->g;
    int64_t before = 0;

    for (int i = 0; i < g->nranks; i++) {
        const int s = (g->rank + i) % g->nranks; /* not all ranks begin with the same */
        if (is_local(g, s) || !g->mask[s])
            continue;
        hd_take_round(ag, p, s, r, before);
        before += *hw_shown_rows(g, g->relay_of[s], r, g->relay_number[s]);
    }
}

/* ---- Steps ------------------------------------------------------------------------------------------------------ */

/* A window, and a round of other nodes, is taken in the step after it. */
KFN struct hw_steps hd_steps(const struct ht_dispatch_params *p, uint64_t epoch, int wide)
{
    const int windows = hw_windows(p->h, hd_window_tokens(p->g, wide)), rounds = p->h->state->all_rounds;
    const struct hw_steps s = {epoch, SIG_HD_STEP, PHASE_HD_STEP, (windows > rounds ? windows : rounds) + 1,
                               HW_HINT | (p->buffered ? 0 : HW_HINT_OTHERS) | (wide ? 0 : HW_HINT_ROWS)};
    return s;
}

/* Rounds that are sent in step k: all relays have given their slots back in step k. */
KFN int hd_step_sends(int k)
{
    return k < 2 ? HT_SLOTS : k - 2 + HT_SLOTS;
}

/* Before step k: all ranks of the node have taken round k - 2, whose slots are free again. Credits come before any wait
 * for other nodes: these may wait for them. */
KFN int hd_step_begin(struct agent *ag, const struct ht_dispatch_params *p, const struct hw_steps *s, int k)
{
    if (hw_begin(ag, p->g, s, k))
        return 1;
    return p->nodes && ag_index(ag) == 0 &&
           hd_release_rounds(ag, p, INJECT_BUG(BUG_EARLY_PULL, k - 1, k - 2), INJECT_BUG(BUG_EARLY_PULL, k, k - 1));
}

/* As a relay round k, to those ranks whose tensors are in reach; and the next own round. */
KFN_STEP int hd_step_rounds(struct agent *ag, const struct ht_dispatch_params *p, int k)
{
    const struct group_dev *g = p->g;
    const struct hd_desc *descs = hd_descs(ag, g);
    int64_t before = 0;

    if (k > 1 && hd_send_rounds(ag, p, hd_step_sends(k), hd_step_sends(k) + 1))
        return 1;
    hw_show_rounds(ag, g, p->h, k);
    for (int j = 0; j < g->relay_count; j++) {
        if (!ht_relays(g, p->h, j, k))
            continue;
        if (hd_forward_round(ag, p, descs, j, k, before, 1))
            return 1;
        before += p->h->relay_rows[(size_t)j * (size_t)g->ht.rounds + (size_t)k];
    }
    return 0;
}

/* Stage HD_FORWARD of windows: step k. */
KFN_STEP int hd_step(struct agent *ag, const struct ht_dispatch_params *p, int k, int wide)
{
    const struct group_dev *g = p->g;
    const int windows = hw_windows(p->h, hd_window_tokens(g, wide));
    int64_t before = 0;

    if (p->nodes && hd_step_rounds(ag, p, k))
        return 1;
    if (k < windows)
        hd_show_window(ag, p, k, wide);
    if (!p->buffered || k == 0)
        return 0;
    for (int i = 0; i < g->node_size && k <= windows; i++)
        if (g->mask[hw_rank(g, i)])
            before = hd_take_extras(ag, p, hw_rank(g, i), k - 1, wide, before);
    for (int i = 0; i < g->node_size && k <= windows; i++)
        if (g->mask[hw_rank(g, i)])
            before = hd_take_from(ag, p, hw_rank(g, i), k - 1, wide, before);
    if (p->nodes)
        hd_take_rounds(ag, p, k - 1);
    return 0;
}

/* All steps in one launch. */
KFN_STEP int hd_windows(struct agent *ag, const struct ht_dispatch_params *p, uint64_t epoch)
{
    const int wide = hd_is_wide(ag, p);
    const struct hw_steps s = hd_steps(p, epoch, wide);

    for (int k = 0; k < s.count; k++) {
        if (hd_step_begin(ag, p, &s, k))
            return 1;
        if (INJECT_BUG(BUG_EARLY_TAKEN, wide && k == s.count - 1 && ag_index(ag) == 0, 0))
            signal_peers(ag, p->g, SCOPE_NODE, SIG_HD_DATA, 0, epoch);
        if (hd_step(ag, p, k, wide) || hw_end(ag, p->g, &s, k))
            return 1;
    }
    return 0;
}

#if AG_STAGED
/* Are there more steps than the host has launched? Then the gate before them has taken them all. */
KFN int hd_in_gate(const struct ht_dispatch_params *p, int wide)
{
    return p->turns < hd_steps(p, 0, wide).count;
}

/* Stage HD_LANDED of windows. One agent. */
KFN int hd_step_gate(struct agent *ag, const struct ht_dispatch_params *p, uint64_t epoch, int k)
{
    const int wide = hd_is_wide(ag, p);
    const struct hw_steps s = hd_steps(p, epoch, wide);

    if (k >= s.count || hd_in_gate(p, wide))
        return 0;
    return hd_step_begin(ag, p, &s, k) ||
           (p->nodes && hd_landed(ag, p, k, 1, hd_step_sends(k), hd_step_sends(k) + (k > 1)));
}

KFN int hd_step_work(struct agent *ag, const struct ht_dispatch_params *p, uint64_t epoch, int k)
{
    const int wide = hd_is_wide(ag, p);
    const struct hw_steps s = hd_steps(p, epoch, wide);

    if (k >= s.count || hd_in_gate(p, wide))
        return 0;
    if (hd_step(ag, p, k, wide))
        return 1;
    if (sync_last(ag, p->g, 2))
        hw_signal(ag, p->g, &s, k);
    return 0;
}
#endif

#endif
