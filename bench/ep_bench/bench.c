/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors, group, handle; one dispatch, one combine; the timed loop. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ep_bench.h"

static double now_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

static size_t memory_used(void)
{
    size_t available = 0, total = 0;

    CUDA(cudaMemGetInfo(&available, &total));
    return total - available;
}

static int is_ll(const struct bench *b)
{
    return b->shape.o->algorithm == NCCL_EP_ALGO_LOW_LATENCY;
}

/* ---- Tensors ----------------------------------------------------------------------------------------------------- */

static void buffer_open(struct buffer *b, int windowed, ncclDataType_t type, size_t element, unsigned int ndim,
                        size_t d0, size_t d1, size_t d2)
{
    const size_t sizes[3] = {d0, d1, d2};

    b->bytes = element;
    for (unsigned int i = 0; i < ndim; i++)
        b->bytes *= sizes[i];
    NCCL(ncclEpTensorAlloc(&b->tensor, ndim, type, sizes, NULL));
    if (windowed) {
        NCCL(ncclMemAlloc(&b->memory, b->bytes));
        NCCL(ncclCommWindowRegister(world.comm, b->memory, b->bytes, &b->window, NCCL_WIN_COLL_SYMMETRIC));
        b->tensor->win_hdl = b->window;
    } else {
        CUDA(cudaMalloc(&b->memory, b->bytes));
    }
    b->tensor->data = b->memory;
    if (b->bytes)
        CUDA(cudaMemset(b->memory, 0, b->bytes));
}

static void buffer_close(struct buffer *b)
{
    if (!b->tensor)
        return;
    if (b->window)
        NCCL(ncclCommWindowDeregister(world.comm, b->window));
    if (b->window)
        NCCL(ncclMemFree(b->memory));
    else
        CUDA(cudaFree(b->memory));
    NCCL(ncclEpTensorDestroy(b->tensor));
}

static void buffer_write(struct buffer *b, const void *host, size_t bytes)
{
    if (bytes)
        CUDA(cudaMemcpy(b->memory, host, bytes, cudaMemcpyHostToDevice));
}

void *buffer_to_host(const struct buffer *b)
{
    void *host = malloc(b->bytes + 1);

    if (!host)
        failed("malloc", 0, "no memory");
    if (b->bytes)
        CUDA(cudaMemcpy(host, b->memory, b->bytes, cudaMemcpyDeviceToHost));
    return host;
}

static void fill_rows(struct bench *b)
{
    const struct shape *s = &b->shape;
    unsigned char *tokens = malloc((size_t)b->mine.tokens * s->token_bytes + 1);
    unsigned char *scales = malloc((size_t)b->mine.tokens * s->scale_bytes + 1);

    if (!tokens || !scales)
        failed("malloc", 0, "no memory");
    for (int t = 0; t < b->mine.tokens; t++) {
        token_row(s, world.rank, t, tokens + (size_t)t * s->token_bytes);
        if (s->S)
            scale_row(s, world.rank, t, scales + (size_t)t * s->scale_bytes);
    }
    buffer_write(&b->tokens, tokens, (size_t)b->mine.tokens * s->token_bytes);
    if (s->S)
        buffer_write(&b->scales, scales, (size_t)b->mine.tokens * s->scale_bytes);
    free(tokens);
    free(scales);
}

static void fill_indices(struct bench *b)
{
    const size_t count = (size_t)b->mine.tokens * (size_t)b->shape.K;
    int32_t *narrow = malloc(count * sizeof(*narrow) + 1);

    if (!narrow)
        failed("malloc", 0, "no memory");
    for (size_t i = 0; i < count; i++)
        narrow[i] = (int32_t)b->mine.idx[i];
    if (b->shape.o->idx32)
        buffer_write(&b->idx, narrow, count * sizeof(*narrow));
    else
        buffer_write(&b->idx, b->mine.idx, count * sizeof(*b->mine.idx));
    buffer_write(&b->weights, b->mine.weights, count * sizeof(float));
    free(narrow);
}

