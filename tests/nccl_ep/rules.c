/* SPDX-License-Identifier: Apache-2.0 */
/* The rules of NCCL EP that are about single arguments and rows: structs of other versions, and rules A to H of the
 * interface as docs/nccl_rules.md lists them. */
#include <stdlib.h>
#include <string.h>

#include "small.h"

#define BAD ncclInvalidArgument
#define USAGE ncclInvalidUsage

/* Structs grow at their end: shorter than version 1 is refused, a longer one's tail is ignored. */
static int test_struct_sizes(void)
{
    const size_t sizes[10] = {1, 2, 3, 4, 5, 0, 7, 8, 9, 10};
    struct {
        ncclEpGroupConfig_t config;
        unsigned char tail[64];
    } longer = {small_config(LL, 0), {0}};
    struct {
        ncclEpTensorAllocConfig_t config;
        unsigned int tail[4];
    } alloc = {NCCL_EP_TENSOR_ALLOC_CONFIG_INIT, {1, 2, 3, 4}};
    ncclEpGroupConfig_t first = small_config(HT, 32), second = first;
    ncclEpTensor_t *tensor = NULL;
    ncclEpGroup_t group;

    memset(longer.tail, 0xff, sizeof(longer.tail));
    longer.config.size = sizeof(longer);
    longer.config.version = 7; /* never a reason to fail */
    TRY(ncclEpCreateGroup(&group, world.comm, &longer.config));
    TRY(ncclEpGroupDestroy(group));
    /* Of version 1: what is behind its 96 bytes is not looked at. */
    first.version = 1;
    first.size = NCCL_EP_GROUP_CONFIG_V1_SIZE;
    first.zero_copy = (ncclEpZeroCopyMode_t)99;
    first.overflow_policy = (ncclEpOverflowPolicy_t)99;
    first.num_topk = 99;
    TRY(ncclEpCreateGroup(&group, world.comm, &first));
    TRY(ncclEpGroupDestroy(group));
    first.size = NCCL_EP_GROUP_CONFIG_V1_SIZE + 4; /* ends behind zero_copy */
    EXPECT(BAD, ncclEpCreateGroup(&group, world.comm, &first));
    /* Of version 2, the same; of version 3 the numbers of SMs count, where there is a GPU. */
    second.version = 2;
    second.size = NCCL_EP_GROUP_CONFIG_V2_SIZE;
    second.dispatch_num_sms = second.combine_num_sms = 1u << 30;
    TRY(ncclEpCreateGroup(&group, world.comm, &second));
    TRY(ncclEpGroupDestroy(group));
    second.size = NCCL_EP_GROUP_CONFIG_V3_SIZE;
    second.dispatch_num_sms = 2;
    second.combine_num_sms = 4;
    TRY(ncclEpCreateGroup(&group, world.comm, &second));
    TRY(ncclEpGroupDestroy(group));
    alloc.config.size = sizeof(alloc);
    TRY(ncclEpTensorAlloc(&tensor, 10, (ncclDataType_t)77, sizes, &alloc.config)); /* G: any number, zero, any type */
    CHECK(tensor->ndim == 10 && tensor->sizes[9] == 10 && tensor->magic == 0xBEEFBEEFu);
    TRY(ncclEpTensorDestroy(tensor));
    alloc.config.size = 7;
    EXPECT(BAD, ncclEpTensorAlloc(&tensor, 1, ncclFloat32, sizes, &alloc.config));
    CHECK(tensor == NULL);
    return 0;
}

/* Every struct of a call, as a newer caller has it: what lies behind the fields that are known is not looked at. */
struct newer {
    struct {
        ncclEpHandleConfig_t config;
        unsigned char tail[40];
    } handle;
    struct {
        ncclEpCompleteConfig_t config;
        unsigned char tail[40];
    } complete;
    struct {
        ncclEpTensor_t tensor;
        unsigned char tail[48];
    } tokens;
};

/* The ABI, both ways, in every call: version 1's sizes with nonsense in the fields that it did not have, then sizes
 * beyond this library's. One byte less than version 1 is refused. */
