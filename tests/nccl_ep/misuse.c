/* SPDX-License-Identifier: Apache-2.0 */
/* What is refused, and how: nothing is sent, so that every rank does this by itself. */
#include <stdlib.h>
#include <string.h>

#include "nccl_case.h"

#define BAD ncclInvalidArgument
#define USAGE ncclInvalidUsage

static const struct spec ll_spec = {.name = "ll",
                                    .algorithm = NCCL_EP_ALGO_LOW_LATENCY,
                                    .layout = NCCL_EP_LAYOUT_EXPERT_MAJOR,
                                    .dtype = EPX_BF16,
                                    .received = EPX_BF16,
                                    .counter = EPX_INT32,
                                    .alignment = 1,
                                    .topk = 2,
                                    .hidden = 64,
                                    .tokens = 4,
                                    .experts = 16,
                                    .even = 1};

/* The sentence of the last failure says this. */
static int says(const char *text)
{
    CHECK(strstr(ncclEpxGetLastError(), text) != NULL);
    return 0;
}

static int test_tensors(void)
{
    const size_t sizes[2] = {3, 4};
    ncclEpTensorAllocConfig_t config = NCCL_EP_TENSOR_ALLOC_CONFIG_INIT;
    ncclEpTensor_t *tensor = NULL, own = NCCL_EP_TENSOR_INIT;
    int version = 0;

    EXPECT(BAD, ncclEpGetVersion(NULL));
    TRY(ncclEpGetVersion(&version));
    CHECK(version == NCCL_EP_VERSION_CODE && version == 100);
    EXPECT(BAD, ncclEpTensorAlloc(NULL, 2, ncclFloat32, sizes, NULL));
    EXPECT(BAD, ncclEpTensorAlloc(&tensor, 2, ncclFloat32, NULL, NULL));
    EXPECT(BAD, ncclEpTensorAlloc(&tensor, 0, ncclFloat32, sizes, NULL));
    if (says("ndim: expected 1 to 4, got 0"))
        return -1;
    config.magic ^= 1;
    EXPECT(BAD, ncclEpTensorAlloc(&tensor, 2, ncclFloat32, sizes, &config));
    CHECK(tensor == NULL);
    config.magic ^= 1;
    TRY(ncclEpTensorAlloc(&tensor, 2, ncclFloat32, sizes, &config));
    CHECK(tensor->ndim == 2 && tensor->datatype == ncclFloat32 && !tensor->data && tensor->sizes != sizes &&
          !memcmp(tensor->sizes, sizes, sizeof(sizes)));
    TRY(ncclEpTensorDestroy(tensor));
    TRY(ncclEpTensorDestroy(NULL));
    EXPECT(BAD, ncclEpTensorDestroy(&own));
    return 0;
}

static int on_gpu(void)
{
    const char *device = getenv("EPX_DEVICE");

    return device && !strcmp(device, "cuda");
}

static cudaError_t no_alloc(void **ptr, size_t size, void *context)
{
    (void)ptr, (void)size, (void)context;
    return cudaErrorMemoryAllocation;
}

static cudaError_t no_free(void *ptr, void *context)
{
    (void)ptr, (void)context;
    return cudaSuccess;
}

