/* SPDX-License-Identifier: Apache-2.0 */
#include "nccl_ep/compat.h"

#include <stdlib.h>

/* A layout is passed on as its number. */
_Static_assert((int)NCCL_EP_LAYOUT_EXPERT_MAJOR == (int)EPX_EXPERT_MAJOR, "as in epx.h");
_Static_assert((int)NCCL_EP_LAYOUT_RANK_MAJOR == (int)EPX_RANK_MAJOR, "as in epx.h");
_Static_assert((int)NCCL_EP_LAYOUT_FLAT == (int)EPX_FLAT, "as in epx.h");

static ncclResult_t check_topk(const struct ncclEpGroup *group, const char *call, ncclEpLayout_t layout, int num_topk)
{
    const int experts = (int)group->config.num_experts, limit = (int)group->config.num_topk;
    const int most = experts < EPX_MAX_TOPK ? experts : EPX_MAX_TOPK;

    if (group->low_latency) {
        if (num_topk >= 1 && num_topk <= most)
            return ncclSuccess;
        return compat_fail(ncclInvalidArgument, "%s: num_topk: expected 1 to %d, got %d", call, most, num_topk);
    }
    if (num_topk < 1)
        return compat_fail(ncclInvalidUsage, "%s: num_topk: expected 1 or more, got %d", call, num_topk);
    if (num_topk > EPX_MAX_TOPK)
        return compat_fail(ncclInvalidArgument, "%s: num_topk: expected 1 to %d, got %d", call, EPX_MAX_TOPK, num_topk);
    if (limit && num_topk > limit)
        return compat_fail(ncclInvalidUsage, "%s: num_topk: expected at most the group's num_topk = %d, got %d", call,
                           limit, num_topk);
    if (group->eager && layout == NCCL_EP_LAYOUT_EXPERT_MAJOR && !limit)
        return compat_fail(ncclInvalidUsage,
                           "%s: layout: EXPERT_MAJOR without max_recv_tokens_per_rank expects num_topk in the group's "
                           "configuration",
                           call);
    return ncclSuccess;
}

/* With one of the two flags for copies in EXPERT_MAJOR, NCCL EP wants room for all of them. */
static ncclResult_t check_copies(const struct ncclEpGroup *group, const char *call, ncclEpLayout_t layout, int num_topk)
{
    const ncclEpGroupConfig_t *c = &group->config;
    const int64_t rows = (int64_t)group->comm.nranks * c->max_dispatch_tokens_per_rank * num_topk;

    if (group->low_latency || group->eager || layout != NCCL_EP_LAYOUT_EXPERT_MAJOR ||
        c->zero_copy == NCCL_EP_ZERO_COPY_ON || !(group->env.local_dup || group->env.nvlink_dup) ||
        c->max_recv_tokens_per_rank >= rows)
        return ncclSuccess;
    return compat_fail(ncclInvalidUsage,
                       "%s: NCCL_EP_HT_EM_%s_DUP expects max_recv_tokens_per_rank of at least %lld, got %u", call,
                       group->env.local_dup ? "LOCAL" : "NVLINK", (long long)rows, c->max_recv_tokens_per_rank);
}

/* Low latency with a size of its buffer given: the rows that one rank may receive must fit, of which any layout has at
 * least these. */
static ncclResult_t check_buffer(const struct ncclEpGroup *group, const char *call)
{
    const ncclEpGroupConfig_t *c = &group->config;
    const uint64_t rows = (uint64_t)group->comm.nranks * c->max_dispatch_tokens_per_rank * c->max_token_bytes;

    if (!group->low_latency || c->rdma_buffer_size == NCCL_EP_AUTO || c->rdma_buffer_size >= rows)
        return ncclSuccess;
    return compat_fail(ncclInvalidUsage,
                       "%s: the group's rdma_buffer_size: expected NCCL_EP_AUTO or at least %llu bytes, got %lu", call,
                       (unsigned long long)rows, c->rdma_buffer_size);
}

