/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_work.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define POISON 0xa5

static int local_experts(const struct bench_config *c)
{
    return (c->experts + c->ranks - 1) / c->ranks;
}

static int is_ll(const struct bench_config *c)
{
    return c->mode == EPX_LOW_LATENCY;
}

static int is_expert_major(const struct bench_config *c)
{
    return c->layout == EPX_EXPERT_MAJOR;
}

int bench_ranks_per_node(const struct bench_config *c)
{
    return (c->ranks + c->nodes - 1) / c->nodes;
}

int bench_work_scales(const struct bench_config *c)
{
    return c->fp8 ? (c->hidden + 127) / 128 : 0;
}

int64_t bench_work_max_rows(const struct bench_config *c)
{
    int64_t rows = (int64_t)c->ranks * c->tokens;
    int64_t experts = local_experts(c);

    if (!is_expert_major(c))
        return rows;
    if (is_ll(c))
        return rows * experts;
    return rows * (c->topk < experts ? c->topk : experts) + experts * (c->alignment - 1);
}

/* Sizes of the tensors, in the order in which bench_work_open asks for them. */
enum part {
    PART_X,
    PART_IDX,
    PART_WEIGHTS,
    PART_TOKENS,
    PART_SCALES,
    PART_OUT_WEIGHTS,
    PART_OUT_IDX,
    PART_EXPERT_COUNTS,
    PART_RANK_COUNTS,
    PART_RESULTS,
    PART_COMBINED,
    PART_COUNT
};
_Static_assert(PART_COUNT == BENCH_PARTS, "as the header says");

static void part_sizes(const struct bench_config *c, size_t *bytes)
{
    size_t rows = (size_t)bench_work_max_rows(c), b = (size_t)c->tokens, h = (size_t)c->hidden, k = (size_t)c->topk;

    memset(bytes, 0, PART_COUNT * sizeof(*bytes));
    bytes[PART_X] = bytes[PART_COMBINED] = b * h * 2;
    bytes[PART_IDX] = bytes[PART_WEIGHTS] = b * k * 4;
    bytes[PART_TOKENS] = rows * h * (c->fp8 ? 1 : 2);
    bytes[PART_RESULTS] = rows * h * 2;
    bytes[PART_SCALES] = rows * (size_t)bench_work_scales(c) * 4;
    if (!is_expert_major(c))
        bytes[PART_OUT_WEIGHTS] = bytes[PART_OUT_IDX] = rows * k * 4;
    else if (!is_ll(c))
        bytes[PART_OUT_WEIGHTS] = rows * 4;
    bytes[PART_EXPERT_COUNTS] = (size_t)local_experts(c) * 4;
    bytes[PART_RANK_COUNTS] = (size_t)c->ranks * 4;
}

size_t bench_work_bytes(const struct bench_config *config)
{
    size_t bytes[PART_COUNT], total = 0;
    int i;

    part_sizes(config, bytes);
    for (i = 0; i < PART_COUNT; i++)
        total += (bytes[i] + 4095) & ~(size_t)4095;
    return total;
}

struct workload bench_work_workload(const struct bench_config *c, uint64_t seed)
{
    return (struct workload){.seed = seed,
                             .round = seed,
                             .nranks = c->ranks,
                             .experts = c->experts,
                             .topk = c->topk,
                             .hidden = c->hidden,
                             .max_tokens = c->tokens,
                             .dtype = EPX_BF16,
                             .routing = (enum workload_routing)c->routing,
                             .values = c->logfmt ? WORKLOAD_SMALL : WORKLOAD_MILD};
}

int bench_work_open(struct bench_work *work, const struct bench_config *config, int rank, bench_alloc_fn alloc,
                    void *context)
{
    size_t bytes[PART_COUNT];
    void *data[PART_COUNT] = {NULL};
    int i;

    memset(work, 0, sizeof(*work));
    part_sizes(config, bytes);
    for (i = 0; i < PART_COUNT; i++)
        if (bytes[i] != 0 && (data[i] = alloc(context, bytes[i])) == NULL)
            return -1;
    work->config = config;
    work->rank = rank;
    work->local_experts = local_experts(config);
    work->x = epx_tensor_make(data[PART_X], EPX_BF16, 2, config->tokens, config->hidden, 0, 0);
    work->idx = epx_tensor_make(data[PART_IDX], EPX_INT32, 2, config->tokens, config->topk, 0, 0);
    work->weights = epx_tensor_make(data[PART_WEIGHTS], EPX_FP32, 2, config->tokens, config->topk, 0, 0);
    work->expert_counts = epx_tensor_make(data[PART_EXPERT_COUNTS], EPX_INT32, 1, work->local_experts, 0, 0, 0);
    work->rank_counts = epx_tensor_make(data[PART_RANK_COUNTS], EPX_INT32, 1, config->ranks, 0, 0, 0);
    work->combined = epx_tensor_make(data[PART_COMBINED], EPX_BF16, 2, config->tokens, config->hidden, 0, 0);
    work->tokens.data = data[PART_TOKENS];
    work->scales.data = data[PART_SCALES];
    work->out_weights.data = data[PART_OUT_WEIGHTS];
    work->out_idx.data = data[PART_OUT_IDX];
    work->results.data = data[PART_RESULTS];
    return 0;
}