static int test_groups(void)
{
    ncclEpGroupConfig_t good = NCCL_EP_GROUP_CONFIG_INIT, c;
    ncclEpGroup_t group;

    good.num_experts = 16;
    good.max_dispatch_tokens_per_rank = 4;
    good.max_token_bytes = 128;
    EXPECT(BAD, ncclEpCreateGroup(NULL, world.comm, &good));
    EXPECT(BAD, ncclEpCreateGroup(&group, NULL, &good));
    EXPECT(BAD, ncclEpCreateGroup(&group, world.comm, NULL));
    c = good, c.size--;
    EXPECT(BAD, ncclEpCreateGroup(&group, world.comm, &c));
    c = good, c.magic = 0;
    EXPECT(BAD, ncclEpCreateGroup(&group, world.comm, &c));
    c = good, c.algorithm = (ncclEpAlgorithm_t)2;
    EXPECT(BAD, ncclEpCreateGroup(&group, world.comm, &c));
    c = good, c.num_experts = 0;
    EXPECT(BAD, ncclEpCreateGroup(&group, world.comm, &c));
    c = good, c.max_dispatch_tokens_per_rank = 0;
    EXPECT(BAD, ncclEpCreateGroup(&group, world.comm, &c));
    if (says("max_dispatch_tokens_per_rank: expected 1 to"))
        return -1;
    c = good, c.max_token_bytes = 0;
    EXPECT(BAD, ncclEpCreateGroup(&group, world.comm, &c));
    c = good, c.alloc.alloc_fn = no_alloc;
    EXPECT(USAGE, ncclEpCreateGroup(&group, world.comm, &c));
    c = good, c.alloc.free_fn = no_free;
    EXPECT(USAGE, ncclEpCreateGroup(&group, world.comm, &c));
    c = good, c.rdma_buffer_size = 4096;
    EXPECT(USAGE, ncclEpCreateGroup(&group, world.comm, &c));
    if (says("rdma_buffer_size: expected NCCL_EP_AUTO or at least"))
        return -1;
    EXPECT(BAD, ncclEpGroupDestroy(NULL));
    EXPECT(BAD, ncclEpGroupDestroy((ncclEpGroup_t)&good));
    /* Where there are SMs, there are not so many; where there are none, the limit means nothing. */
    c = good, c.max_num_sms = 100000, c.alloc.alloc_fn = no_alloc, c.alloc.free_fn = no_free;
    c.rdma_buffer_size = 1ul << 40;
    EXPECT(on_gpu() ? USAGE : ncclSuccess, ncclEpCreateGroup(&group, world.comm, &c));
    if (!on_gpu())
        TRY(ncclEpGroupDestroy(group));
    return 0;
}

static int test_handle_arguments(ncclEpGroup_t group, int low)
{
    const ncclEpLayout_t wrong = low ? NCCL_EP_LAYOUT_FLAT : NCCL_EP_LAYOUT_RANK_MAJOR;
    ncclEpHandleConfig_t config = NCCL_EP_HANDLE_CONFIG_INIT;
    ncclEpHandle_t handle;
    size_t bytes = 0;

    EXPECT(BAD, ncclEpInitHandle(NULL, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, NULL, 2, NULL));
    EXPECT(BAD, ncclEpInitHandle(&handle, NULL, NCCL_EP_LAYOUT_EXPERT_MAJOR, NULL, 2, NULL));
    EXPECT(BAD, ncclEpInitHandle(&handle, group, NCCL_EP_LAYOUT_UNSET, NULL, 2, NULL));
    EXPECT(BAD, ncclEpInitHandle(&handle, group, wrong, NULL, 2, NULL));
    EXPECT(BAD, ncclEpInitHandle(&handle, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, NULL, 33, NULL));
    if (low)
        EXPECT(BAD, ncclEpInitHandle(&handle, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, NULL, -1, NULL));
    EXPECT(BAD, ncclEpHandleMemSize(group, NCCL_EP_LAYOUT_EXPERT_MAJOR, NULL, NULL, 2));
    EXPECT(BAD, ncclEpHandleMemSize(group, NCCL_EP_LAYOUT_UNSET, NULL, &bytes, 2));
    config.dispatch_output_per_expert_alignment = 12;
    EXPECT(BAD, ncclEpInitHandle(&handle, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, &config, 2, NULL));
    config.size = 0;
    EXPECT(BAD, ncclEpInitHandle(&handle, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, &config, 2, NULL));
    EXPECT(BAD, ncclEpHandleDestroy(NULL));
    EXPECT(BAD, ncclEpUpdateHandle(NULL, NULL, NULL, world.stream));
    return 0;
}

