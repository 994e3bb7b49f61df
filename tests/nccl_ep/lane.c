/* SPDX-License-Identifier: Apache-2.0 */
#include "lane.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int low(const struct lane *lane)
{
    return lane->spec->algorithm == NCCL_EP_ALGO_LOW_LATENCY;
}

static int major(const struct lane *lane)
{
    return lane->spec->layout == NCCL_EP_LAYOUT_EXPERT_MAJOR;
}

static int local_experts(const struct lane *lane)
{
    return (lane->spec->experts + world.nranks - 1) / world.nranks;
}

int64_t most_rows(const struct spec *spec)
{
    const int local = (spec->experts + world.nranks - 1) / world.nranks;
    const int64_t flat = (int64_t)world.nranks * spec->tokens;

    if (spec->rows || spec->layout != NCCL_EP_LAYOUT_EXPERT_MAJOR)
        return spec->rows ? spec->rows : flat;
    return flat * (spec->topk < local ? spec->topk : local) + (int64_t)local * spec->alignment;
}

int group_open(ncclEpGroup_t *group, const struct spec *spec, int enable_mask, int timeout_ms)
{
    ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;

    config.algorithm = spec->algorithm;
    config.num_experts = (unsigned int)spec->experts;
    config.max_dispatch_tokens_per_rank = (unsigned int)spec->tokens;
    config.max_token_bytes = (unsigned int)(spec->hidden * (int)tensor_element_size(spec->dtype));
    config.enable_mask = (unsigned int)enable_mask;
    config.timeout_ns = (uint64_t)timeout_ms * 1000000u;
    config.num_qp_per_rank = 4; /* taken, without meaning */
    if (spec->algorithm == NCCL_EP_ALGO_HIGH_THROUGHPUT && !spec->rows_open)
        config.max_recv_tokens_per_rank = (unsigned int)most_rows(spec);
    TRY(ncclEpCreateGroup(group, world.comm, &config));
    return 0;
}

/* ---- Tensors --------------------------------------------------------------------------------------------------------- */

/* With the shape of what is received: [L, R*M, last], [R, M, last] or [N, last]; last 0: without. */
static int open_received(struct lane *lane, struct side *side, epx_dtype dtype, int64_t last)
{
    const struct spec *s = lane->spec;
    const int64_t rows = (int64_t)world.nranks * s->tokens;

    if (!low(lane))
        return side_open(side, lane->group, s->memory, dtype, last ? 2 : 1, most_rows(s), last, 0);
    return major(lane) ? side_open(side, lane->group, s->memory, dtype, 3, local_experts(lane), rows, last)
                       : side_open(side, lane->group, s->memory, dtype, 3, world.nranks, s->tokens, last);
}

static int open_scales(struct lane *lane)
{
    const struct spec *s = lane->spec;
    const int fp8_in = s->dtype == EPX_FP8_E4M3;
    int64_t columns = (s->hidden + 127) / 128;

    if (s->received != EPX_FP8_E4M3)
        return 0;
    if (s->scale == EPX_UINT8)
        columns = (columns + 3) / 4 * 4;
    if (fp8_in && side_open(&lane->scales, lane->group, s->memory, s->scale, 2, s->tokens, columns, 0))
        return -1;
    return open_received(lane, &lane->received_scales, s->scale, columns);
}

static int open_counters(struct lane *lane)
{
    const struct spec *s = lane->spec;
    const int64_t L = local_experts(lane);

    if ((!low(lane) || major(lane)) && side_open(&lane->expert_counters, lane->group, PLAIN, s->counter, 1, L, 0, 0))
        return -1;
    if (low(lane) && !major(lane) &&
        side_open(&lane->rank_counters, lane->group, PLAIN, s->counter, 1, world.nranks, 0, 0))
        return -1;
    if (!low(lane) && major(lane) && side_open(&lane->offsets, lane->group, PLAIN, s->counter, 1, L, 0, 0))
        return -1;
    return low(lane) ? 0 : side_open(&lane->total, lane->group, PLAIN, s->counter, 1, 1, 0, 0);
}

