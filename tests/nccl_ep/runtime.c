/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What programs for nccl_ep.h ask of CUDA's runtime besides memory and streams: events, errors, memory info, capture
 * and graphs. On the CPU device it is the stand-in that is tested, on a GPU EPX under CUDA's own capture.
 *
 * A layer here is: update, dispatch, combine of what was received, complete. Each token goes to TOPK experts and comes
 * back as TOPK times itself; tokens are small whole numbers, so that sums are exact.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "nccl_case.h"

enum { TOKENS = 8, HIDDEN = 256, TOPK = 2, LOCAL = 2, LAUNCHES = 3 };

struct layer {
    int low_latency;
    ncclEpGroup_t group;
    ncclEpHandle_t handle;
    ncclEpTensor_t *idx, *tokens, *weights, *received, *row_weights, *counters, *out;
    int64_t host_idx[TOKENS][TOPK];
    float host_tokens[TOKENS][HIDDEN], host_out[TOKENS][HIDDEN], host_weights[TOKENS][TOPK];
};

static int tensor_open(ncclEpTensor_t **tensor, ncclDataType_t type, unsigned int ndim, size_t d0, size_t d1, size_t d2)
{
    const size_t sizes[3] = {d0, d1, d2};
    size_t bytes = type == ncclInt64 ? 8 : 4;

    for (unsigned int i = 0; i < ndim; i++)
        bytes *= sizes[i];
    TRY(ncclEpTensorAlloc(tensor, ndim, type, sizes, NULL));
    TRY(cudaMalloc(&(*tensor)->data, bytes));
    TRY(cudaMemset((*tensor)->data, 0, bytes));
    return 0;
}

static int layer_open_tensors(struct layer *l)
{
    const size_t rows = (size_t)world.nranks * TOKENS;
    int rc = tensor_open(&l->idx, ncclInt64, 2, TOKENS, TOPK, 0);

    rc |= tensor_open(&l->tokens, ncclFloat32, 2, TOKENS, HIDDEN, 0);
    rc |= tensor_open(&l->weights, ncclFloat32, 2, TOKENS, TOPK, 0);
    rc |= tensor_open(&l->out, ncclFloat32, 2, TOKENS, HIDDEN, 0);
    rc |= tensor_open(&l->counters, ncclInt32, 1, LOCAL, 0, 0);
    if (l->low_latency)
        return rc | tensor_open(&l->received, ncclFloat32, 3, LOCAL, rows, HIDDEN);
    rc |= tensor_open(&l->received, ncclFloat32, 2, rows * TOPK, HIDDEN, 0);
    return rc | tensor_open(&l->row_weights, ncclFloat32, 1, rows * TOPK, 0, 0);
}

static int layer_open(struct layer *l, int low_latency)
{
    ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;

    memset(l, 0, sizeof(*l));
    l->low_latency = low_latency;
    config.algorithm = low_latency ? NCCL_EP_ALGO_LOW_LATENCY : NCCL_EP_ALGO_HIGH_THROUGHPUT;
    config.num_experts = (unsigned int)(world.nranks * LOCAL);
    config.max_dispatch_tokens_per_rank = TOKENS;
    config.max_recv_tokens_per_rank = (unsigned int)(world.nranks * TOKENS * TOPK);
    config.max_token_bytes = HIDDEN * sizeof(float);
    TRY(ncclEpCreateGroup(&l->group, world.comm, &config));
    TRY(ncclEpInitHandle(&l->handle, l->group, NCCL_EP_LAYOUT_EXPERT_MAJOR, NULL, TOPK, NULL));
    return layer_open_tensors(l);
}

static int layer_close(struct layer *l)
{
    ncclEpTensor_t *all[] = {l->idx, l->tokens, l->weights, l->received, l->row_weights, l->counters, l->out};

    TRY(ncclEpHandleDestroy(l->handle));
    TRY(ncclEpGroupDestroy(l->group));
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
        if (all[i]) {
            TRY(cudaFree(all[i]->data));
            TRY(ncclEpTensorDestroy(all[i]));
        }
    return 0;
}

