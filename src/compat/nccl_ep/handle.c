/* SPDX-License-Identifier: Apache-2.0 */
#include "compat/nccl_ep/compat.h"

#include <stdlib.h>

/* A layout is passed on as its number. */
_Static_assert((int)NCCL_EP_LAYOUT_EXPERT_MAJOR == (int)EPX_EXPERT_MAJOR, "as in epx.h");
_Static_assert((int)NCCL_EP_LAYOUT_RANK_MAJOR == (int)EPX_RANK_MAJOR, "as in epx.h");
_Static_assert((int)NCCL_EP_LAYOUT_FLAT == (int)EPX_FLAT, "as in epx.h");

/* High throughput may leave K open until the first update. */
static ncclResult_t make_config(const struct ncclEpGroup *group, const char *call, ncclEpLayout_t layout,
                                const ncclEpHandleConfig_t *config, int num_topk, epx_handle_config *out)
{
    const int low = group->low_latency;
    ncclResult_t result = struct_check(call, "config", config, sizeof(*config));

    if (result != ncclSuccess)
        return result;
    if (layout != NCCL_EP_LAYOUT_EXPERT_MAJOR && layout != (low ? NCCL_EP_LAYOUT_RANK_MAJOR : NCCL_EP_LAYOUT_FLAT))
        return compat_fail(ncclInvalidArgument, "%s: layout: expected EXPERT_MAJOR (1) or %s in %s, got %d", call,
                           low ? "RANK_MAJOR (2)" : "FLAT (3)", low ? "low latency" : "high throughput", (int)layout);
    if ((low && num_topk < 1) || num_topk > group->max_topk)
        return compat_fail(ncclInvalidArgument, "%s: num_topk: expected 1 to %d, got %d", call, group->max_topk,
                           num_topk);
    *out = (epx_handle_config)EPX_HANDLE_CONFIG_INIT;
    out->mode = low ? EPX_LOW_LATENCY : EPX_HIGH_THROUGHPUT;
    out->layout = (int32_t)layout;
    out->topk = num_topk > 0 ? num_topk : 0;
    if (layout == NCCL_EP_LAYOUT_FLAT)
        out->flags = EPX_HANDLE_COMPACT_TOPK;
    if (config && config->dispatch_output_per_expert_alignment > 1) {
        const size_t alignment = config->dispatch_output_per_expert_alignment;
        if (alignment > 1u << 20 || (alignment & (alignment - 1)))
            return compat_fail(ncclInvalidArgument,
                               "%s: config.dispatch_output_per_expert_alignment: expected a power of two up to %u, got "
                               "%zu",
                               call, 1u << 20, alignment);
        out->expert_alignment = (int32_t)alignment;
    }
    return ncclSuccess;
}

ncclResult_t ncclEpHandleMemSize(ncclEpGroup_t ep_group, ncclEpLayout_t layout, const ncclEpHandleConfig_t *config,
                                 size_t *size_out, int num_topk)
{
    static const char call[] = "ncclEpHandleMemSize";
    epx_handle_config c;
    ncclResult_t result = group_need(ep_group, call);

    if (result == ncclSuccess)
        result = make_config(ep_group, call, layout, config, num_topk, &c);
    if (result != ncclSuccess)
        return result;
    if (!size_out)
        return compat_fail(ncclInvalidArgument, "%s: size_out: expected a pointer, got NULL", call);
    if (!c.topk)
        c.topk = ep_group->max_topk;
    return compat_result(epx_handle_memory(ep_group->group, &c, size_out), call);
}