static int open_tensors(struct lane *lane)
{
    const struct spec *s = lane->spec;
    const epx_dtype result = s->dtype == EPX_FP8_E4M3 ? EPX_BF16 : s->dtype;
    const int ranked = low(lane) && !major(lane), flat = !low(lane) && !major(lane);

    if (side_open(&lane->idx, lane->group, PLAIN, s->index32 ? EPX_INT32 : EPX_INT64, 2, s->tokens, s->topk, 0) ||
        side_open(&lane->tokens, lane->group, s->memory, s->dtype, 2, s->tokens, s->hidden, 0) ||
        side_open(&lane->weights, lane->group, s->memory, EPX_FP32, 2, s->tokens, s->topk, 0) ||
        open_received(lane, &lane->received, s->received, s->hidden) || open_scales(lane) || open_counters(lane) ||
        open_received(lane, &lane->results, result, s->hidden) ||
        side_open(&lane->combined, lane->group, s->memory, result, 2, s->tokens, s->hidden, 0) ||
        side_open(&lane->combined_weights, lane->group, s->memory, EPX_FP32, 2, s->tokens, s->topk, 0))
        return -1;
    if ((ranked || flat) && (open_received(lane, &lane->received_weights, EPX_FP32, s->topk) ||
                             open_received(lane, &lane->received_idx, ranked ? EPX_INT32 : EPX_INT64, s->topk)))
        return -1;
    if (!low(lane) && major(lane) && open_received(lane, &lane->received_weights, EPX_FP32, 0))
        return -1;
    return low(lane) ? 0 : open_received(lane, &lane->result_weights, EPX_FP32, major(lane) ? 0 : s->topk);
}

int lane_open(struct lane *lane, ncclEpGroup_t group, const struct spec *spec, int topk_open)
{
    ncclEpHandleConfig_t config = NCCL_EP_HANDLE_CONFIG_INIT;

    memset(lane, 0, sizeof(*lane));
    lane->spec = spec;
    lane->group = group;
    config.dispatch_output_per_expert_alignment = (size_t)spec->alignment;
    TRY(ncclEpInitHandle(&lane->handle, group, spec->layout, &config, topk_open ? -1 : spec->topk, NULL));
    lane->work = (struct workload){.nranks = world.nranks,
                                   .experts = spec->experts,
                                   .topk = spec->topk,
                                   .hidden = spec->hidden,
                                   .max_tokens = spec->tokens,
                                   .dtype = spec->dtype,
                                   .scale_dtype = spec->scale == EPX_UINT8 ? EPX_INT32 : EPX_FP32,
                                   .uneven = !spec->even,
                                   .hole_percent = 10};
    if (open_tensors(lane))
        return -1;
    lane->work.scale_count =
        lane->scales.tensor ? (int)lane->scales.view.shape[1] / (spec->scale == EPX_UINT8 ? 4 : 1) : 0;
    return 0;
}

static void forget_routing(struct lane *lane)
{
    if (lane->routed) {
        oracle_recv_free(&lane->recv);
        oracle_route_free(&lane->route);
    }
    lane->routed = 0;
}

int lane_close(struct lane *lane)
{
    struct side *const sides[] = {&lane->idx,
                                  &lane->tokens,
                                  &lane->scales,
                                  &lane->weights,
                                  &lane->received,
                                  &lane->received_scales,
                                  &lane->received_weights,
                                  &lane->received_idx,
                                  &lane->expert_counters,
                                  &lane->rank_counters,
                                  &lane->offsets,
                                  &lane->total,
                                  &lane->results,
                                  &lane->result_weights,
                                  &lane->combined,
                                  &lane->combined_weights};

    TRY(ncclEpHandleDestroy(lane->handle));
    forget_routing(lane);
    for (size_t i = 0; i < sizeof(sides) / sizeof(sides[0]); i++)
        if (side_close(sides[i]))
            return -1;
    return 0;
}

/* ---- What the oracle says -------------------------------------------------------------------------------------------- */

static int agrees(const struct lane *lane, const char *what, int rc, const struct mismatch *m)
{
    if (rc)
        fprintf(stderr, "nccl_ep: rank %d: %s: %s: %s\n", world.rank, lane->spec->name, what, m->text);
    return rc;
}

static epx_tensor *view_of(struct side *side)
{
    return side->tensor ? &side->view : NULL;
}

static int get_if(struct side *side)
{
    return side->tensor ? side_get(side) : 0;
}

static int check_counts(struct lane *lane)
{
    epx_layout_info info = EPX_LAYOUT_INFO_INIT;
    struct mismatch m;

    if (get_if(&lane->expert_counters) || get_if(&lane->rank_counters) || get_if(&lane->offsets) ||
        get_if(&lane->total))
        return -1;
    info.expert_counts = view_of(&lane->expert_counters);
    info.rank_counts = view_of(&lane->rank_counters);
    info.expert_offsets = view_of(&lane->offsets);
    info.total = view_of(&lane->total);
    return agrees(lane, "counts", oracle_check_layout(&lane->recv, &info, &m), &m);
}

