/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One rank of a prediction: small rows, the real API, everything checked.
 *
 *      group, handle, tensors (epx_alloc) | update (ht) | dispatch, combine: warm-up
 *      series, queued at once:  stamp | dispatch | stamp | combine | stamp | dispatch ...
 *      the last results against the oracle
 *
 * Stamps are calls in stream order that read the stream's own clock.
 */
#include <stdlib.h>
#include <string.h>

#include "epx/epx.h"
#include "predict.h"
#include "sim/cost_memory.h"
#include "tests/lib/oracle.h"

enum { POISON = 0xa5 };

struct rank {
    struct predict_world *world;
    const struct predict_point *p;
    int rank;
    epx_group *group;
    epx_handle *handle;
    struct workload w;
    struct oracle_recv recv;
    struct oracle_data data;
    epx_tensor x, scales, idx, weights, tokens, out_scales, out_weights, out_idx, results, combined, counts;
    uint64_t *stamps;
    int nstamps;
    struct cost_traffic last;
};

/* ---- Messages -------------------------------------------------------------------------------------------------- */

static int failed(struct rank *r, const char *what, const char *why)
{
    if (!r->world->error[0])
        snprintf(r->world->error, sizeof(r->world->error), "rank %d: %s: %s", r->rank, what, why);
    return -1;
}

static int call(struct rank *r, const char *what, epx_status status)
{
    return status == EPX_OK ? 0 : failed(r, what, epx_last_error());
}

static int is_ll(const struct rank *r)
{
    return r->p->mode == EPX_LOW_LATENCY;
}

/* ---- Set-up ---------------------------------------------------------------------------------------------------- */

static int small_scales(const struct rank *r)
{
    return r->p->dtype == PREDICT_FP8 ? (r->world->small_hidden + 127) / 128 : 0;
}

/* Rows of the receive tensors: the shape of low latency has room for the worst case. */
static int64_t receive_rows(const struct rank *r)
{
    return is_ll(r) ? (int64_t)r->p->ranks * r->p->tokens * r->world->route->local_experts : r->world->most_rows;
}

static size_t tensor_bytes(const struct rank *r)
{
    const size_t rows = (size_t)receive_rows(r), h = (size_t)r->world->small_hidden, k = (size_t)r->p->topk;
    const size_t b = (size_t)r->p->tokens, per_row = 4 * h + 4 * (size_t)small_scales(r) + (is_ll(r) ? 0 : 8 * k);

    return rows * per_row + b * (5 * h + 8 * k + 8) + (size_t)r->p->experts * 4 + ((size_t)64 << 10);
}

/* What a row between nodes takes of the bytes for such rows (group/heap_layout.c): in a slot, and as a sum that comes
 * back, each with weights, and in a record with ids, places, weights and scales. */
static uint64_t remote_row_bytes(const struct predict_point *p, int hidden)
{
    return 2 * (2 * (uint64_t)hidden + 4 * (uint64_t)p->topk) + 16 * (uint64_t)p->topk + 16 + (uint64_t)hidden / 16;
}

/* Rounds of high throughput have as many rows as they would have of the real size. */
static uint64_t remote_bytes(const struct predict_point *p, int hidden)
{
    const uint64_t usual = (uint64_t)400 << 20; /* EPX_HT_BUFFER_BYTES */

    return hidden == p->hidden ? 0 : usual * remote_row_bytes(p, hidden) / remote_row_bytes(p, p->hidden);
}

static void group_config(const struct rank *r, int hidden, epx_group_config *config)
{
    const struct predict_point *p = r->p;

    *config = (epx_group_config)EPX_GROUP_CONFIG_INIT;
    config->modes = (uint32_t)p->mode;
    config->num_experts = p->experts;
    config->max_tokens_per_rank = p->tokens;
    config->max_hidden_bytes = 2 * hidden;
    config->max_topk = p->topk;
    config->num_agents = r->world->agents;
    config->timeout_ms = 100000;
    config->alloc_bytes = tensor_bytes(r);
    config->ht_buffer_bytes = remote_bytes(p, hidden);
    if (predict_nodes(p) > 1) {
        config->ranks_per_node = (int32_t)(p->machine.ranks_per_gpu * p->machine.gpus_per_node);
        memcpy(config->net, "sim", 4);
    }
}

