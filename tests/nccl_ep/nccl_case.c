/* SPDX-License-Identifier: Apache-2.0 */
#include "nccl_case.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int low(const struct nccl_case *nc)
{
    return nc->spec->algorithm == LL;
}

static int major(const struct nccl_case *nc)
{
    return nc->spec->layout == EXPERT_MAJOR;
}

static int local_experts(const struct nccl_case *nc)
{
    return (nc->spec->experts + world.nranks - 1) / world.nranks;
}

int64_t most_rows(const struct spec *spec)
{
    const int local = (spec->experts + world.nranks - 1) / world.nranks;
    const int64_t flat = (int64_t)world.nranks * spec->tokens;

    if (spec->rows || spec->layout != EXPERT_MAJOR)
        return spec->rows ? spec->rows : flat;
    return flat * (spec->topk < local ? spec->topk : local) + (int64_t)local * spec->alignment;
}

int group_open(ncclEpGroup_t *group, const struct spec *spec, int enable_mask, int timeout_ms)
{
    ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;

    config.algorithm = spec->algorithm;
    config.num_experts = (unsigned int)spec->experts;
    config.max_dispatch_tokens_per_rank = (unsigned int)spec->tokens;
    config.max_token_bytes = (unsigned int)(spec->hidden * (int)tensor_element_size(spec->dtype) +
                                            (spec->dtype == EPX_FP8_E4M3 ? (spec->hidden + 127) / 128 * 4 : 0));
    config.enable_mask = (unsigned int)enable_mask;
    config.timeout_ns = (uint64_t)timeout_ms * 1000000u;
    config.num_qp_per_rank = 4; /* taken, without meaning */
    if (spec->rows_open)
        config.num_topk = (unsigned int)spec->topk;
    if (spec->algorithm == HT && !spec->rows_open)
        config.max_recv_tokens_per_rank = (unsigned int)most_rows(spec);
    TRY(ncclEpCreateGroup(group, world.comm, &config));
    return 0;
}

/* ---- Tensors ----------------------------------------------------------------------------------------------------- */

/* With the shape of what is received: [L, R*M, last], [R, M, last] or [N, last]; last 0: without. */
static int open_received(struct nccl_case *nc, struct tensor_pair *pair, epx_dtype dtype, int64_t last)
{
    const struct spec *s = nc->spec;
    const int64_t rows = (int64_t)world.nranks * s->tokens;

    if (!low(nc))
        return tensor_pair_open(pair, nc->group, s->memory, dtype, last ? 2 : 1, most_rows(s), last, 0);
    return major(nc) ? tensor_pair_open(pair, nc->group, s->memory, dtype, 3, local_experts(nc), rows, last)
                     : tensor_pair_open(pair, nc->group, s->memory, dtype, 3, world.nranks, s->tokens, last);
}

static int open_scales(struct nccl_case *nc)
{
    const struct spec *s = nc->spec;
    const int fp8_in = s->dtype == EPX_FP8_E4M3;
    const int64_t columns = (s->hidden + 127) / 128;

    if (s->received != EPX_FP8_E4M3)
        return 0;
    if (fp8_in && tensor_pair_open(&nc->scales, nc->group, s->memory, s->scale, 2, s->tokens, columns, 0))
        return -1;
    return open_received(nc, &nc->received_scales, s->scale, columns);
}

static int open_counters(struct nccl_case *nc)
{
    const struct spec *s = nc->spec;
    const int64_t L = local_experts(nc);

    if ((!low(nc) || major(nc)) && tensor_pair_open(&nc->expert_counters, nc->group, PLAIN, s->counter, 1, L, 0, 0))
        return -1;
    if (low(nc) && !major(nc) &&
        tensor_pair_open(&nc->rank_counters, nc->group, PLAIN, s->counter, 1, world.nranks, 0, 0))
        return -1;
    if (!low(nc) && major(nc) && tensor_pair_open(&nc->offsets, nc->group, PLAIN, s->counter, 1, L, 0, 0))
        return -1;
    return low(nc) ? 0 : tensor_pair_open(&nc->total, nc->group, PLAIN, s->counter, 1, 1, 0, 0);
}

