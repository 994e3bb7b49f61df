/* SPDX-License-Identifier: Apache-2.0 */
/* Low latency on the host; the protocol is in kernel/ll_dispatch.h and kernel/ll_combine.h. */
#include <string.h>

#include "group/launch.h"
#include "group/region.h"
#include "group/streams.h"
#include "modes/modes.h"
#include "util/status.h"

/*
 * Operation n of a kind uses the slot of operation n - W. If that one is staged here and not yet completed, waiting for
 * it would never end: say so instead. What a graph records is compared with what graphs have staged, and each launch
 * with what is staged then.
 */
static epx_status slots_check(const struct epx_group *group, enum staged_kind kind, uint64_t last, int recorded,
                              const char *call)
{
    int pending = 0, blocked = 0;

    for (const struct epx_handle *h = group->handles; h; h = h->next) {
        if (h->staged != kind || h->staged_recorded != recorded)
            continue;
        pending++;
        blocked |= last - h->staged_number >= (uint64_t)group->set.inflight;
    }
    if (blocked)
        return fail(EPX_ERR_BUSY,
                    "%s: %d staged operations wait for epx_complete, and max_inflight = %d slots are in use: complete "
                    "the oldest first, or raise max_inflight",
                    call, pending, group->set.inflight);
    return EPX_OK;
}

static epx_status slot_check(const struct epx_group *group, enum staged_kind kind, struct device_stream *stream,
                             const char *call)
{
    const int recorded = graphs_recording(group, group_stream(group, stream)) != NULL;

    return slots_check(group, kind, (recorded ? group->recorded : group->issued)[kind] + 1, recorded, call);
}

epx_status ll_graph_check(const struct epx_graph *graph)
{
    const struct epx_group *group = graph->group;
    epx_status status = EPX_OK;

    for (int kind = 0; status == EPX_OK && kind < STAGED_KINDS; kind++)
        if (graph->operations[kind])
            status = slots_check(group, (enum staged_kind)kind, group->issued[kind] + graph->operations[kind], 0,
                                 "epx_graph_launch");
    return status;
}

void ll_graph_launched(const struct epx_graph *graph)
{
    for (int kind = 0; kind < STAGED_KINDS; kind++)
        graph->group->issued[kind] += graph->operations[kind];
}

/* The number of an operation that was launched, or recorded. */
static uint64_t count_operation(struct epx_group *group, enum staged_kind kind, struct recording *recording)
{
    if (!recording)
        return ++group->issued[kind];
    recording->operations[kind]++;
    return ++group->recorded[kind];
}

/* Launches on at most `sms` multiprocessors (0: the group's number). A staged operation keeps its receive half for
 * ll_complete. */
static epx_status launch_steps(struct epx_handle *handle, enum staged_kind kind, int send_only, enum kernel_id id,
                               void *params, int32_t *steps, size_t bytes, int sms, struct device_stream *stream)
{
    struct epx_group *group = handle->group;
    struct recording *recording = graphs_recording(group, group_stream(group, stream));
    uint64_t number;
    epx_status status;

    *steps = send_only ? STEP_SEND : STEP_SEND | STEP_RECV;
    status = launch_sms(group, stream, id, params, bytes, sms);
    if (status != EPX_OK)
        return status;
    number = count_operation(group, kind, recording);
    if (!send_only)
        return EPX_OK;
    *steps = STEP_RECV;
    memcpy(&handle->pending, params, bytes);
    handle->staged = kind;
    handle->staged_recorded = recording != NULL;
    handle->staged_number = number;
    return EPX_OK;
}

/* Does the smaller flavour of the kernels serve (kernel/flavour.h)? */
static int is_one_node(const struct epx_group *group)
{
    return group->nnodes == 1 && !group->set.enable_mask;
}

/* A launch waits for late peers with all its multiprocessors only for a while (kernel/ll_wide_wait.h). */
static struct ll_wide_wait make_wide_wait(const struct epx_group *group, int send_only, const int64_t *wait_ns)
{
    const int per_sm = group->device->ops->agents_per_sm;
    struct ll_wide_wait wide_wait = {0, group->set.ll_few_sms};

    /* Whoever asks how long each peer took gets all of it. */
    if (!send_only && !wait_ns && per_sm && group->set.agents > per_sm * wide_wait.few_blocks && is_one_node(group))
        wide_wait.us = group->set.ll_wide_wait_us;
    return wide_wait;
}

