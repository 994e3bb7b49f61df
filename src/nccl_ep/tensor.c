/* SPDX-License-Identifier: Apache-2.0 */
/* Descriptions of tensors: those that the library allocates, and what EPX makes of each. */
#include "nccl_ep/compat.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Tells descriptions of ncclEpTensorAlloc from others, and from those that were destroyed. */
#define HEAP_MAGIC 0xBEEFBEEFu

struct heap_tensor {
    ncclEpTensor_t tensor;
    size_t sizes[];
};

ncclResult_t ncclEpTensorAlloc(ncclEpTensor_t **tensor, unsigned int ndim, ncclDataType_t datatype, const size_t *sizes,
                               const ncclEpTensorAllocConfig_t *config)
{
    static const char call[] = "ncclEpTensorAlloc";
    ncclEpTensorAllocConfig_t c;
    struct heap_tensor *heap;
    ncclResult_t result;

    pointers_begin();
    result = pointer_need_result(call, "tensor", tensor, sizeof(*tensor));
    if (result != ncclSuccess)
        return result;
    *tensor = NULL;
    result = struct_take(call, "config", config, NCCL_EP_TENSOR_ALLOC_CONFIG_V1_SIZE, &c, sizeof(c));
    if (result == ncclSuccess && ndim < 1)
        return compat_fail(ncclInvalidArgument, "%s: ndim: expected 1 or more, got 0", call);
    if (result == ncclSuccess)
        result = pointer_need(call, "sizes", sizes, (size_t)ndim * sizeof(*sizes));
    if (result != ncclSuccess)
        return result;
    heap = calloc(1, sizeof(*heap) + (size_t)ndim * sizeof(*sizes));
    if (!heap)
        return compat_fail(ncclSystemError, "%s: no memory", call);
    heap->tensor.size = (unsigned int)sizeof(heap->tensor);
    heap->tensor.magic = HEAP_MAGIC;
    heap->tensor.ndim = ndim;
    heap->tensor.datatype = datatype;
    memcpy(heap->sizes, sizes, ndim * sizeof(*sizes));
    heap->tensor.sizes = heap->sizes;
    *tensor = &heap->tensor;
    return ncclSuccess;
}

/* One of ncclEpTensorAlloc, with the sizes that it was given there. */
static int is_heap(const ncclEpTensor_t *tensor)
{
    return tensor->magic == HEAP_MAGIC && tensor->sizes == ((const struct heap_tensor *)(const void *)tensor)->sizes;
}

ncclResult_t ncclEpTensorDestroy(ncclEpTensor_t *tensor)
{
    ncclResult_t result;

    if (!tensor)
        return ncclSuccess;
    pointers_begin();
    result = pointer_need("ncclEpTensorDestroy", "tensor", tensor, sizeof(*tensor));
    if (result != ncclSuccess)
        return result;
    if (!is_heap(tensor))
        return compat_fail(ncclInvalidArgument,
                           "ncclEpTensorDestroy: tensor: expected one of ncclEpTensorAlloc with its own sizes, got "
                           "another (magic 0x%x)",
                           tensor->magic);
    tensor->magic = 0;
    free(tensor);
    return ncclSuccess;
}

/* 0: none that EPX moves. Types that it has no name for are bytes to it. */
static int dtype_of(ncclDataType_t type)
{
    switch ((int)type) {
    case ncclBfloat16:
        return EPX_BF16;
    case ncclFloat16:
        return EPX_FP16;
    case ncclFloat32:
        return EPX_FP32;
    case ncclFloat8e4m3:
        return EPX_FP8_E4M3;
    case ncclInt32:
        return EPX_INT32;
    case ncclInt64:
        return EPX_INT64;
    case ncclUint8:
    case ncclFloat8e5m2:
    case (int)ncclFloat4x2:
        return EPX_UINT8;
    default:
        return 0;
    }
}