/* Numbers and routing of a round, into the device's memory. */
static int layer_fill(struct layer *l, int round)
{
    for (int t = 0; t < TOKENS; t++) {
        for (int k = 0; k < TOPK; k++) {
            l->host_idx[t][k] = (world.rank + t * (round + 1) + k * LOCAL + round) % (world.nranks * LOCAL);
            l->host_weights[t][k] = 1.0f;
        }
        if (l->host_idx[t][0] == l->host_idx[t][1]) /* one rank: two experts all the same */
            l->host_idx[t][1] = (l->host_idx[t][0] + 1) % (world.nranks * LOCAL);
        for (int h = 0; h < HIDDEN; h++)
            l->host_tokens[t][h] = (float)((round * 1000 + world.rank * 100 + t * 7 + h) % 4096);
    }
    TRY(cudaMemcpy(l->idx->data, l->host_idx, sizeof(l->host_idx), cudaMemcpyHostToDevice));
    TRY(cudaMemcpy(l->tokens->data, l->host_tokens, sizeof(l->host_tokens), cudaMemcpyHostToDevice));
    TRY(cudaMemcpy(l->weights->data, l->host_weights, sizeof(l->host_weights), cudaMemcpyHostToDevice));
    TRY(cudaMemset(l->out->data, 0x5a, sizeof(l->host_out)));
    return 0;
}

/* The operations alone; `staged` halves in low latency. */
static int layer_issue(struct layer *l, int staged, cudaStream_t stream)
{
    struct nccl_calls c = nccl_calls_none();

    c.info.expert_counters = l->counters;
    c.in.tokens = l->tokens;
    c.in.topk_weights = l->low_latency ? NULL : l->weights;
    c.out.tokens = l->received;
    c.out.topk_weights = l->row_weights;
    c.config.send_only = c.cconfig.send_only = (unsigned int)staged;
    c.cin.tokens = l->received;
    c.cout.tokens = l->out;
    c.cout.topk_weights = l->low_latency ? l->weights : NULL;
    TRY(ncclEpUpdateHandle(l->handle, l->idx, NULL, stream));
    TRY(ncclEpDispatch(l->handle, &c.in, &c.out, l->low_latency ? &c.info : NULL, &c.config, stream));
    TRY(ncclEpComplete(l->handle, NULL, stream));
    TRY(ncclEpCombine(l->handle, &c.cin, &c.cout, &c.cconfig, stream));
    TRY(ncclEpComplete(l->handle, NULL, stream));
    return 0;
}

static int layer_check(struct layer *l)
{
    for (int t = 0; t < TOKENS; t++)
        for (int h = 0; h < HIDDEN; h++)
            CHECK(l->host_out[t][h] == TOPK * l->host_tokens[t][h]);
    return 0;
}

/* ---- Events ------------------------------------------------------------------------------------------------------ */

static int test_events(void)
{
    cudaEvent_t start, end, never;
    struct layer l;
    float ms = -1;

    TRY(cudaEventCreate(&start));
    TRY(cudaEventCreate(&end));
    TRY(cudaEventCreateWithFlags(&never, cudaEventDefault));
    if (layer_open(&l, 0) || layer_fill(&l, 0))
        return -1;
    TRY(cudaEventRecord(start, world.stream));
    if (layer_issue(&l, 0, world.stream))
        return -1;
    TRY(cudaEventRecord(end, world.stream));
    TRY(cudaStreamWaitEvent(world.other, end, 0)); /* the copy is on another stream */
    TRY(cudaMemcpyAsync(l.host_out, l.out->data, sizeof(l.host_out), cudaMemcpyDeviceToHost, world.other));
    TRY(cudaStreamSynchronize(world.other));
    TRY(cudaEventSynchronize(end));
    TRY(cudaEventQuery(end));
    TRY(cudaEventElapsedTime(&ms, start, end));
    CHECK(ms > 0 && ms < 60000);
    CHECK(cudaEventElapsedTime(&ms, start, never) == cudaErrorInvalidResourceHandle);
    CHECK(cudaPeekAtLastError() == cudaErrorInvalidResourceHandle);
    CHECK(cudaGetLastError() == cudaErrorInvalidResourceHandle && cudaGetLastError() == cudaSuccess);
    CHECK(!strcmp(cudaGetErrorName(cudaErrorInvalidValue), "cudaErrorInvalidValue"));
    CHECK(strlen(cudaGetErrorString(cudaErrorNotReady)) > 0);
    if (layer_check(&l))
        return -1;
    TRY(cudaEventDestroy(start));
    TRY(cudaEventDestroy(end));
    TRY(cudaEventDestroy(never));
    return layer_close(&l);
}