static int open_tensors(struct nccl_case *nc)
{
    const struct spec *s = nc->spec;
    const epx_dtype result = s->dtype == EPX_FP8_E4M3 ? EPX_BF16 : s->dtype;
    const int ranked = low(nc) && !major(nc), flat = !low(nc) && !major(nc);

    if (tensor_pair_open(&nc->idx, nc->group, PLAIN, s->index32 ? EPX_INT32 : EPX_INT64, 2, s->tokens, s->topk, 0) ||
        tensor_pair_open(&nc->tokens, nc->group, s->memory, s->dtype, 2, s->tokens, s->hidden, 0) ||
        tensor_pair_open(&nc->weights, nc->group, s->memory, EPX_FP32, 2, s->tokens, s->topk, 0) ||
        open_received(nc, &nc->received, s->received, s->hidden) || open_scales(nc) || open_counters(nc) ||
        open_received(nc, &nc->results, result, s->hidden) ||
        tensor_pair_open(&nc->combined, nc->group, s->memory, result, 2, s->tokens, s->hidden, 0) ||
        tensor_pair_open(&nc->combined_weights, nc->group, s->memory, EPX_FP32, 2, s->tokens, s->topk, 0))
        return -1;
    if ((ranked || flat) && (open_received(nc, &nc->received_weights, EPX_FP32, s->topk) ||
                             open_received(nc, &nc->received_idx, ranked ? EPX_INT32 : EPX_INT64, s->topk)))
        return -1;
    if (!low(nc) && major(nc) && open_received(nc, &nc->received_weights, EPX_FP32, 0))
        return -1;
    return low(nc) ? 0 : open_received(nc, &nc->result_weights, EPX_FP32, major(nc) ? 0 : s->topk);
}

int nccl_case_open(struct nccl_case *nc, ncclEpGroup_t group, const struct spec *spec)
{
    ncclEpHandleConfig_t config = NCCL_EP_HANDLE_CONFIG_INIT;

    memset(nc, 0, sizeof(*nc));
    nc->spec = spec;
    nc->group = group;
    config.dispatch_output_per_expert_alignment = (size_t)spec->alignment;
    TRY(ncclEpInitHandle(&nc->handle, group, spec->layout, &config, spec->topk, NULL));
    nc->work = (struct workload){.nranks = world.nranks,
                                 .experts = spec->experts,
                                 .topk = spec->topk,
                                 .hidden = spec->hidden,
                                 .max_tokens = spec->tokens,
                                 .dtype = spec->dtype,
                                 .scale_dtype = EPX_FP32,
                                 .uneven = !spec->even,
                                 .hole_percent = 10};
    if (open_tensors(nc))
        return -1;
    nc->work.scale_count = nc->scales.tensor ? (int)nc->scales.view.shape[1] : 0;
    return 0;
}

static void forget_routing(struct nccl_case *nc)
{
    if (nc->routed) {
        oracle_recv_free(&nc->recv);
        oracle_route_free(&nc->route);
    }
    nc->routed = 0;
}

int nccl_case_close(struct nccl_case *nc)
{
    struct tensor_pair *const pairs[] = {&nc->idx,
                                         &nc->tokens,
                                         &nc->scales,
                                         &nc->weights,
                                         &nc->received,
                                         &nc->received_scales,
                                         &nc->received_weights,
                                         &nc->received_idx,
                                         &nc->expert_counters,
                                         &nc->rank_counters,
                                         &nc->offsets,
                                         &nc->total,
                                         &nc->results,
                                         &nc->result_weights,
                                         &nc->combined,
                                         &nc->combined_weights};

    TRY(ncclEpHandleDestroy(nc->handle));
    forget_routing(nc);
    for (size_t i = 0; i < sizeof(pairs) / sizeof(pairs[0]); i++)
        if (tensor_pair_close(pairs[i]))
            return -1;
    return 0;
}

int nccl_case_open_alone(struct nccl_case *nc, const struct spec *spec)
{
    ncclEpGroup_t group;

    return group_open(&group, spec, 0, 0) || nccl_case_open(nc, group, spec) ? -1 : 0;
}

int nccl_case_close_alone(struct nccl_case *nc)
{
    ncclEpGroup_t group = nc->group;

    if (nccl_case_close(nc))
        return -1;
    TRY(ncclEpGroupDestroy(group));
    return 0;
}

/* ---- What the oracle says ---------------------------------------------------------------------------------------- */

static int agrees(const struct nccl_case *nc, const char *what, int rc, const struct mismatch *m)
{
    if (rc)
        fprintf(stderr, "nccl_ep: rank %d: %s: %s: %s\n", world.rank, nc->spec->name, what, m->text);
    return rc;
}

static epx_tensor *view_of(struct tensor_pair *pair)
{
    return pair->tensor ? &pair->view : NULL;
}

static int get_if(struct tensor_pair *pair)
{
    return pair->tensor ? tensor_pair_get(pair) : 0;
}

static int check_counts(struct nccl_case *nc)
{
    epx_layout_info info = EPX_LAYOUT_INFO_INIT;
    struct mismatch m;

    if (get_if(&nc->expert_counters) || get_if(&nc->rank_counters) || get_if(&nc->offsets) || get_if(&nc->total))
        return -1;
    info.expert_counts = view_of(&nc->expert_counters);
    info.rank_counts = view_of(&nc->rank_counters);
    info.expert_offsets = view_of(&nc->offsets);
    info.total = view_of(&nc->total);
    return agrees(nc, "counts", oracle_check_layout(&nc->recv, &info, &m), &m);
}

