/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nccl_case.h"

enum { WINDOW_OFFSET = 512 };

static ncclDataType_t type_of(epx_dtype dtype)
{
    static const ncclDataType_t types[] = {
        [EPX_BF16] = ncclBfloat16, [EPX_FP16] = ncclFloat16, [EPX_FP32] = ncclFloat32, [EPX_FP8_E4M3] = ncclFloat8e4m3,
        [EPX_INT32] = ncclInt32,   [EPX_INT64] = ncclInt64,  [EPX_UINT8] = ncclUint8};

    return types[dtype];
}

static int take_memory(struct tensor_pair *pair)
{
    ncclWindow_t window;

    if (pair->memory == SHARED) {
        TRY(ncclEpxMemAlloc(pair->group, pair->bytes, &pair->device));
    } else if (pair->memory == WINDOW) {
        TRY(ncclMemAlloc(&pair->device, pair->bytes + WINDOW_OFFSET));
        TRY(ncclCommWindowRegister(world.comm, pair->device, pair->bytes + WINDOW_OFFSET, &window,
                                   NCCL_WIN_COLL_SYMMETRIC));
        pair->tensor->win_hdl = window;
        pair->tensor->win_offset = WINDOW_OFFSET;
        pair->data = (char *)pair->device + WINDOW_OFFSET;
        return 0;
    } else {
        TRY(cudaMalloc(&pair->device, pair->bytes));
    }
    pair->data = pair->device;
    pair->tensor->data = pair->data;
    return 0;
}

int tensor_pair_open(struct tensor_pair *pair, ncclEpGroup_t group, enum memory memory, epx_dtype dtype, int ndim,
                     int64_t d0, int64_t d1, int64_t d2)
{
    const size_t sizes[3] = {(size_t)d0, (size_t)d1, (size_t)d2};
    size_t bytes = tensor_element_size(dtype);
    void *shadow;

    for (int i = 0; i < ndim; i++)
        bytes *= sizes[i];
    pair->bytes = bytes ? bytes : 16;
    pair->memory = memory;
    pair->group = group;
    shadow = calloc(1, pair->bytes);
    CHECK(shadow != NULL);
    pair->view = epx_tensor_make(shadow, dtype, ndim, d0, d1, d2, 0);
    TRY(ncclEpTensorAlloc(&pair->tensor, (unsigned int)ndim, type_of(dtype), sizes, NULL));
    return take_memory(pair);
}

int tensor_pair_put(struct tensor_pair *pair)
{
    TRY(cudaMemcpyAsync(pair->data, pair->view.data, pair->bytes, cudaMemcpyHostToDevice, world.stream));
    TRY(cudaStreamSynchronize(world.stream));
    return 0;
}

int tensor_pair_get(struct tensor_pair *pair)
{
    TRY(cudaMemcpyAsync(pair->view.data, pair->data, pair->bytes, cudaMemcpyDeviceToHost, world.stream));
    TRY(cudaStreamSynchronize(world.stream));
    return 0;
}

int tensor_pair_fill(struct tensor_pair *pair, int byte)
{
    if (!pair->tensor)
        return 0;
    memset(pair->view.data, byte, pair->bytes);
    return tensor_pair_put(pair);
}

int tensor_pair_close(struct tensor_pair *pair)
{
    if (!pair->tensor)
        return 0;
    if (pair->memory == SHARED) {
        TRY(ncclEpxMemFree(pair->group, pair->device));
    } else if (pair->memory == WINDOW) {
        TRY(ncclCommWindowDeregister(world.comm, pair->tensor->win_hdl));
        TRY(ncclMemFree(pair->device));
    } else {
        TRY(cudaFree(pair->device));
    }
    free(pair->view.data);
    TRY(ncclEpTensorDestroy(pair->tensor));
    pair->tensor = NULL;
    return 0;
}