static ncclResult_t check_memory(struct ncclEpGroup *group, const char *call, const ncclEpTensor_t *given,
                                 ncclEpLayout_t layout, const ncclEpHandleConfig_t *config, int num_topk)
{
    struct compat_tensor memory;
    size_t needed = 0;
    ncclResult_t result = compat_tensor(group, call, "handle_mem", given, &memory);

    if (result == ncclSuccess && memory.at)
        result = ncclEpHandleMemSize(group, layout, config, &needed, num_topk);
    if (result != ncclSuccess || !memory.at)
        return result;
    if (memory.at->ndim != 1 || memory.at->dtype != EPX_UINT8 || !memory.at->data ||
        (size_t)memory.at->shape[0] < needed)
        return compat_fail(
            ncclInvalidArgument,
            "%s: handle_mem: expected uint8 [%zu] or more (ncclEpHandleMemSize), got %d dimensions of type "
            "%d, the first %lld, at %p",
            call, needed, memory.at->ndim, (int)given->datatype, (long long)memory.at->shape[0], memory.at->data);
    return ncclSuccess;
}

static ncclResult_t init_handle(const char *call, ncclEpHandle_t *out, struct ncclEpGroup *group, ncclEpLayout_t layout,
                                const ncclEpHandleConfig_t *config, int num_topk, const ncclEpTensor_t *handle_mem)
{
    struct ncclEpHandle *handle;
    epx_handle_config c;
    ncclResult_t result;

    if (!out)
        return compat_fail(ncclInvalidArgument, "%s: handle: expected a pointer, got NULL", call);
    *out = NULL;
    result = group_need(group, call);
    if (result == ncclSuccess)
        result = make_config(group, call, layout, config, num_topk, &c);
    if (result == ncclSuccess)
        result = check_memory(group, call, handle_mem, layout, config, num_topk);
    if (result != ncclSuccess)
        return result;
    handle = calloc(1, sizeof(*handle));
    if (!handle)
        return compat_fail(ncclSystemError, "%s: no memory", call);
    handle->group = group;
    handle->config = c;
    if (c.topk)
        result = compat_result(epx_handle_create(&handle->handle, group->group, &c), call);
    if (result != ncclSuccess) {
        free(handle);
        return result;
    }
    handle_list_add(handle);
    *out = handle;
    return ncclSuccess;
}

ncclResult_t ncclEpInitHandle(ncclEpHandle_t *handle, ncclEpGroup_t ep_group, ncclEpLayout_t layout,
                              const ncclEpHandleConfig_t *config, int num_topk, const ncclEpTensor_t *handle_mem)
{
    return init_handle("ncclEpInitHandle", handle, ep_group, layout, config, num_topk, handle_mem);
}

/* The handle for this K: what was left open is known now; a high-throughput handle may also get another K. */
static ncclResult_t fit_topk(struct ncclEpHandle *handle, const char *call, int64_t topk)
{
    epx_handle *old = handle->handle;
    epx_status status;

    if (old && (topk == handle->config.topk || handle->group->low_latency))
        return ncclSuccess;
    if (topk < 1 || topk > handle->group->max_topk)
        return compat_fail(ncclInvalidArgument, "%s: topk_idx: expected [tokens, 1 to %d], got %lld columns", call,
                           handle->group->max_topk, (long long)topk);
    handle->config.topk = (int32_t)topk;
    status = epx_handle_create(&handle->handle, handle->group->group, &handle->config);
    if (status != EPX_OK) {
        handle->handle = old;
        return compat_result(status, call);
    }
    return old ? compat_result(epx_handle_destroy(old), call) : ncclSuccess;
}

