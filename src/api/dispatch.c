/* SPDX-License-Identifier: Apache-2.0 */
/* epx_dispatch and epx_complete: every argument is checked before anything is sent. */
#include <inttypes.h>
#include <string.h>

#include "api/args.h"
#include "api/check.h"
#include "group/abort.h"
#include "api/handle.h"
#include "group/registry.h"
#include "modes/handle.h"
#include "util/structs.h"
#include "util/status.h"

static const char call[] = "epx_dispatch";

/* Leading extents of what a rank receives: [L, R*M] and [R, M] in low latency, [N] in high throughput. */
struct extents {
    int ndim;
    int64_t outer; /* ndim 2 */
    int64_t rows;  /* needed at least; 0 = not known here */
    const char *why;
};

static struct extents receive_extents(const struct epx_handle *handle)
{
    const struct settings *set = &handle->group->set;

    if (handle->config.mode == EPX_HIGH_THROUGHPUT)
        return (struct extents){1, -1, 0, ""};
    if (handle->config.layout == EPX_EXPERT_MAJOR)
        return (struct extents){2, set->local_experts, (int64_t)set->nranks * set->max_tokens,
                                "ranks * max_tokens_per_rank"};
    return (struct extents){2, set->nranks, set->max_tokens, "max_tokens_per_rank"};
}

static epx_status check_inputs(struct epx_handle *handle, const epx_dispatch_inputs *in,
                               const epx_dispatch_outputs *out, struct dispatch_args *args)
{
    const int cast = out->tokens && out->tokens->dtype == EPX_FP8_E4M3;
    const int64_t B = handle->ntokens;
    const struct want tokens = {call, "inputs.tokens", DTYPES_PAYLOAD | DTYPE_BIT(EPX_FP8_E4M3),
                                2,    {B, -1},         STRIDES_ROWS};
    const struct want scales = {call, "inputs.scales", DTYPES_SCALE, 2, {B, -1}, STRIDES_ANY};
    const struct want weights = {call, "inputs.topk_weights",    DTYPE_BIT(EPX_FP32),
                                 2,    {B, handle->config.topk}, STRIDES_NONE};
    epx_status status = check_tensor(in->tokens, &tokens, &args->tokens);

    if (status == EPX_OK)
        status = need_row_bytes(handle, call, tokens.name, &args->tokens, cast ? out->tokens : NULL);
    if (status == EPX_OK)
        status = check_optional(in->scales, &scales, &args->scales);
    if (status == EPX_OK)
        status = check_optional(in->topk_weights, &weights, &args->weights);
    if (status != EPX_OK)
        return status;
    const int fp8 = args->tokens.dtype == EPX_FP8_E4M3;
    if (fp8 && !in->scales)
        return fail(EPX_ERR_ARGUMENT, "%s: inputs.scales: fp8 tokens need their scales, got NULL", call);
    if (!fp8 && in->scales)
        return fail(EPX_ERR_ARGUMENT, "%s: inputs.scales: expected NULL with %s tokens", call,
                    dtype_name(args->tokens.dtype));
    return EPX_OK;
}

/* Shape of an output: the receive extents, then `last` (-1 = none). */
static struct want output_want(const struct extents *x, const char *name, unsigned dtypes, int64_t rows, int64_t last,
                               enum strides strides)
{
    struct want w = {call, name, dtypes, 0, {0}, strides};

    if (x->ndim == 2)
        w.shape[w.ndim++] = x->outer;
    w.shape[w.ndim++] = rows;
    if (last >= 0)
        w.shape[w.ndim++] = last;
    return w;
}

static epx_status check_out_tokens(struct epx_handle *handle, const struct extents *x, const epx_dispatch_outputs *out,
                                   struct dispatch_args *args)
{
    const int in_dtype = args->tokens.dtype;
    const unsigned cast = in_dtype != EPX_FP8_E4M3 ? DTYPE_BIT(EPX_FP8_E4M3) : 0u;
    const unsigned dtypes = args->nvfp4 ? DTYPE_BIT(EPX_UINT8) : DTYPE_BIT(in_dtype) | cast;
    const struct want want =
        output_want(x, "outputs.tokens", dtypes, -1, args->tokens.shape[1] / (args->nvfp4 ? 2 : 1), STRIDES_ROWS);
    epx_status status = check_tensor(out->tokens, &want, &args->out_tokens);

    if (status != EPX_OK)
        return status;
    args->cast = args->out_tokens.dtype == EPX_FP8_E4M3 && in_dtype != EPX_FP8_E4M3;
    (void)handle;
    return need_rows(call, want.name, args->out_tokens.shape[x->ndim - 1], x->rows, x->why);
}