static uint64_t in_place_offset(const struct epx_handle *handle, const struct dispatch_args *args)
{
    /* Rows for other nodes are staged in an order that merges. The rows of a staged operation are copied: otherwise its
     * completion would wait for its readers, and ranks that complete in different orders for each other. */
    if (args->cast || args->nvfp4 || args->scales.ndim || args->tokens.shape[0] == 0 || handle->group->nnodes > 1 ||
        args->send_only)
        return 0;
    return tensor_heap_offset(handle->group, &args->tokens);
}

epx_status ll_dispatch(struct epx_handle *handle, const struct dispatch_args *args, struct device_stream *stream)
{
    struct ll_dispatch_params p;
    epx_status status = slot_check(handle->group, STAGED_DISPATCH, stream, "epx_dispatch");

    if (status != EPX_OK)
        return status;
    memset(&p, 0, sizeof(p));
    regions_import(handle->group, stream);
    p.g = handle->group->dev;
    p.h = handle->dev;
    p.layout = handle->config.layout;
    p.topk_form = (handle->config.flags & EPX_HANDLE_COMPACT_TOPK ? TOPK_COMPACT : 0) |
                  (handle->config.flags & EPX_HANDLE_ALL_WEIGHTS ? TOPK_ALL_WEIGHTS : 0) |
                  (args->global_ids ? TOPK_GLOBAL : 0);
    p.outer_rows = (int32_t)args->out_tokens.shape[1];
    p.signature = make_signature(handle, &args->out_tokens, scale_row_bytes(args),
                                 (args->out_weights.ndim ? SIGNATURE_WEIGHTS : 0) | scales_signature(args));
    p.route = make_route(&handle->topk);
    p.route.shared = handle->config.layout == EPX_EXPERT_MAJOR;
    p.in = make_row_in(args);
    p.weights = args->out_weights.ndim ? args->weights.data : NULL;
    p.in_place = in_place_offset(handle, args);
    p.out = make_row_out(&args->out_tokens, &args->out_scales);
    if (args->nvfp4 == EPX_NVFP4_TILES) {
        p.scale_tiles = 1;
        p.out.scale_stride = 32 * 4 * 4;
        p.out.scale_row_stride = args->out_scales.shape[args->out_scales.ndim - 1] * p.out.scale_stride;
    }
    p.open_tokens = tensor_heap_offset(handle->group, &args->out_tokens);
    p.open_scales = tensor_heap_offset(handle->group, &args->out_scales);
    if (p.layout == LAYOUT_EXPERT_MAJOR && !args->src_rank.data)
        p.open_src_token = tensor_heap_offset(handle->group, &args->src_token);
    p.out_weights = args->out_weights.data;
    p.out_idx = make_index(&args->out_idx);
    p.src_rank = args->src_rank.data;
    p.src_token = args->src_token.data;
    p.expert_counts = make_index(&args->info.expert_counts);
    p.rank_counts = make_index(&args->info.rank_counts);
    p.total = make_index(&args->info.total);
    p.layout_range = args->info.layout_range.data;
    p.expert_stats = args->info.expert_stats.data;
    p.wait_ns = args->info.wait_ns.data;
    p.wide_wait = make_wide_wait(handle->group, args->send_only, p.wait_ns);
    p.one_node = is_one_node(handle->group);
    status =
        launch_steps(handle, STAGED_DISPATCH, args->send_only, KERNEL_LL_DISPATCH, &p, &p.steps, sizeof(p), 0, stream);
    if (status == EPX_OK) {
        handle->dispatched = 1;
        handle->group->stats.ll_dispatches++;
    }
    return status;
}

static enum kernel_id combine_kernel(const struct ll_combine_params *p)
{
    return p->logfmt ? KERNEL_LL_COMBINE_LOGFMT : KERNEL_LL_COMBINE;
}

/* Rows that ranks of the node read where they are: in the heap, or in a region that all of them have imported. */
static void rows_in_place(struct epx_group *group, const epx_tensor *tokens, struct device_stream *stream,
                          struct ll_combine_params *p)
{
    p->in_place = tensor_heap_offset(group, tokens);
    p->pulled = p->in_place != 0;
    if (!p->pulled) {
        p->rows_in = regions_find(group, tokens->data, tensor_span(tokens), stream, &p->in_place);
        p->pulled = p->rows_in != 0;
    } else if (group->nnodes > 1 && (p->in_place % 16 || p->stride % 16 || p->outer_stride % 16)) {
        p->pulled = 0; /* rows for other nodes are put from there, and commands count in units of 16 bytes */
    }
}

