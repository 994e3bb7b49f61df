/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A first EPX program: one Mixture-of-Experts layer in low-latency mode. Start it with
 *
 *     epx run -n 4 build/examples/hello
 *
 * or with mpirun, srun, torchrun (docs/run.md), or RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set by hand. Every
 * rank has a few tokens. Each token goes to two experts. Expert e multiplies its input by e + 1. Combine returns the
 * weighted sum to the token's rank, and the program checks it.
 */
#include <stdio.h>
#include <stdlib.h>

#include "epx/epx.h"

enum { TOKENS = 16, HIDDEN = 256, TOPK = 2, EXPERTS = 8 };

#define TRY(call)                                                 \
    do {                                                          \
        epx_status status_ = (call);                              \
        if (status_ != EPX_OK) {                                  \
            fprintf(stderr, "%s: %s\n", #call, epx_last_error()); \
            exit(1);                                              \
        }                                                         \
    } while (0)

static int32_t topk_idx[TOKENS][TOPK];
static float topk_weights[TOKENS][TOPK];
static float tokens[TOKENS][HIDDEN];
static float result[TOKENS][HIDDEN];

static float token_value(int rank, int token, int column)
{
    return (float)(rank * TOKENS + token) + (float)column / HIDDEN;
}

/* What a gate would decide: here, two experts that depend on the token, with weights 3/4 and 1/4. */
static void fill_inputs(int rank)
{
    for (int t = 0; t < TOKENS; t++) {
        topk_idx[t][0] = (rank + t) % EXPERTS;
        topk_idx[t][1] = (rank + t + 3) % EXPERTS;
        topk_weights[t][0] = 0.75f;
        topk_weights[t][1] = 0.25f;
        for (int h = 0; h < HIDDEN; h++)
            tokens[t][h] = token_value(rank, t, h);
    }
}

/* The experts of this rank work in place on the rows that arrived for them. */
static void run_experts(float *rows, const int32_t *counts, const epx_group_info *info)
{
    size_t zone = (size_t)info->nranks * TOKENS * HIDDEN;
    for (int l = 0; l < info->local_experts; l++) {
        float factor = (float)(info->rank * info->local_experts + l + 1);
        for (size_t i = 0; i < (size_t)counts[l] * HIDDEN; i++)
            rows[(size_t)l * zone + i] *= factor;
    }
}

static int count_errors(int rank)
{
    int errors = 0;
    for (int t = 0; t < TOKENS; t++) {
        float factor = 0.75f * (float)(topk_idx[t][0] + 1) + 0.25f * (float)(topk_idx[t][1] + 1);
        for (int h = 0; h < HIDDEN; h++)
            errors += result[t][h] != factor * token_value(rank, t, h);
    }
    return errors;
}

int main(void)
{
    /* A group: all ranks, found through the environment. */
    epx_group_config config = EPX_GROUP_CONFIG_INIT;
    config.modes = EPX_LOW_LATENCY;
    config.num_experts = EXPERTS;
    config.max_tokens_per_rank = TOKENS;
    config.max_hidden_bytes = HIDDEN * sizeof(float);
    config.max_topk = TOPK;
    epx_group *group;
    TRY(epx_group_create(&group, NULL, &config));
    epx_group_info info = EPX_GROUP_INFO_INIT;
    TRY(epx_group_query(group, &info));
    fill_inputs(info.rank);

    /* A handle: the routing of one layer. */
    epx_handle_config handle_config = EPX_HANDLE_CONFIG_INIT;
    handle_config.mode = EPX_LOW_LATENCY;
    handle_config.layout = EPX_EXPERT_MAJOR;
    handle_config.topk = TOPK;
    epx_handle *handle;
    TRY(epx_handle_create(&handle, group, &handle_config));
    epx_tensor idx = epx_tensor_make(topk_idx, EPX_INT32, 2, TOKENS, TOPK, 0, 0);
    TRY(epx_handle_update(handle, &idx, NULL, NULL));

    /* Dispatch: [local experts, ranks * tokens, hidden], of which counts[l] rows of each expert are filled. */
    int64_t zone_rows = (int64_t)info.nranks * TOKENS;
    float *rows = calloc((size_t)info.local_experts * (size_t)zone_rows * HIDDEN, sizeof(float));
    int32_t *counts = calloc((size_t)info.local_experts, sizeof(int32_t));
    if (!rows || !counts) {
        fprintf(stderr, "out of memory\n");
        return 1;
    }
    epx_tensor in = epx_tensor_make(tokens, EPX_FP32, 2, TOKENS, HIDDEN, 0, 0);
    epx_tensor received = epx_tensor_make(rows, EPX_FP32, 3, info.local_experts, zone_rows, HIDDEN, 0);
    epx_tensor expert_counts = epx_tensor_make(counts, EPX_INT32, 1, info.local_experts, 0, 0, 0);
    epx_dispatch_inputs dispatch_in = EPX_DISPATCH_INPUTS_INIT;
    dispatch_in.tokens = &in;
    epx_dispatch_outputs dispatch_out = EPX_DISPATCH_OUTPUTS_INIT;
    dispatch_out.tokens = &received;
    epx_layout_info layout = EPX_LAYOUT_INFO_INIT;
    layout.expert_counts = &expert_counts;
    TRY(epx_dispatch(handle, &dispatch_in, &dispatch_out, &layout, NULL, NULL));
    TRY(epx_stream_sync(group, NULL)); /* dispatch is asynchronous: the rows are there now */

    run_experts(rows, counts, &info);

    /* Combine: each token's two results, weighted and summed, back where the token came from. */
    epx_tensor weights = epx_tensor_make(topk_weights, EPX_FP32, 2, TOKENS, TOPK, 0, 0);
    epx_tensor out = epx_tensor_make(result, EPX_FP32, 2, TOKENS, HIDDEN, 0, 0);
    epx_combine_inputs combine_in = EPX_COMBINE_INPUTS_INIT;
    combine_in.tokens = &received;
    combine_in.topk_weights = &weights;
    epx_combine_outputs combine_out = EPX_COMBINE_OUTPUTS_INIT;
    combine_out.tokens = &out;
    TRY(epx_combine(handle, &combine_in, &combine_out, NULL, NULL));
    TRY(epx_stream_sync(group, NULL));

    int errors = count_errors(info.rank);
    printf("rank %d of %d: %d tokens to %d experts and back, %d wrong values\n", info.rank, info.nranks, TOKENS,
           EXPERTS, errors);

    free(counts);
    free(rows);
    TRY(epx_handle_destroy(handle));
    TRY(epx_group_destroy(group));
    return errors != 0;
}
