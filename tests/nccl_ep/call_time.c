/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Host time that NCCL EP's interface adds to a call: the same dispatches and combines through epx.h and through
 * nccl_ep.h, in turn, on one rank of the CPU device. Prints a tenth percentile of each, where no thread had to be woken
 * for the call, and the difference; exits with 1 if a difference is more than 2 us. Run by hand:
 * epx run -n 1 -- build/tests/nccl_ep_call_time
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cuda_runtime.h>
#include <nccl.h>
#include <nccl_ep.h>

#include "epx/epx.h"
#include "nccl_calls.h"

enum { ROUNDS = 4000, TOKENS = 8, TOPK = 2, HIDDEN = 512, EXPERTS = 4, NATIVE = 0, COMPAT = 1 };
#define LIMIT_US 2.0

#define MUST(call)                                                     \
    do {                                                               \
        if ((int)(call) != 0) {                                        \
            fprintf(stderr, "%s: %s\n", #call, ncclEpxGetLastError()); \
            exit(1);                                                   \
        }                                                              \
    } while (0)

static double now_us(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return x < y ? -1 : x > y;
}

static double tenth(double *times)
{
    qsort(times, ROUNDS, sizeof(*times), by_value);
    return times[ROUNDS / 10];
}

static int64_t ids[TOKENS * TOPK];
static uint16_t tokens[TOKENS * HIDDEN], received[EXPERTS * TOKENS * HIDDEN], back[TOKENS * HIDDEN];
static float weights[TOKENS * TOPK], row_weights[EXPERTS * TOKENS];
static int32_t counts[EXPERTS];

/* ---- Through epx.h -------------------------------------------------------------------------------------------- */

static epx_group *group;
static epx_handle *handle;

static int alone(void *context, const void *send, void *recv, size_t bytes)
{
    (void)context;
    memcpy(recv, send, bytes);
    return 0;
}

static void open_native(int low)
{
    epx_bootstrap boot = EPX_BOOTSTRAP_INIT;
    epx_group_config config = EPX_GROUP_CONFIG_INIT;
    epx_handle_config h = EPX_HANDLE_CONFIG_INIT;
    epx_tensor idx = epx_tensor_make(ids, EPX_INT64, 2, TOKENS, TOPK, 0, 0);

    boot.nranks = 1;
    boot.allgather = alone;
    config.device = EPX_DEVICE_CPU;
    config.modes = low ? EPX_LOW_LATENCY : EPX_HIGH_THROUGHPUT;
    config.num_experts = EXPERTS;
    config.max_tokens_per_rank = TOKENS;
    config.max_hidden_bytes = HIDDEN * 2;
    config.max_recv_tokens = EXPERTS * TOKENS;
    h.mode = (int32_t)config.modes;
    h.layout = EPX_EXPERT_MAJOR;
    h.topk = TOPK;
    MUST(epx_group_create(&group, &boot, &config));
    MUST(epx_handle_create(&handle, group, &h));
    MUST(epx_handle_update(handle, &idx, NULL, NULL));
    MUST(epx_stream_sync(group, NULL));
}

static double native(int low, int combine)
{
    epx_tensor x = epx_tensor_make(tokens, EPX_BF16, 2, TOKENS, HIDDEN, 0, 0);
    epx_tensor w = epx_tensor_make(weights, EPX_FP32, 2, TOKENS, TOPK, 0, 0);
    epx_tensor rows = low ? epx_tensor_make(received, EPX_BF16, 3, EXPERTS, TOKENS, HIDDEN, 0)
                          : epx_tensor_make(received, EPX_BF16, 2, EXPERTS * TOKENS, HIDDEN, 0, 0);
    epx_tensor rw = epx_tensor_make(row_weights, EPX_FP32, 1, EXPERTS * TOKENS, 0, 0, 0);
    epx_tensor y = epx_tensor_make(back, EPX_BF16, 2, TOKENS, HIDDEN, 0, 0);
    epx_tensor n = epx_tensor_make(counts, EPX_INT32, 1, EXPERTS, 0, 0, 0);
    epx_dispatch_inputs in = EPX_DISPATCH_INPUTS_INIT;
    epx_dispatch_outputs out = EPX_DISPATCH_OUTPUTS_INIT;
    epx_combine_inputs cin = EPX_COMBINE_INPUTS_INIT;
    epx_combine_outputs cout = EPX_COMBINE_OUTPUTS_INIT;
    epx_layout_info info = EPX_LAYOUT_INFO_INIT;
    double start;

    in.tokens = &x;
    out.tokens = &rows;
    cin.tokens = &rows;
    cout.tokens = &y;
    info.expert_counts = &n;
    cin.topk_weights = low ? &w : NULL;
    in.topk_weights = low ? NULL : &w;
    out.topk_weights = low ? NULL : &rw;
    start = now_us();
    MUST(combine ? epx_combine(handle, &cin, &cout, NULL, NULL)
                 : epx_dispatch(handle, &in, &out, low ? &info : NULL, NULL, NULL));
    start = now_us() - start;
    MUST(epx_stream_sync(group, NULL));
    return start;
}

/* ---- Through nccl_ep.h ---------------------------------------------------------------------------------------- */

static ncclComm_t comm;
static ncclEpGroup_t ep_group;
static ncclEpHandle_t ep_handle;

static ncclEpTensor_t tensor(void *data, ncclDataType_t type, unsigned int ndim, size_t *sizes)
{
    ncclEpTensor_t t = NCCL_EP_TENSOR_INIT;

    t.ndim = ndim;
    t.datatype = type;
    t.data = data;
    t.sizes = sizes;
    return t;
}

static void open_compat(int low)
{
    ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
    size_t sizes[2] = {TOKENS, TOPK};
    ncclEpTensor_t idx = tensor(ids, ncclInt64, 2, sizes);

    config.algorithm = low ? NCCL_EP_ALGO_LOW_LATENCY : NCCL_EP_ALGO_HIGH_THROUGHPUT;
    config.num_experts = EXPERTS;
    config.max_dispatch_tokens_per_rank = TOKENS;
    config.max_recv_tokens_per_rank = EXPERTS * TOKENS;
    config.max_token_bytes = HIDDEN * 2;
    MUST(ncclEpCreateGroup(&ep_group, comm, &config));
    MUST(ncclEpCreateHandle(&ep_handle, ep_group, NCCL_EP_LAYOUT_EXPERT_MAJOR, &idx, NULL, NULL, NULL));
    MUST(ncclEpxStreamSynchronize(NULL));
}

static double compat(int low, int combine)
{
    size_t two[2] = {TOKENS, HIDDEN}, k[2] = {TOKENS, TOPK}, flat[2] = {EXPERTS * TOKENS, HIDDEN};
    size_t three[3] = {EXPERTS, TOKENS, HIDDEN}, all[1] = {EXPERTS * TOKENS}, each[1] = {EXPERTS};
    ncclEpTensor_t x = tensor(tokens, ncclBfloat16, 2, two), w = tensor(weights, ncclFloat32, 2, k);
    ncclEpTensor_t rows = tensor(received, ncclBfloat16, low ? 3 : 2, low ? three : flat);
    ncclEpTensor_t rw = tensor(row_weights, ncclFloat32, 1, all), y = tensor(back, ncclBfloat16, 2, two);
    ncclEpTensor_t n = tensor(counts, ncclInt32, 1, each);
    struct nccl_calls c = nccl_calls_none();
    double start;

    c.in.tokens = &x;
    c.out.tokens = c.cin.tokens = &rows;
    c.cout.tokens = &y;
    c.info.expert_counters = &n;
    if (low) {
        c.cout.topk_weights = &w;
    } else {
        c.in.topk_weights = &w;
        c.out.topk_weights = &rw;
    }
    start = now_us();
    MUST(combine ? ncclEpCombine(ep_handle, &c.cin, &c.cout, NULL, NULL)
                 : ncclEpDispatch(ep_handle, &c.in, &c.out, &c.info, NULL, NULL));
    start = now_us() - start;
    MUST(ncclEpxStreamSynchronize(NULL));
    return start;
}

/* One dispatch and one combine of each, in turn. */
static int measure(int low)
{
    static double times[2][2][ROUNDS]; /* [combine][which] */
    int slow = 0;

    open_native(low);
    open_compat(low);
    for (int i = 0; i < ROUNDS; i++)
        for (int which = NATIVE; which <= COMPAT; which++)
            for (int combine = 0; combine < 2; combine++)
                times[combine][which][i] = which == NATIVE ? native(low, combine) : compat(low, combine);
    for (int combine = 0; combine < 2; combine++) {
        const double a = tenth(times[combine][NATIVE]), b = tenth(times[combine][COMPAT]);
        printf("%-16s %-9s %8.2f %8.2f %8.2f\n", low ? "low latency" : "high throughput",
               combine ? "combine" : "dispatch", a, b, b - a);
        slow |= b - a > LIMIT_US;
    }
    MUST(ncclEpGroupDestroy(ep_group));
    MUST(epx_group_destroy(group));
    return slow;
}

int main(void)
{
    ncclUniqueId id;
    int slow;

    for (int i = 0; i < TOKENS * TOPK; i++)
        ids[i] = i % EXPERTS;
    MUST(ncclGetUniqueId(&id));
    MUST(ncclCommInitRank(&comm, 1, id, 0));
    printf("host time of a call in us, 10th percentile of %d: epx.h, nccl_ep.h, added (limit %.0f)\n", ROUNDS,
           LIMIT_US);
    slow = measure(1) | measure(0);
    MUST(ncclCommDestroy(comm));
    return slow;
}
