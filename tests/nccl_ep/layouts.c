/* SPDX-License-Identifier: Apache-2.0 */
/* All layouts, both directions; staged and interleaved operations; routings that are kept, and changed. */
#include "nccl_case.h"

#include <stdio.h>

enum { LL_EXPERT, LL_WIDE, LL_RANK, LL_GLOBAL, HT_FLAT, HT_GLOBAL, HT_EXPERT, LL_CAST, LL_CAST_ROUNDED, ROUNDS };

/* name; algorithm, layout; dtype sent, received, of counters; alignment, top-k, hidden, tokens, experts */
static const struct spec specs[ROUNDS] = {
    [LL_EXPERT] = {"ll expert-major", LL, EXPERT_MAJOR, EPX_BF16, EPX_BF16, EPX_INT32, 1, 3, 256, 17, 24,
                   .memory = PLAIN},
    /* more than NCCL EP's 9 experts per token, and int64 counters */
    [LL_WIDE] = {"ll expert-major, top-22", LL, EXPERT_MAJOR, EPX_FP16, EPX_FP16, EPX_INT64, 1, 22, 72, 5, 32,
                 .index32 = 1, .memory = SHARED},
    [LL_RANK] = {"ll rank-major", LL, RANK_MAJOR, EPX_BF16, EPX_BF16, EPX_INT32, 1, 4, 384, 17, 24, .memory = WINDOW},
    [LL_GLOBAL] = {"ll rank-major, global ids", LL, RANK_MAJOR, EPX_FP32, EPX_FP32, EPX_INT32, 1, 4, 128, 9, 24,
                   .global_ids = 1, .memory = SHARED},
    [HT_GLOBAL] = {"ht flat, global ids", HT, FLAT, EPX_FP16, EPX_FP16, EPX_INT32, 1, 4, 128, 21, 24, .global_ids = 1,
                   .index32 = 1, .memory = SHARED},
    [HT_FLAT] = {"ht flat", HT, FLAT, EPX_BF16, EPX_BF16, EPX_INT32, 1, 4, 256, 40, 24, .memory = PLAIN},
    [HT_EXPERT] = {"ht expert-major", HT, EXPERT_MAJOR, EPX_FP32, EPX_FP32, EPX_INT64, 16, 4, 100, 33, 24,
                   .memory = WINDOW},
    [LL_CAST] = {"ll cast to fp8", LL, EXPERT_MAJOR, EPX_BF16, EPX_FP8_E4M3, EPX_INT32, 1, 3, 512, 9, 16,
                 .scale = EPX_FP32},
    [LL_CAST_ROUNDED] = {"ll cast to fp8, round scales", LL, EXPERT_MAJOR, EPX_BF16, EPX_FP8_E4M3, EPX_INT32, 1, 3, 512,
                         9, 16, .scale = EPX_FP32, .round_scales = 1},
};
static const struct spec ht_fp8 = {
    "ht flat, fp8 tokens", HT, FLAT, EPX_FP8_E4M3, EPX_FP8_E4M3, EPX_INT32, 1, 2, 512, 21, 16, .scale = EPX_FP32};

/* Each routing serves several operations. */
static int test_rounds(const struct spec *spec)
{
    const int backward = spec->algorithm == HT && spec->received != EPX_FP8_E4M3;
    struct nccl_case nc;

    if (nccl_case_open_alone(&nc, spec))
        return -1;
    for (uint64_t seed = 1; seed <= 3; seed++)
        if (nccl_case_route(&nc, seed) || nccl_case_round(&nc, 10 * seed, 0) ||
            nccl_case_round(&nc, 10 * seed + 1, backward) || nccl_case_round(&nc, 10 * seed + 2, 0))
            return -1;
    return nccl_case_close_alone(&nc);
}

/* FP8 tokens: combine takes what the experts made of them, which is another dtype. */
static int test_dispatch_only(const struct spec *spec)
{
    struct nccl_case nc;

    if (nccl_case_open_alone(&nc, spec))
        return -1;
    for (uint64_t seed = 1; seed <= 2; seed++)
        if (nccl_case_route(&nc, seed) || nccl_case_dispatch(&nc, seed, 0, 0) || nccl_case_check_dispatch(&nc, 0))
            return -1;
    return nccl_case_close_alone(&nc);
}

static int complete(struct nccl_case *nc, cudaStream_t stream)
{
    TRY(ncclEpComplete(nc->handle, NULL, stream));
    TRY(cudaStreamSynchronize(stream));
    return 0;
}

/* A third operation while two are staged. */
static int send_too_many(struct nccl_case *nc)
{
    struct nccl_calls c;

    nccl_calls_init(&c, nc, 0);
    c.config.send_only = 1;
    EXPECT(ncclInvalidUsage, ncclEpDispatch(nc->handle, &c.in, &c.out, &c.info, &c.config, world.stream));
    return 0;
}