static int test_device(void)
{
    size_t available = 0, total = 0;
    int version = 0, value = 0;
    void *none = &value;

    TRY(cudaMemGetInfo(&available, &total));
    CHECK(available > 0 && available <= total);
    TRY(cudaRuntimeGetVersion(&version));
    CHECK(version >= 11000 && CUDART_VERSION >= 11000);
    TRY(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0));
    CHECK(value > 0);
    TRY(cudaMalloc(&none, 0));
    TRY(cudaFree(none));
    TRY(cudaFree(NULL));
    CHECK(cudaSetDevice(-1) == cudaErrorInvalidDevice && cudaGetLastError() == cudaErrorInvalidDevice);
    TRY(cudaStreamQuery(world.stream));
    return 0;
}

#ifndef CUDA_VERSION /* the stand-in alone: NVIDIA's runtime follows some handles that are none */
#define NONE(call) CHECK((call) != cudaSuccess && cudaGetLastError() != cudaSuccess)

/* Events and graphs that are none, or were destroyed, are refused. */
static int test_strangers(void)
{
    char bytes[64] = {0};
    cudaEvent_t gone;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    void *freed;
    float ms;

    TRY(cudaEventCreate(&gone));
    TRY(cudaEventDestroy(gone));
    TRY(cudaMalloc(&freed, 64));
    TRY(cudaFree(freed));
    void *const things[] = {NULL, bytes, (void *)16, gone, world.stream, freed};
    for (size_t i = 0; i < sizeof(things) / sizeof(things[0]); i++) {
        NONE(cudaEventRecord(things[i], world.stream));
        NONE(cudaStreamWaitEvent(world.stream, things[i], 0));
        NONE(cudaEventSynchronize(things[i]));
        NONE(cudaEventQuery(things[i]));
        NONE(cudaEventElapsedTime(&ms, things[i], things[i]));
        NONE(cudaEventDestroy(things[i]));
        NONE(cudaGraphInstantiate(&exec, things[i], 0));
        NONE(cudaGraphLaunch(things[i], world.stream));
        NONE(cudaGraphExecDestroy(things[i]));
        NONE(cudaGraphDestroy(things[i]));
        if (things[i])
            NONE(cudaFree(things[i]));
    }
    NONE(cudaMemcpy(bytes, bytes + 32, 1, (enum cudaMemcpyKind)5));
    TRY(cudaStreamBeginCapture(world.stream, cudaStreamCaptureModeRelaxed));
    TRY(cudaStreamEndCapture(world.stream, &graph));
    TRY(cudaGraphInstantiate(&exec, graph, 0));
    TRY(cudaGraphDestroy(graph));
    NONE(cudaGraphDestroy(graph));
    TRY(cudaGraphLaunch(exec, world.stream)); /* keeps what it was made of */
    TRY(cudaGraphExecDestroy(exec));
    NONE(cudaGraphExecDestroy(exec));
    return 0;
}
#else
static int test_strangers(void)
{
    return 0;
}
#endif

/* ---- Graphs ------------------------------------------------------------------------------------------------------ */

static void count_call(void *arg)
{
    ++*(int *)arg;
}

static int expect_capturing(enum cudaStreamCaptureStatus expected)
{
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusInvalidated;

    TRY(cudaStreamIsCapturing(world.stream, &status));
    CHECK(status == expected);
    return 0;
}

/* A layer, the copy of its result and a call, as one graph. */
static int capture_layer(struct layer *l, int staged, int *calls, cudaGraphExec_t *exec)
{
    cudaGraph_t graph;

    TRY(cudaStreamBeginCapture(world.stream, cudaStreamCaptureModeRelaxed));
    if (expect_capturing(cudaStreamCaptureStatusActive))
        return -1;
    TRY(cudaMemsetAsync(l->received->data, 0, HIDDEN * sizeof(float), world.stream));
    if (layer_issue(l, staged, world.stream))
        return -1;
    TRY(cudaMemcpyAsync(l->host_out, l->out->data, sizeof(l->host_out), cudaMemcpyDeviceToHost, world.stream));
    TRY(cudaLaunchHostFunc(world.stream, count_call, calls));
    TRY(cudaStreamEndCapture(world.stream, &graph));
    if (expect_capturing(cudaStreamCaptureStatusNone))
        return -1;
    TRY(cudaGraphInstantiate(exec, graph, 0));
    TRY(cudaGraphDestroy(graph));
    return 0;
}

