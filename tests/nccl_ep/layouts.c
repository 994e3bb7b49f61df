/* SPDX-License-Identifier: Apache-2.0 */
/* All layouts, both directions; staged and interleaved operations; routings that are kept, and changed. */
#include "nccl_case.h"

#include <stdio.h>

#define LL NCCL_EP_ALGO_LOW_LATENCY
#define HT NCCL_EP_ALGO_HIGH_THROUGHPUT

static const struct spec ll_expert = {.name = "ll expert-major",
                                      .algorithm = LL,
                                      .layout = NCCL_EP_LAYOUT_EXPERT_MAJOR,
                                      .dtype = EPX_BF16,
                                      .received = EPX_BF16,
                                      .counter = EPX_INT32,
                                      .alignment = 1,
                                      .topk = 3,
                                      .hidden = 256,
                                      .tokens = 17,
                                      .experts = 24};
static const struct spec ll_expert_wide = {/* more than NCCL EP's 9 experts per token, and int64 counters */
                                           .name = "ll expert-major, top-22",
                                           .algorithm = LL,
                                           .layout = NCCL_EP_LAYOUT_EXPERT_MAJOR,
                                           .dtype = EPX_FP16,
                                           .received = EPX_FP16,
                                           .counter = EPX_INT64,
                                           .alignment = 1,
                                           .topk = 22,
                                           .hidden = 72,
                                           .tokens = 5,
                                           .experts = 32,
                                           .index32 = 1,
                                           .memory = SHARED};
static const struct spec ll_rank = {.name = "ll rank-major",
                                    .algorithm = LL,
                                    .layout = NCCL_EP_LAYOUT_RANK_MAJOR,
                                    .dtype = EPX_BF16,
                                    .received = EPX_BF16,
                                    .counter = EPX_INT32,
                                    .alignment = 1,
                                    .topk = 4,
                                    .hidden = 384,
                                    .tokens = 17,
                                    .experts = 24,
                                    .memory = WINDOW};
static const struct spec ht_flat = {.name = "ht flat",
                                    .algorithm = HT,
                                    .layout = NCCL_EP_LAYOUT_FLAT,
                                    .dtype = EPX_BF16,
                                    .received = EPX_BF16,
                                    .counter = EPX_INT32,
                                    .alignment = 1,
                                    .topk = 4,
                                    .hidden = 256,
                                    .tokens = 40,
                                    .experts = 24};
static const struct spec ht_expert = {.name = "ht expert-major",
                                      .algorithm = HT,
                                      .layout = NCCL_EP_LAYOUT_EXPERT_MAJOR,
                                      .dtype = EPX_FP32,
                                      .received = EPX_FP32,
                                      .counter = EPX_INT64,
                                      .alignment = 16,
                                      .topk = 4,
                                      .hidden = 100,
                                      .tokens = 33,
                                      .experts = 20,
                                      .memory = WINDOW};
static const struct spec ll_cast = {.name = "ll cast to fp8",
                                    .algorithm = LL,
                                    .layout = NCCL_EP_LAYOUT_EXPERT_MAJOR,
                                    .dtype = EPX_BF16,
                                    .received = EPX_FP8_E4M3,
                                    .scale = EPX_FP32,
                                    .counter = EPX_INT32,
                                    .alignment = 1,
                                    .topk = 3,
                                    .hidden = 512,
                                    .tokens = 9,
                                    .experts = 16};
static const struct spec ll_cast_rounded = {.name = "ll cast to fp8, round scales",
                                            .algorithm = LL,
                                            .layout = NCCL_EP_LAYOUT_EXPERT_MAJOR,
                                            .dtype = EPX_BF16,
                                            .received = EPX_FP8_E4M3,
                                            .scale = EPX_FP32,
                                            .counter = EPX_INT32,
                                            .alignment = 1,
                                            .topk = 3,
                                            .hidden = 512,
                                            .round_scales = 1,
                                            .tokens = 9,
                                            .experts = 16};