static int test_sizes_of_calls(ncclEpAlgorithm_t algorithm, ncclEpLayout_t layout)
{
    const ncclEpGroupConfig_t config = small_config(algorithm, algorithm == HT ? 32 : 0);
    const int to = 2 * world.rank, ids[] = {to, to + 1, to, to + 1};
    enum { NEWER = 96 };
    struct newer n;
    ncclEpHandle_t handle;
    struct small s;

    memset(&n, 0xb7, sizeof(n));
    if (small_open(&s, &config, layout, 1, 1, 32, PLAIN) || small_route(&s, ids, 4))
        return -1;
    for (int t = 0; t < SMALL_TOKENS; t++) /* low latency's EXPERT_MAJOR reads them */
        ((float *)s.weights.view.data)[t] = 1;
    if (tensor_pair_put(&s.weights))
        return -1;
    s.calls.cin.size = NCCL_EP_COMBINE_INPUTS_V1_SIZE;
    s.calls.cin.scales = (ncclEpTensor_t *)(uintptr_t)0xb7b7b7b0;
    s.calls.cconfig.size = NCCL_EP_COMBINE_CONFIG_V1_SIZE;
    s.calls.cconfig.quant_recipe = (ncclEpCombQuant_t)99;
    s.calls.config.size = NCCL_EP_DISPATCH_CONFIG_V1_SIZE;
    s.calls.config.quant_recipe = (ncclEpDispQuant_t)99;
    s.calls.info.size = NCCL_EP_LAYOUT_INFO_V1_SIZE;
    s.calls.info.recv_topk_idx_kind = (ncclEpExpertIdKind_t)99;
    if (small_there_and_back(&s))
        return -1;
    s.calls.cin.size--;
    EXPECT(BAD, ncclEpCombine(s.handle, &s.calls.cin, &s.calls.cout, NULL, world.stream));
    s.calls.cin.size++, s.calls.cconfig.size--;
    EXPECT(BAD, ncclEpCombine(s.handle, &s.calls.cin, &s.calls.cout, &s.calls.cconfig, world.stream));
    s.calls.config.size--;
    EXPECT(BAD, ncclEpDispatch(s.handle, &s.calls.in, &s.calls.out, &s.calls.info, &s.calls.config, world.stream));
    small_calls(&s, 0);
    n.tokens.tensor = *s.tokens.tensor;
    n.tokens.tensor.magic = NCCL_EP_TENSOR_MAGIC;
    n.tokens.tensor.size = sizeof(n.tokens);
    s.calls.in.tokens = &n.tokens.tensor;
    s.calls.in.size = s.calls.out.size = s.calls.config.size = s.calls.info.size = NEWER;
    s.calls.cin.size = s.calls.cout.size = s.calls.cconfig.size = NEWER; /* their tails are the structs behind them */
    n.handle.config = (ncclEpHandleConfig_t)NCCL_EP_HANDLE_CONFIG_INIT;
    n.handle.config.size = sizeof(n.handle);
    n.complete.config = (ncclEpCompleteConfig_t)NCCL_EP_COMPLETE_CONFIG_INIT;
    n.complete.config.size = sizeof(n.complete);
    if (small_there_and_back(&s))
        return -1;
    TRY(ncclEpComplete(s.handle, &n.complete.config, world.stream));
    n.complete.config.size = NCCL_EP_COMPLETE_CONFIG_V1_SIZE - 1;
    EXPECT(BAD, ncclEpComplete(s.handle, &n.complete.config, world.stream));
    TRY(ncclEpInitHandle(&handle, s.group, layout, &n.handle.config, 1, NULL));
    TRY(ncclEpHandleDestroy(handle));
    /* A tensor of ncclEpTensorAlloc with other sizes than its own is none. */
    s.calls.in.tokens = s.tokens.tensor;
    size_t *const own = s.tokens.tensor->sizes;
    size_t other[2] = {4, SMALL_HIDDEN};
    s.tokens.tensor->sizes = other;
    EXPECT(BAD, ncclEpDispatch(s.handle, &s.calls.in, &s.calls.out, &s.calls.info, NULL, world.stream));
    s.tokens.tensor->sizes = own;
    return small_close(&s);
}