static ncclResult_t check_tensor(const char *call, const char *name, const ncclEpTensor_t *t)
{
    ncclResult_t result = pointer_need(call, name, t, sizeof(*t));

    if (result != ncclSuccess)
        return result;
    if (t->size < NCCL_EP_TENSOR_V1_SIZE || (t->magic != NCCL_EP_TENSOR_MAGIC && !is_heap(t)))
        return compat_fail(ncclInvalidArgument,
                           "%s: %s: expected size %u or more and magic 0x%x (NCCL_EP_TENSOR_INIT), or a tensor of "
                           "ncclEpTensorAlloc with its own sizes, got %u and 0x%x",
                           call, name, NCCL_EP_TENSOR_V1_SIZE, (unsigned int)NCCL_EP_TENSOR_MAGIC, t->size, t->magic);
    if (t->ndim < 1 || t->ndim > EPX_MAX_NDIM || !t->sizes)
        return compat_fail(ncclInvalidArgument, "%s: %s: expected 1 to %d dimensions and their sizes, got %u%s", call,
                           name, EPX_MAX_NDIM, t->ndim, t->sizes ? "" : " and NULL");
    if (!pointer_readable(t->sizes, t->ndim * sizeof(*t->sizes)))
        return compat_fail(ncclInvalidArgument, "%s: %s.sizes: expected a pointer to %u sizes, got %p", call, name,
                           t->ndim, (const void *)t->sizes);
    if (!dtype_of(t->datatype))
        return compat_fail(ncclInvalidArgument,
                           "%s: %s.datatype: expected bfloat16, float16, float32, float8e4m3, float8e5m2, float4x2, "
                           "int32, int64 or uint8, got ncclDataType_t %d",
                           call, name, (int)t->datatype);
    for (unsigned int i = 0; i < t->ndim; i++)
        if (t->sizes[i] > INT32_MAX)
            return compat_fail(ncclInvalidArgument, "%s: %s.sizes[%u]: expected at most %d, got %zu", call, name, i,
                               INT32_MAX, t->sizes[i]);
    return ncclSuccess;
}

/* CPU device: rows are read and written by threads of EPX, where a pointer that is not one would end the process. Only
 * its first byte is tried. */
static ncclResult_t check_data(const char *call, const char *name, const epx_tensor *t)
{
    int64_t elements = 1;

    for (int i = 0; i < t->ndim; i++)
        elements = t->shape[i] ? elements : 0;
    return !t->data || !elements || pointer_readable(t->data, 1)
               ? ncclSuccess
               : compat_fail(ncclInvalidArgument, "%s: %s.data: expected a pointer to memory, got %p", call, name,
                             t->data);
}

ncclResult_t compat_tensor(const struct ncclEpGroup *group, const char *call, const char *name,
                           const ncclEpTensor_t *given, struct compat_tensor *out)
{
    epx_tensor *t = &out->storage;
    ncclResult_t result;
    void *data;

    out->at = NULL;
    out->window = 0;
    out->window_offset = 0;
    if (!given)
        return ncclSuccess;
    result = check_tensor(call, name, given);
    if (result != ncclSuccess)
        return result;
    out->type = given->datatype;
    data = given->data;
    if (given->win_hdl) {
        out->window = 1;
        out->window_offset = given->win_offset;
    }
    if (!data && given->win_hdl) {
        result = comm_window(&group->comm, call, name, given->win_hdl, &data);
        if (result != ncclSuccess)
            return result;
        data = (char *)data + given->win_offset;
    }
    *t = epx_tensor_make(data, (epx_dtype)dtype_of(given->datatype), (int)given->ndim, 0, 0, 0, 0);
    for (unsigned int i = 0; i < given->ndim; i++)
        t->shape[i] = (int64_t)given->sizes[i];
    result = group->is_cpu ? check_data(call, name, t) : ncclSuccess;
    if (result == ncclSuccess)
        out->at = t;
    return result;
}

int64_t tensor_row_bytes(const struct compat_tensor *t)
{
    return t->at->shape[t->at->ndim - 1] * (int64_t)epx_dtype_size((epx_dtype)t->at->dtype);
}

static const char *type_name(int type)
{
    static const char *const names[] = {[ncclInt8] = "int8",
                                        [ncclUint8] = "uint8",
                                        [ncclInt32] = "int32",
                                        [ncclUint32] = "uint32",
                                        [ncclInt64] = "int64",
                                        [ncclUint64] = "uint64",
                                        [ncclFloat16] = "float16",
                                        [ncclFloat32] = "float32",
                                        [ncclFloat64] = "float64",
                                        [ncclBfloat16] = "bfloat16",
                                        [ncclFloat8e4m3] = "float8e4m3",
                                        [ncclFloat8e5m2] = "float8e5m2",
                                        [(int) ncclFloat4x2] = "float4x2"};

    return type >= 0 && type < (int)(sizeof(names) / sizeof(names[0])) ? names[type] : "unknown";
}

