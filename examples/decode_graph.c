/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A decode loop: one Mixture-of-Experts layer, recorded once as a graph and launched for every step, with new tokens
 * and new routing each time. Start it with
 *
 *     epx run -n 4 build/examples/decode_graph
 *
 * A launch costs the host one call. examples/decode_graph.cu is the same loop in a graph of CUDA.
 */
#include <stdio.h>
#include <stdlib.h>

#include "epx/epx.h"

enum { STEPS = 20, TOKENS = 8, HIDDEN = 256, TOPK = 2, EXPERTS = 8 };

#define TRY(call)                                                 \
    do {                                                          \
        epx_status status_ = (call);                              \
        if (status_ != EPX_OK) {                                  \
            fprintf(stderr, "%s: %s\n", #call, epx_last_error()); \
            exit(1);                                              \
        }                                                         \
    } while (0)

/* What the graph reads and writes: the same memory at every launch. */
static int32_t topk_idx[TOKENS][TOPK];
static float topk_weights[TOKENS][TOPK], tokens[TOKENS][HIDDEN], result[TOKENS][HIDDEN];
static float *rows;     /* [local experts, ranks * TOKENS, HIDDEN] */
static int32_t *counts; /* [local experts] */
static epx_group_info info = EPX_GROUP_INFO_INIT;

/* The experts of this rank: number e multiplies its rows by e + 1. Called in stream order, at every launch. */
static void run_experts(void *unused)
{
    const size_t zone = (size_t)info.nranks * TOKENS * HIDDEN;
    (void)unused;
    for (int l = 0; l < info.local_experts; l++)
        for (size_t i = 0; i < (size_t)counts[l] * HIDDEN; i++)
            rows[(size_t)l * zone + i] *= (float)(info.rank * info.local_experts + l + 1);
}

static epx_graph *record(epx_group *group, epx_handle *handle)
{
    epx_tensor idx = epx_tensor_make(topk_idx, EPX_INT32, 2, TOKENS, TOPK, 0, 0);
    epx_tensor weights = epx_tensor_make(topk_weights, EPX_FP32, 2, TOKENS, TOPK, 0, 0);
    epx_tensor in = epx_tensor_make(tokens, EPX_FP32, 2, TOKENS, HIDDEN, 0, 0);
    epx_tensor out = epx_tensor_make(result, EPX_FP32, 2, TOKENS, HIDDEN, 0, 0);
    epx_tensor received =
        epx_tensor_make(rows, EPX_FP32, 3, info.local_experts, (int64_t)info.nranks * TOKENS, HIDDEN, 0);
    epx_tensor expert_counts = epx_tensor_make(counts, EPX_INT32, 1, info.local_experts, 0, 0, 0);
    epx_layout_info layout = EPX_LAYOUT_INFO_INIT;
    layout.expert_counts = &expert_counts;
    epx_dispatch_inputs send = EPX_DISPATCH_INPUTS_INIT;
    send.tokens = &in;
    send.topk_idx = &idx;
    epx_dispatch_outputs receive = EPX_DISPATCH_OUTPUTS_INIT;
    receive.tokens = &received;
    epx_combine_inputs back = EPX_COMBINE_INPUTS_INIT;
    back.tokens = &received;
    back.topk_weights = &weights;
    epx_combine_outputs sum = EPX_COMBINE_OUTPUTS_INIT;
    sum.tokens = &out;

    epx_graph *graph;
    TRY(epx_graph_begin(group, NULL));
    TRY(epx_dispatch(handle, &send, &receive, &layout, NULL, NULL));
    TRY(epx_stream_call(group, NULL, run_experts, NULL));
    TRY(epx_combine(handle, &back, &sum, NULL, NULL));
    TRY(epx_graph_end(group, NULL, &graph));
    return graph;
}

/* What the rest of a model would bring: other tokens, other experts. */
static void next_tokens(int step)
{
    for (int t = 0; t < TOKENS; t++) {
        topk_idx[t][0] = (info.rank + t + step) % EXPERTS;
        topk_idx[t][1] = (info.rank + t + 3 * step + 1) % EXPERTS;
        if (topk_idx[t][1] == topk_idx[t][0])
            topk_idx[t][1] = -1; /* this token has one expert only */
        topk_weights[t][0] = 0.75f;
        topk_weights[t][1] = 0.25f;
        for (int h = 0; h < HIDDEN; h++)
            tokens[t][h] = (float)(step * 100 + info.rank * TOKENS + t);
    }
}

static int count_errors(void)
{
    int errors = 0;
    for (int t = 0; t < TOKENS; t++) {
        /* Expert -1 times the weight is 0: (-1 + 1) * 0.25. */
        float factor = 0.75f * (float)(topk_idx[t][0] + 1) + 0.25f * (float)(topk_idx[t][1] + 1);
        for (int h = 0; h < HIDDEN; h++)
            errors += result[t][h] != factor * tokens[t][h];
    }
    return errors;
}

int main(void)
{
    epx_group_config config = EPX_GROUP_CONFIG_INIT;
    config.modes = EPX_LOW_LATENCY;
    config.num_experts = EXPERTS;
    config.max_tokens_per_rank = TOKENS;
    config.max_hidden_bytes = HIDDEN * sizeof(float);
    config.max_topk = TOPK;
    epx_group *group;
    TRY(epx_group_create(&group, NULL, &config));
    TRY(epx_group_query(group, &info));
    epx_handle_config handle_config = EPX_HANDLE_CONFIG_INIT;
    handle_config.mode = EPX_LOW_LATENCY;
    handle_config.layout = EPX_EXPERT_MAJOR;
    handle_config.topk = TOPK;
    epx_handle *handle;
    TRY(epx_handle_create(&handle, group, &handle_config));
    const size_t zone = (size_t)info.nranks * TOKENS * HIDDEN;
    void *memory;
    TRY(epx_alloc(group, (size_t)info.local_experts * zone * sizeof(float), &memory));
    rows = memory;
    counts = calloc((size_t)info.local_experts, sizeof(int32_t));
    if (!counts)
        return 1;

    epx_graph *graph = record(group, handle);
    int errors = 0;
    for (int step = 0; step < STEPS; step++) {
        next_tokens(step);
        TRY(epx_graph_launch(graph, NULL));
        TRY(epx_stream_sync(group, NULL));
        errors += count_errors();
    }
    printf("rank %d of %d: %d steps of %d tokens, %d wrong values\n", info.rank, info.nranks, STEPS, TOKENS, errors);
    TRY(epx_graph_destroy(graph));
    TRY(epx_group_destroy(group));
    free(counts);
    return errors != 0;
}
