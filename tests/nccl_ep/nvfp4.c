/* SPDX-License-Identifier: Apache-2.0 */
/* NVFP4 in combine: low latency, both layouts; values that e2m1 can say come back, and what is refused. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "small.h"

#define BAD ncclInvalidArgument
#define USAGE ncclInvalidUsage

enum { HIDDEN = 512 };

static const float exact[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};

static int supported(void)
{
    int major = 0, minor = 0;

    TRY(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    TRY(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0));
    return (major == 10 && (minor == 0 || minor == 3)) || (major == 11 && minor == 0) ||
           (major == 12 && (minor == 0 || minor == 1));
}

static ncclResult_t combine(struct small *s)
{
    return ncclEpCombine(s->handle, &s->calls.cin, &s->calls.cout, &s->calls.cconfig, world.stream);
}

/* Received rows are the same values times a number that the first extent decides: one of them 0, with scale 0. */
static float factor_of(int outer)
{
    return outer == 1 ? 0.0f : (float)(1 << outer % 4);
}

static void fill_rows(struct tensor_pair *rows, struct tensor_pair *scales)
{
    const int64_t inner = rows->view.shape[1];

    for (int64_t row = 0; row < rows->view.shape[0] * inner; row++) {
        const float factor = factor_of((int)(row / inner));
        for (int h = 0; h < HIDDEN; h++)
            oracle_from_float(EPX_BF16, factor * (h % 16 ? exact[h % 8] : 6),
                              (char *)rows->view.data + 2 * (row * HIDDEN + h));
        ((float *)scales->view.data)[row] = factor > 0 ? 2688.0f / (6 * factor) : 0;
    }
}

static int check_back(const struct tensor_pair *back, int token, float factor)
{
    for (int h = 0; h < HIDDEN; h++) {
        const float got = oracle_to_float(EPX_BF16, (char *)back->view.data + 2 * (token * HIDDEN + h));
        CHECK(fabsf(got - factor * (h % 16 ? exact[h % 8] : 6)) <= 1e-3f * 6);
    }
    return 0;
}

/* A scale is missing, or has another shape or type; or the sum would have another type; or rows are too short. */
static int test_refused(struct small *s, struct tensor_pair *scales, struct tensor_pair *back)
{
    EXPECT(BAD, combine(s));
    s->calls.cin.scales = scales->tensor;
    scales->tensor->sizes[1]--;
    EXPECT(BAD, combine(s));
    scales->tensor->sizes[1]++;
    scales->tensor->datatype = ncclBfloat16;
    EXPECT(BAD, combine(s));
    scales->tensor->datatype = ncclFloat32;
    back->tensor->datatype = ncclFloat16;
    EXPECT(BAD, combine(s));
    back->tensor->datatype = ncclBfloat16;
    s->calls.cin.tokens->sizes[2] = back->tensor->sizes[1] = HIDDEN / 2; /* rows in 512s */
    EXPECT(BAD, combine(s));
    s->calls.cin.tokens->sizes[2] = back->tensor->sizes[1] = HIDDEN;
    return 0;
}

/* Expert-major: by local expert, weighted by 1/2. Rank-major: a row of each of the ranks that the token names. */
static int test_sums(struct small *s, struct tensor_pair *back, int next)
{
    const int major = s->layout == EXPERT_MAJOR, ranks = next ? 2 : 1;

    TRY(combine(s));
    if (tensor_pair_get(back))
        return -1;
    for (int t = 0; t < 2; t++)
        if (check_back(back, t,
                       major ? 0.5f * (factor_of(0) + factor_of(t == 0)) : (float)ranks * factor_of(world.rank)))
            return -1;
    return 0;
}

/* Two tokens of this rank, each to an expert of rank 0 and to one of the next rank. */
static int test_layout(ncclEpLayout_t layout)
{
    ncclEpGroupConfig_t config = small_config(LL, 0);
    const int major = layout == EXPERT_MAJOR, R = world.nranks, next = (world.rank + 1) % R;
    const int ids[] = {0, 2 * next + 1, 2 * next, 0};
    const int64_t outer = major ? 2 : R, inner = major ? (int64_t)R * SMALL_TOKENS : SMALL_TOKENS;
    struct tensor_pair tokens = {0}, rows = {0}, scales = {0}, back = {0};
    struct small s;

    config.max_token_bytes = HIDDEN * 2;
    if (small_open(&s, &config, layout, 1, 2, 0, PLAIN) || small_route(&s, ids, 2) ||
        tensor_pair_open(&tokens, s.group, PLAIN, EPX_BF16, 2, 2, HIDDEN, 0) ||
        tensor_pair_open(&rows, s.group, PLAIN, EPX_BF16, 3, outer, inner, HIDDEN) ||
        tensor_pair_open(&scales, s.group, PLAIN, EPX_FP32, 3, outer, inner, 1) ||
        tensor_pair_open(&back, s.group, PLAIN, EPX_BF16, 2, 2, HIDDEN, 0) || tensor_pair_fill(&tokens, 0))
        return -1;
    s.calls.in.tokens = tokens.tensor;
    s.calls.out.tokens = rows.tensor;
    TRY(ncclEpDispatch(s.handle, &s.calls.in, &s.calls.out, &s.calls.info, NULL, world.stream));
    TRY(cudaStreamSynchronize(world.stream));
    fill_rows(&rows, &scales);
    for (int i = 0; i < 4; i++)
        ((float *)s.weights.view.data)[i] = 0.5f;
    if (tensor_pair_put(&rows) || tensor_pair_put(&scales) || tensor_pair_put(&s.weights))
        return -1;
    s.calls.cin.tokens = rows.tensor;
    s.calls.cout.tokens = back.tensor;
    s.calls.cconfig.quant_recipe = NCCL_EP_COMB_QUANT_NVFP4;
    if (!supported()) {
        EXPECT(USAGE, combine(&s)); /* also without scales */
    } else if (test_refused(&s, &scales, &back) || test_sums(&s, &back, next)) {
        return -1;
    }
    return tensor_pair_close(&tokens) || tensor_pair_close(&rows) || tensor_pair_close(&scales) ||
                   tensor_pair_close(&back) || small_close(&s)
               ? -1
               : 0;
}

int test_nvfp4(void)
{
    return test_layout(EXPERT_MAJOR) || test_layout(RANK_MAJOR) ? -1 : 0;
}