/* Two handles, their halves in turn; the receive halves on another stream, and in the other order. */
static int test_interleaved(const struct spec *spec)
{
    struct nccl_case a, b, c;
    int error = -1;

    if (nccl_case_open_alone(&a, spec) || nccl_case_open(&b, a.group, spec) || nccl_case_open(&c, a.group, spec) ||
        nccl_case_route(&c, 77))
        return -1;
    for (uint64_t i = 1; i <= 3; i++) {
        if (nccl_case_route(&a, i) || nccl_case_route(&b, i + 100) || nccl_case_dispatch(&a, i, 0, 1) ||
            nccl_case_dispatch(&b, i + 50, 0, 1))
            return -1;
        EXPECT(ncclInvalidUsage, ncclEpHandleDestroy(a.handle)); /* others wait for its receive half */
        if (send_too_many(&c))
            return -1;
        TRY(cudaStreamSynchronize(world.stream));
        if (complete(&b, world.other) || complete(&a, world.other) || nccl_case_check_dispatch(&a, 0) ||
            nccl_case_check_dispatch(&b, 0) || nccl_case_combine(&b, 0, 1) || nccl_case_combine(&a, 0, 1))
            return -1;
        TRY(cudaStreamSynchronize(world.stream));
        if (complete(&a, world.other) || complete(&b, world.stream) || nccl_case_check_combine(&a, 0) ||
            nccl_case_check_combine(&b, 0))
            return -1;
    }
    TRY(ncclEpComplete(a.handle, NULL, world.stream)); /* nothing is staged */
    TRY(ncclEpxGetAsyncError(a.group, &error));
    CHECK(error == 0);
    return nccl_case_close(&b) || nccl_case_close(&c) || nccl_case_close_alone(&a) ? -1 : 0;
}

/* High throughput: handles with different routings and layouts of one group, used in turn without an update. */
static int test_kept_routings(void)
{
    struct spec flat = specs[HT_FLAT], expert = flat;
    struct nccl_case a, b;

    expert.name = "ht expert-major beside flat";
    expert.layout = EXPERT_MAJOR;
    expert.alignment = 4;
    flat.rows = (int)most_rows(&expert); /* one limit for all tensors of a group */
    if (nccl_case_open_alone(&b, &expert) || nccl_case_open(&a, b.group, &flat) || nccl_case_route(&a, 7) ||
        nccl_case_route(&b, 8))
        return -1;
    for (uint64_t i = 0; i < 3; i++)
        if (nccl_case_round(&a, 2 * i, 0) || nccl_case_round(&b, 2 * i + 1, i == 1))
            return -1;
    return nccl_case_close(&a) || nccl_case_close_alone(&b) ? -1 : 0;
}

/* ncclEpCreateHandle; memory of the caller's for handles; a group that ends with its handles. */
static int test_handles(void)
{
    struct tensor_pair memory = {0};
    struct nccl_case nc;
    ncclEpGroup_t group;
    ncclEpHandle_t handle;
    size_t bytes = 0;

    if (nccl_case_open_alone(&nc, &specs[HT_FLAT]) || nccl_case_route(&nc, 1) || nccl_case_round(&nc, 1, 0))
        return -1;
    group = nc.group;
    TRY(ncclEpHandleMemSize(group, FLAT, NULL, &bytes, 4));
    CHECK(bytes > 0);
    if (tensor_pair_open(&memory, group, PLAIN, EPX_UINT8, 1, (int64_t)bytes, 0, 0))
        return -1;
    TRY(ncclEpInitHandle(&handle, group, FLAT, NULL, 4, memory.tensor));
    TRY(ncclEpHandleDestroy(handle));
    memory.tensor->sizes[0] = bytes - 1;
    EXPECT(ncclInvalidArgument, ncclEpInitHandle(&handle, group, FLAT, NULL, 4, memory.tensor));
    TRY(ncclEpCreateHandle(&handle, group, FLAT, nc.idx.tensor, NULL, NULL, world.stream));
    TRY(cudaStreamSynchronize(world.stream));
    if (tensor_pair_close(&memory) || nccl_case_close(&nc))
        return -1;
    TRY(ncclEpGroupDestroy(group)); /* with the handle */
    EXPECT(ncclInvalidArgument, ncclEpHandleDestroy(handle));
    return 0;
}

int test_layouts(void)
{
    for (int i = 0; i < ROUNDS; i++)
        if (test_rounds(&specs[i]))
            return -1;
    return test_dispatch_only(&ht_fp8) || test_interleaved(&specs[LL_EXPERT]) || test_interleaved(&specs[LL_RANK]) ||
                   test_kept_routings() || test_handles()
               ? -1
               : 0;
}