static int create_group(struct rank *r, const epx_bootstrap *boot)
{
    epx_group_config config;
    epx_handle_config handle = EPX_HANDLE_CONFIG_INIT;

    group_config(r, r->world->small_hidden, &config);
    if (call(r, "epx_group_create", epx_group_create(&r->group, boot, &config)) != 0)
        return -1;
    handle.mode = r->p->mode;
    handle.layout = is_ll(r) ? EPX_EXPERT_MAJOR : EPX_FLAT;
    handle.topk = r->p->topk;
    return call(r, "epx_handle_create", epx_handle_create(&r->handle, r->group, &handle));
}

/* EPX's own memory of this rank, for rows of the real size: what was allocated here, with the heap of the real one. */
static int measure_memory(struct rank *r)
{
    epx_memory_info small = EPX_MEMORY_INFO_INIT, real = EPX_MEMORY_INFO_INIT;
    const int remote_rows = r->world->remote_rows;
    epx_group_config config;
    int rc;

    group_config(r, r->world->small_hidden, &config);
    if (call(r, "epx_group_memory", epx_group_memory(&config, r->p->ranks, &small)) != 0)
        return -1;
    config.max_hidden_bytes = 2 * r->p->hidden;
    config.ht_buffer_bytes = 0;
    r->world->remote_rows = 0; /* receive buffers as they are outside the simulation */
    rc = call(r, "epx_group_memory", epx_group_memory(&config, r->p->ranks, &real));
    r->world->remote_rows = remote_rows;
    if (rc != 0)
        return -1;
    r->world->memory_bytes = (double)cost_memory_used(r->rank) - (double)small.heap_bytes + (double)real.heap_bytes -
                             (double)config.alloc_bytes;
    return 0;
}

static int make(struct rank *r, epx_tensor *t, epx_dtype dtype, int ndim, int64_t a, int64_t b, int64_t c)
{
    const int64_t rows = a * (ndim > 1 ? b : 1) * (ndim > 2 ? c : 1);
    void *data = NULL;

    if (rows == 0)
        return 0;
    if (call(r, "epx_alloc", epx_alloc(r->group, (size_t)rows * epx_dtype_size(dtype), &data)) != 0)
        return -1;
    *t = epx_tensor_make(data, dtype, ndim, a, b, c, 0);
    return 0;
}

/* A tensor of received rows: [L,R*M,columns] or [N,columns]. */
static int make_rows(struct rank *r, epx_tensor *t, epx_dtype dtype, int columns)
{
    const int64_t all = (int64_t)r->p->ranks * r->p->tokens;

    if (is_ll(r))
        return make(r, t, dtype, 3, r->recv.route->local_experts, all, columns);
    return make(r, t, dtype, 2, r->recv.total > 0 ? r->recv.total : 1, columns, 0);
}

static int make_tensors(struct rank *r)
{
    const struct predict_point *p = r->p;
    const int h = r->world->small_hidden, fp8_input = p->dtype == PREDICT_FP8 && !is_ll(r);
    const epx_dtype out = p->dtype == PREDICT_FP8 ? EPX_FP8_E4M3 : EPX_BF16;

    return make(r, &r->x, fp8_input ? EPX_FP8_E4M3 : EPX_BF16, 2, p->tokens, h, 0) ||
           (fp8_input && make(r, &r->scales, EPX_FP32, 2, p->tokens, small_scales(r), 0)) ||
           make(r, &r->idx, EPX_INT32, 2, p->tokens, p->topk, 0) ||
           make(r, &r->weights, EPX_FP32, 2, p->tokens, p->topk, 0) || make_rows(r, &r->tokens, out, h) ||
           (small_scales(r) && make_rows(r, &r->out_scales, EPX_FP32, small_scales(r))) ||
           (!is_ll(r) && make_rows(r, &r->out_weights, EPX_FP32, p->topk)) ||
           (!is_ll(r) && make_rows(r, &r->out_idx, EPX_INT32, p->topk)) || make_rows(r, &r->results, EPX_BF16, h) ||
           make(r, &r->combined, EPX_BF16, 2, p->tokens, h, 0) ||
           make(r, &r->counts, EPX_INT32, 1, is_ll(r) ? r->recv.route->local_experts : p->ranks, 0, 0);
}

static void fill(struct rank *r)
{
    const size_t h = (size_t)r->world->small_hidden, k = (size_t)r->p->topk;

    for (int t = 0; t < r->p->tokens; t++) {
        workload_token(&r->w, r->rank, t, (char *)r->x.data + (size_t)t * h * epx_dtype_size((epx_dtype)r->x.dtype));
        if (r->scales.data)
            workload_scales(&r->w, r->rank, t, (float *)r->scales.data + (size_t)t * (size_t)small_scales(r));
        memcpy((int32_t *)r->idx.data + (size_t)t * k, oracle_idx(r->recv.route, r->rank, t), k * 4);
        workload_weights(&r->w, r->rank, t, (float *)r->weights.data + (size_t)t * k);
    }
    oracle_fill_results(&r->recv, &r->data, &r->results, NULL);
}