static void open_inputs(struct bench *b)
{
    const struct shape *s = &b->shape;
    const size_t B = (size_t)b->mine.tokens, K = (size_t)s->K;
    const int idx32 = s->o->idx32;

    buffer_open(&b->idx, 0, idx32 ? ncclInt32 : ncclInt64, idx32 ? 4 : 8, 2, B, K, 0);
    buffer_open(&b->weights, 0, ncclFloat32, 4, 2, B, K, 0);
    buffer_open(&b->tokens, 0, dtype_nccl(s->token), dtype_size(s->token), 2, B, s->token_bytes / dtype_size(s->token),
                0);
    if (s->S)
        buffer_open(&b->scales, 0, dtype_nccl(s->scale), dtype_size(s->scale), 2, B, (size_t)s->S, 0);
    buffer_open(&b->out, 0, dtype_nccl((enum dtype)s->o->datatype), dtype_size((enum dtype)s->o->datatype), 2, B,
                (size_t)s->H, 0);
    fill_indices(b);
    fill_rows(b);
}

static void open_ll_outputs(struct bench *b, enum dtype type, size_t width, size_t scales, enum dtype scale)
{
    const struct shape *s = &b->shape;
    const int rm = s->o->layout == NCCL_EP_LAYOUT_RANK_MAJOR, zcopy = s->o->zcopy;
    const size_t d0 = (size_t)(rm ? s->R : s->L), d1 = rm ? (size_t)s->M : (size_t)s->R * (size_t)s->M;

    buffer_open(&b->received, zcopy, dtype_nccl(type), dtype_size(type), 3, d0, d1, width);
    if (scales)
        buffer_open(&b->received_scales, zcopy, dtype_nccl(scale), dtype_size(scale), 3, d0, d1, scales);
    if (s->o->combine_quant)
        buffer_open(&b->combine_scales, 0, ncclFloat32, 4, 3, d0, d1, 1);
    buffer_open(&b->counters, 0, ncclInt32, 4, 1, d0, 0, 0);
    if (rm) {
        buffer_open(&b->received_weights, 0, ncclFloat32, 4, 3, d0, d1, (size_t)s->K);
        buffer_open(&b->received_idx, 0, ncclInt32, 4, 3, d0, d1, (size_t)s->K);
    }
}

static void open_ht_outputs(struct bench *b, enum dtype type, size_t width)
{
    const struct shape *s = &b->shape;
    const int em = s->o->layout == NCCL_EP_LAYOUT_EXPERT_MAJOR, zcopy = s->o->zcopy;
    const size_t rows = (size_t)s->T;

    buffer_open(&b->received, zcopy, dtype_nccl(type), dtype_size(type), 2, rows, width, 0);
    if (s->S)
        buffer_open(&b->received_scales, zcopy, dtype_nccl(s->scale), dtype_size(s->scale), 2, rows, (size_t)s->S, 0);
    buffer_open(&b->received_weights, 0, ncclFloat32, 4, em ? 1 : 2, rows, (size_t)s->K, 0);
    if (!em)
        buffer_open(&b->received_idx, 0, ncclInt64, 8, 2, rows, (size_t)s->K, 0);
    else
        buffer_open(&b->offsets, 0, ncclInt32, 4, 1, (size_t)s->L, 0, 0);
    buffer_open(&b->counters, 0, ncclInt32, 4, 1, (size_t)s->L, 0, 0);
    buffer_open(&b->total, 0, ncclInt32, 4, 1, 1, 0, 0);
}

static void open_outputs(struct bench *b)
{
    const struct shape *s = &b->shape;

    if (!is_ll(b))
        open_ht_outputs(b, s->token, s->token_bytes / dtype_size(s->token));
    else if (s->o->dispatch_quant == NCCL_EP_DISP_QUANT_DS_FP8E3M4)
        open_ll_outputs(b, E4M3, (size_t)s->H, (size_t)s->H / 128, FP32);
    else
        open_ll_outputs(b, s->token, s->token_bytes / dtype_size(s->token), (size_t)s->S, s->scale);
}

/* ---- Group and handle -------------------------------------------------------------------------------------------- */

static cudaError_t take(void **ptr, size_t bytes, void *context)
{
    (void)context;
    return cudaMalloc(ptr, bytes);
}

