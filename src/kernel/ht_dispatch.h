/* SPDX-License-Identifier: Apache-2.0 */
/*
 * High-throughput dispatch, epoch e. Routing is known (ht_notify.h): every row has its final place.
 *
 *   sender s                                          receiver d
 *                                                     post: where its tensors are (the caller's own in epx_alloc
 *   wait HD_READY[*] >= e  <------------------------    memory, else the landing); signal HD_READY = e
 *   read each row once, write it straight to its      zero its padding, mark the rows past the end
 *     place at every destination
 *   signal HD_DATA = e  ---------------------------->  wait HD_DATA[*] >= e
 *                                                      copy from the landing, if it was used
 *
 * A receiver's next post comes only after this epoch's HD_DATA of all: no row can land in the wrong epoch.
 */
#ifndef EPX_KERNEL_HT_DISPATCH_H
#define EPX_KERNEL_HT_DISPATCH_H

#include "kernel/rows.h"
#include "kernel/sync.h"

KFN const struct hd_post *hd_post_of(const struct group_dev *g, int rank)
{
    return (const struct hd_post *)heap_at(g, rank, g->ht.dispatch_post);
}

/* Small outputs that go with the row at `pos` of rank d. */
KFN void hd_put_meta(struct agent *ag, const struct ht_dispatch_params *p, const struct hd_post *post, int d, int t,
                     int k, int64_t pos)
{
    const struct group_dev *g = p->g;
    const int K = p->h->topk, L = g->local_experts;

    if (p->layout == LAYOUT_FLAT && (post->weights || post->topk_idx)) {
        struct index_out idx;
        idx.data = post->topk_idx ? heap_at(g, d, post->topk_idx) : NULL;
        idx.is64 = post->idx64;
        row_put_topk(ag, p->h->ids + (size_t)t * K, p->weights ? p->weights + (size_t)t * K : NULL, K, d * L, d * L + L,
                     p->compact, &idx, post->weights ? (float *)heap_at(g, d, post->weights) : NULL, pos);
    }
    if (!ag_leader(ag))
        return;
    if (p->layout == LAYOUT_EXPERT_MAJOR && post->weights)
        ((float *)heap_at(g, d, post->weights))[pos] = p->weights[(size_t)t * K + k];
    if (post->src_rank)
        ((int32_t *)heap_at(g, d, post->src_rank))[pos] = g->rank;
    if (post->src_token)
        ((int32_t *)heap_at(g, d, post->src_token))[pos] = t;
}

/* Where the row of (t, k) goes at its rank; -1 = no row of its own. */
KFN int64_t ht_position(const struct handle_dev *h, int layout, int local_experts, int64_t i)
{
    const int32_t id = h->ids[i];

    if (id < 0)
        return -1;
    if (layout == LAYOUT_EXPERT_MAJOR)
        return h->base[id] + h->eidx[i];
    return h->ridx[i] < 0 ? -1 : h->base[id / local_experts] + h->ridx[i];
}

KFN void hd_send_token(struct agent *ag, const struct ht_dispatch_params *p, int t, char *scratch)
{
    const struct group_dev *g = p->g;
    const int K = p->h->topk, L = g->local_experts;
    const char *row = row_tokens(&p->in, t);
    const char *scales = p->in.scales + t * p->in.scale_row_stride;
    int64_t scale_stride = p->in.scale_stride;
    struct copy_set set;
    int n = 0;

    if (p->in.cast) {
        row_stage(ag, scratch, &p->in, &p->agree, t);
        ag_sync(ag);
        row = scratch;
        scales = scratch + row_scales_at(&p->agree);
        scale_stride = 4;
    }
    for (int k = 0; k < K; k++) {
        const int64_t pos = ht_position(p->h, p->layout, L, (int64_t)t * K + k);
        if (pos < 0)
            continue;
        const int d = p->h->ids[(int64_t)t * K + k] / L;
        const struct hd_post *post = hd_post_of(g, d);
        if (!g->mask[d] || pos >= post->capacity)
            continue; /* the receiver reports the overflow */
        copy_set_put(ag, &set, n++, heap_at(g, d, post->tokens + (uint64_t)pos * post->token_stride));
        if (p->agree.scale_bytes)
            row_copy_scales(ag, heap_at(g, d, post->scales + (uint64_t)pos * post->scale_row_stride),
                            (int64_t)post->scale_stride, scales, scale_stride, p->agree.scale_bytes / 4);
        hd_put_meta(ag, p, post, d, t, k, pos);
    }
    ag_copy_many(ag, &set, n, row, (size_t)p->agree.hidden_bytes);
}