/* ---- Operations -------------------------------------------------------------------------------------------------- */

static void dispatch_args(struct nccl_calls *c, struct nccl_case *nc, int backward)
{
    c->in.tokens = nc->tokens.tensor;
    c->in.scales = nc->scales.tensor;
    c->out.tokens = nc->received.tensor;
    c->out.scales = nc->received_scales.tensor;
    if (!backward && nc->received_weights.tensor) {
        c->in.topk_weights = nc->weights.tensor;
        c->out.topk_weights = nc->received_weights.tensor;
        c->out.topk_idx = nc->received_idx.tensor;
    }
    c->config.round_scales = (unsigned int)nc->spec->round_scales;
    if (nc->spec->received == EPX_FP8_E4M3)
        c->config.quant_recipe =
            nc->spec->dtype == EPX_FP8_E4M3 ? NCCL_EP_DISP_QUANT_FWD : NCCL_EP_DISP_QUANT_DS_FP8E3M4;
    c->info.recv_topk_idx_kind = nc->spec->global_ids ? NCCL_EP_EXPERT_ID_GLOBAL : NCCL_EP_EXPERT_ID_AUTO;
    c->config.pass_direction = backward ? NCCL_EP_BWD_PASS : NCCL_EP_FWD_PASS;
    c->info.expert_counters = nc->expert_counters.tensor;
    c->info.src_rank_counters = nc->rank_counters.tensor;
    c->info.expert_offsets = nc->offsets.tensor;
    c->info.recv_total_counter = nc->total.tensor;
}

static void combine_args(struct nccl_calls *c, struct nccl_case *nc, int backward)
{
    c->cin.tokens = nc->results.tensor;
    c->cout.tokens = nc->combined.tensor;
    if (low(nc) && major(nc))
        c->cout.topk_weights = nc->weights.tensor; /* an input of low latency's combine */
    if (backward) {
        c->cin.topk_weights = nc->result_weights.tensor;
        c->cout.topk_weights = nc->combined_weights.tensor;
    }
    c->cconfig.pass_direction = backward ? NCCL_EP_BWD_PASS : NCCL_EP_FWD_PASS;
}

void nccl_calls_init(struct nccl_calls *c, struct nccl_case *nc, int backward)
{
    *c = nccl_calls_none();
    dispatch_args(c, nc, backward);
    combine_args(c, nc, backward);
}

/* Tensors of this rank have as many rows as it has tokens now. */
static void set_tokens(struct nccl_case *nc, int tokens)
{
    struct tensor_pair *const pairs[] = {&nc->idx,     &nc->tokens,   &nc->scales,
                                         &nc->weights, &nc->combined, &nc->combined_weights};

    for (size_t i = 0; i < sizeof(pairs) / sizeof(pairs[0]); i++)
        if (pairs[i]->tensor) {
            pairs[i]->tensor->sizes[0] = (size_t)tokens;
            pairs[i]->view.shape[0] = tokens;
        }
}

static int reset_recv(struct nccl_case *nc)
{
    CHECK(oracle_recv_init(&nc->recv, &nc->route, world.rank) == 0);
    return 0;
}

int nccl_case_route(struct nccl_case *nc, uint64_t seed)
{
    const struct spec *s = nc->spec;
    const uint32_t flags = s->layout == FLAT         ? EPX_HANDLE_COMPACT_TOPK
                           : s->layout == RANK_MAJOR ? EPX_HANDLE_ALL_WEIGHTS
                                                     : 0;
    struct nccl_calls c;
    int tokens;

    forget_routing(nc);
    nc->work.seed = seed;
    CHECK(oracle_route_from_workload(&nc->route, &nc->work, s->tokens, low(nc) ? EPX_LOW_LATENCY : EPX_HIGH_THROUGHPUT,
                                     (int)s->layout, flags, s->alignment) == 0);
    nc->route.ranks_per_node = world.ranks_per_node;
    nc->data = oracle_data_workload(&nc->work, s->dtype == EPX_FP8_E4M3 ? EPX_BF16 : s->dtype);
    if (reset_recv(nc))
        return -1;
    nc->routed = 1;
    tokens = nc->route.tokens[world.rank];
    set_tokens(nc, tokens);
    for (int t = 0; t < tokens; t++)
        for (int k = 0; k < s->topk; k++)
            tensor_set_int(&nc->idx.view, (int64_t)t * s->topk + k, oracle_idx(&nc->route, world.rank, t)[k]);
    if (tensor_pair_put(&nc->idx))
        return -1;
    nccl_calls_init(&c, nc, 0);
    TRY(ncclEpUpdateHandle(nc->handle, nc->idx.tensor, low(nc) ? NULL : &c.info, world.stream));
    return low(nc) ? 0 : check_counts(nc);
}

