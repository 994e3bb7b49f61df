/* SPDX-License-Identifier: Apache-2.0 */
#include "api/args.h"

#include <inttypes.h>
#include <string.h>

#include "api/check.h"
#include "modes/handle.h"
#include "util/structs.h"
#include "util/status.h"

epx_status routing_check(struct epx_handle *handle, const epx_tensor *own, epx_stream stream, const char *call)
{
    epx_status status = EPX_OK;

    if (handle->config.memory && handle->config.mode == EPX_HIGH_THROUGHPUT && !handle->updates && own && own->ndim > 0)
        status = handle_adopt(handle, own->shape[0], stream, call);
    if (status == EPX_OK && handle->ntokens < 0)
        status = fail(EPX_ERR_USAGE, "%s: expected a handle with a routing (epx_handle_update)", call);
    return status;
}

epx_status need_rows(const char *call, const char *name, int64_t given, int64_t needed, const char *why)
{
    if (given < needed)
        return fail(EPX_ERR_OVERFLOW, "%s: %s: %" PRId64 " rows are needed (%s), got %" PRId64, call, name, needed, why,
                    given);
    return EPX_OK;
}

epx_status need_row_bytes(struct epx_handle *handle, const char *call, const char *name, const epx_tensor *t,
                          const epx_tensor *wire)
{
    const int64_t bytes = t->shape[t->ndim - 1] * (int64_t)epx_dtype_size((epx_dtype)t->dtype);
    const int64_t sent = t->shape[t->ndim - 1] * (int64_t)epx_dtype_size((epx_dtype)(wire ? wire : t)->dtype);

    if (bytes < 16 || bytes % 16)
        return fail(EPX_ERR_ARGUMENT,
                    "%s: %s: expected rows of a multiple of 16 bytes, got %" PRId64 " %s = %" PRId64 " bytes", call,
                    name, t->shape[t->ndim - 1], dtype_name(t->dtype), bytes);
    if (sent > handle->group->set.max_hidden_bytes)
        return fail(EPX_ERR_ARGUMENT, "%s: %s: expected rows of at most max_hidden_bytes = %d, got %" PRId64 " bytes",
                    call, name, handle->group->set.max_hidden_bytes, sent);
    return EPX_OK;
}

static epx_status check_info_numbers(struct epx_handle *handle, const epx_layout_info *info, const char *call,
                                     struct layout_tensors *out)
{
    const int low = handle->config.mode == EPX_LOW_LATENCY;

    if (info->expected_rows > INT32_MAX || (low && info->expected_rows))
        return fail(EPX_ERR_ARGUMENT, "%s: info.expected_rows: expected at most %d, 0 with low latency, got %u", call,
                    INT32_MAX, info->expected_rows);
    if (info->drop_rows > INT32_MAX || (info->drop_rows && !handle->config.drop_rows))
        return fail(EPX_ERR_ARGUMENT,
                    "%s: info.drop_rows: expected at most %d, and 0 for a handle without drop_rows, got %u", call,
                    INT32_MAX, info->drop_rows);
    out->expected_rows = info->expected_rows;
    out->drop_rows = info->drop_rows;
    return EPX_OK;
}

