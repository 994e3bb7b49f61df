/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A program for NCCL EP's interface (nccl_ep.h), unchanged on a machine without NCCL, CUDA and GPUs. Start it with
 *
 *     epx run -n 4 build/examples/nccl_ep_hello          or: torchrun, mpirun, srun
 *
 * Every rank has a few tokens; each goes to two experts in high throughput; expert e multiplies what it gets by e + 1;
 * combine sums the results. The tokens are small whole numbers, so that the sums are exact, and the program checks
 * them.
 */
#include <stdio.h>
#include <stdlib.h>

#include "cuda_runtime.h"
#include "epx/epx.h"
#include "nccl.h"
#include "nccl_ep.h"

enum { TOKENS = 16, HIDDEN = 256, TOPK = 2, LOCAL_EXPERTS = 2 };

#define TRY(call)                                                                          \
    do {                                                                                   \
        int result_ = (int)(call);                                                         \
        if (result_ != 0) {                                                                \
            fprintf(stderr, "%s: %s\n", #call, ncclGetErrorString((ncclResult_t)result_)); \
            exit(1);                                                                       \
        }                                                                                  \
    } while (0)

static float tokens[TOKENS][HIDDEN], result[TOKENS][HIDDEN], weights[TOKENS][TOPK];
static int64_t topk_idx[TOKENS][TOPK];

static void *to_device(const void *host, size_t bytes)
{
    void *device;

    TRY(cudaMalloc(&device, bytes));
    if (host)
        TRY(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice));
    else
        TRY(cudaMemset(device, 0, bytes));
    return device;
}

static ncclEpTensor_t *tensor(ncclDataType_t type, unsigned int ndim, size_t d0, size_t d1, void *data)
{
    const size_t sizes[2] = {d0, d1};
    ncclEpTensor_t *t;

    TRY(ncclEpTensorAlloc(&t, ndim, type, sizes, NULL));
    t->data = data;
    return t;
}

/* Zone after zone of rows, one per local expert. */
static void run_experts(float *rows, const int *counts, int rank)
{
    for (int l = 0; l < LOCAL_EXPERTS; l++)
        for (size_t i = 0; i < (size_t)counts[l] * HIDDEN; i++)
            *rows++ *= (float)(rank * LOCAL_EXPERTS + l + 1);
}

static void fill_inputs(int rank, int experts)
{
    for (int t = 0; t < TOKENS; t++) {
        topk_idx[t][0] = (rank + t) % experts;
        topk_idx[t][1] = (rank + t + 1) % experts;
        weights[t][0] = weights[t][1] = 0.5f;
        for (int h = 0; h < HIDDEN; h++)
            tokens[t][h] = (float)(rank * TOKENS + t + h);
    }
}

static int count_errors(void)
{
    int errors = 0;

    for (int t = 0; t < TOKENS; t++)
        for (int h = 0; h < HIDDEN; h++)
            errors += result[t][h] != (float)(topk_idx[t][0] + topk_idx[t][1] + 2) * tokens[t][h];
    return errors;
}

/* EPX knows the launchers; all ranks make the same id of rank 0's address: NCCL_COMM_ID is NCCL's own way to say it. */
static ncclComm_t make_communicator(const epx_world *world)
{
    char where[600];
    ncclUniqueId id;
    ncclComm_t comm;

    snprintf(where, sizeof(where), "%s:%d", world->nranks > 1 ? world->host : "127.0.0.1",
             world->nranks > 1 ? world->port : 29500);
    setenv("NCCL_COMM_ID", where, 0);
    TRY(ncclGetUniqueId(&id));
    TRY(ncclCommInitRank(&comm, world->nranks, id, world->rank));
    return comm;
}

