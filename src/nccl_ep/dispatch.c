/* SPDX-License-Identifier: Apache-2.0 */
#include "nccl_ep/compat.h"

static const char call[] = "ncclEpDispatch";

static ncclResult_t need(const struct compat_tensor *t, const char *name, const char *why)
{
    return t->at ? ncclSuccess : compat_fail(ncclInvalidArgument, "%s: %s: %s, got NULL", call, name, why);
}

static ncclResult_t need_none(const struct compat_tensor *t, const char *name, const char *why)
{
    return t->at ? compat_fail(ncclInvalidArgument, "%s: %s: %s, expected NULL", call, name, why) : ncclSuccess;
}

static ncclResult_t take_tensors(const struct ncclEpHandle *handle, const ncclEpLayoutInfo_t *info, struct dispatch *d)
{
    const struct {
        const char *name;
        const ncclEpTensor_t *given;
        struct compat_tensor *out;
    } parts[] = {{"inputs.tokens", d->in.tokens, &d->tokens},
                 {"inputs.topk_weights", d->in.topk_weights, &d->weights},
                 {"inputs.scales", d->in.scales, &d->scales},
                 {"outputs.tokens", d->out.tokens, &d->out_tokens},
                 {"outputs.topk_weights", d->out.topk_weights, &d->out_weights},
                 {"outputs.scales", d->out.scales, &d->out_scales},
                 {"outputs.topk_idx", d->out.topk_idx, &d->out_idx}};

    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
        ncclResult_t result = compat_tensor(handle->group, call, parts[i].name, parts[i].given, parts[i].out);
        if (result != ncclSuccess)
            return result;
    }
    return compat_layout(handle->group, call, info, dispatch_looks_at(handle), &d->layout);
}

/* What low latency demands beyond what EPX does. */
static ncclResult_t check_low_latency(const struct ncclEpHandle *handle, const struct dispatch *d)
{
    ncclResult_t result;

    if (handle->config.layout == EPX_EXPERT_MAJOR) {
        result = need(&d->layout.expert_counters, "layout_info.expert_counters", "EXPERT_MAJOR needs it");
        return result == ncclSuccess ? need_none(&d->out_weights, "outputs.topk_weights", "EXPERT_MAJOR has none")
                                     : result;
    }
    result = need_none(&d->layout.expert_counters, "layout_info.expert_counters", "RANK_MAJOR has none");
    return result == ncclSuccess ? need(&d->weights, "inputs.topk_weights", "RANK_MAJOR needs them") : result;
}

static ncclResult_t check_high_throughput(const struct ncclEpHandle *handle, const struct dispatch *d, int backward)
{
    const int major = handle->config.layout == EPX_EXPERT_MAJOR;
    ncclResult_t result = ncclSuccess;

    if (backward) {
        static const char why[] = "a backward dispatch has none";
        result = need_none(&d->weights, "inputs.topk_weights", why);
        if (result == ncclSuccess)
            result = need_none(&d->out_weights, "outputs.topk_weights", why);
        return result == ncclSuccess ? need_none(&d->out_idx, "outputs.topk_idx", why) : result;
    }
    result = need(&d->weights, "inputs.topk_weights", "a forward dispatch needs them");
    if (result == ncclSuccess)
        result = need(&d->out_weights, "outputs.topk_weights", "a forward dispatch needs them");
    if (result == ncclSuccess)
        result = major ? need_none(&d->out_idx, "outputs.topk_idx", "EXPERT_MAJOR has none")
                       : need(&d->out_idx, "outputs.topk_idx", "a forward dispatch of FLAT needs them");
    if (result == ncclSuccess && !major && d->out_idx.at->shape[0] != d->out_weights.at->shape[0])
        result = compat_fail(ncclInvalidArgument,
                             "%s: outputs.topk_weights, outputs.topk_idx: expected as many rows of both, got %lld and "
                             "%lld",
                             call, (long long)d->out_weights.at->shape[0], (long long)d->out_idx.at->shape[0]);
    return result;
}

/* High throughput: so many rows of every receive tensor are EPX's. It never writes behind them. */
static ncclResult_t cut_rows(struct dispatch *d, int64_t rows, const char *why)
{
    const struct {
        const char *name;
        epx_tensor *t;
    } parts[] = {{"outputs.tokens", d->out_tokens.at},
                 {"outputs.scales", d->out_scales.at},
                 {"outputs.topk_weights", d->out_weights.at},
                 {"outputs.topk_idx", d->out_idx.at}};

    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
        epx_tensor *t = parts[i].t;
        if (t && t->shape[0] < rows)
            return compat_fail(ncclInvalidArgument, "%s: %s: expected %s = %lld rows or more, got %lld", call,
                               parts[i].name, why, (long long)rows, (long long)t->shape[0]);
    }
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++)
        if (parts[i].t)
            parts[i].t->shape[0] = rows;
    return ncclSuccess;
}