/* EXPERT_MAJOR: rows between the tokens of an expert and the next zone. */
KFN void hd_zero_padding(struct agent *ag, const struct ht_dispatch_params *p)
{
    const struct handle_dev *h = p->h;

    for (int l = ag_index(ag); l < p->g->local_experts; l += ag_count(ag)) {
        for (int64_t row = h->zone[l] + h->filled[l]; row < h->zone[l] + h->padded[l]; row++) {
            if (row >= p->post.capacity)
                break;
            ag_zero(ag, p->final.tokens + row * p->final.stride, (size_t)p->agree.hidden_bytes);
            AG_EACH(ag, int, i, p->agree.scale_bytes / 4)
            *(uint32_t *)(p->final.scales + row * p->final.scale_row_stride + i * p->final.scale_stride) = 0;
            if (!ag_leader(ag))
                continue;
            if (p->final_weights)
                p->final_weights[row] = 0.0f;
            if (p->final_src_rank)
                p->final_src_rank[row] = -1;
            if (p->final_src_token)
                p->final_src_token[row] = -1;
        }
    }
}

/* FLAT: rows past the last one carry no expert. */
KFN void hd_mark_tail(struct agent *ag, const struct ht_dispatch_params *p)
{
    const int K = p->h->topk;
    const int64_t first = p->h->recv_rows * K, end = p->final_rows * K;

    AG_EACH_ALL(ag, int64_t, i, end - first)
    {
        if (p->final_idx.data)
            index_put(&p->final_idx, first + i, -1);
        if (p->final_weights)
            p->final_weights[first + i] = 0.0f;
    }
}

/* One received row from the landing to the caller's tensors; what is already in place has no landing bit. */
KFN void hd_take_row(struct agent *ag, const struct ht_dispatch_params *p, int64_t row)
{
    const struct group_dev *g = p->g;
    const int K = p->layout == LAYOUT_FLAT ? p->h->topk : 1;
    const char *heap = heap_at(g, g->rank, 0);

    if (p->landed & LANDED_TOKENS)
        ag_copy(ag, p->final.tokens + row * p->final.stride,
                heap + p->post.tokens + (uint64_t)row * p->post.token_stride, (size_t)p->agree.hidden_bytes);
    if (p->landed & LANDED_SCALES)
        row_copy_scales(ag, p->final.scales + row * p->final.scale_row_stride, p->final.scale_stride,
                        heap + p->post.scales + (uint64_t)row * p->post.scale_row_stride, (int64_t)p->post.scale_stride,
                        p->agree.scale_bytes / 4);
    AG_EACH(ag, int, k, K)
    {
        const int64_t i = row * K + k;
        if (p->landed & LANDED_WEIGHTS)
            p->final_weights[i] = ((const float *)(heap + p->post.weights))[i];
        if (p->landed & LANDED_IDX)
            index_put(&p->final_idx, i,
                      p->post.idx64 ? ((const int64_t *)(heap + p->post.topk_idx))[i]
                                    : ((const int32_t *)(heap + p->post.topk_idx))[i]);
    }
    if (!ag_leader(ag))
        return;
    if (p->landed & LANDED_SRC_RANK)
        p->final_src_rank[row] = ((const int32_t *)(heap + p->post.src_rank))[row];
    if (p->landed & LANDED_SRC_TOKEN)
        p->final_src_token[row] = ((const int32_t *)(heap + p->post.src_token))[row];
}