/* NVFP4: what is asked for, the shape of the rows, and the scale of all. */
static epx_status check_nvfp4_inputs(struct epx_handle *handle, const epx_dispatch_inputs *in,
                                     const epx_dispatch_config *cfg, struct dispatch_args *args)
{
    const struct want want = {call, "inputs.global_scale", DTYPE_BIT(EPX_FP32), 1, {1}, STRIDES_NONE};

    if (!cfg->nvfp4)
        return in->global_scale
                   ? fail(EPX_ERR_ARGUMENT, "%s: inputs.global_scale: expected NULL without config.nvfp4", call)
                   : EPX_OK;
    if (cfg->nvfp4 != EPX_NVFP4_ROWS && cfg->nvfp4 != EPX_NVFP4_TILES)
        return fail(EPX_ERR_ARGUMENT, "%s: config.nvfp4: expected 0, 1 (rows) or 2 (tiles), got %d", call, cfg->nvfp4);
    if (handle->config.mode != EPX_LOW_LATENCY)
        return fail(EPX_ERR_USAGE, "%s: config.nvfp4: high throughput has no NVFP4", call);
    if (args->tokens.dtype != EPX_BF16 || args->tokens.shape[1] % 64)
        return fail(EPX_ERR_ARGUMENT, "%s: config.nvfp4: expected rows of a multiple of 64 bf16, got %" PRId64 " %s",
                    call, args->tokens.shape[1], dtype_name(args->tokens.dtype));
    args->nvfp4 = cfg->nvfp4;
    return check_optional(in->global_scale, &want, &args->global_scale);
}

static epx_status check_nvfp4_scales(const struct extents *x, int64_t rows, const epx_dispatch_outputs *out,
                                     struct dispatch_args *args)
{
    const int tiles = args->nvfp4 == EPX_NVFP4_TILES;
    const struct want want =
        output_want(x, "outputs.scales", DTYPE_BIT(EPX_INT32), tiles ? (rows + 127) / 128 * 128 : rows,
                    args->tokens.shape[1] / 64, tiles ? STRIDES_NONE : STRIDES_ANY);

    return check_tensor(out->scales, &want, &args->out_scales);
}

static epx_status check_out_scales(struct epx_handle *handle, const struct extents *x, int64_t rows,
                                   const epx_dispatch_outputs *out, struct dispatch_args *args)
{
    const int low = handle->config.mode == EPX_LOW_LATENCY, channels = low ? 128 : 64;
    const int64_t most = handle->group->set.max_hidden_bytes, limit = (most + channels - 1) / channels;
    struct want want;
    int64_t columns;
    epx_status status;

    if (args->nvfp4)
        return check_nvfp4_scales(x, rows, out, args);
    if (args->out_tokens.dtype != EPX_FP8_E4M3) {
        if (out->scales)
            return fail(EPX_ERR_ARGUMENT, "%s: outputs.scales: expected NULL with %s tokens", call,
                        dtype_name(args->out_tokens.dtype));
        return EPX_OK;
    }
    want = output_want(x, "outputs.scales", args->cast ? DTYPES_SCALE : DTYPE_BIT(args->scales.dtype), rows, 0,
                       STRIDES_ANY);
    want.shape[want.ndim - 1] = -1;
    status = check_tensor(out->scales, &want, &args->out_scales);
    if (status != EPX_OK)
        return status;
    columns = args->scales.ndim ? args->scales.shape[1] : (args->tokens.shape[1] + 127) / 128;
    if (args->cast && args->out_scales.dtype == EPX_INT32)
        columns = (columns + 3) / 4;
    want.shape[want.ndim - 1] = columns;
    status = check_tensor(out->scales, &want, &args->out_scales);
    if (status == EPX_OK && columns > limit && args->tokens.shape[1] + columns * 4 > most)
        status = fail(EPX_ERR_ARGUMENT,
                      "%s: outputs.scales: expected at most max_hidden_bytes / %d = %" PRId64
                      " scales per row, or tokens and scales of at most %" PRId64 " bytes, got %" PRId64 " scales",
                      call, channels, limit, most, columns);
    return status;
}

