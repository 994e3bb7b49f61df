/* SPDX-License-Identifier: Apache-2.0 */
/* High-throughput dispatch: what a receiver does with its own tensors, besides what senders write into them. */
#ifndef EPX_KERNEL_HT_RECEIVE_H
#define EPX_KERNEL_HT_RECEIVE_H

#include "kernel/rows.h"
#include "kernel/sync.h"

/* Rows that the tensors of this rank have room for, or the receive buffer in their place. */
KFN int64_t hd_capacity(const struct ht_dispatch_params *p)
{
    return p->h->state->windowed ? p->own.capacity : p->desc.capacity;
}

KFN void hd_zero_row(struct agent *ag, const struct ht_dispatch_params *p, int64_t row)
{
    ag_zero(ag, p->final.tokens + row * p->final.stride, (size_t)p->signature.hidden_bytes);
    AG_EACH(ag, int, i, p->signature.scale_bytes / 4)
    *(uint32_t *)(p->final.scales + row * p->final.scale_row_stride + i * p->final.scale_stride) = 0;
}

/* EXPERT_MAJOR, behind the last zone: weights are 0; where rows are dropped, all is. */
KFN_STEP void hd_zero_tail(struct agent *ag, const struct ht_dispatch_params *p)
{
    const int64_t rows = p->h->state->recv_rows;

    if (p->final_weights)
        AG_EACH_ALL(ag, int64_t, i, p->final_rows - rows) p->final_weights[rows + i] = 0.0f;
    for (int64_t row = rows + ag_index(ag); p->drop && row < p->final_rows; row += ag_count(ag))
        hd_zero_row(ag, p, row);
}

/* EXPERT_MAJOR: rows between the tokens of an expert and the next zone. */
KFN_STEP void hd_zero_padding(struct agent *ag, const struct ht_dispatch_params *p)
{
    const struct handle_dev *h = p->h;

    hd_zero_tail(ag, p);
    for (int l = ag_index(ag); l < p->g->local_experts; l += ag_count(ag)) {
        for (int64_t row = h->zone[l] + h->filled[l]; row < h->zone[l] + h->padded[l]; row++) {
            if (row >= hd_capacity(p))
                break;
            hd_zero_row(ag, p, row);
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

/* Words [first, end) of an array, by all agents: each has a run of its own where a lane is an agent. */
KFN void fill_words(struct agent *ag, void *array, int64_t first, int64_t end, int32_t value)
{
    int32_t *to = (int32_t *)array;
#if AG_ONE_LANE
    const int64_t n = end > first ? end - first : 0;
    const int64_t stop = first + n * (ag_index(ag) + 1) / ag_count(ag);

    for (int64_t i = first + n * ag_index(ag) / ag_count(ag); i < stop; i++)
        to[i] = value;
#else
    AG_EACH_ALL(ag, int64_t, i, end - first) to[first + i] = value;
#endif
}

/* FLAT: rows past the last one carry no expert. A receive tensor may be much larger than what is received. */
KFN_STEP void hd_mark_tail(struct agent *ag, const struct ht_dispatch_params *p)
{
    const int K = p->h->state->topk, words = p->final_idx.is64 ? 2 : 1;
    const int64_t first = p->h->state->recv_rows * K, end = p->final_rows * K;

    if (p->final_idx.data)
        fill_words(ag, p->final_idx.data, first * words, end * words, -1);
    if (p->final_weights)
        fill_words(ag, p->final_weights, first, end, 0);
}

/* One received row from the receive buffer to the caller's tensors; what is already in place has no BUFFERED_ bit. */
KFN void hd_take_row(struct agent *ag, const struct ht_dispatch_params *p, int64_t row)
{
    const struct group_dev *g = p->g;
    const int K = p->layout == LAYOUT_FLAT ? p->h->state->topk : 1;
    const char *heap = heap_at(g, g->rank, 0);

    if (p->buffered & BUFFERED_TOKENS)
        ag_copy(ag, p->final.tokens + row * p->final.stride,
                heap + p->desc.tokens + (uint64_t)row * p->desc.token_stride, (size_t)p->signature.hidden_bytes);
    if (p->buffered & BUFFERED_SCALES)
        row_copy_scales(ag, p->final.scales + row * p->final.scale_row_stride, p->final.scale_stride,
                        heap + p->desc.scales + (uint64_t)row * p->desc.scale_row_stride, (int64_t)p->desc.scale_stride,
                        p->signature.scale_bytes / 4);
    AG_EACH(ag, int, k, K)
    {
        const int64_t i = row * K + k;
        if (p->buffered & BUFFERED_WEIGHTS)
            p->final_weights[i] = ((const float *)(heap + p->desc.weights))[i];
        if (p->buffered & BUFFERED_IDX)
            index_put(&p->final_idx, i,
                      p->desc.idx & IDX_64 ? ((const int64_t *)(heap + p->desc.topk_idx))[i]
                                           : ((const int32_t *)(heap + p->desc.topk_idx))[i]);
    }
    if (!ag_leader(ag))
        return;
    if (p->buffered & BUFFERED_SRC_RANK)
        p->final_src_rank[row] = ((const int32_t *)(heap + p->desc.src_rank))[row];
    if (p->buffered & BUFFERED_SRC_TOKEN)
        p->final_src_token[row] = ((const int32_t *)(heap + p->desc.src_token))[row];
}

/* FLAT has the first two columns of a line; the others are the caller's. */
KFN_STEP void hd_copy_map(struct agent *ag, const struct ht_dispatch_params *p)
{
    const struct handle_state *state = p->h->state;
    const int64_t lines = state->tokens < p->desc.map_lines ? state->tokens : p->desc.map_lines;
    const int32_t *from = (const int32_t *)heap_at(p->g, p->g->rank, p->desc.map);
    const int columns = state->topk + 2, written = p->layout == LAYOUT_FLAT ? 2 : columns;

    AG_EACH_ALL(ag, int64_t, i, lines * written)
    {
        const int64_t at = i / written * columns + i % written;
        p->final_map[at] = from[at];
    }
}

KFN_STEP void hd_copy_recv_buf(struct agent *ag, const struct ht_dispatch_params *p)
{
    const struct handle_dev *h = p->h;
    const int A = ag_count(ag);
    int64_t rows = h->state->recv_rows < p->desc.capacity ? h->state->recv_rows : p->desc.capacity;

    if (p->buffered & BUFFERED_MAP)
        hd_copy_map(ag, p);
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

#endif
