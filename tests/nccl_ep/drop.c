/* SPDX-License-Identifier: Apache-2.0 */
/* overflow_policy DROP: which rows stay, what is counted, and what the others read as. Four ranks or more: the first
 * four send their tokens to the two experts of rank 0. */
#include <stdlib.h>
#include <string.h>

#include "small.h"

enum { SENDERS = 4, BEHIND = 4, FILL = 0xab };

static int sends(void)
{
    return world.rank < SENDERS;
}

static ncclEpGroupConfig_t config_of(unsigned int T, ncclEpZeroCopyMode_t zero_copy)
{
    ncclEpGroupConfig_t c = small_config(HT, T);

    c.overflow_policy = NCCL_EP_OVERFLOW_DROP;
    c.zero_copy = zero_copy;
    return c;
}

static int counts_are(const struct small *s, int64_t total, int64_t first, int64_t second)
{
    CHECK(small_count(&s->total, 0) == (world.rank ? 0 : total));
    CHECK(small_count(&s->counts, 0) == (world.rank ? 0 : first));
    CHECK(small_count(&s->counts, 1) == (world.rank ? 0 : second));
    return 0;
}

static int offsets_are(const struct small *s, int64_t first, int64_t second)
{
    CHECK(small_count(&s->offsets, 0) == (world.rank ? 0 : first));
    CHECK(small_count(&s->offsets, 1) == (world.rank ? 0 : second));
    return 0;
}

/* Rows behind max_recv_tokens_per_rank are the caller's. */
static int behind_is_untouched(const struct small *s, int64_t T)
{
    for (int64_t row = T; row < s->rows; row++)
        CHECK(small_row_is(&s->out, row, FILL) && small_row_is(&s->out_weights, row, FILL));
    return 0;
}

/* Phantom rows: alignment 4, T = 8; tokens 0, 1 to expert 0, tokens 2, 3 to expert 1. Tokens of ranks 2
 * and 3 are beyond the first 8, so that their rows of expert 0 read as zero. */
static int test_phantom_rows(void)
{
    const ncclEpGroupConfig_t config = config_of(8, NCCL_EP_ZERO_COPY_AUTO);
    const int ids[] = {0, 0, 1, 1};
    struct small s;

    if (small_open(&s, &config, EXPERT_MAJOR, 4, 1, 8 + BEHIND, PLAIN))
        return -1;
    for (int round = 0; round < 3; round++) {
        if (small_route(&s, ids, sends() ? 4 : 0) || counts_are(&s, 16, 8, 0) || offsets_are(&s, 0, 8) ||
            small_dispatch(&s, FILL) || behind_is_untouched(&s, 8))
            return -1;
        for (int row = 0; row < 8; row++) {
            const int kept = world.rank == 0 && row < 4;
            CHECK(small_row(&s.out, row) == (kept ? small_value(row / 2, row % 2) : 0));
            CHECK(((float *)s.out_weights.view.data)[row] == (kept ? 1.0f / (float)(1 + row % 2) : 0));
        }
        if (small_combine(&s, 0xcd))
            return -1;
        for (int t = 0; t < (sends() ? 4 : 0); t++)
            CHECK(small_row(&s.back, t) == (world.rank < 2 && t < 2 ? small_value(world.rank, t) : 0));
    }
    return small_close(&s);
}

static int fill(struct tensor_pair *const *pairs, int n, int byte)
{
    for (int i = 0; i < n; i++)
        if (tensor_pair_fill(pairs[i], byte))
            return -1;
    return 0;
}

