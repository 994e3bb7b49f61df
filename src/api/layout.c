/* SPDX-License-Identifier: Apache-2.0 */
/* epx_dispatch_layout: where tokens would go. */
#include "api/check.h"
#include "group/abort.h"
#include "group/registry.h"
#include "modes/modes.h"
#include "util/status.h"
#include "util/structs.h"

static epx_status check_counts(const epx_tensor *given, const char *name, int64_t n, void **data)
{
    const struct want want = {
        .call = "epx_dispatch_layout", .name = name, .dtypes = DTYPE_BIT(EPX_INT32), .ndim = 1, .shape = {n}};
    epx_tensor checked;
    epx_status status = check_optional(given, &want, &checked);

    *data = checked.data;
    return status;
}

static epx_status check_outputs(const epx_group *group, const epx_dispatch_layout_outputs *given, int64_t tokens,
                                struct layout_results *results)
{
    const struct want marks = {.call = "epx_dispatch_layout",
                               .name = "token_in_rank",
                               .dtypes = DTYPE_BIT(EPX_UINT8),
                               .ndim = 2,
                               .shape = {tokens, group->nranks}};
    epx_dispatch_layout_outputs outputs;
    epx_tensor checked;
    epx_status status = struct_in(&outputs, sizeof(outputs), given, "epx_dispatch_layout: outputs");

    if (status == EPX_OK)
        status = check_counts(outputs.tokens_per_rank, "tokens_per_rank", group->nranks, (void **)&results->per_rank);
    if (status == EPX_OK)
        status = check_counts(outputs.tokens_per_node, "tokens_per_node", group->nnodes, (void **)&results->per_node);
    if (status == EPX_OK)
        status = check_counts(outputs.tokens_per_expert, "tokens_per_expert", group->set.experts,
                              (void **)&results->per_expert);
    if (status == EPX_OK)
        status = check_optional(outputs.token_in_rank, &marks, &checked);
    if (status == EPX_OK)
        results->in_rank = checked.data;
    return status;
}

epx_status epx_dispatch_layout(epx_group *group, const epx_tensor *topk_idx, const epx_dispatch_layout_outputs *outputs,
                               epx_stream stream)
{
    static const char call[] = "epx_dispatch_layout";
    const struct want want = {.call = call, .name = "topk_idx", .dtypes = DTYPES_INDEX, .ndim = 2, .shape = {-1, -1}};
    struct layout_results results = {0};
    epx_tensor topk;
    API_ISSUE;
    epx_status status = group_check(group, call);

    if (status == EPX_OK)
        status = group_usable(group);
    if (status == EPX_OK)
        status = stream_check(group, stream, call);
    if (status == EPX_OK)
        status = check_tensor(topk_idx, &want, &topk);
    if (status != EPX_OK)
        return status;
    if (topk.shape[0] > INT32_MAX || topk.shape[1] < 1 || topk.shape[1] > EPX_MAX_TOPK)
        return fail(EPX_ERR_ARGUMENT, "%s: topk_idx: expected 1 to %d experts per token, got %lld", call, EPX_MAX_TOPK,
                    (long long)topk.shape[1]);
    status = check_outputs(group, outputs, topk.shape[0], &results);
    return status == EPX_OK ? dispatch_layout(group, &topk, &results, (struct device_stream *)stream) : status;
}