static ncclResult_t take_rows(const struct ncclEpHandle *handle, struct dispatch *d, cudaStream_t stream)
{
    int64_t rows = 0;
    ncclResult_t result;

    if (!handle->group->eager)
        return cut_rows(d, handle->group->config.max_recv_tokens_per_rank, "max_recv_tokens_per_rank");
    if (d->out_weights.at && !d->out_weights.at->shape[0] != !d->out_tokens.at->shape[0])
        return compat_fail(ncclInvalidArgument,
                           "%s: outputs.tokens, outputs.topk_weights: expected both empty or neither, got %lld and "
                           "%lld rows",
                           call, (long long)d->out_tokens.at->shape[0], (long long)d->out_weights.at->shape[0]);
    result = eager_rows(handle, call, stream, &rows);
    return result == ncclSuccess ? cut_rows(d, rows, "what this routing brings") : result;
}

static ncclResult_t take_call(const struct ncclEpHandle *handle, const ncclEpDispatchInputs_t *inputs,
                              const ncclEpDispatchOutputs_t *outputs, const ncclEpLayoutInfo_t *layout_info,
                              const ncclEpDispatchConfig_t *config, struct dispatch *d)
{
    ncclResult_t result = struct_need(call, "inputs", inputs, NCCL_EP_DISPATCH_INPUTS_V1_SIZE, &d->in, sizeof(d->in));

    if (result == ncclSuccess)
        result = struct_need(call, "outputs", outputs, NCCL_EP_DISPATCH_OUTPUTS_V1_SIZE, &d->out, sizeof(d->out));
    if (result == ncclSuccess)
        result = struct_take(call, "config", config, NCCL_EP_DISPATCH_CONFIG_V1_SIZE, &d->config, sizeof(d->config));
    if (result == ncclSuccess)
        result = take_tensors(handle, layout_info, d);
    if (result == ncclSuccess)
        result = dispatch_recipe(handle, call, d);
    return result == ncclSuccess ? operation_check(handle, call, d->config.pass_direction) : result;
}

ncclResult_t ncclEpDispatch(ncclEpHandle_t handle, const ncclEpDispatchInputs_t *inputs,
                            const ncclEpDispatchOutputs_t *outputs, const ncclEpLayoutInfo_t *layout_info,
                            const ncclEpDispatchConfig_t *config, cudaStream_t stream)
{
    epx_dispatch_inputs in = EPX_DISPATCH_INPUTS_INIT;
    epx_dispatch_outputs out = EPX_DISPATCH_OUTPUTS_INIT;
    epx_dispatch_config c = EPX_DISPATCH_CONFIG_INIT;
    struct dispatch d;
    epx_stream own;
    ncclResult_t result = handle_need(handle, call);

    if (result == ncclSuccess)
        result = take_call(handle, inputs, outputs, layout_info, config, &d);
    if (result != ncclSuccess)
        return result;
    const int low = handle->group->low_latency, backward = d.config.pass_direction == NCCL_EP_BWD_PASS;
    result = low ? check_low_latency(handle, &d) : check_high_throughput(handle, &d, backward);
    if (result == ncclSuccess)
        result = group_rejoin(handle->group, call, stream);
    if (result == ncclSuccess && !low)
        result = take_rows(handle, &d, stream);
    if (result == ncclSuccess)
        result = compat_stream(handle->group, stream, call, &own);
    if (result != ncclSuccess)
        return result;
    in.tokens = d.tokens.at;
    in.scales = d.scales.at;
    in.topk_weights = d.weights.at;
    out.tokens = d.out_tokens.at;
    out.scales = d.out_scales.at;
    out.topk_weights = d.out_weights.at;
    out.topk_idx = d.out_idx.at;
    c.send_only = d.config.send_only != 0 && low;
    c.round_scale = d.config.round_scales != 0;
    c.direction = backward ? EPX_BACKWARD : EPX_FORWARD;
    c.global_ids = d.layout.global_ids;
    c.max_sms = handle->group->dispatch_sms;
    zero_copy_log(handle->group, call, "outputs.tokens", &d.out_tokens);
    return operation_result(handle, epx_dispatch(handle->handle, &in, &out, d.layout.at, &c, own), call);
}
