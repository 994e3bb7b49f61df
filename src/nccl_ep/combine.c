/* SPDX-License-Identifier: Apache-2.0 */
/* ncclEpCombine and ncclEpComplete. */
#include "nccl_ep/compat.h"

static const char call[] = "ncclEpCombine";

/* Low latency's EXPERT_MAJOR reads them, high throughput's backward pass writes them; the others do not look. */
static int looks_at_out_weights(const struct ncclEpHandle *handle, const struct combine *c)
{
    return handle->group->low_latency ? handle->config.layout == EPX_EXPERT_MAJOR
                                      : c->config.pass_direction == NCCL_EP_BWD_PASS;
}

static ncclResult_t take_tensors(const struct ncclEpHandle *handle, struct combine *c)
{
    const struct ncclEpGroup *group = handle->group;
    const struct {
        const char *name;
        const ncclEpTensor_t *given;
        struct compat_tensor *out;
    } parts[] = {
        {"inputs.tokens", c->in.tokens, &c->tokens},
        {"inputs.topk_weights", group->low_latency ? NULL : c->in.topk_weights, &c->weights},
        {"inputs.scales", c->in.scales, &c->scales},
        {"outputs.tokens", c->out.tokens, &c->out_tokens},
        {"outputs.topk_weights", looks_at_out_weights(handle, c) ? c->out.topk_weights : NULL, &c->out_weights}};
    ncclResult_t result = ncclSuccess;

    for (size_t i = 0; result == ncclSuccess && i < sizeof(parts) / sizeof(parts[0]); i++)
        result = compat_tensor(group, call, parts[i].name, parts[i].given, parts[i].out);
    return result;
}

static ncclResult_t take_call(const struct ncclEpHandle *handle, const ncclEpCombineInputs_t *inputs,
                              const ncclEpCombineOutputs_t *outputs, const ncclEpCombineConfig_t *config,
                              struct combine *c)
{
    ncclResult_t result = struct_need(call, "inputs", inputs, NCCL_EP_COMBINE_INPUTS_V1_SIZE, &c->in, sizeof(c->in));

    if (result == ncclSuccess)
        result = struct_need(call, "outputs", outputs, NCCL_EP_COMBINE_OUTPUTS_V1_SIZE, &c->out, sizeof(c->out));
    if (result == ncclSuccess)
        result = struct_take(call, "config", config, NCCL_EP_COMBINE_CONFIG_V1_SIZE, &c->config, sizeof(c->config));
    if (result == ncclSuccess)
        result = take_tensors(handle, c);
    if (result == ncclSuccess)
        result = combine_recipe(handle, call, c);
    return result == ncclSuccess ? operation_check(handle, call, c->config.pass_direction) : result;
}

/* High throughput, backward: rows of tokens and of weights belong together. */
static ncclResult_t match_rows(const struct ncclEpHandle *handle, struct combine *c)
{
    epx_tensor *tokens = c->tokens.at, *weights = c->weights.at;

    if (handle->group->eager && !tokens->shape[0] != !weights->shape[0])
        return compat_fail(ncclInvalidArgument,
                           "%s: inputs.tokens, inputs.topk_weights: expected both empty or neither, got %lld and %lld "
                           "rows",
                           call, (long long)tokens->shape[0], (long long)weights->shape[0]);
    if (weights->shape[0] < tokens->shape[0])
        tokens->shape[0] = weights->shape[0];
    weights->shape[0] = tokens->shape[0];
    return ncclSuccess;
}

/* Which weights there must be, and what they are to EPX. */
static ncclResult_t place_weights(const struct ncclEpHandle *handle, struct combine *c, int backward,
                                  epx_combine_inputs *in, epx_combine_outputs *out)
{
    const int low = handle->group->low_latency, major = handle->config.layout == EPX_EXPERT_MAJOR;

    if (low) {
        if (major && !c->out_weights.at)
            return compat_fail(
                ncclInvalidArgument,
                "%s: outputs.topk_weights: EXPERT_MAJOR reads the weights of this rank's tokens there, got "
                "NULL",
                call);
        in->topk_weights = c->out_weights.at;
        return ncclSuccess;
    }
    if (!backward && c->weights.at)
        return compat_fail(ncclInvalidArgument, "%s: inputs.topk_weights: a forward combine has none, expected NULL",
                           call);
    if (backward && (!c->weights.at || !c->out_weights.at))
        return compat_fail(ncclInvalidArgument, "%s: %s.topk_weights: a backward combine returns them, got NULL", call,
                           c->weights.at ? "outputs" : "inputs");
    in->topk_weights = c->weights.at;
    out->topk_weights = c->out_weights.at;
    return backward ? match_rows(handle, c) : ncclSuccess;
}

/* High throughput's EXPERT_MAJOR: the sum of each rank's rows is rounded to the tokens' type before ranks are added, as
 * if the rank had summed them itself and returned them in FLAT. */
static int sums_by_rank(const struct ncclEpHandle *handle)
{
    return !handle->group->low_latency && handle->config.layout == EPX_EXPERT_MAJOR;
}

ncclResult_t ncclEpCombine(ncclEpHandle_t handle, const ncclEpCombineInputs_t *inputs,
                           const ncclEpCombineOutputs_t *outputs, const ncclEpCombineConfig_t *config,
                           cudaStream_t stream)
{
    epx_combine_inputs in = EPX_COMBINE_INPUTS_INIT;
    epx_combine_outputs out = EPX_COMBINE_OUTPUTS_INIT;
    epx_combine_config cfg = EPX_COMBINE_CONFIG_INIT;
    struct combine c;
    epx_stream own;
    ncclResult_t result = handle_need(handle, call);

    if (result == ncclSuccess)
        result = take_call(handle, inputs, outputs, config, &c);
    if (result != ncclSuccess)
        return result;
    const int backward = c.config.pass_direction == NCCL_EP_BWD_PASS;
    result = place_weights(handle, &c, backward, &in, &out);
    if (result == ncclSuccess)
        result = compat_stream(handle->group, stream, call, &own);
    if (result != ncclSuccess)
        return result;
    in.tokens = c.tokens.at;
    out.tokens = c.out_tokens.at;
    cfg.send_only = c.config.send_only != 0 && handle->group->low_latency;
    cfg.direction = backward ? EPX_BACKWARD : EPX_FORWARD;
    cfg.nvfp4 = c.config.quant_recipe == NCCL_EP_COMB_QUANT_NVFP4;
    if (sums_by_rank(handle))
        cfg.sum = EPX_SUM_ROUND_RANKS | (c.config.quant_recipe == NCCL_EP_COMB_QUANT_MXFP8 ? EPX_SUM_MXFP8 : 0);
    cfg.max_sms = handle->group->combine_sms;
    in.row_scales = c.scales.at;
    zero_copy_log(handle->group, call, "inputs.tokens", &c.tokens);
    return operation_result(handle, epx_combine(handle->handle, &in, &out, &cfg, own), call);
}

ncclResult_t ncclEpComplete(ncclEpHandle_t handle, const ncclEpCompleteConfig_t *config, cudaStream_t stream)
{
    static const char complete[] = "ncclEpComplete";
    ncclEpCompleteConfig_t own_config;
    epx_stream own;
    ncclResult_t result = handle_need(handle, complete);

    if (result == ncclSuccess)
        result =
            struct_take(complete, "config", config, NCCL_EP_COMPLETE_CONFIG_V1_SIZE, &own_config, sizeof(own_config));
    if (result == ncclSuccess)
        result = compat_stream(handle->group, stream, complete, &own);
    return result == ncclSuccess ? compat_result(epx_complete(handle->handle, own), complete) : result;
}
