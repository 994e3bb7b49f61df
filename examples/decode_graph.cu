/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A decode loop in a CUDA graph: dispatch, experts and combine are captured once and launched for every step, with new
 * tokens and new routing each time. Start it, on a machine with one GPU or several, with
 *
 *     epx run -n 4 build/examples/decode_graph_cuda
 *
 * Ranks take the machine's GPUs in turn and may share one. Built where nvcc is; scripts/gpu.sh runs it.
 */
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>

#include "epx/epx.h"

enum { STEPS = 20, TOKENS = 8, HIDDEN = 256, TOPK = 2, EXPERTS = 8 };

#define TRY(call)                                                                             \
    do {                                                                                      \
        epx_status status_ = (call);                                                          \
        if (status_ != EPX_OK) {                                                              \
            fprintf(stderr, "%s: %s (%s)\n", #call, epx_last_error(), epx_strerror(status_)); \
            exit(1);                                                                          \
        }                                                                                     \
    } while (0)
#define CUDA(call)                                                          \
    do {                                                                    \
        cudaError_t error_ = (call);                                        \
        if (error_ != cudaSuccess) {                                        \
            fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(error_)); \
            exit(1);                                                        \
        }                                                                   \
    } while (0)

struct layer {
    epx_group *group;
    epx_handle *handle;
    epx_group_info info;
    cudaStream_t stream;
    int32_t *topk_idx; /* GPU memory, the same at every launch */
    float *topk_weights, *tokens, *result;
    float *rows;
    int32_t *counts;
};

/* One block per row of an expert's zone; blocks beyond counts[l] have nothing to do. Expert e multiplies by e + 1. */
__global__ void run_experts(float *rows, const int32_t *counts, int zone, int first)
{
    const int l = blockIdx.y, row = blockIdx.x;
    if (row >= counts[l])
        return;
    float *x = rows + ((size_t)l * zone + row) * HIDDEN;
    for (int h = threadIdx.x; h < HIDDEN; h += blockDim.x)
        x[h] *= (float)(first + l + 1);
}

template <typename T> static void device_memory(T **ptr, size_t count)
{
    CUDA(cudaMalloc((void **)ptr, count * sizeof(T)));
}

static void create(layer *l)
{
    epx_world world = EPX_WORLD_INIT;
    int gpus = 0;
    TRY(epx_world_query(&world));
    CUDA(cudaGetDeviceCount(&gpus));
    epx_group_config config = EPX_GROUP_CONFIG_INIT;
    config.device = EPX_DEVICE_CUDA;
    config.device_index = (world.local_rank > 0 ? world.local_rank : 0) % gpus;
    config.modes = EPX_LOW_LATENCY;
    config.num_experts = EXPERTS;
    config.max_tokens_per_rank = TOKENS;
    config.max_hidden_bytes = HIDDEN * sizeof(float);
    config.max_topk = TOPK;
    config.alloc_bytes = 64 << 20;
    CUDA(cudaSetDevice(config.device_index));
    CUDA(cudaStreamCreateWithFlags(&l->stream, cudaStreamNonBlocking));
    TRY(epx_group_create(&l->group, nullptr, &config));
    l->info = EPX_GROUP_INFO_INIT;
    TRY(epx_group_query(l->group, &l->info));
    epx_handle_config handle = EPX_HANDLE_CONFIG_INIT;
    handle.mode = EPX_LOW_LATENCY;
    handle.layout = EPX_EXPERT_MAJOR;
    handle.topk = TOPK;
    TRY(epx_handle_create(&l->handle, l->group, &handle));
    device_memory(&l->topk_idx, TOKENS * TOPK);
    device_memory(&l->topk_weights, TOKENS * TOPK);
    device_memory(&l->tokens, TOKENS * HIDDEN);
    device_memory(&l->result, TOKENS * HIDDEN);
    device_memory(&l->counts, l->info.local_experts);
    const size_t elements = (size_t)l->info.local_experts * l->info.nranks * TOKENS * HIDDEN;
    TRY(epx_alloc(l->group, elements * sizeof(float), (void **)&l->rows));
}

