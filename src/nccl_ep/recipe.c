/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Quantisation recipes: what each demands of a call, checked before anything is launched.
 *
 *   NONE        rows of bfloat16, float16, float32
 *   FWD         rows of bytes with rows of bytes that belong to them: to EPX, FP8 tokens with int32 scales
 *   DS_FP8E3M4  EPX casts bfloat16 to FP8
 *   NVFP4       combine: EPX packs rows
 *   MXFP8       combine: EPX rounds the sums of ranks
 */
#include "nccl_ep/compat.h"

enum { ROW_UNIT = 16, DS_COLUMNS = 512, DS_BLOCK = 128, NVFP4_COLUMNS = 512, MXFP8_COLUMNS = 512 };

#define TYPES_FP8 (TYPE_BIT(ncclFloat8e4m3) | TYPE_BIT(ncclFloat8e5m2))
#define TYPES_FWD_TOKENS (TYPES_PLAIN | TYPES_FP8 | TYPE_BIT(ncclFloat4x2))
#define TYPES_FWD_SCALES (TYPES_PLAIN | TYPES_FP8 | TYPE_BIT(ncclUint8))

static ncclResult_t need_none(const struct compat_tensor *t, const char *call, const char *name, const char *recipe)
{
    return t->at ? compat_fail(ncclInvalidArgument, "%s: %s: recipe %s has none, expected NULL", call, name, recipe)
                 : ncclSuccess;
}

static ncclResult_t need_type(const struct compat_tensor *out, const struct compat_tensor *in, const char *call,
                              const char *name, int ndim)
{
    return tensor_need(out, call, name, ndim, TYPE_BIT(in->type));
}

static int receive_dimensions(const struct ncclEpHandle *handle)
{
    return handle->group->low_latency ? 3 : 2;
}

/* ---- Dispatch ---------------------------------------------------------------------------------------------------- */

static ncclResult_t recipe_none(const struct ncclEpHandle *handle, const char *call, struct dispatch *d)
{
    ncclResult_t result = tensor_need(&d->tokens, call, "inputs.tokens", 2, TYPES_PLAIN);

    if (result == ncclSuccess)
        result = need_none(&d->scales, call, "inputs.scales", "NONE");
    if (result == ncclSuccess)
        result = need_none(&d->out_scales, call, "outputs.scales", "NONE");
    return result == ncclSuccess
               ? need_type(&d->out_tokens, &d->tokens, call, "outputs.tokens", receive_dimensions(handle))
               : result;
}

/* Rows of one tensor that travel as bytes. */
static ncclResult_t need_bytes(const struct compat_tensor *t, const char *call, const char *name, int64_t unit)
{
    const int64_t bytes = tensor_row_bytes(t);

    if (bytes < unit || bytes % unit)
        return compat_fail(ncclInvalidArgument, "%s: %s: expected rows of a multiple of %lld bytes, got %lld", call,
                           name, (long long)unit, (long long)bytes);
    if ((uintptr_t)t->at->data % (uintptr_t)unit || t->window_offset % (uint64_t)unit)
        return compat_fail(ncclInvalidArgument,
                           "%s: %s: expected data and win_offset aligned to %lld bytes, got %p and %llu", call, name,
                           (long long)unit, t->at->data, (unsigned long long)t->window_offset);
    return ncclSuccess;
}

/* What is received has the row width of what is sent and the extents of the layout. */
static ncclResult_t need_received(const struct ncclEpHandle *handle, const struct compat_tensor *out,
                                  const struct compat_tensor *in, const char *call, const char *name)
{
    const struct ncclEpGroup *group = handle->group;
    const int64_t *shape = out->at->shape, L = group->config.num_experts / (unsigned int)group->comm.nranks;
    const int64_t M = group->config.max_dispatch_tokens_per_rank, R = group->comm.nranks;
    const int major = handle->config.layout == EPX_EXPERT_MAJOR;

    if (tensor_row_bytes(out) != tensor_row_bytes(in))
        return compat_fail(ncclInvalidArgument, "%s: %s: expected rows of %lld bytes as in inputs, got %lld", call,
                           name, (long long)tensor_row_bytes(in), (long long)tensor_row_bytes(out));
    if (group->low_latency && (shape[0] != (major ? L : R) || shape[1] != (major ? R * M : M)))
        return compat_fail(ncclInvalidArgument, "%s: %s: expected [%lld, %lld, *], got [%lld, %lld, *]", call, name,
                           (long long)(major ? L : R), (long long)(major ? R * M : M), (long long)shape[0],
                           (long long)shape[1]);
    return ncclSuccess;
}

static void as_bytes(struct compat_tensor *t, epx_dtype dtype)
{
    t->at->shape[t->at->ndim - 1] = tensor_row_bytes(t) / (int64_t)epx_dtype_size(dtype);
    t->at->dtype = dtype;
}