/* G: only what ncclEpTensorAlloc gave, as it gave it, is destroyed. E: nothing is a thing to destroy. */
static int test_destroy(void)
{
    size_t own[1] = {3}, *given;
    ncclEpTensor_t stack = NCCL_EP_TENSOR_INIT, *tensor;

    stack.sizes = own;
    stack.ndim = 1;
    EXPECT(BAD, ncclEpTensorDestroy(&stack));
    TRY(ncclEpTensorAlloc(&tensor, 1, ncclFloat32, own, NULL));
    given = tensor->sizes;
    tensor->sizes = own;
    EXPECT(BAD, ncclEpTensorDestroy(tensor));
    tensor->sizes = given;
    TRY(ncclEpTensorDestroy(tensor));
    TRY(ncclEpTensorDestroy(NULL));
    TRY(ncclEpHandleDestroy(NULL));
    TRY(ncclEpGroupDestroy(NULL));
    return 0;
}

/* A bad layout_info leaves no handle; one of version 1 has no kind of ids. */
static int test_layout_info(void)
{
    const ncclEpGroupConfig_t config = small_config(HT, 32);
    const int ids[] = {0, 0, 0, 0};
    ncclEpHandle_t handle = (ncclEpHandle_t)(void *)&config;
    struct small s;

    if (small_open(&s, &config, FLAT, 1, 1, 32, PLAIN))
        return -1;
    s.calls.info.size = NCCL_EP_LAYOUT_INFO_V1_SIZE - 1;
    EXPECT(BAD, ncclEpCreateHandle(&handle, s.group, FLAT, s.idx.tensor, &s.calls.info, NULL, world.stream));
    CHECK(handle == NULL);
    s.calls.info.size = NCCL_EP_LAYOUT_INFO_V1_SIZE;
    s.calls.info.recv_topk_idx_kind = (ncclEpExpertIdKind_t)9;
    if (small_route(&s, ids, 1) || small_dispatch(&s, 0))
        return -1;
    /* A size that ends inside a field: its first bytes are taken, here of the recipe NONE. */
    s.calls.config.size = NCCL_EP_DISPATCH_CONFIG_V1_SIZE + 1;
    s.calls.config.quant_recipe = (ncclEpDispQuant_t)0x100;
    if (small_dispatch(&s, 0))
        return -1;
    s.calls.info.size = NCCL_EP_LAYOUT_INFO_SIZE;
    EXPECT(BAD, ncclEpDispatch(s.handle, &s.calls.in, &s.calls.out, &s.calls.info, NULL, world.stream));
    return small_close(&s);
}

/* High throughput's counters may be longer than what is written: the rest stays as it was. */
static int test_long_counters(ncclEpLayout_t layout)
{
    const ncclEpGroupConfig_t config = small_config(HT, 32);
    const int ids[] = {1, 1}, rows = world.rank == 0 ? 2 * world.nranks : 0;
    struct tensor_pair counts = {0}, offsets = {0}, total = {0};
    struct small s;

    if (small_open(&s, &config, layout, 1, 1, 32, PLAIN) ||
        tensor_pair_open(&counts, s.group, PLAIN, EPX_INT32, 1, s.local + 3, 0, 0) ||
        tensor_pair_open(&offsets, s.group, PLAIN, EPX_INT32, 1, s.local + 1, 0, 0) ||
        tensor_pair_open(&total, s.group, PLAIN, EPX_INT32, 1, 2, 0, 0) || tensor_pair_fill(&counts, 0x5a) ||
        tensor_pair_fill(&offsets, 0x5a) || tensor_pair_fill(&total, 0x5a))
        return -1;
    s.calls.info.expert_counters = counts.tensor;
    s.calls.info.expert_offsets = layout == EXPERT_MAJOR ? offsets.tensor : NULL;
    s.calls.info.recv_total_counter = total.tensor;
    if (small_route(&s, ids, 2) || tensor_pair_get(&counts) || tensor_pair_get(&offsets) || tensor_pair_get(&total))
        return -1;
    CHECK(small_count(&counts, 0) == 0 && small_count(&counts, 1) == rows && small_count(&counts, 2) == 0x5a5a5a5a);
    CHECK(small_count(&offsets, s.local) == 0x5a5a5a5a);
    CHECK(small_count(&total, 0) == rows && small_count(&total, 1) == 0x5a5a5a5a);
    if (tensor_pair_close(&counts) || tensor_pair_close(&offsets) || tensor_pair_close(&total))
        return -1;
    return small_close(&s);
}