/* Of zones, which only high throughput's EXPERT_MAJOR has: the others do not look at it. */
static ncclResult_t take_alignment(const char *call, const ncclEpHandleConfig_t *config, epx_handle_config *out)
{
    const size_t alignment = config->dispatch_output_per_expert_alignment;

    if (alignment <= 1 || out->mode != EPX_HIGH_THROUGHPUT || out->layout != EPX_EXPERT_MAJOR)
        return ncclSuccess;
    if (alignment > 1u << 20 || (alignment & (alignment - 1)))
        return compat_fail(ncclInvalidArgument,
                           "%s: config.dispatch_output_per_expert_alignment: expected a power of two up to %u, got %zu",
                           call, 1u << 20, alignment);
    out->expert_alignment = (int32_t)alignment;
    return ncclSuccess;
}

static ncclResult_t make_config(const struct ncclEpGroup *group, const char *call, ncclEpLayout_t layout,
                                const ncclEpHandleConfig_t *config, int num_topk, epx_handle_config *out)
{
    const int low = group->low_latency;
    ncclEpHandleConfig_t own;
    ncclResult_t result = struct_take(call, "config", config, NCCL_EP_HANDLE_CONFIG_V1_SIZE, &own, sizeof(own));

    if (result != ncclSuccess)
        return result;
    if (layout != NCCL_EP_LAYOUT_EXPERT_MAJOR && layout != (low ? NCCL_EP_LAYOUT_RANK_MAJOR : NCCL_EP_LAYOUT_FLAT))
        return compat_fail(ncclInvalidArgument, "%s: layout: expected EXPERT_MAJOR (1) or %s in %s, got %d", call,
                           low ? "RANK_MAJOR (2)" : "FLAT (3)", low ? "low latency" : "high throughput", (int)layout);
    result = check_topk(group, call, layout, num_topk);
    if (result == ncclSuccess)
        result = check_copies(group, call, layout, num_topk);
    if (result != ncclSuccess)
        return result;
    *out = (epx_handle_config)EPX_HANDLE_CONFIG_INIT;
    out->mode = low ? EPX_LOW_LATENCY : EPX_HIGH_THROUGHPUT;
    out->layout = (int32_t)layout;
    out->topk = num_topk;
    if (layout == NCCL_EP_LAYOUT_FLAT)
        out->flags = EPX_HANDLE_COMPACT_TOPK;
    if (layout == NCCL_EP_LAYOUT_RANK_MAJOR)
        out->flags = EPX_HANDLE_ALL_WEIGHTS;
    if (!low && group->config.overflow_policy == NCCL_EP_OVERFLOW_DROP) {
        out->drop_rows = (int32_t)group->config.max_recv_tokens_per_rank;
        if (layout == NCCL_EP_LAYOUT_EXPERT_MAJOR && group->config.zero_copy != NCCL_EP_ZERO_COPY_ON)
            out->flags = EPX_HANDLE_DROP_TOKENS;
    }
    return take_alignment(call, &own, out);
}

ncclResult_t ncclEpHandleMemSize(ncclEpGroup_t ep_group, ncclEpLayout_t layout, const ncclEpHandleConfig_t *config,
                                 size_t *size_out, int num_topk)
{
    static const char call[] = "ncclEpHandleMemSize";
    epx_handle_config c;
    ncclResult_t result = group_need(ep_group, call);

    if (result == ncclSuccess)
        result = make_config(ep_group, call, layout, config, num_topk, &c);
    if (result == ncclSuccess)
        result = pointer_need_result(call, "size_out", size_out, sizeof(*size_out));
    if (result != ncclSuccess)
        return result;
    return compat_result(epx_handle_memory(ep_group->group, &c, size_out), call);
}

/* The caller's memory for the handle's tables. */
static ncclResult_t take_memory(const struct ncclEpGroup *group, const char *call, const ncclEpTensor_t *given,
                                epx_handle_config *c)
{
    struct compat_tensor memory;
    size_t needed = 0;
    ncclResult_t result = compat_tensor(group, call, "handle_mem", given, &memory);

    if (result == ncclSuccess && memory.at)
        result = compat_result(epx_handle_memory(group->group, c, &needed), call);
    if (result != ncclSuccess || !memory.at)
        return result;
    if (memory.at->ndim != 1 || memory.type != ncclUint8 || !memory.at->data || (size_t)memory.at->shape[0] < needed)
        return compat_fail(
            ncclInvalidArgument,
            "%s: handle_mem: expected uint8 [%zu] or more (ncclEpHandleMemSize), got %d dimensions of type "
            "%d, the first %lld, at %p",
            call, needed, memory.at->ndim, (int)given->datatype, (long long)memory.at->shape[0], memory.at->data);
    c->memory = memory.at->data;
    c->memory_bytes = (uint64_t)memory.at->shape[0];
    return ncclSuccess;
}

