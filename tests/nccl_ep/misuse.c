/* SPDX-License-Identifier: Apache-2.0 */
/* What is refused, and how: nothing is sent, so that every rank does this by itself. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "nccl_case.h"

#define BAD ncclInvalidArgument
#define USAGE ncclInvalidUsage

static const struct spec ll_spec = {"ll", LL, EXPERT_MAJOR, EPX_BF16, EPX_BF16, EPX_INT32, 1, 2, 64, 4, 16, .even = 1};

/* The message of the last failure contains this. */
#define SAYS(text) CHECK(strstr(ncclEpxGetLastError(), text) != NULL)

static int test_tensors(void)
{
    const size_t sizes[2] = {3, 4};
    ncclEpTensorAllocConfig_t config = NCCL_EP_TENSOR_ALLOC_CONFIG_INIT;
    ncclEpTensor_t *tensor = NULL, own = NCCL_EP_TENSOR_INIT;
    int version = 0;

    EXPECT(BAD, ncclEpGetVersion(NULL));
    TRY(ncclEpGetVersion(&version));
    CHECK(version == NCCL_EP_VERSION_CODE && version == 200);
    EXPECT(BAD, ncclEpTensorAlloc(NULL, 2, ncclFloat32, sizes, NULL));
    EXPECT(BAD, ncclEpTensorAlloc(&tensor, 2, ncclFloat32, NULL, NULL));
    EXPECT(BAD, ncclEpTensorAlloc(&tensor, 0, ncclFloat32, sizes, NULL));
    SAYS("ndim: expected 1 or more, got 0");
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
    BAD_GROUP(BAD, c.size = NCCL_EP_GROUP_CONFIG_V1_SIZE - 1);
    BAD_GROUP(BAD, c.magic = 0);
    BAD_GROUP(BAD, c.algorithm = (ncclEpAlgorithm_t)2);
    BAD_GROUP(BAD, c.num_experts = 0);
    BAD_GROUP(BAD, c.max_dispatch_tokens_per_rank = 0);
    SAYS("max_dispatch_tokens_per_rank: expected 1 to");
    BAD_GROUP(BAD, c.max_token_bytes = 0);
    BAD_GROUP(USAGE, c.alloc.alloc_fn = no_alloc);
    BAD_GROUP(USAGE, c.alloc.free_fn = no_free);
    BAD_GROUP(ncclSystemError, c.alloc.alloc_fn = no_alloc; c.alloc.free_fn = no_free);
    TRY(ncclEpGroupDestroy(NULL));
    EXPECT(BAD, ncclEpGroupDestroy((ncclEpGroup_t)&good));
    /* Where there are SMs, there are not so many; where there are none, the limit means nothing. */
    c = good, c.max_num_sms = 100000;
    c.rdma_buffer_size = 1ul << 40;
    c.version = 9; /* NCCL_EP_ENV_VERBOSE: a warning, and no more */
    EXPECT(on_gpu() ? USAGE : ncclSuccess, ncclEpCreateGroup(&group, world.comm, &c));
    if (!on_gpu())
        TRY(ncclEpGroupDestroy(group));
    return 0;
}

static int test_handle_arguments(ncclEpGroup_t group, int low)
{
    const ncclEpLayout_t wrong = low ? FLAT : RANK_MAJOR;
    ncclEpHandleConfig_t config = NCCL_EP_HANDLE_CONFIG_INIT;
    ncclEpHandle_t handle;
    size_t bytes = 0;

    EXPECT(BAD, ncclEpInitHandle(NULL, group, EXPERT_MAJOR, NULL, 2, NULL));
    EXPECT(BAD, ncclEpInitHandle(&handle, NULL, EXPERT_MAJOR, NULL, 2, NULL));
    EXPECT(BAD, ncclEpInitHandle(&handle, group, NCCL_EP_LAYOUT_UNSET, NULL, 2, NULL));
    EXPECT(BAD, ncclEpInitHandle(&handle, group, wrong, NULL, 2, NULL));
    EXPECT(BAD, ncclEpInitHandle(&handle, group, EXPERT_MAJOR, NULL, 33, NULL));
    EXPECT(low ? BAD : USAGE, ncclEpInitHandle(&handle, group, EXPERT_MAJOR, NULL, -1, NULL));
    EXPECT(low ? BAD : USAGE, ncclEpHandleMemSize(group, EXPERT_MAJOR, NULL, &bytes, 0));
    EXPECT(BAD, ncclEpHandleMemSize(group, EXPERT_MAJOR, NULL, NULL, 2));
    EXPECT(BAD, ncclEpHandleMemSize(group, NCCL_EP_LAYOUT_UNSET, NULL, &bytes, 2));
    config.dispatch_output_per_expert_alignment = 12; /* of zones, which low latency does not have */
    EXPECT(low ? ncclSuccess : BAD, ncclEpInitHandle(&handle, group, EXPERT_MAJOR, &config, 2, NULL));
    TRY(ncclEpHandleDestroy(handle));
    config.size = 0;
    EXPECT(BAD, ncclEpInitHandle(&handle, group, EXPERT_MAJOR, &config, 2, NULL));
    TRY(ncclEpHandleDestroy(NULL));
    EXPECT(BAD, ncclEpUpdateHandle(NULL, NULL, NULL, world.stream));
    return 0;
}