/* A tensor that no call takes. */
static ncclEpTensor_t no_tensor(void)
{
    static size_t sizes[1] = {1};
    ncclEpTensor_t nonsense = NCCL_EP_TENSOR_INIT;

    nonsense.size = 3;
    nonsense.sizes = sizes;
    return nonsense;
}

/* Low latency looks at one tensor of layout_info, the counters of its layout: not at offsets and total. Its combine
 * looks at no inputs.topk_weights, and RANK_MAJOR's at no outputs.topk_weights. */
static int test_low_latency_ignores(ncclEpLayout_t layout)
{
    const ncclEpGroupConfig_t config = small_config(LL, 0);
    const int to = 2 * world.rank, ids[] = {to, to + 1, to, to + 1};
    ncclEpTensor_t nonsense = no_tensor();
    struct small s;

    if (small_open(&s, &config, layout, 1, 1, 0, PLAIN) || small_route(&s, ids, 4))
        return -1;
    for (int t = 0; t < SMALL_TOKENS; t++) /* EXPERT_MAJOR reads them */
        ((float *)s.weights.view.data)[t] = 1;
    if (tensor_pair_put(&s.weights))
        return -1;
    s.calls.info.expert_offsets = s.calls.info.recv_total_counter = &nonsense;
    s.calls.cin.topk_weights = &nonsense;
    if (layout == RANK_MAJOR)
        s.calls.cout.topk_weights = &nonsense;
    return small_there_and_back(&s) || small_close(&s) ? -1 : 0;
}

/* Zones, their offsets and their alignment are high throughput's EXPERT_MAJOR's: others do not look at either. */
static int test_zones_ignored(ncclEpAlgorithm_t algorithm, ncclEpLayout_t layout)
{
    const ncclEpGroupConfig_t config = small_config(algorithm, algorithm == HT ? 32 : 0);
    const int to = 2 * world.rank, ids[] = {to, to + 1, to, to + 1};
    ncclEpTensor_t nonsense = no_tensor();
    size_t bytes[2] = {0, 0};
    ncclEpHandleConfig_t odd = NCCL_EP_HANDLE_CONFIG_INIT;
    struct small s;

    odd.dispatch_output_per_expert_alignment = 12;
    if (small_open(&s, &config, layout, 12, 1, 32, PLAIN))
        return -1;
    TRY(ncclEpHandleMemSize(s.group, layout, NULL, &bytes[0], 1));
    TRY(ncclEpHandleMemSize(s.group, layout, &odd, &bytes[1], 1));
    CHECK(bytes[0] == bytes[1]);
    s.calls.info.expert_offsets = &nonsense;
    for (int t = 0; t < SMALL_TOKENS; t++)
        ((float *)s.weights.view.data)[t] = 1;
    if (tensor_pair_put(&s.weights) || small_route(&s, ids, 4) || small_there_and_back(&s))
        return -1;
    if (algorithm == HT) /* no padding: 4 rows of 2 experts */
        CHECK(small_count(&s.total, 0) == 4 && small_count(&s.counts, 0) == 2);
    return small_close(&s);
}

/* A recipe is checked before anything else of the call: what it refuses is InvArg also where the direction is
 * InvUse. */
static int test_recipe_first(void)
{
    const ncclEpGroupConfig_t config = small_config(LL, 0);
    const int ids[] = {0, 0, 0, 0};
    struct small s;

    if (small_open(&s, &config, EXPERT_MAJOR, 1, 1, 0, PLAIN) || small_route(&s, ids, 4))
        return -1;
    s.calls.config.pass_direction = s.calls.cconfig.pass_direction = NCCL_EP_BWD_PASS;
    EXPECT(USAGE, ncclEpDispatch(s.handle, &s.calls.in, &s.calls.out, &s.calls.info, &s.calls.config, world.stream));
    EXPECT(USAGE, ncclEpCombine(s.handle, &s.calls.cin, &s.calls.cout, &s.calls.cconfig, world.stream));
    s.calls.config.quant_recipe = (ncclEpDispQuant_t)3;
    s.calls.cconfig.quant_recipe = (ncclEpCombQuant_t)3;
    EXPECT(BAD, ncclEpDispatch(s.handle, &s.calls.in, &s.calls.out, &s.calls.info, &s.calls.config, world.stream));
    EXPECT(BAD, ncclEpCombine(s.handle, &s.calls.cin, &s.calls.cout, &s.calls.cconfig, world.stream));
    return small_close(&s);
}