/* The same with scales, which recipe FWD forwards: those of phantom rows, and of rows without a zone, are zero too. */
static int test_phantom_scales(void)
{
    ncclEpGroupConfig_t config = config_of(8, NCCL_EP_ZERO_COPY_AUTO);
    const int ids[] = {0, 0, 1, 1}, sent = 0x10 + world.rank;
    struct tensor_pair tokens = {0}, scales = {0}, out = {0}, out_scales = {0};
    struct tensor_pair *const received[] = {&out, &out_scales};
    struct small s;

    config.max_token_bytes = 64;
    if (small_open(&s, &config, EXPERT_MAJOR, 4, 1, 8 + BEHIND, PLAIN) ||
        tensor_pair_open(&tokens, s.group, PLAIN, EPX_FP8_E4M3, 2, 4, 32, 0) ||
        tensor_pair_open(&scales, s.group, PLAIN, EPX_UINT8, 2, 4, 32, 0) ||
        tensor_pair_open(&out, s.group, PLAIN, EPX_FP8_E4M3, 2, s.rows, 32, 0) ||
        tensor_pair_open(&out_scales, s.group, PLAIN, EPX_UINT8, 2, s.rows, 32, 0) || tensor_pair_fill(&tokens, sent) ||
        tensor_pair_fill(&scales, 0x80 + sent) || small_route(&s, ids, sends() ? 4 : 0))
        return -1;
    tokens.tensor->sizes[0] = scales.tensor->sizes[0] = sends() ? 4 : 0;
    s.calls.in.tokens = tokens.tensor;
    s.calls.in.scales = scales.tensor;
    s.calls.out.tokens = out.tensor;
    s.calls.out.scales = out_scales.tensor;
    s.calls.config.quant_recipe = NCCL_EP_DISP_QUANT_FWD;
    for (int round = 0; round < 2; round++) {
        if (fill(received, 2, FILL) || small_dispatch(&s, FILL) || tensor_pair_get(&out) ||
            tensor_pair_get(&out_scales))
            return -1;
        for (int row = 0; row < 8 + BEHIND; row++) {
            const int kept = world.rank == 0 && row < 4, from = 0x10 + row / 2;
            CHECK(small_row_is(&out, row, row >= 8 ? FILL : kept ? from : 0));
            CHECK(small_row_is(&out_scales, row, row >= 8 ? FILL : kept ? 0x80 + from : 0));
        }
    }
    return tensor_pair_close(&tokens) || tensor_pair_close(&scales) || tensor_pair_close(&out) ||
                   tensor_pair_close(&out_scales) || small_close(&s)
               ? -1
               : 0;
}

/* Alignment 16, T = 16: even tokens to expert 0, odd to expert 1: 8 rows each, padded to 32 in all. */
static int test_aligned(void)
{
    const ncclEpGroupConfig_t config = config_of(16, NCCL_EP_ZERO_COPY_OFF);
    const int ids[] = {0, 1, 0, 1};
    struct small s;

    if (small_open(&s, &config, EXPERT_MAJOR, 16, 1, 16 + BEHIND, PLAIN) || small_route(&s, ids, sends() ? 4 : 0) ||
        counts_are(&s, 32, 16, 0) || offsets_are(&s, 0, 16) || small_dispatch(&s, FILL) || behind_is_untouched(&s, 16))
        return -1;
    for (int row = 0; row < 16; row++)
        CHECK(small_row(&s.out, row) == (world.rank == 0 && row < 8 ? small_value(row / 2, row % 2 * 2) : 0));
    if (small_combine(&s, 0xcd))
        return -1;
    for (int t = 0; t < (sends() ? 4 : 0); t++)
        CHECK(small_row(&s.back, t) == (t % 2 ? 0 : small_value(world.rank, t)));
    return small_close(&s);
}

/* zero_copy ON: tensors have windows, and only rows from T on are dropped, whatever the number of tokens. */
static int test_windows(void)
{
    const ncclEpGroupConfig_t config = config_of(8, NCCL_EP_ZERO_COPY_ON);
    const int ids[] = {0, 0, 1, 1};
    struct small s;

    if (small_open(&s, &config, EXPERT_MAJOR, 4, 1, 8 + BEHIND, WINDOW) || small_route(&s, ids, sends() ? 4 : 0) ||
        counts_are(&s, 16, 8, 0) || offsets_are(&s, 0, 8) || small_dispatch(&s, FILL) || behind_is_untouched(&s, 8))
        return -1;
    for (int row = 0; row < 8 && world.rank == 0; row++)
        CHECK(small_row(&s.out, row) == small_value(row / 2, row % 2));
    if (small_combine(&s, 0xcd))
        return -1;
    for (int t = 0; t < (sends() ? 4 : 0); t++)
        CHECK(small_row(&s.back, t) == (t < 2 ? small_value(world.rank, t) : 0));
    return small_close(&s);
}

