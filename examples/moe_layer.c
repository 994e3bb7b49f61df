/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A Mixture-of-Experts layer over several ranks, in high-throughput mode (prefill, training). Start it with
 *
 *     epx run -n 4 build/examples/moe_layer
 *
 * Each rank has its own tokens and its share of the experts. A gate chooses two experts for each token; dispatch brings
 * the token to them, each runs a small network on its rows, and combine returns the weighted sum. examples/moe_layer.py
 * is the same layer in Python. The program computes every token's result by itself too, and compares.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "epx/epx.h"

enum { TOKENS = 32, HIDDEN = 64, INNER = 48, TOPK = 2, EXPERTS = 8 };

#define TRY(call)                                                 \
    do {                                                          \
        epx_status status_ = (call);                              \
        if (status_ != EPX_OK) {                                  \
            fprintf(stderr, "%s: %s\n", #call, epx_last_error()); \
            exit(1);                                              \
        }                                                         \
    } while (0)

/* Numbers between -1 and 1 that every rank can compute: inputs, and parameters of the model. */
static float number(unsigned which, int i, int j)
{
    unsigned x = which * 2654435761u + (unsigned)i * 40503u + (unsigned)j * 30011u + 1u;
    x = (x ^ (x >> 15)) * 2246822519u;
    x = (x ^ (x >> 13)) * 3266489917u;
    return (float)((x ^ (x >> 16)) & 0xffff) / 32768.0f - 1.0f;
}

static float dot(const float *x, unsigned which, int row, int n)
{
    float sum = 0;
    for (int i = 0; i < n; i++)
        sum += x[i] * number(which, row, i);
    return sum;
}

/* Expert e: two matrices with a rectifier between them. */
static void run_expert(int e, const float *x, float *y)
{
    float inner[INNER];
    for (int i = 0; i < INNER; i++)
        inner[i] = fmaxf(0, dot(x, 100 + (unsigned)e, i, HIDDEN)) / HIDDEN;
    for (int h = 0; h < HIDDEN; h++)
        y[h] = dot(inner, 200 + (unsigned)e, h, INNER);
}

/* The two experts with the largest scores, and the softmax of these scores. */
static void gate(const float *x, int32_t idx[TOPK], float weight[TOPK])
{
    float score[EXPERTS];
    for (int e = 0; e < EXPERTS; e++)
        score[e] = dot(x, 1, e, HIDDEN);
    for (int k = 0; k < TOPK; k++) {
        idx[k] = -1;
        for (int e = 0; e < EXPERTS; e++)
            if ((k == 0 || e != idx[0]) && (idx[k] < 0 || score[e] > score[idx[k]]))
                idx[k] = e;
    }
    weight[1] = 1 / (1 + expf(score[idx[0]] - score[idx[1]]));
    weight[0] = 1 - weight[1];
}

static float tokens[TOKENS][HIDDEN], result[TOKENS][HIDDEN], topk_weights[TOKENS][TOPK];
static int32_t topk_idx[TOKENS][TOPK];

/* The layer. Nothing here knows how many ranks or machines there are. */
static void moe(epx_group *group, epx_handle *handle, int first_expert, int local_experts)
{
    epx_tensor idx = epx_tensor_make(topk_idx, EPX_INT32, 2, TOKENS, TOPK, 0, 0);
    epx_tensor x = epx_tensor_make(tokens, EPX_FP32, 2, TOKENS, HIDDEN, 0, 0);
    epx_tensor w = epx_tensor_make(topk_weights, EPX_FP32, 2, TOKENS, TOPK, 0, 0);
    epx_tensor y = epx_tensor_make(result, EPX_FP32, 2, TOKENS, HIDDEN, 0, 0);
    int64_t rows, counts[EXPERTS];

    /* The ranks exchange how many rows each will get; then there is exactly as much memory as needed. */
    TRY(epx_handle_update(handle, &idx, NULL, NULL));
    TRY(epx_handle_recv_count(handle, &rows, counts));
    float *in = malloc(((size_t)rows + 1) * HIDDEN * sizeof(float)),
          *weights = malloc(((size_t)rows + 1) * sizeof(float));
    if (!in || !weights)
        exit(1);
    epx_tensor received = epx_tensor_make(in, EPX_FP32, 2, rows, HIDDEN, 0, 0);
    epx_tensor row_weights = epx_tensor_make(weights, EPX_FP32, 1, rows, 0, 0, 0);

    epx_dispatch_inputs send = EPX_DISPATCH_INPUTS_INIT;
    send.tokens = &x;
    send.topk_weights = &w;
    epx_dispatch_outputs receive = EPX_DISPATCH_OUTPUTS_INIT;
    receive.tokens = &received;
    receive.topk_weights = &row_weights;
    TRY(epx_dispatch(handle, &send, &receive, NULL, NULL, NULL));
    TRY(epx_stream_sync(group, NULL));

    /* Rows are sorted by expert: counts[l] rows for each of mine. */
    float *row = in, *weight = weights, out[HIDDEN];
    for (int l = 0; l < local_experts; l++) {
        for (int64_t i = 0; i < counts[l]; i++, row += HIDDEN, weight++) {
            run_expert(first_expert + l, row, out);
            for (int h = 0; h < HIDDEN; h++)
                row[h] = *weight * out[h];
        }
    }

    epx_combine_inputs back = EPX_COMBINE_INPUTS_INIT;
    back.tokens = &received;
    epx_combine_outputs sum = EPX_COMBINE_OUTPUTS_INIT;
    sum.tokens = &y;
    TRY(epx_combine(handle, &back, &sum, NULL, NULL));
    TRY(epx_stream_sync(group, NULL));
    free(weights);
    free(in);
}

static int count_errors(void)
{
    int errors = 0;
    for (int t = 0; t < TOKENS; t++) {
        float y[TOPK][HIDDEN];
        for (int k = 0; k < TOPK; k++)
            run_expert(topk_idx[t][k], tokens[t], y[k]);
        for (int h = 0; h < HIDDEN; h++) {
            float expected = topk_weights[t][0] * y[0][h] + topk_weights[t][1] * y[1][h];
            errors += fabsf(result[t][h] - expected) > 1e-5f;
        }
    }
    return errors;
}

int main(void)
{
    epx_group_config config = EPX_GROUP_CONFIG_INIT;
    config.modes = EPX_HIGH_THROUGHPUT;
    config.layouts = EPX_LAYOUT_BIT(EPX_EXPERT_MAJOR);
    config.num_experts = EXPERTS;
    config.max_tokens_per_rank = TOKENS;
    config.max_hidden_bytes = HIDDEN * sizeof(float);
    config.max_topk = TOPK;
    epx_group *group;
    TRY(epx_group_create(&group, NULL, &config));
    epx_group_info info = EPX_GROUP_INFO_INIT;
    TRY(epx_group_query(group, &info));

    epx_handle_config handle_config = EPX_HANDLE_CONFIG_INIT;
    handle_config.mode = EPX_HIGH_THROUGHPUT;
    handle_config.layout = EPX_EXPERT_MAJOR;
    handle_config.topk = TOPK;
    epx_handle *handle;
    TRY(epx_handle_create(&handle, group, &handle_config));

    for (int t = 0; t < TOKENS; t++) {
        for (int h = 0; h < HIDDEN; h++)
            tokens[t][h] = number(2, info.rank * TOKENS + t, h);
        gate(tokens[t], topk_idx[t], topk_weights[t]);
    }
    moe(group, handle, info.rank * info.local_experts, info.local_experts);
    int errors = count_errors();
    printf("rank %d of %d: %d tokens through %d experts, %d wrong values\n", info.rank, info.nranks, TOKENS, EXPERTS,
           errors);

    TRY(epx_handle_destroy(handle));
    TRY(epx_group_destroy(group));
    return errors != 0;
}
