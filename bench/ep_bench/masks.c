/* SPDX-License-Identifier: Apache-2.0 */
/*
 * --mask-test: rank 1 does not come to a dispatch, ranks 1 and 3 not to a combine. The others mask them after the
 * deadline, see the error, and bring them back by MaskClean and ErrorClear.
 */
#include <stdio.h>
#include <stdlib.h>

#include "ep_bench.h"

enum { DEADLINE_MS = 1500, LATE_1 = 1, LATE_3 = 3 };

static int bad;

static void expect(const char *what, int got, int expected)
{
    if (got != expected && bad++ < 8)
        fprintf(stderr, "epx ep-bench: rank %d: %s: expected %d, got %d\n", world.rank, what, expected, got);
}

static void expect_mask(struct bench *b, int late1, int late3)
{
    int *device = NULL, *mask = malloc((size_t)world.nranks * sizeof(*mask));

    if (!mask)
        failed("malloc", 0, "no memory");
    CUDA(cudaMalloc((void **)&device, (size_t)world.nranks * sizeof(*mask)));
    NCCL(ncclEpMaskQuery(b->group, device, world.stream));
    CUDA(cudaStreamSynchronize(world.stream));
    CUDA(cudaMemcpy(mask, device, (size_t)world.nranks * sizeof(*mask), cudaMemcpyDeviceToHost));
    for (int r = 0; r < world.nranks; r++)
        expect("mask", mask[r], r == LATE_1 ? late1 : r == LATE_3 ? late3 : 1);
    CUDA(cudaFree(device));
    free(mask);
}

static void expect_error(struct bench *b, int expected)
{
    int error = -1;

    NCCL(ncclEpGetAsyncError(b->group, &error));
    expect("async error", error, expected);
}

static void run(struct bench *b)
{
    if (world.rank == LATE_1 &&
        getenv("EPX_BENCH_CORRUPT")) { /* it is not late: a test shows that the check can fail */
        bench_dispatch(b);
        CUDA(cudaStreamSynchronize(world.stream));
    }
    if (world.rank != LATE_1) {
        bench_dispatch(b);
        CUDA(cudaStreamSynchronize(world.stream));
        expect_mask(b, 0, 1);
        expect_error(b, 1);
        if (world.rank != LATE_3) {
            bench_combine(b);
            CUDA(cudaStreamSynchronize(world.stream));
            expect_mask(b, 0, 0);
            expect_error(b, 1);
        }
    }
    world_barrier();
    if (world.rank != LATE_1 && world.rank != LATE_3) {
        NCCL(ncclEpMaskClean(b->group, world.stream));
        expect_mask(b, 1, 1);
        NCCL(ncclEpErrorClear(b->group));
        expect_error(b, 0);
    }
    world_barrier();
}

int mask_test(const struct options *o)
{
    struct bench b;
    double *all = malloc((size_t)world.nranks * sizeof(*all)), sum = 0;

    if (world.nranks < 4 || !all) {
        fprintf(stderr, "epx ep-bench: --mask-test needs 4 ranks, got %d\n", world.nranks);
        return EXIT_BAD;
    }
    bench_open(&b, o, 1, DEADLINE_MS);
    world_barrier();
    run(&b);
    world_gather(bad, all);
    for (int r = 0; r < world.nranks; r++)
        sum += all[r];
    free(all);
    if (!world.rank)
        printf("Mask test: %s\n", sum > 0 ? "FAILED" : "PASSED");
    bench_close(&b);
    return sum > 0 ? EXIT_INVALID : EXIT_GOOD;
}