static ncclResult_t forward_types(const struct ncclEpHandle *handle, const char *call, const struct dispatch *d)
{
    const int ndim = receive_dimensions(handle);
    ncclResult_t result = tensor_need(&d->tokens, call, "inputs.tokens", 2, TYPES_FWD_TOKENS);

    if (result == ncclSuccess)
        result = tensor_need(&d->scales, call, "inputs.scales", 2, TYPES_FWD_SCALES);
    if (result == ncclSuccess)
        result = need_type(&d->out_tokens, &d->tokens, call, "outputs.tokens", ndim);
    if (result == ncclSuccess)
        result = need_type(&d->out_scales, &d->scales, call, "outputs.scales", ndim);
    if (result != ncclSuccess)
        return result;
    if (d->scales.at->shape[0] != d->tokens.at->shape[0])
        return compat_fail(ncclInvalidArgument, "%s: inputs.scales: expected %lld rows as in inputs.tokens, got %lld",
                           call, (long long)d->tokens.at->shape[0], (long long)d->scales.at->shape[0]);
    if (ndim == 2 && d->out_scales.at->shape[0] != d->out_tokens.at->shape[0])
        return compat_fail(ncclInvalidArgument, "%s: outputs.scales: expected %lld rows as in outputs.tokens, got %lld",
                           call, (long long)d->out_tokens.at->shape[0], (long long)d->out_scales.at->shape[0]);
    return ncclSuccess;
}

static ncclResult_t forward_rows(const struct ncclEpHandle *handle, const char *call, const struct dispatch *d,
                                 int64_t scale_unit)
{
    const int64_t most = handle->group->config.max_token_bytes;
    ncclResult_t result = need_bytes(&d->tokens, call, "inputs.tokens", ROW_UNIT);

    if (result == ncclSuccess)
        result = need_bytes(&d->scales, call, "inputs.scales", scale_unit);
    if (result == ncclSuccess)
        result = need_received(handle, &d->out_tokens, &d->tokens, call, "outputs.tokens");
    if (result == ncclSuccess)
        result = need_received(handle, &d->out_scales, &d->scales, call, "outputs.scales");
    if (result == ncclSuccess)
        result = need_bytes(&d->out_tokens, call, "outputs.tokens", ROW_UNIT);
    if (result == ncclSuccess)
        result = need_bytes(&d->out_scales, call, "outputs.scales", scale_unit);
    if (result == ncclSuccess && scale_unit == ROW_UNIT &&
        tensor_row_bytes(&d->tokens) + tensor_row_bytes(&d->scales) > most)
        result = compat_fail(ncclInvalidArgument,
                             "%s: inputs: expected rows of tokens and scales of at most max_token_bytes = %lld, got "
                             "%lld and %lld bytes",
                             call, (long long)most, (long long)tensor_row_bytes(&d->tokens),
                             (long long)tensor_row_bytes(&d->scales));
    return result;
}

/* `scale_unit`: version 1 forwards float32 scales of any number, and does not count them. */
static ncclResult_t recipe_forward(const struct ncclEpHandle *handle, const char *call, struct dispatch *d,
                                   int64_t scale_unit)
{
    ncclResult_t result = forward_types(handle, call, d);

    if (result == ncclSuccess)
        result = forward_rows(handle, call, d, scale_unit);
    if (result != ncclSuccess)
        return result;
    if (d->config.round_scales)
        return compat_fail(ncclInvalidArgument, "%s: config.round_scales: recipe FWD rounds nothing, expected 0", call);
    if (!handle->group->low_latency && d->out_tokens.window != d->out_scales.window)
        return compat_fail(ncclInvalidArgument,
                           "%s: outputs.tokens, outputs.scales: expected windows (win_hdl) for both or for neither",
                           call);
    as_bytes(&d->tokens, EPX_FP8_E4M3);
    as_bytes(&d->out_tokens, EPX_FP8_E4M3);
    as_bytes(&d->scales, EPX_INT32);
    as_bytes(&d->out_scales, EPX_INT32);
    return ncclSuccess;
}