/* Nothing runs while it is recorded, and every launch takes the routing and the tokens of its time. */
static int test_graph(int low_latency, int staged)
{
    static struct layer l;
    cudaGraphExec_t exec;
    int calls = 0;

    if (layer_open(&l, low_latency) || layer_fill(&l, 0) || layer_issue(&l, staged, world.stream))
        return -1;
    TRY(cudaStreamSynchronize(world.stream));
    memset(l.host_out, 0, sizeof(l.host_out));
    if (capture_layer(&l, staged, &calls, &exec))
        return -1;
    TRY(cudaStreamSynchronize(world.stream));
    CHECK(calls == 0 && l.host_out[0][HIDDEN - 1] == 0);
    for (int round = 1; round <= LAUNCHES; round++) {
        if (layer_fill(&l, round))
            return -1;
        memset(l.host_out, 0, sizeof(l.host_out));
        TRY(cudaGraphLaunch(exec, round % 2 ? world.stream : world.other));
        TRY(cudaStreamSynchronize(round % 2 ? world.stream : world.other));
        CHECK(calls == round);
        if (layer_check(&l))
            return -1;
    }
    TRY(cudaGraphExecDestroy(exec));
    return layer_close(&l);
}

/* The last rank comes late: what the others have issued waits for it. */
static int last_rank_is_late(void)
{
    const struct timespec pause = {.tv_nsec = 300000000};

    return world.rank > 0 && world.rank == world.nranks - 1 ? nanosleep(&pause, NULL) : 0;
}

/* Work of two groups on one stream is done in the order in which it was given: the second sends what the first brought
 * back. */
static int test_two_groups(cudaStream_t stream)
{
    static struct layer a, b;
    ncclEpTensor_t *own;

    if (layer_open(&a, 0) || layer_open(&b, 1) || layer_fill(&a, 5) || layer_fill(&b, 6) || last_rank_is_late())
        return -1;
    own = b.tokens;
    b.tokens = a.out;
    if (layer_issue(&a, 0, stream) || layer_issue(&b, 0, stream))
        return -1;
    TRY(cudaMemcpyAsync(a.host_out, a.out->data, sizeof(a.host_out), cudaMemcpyDeviceToHost, stream));
    TRY(cudaMemcpyAsync(b.host_out, b.out->data, sizeof(b.host_out), cudaMemcpyDeviceToHost, stream));
    TRY(cudaStreamSynchronize(stream));
    b.tokens = own;
    for (int t = 0; t < TOKENS; t++)
        for (int h = 0; h < HIDDEN; h++)
            CHECK(b.host_out[t][h] == TOPK * TOPK * a.host_tokens[t][h]);
    return layer_check(&a) || layer_close(&a) || layer_close(&b) ? -1 : 0;
}

/* A handle ends, which waits for its group, while the group is behind another one, and that one behind its operations
 * before. No stream needs what the waiting thread has: that would last as long as the group's timeout, 100 s. */
static int test_the_end_of_a_handle(void)
{
    static struct layer a, b;
    time_t began;

    if (layer_open(&a, 0) || layer_open(&b, 1) || layer_fill(&a, 7) || layer_fill(&b, 8) || last_rank_is_late())
        return -1;
    if (layer_issue(&a, 0, world.stream) || layer_issue(&b, 0, world.stream) || layer_issue(&a, 0, world.stream))
        return -1;
    began = time(NULL);
    TRY(ncclEpHandleDestroy(a.handle));
    CHECK(time(NULL) - began < 60);
    TRY(cudaMemcpyAsync(a.host_out, a.out->data, sizeof(a.host_out), cudaMemcpyDeviceToHost, world.stream));
    TRY(cudaMemcpyAsync(b.host_out, b.out->data, sizeof(b.host_out), cudaMemcpyDeviceToHost, world.stream));
    TRY(cudaStreamSynchronize(world.stream));
    if (layer_check(&a) || layer_check(&b))
        return -1;
    TRY(ncclEpInitHandle(&a.handle, a.group, NCCL_EP_LAYOUT_EXPERT_MAJOR, NULL, TOPK, NULL));
    return layer_close(&a) || layer_close(&b) ? -1 : 0;
}

int test_runtime(void)
{
    if (test_device() || test_strangers() || test_events() || test_graph(0, 0) || test_graph(1, 0) || test_graph(1, 1))
        return -1;
    return test_two_groups(world.stream) || test_two_groups(NULL) || test_the_end_of_a_handle() ? -1 : 0;
}