static epx_status check_out_meta(struct epx_handle *handle, const struct extents *x, int64_t rows,
                                 const epx_dispatch_outputs *out, struct dispatch_args *args)
{
    const int K = handle->config.topk, major = handle->config.layout == EPX_EXPERT_MAJOR;
    const int low = handle->config.mode == EPX_LOW_LATENCY;
    const struct want weights =
        output_want(x, "outputs.topk_weights", DTYPE_BIT(EPX_FP32), rows, major ? -1 : K, STRIDES_NONE);
    const struct want idx = output_want(x, "outputs.topk_idx", DTYPES_INDEX, rows, K, STRIDES_NONE);
    const struct want src_rank = output_want(x, "outputs.src_rank", DTYPE_BIT(EPX_INT32), rows, -1, STRIDES_NONE);
    const struct want src_token = output_want(x, "outputs.src_token", DTYPE_BIT(EPX_INT32), rows, -1, STRIDES_NONE);
    epx_status status;

    if (out->topk_weights && major && low)
        return fail(EPX_ERR_ARGUMENT,
                    "%s: outputs.topk_weights: low latency EXPERT_MAJOR applies weights in combine, "
                    "expected NULL",
                    call);
    if (out->topk_idx && major)
        return fail(EPX_ERR_ARGUMENT, "%s: outputs.topk_idx: EXPERT_MAJOR has none, expected NULL", call);
    if (args->backward && (out->topk_weights || out->topk_idx || args->weights.ndim))
        return fail(EPX_ERR_ARGUMENT, "%s: topk_weights, topk_idx: a backward dispatch has none, expected NULL", call);
    if (out->topk_weights && !args->weights.ndim)
        return fail(EPX_ERR_ARGUMENT, "%s: inputs.topk_weights: outputs.topk_weights asks for them, got NULL", call);
    status = check_optional(out->topk_weights, &weights, &args->out_weights);
    if (status == EPX_OK)
        status = check_optional(out->topk_idx, &idx, &args->out_idx);
    if (status == EPX_OK)
        status = check_optional(out->src_rank, &src_rank, &args->src_rank);
    if (status == EPX_OK)
        status = check_optional(out->src_token, &src_token, &args->src_token);
    return status;
}

static epx_status check_source_map(struct epx_handle *handle, const epx_dispatch_outputs *out, int32_t stride,
                                   struct dispatch_args *args)
{
    const struct want want = {call, "outputs.source_map",          DTYPE_BIT(EPX_INT32),
                              2,    {-1, handle->config.topk + 2}, STRIDES_NONE};

    if (!out->source_map)
        return EPX_OK;
    if (handle->config.mode == EPX_LOW_LATENCY)
        return fail(EPX_ERR_ARGUMENT, "%s: outputs.source_map: low latency has none, expected NULL", call);
    if (handle->config.layout == EPX_EXPERT_MAJOR && !(handle->config.flags & EPX_HANDLE_SOURCE_MAP))
        return fail(EPX_ERR_ARGUMENT, "%s: outputs.source_map: expected a handle with EPX_HANDLE_SOURCE_MAP", call);
    if (stride < 0)
        return fail(EPX_ERR_ARGUMENT, "%s: config.source_stride: expected at least 0, got %d", call, stride);
    args->source_stride = stride ? stride : handle->group->set.max_tokens;
    return check_tensor(out->source_map, &want, &args->source_map);
}

epx_status dispatch_args_check(struct epx_handle *handle, const epx_dispatch_inputs *inputs,
                               const epx_dispatch_outputs *outputs, const epx_dispatch_config *config,
                               epx_stream stream, struct dispatch_args *args)
{
    const struct extents x = receive_extents(handle);
    epx_dispatch_inputs in;
    epx_dispatch_outputs out;
    epx_dispatch_config cfg = EPX_DISPATCH_CONFIG_INIT;
    epx_status status = struct_in(&in, sizeof(in), inputs, "epx_dispatch_inputs");

    if (status == EPX_OK)
        status = struct_in(&out, sizeof(out), outputs, "epx_dispatch_outputs");
    if (status == EPX_OK && config)
        status = struct_in(&cfg, sizeof(cfg), config, "epx_dispatch_config");
    if (status == EPX_OK && in.topk_idx)
        status = handle_route(handle, in.topk_idx, call, "inputs.topk_idx");
    if (status == EPX_OK)
        status = routing_check(handle, in.tokens, stream, call);
    if (status != EPX_OK)
        return status;
    if (cfg.direction != EPX_FORWARD && cfg.direction != EPX_BACKWARD)
        return fail(EPX_ERR_ARGUMENT, "%s: config.direction: expected 0 or 1, got %d", call, cfg.direction);
    if (cfg.if_expected && (cfg.if_expected != 1 || !handle->expected_rows))
        return fail(EPX_ERR_ARGUMENT,
                    "%s: config.if_expected: expected 1 after an update with expected_rows, got %d %s", call,
                    cfg.if_expected, handle->expected_rows ? "after it" : "without it");
    if (cfg.direction == EPX_BACKWARD && handle->config.mode == EPX_LOW_LATENCY)
        return fail(EPX_ERR_USAGE, "%s: config.direction: low latency has no backward pass", call);
    args->send_only = cfg.send_only != 0;
    args->round_scale = cfg.round_scale != 0;
    args->backward = cfg.direction == EPX_BACKWARD;
    args->global_ids = cfg.global_ids != 0;
    if (cfg.max_sms < 0)
        return fail(EPX_ERR_ARGUMENT, "%s: config.max_sms: expected at least 0, got %d", call, cfg.max_sms);
    args->max_sms = cfg.max_sms;
    args->if_expected = cfg.if_expected;
    status = check_inputs(handle, &in, &out, args);
    if (status == EPX_OK)
        status = check_nvfp4_inputs(handle, &in, &cfg, args);
    if (status == EPX_OK)
        status = check_out_tokens(handle, &x, &out, args);
    if (status != EPX_OK)
        return status;
    const int64_t rows = args->out_tokens.shape[x.ndim - 1];
    status = check_out_scales(handle, &x, rows, &out, args);
    if (status == EPX_OK)
        status = check_out_meta(handle, &x, rows, &out, args);
    return status == EPX_OK ? check_source_map(handle, &out, cfg.source_stride, args) : status;
}

