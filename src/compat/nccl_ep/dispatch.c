/* SPDX-License-Identifier: Apache-2.0 */
#include "compat/nccl_ep/compat.h"

static const char call[] = "ncclEpDispatch";

struct dispatch {
    struct compat_tensor tokens, weights, scales;
    struct compat_tensor out_tokens, out_weights, out_scales, out_idx;
    struct compat_layout layout;
};

static ncclResult_t need(const struct compat_tensor *t, const char *name, const char *why)
{
    return t->at ? ncclSuccess : compat_fail(ncclInvalidArgument, "%s: %s: %s, got NULL", call, name, why);
}

static ncclResult_t need_none(const struct compat_tensor *t, const char *name, const char *why)
{
    return t->at ? compat_fail(ncclInvalidArgument, "%s: %s: %s, expected NULL", call, name, why) : ncclSuccess;
}

static ncclResult_t take_tensors(const struct ncclEpGroup *group, const ncclEpDispatchInputs_t *in,
                                 const ncclEpDispatchOutputs_t *out, const ncclEpLayoutInfo_t *info, struct dispatch *d)
{
    ncclResult_t result = compat_tensor(group, call, "inputs.tokens", in->tokens, &d->tokens);

    if (result == ncclSuccess)
        result = compat_tensor(group, call, "inputs.topk_weights", in->topk_weights, &d->weights);
    if (result == ncclSuccess)
        result = compat_scales(group, call, "inputs.scales", in->scales, &d->scales);
    if (result == ncclSuccess)
        result = compat_tensor(group, call, "outputs.tokens", out->tokens, &d->out_tokens);
    if (result == ncclSuccess)
        result = compat_tensor(group, call, "outputs.topk_weights", out->topk_weights, &d->out_weights);
    if (result == ncclSuccess)
        result = compat_scales(group, call, "outputs.scales", out->scales, &d->out_scales);
    if (result == ncclSuccess)
        result = compat_tensor(group, call, "outputs.topk_idx", out->topk_idx, &d->out_idx);
    return result == ncclSuccess ? compat_layout(group, call, info, &d->layout) : result;
}

/* What low latency demands beyond what EPX does. */
static ncclResult_t check_low_latency(const struct ncclEpHandle *handle, const struct dispatch *d)
{
    const int major = handle->config.layout == EPX_EXPERT_MAJOR;
    ncclResult_t result;

    if (major) {
        result = need(&d->layout.expert_counters, "layout_info.expert_counters", "EXPERT_MAJOR needs it");
        return result == ncclSuccess ? need_none(&d->out_weights, "outputs.topk_weights", "EXPERT_MAJOR has none")
                                     : result;
    }
    result = need(&d->layout.src_rank_counters, "layout_info.src_rank_counters", "RANK_MAJOR needs it");
    if (result == ncclSuccess)
        result = need_none(&d->layout.expert_counters, "layout_info.expert_counters", "RANK_MAJOR has none");
    if (result == ncclSuccess)
        result = need(&d->weights, "inputs.topk_weights", "RANK_MAJOR needs them");
    return result;
}

static ncclResult_t check_high_throughput(const struct ncclEpHandle *handle, const struct dispatch *d, int backward)
{
    const int major = handle->config.layout == EPX_EXPERT_MAJOR;
    ncclResult_t result = ncclSuccess;

    if (d->out_tokens.at && d->out_tokens.at->shape[0] < handle->group->min_rows)
        return compat_fail(ncclInvalidArgument,
                           "%s: outputs.tokens: expected max_recv_tokens_per_rank = %lld rows or more, got %lld", call,
                           (long long)handle->group->min_rows, (long long)d->out_tokens.at->shape[0]);
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
    if (result != ncclSuccess)
        return result;
    return major ? need_none(&d->out_idx, "outputs.topk_idx", "EXPERT_MAJOR has none")
                 : need(&d->out_idx, "outputs.topk_idx", "a forward dispatch of FLAT needs them");
}

static ncclResult_t check_call(const struct ncclEpHandle *handle, const ncclEpDispatchInputs_t *inputs,
                               const ncclEpDispatchOutputs_t *outputs, const ncclEpDispatchConfig_t *config)
{
    ncclResult_t result = struct_need(call, "inputs", inputs, sizeof(*inputs));

    if (result == ncclSuccess)
        result = struct_need(call, "outputs", outputs, sizeof(*outputs));
    if (result == ncclSuccess)
        result = struct_check(call, "config", config, sizeof(*config));
    if (result != ncclSuccess)
        return result;
    return operation_check(handle, call, config ? config->pass_direction : NCCL_EP_FWD_PASS);
}

ncclResult_t ncclEpDispatch(ncclEpHandle_t handle, const ncclEpDispatchInputs_t *inputs,
                            const ncclEpDispatchOutputs_t *outputs, const ncclEpLayoutInfo_t *layout_info,
                            const ncclEpDispatchConfig_t *config, cudaStream_t stream)
{
    epx_dispatch_inputs in = EPX_DISPATCH_INPUTS_INIT;
    epx_dispatch_outputs out = EPX_DISPATCH_OUTPUTS_INIT;
    epx_dispatch_config c = EPX_DISPATCH_CONFIG_INIT;
    const int backward = config && config->pass_direction == NCCL_EP_BWD_PASS;
    struct dispatch d;
    epx_stream own;
    ncclResult_t result = handle_need(handle, call);

    if (result == ncclSuccess)
        result = check_call(handle, inputs, outputs, config);
    if (result == ncclSuccess)
        result = take_tensors(handle->group, inputs, outputs, layout_info, &d);
    if (result == ncclSuccess)
        result =
            handle->group->low_latency ? check_low_latency(handle, &d) : check_high_throughput(handle, &d, backward);
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
    if (config) {
        c.send_only = config->send_only != 0 && handle->group->low_latency;
        c.round_scale = config->round_scales != 0;
        c.direction = backward ? EPX_BACKWARD : EPX_FORWARD;
    }
    return compat_result(epx_dispatch(handle->handle, &in, &out, d.layout.at, &c, own), call);
}