/* UE8M0 scales: to the oracle, four of them are one int32. */
static epx_tensor scale_view(const struct side *side)
{
    epx_tensor t = side->view;

    if (t.dtype == EPX_UINT8) {
        t.dtype = EPX_INT32;
        t.shape[t.ndim - 1] /= 4;
    }
    return t;
}

static ncclEpLayoutInfo_t layout_info(struct lane *lane)
{
    ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;

    info.expert_counters = lane->expert_counters.tensor;
    info.src_rank_counters = lane->rank_counters.tensor;
    info.expert_offsets = lane->offsets.tensor;
    info.recv_total_counter = lane->total.tensor;
    return info;
}

/* ---- Operations ------------------------------------------------------------------------------------------------------ */

/* Tensors of this rank have as many rows as it has tokens now. */
static void set_tokens(struct lane *lane, int tokens)
{
    struct side *const sides[] = {&lane->idx,     &lane->tokens,   &lane->scales,
                                  &lane->weights, &lane->combined, &lane->combined_weights};

    for (size_t i = 0; i < sizeof(sides) / sizeof(sides[0]); i++)
        if (sides[i]->tensor) {
            sides[i]->tensor->sizes[0] = (size_t)tokens;
            sides[i]->view.shape[0] = tokens;
        }
}

static int reset_recv(struct lane *lane)
{
    CHECK(oracle_recv_init(&lane->recv, &lane->route, world.rank) == 0);
    return 0;
}

int lane_route(struct lane *lane, uint64_t seed)
{
    const struct spec *s = lane->spec;
    const uint32_t flags = s->layout == NCCL_EP_LAYOUT_FLAT ? EPX_HANDLE_COMPACT_TOPK : 0;
    ncclEpLayoutInfo_t info = layout_info(lane);
    int tokens;

    forget_routing(lane);
    lane->work.seed = seed;
    CHECK(oracle_route_from_workload(&lane->route, &lane->work, s->tokens,
                                     low(lane) ? EPX_LOW_LATENCY : EPX_HIGH_THROUGHPUT, (int)s->layout, flags,
                                     s->alignment) == 0);
    lane->route.ranks_per_node = world.ranks_per_node;
    lane->data = oracle_data_workload(&lane->work, s->dtype == EPX_FP8_E4M3 ? EPX_BF16 : s->dtype);
    if (reset_recv(lane))
        return -1;
    lane->routed = 1;
    tokens = lane->route.tokens[world.rank];
    set_tokens(lane, tokens);
    for (int t = 0; t < tokens; t++)
        for (int k = 0; k < s->topk; k++)
            tensor_set_int(&lane->idx.view, (int64_t)t * s->topk + k, oracle_idx(&lane->route, world.rank, t)[k]);
    if (side_put(&lane->idx))
        return -1;
    TRY(ncclEpUpdateHandle(lane->handle, lane->idx.tensor, low(lane) ? NULL : &info, world.stream));
    return low(lane) ? 0 : check_counts(lane);
}

int lane_expect_active(struct lane *lane, const int *active)
{
    for (int r = 0; r < world.nranks; r++)
        lane->route.active[r] = active ? active[r] : 1;
    oracle_recv_free(&lane->recv);
    return reset_recv(lane);
}

static int put_inputs(struct lane *lane)
{
    for (int t = 0; t < lane->route.tokens[world.rank]; t++) {
        workload_token(&lane->work, world.rank, t, tensor_row(&lane->tokens.view, t));
        workload_weights(&lane->work, world.rank, t, tensor_row(&lane->weights.view, t));
        if (lane->scales.tensor)
            workload_scales(&lane->work, world.rank, t, tensor_row(&lane->scales.view, t));
    }
    return side_put(&lane->tokens) || side_put(&lane->weights) || (lane->scales.tensor && side_put(&lane->scales)) ||
                   side_fill(&lane->received, POISON) || side_fill(&lane->received_weights, POISON) ||
                   side_fill(&lane->received_idx, POISON) || side_fill(&lane->received_scales, POISON)
               ? -1
               : 0;
}

