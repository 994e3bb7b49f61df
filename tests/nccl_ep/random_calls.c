/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "random.h"

enum { GUARD = 64, GUARD_BYTE = 0xe7 };

static int tensor_open(struct run *run, struct tensor *t, int window, ncclDataType_t type, size_t width, int ndim,
                       int d0, int d1, int d2)
{
    const size_t shape[3] = {(size_t)d0, (size_t)d1, (size_t)d2};

    memset(t, 0, sizeof(*t));
    t->t = (ncclEpTensor_t)NCCL_EP_TENSOR_INIT;
    t->bytes = width;
    for (int i = 0; i < ndim; i++)
        t->bytes *= t->sizes[i] = shape[i];
    t->t.ndim = (unsigned int)ndim;
    t->t.datatype = type;
    t->t.sizes = t->sizes;
    if (window)
        TRY(ncclMemAlloc((void **)&t->data, t->bytes + GUARD));
    else
        TRY(cudaMalloc((void **)&t->data, t->bytes + GUARD));
    memset(t->data, FILL, t->bytes);
    memset(t->data + t->bytes, GUARD_BYTE, GUARD);
    if (window)
        TRY(ncclCommWindowRegister(run->comm, t->data, t->bytes + GUARD, &t->t.win_hdl, NCCL_WIN_COLL_SYMMETRIC));
    t->in_window = window;
    t->t.data = window && run->plan.seed % 2 ? NULL : t->data;
    return 0;
}

static int tensor_close(struct run *run, struct tensor *t)
{
    if (!t->data)
        return 0;
    for (int i = 0; i < GUARD; i++)
        CHECK(t->data[t->bytes + (size_t)i] == GUARD_BYTE);
    if (t->in_window) {
        TRY(ncclCommWindowDeregister(run->comm, t->t.win_hdl));
        TRY(ncclMemFree(t->data));
    } else {
        TRY(cudaFree(t->data));
    }
    t->data = NULL;
    return 0;
}

/* Rows of the receive tensors: with T given some more, which nobody writes; eager: what comes, set later. */
int receive_rows(const struct run *run)
{
    const struct plan *p = &run->plan;

    return p->room == EAGER ? p->R * p->M * p->K + p->L * p->alignment : p->T + 3;
}

static int open_received(struct run *run, struct tensor *t, int window, ncclDataType_t type, size_t width, int last)
{
    const struct plan *p = &run->plan;

    if (!p->low)
        return tensor_open(run, t, window, type, width, last ? 2 : 1, receive_rows(run), last, 0);
    return p->layout == NCCL_EP_LAYOUT_EXPERT_MAJOR
               ? tensor_open(run, t, window, type, width, 3, p->L, p->R * p->M, last)
               : tensor_open(run, t, window, type, width, 3, p->R, p->M, last);
}