/* FLAT keeps the first T rows: those of ranks 0 and 1. Counts per expert are of rows that stay, the total of all. */
static int test_flat(void)
{
    const ncclEpGroupConfig_t config = config_of(8, NCCL_EP_ZERO_COPY_AUTO);
    const int ids[] = {0, 1, 0, 0};
    struct small s;

    if (small_open(&s, &config, FLAT, 1, 1, 8 + BEHIND, PLAIN))
        return -1;
    for (int round = 0; round < 2; round++) {
        if (small_route(&s, ids, sends() ? 4 : 0) || counts_are(&s, 16, 6, 2) || small_dispatch(&s, FILL) ||
            behind_is_untouched(&s, 8))
            return -1;
        for (int row = 0; row < 8; row++) {
            CHECK(world.rank || small_row(&s.out, row) == small_value(row / 4, row % 4));
            CHECK(small_count(&s.out_idx, row) == (world.rank ? -1 : ids[row % 4]));
        }
        if (small_combine(&s, 0xcd))
            return -1;
        for (int t = 0; t < (sends() ? 4 : 0); t++)
            CHECK(small_row(&s.back, t) == (world.rank < 2 ? small_value(world.rank, t) : 0));
    }
    return small_close(&s);
}

/* A token of two ranks is dropped at one of them only; nothing is dropped where there is room. */
static int test_flat_of_two(void)
{
    const ncclEpGroupConfig_t config = config_of(8, NCCL_EP_ZERO_COPY_AUTO);
    const int ids[] = {0, 2, 1, 3, 2, 0, -1, 1}; /* K = 2: of ranks 0 and 1, or of rank 0 alone */
    struct small s;

    if (small_open(&s, &config, FLAT, 1, 2, 8, PLAIN) || small_route(&s, ids, sends() ? 4 : 0))
        return -1;
    CHECK(small_count(&s.total, 0) == (world.rank == 0 ? 16 : world.rank == 1 ? 12 : 0));
    if (small_dispatch(&s, FILL) || small_combine(&s, 0xcd))
        return -1;
    for (int t = 0; t < (sends() ? 4 : 0); t++) {
        const int to_first = 4 * world.rank + t < 8, to_second = t < 3 && 3 * world.rank + t < 8;
        CHECK(small_row(&s.back, t) == small_value(world.rank, t) * (float)(to_first + to_second));
    }
    return small_close(&s);
}

/* The backward pass follows the routing with what it dropped: weights of dropped rows come back as 0. */
static int test_backward(ncclEpLayout_t layout)
{
    const ncclEpGroupConfig_t config = config_of(8, NCCL_EP_ZERO_COPY_AUTO);
    const int ids[] = {0, 0, 0, 0};
    struct small s;

    if (small_open(&s, &config, layout, 1, 1, 8, PLAIN) || small_route(&s, ids, sends() ? 4 : 0) ||
        small_dispatch(&s, FILL))
        return -1;
    small_calls(&s, 1);
    if (small_combine(&s, 0xcd))
        return -1;
    for (int t = 0; t < (sends() ? 4 : 0); t++)
        CHECK(((float *)s.back_weights.view.data)[t] == (world.rank < 2 ? 1.0f / (float)(1 + t) : 0));
    return small_close(&s);
}

