/* SPDX-License-Identifier: Apache-2.0 */
/* One token row: from the caller's tensor to its form on the wire (payload, scales), and small per-row outputs. */
#ifndef EPX_KERNEL_ROWS_H
#define EPX_KERNEL_ROWS_H

#include "kernel/agent.h"

KFN size_t up16(size_t n)
{
    return (n + 15) & ~(size_t)15;
}

/* Scales of a row in a staging slot or scratch row begin at the next multiple of 16. */
KFN size_t row_scales_at(const struct signature *a)
{
    return ((size_t)a->hidden_bytes + 15) & ~(size_t)15;
}

KFN const char *row_tokens(const struct row_in *in, int64_t t)
{
    return in->tokens + t * in->stride;
}

/* Copies n 4-byte scales between any strides (bytes). */
KFN void row_copy_scales(struct agent *ag, char *to, int64_t to_stride, const char *from, int64_t from_stride, int n)
{
    AG_EACH(ag, int, i, n)
    *(uint32_t *)(to + i * to_stride) = *(const uint32_t *)(from + i * from_stride);
}

/* Writes row t as it travels: payload at `to`, scales (if any) at row_scales_at(). */
KFN_STEP void row_stage(struct agent *ag, char *to, const struct row_in *in, const struct signature *a, int64_t t)
{
    char *scales = to + row_scales_at(a);

    if (in->cast == CAST_NVFP4) { /* scales follow the codes at once: H is a multiple of 64 */
        ag_nvfp4_encode(ag, to, row_tokens(in, t), in->hidden, in->global_scale ? *in->global_scale : 1.0f);
        return;
    }
    if (in->cast) {
        ag_cast_fp8(ag, to, scales, in->scale_ue8m0, in->round_scale, row_tokens(in, t), in->dtype, in->hidden);
        return;
    }
    ag_copy(ag, to, row_tokens(in, t), (size_t)a->hidden_bytes);
    if (in->nscales)
        row_copy_scales(ag, scales, 4, in->scales + t * in->scale_row_stride, in->scale_stride, in->nscales);
}

KFN void index_put(const struct index_out *out, int64_t i, int64_t value)
{
    if (out->is64)
        ((int64_t *)out->data)[i] = value;
    else
        ((int32_t *)out->data)[i] = (int32_t)value;
}

/*
 * The top-k row that rank `rank` receives: ids[K] and weights[K] of the source, turned to local ids (TOPK_GLOBAL: as
 * they are). TOPK_COMPACT: local ones first, ascending by id (equal ids in k-order), then -1; else in place with -1
 * elsewhere, and weight 0 unless TOPK_ALL_WEIGHTS. `weights` may be NULL.
 */
KFN void row_put_entry(const int32_t *ids, const float *weights, int K, int k, int first, int end, int form,
                       const struct index_out *out_idx, float *out_weights, int64_t at)
{
    const int local = ids[k] >= first && ids[k] < end;
    int place = k;

    if (form & TOPK_COMPACT) {
        int before = 0, locals = 0;
        for (int j = 0; j < K; j++) {
            const int is = ids[j] >= first && ids[j] < end;
            locals += is;
            if (local)
                before += is && (ids[j] < ids[k] || (ids[j] == ids[k] && j < k));
            else
                before += !is && j < k;
        }
        place = local ? before : locals + before;
        if (place >= K) /* ids that change: a window is in use again, without this rank, which is masked */
            return;
    }
    if (out_idx->data)
        index_put(out_idx, at * K + place, local ? ids[k] - (form & TOPK_GLOBAL ? 0 : first) : -1);
    if (out_weights)
        out_weights[at * K + place] = (local || form & TOPK_ALL_WEIGHTS) && weights ? weights[k] : 0.0f;
}

KFN_STEP void row_put_topk(struct agent *ag, const int32_t *ids, const float *weights, int K, int first, int end,
                           int form, const struct index_out *out_idx, float *out_weights, int64_t at)
{
    AG_EACH(ag, int, k, K) row_put_entry(ids, weights, K, k, first, end, form, out_idx, out_weights, at);
}

#endif