/* A: high throughput's dispatch does not look at the tensors of layout_info, whatever they are, but in EXPERT_MAJOR at
 * two counters (counts.c). B: nor its forward combine at outputs.topk_weights; inputs' are refused. */
static int test_ignored(ncclEpLayout_t layout)
{
    const ncclEpGroupConfig_t config = small_config(HT, 32);
    const int ids[] = {0, 1, 2, 3};
    ncclEpTensor_t nonsense = no_tensor();
    struct small s;

    if (small_open(&s, &config, layout, 1, 1, 32, PLAIN) || small_route(&s, ids, 4))
        return -1;
    s.calls.info.src_rank_counters = s.calls.info.expert_offsets = &nonsense;
    if (layout == FLAT)
        s.calls.info.expert_counters = s.calls.info.recv_total_counter = &nonsense;
    s.calls.cout.topk_weights = &nonsense;
    if (small_there_and_back(&s))
        return -1;
    s.calls.info.recv_total_counter = &nonsense;
    if (layout == EXPERT_MAJOR)
        EXPECT(BAD, ncclEpDispatch(s.handle, &s.calls.in, &s.calls.out, &s.calls.info, NULL, world.stream));
    s.calls.cin.topk_weights = s.out_weights.tensor;
    EXPECT(BAD, ncclEpCombine(s.handle, &s.calls.cin, &s.calls.cout, NULL, world.stream));
    return small_close(&s);
}

/* C: all K weights arrive in rank-major, exactly. The sentinel: topk_idx is -1 in every entry that is not an expert of
 * this rank, also in rows that did not come, with and without counters. Weights of such rows stay as they were. */
static int test_rank_major(int counters, int tokens)
{
    const ncclEpGroupConfig_t config = small_config(LL, 0);
    const int to = (world.rank + 1) % world.nranks;
    const int ids[] = {2 * to, -1, -1, 2 * to + 1, 2 * to + 1, 2 * to, -1, -1};
    const int from = (world.rank + world.nranks - 1) % world.nranks;
    struct small s;

    if (small_open(&s, &config, RANK_MAJOR, 1, 2, 0, PLAIN))
        return -1;
    s.calls.info.src_rank_counters = counters ? s.rank_counts.tensor : NULL;
    if (!tokens) /* an empty tensor needs no memory */
        s.idx.tensor->data = s.tokens.tensor->data = s.weights.tensor->data = NULL;
    if (small_route(&s, ids, tokens) || small_dispatch(&s, 0x5a))
        return -1;
    for (int r = 0; r < world.nranks; r++) {
        const int rows = r == from ? (tokens < 3 ? tokens : 3) : 0;
        CHECK(!counters || small_count(&s.rank_counts, r) == rows);
        for (int t = 0; t < SMALL_TOKENS; t++)
            for (int k = 0; k < 2; k++) {
                const int64_t at = ((int64_t)r * SMALL_TOKENS + t) * 2 + k;
                const int global = t < rows ? ids[2 * t + k] : -1;
                CHECK(small_count(&s.out_idx, at) == (global < 0 ? -1 : global % 2));
                CHECK(t >= rows || ((float *)s.out_weights.view.data)[at] == 1.0f / (float)(1 + k + t));
            }
        for (int t = rows; t < SMALL_TOKENS; t++)
            CHECK(small_row_is(&s.out, (int64_t)r * SMALL_TOKENS + t, 0x5a) &&
                  small_row_is(&s.out_weights, (int64_t)r * SMALL_TOKENS + t, 0x5a));
    }
    /* expert_counters is refused, layout_info may be NULL. */
    s.calls.info.expert_counters = s.counts.tensor;
    EXPECT(BAD, ncclEpDispatch(s.handle, &s.calls.in, &s.calls.out, &s.calls.info, NULL, world.stream));
    TRY(ncclEpDispatch(s.handle, &s.calls.in, &s.calls.out, NULL, NULL, world.stream));
    TRY(cudaStreamSynchronize(world.stream));
    return small_close(&s);
}