static cudaError_t give_back(void *ptr, void *context)
{
    (void)context;
    return cudaFree(ptr);
}

static void open_group(struct bench *b, int enable_mask, int timeout_ms)
{
    const struct shape *s = &b->shape;
    ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
    const size_t most = s->payload > s->plain_bytes ? s->payload : s->plain_bytes;
    const double start = now_ms();

    config.algorithm = (ncclEpAlgorithm_t)s->o->algorithm;
    config.num_experts = (unsigned int)s->E;
    config.max_dispatch_tokens_per_rank = (unsigned int)s->M;
    config.max_recv_tokens_per_rank = is_ll(b) ? NCCL_EP_AUTO : (unsigned int)s->T;
    config.max_token_bytes = (unsigned int)((most + 15) / 16 * 16);
    config.max_num_sms = (unsigned int)s->o->max_sms;
    config.num_topk = (unsigned int)s->K;
    config.zero_copy = s->o->zcopy ? NCCL_EP_ZERO_COPY_ON : NCCL_EP_ZERO_COPY_AUTO;
    config.alloc.alloc_fn = take;
    config.alloc.free_fn = give_back;
    config.enable_mask = (unsigned int)enable_mask;
    config.timeout_ns = (uint64_t)timeout_ms * 1000000u;
    NCCL(ncclEpCreateGroup(&b->group, world.comm, &config));
    b->group_ms = now_ms() - start;
    b->memory_group = memory_used();
}

static void open_handle(struct bench *b)
{
    ncclEpHandleConfig_t config = NCCL_EP_HANDLE_CONFIG_INIT;
    ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
    const double start = now_ms();

    config.dispatch_output_per_expert_alignment = (size_t)b->shape.o->alignment;
    info.expert_counters = b->counters.tensor;
    info.recv_total_counter = b->total.tensor;
    info.expert_offsets = b->offsets.tensor;
    NCCL(ncclEpCreateHandle(&b->handle, b->group, (ncclEpLayout_t)b->shape.o->layout, b->idx.tensor,
                            is_ll(b) ? NULL : &info, is_ll(b) ? NULL : &config, world.stream));
    CUDA(cudaStreamSynchronize(world.stream));
    b->handle_ms = now_ms() - start;
    b->memory_handle = memory_used();
}

static void set_environment(const struct options *o)
{
    char text[16];

    if (o->em_mode)
        setenv(o->em_mode == 1 ? "NCCL_EP_HT_EM_LOCAL_DUP" : "NCCL_EP_HT_EM_NVLINK_DUP", "1", 1);
    snprintf(text, sizeof(text), "%d", o->shuffle_sms);
    if (o->shuffle_sms)
        setenv("NCCL_EP_SHUFFLE_SMS", text, 1);
    snprintf(text, sizeof(text), "%d", o->preprocess_sms);
    if (o->preprocess_sms)
        setenv("NCCL_EP_PREPROCESS_NUM_SMS", text, 1);
}

void bench_open(struct bench *b, const struct options *o, int enable_mask, int timeout_ms)
{
    memset(b, 0, sizeof(*b));
    if (shape_make(&b->shape, o) != EXIT_GOOD)
        exit(EXIT_BAD);
    set_environment(o);
    b->mine = routing_make(&b->shape, world.rank);
    b->memory_before = memory_used();
    open_group(b, enable_mask, timeout_ms);
    open_inputs(b);
    open_outputs(b);
    open_handle(b);
}

void bench_close(struct bench *b)
{
    struct buffer *all[] = {&b->idx,      &b->tokens,          &b->scales,           &b->weights,
                            &b->received, &b->received_scales, &b->received_weights, &b->received_idx,
                            &b->counters, &b->total,           &b->offsets,          &b->combine_scales,
                            &b->out};

    NCCL(ncclEpHandleDestroy(b->handle));
    NCCL(ncclEpGroupDestroy(b->group));
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
        buffer_close(all[i]);
    routing_free(&b->mine);
}

/* ---- Operations -------------------------------------------------------------------------------------------------- */