/* With T rows demanded, T - 1 are refused; DROP without T is refused; LL ignores the policy. */
static int test_refused(void)
{
    ncclEpGroupConfig_t config = config_of(0, NCCL_EP_ZERO_COPY_AUTO);
    const int ids[] = {0, 0, 1, 1};
    ncclEpGroup_t group;
    struct small s;

    EXPECT(ncclInvalidUsage, ncclEpCreateGroup(&group, world.comm, &config));
    CHECK(group == NULL);
    for (int major = 0; major < 2; major++) {
        config = config_of(8, NCCL_EP_ZERO_COPY_AUTO);
        if (small_open(&s, &config, major ? EXPERT_MAJOR : FLAT, 1, 1, 8, PLAIN) || small_route(&s, ids, 4))
            return -1;
        s.out.tensor->sizes[0] = 7;
        EXPECT(ncclInvalidArgument,
               ncclEpDispatch(s.handle, &s.calls.in, &s.calls.out, NULL, &s.calls.config, world.stream));
        s.out.tensor->sizes[0] = 8;
        if (small_close(&s))
            return -1;
    }
    config = small_config(LL, 0);
    config.overflow_policy = NCCL_EP_OVERFLOW_DROP;
    return small_open(&s, &config, EXPERT_MAJOR, 1, 1, 0, PLAIN) || small_close(&s) ? -1 : 0;
}

/* TRAP, which is also what AUTO means: 16 rows for T = 8. NVIDIA's traps the device of the rank that has no room. Here
 * its dispatch is refused with both numbers and writes nothing. The others name it, long before their deadline. Where
 * the dispatch is issued before the update has run (`early`), they learn of it when the rank asks for errors, or by the
 * combine that it is refused. */
static int test_trap(ncclEpOverflowPolicy_t policy, int early)
{
    ncclEpGroupConfig_t config = config_of(8, NCCL_EP_ZERO_COPY_AUTO);
    const int ids[] = {0, 0, 1, 1};
    ncclResult_t result;
    struct small s;
    int error = 0;

    config.overflow_policy = policy;
    config.timeout_ns = 600000000000u; /* as long as to fail the test */
    if (small_open(&s, &config, FLAT, 1, 1, 8, PLAIN) || small_route(&s, ids, sends() ? 4 : 0) ||
        tensor_pair_fill(&s.out, FILL))
        return -1;
    if (early)
        TRY(ncclEpUpdateHandle(s.handle, s.idx.tensor, &s.calls.info, world.stream));
    result = ncclEpDispatch(s.handle, &s.calls.in, &s.calls.out, &s.calls.info, &s.calls.config, world.stream);
    if (world.rank == 0) {
        const int refused = result == ncclInvalidArgument;
        CHECK(refused || (early && result == ncclSuccess));
        CHECK(!refused || strstr(ncclEpxGetLastError(), "16 rows are needed"));
        CHECK(!refused || strstr(ncclEpxGetLastError(), "got 8"));
        TRY(cudaStreamSynchronize(world.stream));
        TRY(ncclEpxGetAsyncError(s.group, &error));
        CHECK(error);
        CHECK(!refused || (!tensor_pair_get(&s.out) && small_row_is(&s.out, 0, FILL)));
        return small_close(&s);
    }
    CHECK(result == ncclSuccess || result == ncclRemoteError); /* rank 0 may have been quicker */
    TRY(cudaStreamSynchronize(world.stream));
    if (early) { /* the dispatch may have ended well */
        result = ncclEpCombine(s.handle, &s.calls.cin, &s.calls.cout, &s.calls.cconfig, world.stream);
        CHECK(result == ncclSuccess || result == ncclRemoteError);
        TRY(cudaStreamSynchronize(world.stream));
    }
    CHECK(ncclEpUpdateHandle(s.handle, s.idx.tensor, NULL, world.stream) == ncclRemoteError);
    CHECK(strstr(ncclEpxGetLastError(), "rank 0 failed (a receive tensor is too small)") != NULL);
    return small_close(&s);
}

int test_drop(void)
{
    CHECK(world.nranks >= SENDERS);
    return test_phantom_rows() || test_phantom_scales() || test_aligned() || test_windows() || test_flat() ||
                   test_flat_of_two() || test_backward(FLAT) || test_backward(EXPERT_MAJOR) || test_refused() ||
                   test_trap(NCCL_EP_OVERFLOW_AUTO, 0) || test_trap(NCCL_EP_OVERFLOW_TRAP, 1)
               ? -1
               : 0;
}
