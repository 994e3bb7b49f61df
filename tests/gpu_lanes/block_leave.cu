/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A barrier of a block does not wait for warps that have left the kernel: warp w comes to barriers in rounds 0 to w and
 * leaves. By emulated lanes (lanes.sh) and, compiled by nvcc, on a GPU (scripts/gpu.sh), where a wait without end would
 * be a kernel without end.
 */
#include "device/gpu/prims.cuh"

#include <stdio.h>
#include <stdlib.h>

enum { WARPS = 4 };

/* right[w]: barriers of warp w that gave what its lanes had to see, counted by one lane. */
static __device__ void leave_one_by_one(int *right)
{
    const int warp = (int)(threadIdx.x / WARP);

    for (int round = 0; round <= warp; round++) {
        const int none = block_any(0), last = block_any(warp == WARPS - 1), leaving = block_any(warp == round);
        if (lane_id() == WARP - 1)
            right[warp] += !none + (last && leaving);
    }
}

static int failures(const int *right)
{
    int failed = 0;

    for (int w = 0; w < WARPS; w++)
        if (right[w] != 2 * (w + 1)) {
            printf("warp %d: %d barriers were right, expected %d\n", w, right[w], 2 * (w + 1));
            failed = 1;
        }
    return failed;
}

#if defined(EPX_HARDWARE)
#include "lanes.h"

static void kernel(const void *params, const void *)
{
    leave_one_by_one((int *)params);
}

int main(void)
{
    int right[WARPS] = {0};
    const struct lanes_launch launch = {kernel, right, NULL, WARP, WARPS * WARP, 1};

    lanes_run_block(&launch, 0);
    return failures(right);
}
#else
#include <time.h>
#include <unistd.h>

static __global__ void kernel(int *right)
{
    leave_one_by_one(right);
}

int main(void)
{
    const time_t deadline = time(NULL) + 10;
    int *right, result[WARPS];
    cudaError_t state = cudaMallocHost((void **)&right, sizeof(result));

    if (state == cudaSuccess) {
        memset(right, 0, sizeof(result));
        kernel<<<1, WARPS * WARP>>>(right);
        while ((state = cudaStreamQuery(0)) == cudaErrorNotReady && time(NULL) < deadline)
            usleep(1000);
    }
    if (state != cudaSuccess) {
        printf("a block whose warps leave one by one: %s\n", cudaGetErrorString(state));
        fflush(stdout);
        _exit(1); /* nothing that waits for the GPU */
    }
    memcpy(result, right, sizeof(result));
    return failures(result);
}
#endif