KFN void hd_take_landing(struct agent *ag, const struct ht_dispatch_params *p)
{
    const struct handle_dev *h = p->h;
    const int A = ag_count(ag);
    int64_t rows = h->recv_rows < p->post.capacity ? h->recv_rows : p->post.capacity;

    if (p->layout == LAYOUT_FLAT) {
        for (int64_t row = ag_index(ag); row < rows; row += A)
            hd_take_row(ag, p, row);
        return;
    }
    for (int l = 0; l < p->g->local_experts; l++) {
        const int64_t end = h->zone[l] + h->filled[l] < rows ? h->zone[l] + h->filled[l] : rows;
        for (int64_t row = h->zone[l] + ag_index(ag); row < end; row += A)
            hd_take_row(ag, p, row);
    }
}

/* Counted once per operation, by one lane. */
KFN void hd_count(const struct ht_dispatch_params *p)
{
    const struct group_dev *g = p->g;
    const struct handle_dev *h = p->h;
    uint64_t all = 0, own = 0;

    for (int e = 0; e < g->experts && p->layout == LAYOUT_EXPERT_MAJOR; e++) {
        all += (uint64_t)h->ecount[e];
        own += e / g->local_experts == g->rank ? (uint64_t)h->ecount[e] : 0;
    }
    for (int r = 0; r < g->nranks && p->layout == LAYOUT_FLAT; r++)
        all += (uint64_t)h->rcount[r];
    if (p->layout == LAYOUT_FLAT)
        own = (uint64_t)h->rcount[g->rank];
    ag_add_stat(&g->stats->rows_sent, all);
    ag_add_stat(&g->stats->bytes_peer, (all - own) * (uint64_t)p->agree.hidden_bytes);
    ag_add_stat(&g->stats->rows_received, (uint64_t)h->recv_rows);
    if (p->landed & LANDED_TOKENS)
        ag_add_stat(&g->stats->bytes_local, (uint64_t)h->recv_rows * (uint64_t)p->agree.hidden_bytes);
}

KFN int hd_run(struct agent *ag, const struct ht_dispatch_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    char *scratch = NULL;

    if (p->in.cast && !(scratch = (char *)ag_scratch(ag, row_scales_at(&p->agree) + (size_t)p->agree.scale_bytes)))
        return fail_all(ag, g, KSTATUS_MEMORY, PHASE_HD_READY, -1, p->agree.hidden_bytes, 0);
    if (ag_index(ag) == 0) {
        if (ag_leader(ag))
            *(struct hd_post *)heap_at(g, g->rank, g->ht.dispatch_post) = p->post;
        ag_sync(ag);
        signal_all(ag, g, SIG_HD_READY, 0, epoch);
    }
    if (p->layout == LAYOUT_EXPERT_MAJOR)
        hd_zero_padding(ag, p);
    else
        hd_mark_tail(ag, p);
    if (wait_all(ag, g, SIG_HD_READY, 0, epoch, PHASE_HD_READY, NULL))
        return 1;
    for (int d = 0; d < g->nranks; d++)
        if (g->mask[d] && check_agreement(ag, g, &p->agree, &hd_post_of(g, d)->agree, PHASE_HD_READY, d))
            return 1;
    for (int t = ag_index(ag); t < p->h->ntokens; t += ag_count(ag))
        hd_send_token(ag, p, t, scratch);
    if (sync_last(ag, g, 0)) {
        if (ag_leader(ag)) {
            g->state->epoch[OP_HT_DISPATCH] = epoch;
            hd_count(p);
        }
        ag_sync(ag);
        signal_all(ag, g, SIG_HD_DATA, 0, epoch);
    }
    if (wait_all(ag, g, SIG_HD_DATA, 0, epoch, PHASE_HD_DATA, NULL))
        return 1;
    if (p->h->recv_rows > p->post.capacity)
        report(ag, g, KSTATUS_OVERFLOW, PHASE_HD_DATA, -1, p->h->recv_rows, p->post.capacity, 0, 0);
    if (p->landed)
        hd_take_landing(ag, p);
    return 0;
}

KFN void kernel_ht_dispatch(struct agent *ag, const struct ht_dispatch_params *p)
{
    const uint64_t epoch = p->g->state->epoch[OP_HT_DISPATCH] + 1;

    if (!kernel_begin(ag, p->g))
        hd_run(ag, p, epoch);
    kernel_end(ag, p->g);
}

#endif