int open_tensors(struct run *run)
{
    const struct plan *p = &run->plan;
    const int cast = p->recipe == NCCL_EP_DISP_QUANT_DS_FP8E3M4, forward = p->recipe == NCCL_EP_DISP_QUANT_FWD;
    const int major = p->layout == NCCL_EP_LAYOUT_EXPERT_MAJOR;
    const ncclDataType_t counter = !p->low && p->counter64 ? ncclInt64 : ncclInt32;
    const size_t wide = counter == ncclInt64 ? 8 : 4;

    if (tensor_open(run, &run->idx, 0, p->index32 ? ncclInt32 : ncclInt64, p->index32 ? 4 : 8, 2, p->M, p->K, 0) ||
        tensor_open(run, &run->tokens, 0, p->type, type_bytes(p->type), 2, p->M, p->H, 0) ||
        tensor_open(run, &run->weights, 0, ncclFloat32, 4, 2, p->M, p->K, 0) ||
        tensor_open(run, &run->counts, 0, counter, wide, 1, p->L, 0, 0) ||
        tensor_open(run, &run->offsets, 0, counter, wide, 1, p->L, 0, 0) ||
        tensor_open(run, &run->total, 0, counter, wide, 1, 1, 0, 0) ||
        tensor_open(run, &run->rank_counts, 0, ncclInt32, 4, 1, p->R, 0, 0) ||
        tensor_open(run, &run->back, 0, p->type, type_bytes(p->type), 2, p->M, p->H, 0) ||
        tensor_open(run, &run->back_weights, 0, ncclFloat32, 4, 2, p->M, p->K, 0) ||
        open_received(run, &run->out, p->windows, cast ? ncclFloat8e4m3 : p->type, cast ? 1 : type_bytes(p->type),
                      p->H))
        return -1;
    if (forward &&
        (tensor_open(run, &run->scales, 0, p->scale_type, type_bytes(p->scale_type), 2, p->M, p->scales, 0) ||
         open_received(run, &run->out_scales, p->windows, p->scale_type, type_bytes(p->scale_type), p->scales)))
        return -1;
    if (cast && open_received(run, &run->out_scales, 0, ncclFloat32, 4, p->H / 128))
        return -1;
    if ((!p->low || !major) && open_received(run, &run->out_weights, 0, ncclFloat32, 4, major ? 0 : p->K))
        return -1;
    return major ? 0 : open_received(run, &run->out_idx, 0, p->low ? ncclInt32 : ncclInt64, p->low ? 4 : 8, p->K);
}

int close_tensors(struct run *run)
{
    struct tensor *const all[] = {&run->idx,        &run->tokens,      &run->weights, &run->scales,      &run->out,
                                  &run->out_scales, &run->out_weights, &run->out_idx, &run->counts,      &run->offsets,
                                  &run->total,      &run->rank_counts, &run->back,    &run->back_weights};

    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
        if (tensor_close(run, all[i]))
            return -1;
    return 0;
}

/* ---- A round ----------------------------------------------------------------------------------------------------- */

/* Copies wait for the device: not for the other ranks, which may be waiting for this one. */
int put_inputs(struct run *run)
{
    const struct plan *p = &run->plan;
    const int n = run->in.tokens[run->rank], first = run->rank * p->M;
    struct tensor *const own[] = {&run->idx, &run->tokens, &run->weights, &run->scales, &run->back, &run->back_weights};
    struct tensor *const filled[] = {&run->out, &run->out_scales, &run->out_weights, &run->out_idx, &run->back};

    for (size_t i = 0; i < sizeof(own) / sizeof(own[0]); i++)
        own[i]->sizes[0] = (size_t)n;
    for (int i = 0; i < n * p->K; i++) {
        const int id = run->in.idx[first * p->K + i];

        if (p->index32)
            ((int32_t *)(void *)run->idx.data)[i] = id;
        else
            ((int64_t *)(void *)run->idx.data)[i] = id;
        ((float *)(void *)run->weights.data)[i] = run->in.weight[first * p->K + i];
    }
    TRY(cudaMemcpy(run->tokens.data, run->in.rows + (size_t)first * row_bytes(p), (size_t)n * row_bytes(p),
                   cudaMemcpyHostToDevice));
    if (scale_bytes(p))
        TRY(cudaMemcpy(run->scales.data, run->in.scales + (size_t)first * scale_bytes(p), (size_t)n * scale_bytes(p),
                       cudaMemcpyHostToDevice));
    for (size_t i = 0; i < sizeof(filled) / sizeof(filled[0]); i++)
        if (filled[i]->data)
            memset(filled[i]->data, FILL, filled[i]->bytes);
    return 0;
}