/* A handle with one routing and all its tensors; what a call is given can be changed before it. */
struct calls {
    struct nccl_case nc;
    ncclEpDispatchInputs_t in;
    ncclEpDispatchOutputs_t out;
    ncclEpDispatchConfig_t config;
    ncclEpCombineInputs_t cin;
    ncclEpCombineOutputs_t cout;
    ncclEpCombineConfig_t cconfig;
    ncclEpLayoutInfo_t info;
};

static void reset(struct calls *c)
{
    struct nccl_case *l = &c->nc;

    c->in = NCCL_EP_DISPATCH_INPUTS_INIT;
    c->out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    c->config = NCCL_EP_DISPATCH_CONFIG_INIT;
    c->cin = NCCL_EP_COMBINE_INPUTS_INIT;
    c->cout = NCCL_EP_COMBINE_OUTPUTS_INIT;
    c->cconfig = NCCL_EP_COMBINE_CONFIG_INIT;
    c->info = NCCL_EP_LAYOUT_INFO_INIT;
    c->in.tokens = l->tokens.tensor;
    c->out.tokens = l->received.tensor;
    if (l->received_weights.tensor) {
        c->in.topk_weights = l->weights.tensor;
        c->out.topk_weights = l->received_weights.tensor;
        c->out.topk_idx = l->received_idx.tensor;
    }
    c->info.expert_counters = l->expert_counters.tensor;
    c->info.src_rank_counters = l->rank_counters.tensor;
    c->cin.tokens = l->results.tensor;
    c->cout.tokens = l->combined.tensor;
    if (l->spec->algorithm == NCCL_EP_ALGO_LOW_LATENCY && l->spec->layout == NCCL_EP_LAYOUT_EXPERT_MAJOR)
        c->cout.topk_weights = l->weights.tensor;
}

static ncclResult_t dispatch(struct calls *c)
{
    const int low = c->nc.spec->algorithm == NCCL_EP_ALGO_LOW_LATENCY;
    ncclResult_t result =
        ncclEpDispatch(c->nc.handle, &c->in, &c->out, low ? &c->info : NULL, &c->config, world.stream);

    reset(c);
    return result;
}

static ncclResult_t combine(struct calls *c)
{
    ncclResult_t result = ncclEpCombine(c->nc.handle, &c->cin, &c->cout, &c->cconfig, world.stream);

    reset(c);
    return result;
}

/* Descriptions of one tensor that are not as they should be. */
static int test_descriptions(struct calls *c)
{
    ncclEpTensor_t good = NCCL_EP_TENSOR_INIT, t;
    size_t sizes[2] = {c->nc.tokens.tensor->sizes[0], c->nc.tokens.tensor->sizes[1]};

    good.ndim = 2;
    good.datatype = ncclBfloat16;
    good.data = c->nc.tokens.data;
    good.sizes = sizes;
    t = good, t.magic = 0, c->in.tokens = &t;
    EXPECT(BAD, dispatch(c));
    t = good, t.size++, c->in.tokens = &t;
    EXPECT(BAD, dispatch(c));
    t = good, t.ndim = 0, c->in.tokens = &t;
    EXPECT(BAD, dispatch(c));
    t = good, t.sizes = NULL, c->in.tokens = &t;
    EXPECT(BAD, dispatch(c));
    t = good, t.datatype = ncclFloat64, c->in.tokens = &t;
    EXPECT(BAD, dispatch(c));
    if (says("inputs.tokens.datatype: expected bfloat16"))
        return -1;
    t = good, t.datatype = ncclFloat8e4m3, c->in.tokens = &t; /* without scales */
    EXPECT(BAD, dispatch(c));
    if (says("inputs.scales"))
        return -1;
    t = good, t.data = NULL, c->in.tokens = &t;
    EXPECT(BAD, dispatch(c));
    t = good, t.data = NULL, t.win_hdl = (ncclWindow_t)&good, c->in.tokens = &t;
    EXPECT(BAD, dispatch(c));
    if (says("win_hdl: expected a window"))
        return -1;
    c->in.tokens = NULL;
    EXPECT(BAD, dispatch(c));
    c->out.tokens = NULL;
    EXPECT(BAD, dispatch(c));
    c->in.size = 0;
    EXPECT(BAD, dispatch(c));
    c->out.magic = 0;
    EXPECT(BAD, dispatch(c));
    c->config.magic = 0;
    EXPECT(BAD, dispatch(c));
    c->config.pass_direction = (ncclEpPassDir_t)7;
    EXPECT(BAD, dispatch(c));
    c->cin.magic = 0;
    EXPECT(BAD, combine(c));
    c->cconfig.size = 0;
    EXPECT(BAD, combine(c));
    EXPECT(BAD, ncclEpDispatch(c->nc.handle, NULL, &c->out, NULL, NULL, world.stream));
    EXPECT(BAD, ncclEpDispatch(NULL, &c->in, &c->out, NULL, NULL, world.stream));
    EXPECT(BAD, ncclEpCombine(c->nc.handle, &c->cin, NULL, NULL, world.stream));
    EXPECT(BAD, ncclEpComplete(NULL, NULL, world.stream));
    return 0;
}

