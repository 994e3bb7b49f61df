/* SPDX-License-Identifier: Apache-2.0 */
/*
 * High-throughput combine, epoch e.
 *
 *   expert rank d                                     source s
 *   rows in epx_alloc memory: post where they are
 *   otherwise copy them to the own landing first
 *   signal HC_DATA = e  ---------------------------->  wait HC_DATA[*] >= e
 *                                                      out[t] = bias + sum of its rows, read where they are
 *   wait HC_DONE[*] >= e  <--------------------------  signal HC_DONE = e
 *
 * The last wait makes the caller's tensor and the landing free again when the operation completes.
 */
#ifndef EPX_KERNEL_HT_COMBINE_H
#define EPX_KERNEL_HT_COMBINE_H

#include "kernel/ht_dispatch.h"

KFN const struct hc_post *hc_post_of(const struct group_dev *g, int rank)
{
    return (const struct hc_post *)heap_at(g, rank, g->ht.combine_post);
}

KFN void hc_stage(struct agent *ag, const struct ht_combine_params *p)
{
    const struct group_dev *g = p->g;
    char *heap = heap_at(g, g->rank, 0);
    const int64_t rows = p->h->recv_rows < p->post.rows ? p->h->recv_rows : p->post.rows;
    const int K = p->layout == LAYOUT_FLAT ? p->h->topk : 1;

    if (p->tokens) {
        for (int64_t row = ag_index(ag); row < rows; row += ag_count(ag))
            ag_copy(ag, heap + p->post.tokens + (uint64_t)row * p->post.token_stride, p->tokens + row * p->stride,
                    (size_t)p->agree.hidden_bytes);
        if (ag_index(ag) == 0 && ag_leader(ag))
            ag_add_stat(&g->stats->bytes_local, (uint64_t)rows * (uint64_t)p->agree.hidden_bytes);
    }
    if (p->weights)
        AG_EACH_ALL(ag, int64_t, i, rows * K)((float *)(heap + p->post.weights))[i] = p->weights[i];
}

/* In a compact top-k row of rank d, the place of this token's k-th id. */
KFN int hc_compact_place(const int32_t *ids, int K, int k, int local_experts)
{
    const int d = ids[k] / local_experts;
    int place = 0;
    for (int j = 0; j < K; j++) {
        if (ids[j] < 0 || ids[j] / local_experts != d)
            continue;
        place += ids[j] < ids[k] || (ids[j] == ids[k] && j < k);
    }
    return place;
}

/* Weights return to their (token, k) place; FLAT in k-order sums over ranks, ascending. */
KFN void hc_return_weights(struct agent *ag, const struct ht_combine_params *p, int t)
{
    const struct group_dev *g = p->g;
    const struct handle_dev *h = p->h;
    const int K = h->topk, L = g->local_experts;
    const int32_t *ids = h->ids + (size_t)t * K;

    AG_EACH(ag, int, k, K)
    {
        float sum = 0.0f;
        for (int want = 0; want < K; want++) {
            for (int j = 0; j < K; j++) {
                const int64_t i = (int64_t)t * K + j;
                const int one = p->layout == LAYOUT_EXPERT_MAJOR ? j == k && want == 0 : h->rord[i] == want;
                const int64_t pos = one ? ht_position(h, p->layout, L, i) : -1;
                if (pos < 0 || !g->mask[ids[j] / L])
                    continue;
                const int d = ids[j] / L;
                const struct hc_post *post = hc_post_of(g, d);
                if (pos >= post->rows)
                    continue;
                const float *w = (const float *)heap_at(g, d, post->weights);
                if (p->layout == LAYOUT_EXPERT_MAJOR)
                    sum += w[pos];
                else if (!p->compact)
                    sum += w[pos * K + k];
                else if (ids[k] >= 0 && ids[k] / L == d)
                    sum += w[pos * K + hc_compact_place(ids, K, k, L)];
            }
        }
        p->out_weights[(int64_t)t * K + k] = sum;
    }
}

KFN void hc_sum_token(struct agent *ag, const struct ht_combine_params *p, int t)
{
    const struct group_dev *g = p->g;
    const struct handle_dev *h = p->h;
    const int K = h->topk, L = g->local_experts;
    const int flat = p->layout == LAYOUT_FLAT;
    struct sum_set set;
    int n = 0;

    /* FLAT: rank by rank, ascending; EXPERT_MAJOR: k by k. rord of a flat row is its place in that order. */
    for (int want = 0; want < K; want++) {
        int k = flat ? 0 : want;
        while (flat && k < K && h->rord[(int64_t)t * K + k] != want)
            k++;
        if (k == K)
            break;
        const int64_t i = (int64_t)t * K + k;
        const int64_t pos = ht_position(h, p->layout, L, i);
        if (pos < 0 || !g->mask[h->ids[i] / L])
            continue;
        const int d = h->ids[i] / L;
        const struct hc_post *post = hc_post_of(g, d);
        if (pos >= post->rows)
            continue; /* did not fit at the dispatch, which said so */
        sum_set_put(ag, &set, n++, heap_at(g, d, post->tokens + (uint64_t)pos * post->token_stride), 1.0f, 0);
    }
    ag_reduce(ag, p->out + t * p->out_stride, p->dtype, p->hidden, &set, n, 0,
              p->bias[0] ? p->bias[0] + t * p->bias_stride[0] : NULL,
              p->bias[1] ? p->bias[1] + t * p->bias_stride[1] : NULL);
    if (p->out_weights)
        hc_return_weights(ag, p, t);
    if (ag_leader(ag))
        ag_add_stat(&g->stats->rows_returned, (uint64_t)n);
}

KFN int hc_run(struct agent *ag, const struct ht_combine_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    hc_stage(ag, p);
    if (sync_last(ag, g, 0)) {
        if (ag_leader(ag)) {
            *(struct hc_post *)heap_at(g, g->rank, g->ht.combine_post) = p->post;
            g->state->epoch[OP_HT_COMBINE] = epoch;
        }
        ag_sync(ag);
        signal_all(ag, g, SIG_HC_DATA, 0, epoch);
    }
    if (wait_all(ag, g, SIG_HC_DATA, 0, epoch, PHASE_HC_DATA, NULL))
        return 1;
    for (int d = 0; d < g->nranks; d++)
        if (g->mask[d] && check_agreement(ag, g, &p->agree, &hc_post_of(g, d)->agree, PHASE_HC_DATA, d))
            return 1;
    for (int t = ag_index(ag); t < p->h->ntokens; t += ag_count(ag))
        hc_sum_token(ag, p, t);
    if (sync_last(ag, g, 1))
        signal_all(ag, g, SIG_HC_DONE, 0, epoch);
    return wait_all(ag, g, SIG_HC_DONE, 0, epoch, PHASE_HC_DONE, NULL);
}

KFN void kernel_ht_combine(struct agent *ag, const struct ht_combine_params *p)
{
    const uint64_t epoch = p->g->state->epoch[OP_HT_COMBINE] + 1;

    if (!kernel_begin(ag, p->g))
        hc_run(ag, p, epoch);
    kernel_end(ag, p->g);
}

#endif