int lane_dispatch(struct lane *lane, uint64_t round, int backward, int send_only)
{
    ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
    ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    ncclEpDispatchConfig_t config = NCCL_EP_DISPATCH_CONFIG_INIT;
    ncclEpLayoutInfo_t info = layout_info(lane);

    lane->work.round = round;
    if (put_inputs(lane))
        return -1;
    in.tokens = lane->tokens.tensor;
    in.scales = lane->scales.tensor;
    out.tokens = lane->received.tensor;
    out.scales = lane->received_scales.tensor;
    if (!backward && lane->received_weights.tensor) {
        in.topk_weights = lane->weights.tensor;
        out.topk_weights = lane->received_weights.tensor;
        out.topk_idx = lane->received_idx.tensor;
    }
    config.send_only = (unsigned int)send_only;
    config.round_scales = (unsigned int)lane->spec->round_scales;
    config.pass_direction = backward ? NCCL_EP_BWD_PASS : NCCL_EP_FWD_PASS;
    TRY(ncclEpDispatch(lane->handle, &in, &out, low(lane) ? &info : NULL, &config, world.stream));
    return 0;
}

int lane_check_dispatch(struct lane *lane, int backward)
{
    epx_dispatch_outputs out = EPX_DISPATCH_OUTPUTS_INIT;
    epx_dispatch_config config = EPX_DISPATCH_CONFIG_INIT;
    epx_tensor scales = lane->received_scales.tensor ? scale_view(&lane->received_scales) : (epx_tensor)EPX_TENSOR_INIT;
    struct mismatch m;

    if (side_get(&lane->received) || get_if(&lane->received_scales) || get_if(&lane->received_weights) ||
        get_if(&lane->received_idx))
        return -1;
    out.tokens = &lane->received.view;
    out.scales = lane->received_scales.tensor ? &scales : NULL;
    if (!backward) {
        out.topk_weights = view_of(&lane->received_weights);
        out.topk_idx = view_of(&lane->received_idx);
    }
    config.direction = backward ? EPX_BACKWARD : EPX_FORWARD;
    config.round_scale = lane->spec->round_scales;
    if (low(lane) && check_counts(lane))
        return -1;
    return agrees(lane, "dispatch", oracle_check_dispatch(&lane->recv, &lane->data, &out, &config, POISON, &m), &m);
}

int lane_combine(struct lane *lane, int backward, int send_only)
{
    ncclEpCombineInputs_t in = NCCL_EP_COMBINE_INPUTS_INIT;
    ncclEpCombineOutputs_t out = NCCL_EP_COMBINE_OUTPUTS_INIT;
    ncclEpCombineConfig_t config = NCCL_EP_COMBINE_CONFIG_INIT;

    oracle_fill_results(&lane->recv, &lane->data, &lane->results.view, backward ? &lane->result_weights.view : NULL);
    if (side_put(&lane->results) || (backward && side_put(&lane->result_weights)) ||
        side_fill(&lane->combined, POISON) || side_fill(&lane->combined_weights, POISON))
        return -1;
    in.tokens = lane->results.tensor;
    out.tokens = lane->combined.tensor;
    if (low(lane) && major(lane))
        out.topk_weights = lane->weights.tensor; /* read there */
    if (backward) {
        in.topk_weights = lane->result_weights.tensor;
        out.topk_weights = lane->combined_weights.tensor;
    }
    config.send_only = (unsigned int)send_only;
    config.pass_direction = backward ? NCCL_EP_BWD_PASS : NCCL_EP_FWD_PASS;
    TRY(ncclEpCombine(lane->handle, &in, &out, &config, world.stream));
    return 0;
}

int lane_check_combine(struct lane *lane, int backward)
{
    const struct oracle_combine how = {.weighted = low(lane) && major(lane)};
    epx_combine_outputs out = EPX_COMBINE_OUTPUTS_INIT;
    struct mismatch m;

    if (side_get(&lane->combined) || side_get(&lane->combined_weights))
        return -1;
    out.tokens = &lane->combined.view;
    out.topk_weights = backward ? &lane->combined_weights.view : NULL;
    return agrees(lane, "combine", oracle_check_combine(&lane->route, &lane->data, world.rank, &how, &out, &m), &m);
}

int lane_round(struct lane *lane, uint64_t round, int backward)
{
    return lane_dispatch(lane, round, backward, 0) || lane_check_dispatch(lane, backward) ||
                   lane_combine(lane, backward, 0) || lane_check_combine(lane, backward)
               ? -1
               : 0;
}