/* Global ids, of dispatch's layout_info and not of the update's. */
static int test_global_ids(ncclEpAlgorithm_t algorithm)
{
    const ncclEpGroupConfig_t config = small_config(algorithm, algorithm == HT ? 32 : 0);
    const int ids[] = {2 * world.rank + 1};
    struct small s;

    if (small_open(&s, &config, algorithm == LL ? RANK_MAJOR : FLAT, 1, 1, 32, PLAIN))
        return -1;
    s.calls.info.recv_topk_idx_kind = NCCL_EP_EXPERT_ID_GLOBAL;
    if (small_route(&s, ids, 1))
        return -1;
    for (int kind = NCCL_EP_EXPERT_ID_AUTO; kind <= NCCL_EP_EXPERT_ID_GLOBAL; kind++) {
        const int64_t row = algorithm == LL ? (int64_t)world.rank * SMALL_TOKENS : 0;
        s.calls.info.recv_topk_idx_kind = (ncclEpExpertIdKind_t)kind;
        if (small_dispatch(&s, 0x5a))
            return -1;
        CHECK(small_count(&s.out_idx, row) == (kind == NCCL_EP_EXPERT_ID_GLOBAL ? ids[0] : 1));
        CHECK(small_count(&s.out_idx, row + 1) == -1);
    }
    return small_close(&s);
}

/* H: behind the last row, weights are 0 and ids -1, up to max_recv_tokens_per_rank and no further. */
static int test_tail(ncclEpLayout_t layout)
{
    const ncclEpGroupConfig_t config = small_config(HT, 32);
    const int ids[] = {2 * world.rank, 2 * world.rank + 1};
    struct small s;

    if (small_open(&s, &config, layout, 1, 1, 36, PLAIN) || small_route(&s, ids, 2) || small_dispatch(&s, 0x5a))
        return -1;
    CHECK(small_count(&s.total, 0) == 2);
    for (int row = 2; row < 32; row++) {
        CHECK(((float *)s.out_weights.view.data)[row] == 0);
        CHECK(layout == EXPERT_MAJOR || small_count(&s.out_idx, row) == -1);
    }
    for (int row = 32; row < 36; row++)
        CHECK(small_row_is(&s.out, row, 0x5a) && small_row_is(&s.out_weights, row, 0x5a));
    if (layout == FLAT) { /* weights and ids have as many rows */
        s.out_idx.tensor->sizes[0]--;
        EXPECT(BAD, ncclEpDispatch(s.handle, &s.calls.in, &s.calls.out, NULL, NULL, world.stream));
    }
    return small_close(&s);
}

/* One token of every rank goes to the experts `ids`, each of which returns its value; what the sum must be. */
static int check_sum(const int ids[3], const float value[3], float expected)
{
    const ncclEpGroupConfig_t config = small_config(HT, 64);
    const int64_t zone = (int64_t)world.nranks * SMALL_HIDDEN;
    struct small s;

    if (small_open(&s, &config, EXPERT_MAJOR, 1, 3, 64, PLAIN) || small_route(&s, ids, 1) || small_dispatch(&s, 0))
        return -1;
    for (int k = 0; k < 3; k++) /* the second expert of a rank comes behind its first */
        for (int64_t i = 0; i < (ids[k] / 2 == world.rank ? zone : 0); i++)
            oracle_from_float(EPX_BF16, value[k], (char *)s.out.view.data + 2 * (ids[k] % 2 * zone + i));
    if (tensor_pair_put(&s.out) || small_combine(&s, 0xcd))
        return -1;
    CHECK(small_row(&s.back, 0) == expected);
    return small_close(&s);
}

/* High throughput's EXPERT_MAJOR: the rows of a rank are summed and rounded to bfloat16; so are the ranks of each other
 * node; then all are added. u is half of 1's last bit: 1 + u is rounded to 1, and 1 + 2u is the next number. */
static int test_rank_sums(void)
{
    const float u = 1.0f / 256, of_ranks[] = {1, u, u}, of_nodes[] = {u, 1, u};
    const int two_of_a_rank[] = {0, 2, 1}, three_ranks[] = {0, 4, 6};
    const int each = world.ranks_per_node ? world.ranks_per_node : world.nranks;
    const int elsewhere = 2 / each != world.rank / each; /* are ranks 2 and 3 another node? */

    if (world.nranks >= 2 && check_sum(two_of_a_rank, of_ranks, 1))
        return -1;
    if (world.nranks == 4 && (each == 2 || each >= 4))
        return check_sum(three_ranks, of_nodes, elsewhere ? 1 : 1 + 2 * u);
    return 0;
}