static const struct spec ll_cast_ue8m0 = {.name = "ll cast to fp8, scales ue8m0",
                                          .algorithm = LL,
                                          .layout = NCCL_EP_LAYOUT_EXPERT_MAJOR,
                                          .dtype = EPX_BF16,
                                          .received = EPX_FP8_E4M3,
                                          .scale = EPX_UINT8,
                                          .counter = EPX_INT32,
                                          .alignment = 1,
                                          .topk = 3,
                                          .hidden = 1024,
                                          .round_scales = 1,
                                          .tokens = 9,
                                          .experts = 16};
static const struct spec ht_fp8 = {.name = "ht flat, fp8 tokens",
                                   .algorithm = HT,
                                   .layout = NCCL_EP_LAYOUT_FLAT,
                                   .dtype = EPX_FP8_E4M3,
                                   .received = EPX_FP8_E4M3,
                                   .scale = EPX_FP32,
                                   .counter = EPX_INT32,
                                   .alignment = 1,
                                   .topk = 2,
                                   .hidden = 256,
                                   .tokens = 21,
                                   .experts = 16};

/* Each routing serves several operations. */
static int run_rounds(ncclEpGroup_t group, const struct spec *spec, int topk_open)
{
    const int backward = spec->algorithm == HT && spec->received != EPX_FP8_E4M3;
    struct nccl_case nc;

    if (nccl_case_open(&nc, group, spec, topk_open))
        return -1;
    for (uint64_t seed = 1; seed <= 3; seed++)
        if (nccl_case_route(&nc, seed) || nccl_case_round(&nc, 10 * seed, 0) ||
            nccl_case_round(&nc, 10 * seed + 1, backward) || nccl_case_round(&nc, 10 * seed + 2, 0))
            return -1;
    return nccl_case_close(&nc);
}

static int test_spec(const struct spec *spec, int topk_open)
{
    ncclEpGroup_t group;

    if (group_open(&group, spec, 0, 0) || run_rounds(group, spec, topk_open))
        return -1;
    TRY(ncclEpGroupDestroy(group));
    return 0;
}

/* Fp8 tokens are summed as what their experts made of them. */
static int test_dispatch_only(const struct spec *spec)
{
    struct nccl_case nc;
    ncclEpGroup_t group;

    if (group_open(&group, spec, 0, 0) || nccl_case_open(&nc, group, spec, 1))
        return -1;
    for (uint64_t seed = 1; seed <= 2; seed++)
        if (nccl_case_route(&nc, seed) || nccl_case_dispatch(&nc, seed, 0, 0) || nccl_case_check_dispatch(&nc, 0))
            return -1;
    if (nccl_case_close(&nc))
        return -1;
    TRY(ncclEpGroupDestroy(group));
    return 0;
}

static int complete(struct nccl_case *nc, cudaStream_t stream)
{
    TRY(ncclEpComplete(nc->handle, NULL, stream));
    TRY(cudaStreamSynchronize(stream));
    return 0;
}

/* A third operation, where two are on their way. */
static int send_too_many(struct nccl_case *nc)
{
    ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
    ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    ncclEpDispatchConfig_t config = NCCL_EP_DISPATCH_CONFIG_INIT;
    ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;

    in.tokens = nc->tokens.tensor;
    out.tokens = nc->received.tensor;
    if (nc->received_weights.tensor) {
        in.topk_weights = nc->weights.tensor;
        out.topk_weights = nc->received_weights.tensor;
        out.topk_idx = nc->received_idx.tensor;
    }
    info.expert_counters = nc->expert_counters.tensor;
    info.src_rank_counters = nc->rank_counters.tensor;
    config.send_only = 1;
    EXPECT(ncclInvalidUsage, ncclEpDispatch(nc->handle, &in, &out, &info, &config, world.stream));
    return 0;
}

/* Two handles, their halves in turn; the receive halves on another stream, and in the other order. */
static int test_interleaved(const struct spec *spec)
{
    struct nccl_case a, b, c;
    ncclEpGroup_t group;
    int error = -1;

    if (group_open(&group, spec, 0, 0) || nccl_case_open(&a, group, spec, 0) || nccl_case_open(&b, group, spec, 0) ||
        nccl_case_open(&c, group, spec, 0) || nccl_case_route(&c, 77))
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
    TRY(ncclEpGetAsyncError(group, &error));
    CHECK(error == 0);
    if (nccl_case_close(&a) || nccl_case_close(&b) || nccl_case_close(&c))
        return -1;
    TRY(ncclEpGroupDestroy(group));
    return 0;
}