static int open_calls(struct calls *c, const struct spec *spec, int routed)
{
    ncclEpGroup_t group;

    if (group_open(&group, spec, 0, 0) || test_handle_arguments(group, spec->algorithm == NCCL_EP_ALGO_LOW_LATENCY) ||
        nccl_case_open(&c->nc, group, spec, spec->algorithm == NCCL_EP_ALGO_HIGH_THROUGHPUT))
        return -1;
    reset(c);
    EXPECT(USAGE, dispatch(c)); /* no routing yet */
    EXPECT(USAGE, combine(c));
    return routed ? nccl_case_route(&c->nc, 5) : 0;
}

static int close_calls(struct calls *c)
{
    ncclEpGroup_t group = c->nc.group;
    int error = -1, mask = 1;

    EXPECT(USAGE, ncclEpMaskQuery(group, &mask, world.stream));
    EXPECT(USAGE, ncclEpMaskUpdate(group, &mask, world.stream));
    EXPECT(USAGE, ncclEpMaskClean(group, world.stream));
    EXPECT(BAD, ncclEpGetAsyncError(group, NULL));
    TRY(ncclEpGetAsyncError(group, &error));
    CHECK(error == 0);
    TRY(ncclEpErrorClear(group));
    if (nccl_case_close(&c->nc))
        return -1;
    TRY(ncclEpGroupDestroy(group));
    EXPECT(BAD, ncclEpGroupDestroy(group));
    return 0;
}

static int test_ll_expert(void)
{
    struct calls c;

    if (open_calls(&c, &ll_spec, 1) || test_descriptions(&c))
        return -1;
    EXPECT(BAD, ncclEpUpdateHandle(c.nc.handle, c.nc.idx.tensor, &c.info, world.stream));
    c.info.expert_counters = NULL;
    EXPECT(BAD, dispatch(&c));
    if (says("layout_info.expert_counters: EXPERT_MAJOR needs it"))
        return -1;
    EXPECT(BAD, ncclEpDispatch(c.nc.handle, &c.in, &c.out, NULL, NULL, world.stream));
    c.config.pass_direction = NCCL_EP_BWD_PASS;
    EXPECT(USAGE, dispatch(&c));
    c.cconfig.pass_direction = NCCL_EP_BWD_PASS;
    EXPECT(USAGE, combine(&c));
    c.out.topk_idx = c.nc.idx.tensor;
    EXPECT(BAD, dispatch(&c));
    /* A receive tensor with a row too few. */
    c.nc.received.tensor->sizes[1]--;
    EXPECT(BAD, dispatch(&c));
    c.nc.received.tensor->sizes[1]++;
    if (nccl_case_dispatch(&c.nc, 1, 0, 0) || nccl_case_check_dispatch(&c.nc, 0))
        return -1;
    reset(&c);
    c.cout.topk_weights = NULL; /* which it reads */
    EXPECT(BAD, combine(&c));
    c.cin.topk_weights = c.nc.weights.tensor;
    EXPECT(BAD, combine(&c));
    return close_calls(&c);
}

