/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Descriptors of NCCL EP's interface: tensors, inputs, outputs, configurations and layouts of ncclEpUpdateHandle,
 * ncclEpDispatch, ncclEpCombine and ncclEpComplete, with sizes and magic numbers of any version. What is accepted goes
 * to epx_*, which end in this file (--wrap): there it must be what EPX's own interface may be given.
 *
 *     mode, layout, recipe and version of the group (1 each) | calls: which (1), then its structs
 */
#include "fuzz.h"

#include "nccl_ep/compat.h"

enum { TENSORS = 16, CALLS = 8, RANKS = 2, EXPERTS = 4, TOKENS = 6, BYTES = 1024 };

FUZZ_BEGIN(fuzz_quiet)

/* ---- What reaches EPX -------------------------------------------------------------------------------------------- */

epx_status __wrap_epx_dispatch(epx_handle *handle, const epx_dispatch_inputs *inputs,
                               const epx_dispatch_outputs *outputs, const epx_layout_info *info,
                               const epx_dispatch_config *config, epx_stream stream);
epx_status __wrap_epx_combine(epx_handle *handle, const epx_combine_inputs *inputs, const epx_combine_outputs *outputs,
                              const epx_combine_config *config, epx_stream stream);
epx_status __wrap_epx_complete(epx_handle *handle, epx_stream stream);
epx_status __wrap_epx_handle_update(epx_handle *handle, const epx_tensor *topk_idx, const epx_layout_info *info,
                                    epx_stream stream);

static void require_tensor(const epx_tensor *t)
{
    if (!t)
        return;
    FUZZ_REQUIRE(t->size == sizeof(*t) && t->dtype >= EPX_BF16 && t->dtype <= EPX_UINT8);
    FUZZ_REQUIRE(t->ndim >= 1 && t->ndim <= EPX_MAX_NDIM);
    for (int i = 0; i < t->ndim; i++)
        FUZZ_REQUIRE(t->shape[i] >= 0 && t->shape[i] <= (int64_t)INT32_MAX * 8 && !t->stride[i]);
}

static void require_info(const epx_layout_info *info)
{
    if (!info)
        return;
    FUZZ_REQUIRE(info->size == sizeof(*info));
    require_tensor(info->expert_counts);
    require_tensor(info->expert_offsets);
    require_tensor(info->rank_counts);
    require_tensor(info->total);
}

epx_status __wrap_epx_dispatch(epx_handle *handle, const epx_dispatch_inputs *inputs,
                               const epx_dispatch_outputs *outputs, const epx_layout_info *info,
                               const epx_dispatch_config *config, epx_stream stream)
{
    (void)stream;
    FUZZ_REQUIRE(handle && inputs->tokens && outputs->tokens);
    require_tensor(inputs->tokens);
    require_tensor(inputs->scales);
    require_tensor(inputs->topk_weights);
    require_tensor(outputs->tokens);
    require_tensor(outputs->scales);
    require_tensor(outputs->topk_weights);
    require_tensor(outputs->topk_idx);
    require_info(info);
    FUZZ_REQUIRE(config->direction == EPX_FORWARD || config->direction == EPX_BACKWARD);
    return EPX_OK;
}

epx_status __wrap_epx_combine(epx_handle *handle, const epx_combine_inputs *inputs, const epx_combine_outputs *outputs,
                              const epx_combine_config *config, epx_stream stream)
{
    (void)stream;
    FUZZ_REQUIRE(handle && inputs->tokens && outputs->tokens && config);
    require_tensor(inputs->tokens);
    require_tensor(inputs->topk_weights);
    require_tensor(inputs->row_scales);
    require_tensor(outputs->tokens);
    require_tensor(outputs->topk_weights);
    return EPX_OK;
}

epx_status __wrap_epx_complete(epx_handle *handle, epx_stream stream)
{
    (void)stream;
    FUZZ_REQUIRE(handle);
    return EPX_OK;
}

epx_status __wrap_epx_handle_update(epx_handle *handle, const epx_tensor *topk_idx, const epx_layout_info *info,
                                    epx_stream stream)
{
    (void)stream;
    FUZZ_REQUIRE(handle);
    require_tensor(topk_idx);
    require_info(info);
    return EPX_OK;
}

/* ---- Structs of the input ---------------------------------------------------------------------------------------- */

static ncclEpTensor_t *drawn[TENSORS];
static size_t *drawn_sizes[TENSORS];
static int ndrawn;