ncclResult_t tensor_need(const struct compat_tensor *t, const char *call, const char *name, int ndim,
                         unsigned int types)
{
    char list[160] = "";
    size_t at = 0;

    if (!t->at)
        return compat_fail(ncclInvalidArgument, "%s: %s: expected a tensor, got NULL", call, name);
    if (t->at->ndim != ndim)
        return compat_fail(ncclInvalidArgument, "%s: %s: expected %d dimensions, got %d", call, name, ndim,
                           t->at->ndim);
    if (types & TYPE_BIT(t->type))
        return ncclSuccess;
    for (int i = 0; i <= (int)ncclFloat4x2; i++)
        if (types & TYPE_BIT(i))
            at += (size_t)snprintf(list + at, sizeof(list) - at, "%s%s", at ? " or " : "", type_name(i));
    return compat_fail(ncclInvalidArgument, "%s: %s.datatype: expected %s, got %s", call, name, list,
                       type_name((int)t->type));
}

/* High throughput fills counters in the update; offsets are those of zones. */
unsigned int update_looks_at(const struct ncclEpGroup *group, int layout)
{
    if (group->low_latency)
        return 0;
    return LOOK_EXPERT_COUNTERS | LOOK_RANK_COUNTERS | LOOK_TOTAL |
           (layout == NCCL_EP_LAYOUT_EXPERT_MAJOR ? (unsigned int)LOOK_OFFSETS : 0);
}

/* Low latency fills them in dispatch, and has no offsets and no total. High throughput's EXPERT_MAJOR has counts there
 * too, for callers whose update was given none. */
unsigned int dispatch_looks_at(const struct ncclEpHandle *handle)
{
    if (handle->group->low_latency)
        return LOOK_EXPERT_COUNTERS | LOOK_RANK_COUNTERS;
    return handle->config.layout == EPX_EXPERT_MAJOR ? LOOK_EXPERT_COUNTERS | LOOK_TOTAL : 0;
}

ncclResult_t compat_layout(const struct ncclEpGroup *group, const char *call, const ncclEpLayoutInfo_t *given,
                           unsigned int looks_at, struct compat_layout *out)
{
    ncclEpLayoutInfo_t own;
    ncclResult_t result = struct_take(call, "layout_info", given, NCCL_EP_LAYOUT_INFO_V1_SIZE, &own, sizeof(own));

    memset(out, 0, sizeof(*out));
    if (result != ncclSuccess)
        return result;
    if ((unsigned int)own.recv_topk_idx_kind > NCCL_EP_EXPERT_ID_GLOBAL)
        return compat_fail(ncclInvalidArgument, "%s: layout_info.recv_topk_idx_kind: expected 0 to 2, got %d", call,
                           (int)own.recv_topk_idx_kind);
    out->global_ids = own.recv_topk_idx_kind == NCCL_EP_EXPERT_ID_GLOBAL;
    const int64_t local = group->config.num_experts / (unsigned int)group->comm.nranks;
    const struct {
        const char *name;
        const ncclEpTensor_t *given;
        struct compat_tensor *out;
        epx_tensor **at;
        int64_t count; /* high throughput writes so many numbers, and takes longer tensors; 0: of exactly this length */
    } parts[] = {
        /* in the order of LOOK_* */
        {"layout_info.expert_counters", own.expert_counters, &out->expert_counters, &out->info.expert_counts, local},
        {"layout_info.src_rank_counters", own.src_rank_counters, &out->src_rank_counters, &out->info.rank_counts, 0},
        {"layout_info.expert_offsets", own.expert_offsets, &out->expert_offsets, &out->info.expert_offsets, local},
        {"layout_info.recv_total_counter", own.recv_total_counter, &out->recv_total_counter, &out->info.total, 1}};
    out->info.size = (uint32_t)sizeof(out->info);
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
        epx_tensor *const t = &parts[i].out->storage;
        if (!(looks_at & 1u << i))
            continue;
        result = compat_tensor(group, call, parts[i].name, parts[i].given, parts[i].out);
        if (result != ncclSuccess)
            return result;
        if (!group->low_latency && parts[i].out->at && parts[i].count && t->ndim == 1 && t->shape[0] > parts[i].count)
            t->shape[0] = parts[i].count;
        *parts[i].at = parts[i].out->at;
        if (parts[i].out->at)
            out->at = &out->info;
    }
    return ncclSuccess;
}