/* What is refused when a group or a handle is made, and how. */
static int test_configurations(void)
{
    const ncclEpGroupConfig_t good = small_config(HT, 32);
    ncclEpHandleConfig_t odd = NCCL_EP_HANDLE_CONFIG_INIT;
    ncclEpGroupConfig_t c;
    ncclEpHandle_t handle;
    ncclEpGroup_t group;
    size_t bytes;

#define MAKE(result, change)       \
    do {                           \
        BAD_GROUP(result, change); \
        CHECK(group == NULL);      \
    } while (0)
    MAKE(BAD, c.max_token_bytes = 33); /* high throughput: in 16s */
    MAKE(BAD, c.max_recv_tokens_per_rank = SMALL_TOKENS - 1);
    MAKE(BAD, c.num_topk = c.num_experts + 1);
    MAKE(BAD, c.zero_copy = (ncclEpZeroCopyMode_t)3);
    MAKE(BAD, c.overflow_policy = (ncclEpOverflowPolicy_t)3);
    if (world.nranks > 1)
        MAKE(BAD, c.num_experts++); /* the ranks do not divide it */
#undef MAKE
    if (world.nranks > 1) {
        c = good; /* ranks that want different numbers of rows */
        c.max_recv_tokens_per_rank += world.rank == 1;
        EXPECT(USAGE, ncclEpCreateGroup(&group, world.comm, &c));
    }
    c = good, c.num_topk = 1;
    TRY(ncclEpCreateGroup(&group, world.comm, &c));
    EXPECT(USAGE, ncclEpInitHandle(&handle, group, FLAT, NULL, 2, NULL)); /* above num_topk */
    EXPECT(USAGE, ncclEpInitHandle(&handle, group, FLAT, NULL, 0, NULL));
    EXPECT(USAGE, ncclEpHandleMemSize(group, FLAT, NULL, &bytes, -1));
    EXPECT(BAD, ncclEpInitHandle(&handle, group, NCCL_EP_LAYOUT_UNSET, NULL, 1, NULL));
    EXPECT(BAD, ncclEpInitHandle(&handle, group, RANK_MAJOR, NULL, 1, NULL));
    odd.dispatch_output_per_expert_alignment = 12;
    EXPECT(BAD, ncclEpInitHandle(&handle, group, EXPERT_MAJOR, &odd, 1, NULL));
    TRY(ncclEpGroupDestroy(group));
    c = good, c.algorithm = LL, c.num_topk = 1, c.max_token_bytes = 33;
    TRY(ncclEpCreateGroup(&group, world.comm, &c)); /* low latency looks at neither */
    if (c.num_experts >= 2) {
        TRY(ncclEpInitHandle(&handle, group, RANK_MAJOR, NULL, 2, NULL));
        TRY(ncclEpHandleDestroy(handle));
    }
    EXPECT(BAD, ncclEpInitHandle(&handle, group, RANK_MAJOR, NULL, (int)c.num_experts + 1, NULL));
    TRY(ncclEpGroupDestroy(group));
    return 0;
}

/* An explicit rdma_buffer_size that is too small is InvUse when a handle is made; high throughput does not look. */
static int test_buffer_size(void)
{
    const unsigned long least = (unsigned long)world.nranks * SMALL_TOKENS * SMALL_HIDDEN * 2;
    const unsigned long sizes[] = {1, least - 1, least, 1ul << 40};
    ncclEpGroupConfig_t c = small_config(LL, 0);
    ncclEpHandle_t handle;
    ncclEpGroup_t group;

    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        c.rdma_buffer_size = sizes[i];
        TRY(ncclEpCreateGroup(&group, world.comm, &c));
        EXPECT(sizes[i] < least ? USAGE : ncclSuccess, ncclEpInitHandle(&handle, group, EXPERT_MAJOR, NULL, 1, NULL));
        CHECK(!handle == (sizes[i] < least));
        TRY(ncclEpGroupDestroy(group));
    }
    c = small_config(HT, 32);
    c.rdma_buffer_size = 1;
    TRY(ncclEpCreateGroup(&group, world.comm, &c));
    TRY(ncclEpInitHandle(&handle, group, FLAT, NULL, 1, NULL));
    TRY(ncclEpGroupDestroy(group));
    return 0;
}