/* Queues the layer; captured, it is the graph. */
static void queue(layer *l)
{
    const int zone = l->info.nranks * TOKENS;
    epx_tensor idx = epx_tensor_make(l->topk_idx, EPX_INT32, 2, TOKENS, TOPK, 0, 0);
    epx_tensor weights = epx_tensor_make(l->topk_weights, EPX_FP32, 2, TOKENS, TOPK, 0, 0);
    epx_tensor in = epx_tensor_make(l->tokens, EPX_FP32, 2, TOKENS, HIDDEN, 0, 0);
    epx_tensor out = epx_tensor_make(l->result, EPX_FP32, 2, TOKENS, HIDDEN, 0, 0);
    epx_tensor received = epx_tensor_make(l->rows, EPX_FP32, 3, l->info.local_experts, zone, HIDDEN, 0);
    epx_tensor counts = epx_tensor_make(l->counts, EPX_INT32, 1, l->info.local_experts, 0, 0, 0);
    epx_layout_info layout = EPX_LAYOUT_INFO_INIT;
    layout.expert_counts = &counts;
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
    TRY(epx_dispatch(l->handle, &send, &receive, &layout, nullptr, l->stream));
    run_experts<<<dim3(zone, l->info.local_experts), 128, 0, l->stream>>>(l->rows, l->counts, zone,
                                                                          l->info.rank * l->info.local_experts);
    TRY(epx_combine(l->handle, &back, &sum, nullptr, l->stream));
}

/* One step: what the rest of a model would bring goes to the GPU, the graph runs, and the result is compared. */
static int run_step(layer *l, cudaGraphExec_t graph, int step)
{
    int32_t idx[TOKENS][TOPK];
    float weights[TOKENS][TOPK], tokens[TOKENS][HIDDEN], result[TOKENS][HIDDEN];
    int errors = 0;

    for (int t = 0; t < TOKENS; t++) {
        idx[t][0] = (l->info.rank + t + step) % EXPERTS;
        idx[t][1] = (l->info.rank + t + step + 3) % EXPERTS;
        weights[t][0] = 0.75f;
        weights[t][1] = 0.25f;
        for (int h = 0; h < HIDDEN; h++)
            tokens[t][h] = (float)(step * 100 + l->info.rank * TOKENS + t);
    }
    CUDA(cudaMemcpyAsync(l->topk_idx, idx, sizeof(idx), cudaMemcpyHostToDevice, l->stream));
    CUDA(cudaMemcpyAsync(l->topk_weights, weights, sizeof(weights), cudaMemcpyHostToDevice, l->stream));
    CUDA(cudaMemcpyAsync(l->tokens, tokens, sizeof(tokens), cudaMemcpyHostToDevice, l->stream));
    CUDA(cudaGraphLaunch(graph, l->stream));
    CUDA(cudaMemcpyAsync(result, l->result, sizeof(result), cudaMemcpyDeviceToHost, l->stream));
    CUDA(cudaStreamSynchronize(l->stream));
    TRY(epx_group_error(l->group, nullptr));
    for (int t = 0; t < TOKENS; t++) {
        const float factor = 0.75f * (float)(idx[t][0] + 1) + 0.25f * (float)(idx[t][1] + 1);
        for (int h = 0; h < HIDDEN; h++)
            errors += result[t][h] != factor * tokens[t][h];
    }
    return errors;
}

int main()
{
    layer l = {};
    cudaGraph_t captured;
    cudaGraphExec_t graph;
    int errors = 0;

    create(&l);
    CUDA(cudaStreamBeginCapture(l.stream, cudaStreamCaptureModeThreadLocal));
    queue(&l);
    CUDA(cudaStreamEndCapture(l.stream, &captured));
    CUDA(cudaGraphInstantiate(&graph, captured, 0));
    for (int step = 0; step < STEPS; step++)
        errors += run_step(&l, graph, step);
    printf("rank %d of %d: %d steps of %d tokens, %d wrong values\n", l.info.rank, l.info.nranks, STEPS, TOKENS,
           errors);
    CUDA(cudaGraphExecDestroy(graph));
    CUDA(cudaGraphDestroy(captured));
    TRY(epx_group_destroy(l.group));
    CUDA(cudaStreamDestroy(l.stream));
    return errors != 0;
}