static ncclResult_t init_handle(const char *call, ncclEpHandle_t *out, struct ncclEpGroup *group, ncclEpLayout_t layout,
                                const ncclEpHandleConfig_t *config, int num_topk, const ncclEpTensor_t *handle_mem)
{
    struct ncclEpHandle *handle;
    epx_handle_config c;
    ncclResult_t result;

    pointers_begin();
    result = pointer_need_result(call, "handle", out, sizeof(*out));
    if (result != ncclSuccess)
        return result;
    *out = NULL;
    result = group_need(group, call);
    if (result == ncclSuccess)
        result = make_config(group, call, layout, config, num_topk, &c);
    if (result == ncclSuccess)
        result = check_buffer(group, call);
    if (result == ncclSuccess)
        result = take_memory(group, call, handle_mem, &c);
    if (result != ncclSuccess)
        return result;
    handle = calloc(1, sizeof(*handle));
    if (!handle)
        return compat_fail(ncclSystemError, "%s: no memory", call);
    handle->group = group;
    handle->config = c;
    result = compat_result(epx_handle_create(&handle->handle, group->group, &c), call);
    if (result != ncclSuccess) {
        free(handle);
        return result;
    }
    handle_list_add(handle);
    group->handles_made++;
    *out = handle;
    return ncclSuccess;
}

ncclResult_t ncclEpInitHandle(ncclEpHandle_t *handle, ncclEpGroup_t ep_group, ncclEpLayout_t layout,
                              const ncclEpHandleConfig_t *config, int num_topk, const ncclEpTensor_t *handle_mem)
{
    return init_handle("ncclEpInitHandle", handle, ep_group, layout, config, num_topk, handle_mem);
}

static ncclResult_t take_topk(const struct ncclEpGroup *group, const char *call, const ncclEpTensor_t *topk_idx,
                              struct compat_tensor *topk)
{
    ncclResult_t result = compat_tensor(group, call, "topk_idx", topk_idx, topk);

    return result == ncclSuccess ? tensor_need(topk, call, "topk_idx", 2, TYPE_BIT(ncclInt32) | TYPE_BIT(ncclInt64))
                                 : result;
}

static ncclResult_t update_handle(const char *call, struct ncclEpHandle *handle, const ncclEpTensor_t *topk_idx,
                                  const ncclEpLayoutInfo_t *layout_info, cudaStream_t stream)
{
    struct ncclEpGroup *group = handle->group;
    struct compat_tensor topk;
    struct compat_layout layout;
    epx_stream own;
    ncclResult_t result = take_topk(group, call, topk_idx, &topk);

    if (result == ncclSuccess)
        result = compat_layout(group, call, layout_info, update_looks_at(group, handle->config.layout), &layout);
    if (result == ncclSuccess)
        result = compat_stream(group, stream, call, &own);
    if (result == ncclSuccess && !group_waits_to_rejoin(group)) /* else the ranks take it when they meet */
        result = compat_result(epx_handle_update(handle->handle, topk.at, layout.at, own), call);
    if (result == ncclSuccess) {
        handle->updated = 1;
        if (group->low_latency) {
            handle->topk = topk;
            handle->topk.at = &handle->topk.storage;
        }
    }
    return result;
}

ncclResult_t ncclEpUpdateHandle(ncclEpHandle_t handle, const ncclEpTensor_t *topk_idx,
                                const ncclEpLayoutInfo_t *layout_info, cudaStream_t stream)
{
    ncclResult_t result = handle_need(handle, "ncclEpUpdateHandle");

    return result == ncclSuccess ? update_handle("ncclEpUpdateHandle", handle, topk_idx, layout_info, stream) : result;
}