static void forget(void)
{
    for (int i = 0; i < ndrawn; i++) {
        free(drawn[i]);
        free(drawn_sizes[i]);
    }
    ndrawn = 0;
}

/* NULL, or a tensor that fits, nearly fits, or is anything. Its memory has exactly the bytes that it claims. */
static ncclEpTensor_t *draw_tensor(struct fuzz *f)
{
    static const int64_t extents[] = {0, 1, 2, 3, 4, 5, 6, 12, 16, 64, 512, 1024, INT32_MAX, 1ll << 31, INT64_MAX};
    static char memory[64] __attribute__((aligned(64)));
    ncclEpTensor_t *t;
    size_t *sizes;

    if (!fuzz_below(f, 4) || ndrawn == TENSORS)
        return NULL;
    t = calloc(1, sizeof(*t));
    FUZZ_REQUIRE(t);
    t->size = fuzz_below(f, 16) ? (unsigned int)sizeof(*t) : (unsigned int)fuzz_int(f, 4);
    t->magic = fuzz_below(f, 16) ? NCCL_EP_TENSOR_MAGIC : (unsigned int)fuzz_int(f, 4);
    t->ndim = fuzz_below(f, 16) ? 1 + fuzz_below(f, 4) : (unsigned int)fuzz_int(f, 4);
    t->datatype = (ncclDataType_t)fuzz_below(f, 20);
    t->data = fuzz_below(f, 8) ? memory + fuzz_below(f, 2) * fuzz_below(f, 16) : NULL;
    sizes = calloc(t->ndim < 8 ? t->ndim : 8, sizeof(*sizes));
    for (unsigned int i = 0; sizes && i < t->ndim && i < 8; i++)
        sizes[i] = (size_t)fuzz_around(f, extents, sizeof(extents) / sizeof(extents[0]));
    t->sizes = fuzz_below(f, 32) ? sizes : NULL;
    drawn[ndrawn] = t;
    drawn_sizes[ndrawn++] = sizes;
    return t;
}

/* Another version's struct: `bytes` of it, its first two words as drawn; exact memory. */
static void *draw_struct(struct fuzz *f, const void *good, size_t bytes)
{
    unsigned int head[2] = {(unsigned int)bytes, NCCL_EP_MAGIC};
    size_t room;
    char *out;

    if (!fuzz_below(f, 16))
        return NULL;
    if (!fuzz_below(f, 8))
        head[0] = (unsigned int)fuzz_int(f, 1);
    if (!fuzz_below(f, 16))
        head[1] = (unsigned int)fuzz_int(f, 4);
    room = head[0] < sizeof(head) ? sizeof(head) : head[0];
    out = calloc(1, room);
    FUZZ_REQUIRE(out);
    memcpy(out, good, room < bytes ? room : bytes);
    memcpy(out, head, sizeof(head));
    return out;
}

/* ---- Calls ------------------------------------------------------------------------------------------------------- */

/* Draws a tensor, or none, for each of these pointers. */
static void draw_tensors(struct fuzz *f, ncclEpTensor_t **const *pointers, size_t count)
{
    for (size_t i = 0; i < count; i++)
        *pointers[i] = draw_tensor(f);
}
#define DRAW_TENSORS(f, ...)                                    \
    draw_tensors((f), (ncclEpTensor_t * *const[]){__VA_ARGS__}, \
                 sizeof((ncclEpTensor_t **[]){__VA_ARGS__}) / sizeof(ncclEpTensor_t **))

static void free_all(void *const *at, int count)
{
    for (int i = 0; i < count; i++)
        free(at[i]);
}

static void call_dispatch(struct fuzz *f, struct ncclEpHandle *handle)
{
    ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
    ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    ncclEpDispatchConfig_t config = NCCL_EP_DISPATCH_CONFIG_INIT;
    ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
    void *at[4];

    DRAW_TENSORS(f, &in.tokens, &in.topk_weights, &in.scales, &out.tokens, &out.topk_weights, &out.scales,
                 &out.topk_idx, &info.expert_counters, &info.recv_total_counter);
    info.recv_topk_idx_kind = (ncclEpExpertIdKind_t)fuzz_below(f, 4);
    config.send_only = fuzz_below(f, 2);
    config.pass_direction = (ncclEpPassDir_t)fuzz_below(f, 3);
    config.quant_recipe = (ncclEpDispQuant_t)fuzz_below(f, 4);
    at[0] = draw_struct(f, &in, sizeof(in));
    at[1] = draw_struct(f, &out, sizeof(out));
    at[2] = draw_struct(f, &config, sizeof(config));
    at[3] = draw_struct(f, &info, sizeof(info));
    (void)ncclEpDispatch(handle, at[0], at[1], at[3], at[2], NULL);
    free_all(at, 4);
}