static ncclResult_t update_handle(const char *call, struct ncclEpHandle *handle, const ncclEpTensor_t *topk_idx,
                                  const ncclEpLayoutInfo_t *layout_info, cudaStream_t stream)
{
    struct ncclEpGroup *group = handle->group;
    struct compat_tensor topk;
    struct compat_layout layout;
    epx_stream own;
    ncclResult_t result;

    if (!topk_idx)
        return compat_fail(ncclInvalidArgument, "%s: topk_idx: expected a tensor, got NULL", call);
    result = compat_tensor(group, call, "topk_idx", topk_idx, &topk);
    if (result == ncclSuccess && topk.at->ndim != 2)
        result = compat_fail(ncclInvalidArgument, "%s: topk_idx: expected [tokens, top-k], got %d dimensions", call,
                             topk.at->ndim);
    if (result == ncclSuccess && group->low_latency && layout_info)
        result = compat_fail(ncclInvalidArgument,
                             "%s: layout_info: low latency takes it in ncclEpDispatch, expected NULL", call);
    if (result == ncclSuccess)
        result = compat_layout(group, call, layout_info, &layout);
    if (result == ncclSuccess)
        result = compat_stream(group, stream, call, &own);
    if (result == ncclSuccess)
        result = fit_topk(handle, call, topk.at->shape[1]);
    if (result != ncclSuccess)
        return result;
    return compat_result(epx_handle_update(handle->handle, topk.at, layout.at, own), call);
}

ncclResult_t ncclEpUpdateHandle(ncclEpHandle_t handle, const ncclEpTensor_t *topk_idx,
                                const ncclEpLayoutInfo_t *layout_info, cudaStream_t stream)
{
    ncclResult_t result = handle_need(handle, "ncclEpUpdateHandle");

    return result == ncclSuccess ? update_handle("ncclEpUpdateHandle", handle, topk_idx, layout_info, stream) : result;
}

ncclResult_t ncclEpCreateHandle(ncclEpHandle_t *handle, ncclEpGroup_t ep_group, ncclEpLayout_t layout,
                                const ncclEpTensor_t *topk_idx, const ncclEpLayoutInfo_t *layout_info,
                                const ncclEpHandleConfig_t *config, cudaStream_t stream)
{
    static const char call[] = "ncclEpCreateHandle";
    struct compat_tensor topk = {.at = NULL};
    ncclResult_t result = group_need(ep_group, call);

    if (result == ncclSuccess)
        result = compat_tensor(ep_group, call, "topk_idx", topk_idx, &topk);
    if (result != ncclSuccess)
        return result;
    if (!topk.at || topk.at->ndim != 2)
        return compat_fail(ncclInvalidArgument, "%s: topk_idx: expected [tokens, top-k], got %s", call,
                           topk.at ? "another number of dimensions" : "NULL");
    result = init_handle(call, handle, ep_group, layout, config, (int)topk.at->shape[1], NULL);
    if (result != ncclSuccess)
        return result;
    result = update_handle(call, *handle, topk_idx, layout_info, stream);
    if (result != ncclSuccess) {
        (void)ncclEpHandleDestroy(*handle);
        *handle = NULL;
    }
    return result;
}

ncclResult_t operation_check(const struct ncclEpHandle *handle, const char *call, ncclEpPassDir_t direction)
{
    if (!handle->handle)
        return compat_fail(ncclInvalidUsage, "%s: handle: expected one with a routing (ncclEpUpdateHandle)", call);
    if (direction != NCCL_EP_FWD_PASS && direction != NCCL_EP_BWD_PASS)
        return compat_fail(ncclInvalidArgument, "%s: config.pass_direction: expected 0 or 1, got %d", call,
                           (int)direction);
    if (direction == NCCL_EP_BWD_PASS && handle->group->low_latency)
        return compat_fail(ncclInvalidUsage, "%s: config.pass_direction: low latency has no backward pass", call);
    return ncclSuccess;
}

ncclResult_t ncclEpHandleDestroy(ncclEpHandle_t handle)
{
    static const char call[] = "ncclEpHandleDestroy";
    ncclResult_t result = handle_need(handle, call);

    if (result == ncclSuccess && handle->handle)
        result = compat_result(epx_handle_destroy(handle->handle), call);
    if (result == ncclInvalidArgument || result == ncclInvalidUsage)
        return result; /* it is still there: a staged operation, say */
    handle_list_remove(handle);
    free(handle);
    return result;
}