int update(struct run *run)
{
    const struct plan *p = &run->plan;
    const int major = p->layout == NCCL_EP_LAYOUT_EXPERT_MAJOR;
    ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;

    info.expert_counters = &run->counts.t;
    info.expert_offsets = major ? &run->offsets.t : NULL;
    info.recv_total_counter = &run->total.t;
    TRY(ncclEpUpdateHandle(run->handle, &run->idx.t, p->low ? NULL : &info, run->stream));
    if (p->twin == 2) { /* its memory elsewhere */
        TRY(cudaMemcpyAsync(run->copied_mem, run->handle_mem, run->handle_bytes, cudaMemcpyDefault, run->stream));
    }
    if (p->room != EAGER || p->low)
        return 0;
    TRY(cudaStreamSynchronize(run->stream));
    run->out.sizes[0] = run->out_scales.sizes[0] = run->out_weights.sizes[0] = run->out_idx.sizes[0] =
        (size_t)run->received[run->rank].total;
    return 0;
}

int dispatch(struct run *run, int backward)
{
    const struct plan *p = &run->plan;
    const int major = p->layout == NCCL_EP_LAYOUT_EXPERT_MAJOR, weights = backward ? 0 : !p->low || !major;
    const ncclEpHandle_t handle = run->twin ? run->twin : run->handle;
    ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
    ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    ncclEpDispatchConfig_t config = NCCL_EP_DISPATCH_CONFIG_INIT;
    ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;

    in.tokens = &run->tokens.t;
    out.tokens = &run->out.t;
    in.topk_weights = weights ? &run->weights.t : NULL;
    out.topk_weights = weights ? &run->out_weights.t : NULL;
    out.topk_idx = weights && !major ? &run->out_idx.t : NULL;
    in.scales = run->scales.data ? &run->scales.t : NULL;
    out.scales = run->out_scales.data ? &run->out_scales.t : NULL;
    info.recv_topk_idx_kind = p->global_ids ? NCCL_EP_EXPERT_ID_GLOBAL : NCCL_EP_EXPERT_ID_LOCAL;
    info.expert_counters = p->low && !major ? NULL : &run->counts.t;
    info.src_rank_counters = p->low && !major ? &run->rank_counts.t : NULL;
    config.quant_recipe = p->recipe;
    config.round_scales = (unsigned int)p->round_scales;
    config.send_only = (unsigned int)p->staged;
    config.pass_direction = backward ? NCCL_EP_BWD_PASS : NCCL_EP_FWD_PASS;
    TRY(ncclEpDispatch(handle, &in, &out, &info, &config, run->stream));
    if (p->staged)
        TRY(ncclEpComplete(handle, NULL, run->stream));
    return 0;
}

int combine(struct run *run, int backward)
{
    const struct plan *p = &run->plan;
    const ncclEpHandle_t handle = run->twin ? run->twin : run->handle;
    ncclEpCombineInputs_t in = NCCL_EP_COMBINE_INPUTS_INIT;
    ncclEpCombineOutputs_t out = NCCL_EP_COMBINE_OUTPUTS_INIT;
    ncclEpCombineConfig_t config = NCCL_EP_COMBINE_CONFIG_INIT;

    const size_t rows = run->out.sizes[0];

    in.tokens = &run->out.t;
    out.tokens = &run->back.t;
    out.topk_weights = &run->weights.t; /* read in low latency's EXPERT_MAJOR; elsewhere not looked at */
    if (backward) {
        in.topk_weights = &run->out_weights.t;
        out.topk_weights = &run->back_weights.t;
    }
    config.send_only = (unsigned int)p->staged;
    config.pass_direction = backward ? NCCL_EP_BWD_PASS : NCCL_EP_FWD_PASS;
    if (p->tight)
        run->out.sizes[0] = run->out_weights.sizes[0] = (size_t)run->received[run->rank].rows;
    TRY(ncclEpCombine(handle, &in, &out, &config, run->stream));
    if (p->tight)
        run->out.sizes[0] = run->out_weights.sizes[0] = rows;
    if (p->staged)
        TRY(ncclEpComplete(handle, NULL, run->stream));
    return 0;
}