static ncclResult_t recipe_fp8(const struct ncclEpHandle *handle, const char *call, struct dispatch *d)
{
    ncclResult_t result;
    int64_t H;

    if (!handle->group->low_latency)
        return compat_fail(ncclInvalidArgument, "%s: config.quant_recipe: DS_FP8E3M4 (2) is low latency's only", call);
    result = tensor_need(&d->tokens, call, "inputs.tokens", 2, TYPE_BIT(ncclBfloat16));
    if (result == ncclSuccess)
        result = need_none(&d->scales, call, "inputs.scales", "DS_FP8E3M4");
    if (result == ncclSuccess)
        result = tensor_need(&d->out_tokens, call, "outputs.tokens", 3, TYPE_BIT(ncclFloat8e4m3));
    if (result == ncclSuccess)
        result = tensor_need(&d->out_scales, call, "outputs.scales", 3, TYPE_BIT(ncclFloat32));
    if (result != ncclSuccess)
        return result;
    H = d->tokens.at->shape[1];
    if (H < DS_COLUMNS || H % DS_COLUMNS)
        return compat_fail(ncclInvalidArgument,
                           "%s: inputs.tokens: recipe DS_FP8E3M4 expects rows of a multiple of %d values, got %lld",
                           call, DS_COLUMNS, (long long)H);
    if (d->out_scales.at->shape[2] != H / DS_BLOCK)
        return compat_fail(ncclInvalidArgument, "%s: outputs.scales: expected %lld scales a row, got %lld", call,
                           (long long)(H / DS_BLOCK), (long long)d->out_scales.at->shape[2]);
    if (H + H / DS_BLOCK * 4 > (int64_t)handle->group->config.max_token_bytes)
        return compat_fail(ncclInvalidArgument,
                           "%s: outputs: expected rows of tokens and scales of at most max_token_bytes = %u, got %lld",
                           call, handle->group->config.max_token_bytes, (long long)H + H / DS_BLOCK * 4);
    return ncclSuccess;
}

/* Version 1 has no recipes: types and scales say what is meant. */
static ncclResult_t recipe_version_1(const struct ncclEpHandle *handle, const char *call, struct dispatch *d)
{
    if (!d->tokens.at || !d->out_scales.at)
        return recipe_none(handle, call, d);
    if (TYPES_FP8 & TYPE_BIT(d->tokens.type))
        return recipe_forward(handle, call, d, 4);
    return d->scales.at ? recipe_none(handle, call, d) : recipe_fp8(handle, call, d);
}

/* Low latency with zero_copy ON. */
static ncclResult_t check_zero_copy(const struct ncclEpHandle *handle, const char *call, const struct dispatch *d)
{
    const struct ncclEpGroup *group = handle->group;

    if (group->config.zero_copy != NCCL_EP_ZERO_COPY_ON)
        return ncclSuccess;
    if (!group->low_latency)
        return d->out_tokens.window ? ncclSuccess
                                    : compat_fail(ncclInvalidArgument,
                                                  "%s: outputs.tokens: zero_copy ON expects a window (win_hdl)", call);
    if (handle->config.layout != EPX_RANK_MAJOR || group->nodes > 1 ||
        d->config.quant_recipe == NCCL_EP_DISP_QUANT_DS_FP8E3M4)
        return compat_fail(ncclInvalidArgument,
                           "%s: zero_copy ON in low latency expects RANK_MAJOR, one node, and recipe NONE or FWD, got "
                           "layout %d, %d nodes, recipe %d",
                           call, handle->config.layout, group->nodes, (int)d->config.quant_recipe);
    if (!d->out_tokens.window && !d->out_scales.window)
        return compat_fail(ncclInvalidArgument,
                           "%s: outputs: zero_copy ON expects a window (win_hdl) for tokens or scales", call);
    return ncclSuccess;
}

ncclResult_t dispatch_recipe(const struct ncclEpHandle *handle, const char *call, struct dispatch *d)
{
    const int first =
        handle->group->config.version <= 1 && !NCCL_EP_HAS_FIELD(&d->config, ncclEpDispatchConfig_t, quant_recipe);
    ncclResult_t result;

    if (first)
        result = recipe_version_1(handle, call, d);
    else if (d->config.quant_recipe == NCCL_EP_DISP_QUANT_NONE)
        result = recipe_none(handle, call, d);
    else if (d->config.quant_recipe == NCCL_EP_DISP_QUANT_FWD)
        result = recipe_forward(handle, call, d, ROW_UNIT);
    else if (d->config.quant_recipe == NCCL_EP_DISP_QUANT_DS_FP8E3M4)
        result = recipe_fp8(handle, call, d);
    else
        result = compat_fail(ncclInvalidArgument, "%s: config.quant_recipe: expected 0 to 2, got %d", call,
                             (int)d->config.quant_recipe);
    return result == ncclSuccess ? check_zero_copy(handle, call, d) : result;
}

/* ---- Combine ----------------------------------------------------------------------------------------------------- */