static void *twin_alloc(void *context, size_t bytes)
{
    (void)context;
    return calloc(1, bytes);
}

int bench_work_open_device(struct bench_work *work, const struct bench_config *config, int rank, bench_alloc_fn alloc,
                           int (*copy)(void *context, void *to, const void *from, size_t bytes), void *context)
{
    size_t bytes[PART_COUNT];
    epx_tensor *const tensors[PART_COUNT] = {
        [PART_X] = &work->x,
        [PART_IDX] = &work->idx,
        [PART_WEIGHTS] = &work->weights,
        [PART_TOKENS] = &work->tokens,
        [PART_SCALES] = &work->scales,
        [PART_OUT_WEIGHTS] = &work->out_weights,
        [PART_OUT_IDX] = &work->out_idx,
        [PART_EXPERT_COUNTS] = &work->expert_counts,
        [PART_RANK_COUNTS] = &work->rank_counts,
        [PART_RESULTS] = &work->results,
        [PART_COMBINED] = &work->combined,
    };
    int i;

    if (bench_work_open(work, config, rank, twin_alloc, NULL) != 0)
        return -1;
    part_sizes(config, bytes);
    work->copy = copy;
    work->copy_context = context;
    for (i = 0; i < PART_COUNT; i++) {
        work->parts[i] = (struct bench_part){.host = tensors[i]->data, .bytes = bytes[i]};
        if (bytes[i] != 0 && (work->parts[i].device = alloc(context, bytes[i])) == NULL)
            return -1;
    }
    return 0;
}

/* All of it, either way: what the device does not write comes back as it was. */
static int copy_parts(struct bench_work *work, int in)
{
    int i;

    for (i = 0; work->copy != NULL && i < PART_COUNT; i++) {
        const struct bench_part *p = &work->parts[i];
        if (p->bytes != 0 &&
            work->copy(work->copy_context, in ? p->device : p->host, in ? p->host : p->device, p->bytes))
            return -1;
    }
    return 0;
}

/* The tensor as EPX gets it; NULL where the layout has none. */
static epx_tensor *given(struct bench_work *work, epx_tensor *tensor, enum part part)
{
    if (tensor->data == NULL)
        return NULL;
    if (work->copy == NULL)
        return tensor;
    work->on_device[part] = *tensor;
    work->on_device[part].data = work->parts[part].device;
    return &work->on_device[part];
}

static void free_routing(struct bench_work *work)
{
    if (!work->routed)
        return;
    oracle_recv_free(&work->recv);
    oracle_route_free(&work->route);
    work->routed = 0;
}

void bench_work_close(struct bench_work *work)
{
    free_routing(work);
}

/* A tensor of rows: [L,R*M,columns], [R,M,columns] or [N,columns]. */
static epx_tensor rows_tensor(const struct bench_work *work, void *data, epx_dtype dtype, int columns)
{
    const struct bench_config *c = work->config;
    int64_t all = (int64_t)c->ranks * c->tokens;

    if (data == NULL)
        return (epx_tensor)EPX_TENSOR_INIT;
    if (!is_ll(c))
        return epx_tensor_make(data, dtype, 2, work->recv.total, columns, 0, 0);
    if (is_expert_major(c))
        return epx_tensor_make(data, dtype, 3, work->local_experts, all, columns, 0);
    return epx_tensor_make(data, dtype, 3, c->ranks, c->tokens, columns, 0);
}

static void shape_outputs(struct bench_work *work)
{
    const struct bench_config *c = work->config;

    work->tokens = rows_tensor(work, work->tokens.data, c->fp8 ? EPX_FP8_E4M3 : EPX_BF16, c->hidden);
    work->scales = rows_tensor(work, work->scales.data, EPX_FP32, bench_work_scales(c));
    work->results = rows_tensor(work, work->results.data, EPX_BF16, c->hidden);
    work->out_idx = rows_tensor(work, work->out_idx.data, EPX_INT32, c->topk);
    if (!is_expert_major(c))
        work->out_weights = rows_tensor(work, work->out_weights.data, EPX_FP32, c->topk);
    else if (!is_ll(c))
        work->out_weights = epx_tensor_make(work->out_weights.data, EPX_FP32, 1, work->recv.total, 0, 0, 0);
}