/* A handle with one routing and all its tensors, and the arguments of the next call. */
struct calls {
    struct nccl_case nc;
    struct nccl_calls args;
};

static void reset(struct calls *c)
{
    nccl_calls_init(&c->args, &c->nc, 0);
}

static ncclResult_t dispatch(struct calls *c)
{
    const int low = c->nc.spec->algorithm == LL;
    ncclResult_t result = ncclEpDispatch(c->nc.handle, &c->args.in, &c->args.out, low ? &c->args.info : NULL,
                                         &c->args.config, world.stream);

    reset(c);
    return result;
}

static ncclResult_t combine(struct calls *c)
{
    ncclResult_t result = ncclEpCombine(c->nc.handle, &c->args.cin, &c->args.cout, &c->args.cconfig, world.stream);

    reset(c);
    return result;
}

/* `t` is `good` with one change, and dispatch refuses it as its tokens. */
#define BAD_TENSOR(...)           \
    do {                          \
        t = good;                 \
        __VA_ARGS__;              \
        c->args.in.tokens = &t;   \
        EXPECT(BAD, dispatch(c)); \
    } while (0)
/* With one change of the arguments of the call, which are made anew after it. */
#define REFUSED(result, change, call) \
    do {                              \
        change;                       \
        EXPECT(result, call);         \
    } while (0)

/* Invalid descriptions of one tensor, and of a call. */
static int test_descriptions(struct calls *c)
{
    ncclEpTensor_t good = NCCL_EP_TENSOR_INIT, t;
    size_t sizes[2] = {c->nc.tokens.tensor->sizes[0], c->nc.tokens.tensor->sizes[1]};

    good.ndim = 2;
    good.datatype = ncclBfloat16;
    good.data = c->nc.tokens.data;
    good.sizes = sizes;
    BAD_TENSOR(t.magic = 0);
    BAD_TENSOR(t.size--);
    BAD_TENSOR(t.ndim = 0);
    BAD_TENSOR(t.sizes = NULL);
    BAD_TENSOR(t.datatype = ncclFloat64);
    SAYS("inputs.tokens.datatype: expected bfloat16");
    BAD_TENSOR(t.datatype = ncclFloat8e4m3); /* without a recipe */
    SAYS("expected float16 or float32 or bfloat16, got float8e4m3");
    BAD_TENSOR(t.data = NULL);
    BAD_TENSOR(t.data = NULL, t.win_hdl = (ncclWindow_t)&good);
    SAYS("win_hdl: expected a window");
    REFUSED(BAD, c->args.in.tokens = NULL, dispatch(c));
    REFUSED(BAD, c->args.out.tokens = NULL, dispatch(c));
    REFUSED(BAD, c->args.in.size = 0, dispatch(c));
    REFUSED(BAD, c->args.out.magic = 0, dispatch(c));
    REFUSED(BAD, c->args.config.magic = 0, dispatch(c));
    REFUSED(BAD, c->args.config.pass_direction = (ncclEpPassDir_t)7, dispatch(c));
    REFUSED(BAD, c->args.cin.magic = 0, combine(c));
    REFUSED(BAD, c->args.cconfig.size = 0, combine(c));
    BAD_TENSOR(t.ndim = 1);
    /* A size that ends inside a field: its first bytes are taken, here of a recipe that is none. */
    c->args.config.quant_recipe = (ncclEpDispQuant_t)0x7f;
    REFUSED(BAD, c->args.config.size = NCCL_EP_DISPATCH_CONFIG_V1_SIZE + 1, dispatch(c));
    SAYS("quant_recipe");
    c->args.cin.scales = (ncclEpTensor_t *)(uintptr_t)0xdeadbee8;
    REFUSED(BAD, c->args.cin.size = NCCL_EP_COMBINE_INPUTS_V1_SIZE + 4, combine(c));
    SAYS("scales");
    EXPECT(BAD, ncclEpDispatch(c->nc.handle, NULL, &c->args.out, NULL, NULL, world.stream));
    EXPECT(BAD, ncclEpDispatch(NULL, &c->args.in, &c->args.out, NULL, NULL, world.stream));
    EXPECT(BAD, ncclEpCombine(c->nc.handle, &c->args.cin, NULL, NULL, world.stream));
    EXPECT(BAD, ncclEpComplete(NULL, NULL, world.stream));
    return 0;
}

