/* SPDX-License-Identifier: Apache-2.0 */
/* ncclEpCombine and ncclEpComplete. */
#include "compat/nccl_ep/compat.h"

static const char call[] = "ncclEpCombine";

struct combine {
    struct compat_tensor tokens, weights, out_tokens, out_weights;
};

static ncclResult_t take_tensors(const struct ncclEpGroup *group, const ncclEpCombineInputs_t *in,
                                 const ncclEpCombineOutputs_t *out, struct combine *c)
{
    ncclResult_t result = compat_tensor(group, call, "inputs.tokens", in->tokens, &c->tokens);

    if (result == ncclSuccess)
        result = compat_tensor(group, call, "inputs.topk_weights", in->topk_weights, &c->weights);
    if (result == ncclSuccess)
        result = compat_tensor(group, call, "outputs.tokens", out->tokens, &c->out_tokens);
    if (result == ncclSuccess)
        result = compat_tensor(group, call, "outputs.topk_weights", out->topk_weights, &c->out_weights);
    return result;
}

static ncclResult_t check_call(const struct ncclEpHandle *handle, const ncclEpCombineInputs_t *inputs,
                               const ncclEpCombineOutputs_t *outputs, const ncclEpCombineConfig_t *config)
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

/* Which weights there must be, and what they are to EPX. */
static ncclResult_t place_weights(const struct ncclEpHandle *handle, const struct combine *c, int backward,
                                  epx_combine_inputs *in, epx_combine_outputs *out)
{
    const int low = handle->group->low_latency, major = handle->config.layout == EPX_EXPERT_MAJOR;

    if (low) {
        if (c->weights.at)
            return compat_fail(ncclInvalidArgument, "%s: inputs.topk_weights: low latency has none, expected NULL",
                               call);
        if (major && !c->out_weights.at)
            return compat_fail(
                ncclInvalidArgument,
                "%s: outputs.topk_weights: EXPERT_MAJOR reads the weights of this rank's tokens there, got "
                "NULL",
                call);
        if (!major && c->out_weights.at)
            return compat_fail(ncclInvalidArgument,
                               "%s: outputs.topk_weights: RANK_MAJOR sums rows that the caller has weighted, expected "
                               "NULL",
                               call);
        in->topk_weights = c->out_weights.at;
        return ncclSuccess;
    }
    if (!backward && (c->weights.at || c->out_weights.at))
        return compat_fail(ncclInvalidArgument, "%s: %s.topk_weights: a forward combine has none, expected NULL", call,
                           c->weights.at ? "inputs" : "outputs");
    if (backward && (!c->weights.at || !c->out_weights.at))
        return compat_fail(ncclInvalidArgument, "%s: %s.topk_weights: a backward combine returns them, got NULL", call,
                           c->weights.at ? "outputs" : "inputs");
    in->topk_weights = c->weights.at;
    out->topk_weights = c->out_weights.at;
    return ncclSuccess;
}

ncclResult_t ncclEpCombine(ncclEpHandle_t handle, const ncclEpCombineInputs_t *inputs,
                           const ncclEpCombineOutputs_t *outputs, const ncclEpCombineConfig_t *config,
                           cudaStream_t stream)
{
    epx_combine_inputs in = EPX_COMBINE_INPUTS_INIT;
    epx_combine_outputs out = EPX_COMBINE_OUTPUTS_INIT;
    epx_combine_config cfg = EPX_COMBINE_CONFIG_INIT;
    const int backward = config && config->pass_direction == NCCL_EP_BWD_PASS;
    struct combine c;
    epx_stream own;
    ncclResult_t result = handle_need(handle, call);

    if (result == ncclSuccess)
        result = check_call(handle, inputs, outputs, config);
    if (result == ncclSuccess)
        result = take_tensors(handle->group, inputs, outputs, &c);
    if (result == ncclSuccess)
        result = place_weights(handle, &c, backward, &in, &out);
    if (result == ncclSuccess)
        result = compat_stream(handle->group, stream, call, &own);
    if (result != ncclSuccess)
        return result;
    in.tokens = c.tokens.at;
    out.tokens = c.out_tokens.at;
    cfg.send_only = config && config->send_only != 0 && handle->group->low_latency;
    cfg.direction = backward ? EPX_BACKWARD : EPX_FORWARD;
    return compat_result(epx_combine(handle->handle, &in, &out, &cfg, own), call);
}

ncclResult_t ncclEpComplete(ncclEpHandle_t handle, const ncclEpCompleteConfig_t *config, cudaStream_t stream)
{
    static const char complete[] = "ncclEpComplete";
    epx_stream own;
    ncclResult_t result = handle_need(handle, complete);

    if (result == ncclSuccess)
        result = struct_check(complete, "config", config, sizeof(*config));
    if (result == ncclSuccess && !handle->handle)
        return ncclSuccess;
    if (result == ncclSuccess)
        result = compat_stream(handle->group, stream, complete, &own);
    return result == ncclSuccess ? compat_result(epx_complete(handle->handle, own), complete) : result;
}