void bench_dispatch(struct bench *b)
{
    const struct options *o = b->shape.o;
    const int rm = o->layout == NCCL_EP_LAYOUT_RANK_MAJOR;
    ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
    ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    ncclEpDispatchConfig_t config = NCCL_EP_DISPATCH_CONFIG_INIT;
    ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;

    in.tokens = b->tokens.tensor;
    in.scales = b->scales.tensor;
    in.topk_weights = !is_ll(b) || rm ? b->weights.tensor : NULL;
    out.tokens = b->received.tensor;
    out.scales = b->received_scales.tensor;
    out.topk_weights = b->received_weights.tensor;
    out.topk_idx = b->received_idx.tensor;
    config.quant_recipe = (ncclEpDispQuant_t)o->dispatch_quant;
    info.expert_counters = rm ? NULL : b->counters.tensor;
    info.src_rank_counters = rm ? b->counters.tensor : NULL;
    info.recv_topk_idx_kind = (ncclEpExpertIdKind_t)o->id_kind;
    NCCL(ncclEpDispatch(b->handle, &in, &out, &info, &config, world.stream));
    NCCL(ncclEpComplete(b->handle, NULL, world.stream));
}

void bench_combine(struct bench *b)
{
    const struct options *o = b->shape.o;
    ncclEpCombineInputs_t in = NCCL_EP_COMBINE_INPUTS_INIT;
    ncclEpCombineOutputs_t out = NCCL_EP_COMBINE_OUTPUTS_INIT;
    ncclEpCombineConfig_t config = NCCL_EP_COMBINE_CONFIG_INIT;

    in.tokens = b->received.tensor;
    in.scales = b->combine_scales.tensor;
    out.tokens = b->out.tensor;
    out.topk_weights = is_ll(b) && o->layout == NCCL_EP_LAYOUT_EXPERT_MAJOR ? b->weights.tensor : NULL;
    config.quant_recipe = (ncclEpCombQuant_t)o->combine_quant;
    NCCL(ncclEpCombine(b->handle, &in, &out, &config, world.stream));
    NCCL(ncclEpComplete(b->handle, NULL, world.stream));
}

void bench_set_combine_scales(struct bench *b)
{
    const size_t rows = b->combine_scales.bytes / sizeof(float), width = (size_t)b->shape.H;
    unsigned char *received = buffer_to_host(&b->received);
    float *scales = calloc(rows + 1, sizeof(*scales));

    if (!scales)
        failed("malloc", 0, "no memory");
    for (size_t row = 0; row < rows; row++) {
        float most = 0;

        for (size_t h = 0; h < width; h++)
            most = fmaxf(most, fabsf(load_float(BF16, received + (row * width + h) * 2)));
        scales[row] = most > 0 ? 2688.0f / most : 0;
    }
    buffer_write(&b->combine_scales, scales, rows * sizeof(*scales));
    free(scales);
    free(received);
}

/* ---- Time -------------------------------------------------------------------------------------------------------- */

static double between(cudaEvent_t from, cudaEvent_t to)
{
    float ms = 0;

    CUDA(cudaEventElapsedTime(&ms, from, to));
    return (double)ms * 1e3;
}

struct times bench_time(struct bench *b)
{
    const struct options *o = b->shape.o;
    const int counted = o->iters > 1 ? o->iters - 1 : 1;
    struct times sum = {0, 0, 0};
    cudaEvent_t events[3];

    for (int i = 0; i < 3; i++)
        CUDA(cudaEventCreate(&events[i]));
    for (int i = -o->warmup; i < o->iters; i++) {
        CUDA(cudaEventRecord(events[0], world.stream));
        bench_dispatch(b);
        CUDA(cudaEventRecord(events[1], world.stream));
        if (!o->dispatch_only)
            bench_combine(b);
        CUDA(cudaEventRecord(events[2], world.stream));
        CUDA(cudaStreamSynchronize(world.stream));
        if (i >= o->iters - counted) {
            sum.dispatch += between(events[0], events[1]) / counted;
            sum.combine += between(events[1], events[2]) / counted;
        }
        world_barrier();
    }
    for (int i = 0; i < 3; i++)
        CUDA(cudaEventDestroy(events[i]));
    sum.total = sum.dispatch + sum.combine;
    b->memory_end = memory_used();
    return sum;
}