/* High throughput: handles with different routings and layouts of one group, used in turn without an update. */
static int test_kept_routings(void)
{
    struct spec flat = ht_flat, expert = ht_flat;
    struct nccl_case a, b;
    ncclEpGroup_t group;

    expert.name = "ht expert-major beside flat";
    expert.layout = NCCL_EP_LAYOUT_EXPERT_MAJOR;
    expert.alignment = 4;
    flat.rows = (int)most_rows(&expert); /* one limit for all tensors of a group */
    if (group_open(&group, &expert, 0, 0) || nccl_case_open(&a, group, &flat, 1) ||
        nccl_case_open(&b, group, &expert, 0) || nccl_case_route(&a, 7) || nccl_case_route(&b, 8))
        return -1;
    for (uint64_t i = 0; i < 3; i++)
        if (nccl_case_round(&a, 2 * i, 0) || nccl_case_round(&b, 2 * i + 1, i == 1))
            return -1;
    if (nccl_case_close(&a) || nccl_case_close(&b))
        return -1;
    TRY(ncclEpGroupDestroy(group));
    return 0;
}

/* A handle that gets another K at its next update; ncclEpCreateHandle; memory of the caller's for handles. */
static int test_handles(void)
{
    struct spec other = ht_flat;
    struct tensor_pair memory = {0};
    struct nccl_case nc;
    ncclEpGroup_t group;
    ncclEpHandle_t handle;
    size_t bytes = 0;

    if (group_open(&group, &ht_flat, 0, 0) || nccl_case_open(&nc, group, &ht_flat, 1) || nccl_case_route(&nc, 1) ||
        nccl_case_round(&nc, 1, 0))
        return -1;
    handle = nc.handle;
    /* The tensors of K = 2 with the handle of K = 4. */
    other.topk = 2;
    other.name = "ht flat, other K";
    struct nccl_case second;
    if (nccl_case_open(&second, group, &other, 1))
        return -1;
    ncclEpHandle_t unused = second.handle;
    second.handle = handle;
    if (nccl_case_route(&second, 2) || nccl_case_round(&second, 2, 1))
        return -1;
    second.handle = unused;
    TRY(ncclEpHandleMemSize(group, NCCL_EP_LAYOUT_FLAT, NULL, &bytes, -1));
    CHECK(bytes > 0);
    if (tensor_pair_open(&memory, group, PLAIN, EPX_UINT8, 1, (int64_t)bytes, 0, 0))
        return -1;
    TRY(ncclEpInitHandle(&handle, group, NCCL_EP_LAYOUT_FLAT, NULL, -1, memory.tensor));
    TRY(ncclEpHandleDestroy(handle));
    memory.tensor->sizes[0] = bytes - 1;
    EXPECT(ncclInvalidArgument, ncclEpInitHandle(&handle, group, NCCL_EP_LAYOUT_FLAT, NULL, -1, memory.tensor));
    TRY(ncclEpCreateHandle(&handle, group, NCCL_EP_LAYOUT_FLAT, second.idx.tensor, NULL, NULL, world.stream));
    TRY(cudaStreamSynchronize(world.stream));
    if (tensor_pair_close(&memory) || nccl_case_close(&nc) || nccl_case_close(&second))
        return -1;
    TRY(ncclEpGroupDestroy(group)); /* with the handle */
    EXPECT(ncclInvalidArgument, ncclEpHandleDestroy(handle));
    return 0;
}

int test_layouts(void)
{
    return test_spec(&ll_expert, 0) || test_spec(&ll_expert_wide, 0) || test_spec(&ll_rank, 0) ||
                   test_spec(&ht_flat, 1) || test_spec(&ht_expert, 0) || test_spec(&ll_cast, 0) ||
                   test_spec(&ll_cast_rounded, 0) || test_spec(&ll_cast_ue8m0, 0) || test_dispatch_only(&ht_fp8) ||
                   test_interleaved(&ll_expert) || test_interleaved(&ll_rank) || test_kept_routings() || test_handles()
               ? -1
               : 0;
}
