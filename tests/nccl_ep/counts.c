/* SPDX-License-Identifier: Apache-2.0 */
/* Count mode: high throughput's EXPERT_MAJOR writes counters in dispatch, where the update was given none. */
#include "small.h"

enum { ALIGNMENT = 4, FIRST_TOKENS = 4, SECOND_TOKENS = 2 };

/* Every rank sends its tokens but the last to the two experts of rank 0 in turn, and the last to the next rank. */
static void make_ids(int tokens, int *ids)
{
    for (int t = 0; t < tokens; t++)
        ids[t] = t + 1 < tokens ? t % 2 : 2 * ((world.rank + 1) % world.nranks);
}

static int64_t padded(int64_t rows)
{
    return (rows + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

/* Rows of a local expert, without padding. */
static int64_t rows_of(int tokens, int expert)
{
    int64_t rows = expert == 0; /* of the rank before */

    for (int t = 0; t + 1 < tokens && world.rank == 0; t++)
        rows += t % 2 == expert ? world.nranks : 0;
    return rows;
}

/* T 0: nothing is dropped. */
static int counts_are(const struct small *s, const struct tensor_pair *counts, int tokens, int64_t T)
{
    const int64_t zone[2] = {padded(rows_of(tokens, 0)), padded(rows_of(tokens, 1))};
    const int64_t first = T && zone[0] > T ? T : zone[0], left = T ? T - first : zone[1];

    CHECK(small_count(counts, 0) == first);
    CHECK(small_count(counts, 1) == (zone[1] < left ? zone[1] : left));
    CHECK(small_count(counts, 2) == 0x5a5a5a5a5a5a5a5a); /* longer than what is written */
    CHECK(small_count(&s->total, 0) == zone[0] + zone[1]);
    return 0;
}

static int route(struct small *s, int tokens)
{
    int ids[FIRST_TOKENS];

    make_ids(tokens, ids);
    s->calls.info = (ncclEpLayoutInfo_t)NCCL_EP_LAYOUT_INFO_INIT;
    return small_route(s, ids, tokens);
}

static int dispatch(struct small *s, struct tensor_pair *counts, int tokens, int64_t T)
{
    s->calls.info.expert_counters = counts->tensor;
    s->calls.info.recv_total_counter = s->total.tensor;
    if (tensor_pair_fill(counts, 0x5a) || tensor_pair_fill(&s->total, 0x5a) || small_dispatch(s, 0) ||
        tensor_pair_get(counts))
        return -1;
    return counts_are(s, counts, tokens, T);
}

/* The graph's dispatch writes the counts of the routing that its update finds. */
static int test_graph(struct small *s, struct tensor_pair *counts)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;

    if (route(s, FIRST_TOKENS))
        return -1;
    s->calls.info.expert_counters = counts->tensor;
    s->calls.info.recv_total_counter = s->total.tensor;
    TRY(cudaStreamBeginCapture(world.stream, cudaStreamCaptureModeRelaxed));
    TRY(ncclEpUpdateHandle(s->handle, s->idx.tensor, NULL, world.stream));
    TRY(ncclEpDispatch(s->handle, &s->calls.in, &s->calls.out, &s->calls.info, &s->calls.config, world.stream));
    TRY(cudaStreamEndCapture(world.stream, &graph));
    TRY(cudaGraphInstantiate(&exec, graph, 0));
    if (tensor_pair_fill(counts, 0x5a) || tensor_pair_fill(&s->total, 0x5a))
        return -1;
    TRY(cudaGraphLaunch(exec, world.stream));
    if (tensor_pair_get(counts) || tensor_pair_get(&s->total) || counts_are(s, counts, FIRST_TOKENS, 0))
        return -1;
    TRY(cudaGraphExecDestroy(exec));
    TRY(cudaGraphDestroy(graph));
    return 0;
}

/* Neither of both is needed, and the total may be of another type than the counters. */
static int test_parts(struct small *s, struct tensor_pair *counts)
{
    if (tensor_pair_fill(counts, 0x5a))
        return -1;
    s->calls.info.recv_total_counter = NULL;
    if (small_dispatch(s, 0) || tensor_pair_get(counts) || counts_are(s, counts, SECOND_TOKENS, 0))
        return -1;
    s->calls.info.expert_counters = counts->tensor;
    counts->tensor->sizes[0] = 1;
    EXPECT(ncclInvalidArgument,
           ncclEpDispatch(s->handle, &s->calls.in, &s->calls.out, &s->calls.info, NULL, world.stream));
    counts->tensor->sizes[0] = 3;
    return 0;
}

static int test_counts_of(unsigned int T, ncclEpOverflowPolicy_t policy)
{
    const int64_t kept = policy == NCCL_EP_OVERFLOW_DROP ? T : 0;
    struct tensor_pair counts = {0};
    ncclEpGroupConfig_t config = small_config(HT, T);
    struct small s;

    config.overflow_policy = policy;
    if (small_open(&s, &config, EXPERT_MAJOR, ALIGNMENT, 1, T, PLAIN) ||
        tensor_pair_open(&counts, s.group, PLAIN, EPX_INT64, 1, 3, 0, 0))
        return -1;
    for (int round = 0; round < 2; round++)
        if (route(&s, FIRST_TOKENS) || dispatch(&s, &counts, FIRST_TOKENS, kept) ||
            dispatch(&s, &counts, FIRST_TOKENS, kept) || route(&s, SECOND_TOKENS) ||
            dispatch(&s, &counts, SECOND_TOKENS, kept))
            return -1;
    if (!kept && (test_parts(&s, &counts) || test_graph(&s, &counts)))
        return -1;
    return tensor_pair_close(&counts) || small_close(&s) ? -1 : 0;
}

int test_counts(void)
{
    return test_counts_of(64, NCCL_EP_OVERFLOW_AUTO) || test_counts_of(8, NCCL_EP_OVERFLOW_DROP) ? -1 : 0;
}