/* Pointers that are none: no address, a page that cannot be read, a struct that begins before one, and page 0. */
static int test_bad_pointers(struct calls *c)
{
    char *pages = mmap(NULL, 2 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    void *bad[] = {(void *)(uintptr_t)0xdeadbee8, pages + 4096, pages + 4096 - 16, (void *)(uintptr_t)0xd0};
    ncclEpTensor_t good = *c->nc.tokens.tensor, t;
    size_t bytes, sizes[2] = {good.sizes[0], good.sizes[1]};
    ncclEpHandle_t handle;
    ncclEpGroup_t group;

    CHECK(pages != MAP_FAILED && mprotect(pages + 4096, 4096, PROT_NONE) == 0);
    good.magic = NCCL_EP_TENSOR_MAGIC;
    good.sizes = sizes;
    for (int i = 0; i < 4; i++) {
        void *at = bad[i];

        if (i == 2) /* its size and magic are right */
            memcpy(at, &c->args.in, 16);
        EXPECT(BAD, ncclEpDispatch(c->nc.handle, at, &c->args.out, NULL, NULL, world.stream));
        SAYS("inputs: expected a pointer to");
        EXPECT(BAD, ncclEpDispatch(c->nc.handle, &c->args.in, at, NULL, NULL, world.stream));
        EXPECT(BAD, ncclEpDispatch(c->nc.handle, &c->args.in, &c->args.out, at, NULL, world.stream));
        EXPECT(BAD, ncclEpCombine(c->nc.handle, at, &c->args.cout, NULL, world.stream));
        EXPECT(BAD, ncclEpCombine(c->nc.handle, &c->args.cin, at, NULL, world.stream));
        EXPECT(BAD, ncclEpUpdateHandle(c->nc.handle, at, NULL, world.stream));
        EXPECT(BAD, ncclEpUpdateHandle(c->nc.handle, c->nc.idx.tensor, at, world.stream));
        EXPECT(BAD, ncclEpCreateHandle(&handle, c->nc.group, c->nc.spec->layout, at, NULL, NULL, world.stream));
        EXPECT(BAD, ncclEpInitHandle(&handle, c->nc.group, c->nc.spec->layout, NULL, 2, at));
        EXPECT(BAD, ncclEpCreateGroup(&group, world.comm, at));
        EXPECT(BAD, ncclEpTensorDestroy(at));
        BAD_TENSOR(t.sizes = (size_t *)((char *)at + 8));
        if (i == 2)
            continue; /* the others are shorter than what lies before the page, or written */
        if (!on_gpu()) {
            BAD_TENSOR(t.data = at);
            SAYS("inputs.tokens.data: expected a pointer to");
        }
        EXPECT(BAD, ncclEpDispatch(c->nc.handle, &c->args.in, &c->args.out, NULL, at, world.stream));
        EXPECT(BAD, ncclEpCombine(c->nc.handle, &c->args.cin, &c->args.cout, at, world.stream));
        EXPECT(BAD, ncclEpComplete(c->nc.handle, at, world.stream));
        EXPECT(BAD, ncclEpInitHandle(&handle, c->nc.group, c->nc.spec->layout, at, 2, NULL));
        EXPECT(BAD, ncclEpInitHandle(at, c->nc.group, c->nc.spec->layout, NULL, 2, NULL));
        EXPECT(BAD, ncclEpHandleMemSize(c->nc.group, c->nc.spec->layout, NULL, at, 2));
        EXPECT(BAD, ncclEpHandleMemSize(c->nc.group, c->nc.spec->layout, at, &bytes, 2));
        EXPECT(BAD, ncclEpCreateGroup(at, world.comm, NULL));
        EXPECT(BAD, ncclEpTensorAlloc(at, 2, ncclFloat32, sizes, NULL));
        EXPECT(BAD, ncclEpTensorAlloc(&c->args.in.tokens, 2, ncclFloat32, at, NULL));
        EXPECT(BAD, ncclEpxGetAsyncError(c->nc.group, at));
        EXPECT(BAD, ncclEpGetVersion(at));
        reset(c);
    }
    return munmap(pages, 2 * 4096);
}

/* Results that would go to memory that can only be read. */
static int test_read_only(struct calls *c)
{
    void *at = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    const size_t sizes[2] = {3, 4};

    CHECK(at != MAP_FAILED);
    EXPECT(BAD, ncclEpGetVersion(at));
    SAYS("which is not writable");
    EXPECT(BAD, ncclEpTensorAlloc(at, 2, ncclFloat32, sizes, NULL));
    EXPECT(BAD, ncclEpCreateGroup(at, world.comm, NULL));
    EXPECT(BAD, ncclEpInitHandle(at, c->nc.group, c->nc.spec->layout, NULL, 2, NULL));
    EXPECT(BAD, ncclEpCreateHandle(at, c->nc.group, c->nc.spec->layout, c->nc.idx.tensor, NULL, NULL, world.stream));
    EXPECT(BAD, ncclEpHandleMemSize(c->nc.group, c->nc.spec->layout, NULL, at, 2));
    EXPECT(BAD, ncclEpxGetAsyncError(c->nc.group, at));
    EXPECT(BAD, ncclEpxMemAlloc(c->nc.group, 16, at));
    return munmap(at, 4096);
}

static int open_calls(struct calls *c, const struct spec *spec, int routed)
{
    ncclEpGroup_t group;

    if (group_open(&group, spec, 0, 0) || test_handle_arguments(group, spec->algorithm == LL) ||
        nccl_case_open(&c->nc, group, spec))
        return -1;
    reset(c);
    EXPECT(spec->algorithm == LL ? BAD : USAGE, dispatch(c)); /* no routing yet */
    EXPECT(spec->algorithm == LL ? BAD : USAGE, combine(c));
    return routed ? nccl_case_route(&c->nc, 5) : 0;
}

/* A group without enable_mask: calls about masks and errors are InvUse, whatever is passed. EPX's own know errors of
 * every group. */
static int test_without_masks(ncclEpGroup_t group)
{
    int error = -1, mask = 1;

    EXPECT(USAGE, ncclEpMaskQuery(group, &mask, world.stream));
    EXPECT(USAGE, ncclEpMaskQuery(group, NULL, world.stream));
    EXPECT(USAGE, ncclEpMaskUpdate(group, &mask, world.stream));
    EXPECT(USAGE, ncclEpMaskUpdate(group, NULL, world.stream));
    EXPECT(USAGE, ncclEpMaskClean(group, world.stream));
    EXPECT(USAGE, ncclEpGetAsyncError(group, &error));
    EXPECT(USAGE, ncclEpGetAsyncError(group, NULL));
    EXPECT(USAGE, ncclEpErrorClear(group));
    EXPECT(BAD, ncclEpxGetAsyncError(group, NULL));
    TRY(ncclEpxGetAsyncError(group, &error));
    CHECK(error == 0);
    TRY(ncclEpxErrorClear(group));
    return 0;
}

/* A group with masks: pointers for results, and masks, are looked at before they are used. */
static int test_mask_pointers(void)
{
    char *const pages = mmap(NULL, 2 * 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    void *const bad[] = {NULL, pages, (void *)(uintptr_t)16};
    void *const read_only = pages + 4096;
    ncclEpGroup_t group;

    CHECK((void *)pages != MAP_FAILED && !mprotect(read_only, 4096, PROT_READ));
    if (group_open(&group, &ll_spec, 1, 0))
        return -1;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        EXPECT(BAD, ncclEpMaskUpdate(group, bad[i], world.stream));
        EXPECT(BAD, ncclEpGetAsyncError(group, bad[i]));
        if (!on_gpu())
            EXPECT(BAD, ncclEpMaskQuery(group, bad[i], world.stream));
    }
    EXPECT(BAD, ncclEpGetAsyncError(group, read_only));
    if (!on_gpu())
        EXPECT(BAD, ncclEpMaskQuery(group, read_only, world.stream));
    TRY(ncclEpGroupDestroy(group));
    return munmap(pages, 2 * 4096);
}

static int close_calls(struct calls *c)
{
    ncclEpGroup_t group = c->nc.group;

    if (test_without_masks(group) || nccl_case_close(&c->nc))
        return -1;
    TRY(ncclEpGroupDestroy(group));
    EXPECT(BAD, ncclEpGroupDestroy(group));
    return 0;
}

static int test_ll_expert(void)
{
    struct calls c;

    if (open_calls(&c, &ll_spec, 1) || test_descriptions(&c) || test_bad_pointers(&c) || test_read_only(&c))
        return -1;
    TRY(ncclEpUpdateHandle(c.nc.handle, c.nc.idx.tensor, &c.args.info, world.stream)); /* looks at no counter */
    REFUSED(BAD, c.args.info.expert_counters = NULL, dispatch(&c));
    SAYS("layout_info.expert_counters: EXPERT_MAJOR needs it");
    EXPECT(BAD, ncclEpDispatch(c.nc.handle, &c.args.in, &c.args.out, NULL, NULL, world.stream));
    REFUSED(USAGE, c.args.config.pass_direction = NCCL_EP_BWD_PASS, dispatch(&c));
    REFUSED(USAGE, c.args.cconfig.pass_direction = NCCL_EP_BWD_PASS, combine(&c));
    REFUSED(BAD, c.args.out.topk_idx = c.nc.idx.tensor, dispatch(&c));
    /* A receive tensor with a row too few. */
    c.nc.received.tensor->sizes[1]--;
    EXPECT(BAD, dispatch(&c));
    c.nc.received.tensor->sizes[1]++;
    if (nccl_case_dispatch(&c.nc, 1, 0, 0) || nccl_case_check_dispatch(&c.nc, 0))
        return -1;
    reset(&c);
    REFUSED(BAD, c.args.cout.topk_weights = NULL, combine(&c)); /* which it reads */
    return close_calls(&c);
}

static int test_ll_rank(void)
{
    struct spec spec = ll_spec;
    struct calls c;

    spec.layout = RANK_MAJOR;
    if (open_calls(&c, &spec, 1))
        return -1;
    REFUSED(BAD, c.args.in.topk_weights = NULL, dispatch(&c));
    REFUSED(BAD, c.args.info.expert_counters = c.nc.rank_counters.tensor, dispatch(&c));
    if (nccl_case_dispatch(&c.nc, 1, 0, 0) || nccl_case_check_dispatch(&c.nc, 0))
        return -1;
    return close_calls(&c);
}

static int test_ht(ncclEpLayout_t layout)
{
    struct spec spec = ll_spec;
    struct calls c;
    size_t rows;

    spec.algorithm = HT;
    spec.layout = layout;
    if (open_calls(&c, &spec, 1) || test_descriptions(&c))
        return -1;
    REFUSED(BAD, c.args.in.topk_weights = NULL, dispatch(&c));
    REFUSED(BAD, c.args.out.topk_weights = NULL, dispatch(&c));
    REFUSED(BAD, c.args.out.topk_idx = layout == FLAT ? NULL : c.nc.idx.tensor, dispatch(&c));
    SAYS("outputs.topk_idx");
    REFUSED(BAD, c.args.config.pass_direction = NCCL_EP_BWD_PASS, dispatch(&c)); /* with weights */
    rows = c.nc.received.tensor->sizes[0]--;
    EXPECT(BAD, dispatch(&c));
    SAYS("max_recv_tokens_per_rank");
    c.nc.received.tensor->sizes[0] = rows;
    REFUSED(BAD, c.args.cin.topk_weights = c.nc.result_weights.tensor, combine(&c)); /* forward */
    REFUSED(BAD, c.args.cconfig.pass_direction = NCCL_EP_BWD_PASS, combine(&c));     /* without */
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

    spec.algorithm = HT;
    spec.layout = FLAT;
    spec.rows_open = 1;
    if (open_calls(&c, &spec, 1))
        return -1;
    total = (size_t)c.nc.recv.total;
    CHECK(total > 1);
    c.nc.received.tensor->sizes[0] = c.nc.received_weights.tensor->sizes[0] = c.nc.received_idx.tensor->sizes[0] =
        total - 1;
    EXPECT(BAD, dispatch(&c));
    SAYS("rows or more");
    c.nc.received.tensor->sizes[0] = c.nc.received_weights.tensor->sizes[0] = c.nc.received_idx.tensor->sizes[0] =
        total;
    TRY(dispatch(&c));
    TRY(cudaStreamSynchronize(world.stream));
    return close_calls(&c);
}

int test_misuse(void)
{
    return test_tensors() || test_groups() || test_ll_expert() || test_ll_rank() || test_ht(FLAT) ||
                   test_ht(EXPERT_MAJOR) || test_rows_open() || test_mask_pointers()
               ? -1
               : 0;
}