static void fill_inputs(struct bench_work *work)
{
    const struct bench_config *c = work->config;
    size_t h = (size_t)c->hidden, k = (size_t)c->topk;
    int t;

    for (t = 0; t < c->tokens; t++) {
        workload_token(&work->workload, work->rank, t, (uint16_t *)work->x.data + (size_t)t * h);
        workload_topk(&work->workload, work->rank, t, (int32_t *)work->idx.data + (size_t)t * k);
        workload_weights(&work->workload, work->rank, t, (float *)work->weights.data + (size_t)t * k);
    }
}

void bench_work_routing(const struct bench_work *work, uint64_t seed, int32_t *idx, float *weights)
{
    const struct bench_config *c = work->config;
    const struct workload w = bench_work_workload(c, seed);
    const size_t k = (size_t)c->topk;
    int t;

    for (t = 0; t < c->tokens; t++) {
        workload_topk(&w, work->rank, t, idx + (size_t)t * k);
        workload_weights(&w, work->rank, t, weights + (size_t)t * k);
    }
}

int bench_work_seed(struct bench_work *work, uint64_t seed)
{
    const struct bench_config *c = work->config;

    if (work->routed && work->workload.seed == seed)
        return 0;
    free_routing(work);
    work->workload = bench_work_workload(c, seed);
    if (oracle_route_from_workload(&work->route, &work->workload, 0, c->mode, c->layout, 0, c->alignment) != 0)
        return -1;
    work->route.ranks_per_node = work->ranks_per_node;
    if (oracle_recv_init(&work->recv, &work->route, work->rank) != 0) {
        oracle_route_free(&work->route);
        return -1;
    }
    work->routed = 1;
    work->data = oracle_data_workload(&work->workload, EPX_BF16);
    shape_outputs(work);
    fill_inputs(work);
    oracle_fill_results(&work->recv, &work->data, &work->results, NULL);
    return copy_parts(work, 1);
}

void bench_work_poison(struct bench_work *work)
{
    const struct bench_config *c = work->config;
    size_t row = (size_t)c->hidden * epx_dtype_size((epx_dtype)work->tokens.dtype);
    int64_t i;

    for (i = 0; i < work->recv.nplaces; i++)
        memset(tensor_row(&work->tokens, work->recv.places[i].row), POISON, row);
    memset(work->combined.data, POISON, (size_t)c->tokens * (size_t)c->hidden * 2);
    copy_parts(work, 1);
}

void bench_work_corrupt(struct bench_work *work, int combine)
{
    uint8_t *byte = combine ? work->combined.data : NULL;

    if (copy_parts(work, 0) != 0)
        return;
    if (!combine && work->recv.nplaces > 0)
        byte = tensor_row(&work->tokens, work->recv.places[work->recv.nplaces / 2].row);
    if (byte != NULL)
        *byte ^= 1;
    copy_parts(work, 1);
}

/* The host's own tensor, or NULL where the layout has none. */
static epx_tensor *if_any(epx_tensor *tensor)
{
    return tensor->data != NULL ? tensor : NULL;
}

int bench_work_check(struct bench_work *work, struct mismatch *m)
{
    const struct bench_config *c = work->config;
    epx_layout_info info = EPX_LAYOUT_INFO_INIT;
    epx_dispatch_outputs out = EPX_DISPATCH_OUTPUTS_INIT;
    epx_combine_outputs back = EPX_COMBINE_OUTPUTS_INIT;
    epx_dispatch_config dispatch = EPX_DISPATCH_CONFIG_INIT;
    struct oracle_combine how = {.weighted = is_ll(c) && is_expert_major(c), .logfmt = work->logfmt};

    if (copy_parts(work, 0) != 0) {
        snprintf(m->text, sizeof(m->text), "the results cannot be copied to the host");
        return -1;
    }
    if (is_expert_major(c))
        info.expert_counts = &work->expert_counts;
    else
        info.rank_counts = &work->rank_counts;
    out.tokens = &work->tokens;
    out.scales = if_any(&work->scales);
    out.topk_weights = if_any(&work->out_weights);
    out.topk_idx = if_any(&work->out_idx);
    back.tokens = &work->combined;
    if (oracle_check_layout(&work->recv, &info, m) != 0)
        return -1;
    if (oracle_check_dispatch(&work->recv, &work->data, &out, &dispatch, -1, m) != 0)
        return -1;
    return oracle_check_combine(&work->route, &work->data, work->rank, &how, &back, m);
}