static epx_status check_info_tensors(struct epx_handle *handle, const epx_layout_info *info, const char *call,
                                     struct layout_tensors *out)
{
    const int64_t R = handle->group->nranks, L = handle->group->set.local_experts;
    const int low = handle->config.mode == EPX_LOW_LATENCY, major = handle->config.layout == EPX_EXPERT_MAJOR;
    const struct {
        const epx_tensor *tensor;
        epx_tensor *out;
        int allowed;
        struct want want;
    } parts[] = {
        {info->expert_counts,
         &out->expert_counts,
         !low || major,
         {call, "info.expert_counts", DTYPES_INDEX, 1, {L}, STRIDES_NONE}},
        {info->expert_offsets,
         &out->expert_offsets,
         !low && major,
         {call, "info.expert_offsets", DTYPES_INDEX, 1, {L}, STRIDES_NONE}},
        {info->rank_counts, &out->rank_counts, 1, {call, "info.rank_counts", DTYPES_INDEX, 1, {R}, STRIDES_NONE}},
        {info->total, &out->total, 1, {call, "info.total", DTYPES_INDEX, 1, {1}, STRIDES_NONE}},
        {info->layout_range,
         &out->layout_range,
         low && major,
         {call, "info.layout_range", DTYPE_BIT(EPX_INT64), 2, {L, R}, STRIDES_NONE}},
        {info->expert_stats,
         &out->expert_stats,
         !low || major,
         {call, "info.expert_stats", DTYPE_BIT(EPX_INT32), 1, {L}, STRIDES_NONE}},
        {info->wait_ns, &out->wait_ns, low, {call, "info.wait_ns", DTYPE_BIT(EPX_INT64), 1, {R}, STRIDES_NONE}},
        {info->rank_matrix, &out->rank_matrix, !low, {call, "info.rank_matrix", DTYPES_INDEX, 2, {R, R}, STRIDES_NONE}},
        {info->rank_tokens, &out->rank_tokens, !low, {call, "info.rank_tokens", DTYPES_INDEX, 1, {R}, STRIDES_NONE}},
        {info->relay_counts, &out->relay_counts, !low, {call, "info.relay_counts", DTYPES_INDEX, 1, {R}, STRIDES_NONE}},
        {info->expert_rows, &out->expert_rows, !low, {call, "info.expert_rows", DTYPES_INDEX, 1, {L}, STRIDES_NONE}},
        {info->expert_ends, &out->expert_ends, !low, {call, "info.expert_ends", DTYPES_INDEX, 1, {L}, STRIDES_NONE}},
        {info->source_ends, &out->source_ends, !low, {call, "info.source_ends", DTYPES_INDEX, 1, {-1}, STRIDES_NONE}},
    };
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
        if (parts[i].tensor && !parts[i].allowed)
            return fail(EPX_ERR_ARGUMENT, "%s: %s: this mode and layout do not have it, expected NULL", call,
                        parts[i].want.name);
        const epx_status status = check_optional(parts[i].tensor, &parts[i].want, parts[i].out);
        if (status != EPX_OK)
            return status;
    }
    if (out->source_ends.ndim && (out->source_ends.shape[0] < 1 || R % out->source_ends.shape[0]))
        return fail(EPX_ERR_ARGUMENT, "%s: info.source_ends: expected a length that divides %" PRId64 ", got %" PRId64,
                    call, R, out->source_ends.shape[0]);
    return EPX_OK;
}

epx_status layout_tensors_check(struct epx_handle *handle, const epx_layout_info *given, const char *call,
                                struct layout_tensors *out)
{
    epx_layout_info info;
    epx_status status;

    memset(out, 0, sizeof(*out));
    if (!given)
        return EPX_OK;
    status = struct_in(&info, sizeof(info), given, "epx_layout_info");
    if (status == EPX_OK)
        status = check_info_numbers(handle, &info, call, out);
    return status == EPX_OK ? check_info_tensors(handle, &info, call, out) : status;
}

static int64_t index_at(const epx_tensor *t, int64_t i)
{
    return t->dtype == EPX_INT64 ? ((const int64_t *)t->data)[i] : ((const int32_t *)t->data)[i];
}

epx_status indices_check(struct epx_handle *handle, const epx_tensor *topk, epx_stream stream, const char *call)
{
    struct epx_group *group = handle->group;
    const struct device_ops *ops = group->device->ops;
    const int64_t K = topk->shape[1], n = topk->shape[0] * K;

    if (!(ops->caps & DEVICE_HOST_ACCESS) || ops->stream_query(group->device, group_stream(group, stream)) != EPX_OK)
        return EPX_OK;
    for (int64_t i = 0; i < n; i++) {
        const int64_t id = index_at(topk, i);
        if (id < -1 || id >= group->set.experts)
            return fail(EPX_ERR_ARGUMENT,
                        "%s: topk_idx[%" PRId64 "][%" PRId64 "]: expected -1 (dropped) to %d, got %" PRId64, call,
                        i / K, i % K, group->set.experts - 1, id);
    }
    return EPX_OK;
}
