/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lane.h"

enum { WINDOW_OFFSET = 512 };

int wrong_result(const char *file, int line, const char *call, int got, int expected)
{
    if (got == expected)
        return 0;
    fprintf(stderr, "nccl_ep: rank %d: %s:%d: %s: expected %d, got %d: %s\n", world.rank, file, line, call, expected,
            got, ncclEpxGetLastError());
    return -1;
}

static ncclDataType_t type_of(epx_dtype dtype)
{
    static const ncclDataType_t types[] = {
        [EPX_BF16] = ncclBfloat16, [EPX_FP16] = ncclFloat16, [EPX_FP32] = ncclFloat32, [EPX_FP8_E4M3] = ncclFloat8e4m3,
        [EPX_INT32] = ncclInt32,   [EPX_INT64] = ncclInt64,  [EPX_UINT8] = ncclUint8};

    return types[dtype];
}

static int take_memory(struct side *side)
{
    ncclWindow_t window;

    if (side->memory == SHARED) {
        TRY(ncclEpxMemAlloc(side->group, side->bytes, &side->device));
    } else if (side->memory == WINDOW) {
        TRY(ncclMemAlloc(&side->device, side->bytes + WINDOW_OFFSET));
        TRY(ncclCommWindowRegister(world.comm, side->device, side->bytes + WINDOW_OFFSET, &window,
                                   NCCL_WIN_COLL_SYMMETRIC));
        side->tensor->win_hdl = window;
        side->tensor->win_offset = WINDOW_OFFSET;
        side->data = (char *)side->device + WINDOW_OFFSET;
        return 0;
    } else {
        TRY(cudaMalloc(&side->device, side->bytes));
    }
    side->data = side->device;
    side->tensor->data = side->data;
    return 0;
}

int side_open(struct side *side, ncclEpGroup_t group, enum memory memory, epx_dtype dtype, int ndim, int64_t d0,
              int64_t d1, int64_t d2)
{
    const size_t sizes[3] = {(size_t)d0, (size_t)d1, (size_t)d2};
    size_t bytes = tensor_element_size(dtype);
    void *shadow;

    for (int i = 0; i < ndim; i++)
        bytes *= sizes[i];
    side->bytes = bytes ? bytes : 16;
    side->memory = memory;
    side->group = group;
    shadow = calloc(1, side->bytes);
    CHECK(shadow != NULL);
    side->view = epx_tensor_make(shadow, dtype, ndim, d0, d1, d2, 0);
    TRY(ncclEpTensorAlloc(&side->tensor, (unsigned int)ndim, type_of(dtype), sizes, NULL));
    return take_memory(side);
}

int side_put(struct side *side)
{
    TRY(cudaMemcpyAsync(side->data, side->view.data, side->bytes, cudaMemcpyHostToDevice, world.stream));
    TRY(cudaStreamSynchronize(world.stream));
    return 0;
}

int side_get(struct side *side)
{
    TRY(cudaMemcpyAsync(side->view.data, side->data, side->bytes, cudaMemcpyDeviceToHost, world.stream));
    TRY(cudaStreamSynchronize(world.stream));
    return 0;
}

int side_fill(struct side *side, int byte)
{
    if (!side->tensor)
        return 0;
    memset(side->view.data, byte, side->bytes);
    return side_put(side);
}

int side_close(struct side *side)
{
    if (!side->tensor)
        return 0;
    if (side->memory == SHARED) {
        TRY(ncclEpxMemFree(side->group, side->device));
    } else if (side->memory == WINDOW) {
        TRY(ncclCommWindowDeregister(world.comm, side->tensor->win_hdl));
        TRY(ncclMemFree(side->device));
    } else {
        TRY(cudaFree(side->device));
    }
    free(side->view.data);
    TRY(ncclEpTensorDestroy(side->tensor));
    side->tensor = NULL;
    return 0;
}