static ncclResult_t combine_nvfp4(const struct ncclEpHandle *handle, const char *call, struct combine *c)
{
    const struct ncclEpGroup *group = handle->group;
    const epx_tensor *tokens, *scales;
    ncclResult_t result;

    if (!group->low_latency)
        return compat_fail(ncclInvalidUsage, "%s: config.quant_recipe: NVFP4 (1) is low latency's only", call);
    if (!group->nvfp4)
        return compat_fail(ncclInvalidUsage,
                           "%s: config.quant_recipe: NVFP4 (1) expects compute capability 10.0, 10.3, 11.0, 12.0 or "
                           "12.1, and this device has another",
                           call);
    result = tensor_need(&c->tokens, call, "inputs.tokens", 3, TYPE_BIT(ncclBfloat16));
    if (result == ncclSuccess)
        result = tensor_need(&c->scales, call, "inputs.scales", 3, TYPE_BIT(ncclFloat32));
    if (result == ncclSuccess)
        result = tensor_need(&c->out_tokens, call, "outputs.tokens", 2, TYPE_BIT(ncclBfloat16));
    if (result != ncclSuccess)
        return result;
    tokens = c->tokens.at;
    scales = c->scales.at;
    if (tokens->shape[2] < NVFP4_COLUMNS || tokens->shape[2] % NVFP4_COLUMNS || scales->shape[0] != tokens->shape[0] ||
        scales->shape[1] != tokens->shape[1] || scales->shape[2] != 1)
        return compat_fail(ncclInvalidArgument,
                           "%s: recipe NVFP4 expects rows of a multiple of %d values, and scales [%lld, %lld, 1], got "
                           "%lld values and [%lld, %lld, %lld]",
                           call, NVFP4_COLUMNS, (long long)tokens->shape[0], (long long)tokens->shape[1],
                           (long long)tokens->shape[2], (long long)scales->shape[0], (long long)scales->shape[1],
                           (long long)scales->shape[2]);
    c->scales.at->ndim = 2;
    return ncclSuccess;
}

static ncclResult_t combine_mxfp8(const struct ncclEpHandle *handle, const char *call, struct combine *c)
{
    const struct ncclEpGroup *group = handle->group;
    ncclResult_t result;

    if (group->low_latency || handle->config.layout != EPX_EXPERT_MAJOR || group->nodes > 1)
        return compat_fail(ncclInvalidUsage,
                           "%s: config.quant_recipe: MXFP8 (2) expects high throughput, EXPERT_MAJOR and one node, got "
                           "%s, layout %d, %d nodes",
                           call, group->low_latency ? "low latency" : "high throughput", handle->config.layout,
                           group->nodes);
    result = tensor_need(&c->tokens, call, "inputs.tokens", 2, TYPE_BIT(ncclBfloat16));
    if (result == ncclSuccess)
        result = need_none(&c->scales, call, "inputs.scales", "MXFP8");
    if (result == ncclSuccess)
        result = tensor_need(&c->out_tokens, call, "outputs.tokens", 2, TYPE_BIT(ncclBfloat16));
    if (result != ncclSuccess)
        return result;
    if (c->tokens.at->shape[1] < MXFP8_COLUMNS || c->tokens.at->shape[1] % MXFP8_COLUMNS)
        return compat_fail(ncclInvalidArgument,
                           "%s: inputs.tokens: recipe MXFP8 expects rows of a multiple of %d values, got %lld", call,
                           MXFP8_COLUMNS, (long long)c->tokens.at->shape[1]);
    return ncclSuccess;
}

static ncclResult_t combine_none(const struct ncclEpHandle *handle, const char *call, struct combine *c)
{
    ncclResult_t result = tensor_need(&c->tokens, call, "inputs.tokens", receive_dimensions(handle), TYPES_PLAIN);

    if (result == ncclSuccess)
        result = need_none(&c->scales, call, "inputs.scales", "NONE");
    return result == ncclSuccess ? tensor_need(&c->out_tokens, call, "outputs.tokens", 2, TYPE_BIT(c->tokens.type))
                                 : result;
}

ncclResult_t combine_recipe(const struct ncclEpHandle *handle, const char *call, struct combine *c)
{
    ncclResult_t result;

    if (c->config.quant_recipe == NCCL_EP_COMB_QUANT_NVFP4)
        result = combine_nvfp4(handle, call, c);
    else if (c->config.quant_recipe == NCCL_EP_COMB_QUANT_MXFP8)
        result = combine_mxfp8(handle, call, c);
    else if (c->config.quant_recipe == NCCL_EP_COMB_QUANT_NONE)
        result = combine_none(handle, call, c);
    else
        result = compat_fail(ncclInvalidArgument, "%s: config.quant_recipe: expected 0 to 2, got %d", call,
                             (int)c->config.quant_recipe);
    if (result == ncclSuccess && !handle->group->low_latency &&
        handle->group->config.zero_copy == NCCL_EP_ZERO_COPY_ON && !c->tokens.window)
        result = compat_fail(ncclInvalidArgument, "%s: inputs.tokens: zero_copy ON expects a window (win_hdl)", call);
    return result;
}