int nccl_case_expect_active(struct nccl_case *nc, const int *active)
{
    for (int r = 0; r < world.nranks; r++)
        nc->route.active[r] = active ? active[r] : 1;
    oracle_recv_free(&nc->recv);
    return reset_recv(nc);
}

static int put_inputs(struct nccl_case *nc)
{
    for (int t = 0; t < nc->route.tokens[world.rank]; t++) {
        workload_token(&nc->work, world.rank, t, tensor_row(&nc->tokens.view, t));
        workload_weights(&nc->work, world.rank, t, tensor_row(&nc->weights.view, t));
        if (nc->scales.tensor)
            workload_scales(&nc->work, world.rank, t, tensor_row(&nc->scales.view, t));
    }
    return tensor_pair_put(&nc->tokens) || tensor_pair_put(&nc->weights) ||
                   (nc->scales.tensor && tensor_pair_put(&nc->scales)) || tensor_pair_fill(&nc->received, POISON) ||
                   tensor_pair_fill(&nc->received_weights, POISON) || tensor_pair_fill(&nc->received_idx, POISON) ||
                   tensor_pair_fill(&nc->received_scales, POISON)
               ? -1
               : 0;
}

int nccl_case_dispatch(struct nccl_case *nc, uint64_t round, int backward, int send_only)
{
    struct nccl_calls c;

    nc->work.round = round;
    if (put_inputs(nc))
        return -1;
    nccl_calls_init(&c, nc, backward);
    c.config.send_only = (unsigned int)send_only;
    /* High throughput looks only at the kind of ids in it. */
    TRY(ncclEpDispatch(nc->handle, &c.in, &c.out, &c.info, &c.config, world.stream));
    return 0;
}

int nccl_case_check_dispatch(struct nccl_case *nc, int backward)
{
    epx_dispatch_outputs out = EPX_DISPATCH_OUTPUTS_INIT;
    epx_dispatch_config config = EPX_DISPATCH_CONFIG_INIT;
    struct mismatch m;

    if (tensor_pair_get(&nc->received) || get_if(&nc->received_scales) || get_if(&nc->received_weights) ||
        get_if(&nc->received_idx))
        return -1;
    out.tokens = &nc->received.view;
    out.scales = view_of(&nc->received_scales);
    if (!backward) {
        out.topk_weights = view_of(&nc->received_weights);
        out.topk_idx = view_of(&nc->received_idx);
    }
    config.direction = backward ? EPX_BACKWARD : EPX_FORWARD;
    config.round_scale = nc->spec->round_scales;
    config.global_ids = nc->spec->global_ids;
    if (low(nc) && check_counts(nc))
        return -1;
    return agrees(nc, "dispatch", oracle_check_dispatch(&nc->recv, &nc->data, &out, &config, POISON, &m), &m);
}

int nccl_case_combine(struct nccl_case *nc, int backward, int send_only)
{
    struct nccl_calls c;

    oracle_fill_results(&nc->recv, &nc->data, &nc->results.view, backward ? &nc->result_weights.view : NULL);
    if (tensor_pair_put(&nc->results) || (backward && tensor_pair_put(&nc->result_weights)) ||
        tensor_pair_fill(&nc->combined, POISON) || tensor_pair_fill(&nc->combined_weights, POISON))
        return -1;
    nccl_calls_init(&c, nc, backward);
    c.cconfig.send_only = (unsigned int)send_only;
    TRY(ncclEpCombine(nc->handle, &c.cin, &c.cout, &c.cconfig, world.stream));
    return 0;
}

int nccl_case_check_combine(struct nccl_case *nc, int backward)
{
    const struct oracle_combine how = {.weighted = low(nc) && major(nc), .round_ranks = !low(nc) && major(nc)};
    epx_combine_outputs out = EPX_COMBINE_OUTPUTS_INIT;
    struct mismatch m;

    if (tensor_pair_get(&nc->combined) || tensor_pair_get(&nc->combined_weights))
        return -1;
    out.tokens = &nc->combined.view;
    out.topk_weights = backward ? &nc->combined_weights.view : NULL;
    return agrees(nc, "combine", oracle_check_combine(&nc->route, &nc->data, world.rank, &how, &out, &m), &m);
}

int nccl_case_round(struct nccl_case *nc, uint64_t round, int backward)
{
    return nccl_case_dispatch(nc, round, backward, 0) || nccl_case_check_dispatch(nc, backward) ||
                   nccl_case_combine(nc, backward, 0) || nccl_case_check_combine(nc, backward)
               ? -1
               : 0;
}