struct workload predict_workload(const struct predict_world *world)
{
    const struct predict_point *p = world->point;
    const int fp8_input = p->dtype == PREDICT_FP8 && p->mode == EPX_HIGH_THROUGHPUT;

    return (struct workload){.seed = p->seed,
                             .nranks = p->ranks,
                             .experts = p->experts,
                             .topk = p->topk,
                             .hidden = world->small_hidden,
                             .max_tokens = p->tokens,
                             .dtype = fp8_input ? EPX_FP8_E4M3 : EPX_BF16,
                             .scale_dtype = EPX_FP32,
                             .scale_count = (world->small_hidden + 127) / 128,
                             .routing = (enum workload_routing)p->routing,
                             .groups = p->groups,
                             .topk_groups = p->topk_groups};
}

/* ---- Operations ------------------------------------------------------------------------------------------------- */

static int issue_update(struct rank *r)
{
    epx_layout_info info = EPX_LAYOUT_INFO_INIT;

    info.rank_counts = &r->counts;
    return call(r, "epx_handle_update", epx_handle_update(r->handle, &r->idx, is_ll(r) ? NULL : &info, NULL));
}

static int issue_dispatch(struct rank *r)
{
    epx_dispatch_inputs in = EPX_DISPATCH_INPUTS_INIT;
    epx_dispatch_outputs out = EPX_DISPATCH_OUTPUTS_INIT;
    epx_layout_info info = EPX_LAYOUT_INFO_INIT;
    epx_dispatch_config config = EPX_DISPATCH_CONFIG_INIT;

    in.tokens = &r->x;
    in.scales = r->scales.data ? &r->scales : NULL;
    in.topk_weights = r->out_weights.data ? &r->weights : NULL;
    out.tokens = &r->tokens;
    out.scales = r->out_scales.data ? &r->out_scales : NULL;
    out.topk_weights = r->out_weights.data ? &r->out_weights : NULL;
    out.topk_idx = r->out_idx.data ? &r->out_idx : NULL;
    info.expert_counts = &r->counts;
    return call(r, "epx_dispatch", epx_dispatch(r->handle, &in, &out, is_ll(r) ? &info : NULL, &config, NULL));
}

static int issue_combine(struct rank *r)
{
    epx_combine_inputs in = EPX_COMBINE_INPUTS_INIT;
    epx_combine_outputs out = EPX_COMBINE_OUTPUTS_INIT;
    epx_combine_config config = EPX_COMBINE_CONFIG_INIT;

    in.tokens = &r->results;
    in.topk_weights = is_ll(r) ? &r->weights : NULL;
    out.tokens = &r->combined;
    return call(r, "epx_combine", epx_combine(r->handle, &in, &out, &config, NULL));
}

static int sync(struct rank *r)
{
    return call(r, "epx_stream_sync", epx_stream_sync(r->group, NULL));
}

/* In stream order. */
static void stamp(void *arg)
{
    struct rank *r = arg;
    struct cost_traffic now, *sum;
    const int n = r->nstamps++;

    r->stamps[n] = sim_now();
    cost_traffic(r->rank, &now);
    if (n > 0) {
        sum = &r->world->traffic[r->rank][(n - 1) % PREDICT_OPS];
        sum->messages += now.messages - r->last.messages;
        sum->signals += now.signals - r->last.signals;
        sum->bytes += now.bytes - r->last.bytes;
        sum->header_bytes += now.header_bytes - r->last.header_bytes;
        sum->link_bytes += now.link_bytes - r->last.link_bytes;
        sum->commands += now.commands - r->last.commands;
        sum->looks += now.looks - r->last.looks;
    }
    r->last = now;
}

static int issue_stamp(struct rank *r)
{
    return call(r, "epx_stream_call", epx_stream_call(r->group, NULL, stamp, r));
}

