/* SPDX-License-Identifier: Apache-2.0 */
/* epx_combine: every argument is checked before anything is sent. */
#include <inttypes.h>
#include <string.h>

#include "api/args.h"
#include "api/check.h"
#include "group/abort.h"
#include "group/registry.h"
#include "modes/handle.h"
#include "util/mxfp8.h"
#include "util/structs.h"
#include "util/status.h"

static const char call[] = "epx_combine";

static epx_status check_tokens(struct epx_handle *handle, const epx_combine_inputs *in, struct combine_args *args)
{
    const struct settings *set = &handle->group->set;
    const int low = handle->config.mode == EPX_LOW_LATENCY, major = handle->config.layout == EPX_EXPERT_MAJOR;
    struct want want = {call, "inputs.tokens", DTYPES_PAYLOAD, low ? 3 : 2, {-1, -1, -1}, STRIDES_ROWS};
    int64_t needed = 0;
    epx_status status;

    if (low) {
        want.shape[0] = major ? set->local_experts : set->nranks;
        needed = major ? (int64_t)set->nranks * set->max_tokens : set->max_tokens;
    } else if (handle_is_counted(handle)) {
        needed = handle->info->used_rows;
    }
    status = check_tensor(in->tokens, &want, &args->tokens);
    if (status == EPX_OK)
        status = need_row_bytes(handle, call, want.name, &args->tokens, NULL);
    if (status == EPX_OK)
        status = need_rows(call, want.name, args->tokens.shape[want.ndim - 2], needed,
                           low ? "as dispatch's output" : "as this routing uses");
    return status;
}

/* Rows that are sent as they become ready. */
static epx_status check_signals(struct epx_handle *handle, const epx_combine_inputs *in, const epx_combine_config *cfg,
                                struct combine_args *args)
{
    const int64_t L = args->tokens.shape[0], rows = args->tokens.shape[1];
    const struct want want = {call, "inputs.signals", DTYPE_BIT(EPX_INT32), 2, {L, -1}, STRIDES_NONE};
    const int64_t per = cfg->signal_rows;
    epx_status status;

    if (!in->signals)
        return cfg->signal_rows || cfg->signal_value
                   ? fail(EPX_ERR_ARGUMENT, "%s: config.signal_rows, signal_value: expected 0 without inputs.signals",
                          call)
                   : EPX_OK;
    if (handle->config.mode != EPX_LOW_LATENCY || handle->config.layout != EPX_EXPERT_MAJOR || cfg->logfmt)
        return fail(EPX_ERR_USAGE, "%s: inputs.signals: expected low latency, EXPERT_MAJOR, without logfmt", call);
    if (per < 0)
        return fail(EPX_ERR_ARGUMENT, "%s: config.signal_rows: expected at least 0, got %" PRId64, call, per);
    status = check_tensor(in->signals, &want, &args->signals);
    if (status == EPX_OK && args->signals.shape[1] < (per ? (rows + per - 1) / per : 1))
        status = fail(EPX_ERR_ARGUMENT, "%s: inputs.signals: expected %" PRId64 " for each expert, got %" PRId64, call,
                      per ? (rows + per - 1) / per : 1, args->signals.shape[1]);
    args->signal_rows = cfg->signal_rows;
    args->signal_value = cfg->signal_value;
    return status;
}

static epx_status check_nvfp4(const epx_combine_inputs *in, struct combine_args *args)
{
    const epx_tensor *t = &args->tokens;
    const struct want scales = {call, "inputs.row_scales",        DTYPE_BIT(EPX_FP32),
                                2,    {t->shape[0], t->shape[1]}, STRIDES_NONE};

    if (!args->nvfp4)
        return in->row_scales
                   ? fail(EPX_ERR_ARGUMENT, "%s: inputs.row_scales: expected NULL without config.nvfp4", call)
                   : EPX_OK;
    if (t->dtype != EPX_BF16 || t->shape[2] % 16)
        return fail(EPX_ERR_ARGUMENT, "%s: config.nvfp4: expected rows of a multiple of 16 bf16, got %" PRId64 " %s",
                    call, t->shape[2], dtype_name(t->dtype));
    return check_tensor(in->row_scales, &scales, &args->row_scales);
}

static epx_status check_weights(struct epx_handle *handle, const epx_combine_inputs *in, const epx_combine_outputs *out,
                                struct combine_args *args)
{
    const int K = handle->config.topk, major = handle->config.layout == EPX_EXPERT_MAJOR;
    const int low = handle->config.mode == EPX_LOW_LATENCY;
    const struct want own = {call, "inputs.topk_weights", DTYPE_BIT(EPX_FP32), 2, {handle->ntokens, K}, STRIDES_NONE};
    const struct want rows = {call,          "inputs.topk_weights",      DTYPE_BIT(EPX_FP32),
                              major ? 1 : 2, {args->tokens.shape[0], K}, STRIDES_NONE};
    const struct want back = {call, "outputs.topk_weights", DTYPE_BIT(EPX_FP32), 2, {handle->ntokens, K}, STRIDES_NONE};
    epx_status status;