epx_tensor *bench_work_idx(struct bench_work *work)
{
    return given(work, &work->idx, PART_IDX);
}

epx_tensor *bench_work_weights(struct bench_work *work)
{
    return given(work, &work->weights, PART_WEIGHTS);
}

epx_dispatch_inputs bench_work_dispatch_inputs(struct bench_work *work)
{
    epx_dispatch_inputs in = EPX_DISPATCH_INPUTS_INIT;

    in.tokens = given(work, &work->x, PART_X);
    in.topk_weights = work->out_weights.data != NULL ? given(work, &work->weights, PART_WEIGHTS) : NULL;
    return in;
}

epx_dispatch_outputs bench_work_dispatch_outputs(struct bench_work *work)
{
    epx_dispatch_outputs out = EPX_DISPATCH_OUTPUTS_INIT;

    out.tokens = given(work, &work->tokens, PART_TOKENS);
    out.scales = given(work, &work->scales, PART_SCALES);
    out.topk_weights = given(work, &work->out_weights, PART_OUT_WEIGHTS);
    out.topk_idx = given(work, &work->out_idx, PART_OUT_IDX);
    return out;
}

epx_layout_info bench_work_layout_info(struct bench_work *work)
{
    epx_layout_info info = EPX_LAYOUT_INFO_INIT;

    if (is_expert_major(work->config))
        info.expert_counts = given(work, &work->expert_counts, PART_EXPERT_COUNTS);
    else
        info.rank_counts = given(work, &work->rank_counts, PART_RANK_COUNTS);
    return info;
}

epx_combine_inputs bench_work_combine_inputs(struct bench_work *work)
{
    epx_combine_inputs in = EPX_COMBINE_INPUTS_INIT;

    in.tokens = given(work, &work->results, PART_RESULTS);
    if (is_ll(work->config) && is_expert_major(work->config))
        in.topk_weights = given(work, &work->weights, PART_WEIGHTS);
    return in;
}

epx_combine_outputs bench_work_combine_outputs(struct bench_work *work)
{
    epx_combine_outputs out = EPX_COMBINE_OUTPUTS_INIT;

    out.tokens = given(work, &work->combined, PART_COMBINED);
    return out;
}

epx_status bench_work_exchange(struct bench_work *work, epx_group *group, epx_handle *handle)
{
    const int low_latency = work->config->mode == EPX_LOW_LATENCY;
    epx_dispatch_inputs in = bench_work_dispatch_inputs(work);
    epx_dispatch_outputs out = bench_work_dispatch_outputs(work);
    epx_combine_inputs cin = bench_work_combine_inputs(work);
    epx_combine_outputs cout = bench_work_combine_outputs(work);
    epx_layout_info info = bench_work_layout_info(work);
    epx_status status = epx_handle_update(handle, &work->idx, low_latency ? NULL : &info, NULL);

    if (status == EPX_OK)
        status = epx_dispatch(handle, &in, &out, low_latency ? &info : NULL, NULL, NULL);
    if (status == EPX_OK)
        status = epx_combine(handle, &cin, &cout, NULL, NULL);
    return status == EPX_OK ? epx_stream_sync(group, NULL) : status;
}

/* Does an entry before k go to the same unit of experts (those of a rank, of a node)? */
static int seen_before(const int32_t *idx, int k, int experts)
{
    int j;

    for (j = 0; j < k; j++)
        if (idx[j] >= 0 && idx[j] / experts == idx[k] / experts)
            return 1;
    return 0;
}

static void count_token(const struct bench_config *c, int rank, const int32_t *idx, struct bench_traffic *traffic)
{
    int experts = local_experts(c), node = experts * bench_ranks_per_node(c), k;

    for (k = 0; k < c->topk; k++) {
        int first, remote;

        if (idx[k] < 0)
            continue;
        remote = idx[k] / node != rank / bench_ranks_per_node(c);
        first = !seen_before(idx, k, experts);
        traffic->pairs++;
        traffic->copies += first;
        traffic->remote += remote && (is_ll(c) ? first : !seen_before(idx, k, node));
        traffic->remote_back += remote && (is_ll(c) ? is_expert_major(c) || first : !seen_before(idx, k, node));
    }
}

void bench_work_traffic(const struct bench_config *c, uint64_t seed, struct bench_traffic *traffic)
{
    struct workload w = bench_work_workload(c, seed);
    int32_t idx[EPX_MAX_TOPK];
    int r, t;

    memset(traffic, 0, sizeof(*traffic));
    for (r = 0; r < c->ranks; r++) {
        for (t = 0; t < workload_tokens(&w, r); t++) {
            workload_topk(&w, r, t, idx);
            count_token(c, r, idx, traffic);
        }
    }
}