static void call_combine(struct fuzz *f, struct ncclEpHandle *handle)
{
    ncclEpCombineInputs_t in = NCCL_EP_COMBINE_INPUTS_INIT, *in_at;
    ncclEpCombineOutputs_t out = NCCL_EP_COMBINE_OUTPUTS_INIT, *out_at;
    ncclEpCombineConfig_t config = NCCL_EP_COMBINE_CONFIG_INIT, *config_at;

    DRAW_TENSORS(f, &in.tokens, &in.topk_weights, &in.scales, &out.tokens, &out.topk_weights);
    config.pass_direction = (ncclEpPassDir_t)fuzz_below(f, 3);
    config.quant_recipe = (ncclEpCombQuant_t)fuzz_below(f, 4);
    in_at = draw_struct(f, &in, sizeof(in));
    out_at = draw_struct(f, &out, sizeof(out));
    config_at = draw_struct(f, &config, sizeof(config));
    (void)ncclEpCombine(handle, in_at, out_at, config_at, NULL);
    free_all((void *[]){in_at, out_at, config_at}, 3);
}

static void call_update(struct fuzz *f, struct ncclEpHandle *handle)
{
    ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT, *info_at;

    info.expert_counters = draw_tensor(f);
    info.src_rank_counters = draw_tensor(f);
    info.expert_offsets = draw_tensor(f);
    info.recv_total_counter = draw_tensor(f);
    info_at = draw_struct(f, &info, sizeof(info));
    (void)ncclEpUpdateHandle(handle, draw_tensor(f), info_at, NULL);
    free(info_at);
}

static void call_alloc(struct fuzz *f)
{
    const unsigned int ndim = fuzz_below(f, 9);
    size_t sizes[8] = {0};
    ncclEpTensor_t *t = NULL;

    fuzz_fill(f, sizes, ndim < 8 ? ndim * sizeof(sizes[0]) : 0);
    if (ncclEpTensorAlloc(&t, ndim, (ncclDataType_t)fuzz_below(f, 20), ndim < 8 ? sizes : NULL, NULL) != ncclSuccess) {
        FUZZ_REQUIRE(!t);
        return;
    }
    FUZZ_REQUIRE(t->ndim == ndim && !memcmp(t->sizes, sizes, ndim * sizeof(sizes[0])));
    FUZZ_REQUIRE(ncclEpTensorDestroy(t) == ncclSuccess);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct fuzz f = {data, bytes};
    struct ncclEpGroup *group = calloc(1, sizeof(*group));
    struct ncclEpHandle *handle = calloc(1, sizeof(*handle));

    FUZZ_REQUIRE(group && handle);
    group->comm.nranks = RANKS;
    group->low_latency = (int)fuzz_below(&f, 2);
    group->nvfp4 = (int)fuzz_below(&f, 2);
    group->nodes = 1;
    group->max_topk = 2;
    group->config = (ncclEpGroupConfig_t){.size = sizeof(group->config),
                                          .magic = NCCL_EP_MAGIC,
                                          .version = 1 + fuzz_below(&f, 2),
                                          .num_experts = EXPERTS,
                                          .max_dispatch_tokens_per_rank = TOKENS,
                                          .max_recv_tokens_per_rank = RANKS * TOKENS,
                                          .max_token_bytes = BYTES};
    handle->group = group;
    handle->handle = (epx_handle *)(uintptr_t)64; /* never followed */
    handle->updated = (int)fuzz_below(&f, 2);
    handle->config.mode = group->low_latency ? EPX_LOW_LATENCY : EPX_HIGH_THROUGHPUT;
    handle->config.layout = fuzz_below(&f, 2) ? EPX_EXPERT_MAJOR : group->low_latency ? EPX_RANK_MAJOR : EPX_FLAT;
    handle->config.topk = 2;
    group_list_add(group);
    handle_list_add(handle);
    for (int i = 0; i < CALLS && f.left; i++) {
        switch (fuzz_below(&f, 4)) {
        case 0:
            call_dispatch(&f, handle);
            break;
        case 1:
            call_combine(&f, handle);
            break;
        case 2:
            call_update(&f, handle);
            break;
        default:
            call_alloc(&f);
            break;
        }
        forget();
    }
    handle_list_remove(handle);
    group_list_remove(group);
    free(handle);
    free(group);
    return 0;
}