/* High throughput: once the update has finished, the number of rows is known. With if_expected the kernel decides, on
 * all ranks alike, however late this one's host is. */
static epx_status check_capacity(struct epx_handle *handle, const struct dispatch_args *args)
{
    if (args->if_expected || !handle_is_counted(handle))
        return EPX_OK;
    return need_rows(call, "outputs.tokens", args->out_tokens.shape[0], handle->info->rows, "this routing");
}

/* High throughput has the others in epx_handle_update. */
static epx_status check_high_throughput_info(const struct epx_handle *handle, const struct layout_tensors *info)
{
    const epx_tensor *const others[] = {&info->expert_offsets, &info->rank_counts, &info->expert_stats,
                                        &info->rank_matrix,    &info->rank_tokens, &info->relay_counts,
                                        &info->expert_rows,    &info->expert_ends, &info->source_ends};
    int any = info->expected_rows || info->drop_rows;

    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++)
        any |= others[i]->ndim;
    if (any || handle->config.layout != EPX_EXPERT_MAJOR)
        return fail(
            EPX_ERR_ARGUMENT,
            "%s: info: high throughput takes it in epx_handle_update: expected NULL, or expert_counts and total "
            "alone in EXPERT_MAJOR",
            call);
    return EPX_OK;
}

/* Checks what the two modes have of their own, and issues. */
static epx_status issue(struct epx_handle *handle, const epx_layout_info *info, struct dispatch_args *args,
                        epx_stream stream)
{
    epx_status status = layout_tensors_check(handle, info, call, &args->info);

    if (status == EPX_OK && handle->config.mode == EPX_HIGH_THROUGHPUT) {
        status = info ? check_high_throughput_info(handle, &args->info) : EPX_OK;
        if (status == EPX_OK)
            status = check_capacity(handle, args);
        return status == EPX_OK ? ht_dispatch(handle, args, (struct device_stream *)stream) : status;
    }
    if (status == EPX_OK)
        status = indices_check(handle, &handle->topk, stream, call);
    return status == EPX_OK ? ll_dispatch(handle, args, (struct device_stream *)stream) : status;
}

epx_status epx_dispatch(epx_handle *handle, const epx_dispatch_inputs *inputs, const epx_dispatch_outputs *outputs,
                        const epx_layout_info *info, const epx_dispatch_config *config, epx_stream stream)
{
    struct dispatch_args args;
    API_ISSUE;
    epx_status status = handle_check(handle, call);

    if (status == EPX_OK)
        status = group_usable(handle->group);
    if (status == EPX_OK)
        status = stream_check(handle->group, stream, call);
    if (status != EPX_OK)
        return status;
    if (handle->staged != STAGED_NONE)
        return fail(EPX_ERR_USAGE, "%s: the handle has a staged operation; call epx_complete first", call);
    /* inputs.topk_idx is the handle's routing from here on; a call that is refused leaves the one before. */
    const epx_tensor topk = handle->topk;
    const int64_t ntokens = handle->ntokens;
    const int dispatched = handle->dispatched;
    memset(&args, 0, sizeof(args));
    status = dispatch_args_check(handle, inputs, outputs, config, stream, &args);
    if (status == EPX_OK)
        status = issue(handle, info, &args, stream);
    if (status != EPX_OK) {
        handle->topk = topk;
        __atomic_store_n(&handle->ntokens, ntokens, __ATOMIC_RELAXED); /* waits look at it */
        handle->dispatched = dispatched;
    }
    return status;
}

epx_status epx_complete(epx_handle *handle, epx_stream stream)
{
    API_ISSUE;
    epx_status status = handle_check(handle, "epx_complete");

    if (status == EPX_OK)
        status = group_usable(handle->group);
    if (status == EPX_OK)
        status = stream_check(handle->group, stream, "epx_complete");
    if (status != EPX_OK || handle->staged == STAGED_NONE)
        return status;
    return ll_complete(handle, (struct device_stream *)stream);
}