epx_status ll_combine(struct epx_handle *handle, const struct combine_args *args, struct device_stream *stream)
{
    const int64_t element = (int64_t)epx_dtype_size((epx_dtype)args->tokens.dtype);
    struct ll_combine_params p;
    epx_status status = slot_check(handle->group, STAGED_COMBINE, stream, "epx_combine");

    if (status != EPX_OK)
        return status;
    memset(&p, 0, sizeof(p));
    p.g = handle->group->dev;
    p.h = handle->dev;
    p.layout = handle->config.layout;
    p.logfmt = args->logfmt;
    p.nvfp4 = args->nvfp4;
    p.row_scales = args->row_scales.data;
    p.row_scale_rows = args->nvfp4 ? args->row_scales.shape[1] : 0;
    p.signature = make_signature(handle, &args->tokens, 0,
                                 (args->logfmt ? SIGNATURE_LOGFMT : 0) | (args->nvfp4 ? SIGNATURE_NVFP4 : 0));
    p.tokens = args->tokens.data;
    p.outer_stride = args->tokens.stride[0] * element;
    p.stride = args->tokens.stride[1] * element;
    p.nodes = handle->group->nnodes > 1;
    p.signals = args->signals.data;
    p.signal_stride = args->signals.ndim ? args->signals.shape[1] : 0;
    p.signal_rows = args->signal_rows;
    p.signal_value = args->signal_value;
    regions_import(handle->group, stream);
    /* Rows that the node reads in place would be read after those of other nodes have come, and this operation would
     * wait for the readers. Where the device has links of its own, rows are written to the node beside what the network
     * does; those for other nodes are staged, so that nothing waits until they have left. */
    const int beside = p.nodes && handle->group->device->ops->caps & DEVICE_OWN_LINKS;
    /* LogFMT saves a network's bytes. Where there is none, a reader rounds what it reads. */
    if (!(args->logfmt && p.nodes) && !args->nvfp4 && !p.signals && !beside)
        rows_in_place(handle->group, &args->tokens, stream, &p);
    regions_import_captured(handle->group, stream);
    p.weights = args->weights.data;
    p.topk = args->topk.data;
    p.topk_idx64 = args->topk.dtype == EPX_INT64;
    for (int i = 0; i < 2; i++) {
        p.bias[i] = args->bias[i].data;
        p.bias_stride[i] = args->bias[i].stride[0] * element;
    }
    p.out = args->out_tokens.data;
    p.out_stride = args->out_tokens.stride[0] * element;
    p.hidden = (int32_t)args->tokens.shape[2];
    p.dtype = args->tokens.dtype;
    p.wait_ns = args->wait_ns.data;
    p.wide_wait = make_wide_wait(handle->group, args->send_only || p.signals, p.wait_ns);
    p.one_node = is_one_node(handle->group);
    status = launch_steps(handle, STAGED_COMBINE, args->send_only, combine_kernel(&p), &p, &p.steps, sizeof(p),
                          p.signals ? args->max_sms : 0, stream);
    if (status == EPX_OK)
        handle->group->stats.ll_combines++;
    return status;
}

/*
 * On a GPU, first a launch on one multiprocessor that waits for the peers: the receive half itself is wide, and while
 * it waited it would keep computation, a late peer's perhaps, from its multiprocessors.
 */
static epx_status launch_wait(struct epx_handle *handle, enum kernel_id id, void *params, int32_t *steps, size_t bytes,
                              struct device_stream *stream)
{
    epx_status status;

    if (!handle->group->device->ops->agents_per_sm)
        return EPX_OK;
    *steps = STEP_WAIT;
    status = launch_sms(handle->group, stream, id, params, bytes, 1);
    *steps = STEP_RECV;
    return status;
}

epx_status ll_complete(struct epx_handle *handle, struct device_stream *stream)
{
    const int dispatch = handle->staged == STAGED_DISPATCH;
    const enum kernel_id id = dispatch ? KERNEL_LL_DISPATCH : combine_kernel(&handle->pending.combine);
    const size_t bytes = dispatch ? sizeof(handle->pending.dispatch) : sizeof(handle->pending.combine);
    int32_t *steps = dispatch ? &handle->pending.dispatch.steps : &handle->pending.combine.steps;
    epx_status status = launch_wait(handle, id, &handle->pending, steps, bytes, stream);

    if (status == EPX_OK)
        status = launch_ordered(handle->group, stream, id, &handle->pending, bytes);
    if (status == EPX_OK)
        handle->staged = STAGED_NONE;
    return status;
}
