/* SPDX-License-Identifier: Apache-2.0 */
/* Descriptions of tensors: those that the library allocates, and what EPX makes of each. */
#include "compat/nccl_ep/compat.h"

#include <stdlib.h>
#include <string.h>

/* Tells descriptions of ncclEpTensorAlloc from others, and from those that were destroyed. */
#define HEAP_MAGIC 0xCAFED00Du

struct heap_tensor {
    ncclEpTensor_t tensor;
    size_t sizes[];
};

ncclResult_t ncclEpTensorAlloc(ncclEpTensor_t **tensor, unsigned int ndim, ncclDataType_t datatype, const size_t *sizes,
                               const ncclEpTensorAllocConfig_t *config)
{
    static const char call[] = "ncclEpTensorAlloc";
    struct heap_tensor *heap;
    ncclResult_t result = struct_check(call, "config", config, sizeof(*config));

    if (result != ncclSuccess)
        return result;
    if (!tensor || !sizes)
        return compat_fail(ncclInvalidArgument, "%s: %s: expected a pointer, got NULL", call,
                           tensor ? "sizes" : "tensor");
    *tensor = NULL;
    if (ndim < 1 || ndim > EPX_MAX_NDIM)
        return compat_fail(ncclInvalidArgument, "%s: ndim: expected 1 to %d, got %u", call, EPX_MAX_NDIM, ndim);
    heap = calloc(1, sizeof(*heap) + ndim * sizeof(*sizes));
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

ncclResult_t ncclEpTensorDestroy(ncclEpTensor_t *tensor)
{
    if (!tensor)
        return ncclSuccess;
    if (tensor->magic != HEAP_MAGIC)
        return compat_fail(ncclInvalidArgument,
                           "ncclEpTensorDestroy: tensor: expected one of ncclEpTensorAlloc, got another (magic 0x%x)",
                           tensor->magic);
    tensor->magic = 0;
    free(tensor);
    return ncclSuccess;
}

/* 0: none that EPX moves. */
static int dtype_of(ncclDataType_t type)
{
    switch (type) {
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
        return EPX_UINT8;
    default:
        return 0;
    }
}

ncclResult_t compat_tensor(const struct ncclEpGroup *group, const char *call, const char *name,
                           const ncclEpTensor_t *given, struct compat_tensor *out)
{
    epx_tensor *t = &out->storage;
    ncclResult_t result = ncclSuccess;
    void *data;

    out->at = NULL;
    if (!given)
        return ncclSuccess;
    if (given->size != sizeof(*given) || (given->magic != NCCL_EP_TENSOR_MAGIC && given->magic != HEAP_MAGIC))
        return compat_fail(ncclInvalidArgument,
                           "%s: %s: expected size %zu and magic 0x%x (NCCL_EP_TENSOR_INIT), or a tensor of "
                           "ncclEpTensorAlloc, got %u and 0x%x",
                           call, name, sizeof(*given), (unsigned int)NCCL_EP_TENSOR_MAGIC, given->size, given->magic);
    if (given->ndim < 1 || given->ndim > EPX_MAX_NDIM || !given->sizes)
        return compat_fail(ncclInvalidArgument, "%s: %s: expected 1 to %d dimensions and their sizes, got %u%s", call,
                           name, EPX_MAX_NDIM, given->ndim, given->sizes ? "" : " and NULL");
    if (!dtype_of(given->datatype))
        return compat_fail(
            ncclInvalidArgument,
            "%s: %s.datatype: expected bfloat16, float16, float32, float8e4m3, int32, int64 or uint8, got "
            "ncclDataType_t %d",
            call, name, (int)given->datatype);
    data = given->data;
    if (!data && given->win_hdl) {
        result = comm_window(&group->comm, call, name, given->win_hdl, &data);
        if (result != ncclSuccess)
            return result;
        data = (char *)data + given->win_offset;
    }
    *t = epx_tensor_make(data, (epx_dtype)dtype_of(given->datatype), (int)given->ndim, 0, 0, 0, 0);
    for (unsigned int i = 0; i < given->ndim; i++) {
        if (given->sizes[i] > INT32_MAX)
            return compat_fail(ncclInvalidArgument, "%s: %s.sizes[%u]: expected at most %d, got %zu", call, name, i,
                               INT32_MAX, given->sizes[i]);
        t->shape[i] = (int64_t)given->sizes[i];
    }
    out->at = t;
    return ncclSuccess;
}

ncclResult_t compat_scales(const struct ncclEpGroup *group, const char *call, const char *name,
                           const ncclEpTensor_t *given, struct compat_tensor *out)
{
    ncclResult_t result = compat_tensor(group, call, name, given, out);
    epx_tensor *t = out->at;

    if (result != ncclSuccess || !t || t->dtype != EPX_UINT8)
        return result;
    if (t->shape[t->ndim - 1] % 4)
        return compat_fail(ncclInvalidArgument, "%s: %s: expected uint8 scales in fours per row, got %lld", call, name,
                           (long long)t->shape[t->ndim - 1]);
    t->dtype = EPX_INT32;
    t->shape[t->ndim - 1] /= 4;
    return ncclSuccess;
}

ncclResult_t compat_layout(const struct ncclEpGroup *group, const char *call, const ncclEpLayoutInfo_t *given,
                           struct compat_layout *out)
{
    ncclResult_t result = struct_check(call, "layout_info", given, sizeof(*given));

    memset(out, 0, sizeof(*out));
    if (result != ncclSuccess || !given)
        return result;
    result = compat_tensor(group, call, "layout_info.expert_counters", given->expert_counters, &out->expert_counters);
    if (result == ncclSuccess)
        result = compat_tensor(group, call, "layout_info.src_rank_counters", given->src_rank_counters,
                               &out->src_rank_counters);
    if (result == ncclSuccess)
        result = compat_tensor(group, call, "layout_info.expert_offsets", given->expert_offsets, &out->expert_offsets);
    if (result == ncclSuccess)
        result = compat_tensor(group, call, "layout_info.recv_total_counter", given->recv_total_counter,
                               &out->recv_total_counter);
    if (result != ncclSuccess)
        return result;
    out->info = (epx_layout_info)EPX_LAYOUT_INFO_INIT;
    out->info.expert_counts = out->expert_counters.at;
    out->info.rank_counts = out->src_rank_counters.at;
    out->info.expert_offsets = out->expert_offsets.at;
    out->info.total = out->recv_total_counter.at;
    if (out->info.expert_counts || out->info.rank_counts || out->info.expert_offsets || out->info.total)
        out->at = &out->info;
    return ncclSuccess;
}
