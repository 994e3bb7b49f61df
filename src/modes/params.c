/* SPDX-License-Identifier: Apache-2.0 */
/* Parts of kernel parameters that the modes share, made from checked tensors. */
#include "modes/modes.h"

#include <string.h>

#include "group/heap.h"

uint64_t tensor_span(const epx_tensor *t)
{
    uint64_t last = 0;

    for (int i = 0; i < t->ndim; i++) {
        if (t->shape[i] == 0)
            return 0;
        last += (uint64_t)(t->shape[i] - 1) * (uint64_t)t->stride[i];
    }
    return (last + 1) * epx_dtype_size((epx_dtype)t->dtype);
}

uint64_t tensor_heap_offset(const struct epx_group *group, const epx_tensor *t)
{
    const uint64_t span = t->data ? tensor_span(t) : 0;
    return span ? heap_offset(group, t->data, span) : 0;
}

static int64_t element_bytes(const epx_tensor *t)
{
    return (int64_t)epx_dtype_size((epx_dtype)t->dtype);
}

/* Bytes of scales that are sent with one row. */
uint64_t scale_row_bytes(const struct dispatch_args *args)
{
    const epx_tensor *s = &args->out_scales;
    return s->ndim ? (uint64_t)s->shape[s->ndim - 1] * 4 : 0;
}

int scales_signature(const struct dispatch_args *args)
{
    return args->out_scales.ndim && args->out_scales.dtype == EPX_INT32 ? SIGNATURE_UE8M0 : 0;
}

struct signature make_signature(const struct epx_handle *handle, const epx_tensor *wire, uint64_t scale_bytes,
                                int extra)
{
    struct signature a;

    memset(&a, 0, sizeof(a));
    if (wire) {
        a.hidden_bytes = (int32_t)(wire->shape[wire->ndim - 1] * element_bytes(wire));
        a.dtype = wire->dtype;
    }
    a.scale_bytes = (int32_t)scale_bytes;
    a.topk = handle->config.topk;
    a.layout = handle->config.layout;
    a.extra = extra;
    return a;
}

struct row_in make_row_in(const struct dispatch_args *args)
{
    struct row_in in;

    memset(&in, 0, sizeof(in));
    in.tokens = args->tokens.data;
    in.stride = args->tokens.stride[0] * element_bytes(&args->tokens);
    in.hidden = (int32_t)args->tokens.shape[1];
    in.dtype = args->tokens.dtype;
    in.cast = args->nvfp4 ? CAST_NVFP4 : args->cast ? CAST_FP8 : CAST_NONE;
    in.global_scale = args->global_scale.data;
    in.round_scale = args->round_scale;
    in.scale_ue8m0 = args->cast && args->out_scales.dtype == EPX_INT32;
    if (args->scales.ndim) {
        in.scales = args->scales.data;
        in.scale_row_stride = args->scales.stride[0] * 4;
        in.scale_stride = args->scales.stride[1] * 4;
        in.nscales = (int32_t)args->scales.shape[1];
    }
    return in;
}

struct row_out make_row_out(const epx_tensor *tokens, const epx_tensor *scales)
{
    const int n = tokens->ndim, m = scales->ndim;
    struct row_out out;

    memset(&out, 0, sizeof(out));
    out.tokens = tokens->data;
    out.outer_stride = n == 3 ? tokens->stride[0] * element_bytes(tokens) : 0;
    out.stride = tokens->stride[n - 2] * element_bytes(tokens);
    if (m) {
        out.scales = scales->data;
        out.scale_outer_stride = m == 3 ? scales->stride[0] * 4 : 0;
        out.scale_row_stride = scales->stride[m - 2] * 4;
        out.scale_stride = scales->stride[m - 1] * 4;
    }
    return out;
}

struct index_out make_index(const epx_tensor *t)
{
    struct index_out out = {t->data, t->dtype == EPX_INT64};
    return out;
}

struct route_in make_route(const epx_tensor *topk)
{
    struct route_in in;

    memset(&in, 0, sizeof(in));
    in.topk = topk->data;
    in.idx64 = topk->dtype == EPX_INT64;
    in.ntokens = (int32_t)topk->shape[0];
    in.topk_n = (int32_t)topk->shape[1];
    return in;
}