static int run_series(struct rank *r)
{
    struct predict_times *times = &r->world->times[r->rank];
    const int iters = r->world->iters;

    if (issue_stamp(r) != 0)
        return -1;
    for (int i = 0; i < iters; i++)
        if (issue_dispatch(r) || issue_stamp(r) || issue_combine(r) || issue_stamp(r))
            return -1;
    if (sync(r) != 0)
        return -1;
    for (int i = 0; i < iters; i++)
        for (int op = 0; op < PREDICT_OPS; op++)
            times->us[op] += (double)(r->stamps[2 * i + op + 1] - r->stamps[2 * i + op]) / 1000 / iters;
    return 0;
}

static int update(struct rank *r)
{
    uint64_t start;

    if (is_ll(r))
        return issue_update(r);
    if (issue_update(r) || sync(r)) /* the first one touches all memory */
        return -1;
    start = sim_now();
    if (issue_update(r) || sync(r))
        return -1;
    r->world->times[r->rank].update_us = (double)(sim_now() - start) / 1000;
    return 0;
}

/* ---- Check ------------------------------------------------------------------------------------------------------ */

static void poison(struct rank *r)
{
    const size_t bytes = (size_t)r->world->small_hidden * epx_dtype_size((epx_dtype)r->tokens.dtype);

    for (int64_t i = 0; i < r->recv.nplaces; i++)
        memset((char *)r->tokens.data + (size_t)r->recv.places[i].row * bytes, POISON, bytes);
    memset(r->combined.data, POISON, (size_t)r->p->tokens * (size_t)r->world->small_hidden * 2);
}

/* For the test of the check itself. */
static void spoil(struct rank *r)
{
    if (getenv("EPX_BENCH_CORRUPT") && r->rank == r->p->ranks / 2)
        *(unsigned char *)r->combined.data ^= 1;
}

static int check(struct rank *r)
{
    epx_dispatch_outputs out = EPX_DISPATCH_OUTPUTS_INIT;
    epx_combine_outputs back = EPX_COMBINE_OUTPUTS_INIT;
    epx_dispatch_config config = EPX_DISPATCH_CONFIG_INIT;
    epx_layout_info info = EPX_LAYOUT_INFO_INIT;
    struct oracle_combine how = {.weighted = is_ll(r)};
    struct mismatch m;

    spoil(r);
    if (is_ll(r))
        info.expert_counts = &r->counts;
    else
        info.rank_counts = &r->counts;
    out.tokens = &r->tokens;
    out.scales = r->out_scales.data ? &r->out_scales : NULL;
    out.topk_weights = r->out_weights.data ? &r->out_weights : NULL;
    out.topk_idx = r->out_idx.data ? &r->out_idx : NULL;
    back.tokens = &r->combined;
    if (oracle_check_layout(&r->recv, &info, &m) != 0 ||
        oracle_check_dispatch(&r->recv, &r->data, &out, &config, -1, &m) != 0 ||
        oracle_check_combine(r->recv.route, &r->data, r->rank, &how, &back, &m) != 0)
        return failed(r, "the results are wrong", m.text);
    return 0;
}

/* ---- The whole -------------------------------------------------------------------------------------------------- */

static int run(struct rank *r, const epx_bootstrap *boot)
{
    char all[4 * SIM_MAX_RANKS];

    if (create_group(r, boot) || make_tensors(r))
        return -1;
    fill(r);
    if (update(r) || issue_dispatch(r) || issue_combine(r) || sync(r))
        return -1;
    poison(r);
    oracle_recv_free(&r->recv); /* all ranks' together would be much memory */
    if (boot->allgather(boot->context, "now", all, 4) != 0)
        return failed(r, "the series", "another rank has failed");
    if (run_series(r) != 0 || (r->rank == 0 && measure_memory(r) != 0))
        return -1;
    if (oracle_recv_init(&r->recv, r->world->route, r->rank) != 0)
        return failed(r, "the check", "no memory");
    return check(r);
}

int predict_rank(int rank, int n, epx_bootstrap *boot, void *arg)
{
    struct predict_world *world = arg;
    struct rank r = {.world = world, .p = world->point, .rank = rank, .w = predict_workload(world)};
    int rc;

    (void)n;
    r.data = oracle_data_workload(&r.w, EPX_BF16);
    r.stamps = calloc((size_t)world->iters * PREDICT_OPS + 1, sizeof(*r.stamps));
    rc = !r.stamps || oracle_recv_init(&r.recv, world->route, rank) != 0 ? failed(&r, "set-up", "no memory")
                                                                         : run(&r, boot);
    oracle_recv_free(&r.recv);
    if (r.handle)
        epx_handle_destroy(r.handle);
    if (r.group)
        epx_group_destroy(r.group);
    free(r.stamps);
    return rc;
}
