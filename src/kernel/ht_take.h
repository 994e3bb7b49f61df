/* SPDX-License-Identifier: Apache-2.0 */
/* High-throughput dispatch through windows (ht_window.h): what a rank shows of its tokens, and takes of others'. */
#ifndef EPX_KERNEL_HT_TAKE_H
#define EPX_KERNEL_HT_TAKE_H

#include "kernel/ht_place.h"
#include "kernel/ht_window.h"

KFN uint64_t hd_half(const struct group_dev *g, int k)
{
    return g->ht.window + (uint64_t)(k % 2) * g->ht.half;
}

/* Tokens of window k of `rank`: how many. */
KFN int32_t *hd_shown(const struct group_dev *g, int rank, int k)
{
    return (int32_t *)heap_at(g, rank, hd_half(g, k));
}

/* ids[K] and rows[K] of token i of the window. */
KFN int32_t *hd_shown_route(const struct group_dev *g, const struct handle_dev *h, int rank, int k, int i)
{
    return (int32_t *)heap_at(g, rank, hd_half(g, k) + HW_HEADER_BYTES) + (size_t)i * 2 * (size_t)h->state->topk;
}

/* Its row as it travels; then lines[K] and weights[K]. */
KFN char *hd_shown_row(const struct group_dev *g, int rank, int k, int i)
{
    const uint64_t routes = up16((size_t)g->ht.take_tokens * 2 * (size_t)g->max_topk * 4);

    return heap_at(g, rank, hd_half(g, k) + HW_HEADER_BYTES + routes + (uint64_t)i * g->ht.window_row);
}

KFN int32_t *hd_shown_lines(const struct group_dev *g, int rank, int k, int i)
{
    return (int32_t *)(hd_shown_row(g, rank, k, i) + g->ht.window_row) - 2 * g->max_topk;
}

KFN_STEP void hd_show_token(struct agent *ag, const struct ht_dispatch_params *p, int k, int t)
{
    const struct group_dev *g = p->g;
    const struct handle_dev *h = p->h;
    const int K = h->state->topk, i = t - k * g->ht.take_tokens;
    int32_t *route = hd_shown_route(g, h, g->rank, k, i), *lines = hd_shown_lines(g, g->rank, k, i);
    int wanted = 0;

    AG_EACH(ag, int, e, K)
    {
        const int32_t id = h->ids[(size_t)t * K + e];
        const int d = id < 0 ? -1 : id / g->local_experts;
        route[e] = id;
        route[K + e] = h->pos[(size_t)t * K + e];
        wanted |= d >= 0 && is_local(g, d) && g->mask[d] && hd_desc_of(g, d)->pulls;
    }
    if (!ag_any(ag, wanted))
        return;
    AG_EACH(ag, int, e, K)
    {
        lines[e] = h->line ? h->line[(size_t)t * K + e] : -1;
        if (p->weights)
            ((float *)lines)[K + e] = p->weights[(size_t)t * K + e];
    }
    row_stage(ag, hd_shown_row(g, g->rank, k, i), &p->in, &p->signature, t);
}

KFN_STEP void hd_show_window(struct agent *ag, const struct ht_dispatch_params *p, int k)
{
    const int ntokens = p->h->state->ntokens, first = k * p->g->ht.take_tokens;
    const int end = first + p->g->ht.take_tokens < ntokens ? first + p->g->ht.take_tokens : ntokens;

    if (ag_index(ag) == 0 && ag_leader(ag))
        *hd_shown(p->g, p->g->rank, k) = end > first ? end - first : 0;
    for (int t = first + ag_index(ag); t < end; t += ag_count(ag))
        hd_show_token(ag, p, k, t);
}