/* Variables of the environment: the two paths of expert-major exclude each other, and want room for all copies. */
static int test_environment(void)
{
    const ncclEpGroupConfig_t config = small_config(HT, SMALL_TOKENS);
    ncclEpGroupConfig_t on = config;
    ncclEpHandle_t handle;
    ncclEpGroup_t group;
    int failed = 1;

    TRY(setenv("NCCL_EP_HT_EM_LOCAL_DUP", "1", 1));
    TRY(setenv("NCCL_EP_HT_EM_NVLINK_DUP", "on", 1));
    TRY(setenv("NCCL_EP_TOKENS_PER_CHUNK", "64", 1)); /* accepted, no effect */
    EXPECT(USAGE, ncclEpCreateGroup(&group, world.comm, &config));
    TRY(setenv("NCCL_EP_HT_EM_NVLINK_DUP", "maybe", 1)); /* a warning */
    TRY(ncclEpCreateGroup(&group, world.comm, &config));
    EXPECT(USAGE, ncclEpInitHandle(&handle, group, EXPERT_MAJOR, NULL, 2, NULL));
    failed = ncclEpInitHandle(&handle, group, FLAT, NULL, 2, NULL) != ncclSuccess;
    CHECK(!failed);
    TRY(ncclEpGroupDestroy(group));
    on.zero_copy = NCCL_EP_ZERO_COPY_ON; /* which needs no room for copies */
    TRY(ncclEpCreateGroup(&group, world.comm, &on));
    TRY(ncclEpInitHandle(&handle, group, EXPERT_MAJOR, NULL, 2, NULL));
    TRY(unsetenv("NCCL_EP_HT_EM_LOCAL_DUP"));
    TRY(unsetenv("NCCL_EP_HT_EM_NVLINK_DUP"));
    TRY(unsetenv("NCCL_EP_TOKENS_PER_CHUNK"));
    TRY(ncclEpGroupDestroy(group));
    return 0;
}

/* 4 tokens, then 1: nothing of the old routing remains. */
static int test_stale_routing(ncclEpLayout_t layout)
{
    const ncclEpGroupConfig_t config = small_config(HT, 32);
    const int many[] = {0, 1, 0, 1}, one[] = {1};
    struct small s;

    if (small_open(&s, &config, layout, 1, 1, 32, PLAIN) || small_route(&s, many, 4) || small_dispatch(&s, 0x5a) ||
        small_route(&s, one, 1) || small_dispatch(&s, 0x5a))
        return -1;
    CHECK(small_count(&s.total, 0) == (world.rank ? 0 : world.nranks));
    for (int row = 0; row < 32; row++) {
        const int comes = world.rank == 0 && row < world.nranks;
        CHECK(comes ? small_row(&s.out, row) == small_value(row, 0) : small_row_is(&s.out, row, 0x5a));
    }
    return small_close(&s);
}

int test_rules(void)
{
    return test_struct_sizes() || test_sizes_of_calls(HT, FLAT) || test_sizes_of_calls(HT, EXPERT_MAJOR) ||
                   test_sizes_of_calls(LL, EXPERT_MAJOR) || test_sizes_of_calls(LL, RANK_MAJOR) || test_rank_sums() ||
                   test_destroy() || test_layout_info() || test_ignored(FLAT) || test_ignored(EXPERT_MAJOR) ||
                   test_long_counters(FLAT) || test_long_counters(EXPERT_MAJOR) ||
                   test_low_latency_ignores(EXPERT_MAJOR) || test_low_latency_ignores(RANK_MAJOR) ||
                   test_zones_ignored(HT, FLAT) || test_zones_ignored(LL, EXPERT_MAJOR) ||
                   test_zones_ignored(LL, RANK_MAJOR) || test_recipe_first() || test_rank_major(1, 4) ||
                   test_rank_major(0, 4) || test_rank_major(0, 0) || test_rank_major(1, 1) || test_global_ids(LL) ||
                   test_global_ids(HT) || test_tail(FLAT) || test_tail(EXPERT_MAJOR) || test_configurations() ||
                   test_buffer_size() || test_environment() || test_stale_routing(FLAT) ||
                   test_stale_routing(EXPERT_MAJOR)
               ? -1
               : 0;
}