int main(void)
{
    epx_world world = EPX_WORLD_INIT;

    if (epx_world_query(&world) != EPX_OK) {
        fprintf(stderr, "%s\n", epx_last_error());
        return 1;
    }
    const int rank = world.rank, nranks = world.nranks;
    const int experts = nranks * LOCAL_EXPERTS;
    const size_t rows = (size_t)nranks * TOKENS * TOPK;
    ncclComm_t comm = make_communicator(&world);
    cudaStream_t stream;

    TRY(cudaStreamCreate(&stream));
    fill_inputs(rank, experts);

    ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
    config.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
    config.num_experts = (unsigned int)experts;
    config.max_dispatch_tokens_per_rank = TOKENS;
    config.max_recv_tokens_per_rank = (unsigned int)rows;
    config.max_token_bytes = HIDDEN * sizeof(float);
    ncclEpGroup_t group;
    TRY(ncclEpCreateGroup(&group, comm, &config));

    /* The routing, and how many rows each local expert gets of it. */
    int counts[LOCAL_EXPERTS];
    ncclEpTensor_t *idx = tensor(ncclInt64, 2, TOKENS, TOPK, to_device(topk_idx, sizeof(topk_idx)));
    ncclEpTensor_t *counters = tensor(ncclInt32, 1, LOCAL_EXPERTS, 0, to_device(NULL, sizeof(counts)));
    ncclEpLayoutInfo_t layout = NCCL_EP_LAYOUT_INFO_INIT;
    layout.expert_counters = counters;
    ncclEpHandle_t handle;
    TRY(ncclEpCreateHandle(&handle, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, idx, &layout, NULL, stream));

    ncclEpTensor_t *in = tensor(ncclFloat32, 2, TOKENS, HIDDEN, to_device(tokens, sizeof(tokens)));
    ncclEpTensor_t *in_weights = tensor(ncclFloat32, 2, TOKENS, TOPK, to_device(weights, sizeof(weights)));
    ncclEpTensor_t *received = tensor(ncclFloat32, 2, rows, HIDDEN, to_device(NULL, rows * HIDDEN * sizeof(float)));
    ncclEpTensor_t *row_weights = tensor(ncclFloat32, 1, rows, 0, to_device(NULL, rows * sizeof(float)));
    ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
    inputs.tokens = in;
    inputs.topk_weights = in_weights;
    ncclEpDispatchOutputs_t outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    outputs.tokens = received;
    outputs.topk_weights = row_weights;
    TRY(ncclEpDispatch(handle, &inputs, &outputs, NULL, NULL, stream));

    /* The experts, on the host for once. */
    float *host = malloc(rows * HIDDEN * sizeof(float));
    if (!host)
        return 1;
    TRY(cudaMemcpyAsync(counts, counters->data, sizeof(counts), cudaMemcpyDeviceToHost, stream));
    TRY(cudaMemcpyAsync(host, received->data, rows * HIDDEN * sizeof(float), cudaMemcpyDeviceToHost, stream));
    TRY(cudaStreamSynchronize(stream));
    run_experts(host, counts, rank);
    TRY(cudaMemcpyAsync(received->data, host, rows * HIDDEN * sizeof(float), cudaMemcpyHostToDevice, stream));

    ncclEpTensor_t *out = tensor(ncclFloat32, 2, TOKENS, HIDDEN, to_device(NULL, sizeof(result)));
    ncclEpCombineInputs_t combine_inputs = NCCL_EP_COMBINE_INPUTS_INIT;
    combine_inputs.tokens = received;
    ncclEpCombineOutputs_t combine_outputs = NCCL_EP_COMBINE_OUTPUTS_INIT;
    combine_outputs.tokens = out;
    TRY(ncclEpCombine(handle, &combine_inputs, &combine_outputs, NULL, stream));
    TRY(cudaMemcpyAsync(result, out->data, sizeof(result), cudaMemcpyDeviceToHost, stream));
    TRY(cudaStreamSynchronize(stream));

    const int errors = count_errors();
    printf("rank %d of %d: %d tokens to %d experts and back, %d wrong values\n", rank, nranks, TOKENS, experts, errors);

    TRY(ncclEpHandleDestroy(handle));
    TRY(ncclEpGroupDestroy(group));
    ncclEpTensor_t *all[] = {idx, counters, in, in_weights, received, row_weights, out};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        TRY(cudaFree(all[i]->data));
        TRY(ncclEpTensorDestroy(all[i]));
    }
    free(host);
    TRY(cudaStreamDestroy(stream));
    TRY(ncclCommDestroy(comm));
    return errors != 0;
}