/* Token i of window k of rank s to its places in this rank's tensors. */
KFN_STEP void hd_take_token(struct agent *ag, const struct ht_dispatch_params *p, int s, int k, int i)
{
    const struct group_dev *g = p->g;
    const int K = p->h->state->topk;
    const int32_t *lines = hd_shown_lines(g, s, k, i);
    struct hd_row r;

    r.ids = hd_shown_route(g, p->h, s, k, i);
    r.pos = r.ids + K;
    r.weights = p->signature.extra & SIGNATURE_WEIGHTS ? (const float *)lines + K : NULL;
    r.line = p->near.map && p->h->line ? lines : NULL;
    r.src_rank = s;
    r.src_token = k * g->ht.take_tokens + i;
    r.data = hd_shown_row(g, s, k, i);
    r.scales = r.data + row_scales_at(&p->signature);
    r.scale_stride = 4;
    r.scratch = NULL;
    r.descs = NULL;
    r.near = &p->near;
    hd_place_row(ag, p, &r);
}

/* What rank s has for this one in window k: an agent looks at several tokens together. */
KFN_STEP void hd_take_from(struct agent *ag, const struct ht_dispatch_params *p, int s, int k)
{
    const struct group_dev *g = p->g;
    const int K = p->h->state->topk, each = HW_ENTRIES / K, n = *hd_shown(g, s, k), L = g->local_experts;

    for (int first = ag_index(ag) * each; first < n; first += ag_count(ag) * each) {
        const int many = first + each < n ? each : n - first;
        uint32_t mine = 0;
        AG_EACH(ag, int, e, many *K)
        {
            const int32_t id = hd_shown_route(g, p->h, s, k, first + e / K)[e % K];
            mine |= id >= 0 && id / L == g->rank ? 1u << (e / K) : 0;
        }
        for (int i = 0; i < many; i++)
            if (ag_any(ag, (int)(mine >> i & 1)))
                hd_take_token(ag, p, s, k, first + i);
    }
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
        pulls |= g->mask[r] && hd_desc_of(g, r)->pulls;
    }
    return ag_any(ag, pulls);
}

/* Stage HD_FORWARD of windows: step k. */
KFN_STEP int hd_step(struct agent *ag, const struct ht_dispatch_params *p, int k)
{
    const struct group_dev *g = p->g;
    const int windows = hw_windows(p->h, g->ht.take_tokens);

    if (k < windows)
        hd_show_window(ag, p, k);
    for (int i = 0; i < g->node_size && p->buffered && k > 0 && k <= windows; i++)
        if (g->mask[hw_rank(g, i)])
            hd_take_from(ag, p, hw_rank(g, i), k - 1);
    return 0;
}

/* A window is taken in the step after it. */
KFN struct hw_steps hd_steps(const struct ht_dispatch_params *p, uint64_t epoch)
{
    const struct hw_steps s = {epoch, SIG_HD_STEP, PHASE_HD_STEP, hw_windows(p->h, p->g->ht.take_tokens) + 1};
    return s;
}

/* All steps in one launch. */
KFN_STEP int hd_windows(struct agent *ag, const struct ht_dispatch_params *p, uint64_t epoch)
{
    const struct hw_steps s = hd_steps(p, epoch);

    for (int k = 0; k < s.count; k++)
        if (hw_begin(ag, p->g, &s, k) || hd_step(ag, p, k) || hw_end(ag, p->g, &s, k))
            return 1;
    return 0;
}

#if AG_STAGED
/* Stage HD_LANDED of windows. One agent. */
KFN int hd_step_gate(struct agent *ag, const struct ht_dispatch_params *p, uint64_t epoch, int k)
{
    const struct hw_steps s = hd_steps(p, epoch);
    return k < s.count && hd_any_pulls(ag, p) && hw_begin(ag, p->g, &s, k);
}

KFN int hd_step_work(struct agent *ag, const struct ht_dispatch_params *p, uint64_t epoch, int k)
{
    const struct hw_steps s = hd_steps(p, epoch);

    if (k >= s.count || !hd_any_pulls(ag, p))
        return 0;
    if (hd_step(ag, p, k))
        return 1;
    if (sync_last(ag, p->g, 2))
        hw_signal(ag, p->g, &s, k);
    return 0;
}
#endif

#endif