ncclResult_t ncclEpCreateHandle(ncclEpHandle_t *handle, ncclEpGroup_t ep_group, ncclEpLayout_t layout_kind,
                                const ncclEpTensor_t *topk_idx, const ncclEpLayoutInfo_t *layout_info,
                                const ncclEpHandleConfig_t *config, cudaStream_t stream)
{
    static const char call[] = "ncclEpCreateHandle";
    struct compat_tensor topk;
    struct compat_layout layout;
    ncclResult_t result;

    pointers_begin();
    result = pointer_need_result(call, "handle", handle, sizeof(*handle));
    if (result != ncclSuccess)
        return result;
    *handle = NULL;
    result = group_need(ep_group, call);
    if (result == ncclSuccess)
        result = take_topk(ep_group, call, topk_idx, &topk);
    if (result == ncclSuccess)
        result = compat_layout(ep_group, call, layout_info, update_looks_at(ep_group, (int)layout_kind), &layout);
    if (result == ncclSuccess)
        result = init_handle(call, handle, ep_group, layout_kind, config, (int)topk.at->shape[1], NULL);
    if (result != ncclSuccess)
        return result;
    result = update_handle(call, *handle, topk_idx, layout_info, stream);
    if (result != ncclSuccess) {
        (void)ncclEpHandleDestroy(*handle);
        *handle = NULL;
    }
    return result;
}

/* The routing may be on its way into handle_mem, by work of the stream. */
static ncclResult_t await_memory(const struct ncclEpHandle *handle, const char *call, cudaStream_t stream)
{
    epx_stream own;
    ncclResult_t result = compat_stream(handle->group, stream, call, &own);

    return result == ncclSuccess ? compat_result(epx_stream_sync(handle->group->group, own), call) : result;
}

ncclResult_t eager_rows(const struct ncclEpHandle *handle, const char *call, cudaStream_t stream, int64_t *rows)
{
    ncclResult_t result;

    if (stream_capturing(handle->group, stream))
        return compat_fail(ncclInvalidUsage,
                           "%s: stream: without max_recv_tokens_per_rank the host waits for counts, which a captured "
                           "stream does not allow",
                           call);
    result = handle->updated ? ncclSuccess : await_memory(handle, call, stream);
    return result == ncclSuccess ? compat_result(epx_handle_recv_count(handle->handle, rows, NULL), call) : result;
}

int group_traps(const struct ncclEpGroup *group)
{
    return !group->low_latency && !group->eager && group->config.overflow_policy != NCCL_EP_OVERFLOW_DROP;
}

ncclResult_t operation_result(struct ncclEpHandle *handle, epx_status status, const char *call)
{
    const ncclResult_t result = compat_result(status, call);
    int64_t rows = 0;

    /* A tensor that is merely too small is the caller's to replace. The update has run: EPX knew the number of rows. */
    if (status == EPX_ERR_OVERFLOW && group_traps(handle->group) &&
        epx_handle_recv_count(handle->handle, &rows, NULL) == EPX_OK &&
        rows > (int64_t)handle->group->config.max_recv_tokens_per_rank)
        (void)epx_group_abort(handle->group->group, EPX_ERR_OVERFLOW);
    return result;
}

ncclResult_t operation_check(const struct ncclEpHandle *handle, const char *call, ncclEpPassDir_t direction)
{
    /* High throughput may find a routing in handle_mem: EPX looks. */
    if (!handle->updated && (handle->group->low_latency || !handle->config.memory))
        return compat_fail(handle->group->low_latency ? ncclInvalidArgument : ncclInvalidUsage,
                           "%s: handle: expected one with a routing (ncclEpUpdateHandle)", call);
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
    ncclResult_t result = handle ? handle_need(handle, call) : ncclSuccess;

    if (!handle)
        return ncclSuccess;
    if (result == ncclSuccess)
        result = compat_result(epx_handle_destroy(handle->handle), call);
    if (result == ncclInvalidArgument || result == ncclInvalidUsage)
        return result; /* it is still there: a staged operation, say */
    handle_list_remove(handle);
    free(handle);
    return result;
}
