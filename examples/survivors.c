/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A rank dies, and the others go on. Start it with
 *
 *     epx run -n 4 --grace 30 build/examples/survivors
 *
 * In the middle of the steps the last rank kills itself, as a machine that fails would. The next operation of every
 * other rank ends with a status that names it. The others agree on who is left (epx_group_error_clear) and repeat the
 * step without it: its experts are gone, so tokens that chose one of them get the result of their other expert alone.
 * `epx run` ends with status 137, that of the killed rank.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

#include "epx/epx.h"

enum { STEPS = 10, DEADLY_STEP = 4, TOKENS = 16, HIDDEN = 64, TOPK = 2, EXPERTS = 8 };

#define TRY(call)                                                 \
    do {                                                          \
        epx_status status_ = (call);                              \
        if (status_ != EPX_OK) {                                  \
            fprintf(stderr, "%s: %s\n", #call, epx_last_error()); \
            exit(1);                                              \
        }                                                         \
    } while (0)

static int32_t topk_idx[TOKENS][TOPK];
static float topk_weights[TOKENS][TOPK], tokens[TOKENS][HIDDEN], result[TOKENS][HIDDEN];
static float *rows, *row_weights; /* what arrives here: [ranks * TOKENS, HIDDEN] and [ranks * TOKENS, TOPK] */

/* The first failure of a step's calls. Experts return their rows times the weights of those that live here. */
static epx_status run_step(epx_group *group, epx_handle *handle)
{
    epx_tensor idx = epx_tensor_make(topk_idx, EPX_INT32, 2, TOKENS, TOPK, 0, 0);
    epx_tensor in = epx_tensor_make(tokens, EPX_FP32, 2, TOKENS, HIDDEN, 0, 0);
    epx_tensor weights = epx_tensor_make(topk_weights, EPX_FP32, 2, TOKENS, TOPK, 0, 0);
    epx_tensor out = epx_tensor_make(result, EPX_FP32, 2, TOKENS, HIDDEN, 0, 0);
    int64_t count;
    epx_status status = epx_handle_update(handle, &idx, NULL, NULL);
    if (status == EPX_OK)
        status = epx_handle_recv_count(handle, &count, NULL);
    if (status != EPX_OK)
        return status;

    epx_tensor received = epx_tensor_make(rows, EPX_FP32, 2, count, HIDDEN, 0, 0);
    epx_tensor received_weights = epx_tensor_make(row_weights, EPX_FP32, 2, count, TOPK, 0, 0);
    epx_dispatch_inputs send = EPX_DISPATCH_INPUTS_INIT;
    send.tokens = &in;
    send.topk_weights = &weights;
    epx_dispatch_outputs receive = EPX_DISPATCH_OUTPUTS_INIT;
    receive.tokens = &received;
    receive.topk_weights = &received_weights;
    status = epx_dispatch(handle, &send, &receive, NULL, NULL, NULL);
    if (status == EPX_OK)
        status = epx_stream_sync(group, NULL);
    if (status != EPX_OK)
        return status;
    for (int64_t i = 0; i < count; i++)
        for (int h = 0; h < HIDDEN; h++)
            rows[i * HIDDEN + h] *= row_weights[i * TOPK] + row_weights[i * TOPK + 1];

    epx_combine_inputs back = EPX_COMBINE_INPUTS_INIT;
    back.tokens = &received;
    epx_combine_outputs sum = EPX_COMBINE_OUTPUTS_INIT;
    sum.tokens = &out;
    status = epx_combine(handle, &back, &sum, NULL, NULL);
    return status == EPX_OK ? epx_stream_sync(group, NULL) : status;
}

/* Who is gone, and everybody else's consent to go on without. Collective over the ranks that live. */
static int recover(epx_group *group)
{
    epx_error_info error = EPX_ERROR_INFO_INIT;
    if (epx_group_error(group, &error) == EPX_OK)
        return -1;
    printf("%s\n", error.message);
    TRY(epx_group_error_clear(group));
    return error.peer;
}

static int count_errors(int lost, int local_experts)
{
    int errors = 0;
    for (int t = 0; t < TOKENS; t++) {
        float factor = 0;
        for (int k = 0; k < TOPK; k++)
            factor += topk_idx[t][k] / local_experts == lost ? 0 : topk_weights[t][k];
        for (int h = 0; h < HIDDEN; h++)
            errors += result[t][h] != factor * tokens[t][h];
    }
    return errors;
}

int main(void)
{
    epx_group_config config = EPX_GROUP_CONFIG_INIT;
    config.modes = EPX_HIGH_THROUGHPUT;
    config.num_experts = EXPERTS;
    config.max_tokens_per_rank = TOKENS;
    config.max_hidden_bytes = HIDDEN * sizeof(float);
    config.max_topk = TOPK;
    config.enable_mask = 1;
    config.timeout_ms = 3000; /* how long a rank may be silent before it counts as gone */
    epx_group *group;
    TRY(epx_group_create(&group, NULL, &config));
    epx_group_info info = EPX_GROUP_INFO_INIT;
    TRY(epx_group_query(group, &info));
    epx_handle_config handle_config = EPX_HANDLE_CONFIG_INIT;
    handle_config.mode = EPX_HIGH_THROUGHPUT;
    handle_config.layout = EPX_FLAT;
    handle_config.topk = TOPK;
    epx_handle *handle;
    TRY(epx_handle_create(&handle, group, &handle_config));
    rows = malloc((size_t)info.nranks * TOKENS * HIDDEN * sizeof(float));
    row_weights = malloc((size_t)info.nranks * TOKENS * TOPK * sizeof(float));
    if (!rows || !row_weights)
        return 1;

    int errors = 0, lost = -1;
    for (int step = 0; step < STEPS; step++) {
        for (int t = 0; t < TOKENS; t++) {
            topk_idx[t][0] = (info.rank + t + step) % EXPERTS;
            topk_idx[t][1] = (info.rank + t + step + 3) % EXPERTS;
            topk_weights[t][0] = 0.75f;
            topk_weights[t][1] = 0.25f;
            for (int h = 0; h < HIDDEN; h++)
                tokens[t][h] = (float)(step * 100 + info.rank * TOKENS + t);
        }
        if (step == DEADLY_STEP && info.rank == info.nranks - 1 && info.nranks > 1)
            raise(SIGKILL);
        while (run_step(group, handle) != EPX_OK) {
            lost = recover(group);
            if (lost < 0) {
                fprintf(stderr, "rank %d cannot go on: %s\n", info.rank, epx_last_error());
                return 1;
            }
        }
        errors += count_errors(lost, info.local_experts);
    }
    printf("rank %d of %d: %d steps, the last ones without rank %d, %d wrong values\n", info.rank, info.nranks, STEPS,
           lost, errors);
    free(row_weights);
    free(rows);
    TRY(epx_group_destroy(group));
    return errors != 0;
}