static int test_ll_rank(void)
{
    struct spec spec = ll_spec;
    struct calls c;

    spec.layout = NCCL_EP_LAYOUT_RANK_MAJOR;
    if (open_calls(&c, &spec, 1))
        return -1;
    c.in.topk_weights = NULL;
    EXPECT(BAD, dispatch(&c));
    c.info.src_rank_counters = NULL;
    EXPECT(BAD, dispatch(&c));
    c.info.expert_counters = c.nc.rank_counters.tensor;
    EXPECT(BAD, dispatch(&c));
    if (nccl_case_dispatch(&c.nc, 1, 0, 0) || nccl_case_check_dispatch(&c.nc, 0))
        return -1;
    reset(&c);
    c.cout.topk_weights = c.nc.weights.tensor;
    EXPECT(BAD, combine(&c));
    return close_calls(&c);
}

static int test_ht(ncclEpLayout_t layout)
{
    struct spec spec = ll_spec;
    struct calls c;
    size_t rows;

    spec.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
    spec.layout = layout;
    if (open_calls(&c, &spec, 1) || test_descriptions(&c))
        return -1;
    c.in.topk_weights = NULL;
    EXPECT(BAD, dispatch(&c));
    c.out.topk_weights = NULL;
    EXPECT(BAD, dispatch(&c));
    c.out.topk_idx = layout == NCCL_EP_LAYOUT_FLAT ? NULL : c.nc.idx.tensor;
    EXPECT(BAD, dispatch(&c));
    if (says("outputs.topk_idx"))
        return -1;
    c.config.pass_direction = NCCL_EP_BWD_PASS; /* with weights */
    EXPECT(BAD, dispatch(&c));
    rows = c.nc.received.tensor->sizes[0]--;
    EXPECT(BAD, dispatch(&c));
    if (says("max_recv_tokens_per_rank"))
        return -1;
    c.nc.received.tensor->sizes[0] = rows;
    EXPECT(BAD, ncclEpDispatch(c.nc.handle, &c.in, &c.out, &c.info, NULL, world.stream)); /* counts come earlier */
    c.cin.topk_weights = c.nc.result_weights.tensor;                                      /* forward */
    EXPECT(BAD, combine(&c));
    c.cout.topk_weights = c.nc.combined_weights.tensor;
    EXPECT(BAD, combine(&c));
    c.cconfig.pass_direction = NCCL_EP_BWD_PASS; /* without */
    EXPECT(BAD, combine(&c));
    EXPECT(BAD, ncclEpUpdateHandle(c.nc.handle, c.nc.weights.tensor, NULL, world.stream));
    TRY(ncclEpComplete(c.nc.handle, NULL, world.stream));
    return close_calls(&c);
}

/* The group does not say how many rows there may be: enough for this routing will do, and less will not. */
static int test_rows_open(void)
{
    struct spec spec = ll_spec;
    struct calls c;
    size_t total;

    spec.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
    spec.layout = NCCL_EP_LAYOUT_FLAT;
    spec.rows_open = 1;
    if (open_calls(&c, &spec, 1))
        return -1;
    total = (size_t)c.nc.recv.total;
    CHECK(total > 1);
    c.nc.received.tensor->sizes[0] = c.nc.received_weights.tensor->sizes[0] = c.nc.received_idx.tensor->sizes[0] =
        total - 1;
    EXPECT(BAD, dispatch(&c));
    if (says("rows are needed"))
        return -1;
    c.nc.received.tensor->sizes[0] = c.nc.received_weights.tensor->sizes[0] = c.nc.received_idx.tensor->sizes[0] =
        total;
    TRY(dispatch(&c));
    TRY(cudaStreamSynchronize(world.stream));
    return close_calls(&c);
}

int test_misuse(void)
{
    return test_tensors() || test_groups() || test_ll_expert() || test_ll_rank() || test_ht(NCCL_EP_LAYOUT_FLAT) ||
                   test_ht(NCCL_EP_LAYOUT_EXPERT_MAJOR) || test_rows_open()
               ? -1
               : 0;
}