    if (low && out->topk_weights)
        return fail(EPX_ERR_ARGUMENT, "%s: outputs.topk_weights: low latency returns none, expected NULL", call);
    if (low && !major && in->topk_weights)
        return fail(EPX_ERR_ARGUMENT,
                    "%s: inputs.topk_weights: RANK_MAJOR rows are already weighted by the caller, expected NULL", call);
    if (low)
        return major ? check_tensor(in->topk_weights, &own, &args->weights) : EPX_OK;
    if (!in->topk_weights != !out->topk_weights)
        return fail(EPX_ERR_ARGUMENT, "%s: %s.topk_weights: expected both or neither of inputs' and outputs', got NULL",
                    call, in->topk_weights ? "outputs" : "inputs");
    if (args->backward && !in->topk_weights)
        return fail(EPX_ERR_ARGUMENT, "%s: inputs.topk_weights: a backward combine returns them, got NULL", call);
    status = check_optional(in->topk_weights, &rows, &args->weights);
    return status == EPX_OK ? check_optional(out->topk_weights, &back, &args->out_weights) : status;
}

/* Entries that are taken out now. */
static epx_status check_topk(struct epx_handle *handle, const epx_combine_inputs *in, struct combine_args *args)
{
    const struct want want = {call,
                              "inputs.topk_idx",
                              DTYPE_BIT(EPX_INT32) | DTYPE_BIT(EPX_INT64),
                              2,
                              {handle->ntokens, handle->config.topk},
                              STRIDES_NONE};

    if (in->topk_idx && (handle->config.mode != EPX_LOW_LATENCY || handle->config.layout != EPX_EXPERT_MAJOR))
        return fail(EPX_ERR_USAGE, "%s: inputs.topk_idx: expected low latency, EXPERT_MAJOR", call);
    return check_optional(in->topk_idx, &want, &args->topk);
}

static epx_status check_results(struct epx_handle *handle, const epx_combine_inputs *in, const epx_combine_outputs *out,
                                struct combine_args *args)
{
    const int64_t hidden = args->tokens.shape[args->tokens.ndim - 1];
    const struct want tokens = {call, "outputs.tokens",          DTYPE_BIT(args->tokens.dtype),
                                2,    {handle->ntokens, hidden}, STRIDES_ROWS};
    epx_status status = check_tensor(out->tokens, &tokens, &args->out_tokens);

    for (int i = 0; i < 2 && status == EPX_OK; i++) {
        struct want bias = tokens;
        bias.name = i ? "inputs.bias[1]" : "inputs.bias[0]";
        status = check_optional(in->bias[i], &bias, &args->bias[i]);
    }
    return status;
}

static epx_status check_mxfp8(const struct epx_handle *handle, const struct combine_args *args)
{
    const int64_t hidden = args->tokens.shape[args->tokens.ndim - 1];

    if (!(args->sum & EPX_SUM_MXFP8))
        return EPX_OK;
    if (handle->config.layout != EPX_EXPERT_MAJOR || handle->group->nnodes > 1)
        return fail(EPX_ERR_USAGE,
                    "%s: config.sum: EPX_SUM_MXFP8 expects EXPERT_MAJOR and one node, got layout %d and %d "
                    "nodes",
                    call, handle->config.layout, handle->group->nnodes);
    if (args->tokens.dtype != EPX_BF16 || hidden % MXFP8_BLOCK)
        return fail(EPX_ERR_ARGUMENT,
                    "%s: inputs.tokens: EPX_SUM_MXFP8 expects rows of a multiple of %d bf16 values, got "
                    "%" PRId64 " %s",
                    call, MXFP8_BLOCK, hidden, dtype_name(args->tokens.dtype));
    return EPX_OK;
}

static epx_status check_config(struct epx_handle *handle, const epx_combine_config *cfg, struct combine_args *args)
{
    const int low = handle->config.mode == EPX_LOW_LATENCY;
    const struct want wait = {call, "config.wait_ns", DTYPE_BIT(EPX_INT64), 1, {handle->group->nranks}, STRIDES_NONE};

    if (cfg->direction != EPX_FORWARD && cfg->direction != EPX_BACKWARD)
        return fail(EPX_ERR_ARGUMENT, "%s: config.direction: expected 0 or 1, got %d", call, cfg->direction);
    if (cfg->direction == EPX_BACKWARD && low)
        return fail(EPX_ERR_USAGE, "%s: config.direction: low latency has no backward pass", call);
    if (cfg->nvfp4 && (!low || cfg->logfmt))
        return fail(EPX_ERR_USAGE, "%s: config.nvfp4: %s", call,
                    low ? "expected 0 with logfmt" : "high throughput has no NVFP4");
    if (cfg->logfmt && !low)
        return fail(EPX_ERR_USAGE, "%s: config.logfmt: high throughput has no LogFMT", call);
    if (cfg->wait_ns && !low)
        return fail(EPX_ERR_USAGE, "%s: config.wait_ns: only low latency measures it", call);
    if (cfg->sum & ~(EPX_SUM_TOPK_ORDER | EPX_SUM_ROUND_RANKS | EPX_SUM_ROUND_NODES | EPX_SUM_MXFP8) ||
        (cfg->sum & EPX_SUM_ROUND_NODES && !(cfg->sum & EPX_SUM_TOPK_ORDER)) ||
        (cfg->sum & EPX_SUM_MXFP8 && cfg->sum != (EPX_SUM_ROUND_RANKS | EPX_SUM_MXFP8)))
        return fail(EPX_ERR_ARGUMENT,
                    "%s: config.sum: expected 0, EPX_SUM_ROUND_RANKS with or without EPX_SUM_MXFP8, or "
                    "EPX_SUM_TOPK_ORDER with or without EPX_SUM_ROUND_*, got 0x%x",
                    call, cfg->sum);
    if (cfg->sum && low)
        return fail(EPX_ERR_USAGE, "%s: config.sum: only high throughput has it", call);
    if (cfg->max_sms < 0)
        return fail(EPX_ERR_ARGUMENT, "%s: config.max_sms: expected at least 0, got %d", call, cfg->max_sms);
    args->sum = cfg->sum;
    args->max_sms = cfg->max_sms;
    args->send_only = cfg->send_only != 0;
    args->logfmt = cfg->logfmt != 0;
    args->nvfp4 = cfg->nvfp4 != 0;
    args->backward = cfg->direction == EPX_BACKWARD;
    return check_optional(cfg->wait_ns, &wait, &args->wait_ns);
}

epx_status combine_args_check(struct epx_handle *handle, const epx_combine_inputs *inputs,
                              const epx_combine_outputs *outputs, const epx_combine_config *config, epx_stream stream,
                              struct combine_args *args)
{
    epx_combine_inputs in;
    epx_combine_outputs out;
    epx_combine_config cfg = EPX_COMBINE_CONFIG_INIT;
    epx_status status = struct_in(&in, sizeof(in), inputs, "epx_combine_inputs");

    if (status == EPX_OK)
        status = struct_in(&out, sizeof(out), outputs, "epx_combine_outputs");
    if (status == EPX_OK && config)
        status = struct_in(&cfg, sizeof(cfg), config, "epx_combine_config");
    if (status == EPX_OK)
        status = routing_check(handle, out.tokens, stream, call);
    if (status == EPX_OK)
        status = check_config(handle, &cfg, args);
    if (status == EPX_OK)
        status = check_tokens(handle, &in, args);
    if (status == EPX_OK && args->logfmt && args->tokens.dtype != EPX_BF16)
        status = fail(EPX_ERR_ARGUMENT, "%s: config.logfmt: expected bf16 tokens, got %s", call,
                      dtype_name(args->tokens.dtype));
    if (status == EPX_OK)
        status = check_nvfp4(&in, args);
    if (status == EPX_OK)
        status = check_mxfp8(handle, args);
    if (status == EPX_OK)
        status = check_signals(handle, &in, &cfg, args);
    if (status == EPX_OK)
        status = check_weights(handle, &in, &out, args);
    if (status == EPX_OK)
        status = check_topk(handle, &in, args);
    if (status == EPX_OK)
        status = check_results(handle, &in, &out, args);
    return status;
}

epx_status epx_combine(epx_handle *handle, const epx_combine_inputs *inputs, const epx_combine_outputs *outputs,
                       const epx_combine_config *config, epx_stream stream)
{
    struct combine_args args;
    API_ISSUE;
    epx_status status = handle_check(handle, call);

    if (status == EPX_OK)
        status = group_usable(handle->group);
    if (status == EPX_OK)
        status = stream_check(handle->group, stream, call);
    if (status != EPX_OK)
        return status;
    if (handle->config.mode == EPX_LOW_LATENCY && handle->ntokens >= 0 && !handle->dispatched)
        return fail(EPX_ERR_USAGE, "%s: expected a handle with a dispatch to return (epx_dispatch)", call);
    if (handle->staged != STAGED_NONE)
        return fail(EPX_ERR_USAGE, "%s: the handle has a staged operation; call epx_complete first", call);
    memset(&args, 0, sizeof(args));
    status = combine_args_check(handle, inputs, outputs, config, stream, &args);
    if (status != EPX_OK)
        return status;
    return handle->config.mode == EPX_LOW_LATENCY ? ll_combine(handle, &args, (struct device_stream *)stream)
                                                  : ht_combine(handle, &args, (struct device_stream *)stream);
}
