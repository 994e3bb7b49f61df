/* SPDX-License-Identifier: Apache-2.0 */
/* High throughput on the host; the protocol is in kernel/ht_notify.h, ht_dispatch.h and ht_combine.h. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "group/region.h"
#include "group/launch.h"
#include "modes/handle.h"
#include "modes/modes.h"
#include "kernel/command.h"
#include "util/status.h"

static int drop_rules(const struct epx_handle *handle)
{
    if (!handle->config.drop_rows || handle->config.layout == EPX_FLAT)
        return handle->config.drop_rows ? DROP_FLAT : 0;
    return DROP_ZONES | (handle->config.flags & EPX_HANDLE_DROP_TOKENS ? DROP_TOKENS : 0);
}

/* FLAT rows are dropped in two updates. The first one says which tokens stay. They are the routing of the second one,
 * which gives them places and counts. The total is that of the first. */
static epx_status drop_flat(struct epx_handle *handle, struct ht_notify_params *p, struct device_stream *stream)
{
    struct ht_notify_params first;
    epx_status status;

    memset(&first, 0, sizeof(first));
    first.g = p->g;
    first.h = p->h;
    first.route = p->route;
    first.signature = p->signature;
    first.layout = p->layout;
    first.alignment = p->alignment;
    first.nodes = p->nodes;
    first.drop = p->drop;
    first.drop_rows = p->drop_rows;
    first.too_many = p->too_many;
    first.total = p->total;
    status = launch_ordered(handle->group, stream, KERNEL_HT_NOTIFY, &first, sizeof(first));
    if (status != EPX_OK)
        return status;
    p->route.topk = handle_places(handle);
    p->route.idx64 = 0;
    p->drop = 0;
    p->total.data = NULL;
    return EPX_OK;
}

/* Other threads may wait for counts (handle_poll_update). Who finds the update done, by what its kernel stores, finds
 * its tokens too; who finds its tokens finds its number. */
static epx_status launch_update(struct epx_handle *handle, const struct ht_notify_params *p, int64_t ntokens,
                                struct device_stream *stream)
{
    const int64_t before = handle->ntokens;
    epx_status status;

    /* Before the kernel writes anything: pairs with the acquires in handle_updates() and handle_attempts(). */
    __atomic_store_n(&handle->attempts, handle->attempts + 1, __ATOMIC_RELEASE);
    __atomic_store_n(&handle->updates, handle->updates + 1, __ATOMIC_RELEASE);
    __atomic_store_n(&handle->wait_since, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&handle->ntokens, ntokens, __ATOMIC_RELEASE); /* pairs with the acquire in handle_has_tokens() */
    status = launch_ordered(handle->group, stream, KERNEL_HT_NOTIFY, p, sizeof(*p));
    if (status == EPX_OK)
        return EPX_OK;
    __atomic_store_n(&handle->ntokens, before, __ATOMIC_RELAXED); /* first: a wait ends by the number */
    __atomic_store_n(&handle->updates, handle->updates - 1, __ATOMIC_RELEASE);
    return status;
}

epx_status ht_update(struct epx_handle *handle, const epx_tensor *topk, const struct layout_tensors *info,
                     struct device_stream *stream)
{
    struct ht_notify_params p;
    epx_status status = EPX_OK;

    regions_import(handle->group, stream);
    memset(&p, 0, sizeof(p));
    p.g = handle->group->dev;
    p.h = handle->dev;
    p.route = make_route(topk);
    if (topk->shape[0] > handle->group->set.max_tokens) { /* no table has room for them */
        p.too_many = topk->shape[0];
        p.route.ntokens = 0;
    }
    p.key = handle_key(handle);
    p.layout = handle->config.layout;
    p.alignment = handle->config.expert_alignment;
    p.signature = make_signature(handle, NULL, 0,
                                 p.alignment | (handle->config.flags & EPX_HANDLE_SOURCE_MAP ? SIGNATURE_MAP : 0));
    p.expert_counts = make_index(&info->expert_counts);
    p.expert_offsets = make_index(&info->expert_offsets);
    p.rank_counts = make_index(&info->rank_counts);
    p.total = make_index(&info->total);
    p.nodes = handle->group->nnodes > 1;
    p.expected_rows = (int32_t)info->expected_rows;
    p.rank_matrix = make_index(&info->rank_matrix);
    p.rank_tokens = make_index(&info->rank_tokens);
    p.relay_counts = make_index(&info->relay_counts);
    p.expert_rows = make_index(&info->expert_rows);
    p.expert_ends = make_index(&info->expert_ends);
    p.source_ends = make_index(&info->source_ends);
    p.source_ends_n = (int32_t)info->source_ends.shape[0];
    p.expert_stats = info->expert_stats.data;
    p.drop = drop_rules(handle);
    p.signature.extra |= p.drop ? SIGNATURE_DROP : 0;
    p.drop_rows = info->drop_rows ? (int64_t)info->drop_rows : handle->config.drop_rows;
    p.number = handle->updates + 1;
    if (p.drop & DROP_FLAT)
        status = drop_flat(handle, &p, stream);
    if (status == EPX_OK)
        status = launch_update(handle, &p, topk->shape[0], stream);
    if (status == EPX_OK) {
        handle->recorded |= group_captures(handle->group, stream);
        handle->expected_rows = info->expected_rows;
        handle->group->stats.ht_updates++;
    }
    return status;
}

/* Where senders write one tensor: in place if it is in the heap, else in the receive buffer, which sets `bit`. */
static uint64_t receive_at(const struct epx_group *group, const epx_tensor *t, uint64_t recv_buf, int bit,
                           int *buffered)
{
    uint64_t offset;

    if (!t->data)
        return 0;
    offset = tensor_heap_offset(group, t);
    if (!offset) {
        *buffered |= bit;
        offset = recv_buf;
    }
    return offset;
}

/* Rows of tensors in ordinary memory pass through the receive buffer. Where the update has finished, and their number
 * is known, the host says it; otherwise the kernel does. */
static epx_status recv_buf_check(const struct epx_handle *handle, int buffered, int64_t rows, const char *call)
{
    const struct ht_layout *ht = &handle->group->plan.ht;
    const int64_t room = ht->rows;

    if (!buffered || ht->window || rows <= room)
        return EPX_OK;
    return fail(EPX_ERR_OVERFLOW,
                "%s: %" PRId64 " rows are needed (this routing), and tensors in ordinary memory have max_recv_tokens = "
                "%" PRId64 ": raise it, or use memory from epx_alloc",
                call, rows, room);
}

/* Tokens that the caller receives in the buffer of tokens itself (epx_handle_recv_tensor). */
static int is_in_token_buffer(const struct ht_layout *ht, const struct dispatch_args *args, uint64_t tokens)
{
    return args->out_tokens.data && tokens >= ht->tokens && tokens < ht->tokens + (uint64_t)ht->rows * ht->pitch;
}

/* Long rows of scales have no buffer of their own: they follow their token in the buffer of tokens, which has room for
 * both, or have it to themselves. Where the caller receives its tokens there, they are behind all of these. */
static epx_status place_long_scales(const struct ht_layout *ht, const struct dispatch_args *args, int buffered,
                                    const struct signature *signature, struct hd_desc *desc)
{
    const uint64_t end = ht->tokens + (uint64_t)ht->rows * ht->pitch, rows = (uint64_t)args->out_tokens.shape[0];

    desc->scales = ht->tokens + (buffered & BUFFERED_TOKENS ? ((uint64_t)signature->hidden_bytes + 15) / 16 * 16 : 0);
    desc->scale_row_stride = ht->pitch;
    if (buffered & BUFFERED_TOKENS || !is_in_token_buffer(ht, args, desc->tokens))
        return EPX_OK;
    desc->scales = (desc->tokens + tensor_span(&args->out_tokens) + 15) / 16 * 16;
    desc->scale_row_stride = ((uint64_t)signature->scale_bytes + 15) / 16 * 16;
    if (desc->scales + rows * desc->scale_row_stride <= end)
        return EPX_OK;
    return fail(EPX_ERR_ARGUMENT,
                "epx_dispatch: outputs.scales: expected memory from epx_alloc, or a tokens tensor as "
                "epx_handle_recv_tensor returns it: there is no room for %d bytes of scales per row behind it",
                signature->scale_bytes);
}

static epx_status place_scales(const struct epx_group *group, const struct dispatch_args *args,
                               struct ht_dispatch_params *p, int *buffered)
{
    const struct ht_layout *ht = &group->plan.ht;
    struct hd_desc *desc = &p->desc;

    desc->scales = receive_at(group, &args->out_scales, ht->scales, BUFFERED_SCALES, buffered);
    desc->scale_row_stride = (uint64_t)p->final.scale_row_stride;
    desc->scale_stride = (uint64_t)p->final.scale_stride;
    if (!(*buffered & BUFFERED_SCALES))
        return EPX_OK;
    desc->scale_row_stride = ht->scale_pitch;
    desc->scale_stride = 4;
    return (uint64_t)p->signature.scale_bytes > ht->scale_pitch
               ? place_long_scales(ht, args, *buffered, &p->signature, desc)
               : EPX_OK;
}

/* Offsets of struct hd_desc count from this rank's heap; with 64 bits they reach everything. */
static uint64_t offset_of(const struct epx_group *group, const epx_tensor *t)
{
    return t->data ? (uint64_t)((uintptr_t)t->data - (uintptr_t)group->bases[group->rank]) : 0;
}

/* Where rows are taken from windows: all tensors are the caller's own. */
static void make_own(const struct epx_group *group, const struct dispatch_args *args, struct ht_dispatch_params *p)
{
    struct hd_desc *own = &p->own;

    own->signature = p->signature;
    own->idx = p->desc.idx;
    own->tokens = offset_of(group, &args->out_tokens);
    own->token_stride = (uint64_t)p->final.stride;
    own->scales = offset_of(group, &args->out_scales);
    own->scale_row_stride = (uint64_t)p->final.scale_row_stride;
    own->scale_stride = (uint64_t)p->final.scale_stride;
    own->weights = offset_of(group, &args->out_weights);
    own->topk_idx = offset_of(group, &args->out_idx);
    own->src_rank = offset_of(group, &args->src_rank);
    own->src_token = offset_of(group, &args->src_token);
    own->map = offset_of(group, &args->source_map);
    own->map_lines = (int32_t)args->source_map.shape[0];
    own->source_stride = args->source_stride;
    own->capacity = args->out_tokens.shape[0];
}

static epx_status make_desc(const struct epx_handle *handle, const struct dispatch_args *args,
                            struct ht_dispatch_params *p)
{
    const struct epx_group *group = handle->group;
    const struct ht_layout *ht = &group->plan.ht;
    struct hd_desc *desc = &p->desc;
    epx_status status;
    int buffered = 0;

    desc->signature = p->signature;
    desc->idx = (args->out_idx.dtype == EPX_INT64 ? IDX_64 : 0) | (args->global_ids ? IDX_GLOBAL : 0);
    desc->tokens = receive_at(group, &args->out_tokens, ht->tokens, BUFFERED_TOKENS, &buffered);
    desc->token_stride = buffered & BUFFERED_TOKENS ? ht->pitch : (uint64_t)p->final.stride;
    status = place_scales(group, args, p, &buffered);
    desc->weights = receive_at(group, &args->out_weights, ht->weights, BUFFERED_WEIGHTS, &buffered);
    desc->topk_idx = receive_at(group, &args->out_idx, ht->topk_idx, BUFFERED_IDX, &buffered);
    desc->src_rank = receive_at(group, &args->src_rank, ht->src_rank, BUFFERED_SRC_RANK, &buffered);
    desc->src_token = receive_at(group, &args->src_token, ht->src_token, BUFFERED_SRC_TOKEN, &buffered);
    desc->map = receive_at(group, &args->source_map, ht->map, BUFFERED_MAP, &buffered);
    desc->map_lines = (int32_t)args->source_map.shape[0];
    desc->source_stride = args->source_stride;
    desc->capacity = args->out_tokens.shape[0];
    if (buffered && desc->capacity > ht->rows)
        desc->capacity = ht->rows;
    if (buffered & BUFFERED_MAP && desc->map_lines > ht->rows)
        desc->map_lines = (int32_t)ht->rows;
    p->buffered = buffered;
    make_own(group, args, p);
    return status;
}

/* Rows that are in the heap in the format of the wire are put to other nodes from there. */
static uint64_t in_place_offset(const struct epx_handle *handle, const struct dispatch_args *args,
                                const struct ht_dispatch_params *p)
{
    const struct epx_group *group = handle->group;
    uint64_t offset;

    if (group->nnodes == 1 || group->net_memory || args->cast ||
        (uint64_t)p->signature.scale_bytes > group->plan.ht.scale_pitch)
        return 0;
    offset = tensor_heap_offset(group, &args->tokens);
    return (offset | (uint64_t)p->in.stride | (uint64_t)p->signature.hidden_bytes) % COMMAND_UNIT ? 0 : offset;
}

/* Where the others read one tensor: in the heap or in a region that they have imported, else in the receive buffer,
 * which marks `bit`. */
static uint64_t source_at(struct epx_group *group, const epx_tensor *t, struct device_stream *stream, uint64_t recv_buf,
                          int bit, int *buffered, int32_t *in)
{
    uint64_t offset;

    *in = 0;
    if (!t->data)
        return 0;
    offset = tensor_heap_offset(group, t);
    if (!offset)
        *in = regions_find(group, t->data, tensor_span(t), stream, &offset);
    if (*in || offset)
        return offset;
    *buffered |= bit;
    return recv_buf;
}

/* Calls without windows, or without rows in them, after which none are expected: the framework's tensors have been
 * imported by then. */
#define WINDOWS_QUIET 8

/* Operations that had windows because of other ranks. A hint that kernels of earlier calls may still change: it decides
 * how fast steps are, not whether they are. */
static uint64_t windows_hinted(struct epx_group *group)
{
    const uint64_t hinted = __atomic_load_n(group->shadow.windows, __ATOMIC_RELAXED);

    if (hinted / HW_HINT_ROWS != group->windows_with_rows) {
        group->windows_with_rows = hinted / HW_HINT_ROWS;
        group->windows_wide = 0;
    } else if (group->windows_wide < WINDOWS_QUIET && hinted != group->windows_hinted) {
        group->windows_wide++;
    }
    group->windows_hinted = hinted;
    return hinted / HW_HINT_OTHERS % (HW_HINT_ROWS / HW_HINT_OTHERS);
}

/* Are steps of windows expected? Yes, if others do not reach tensors of this rank (`own`). Otherwise not, once for a
 * while no operation had any because of other ranks. */
static int windows_expected(struct epx_group *group, int own)
{
    const uint64_t seen = windows_hinted(group);

    if (own)
        return 1;
    if (seen != group->windows_others) {
        group->windows_others = seen;
        group->windows_quiet = 0;
    } else if (group->windows_quiet < WINDOWS_QUIET) {
        group->windows_quiet++;
    }
    return group->windows_quiet < WINDOWS_QUIET;
}

/* What is known of an operation's turns: what its update has found. It is the most that is possible if the update has
 * not run, may run again before a graph does, or was another handle's (epx_handle_config.memory). */
struct turn_bounds {
    int captured, windowed, rounds, all_rounds;
    int64_t tokens;
};

static struct turn_bounds turn_bounds_of(const struct epx_handle *handle, struct device_stream *stream)
{
    const struct epx_group *group = handle->group;
    struct turn_bounds b = {.captured = group_captures(group, stream),
                            .windowed = group->plan.ht.window != 0,
                            .rounds = group->plan.ht.rounds,
                            .all_rounds = group->plan.ht.rounds,
                            .tokens = group->set.max_tokens};

    if (!handle_is_counted(handle) || !handle->updates || b.captured)
        return b;
    b.windowed = b.windowed && handle->info->windowed;
    b.rounds = (int)handle->info->rounds;
    b.all_rounds = (int)handle->info->all_rounds;
    b.tokens = handle->info->most_tokens;
    return b;
}

/* How many launches the turns of an operation need where each stage is a launch: between nodes the turns of its rounds,
 * inside a node the steps of windows of so many tokens and `more` steps behind them. `own`: others do not reach tensors
 * of this rank. */
static int turns_of(const struct epx_handle *handle, const struct turn_bounds *b, int window, int more, int own)
{
    struct epx_group *group = handle->group;
    const int windows = b->windowed ? (int)((b->tokens + window - 1) / window) + more : 0;
    int turns = b->rounds <= HT_TURN_STAGED ? 1 : (b->rounds + HT_TURN_STAGED - 1) / HT_TURN_STAGED; /* as ht_turn() */

    if (group->nnodes == 1)
        return b->windowed && !windows_expected(group, own) && !b->captured ? 0 : windows;
    if (b->windowed && b->all_rounds + more > turns)
        turns = b->all_rounds + more;
    return windows > turns ? windows : turns;
}

static int signature_bits(int weights, int backward, int compact)
{
    return (weights ? SIGNATURE_WEIGHTS : 0) | (backward ? SIGNATURE_BACKWARD : 0) | (compact ? SIGNATURE_COMPACT : 0);
}

/* The most rows that tokens with different experts make. */
static int64_t worst_rows(const struct epx_handle *handle)
{
    const struct settings *set = &handle->group->set;
    const epx_handle_config *c = &handle->config;
    const int64_t L = set->local_experts, flat = (int64_t)set->nranks * set->max_tokens;

    return c->layout == EPX_FLAT ? flat : flat * (c->topk < L ? c->topk : L) + L * (c->expert_alignment - 1);
}

/* The caller's tensors hold the rows that it expects. So does the receive buffer, or all rows that can come. */
static epx_status expected_room_check(const struct epx_handle *handle, const struct ht_dispatch_params *p)
{
    const int64_t expected = handle->expected_rows, worst = worst_rows(handle), own = p->own.capacity;
    const int64_t room = handle->group->plan.ht.window ? own : p->desc.capacity;

    if (own >= expected && room >= (expected < worst ? expected : worst))
        return EPX_OK;
    return fail(EPX_ERR_ARGUMENT,
                "epx_dispatch: config.if_expected: expected room for expected_rows = %" PRId64 " rows, got %" PRId64,
                expected, room < own ? room : own);
}

/* Where others take the rows of this rank if they pass through windows: where they are, if that is in reach. Not with
 * masks: a rank that slept would read addresses of a later operation. */
static void show_rows(struct epx_handle *handle, const struct dispatch_args *args, struct device_stream *stream,
                      struct ht_dispatch_params *p)
{
    struct epx_group *group = handle->group;
    struct hd_shown *shown = &p->shown;
    int missing = 0;

    shown->rows_in = IN_WINDOW;
    if (!p->turns || p->nodes || group->set.enable_mask || args->cast)
        return;
    shown->row_stride = (uint64_t)p->in.stride;
    shown->scale_row_stride = (uint64_t)p->in.scale_row_stride;
    shown->scale_stride = (uint64_t)p->in.scale_stride;
    if (args->tokens.shape[0]) {
        int32_t rows_in;
        shown->rows = source_at(group, &args->tokens, stream, 0, 1, &missing, &rows_in);
        shown->scales = source_at(group, &args->scales, stream, 0, 1, &missing, &shown->scales_in);
        shown->rows_in = missing ? IN_WINDOW : rows_in;
    } else {
        shown->rows_in = 0; /* there are none */
    }
}

/* The turns of a dispatch, and where its rows are shown. Where all rows are taken from where they are, one window has
 * the routes of nearly any number of tokens. If it was so for a while, no more than its steps are launched. */
static void plan_turns(struct epx_handle *handle, const struct dispatch_args *args, struct device_stream *stream,
                       struct ht_dispatch_params *p)
{
    const struct epx_group *group = handle->group;
    const struct ht_layout *ht = &group->plan.ht;
    const struct turn_bounds bounds = turn_bounds_of(handle, stream);

    p->turns = turns_of(handle, &bounds, ht->take_tokens, 1, p->buffered); /* taken in the next step */
    show_rows(handle, args, stream, p);
    if (p->shown.rows_in != IN_WINDOW && !bounds.captured && group->windows_wide >= WINDOWS_QUIET)
        p->turns = (int)((bounds.tokens + ht->wide_tokens - 1) / ht->wide_tokens) + 1;
    regions_import_captured(handle->group, stream);
}

epx_status ht_dispatch(struct epx_handle *handle, const struct dispatch_args *args, struct device_stream *stream)
{
    struct ht_dispatch_params p;
    epx_status status;

    memset(&p, 0, sizeof(p));
    p.g = handle->group->dev;
    p.h = handle->dev;
    p.layout = handle->config.layout;
    p.compact = (handle->config.flags & EPX_HANDLE_COMPACT_TOPK) != 0;
    p.signature = make_signature(handle, &args->out_tokens, scale_row_bytes(args),
                                 signature_bits(args->out_weights.ndim, args->backward, p.compact) |
                                     (args->source_map.ndim ? SIGNATURE_MAP : 0) | scales_signature(args));
    p.nodes = handle->group->nnodes > 1;
    p.in = make_row_in(args);
    p.weights = args->weights.data;
    p.final = make_row_out(&args->out_tokens, &args->out_scales);
    p.final_weights = args->out_weights.data;
    p.final_idx = make_index(&args->out_idx);
    p.final_src_rank = args->src_rank.data;
    p.final_src_token = args->src_token.data;
    p.final_map = args->source_map.data;
    p.expert_counts = make_index(&args->info.expert_counts);
    p.total = make_index(&args->info.total);
    p.if_expected = args->if_expected;
    p.final_rows = args->out_tokens.shape[0];
    p.drop = drop_rules(handle) & ~DROP_FLAT;
    p.key = handle_key(handle);
    p.ntokens = args->tokens.shape[0];
    status = make_desc(handle, args, &p);
    if (status != EPX_OK)
        return status;
    p.in_place = in_place_offset(handle, args, &p);
    regions_import(handle->group, stream);
    plan_turns(handle, args, stream, &p);
    if (args->if_expected)
        status = expected_room_check(handle, &p);
    if (status != EPX_OK)
        return status;
    const int counted = handle_is_counted(handle) && !args->if_expected;
    status = counted ? handle_check_tokens(handle, "epx_dispatch") : EPX_OK;
    if (status == EPX_OK && counted)
        status = recv_buf_check(handle, p.buffered, handle->info->rows, "epx_dispatch");
    if (status == EPX_OK)
        status = launch_sms(handle->group, stream, KERNEL_HT_DISPATCH, &p, sizeof(p), args->max_sms);
    if (status == EPX_OK)
        handle->group->stats.ht_dispatches++;
    return status;
}

static void make_combine_desc(struct epx_handle *handle, const struct combine_args *args, struct device_stream *stream,
                              struct ht_combine_params *p)
{
    struct epx_group *group = handle->group;
    const struct ht_layout *ht = &group->plan.ht;
    struct hc_desc *desc = &p->desc;
    int buffered = 0;

    desc->signature = p->signature;
    desc->rows = args->tokens.shape[0];
    desc->tokens = source_at(group, &args->tokens, stream, ht->tokens, BUFFERED_TOKENS, &buffered, &desc->tokens_in);
    desc->token_stride = buffered & BUFFERED_TOKENS ? ht->pitch : (uint64_t)p->stride;
    desc->weights =
        source_at(group, &args->weights, stream, ht->weights, BUFFERED_WEIGHTS, &buffered, &desc->weights_in);
    p->tokens = buffered & BUFFERED_TOKENS ? args->tokens.data : NULL;
    p->weights = buffered & BUFFERED_WEIGHTS ? args->weights.data : NULL;
    if (buffered && desc->rows > ht->rows && !ht->window)
        desc->rows = ht->rows;
    p->own_tokens = args->tokens.data;
    p->own_weights = args->weights.data;
}

/* Frees the largest memory, which is too small and which no graph has. A kernel in the queue may still use it, so this
 * waits for the stream. */
static epx_status free_kept(struct epx_group *group)
{
    const struct device_ops *ops = group->device->ops;
    struct kept_rows *kept = group->kept_rows;
    epx_status status = launch_await(group, group->last_stream, "epx_combine");

    if (status != EPX_OK)
        return status;
    group->kept_rows = kept->next;
    ops->mem_free(group->device, kept->memory);
    free(kept);
    return EPX_OK;
}

/* Memory for the rows of other nodes, as much as any call of the group has needed. What a graph was recorded with stays
 * until the group is destroyed. So does memory in use when a stream is being recorded, which cannot be waited for. */
static epx_status reserve_kept(struct epx_group *group, uint64_t bytes, struct device_stream *stream)
{
    const int captured = group_captures(group, stream);
    struct kept_rows *kept = group->kept_rows;
    epx_status status = EPX_OK;

    if (!bytes)
        return EPX_OK;
    if (kept && bytes <= kept->bytes) {
        kept->recorded |= captured;
        return EPX_OK;
    }
    if (kept && !kept->recorded && !captured)
        status = free_kept(group);
    if (status != EPX_OK)
        return status;
    kept = calloc(1, sizeof(*kept));
    if (!kept)
        return fail(EPX_ERR_MEMORY, "epx_combine: no memory to keep %" PRIu64 " bytes of rows", bytes);
    status = group->device->ops->mem_alloc(group->device, bytes, &kept->memory);
    if (status != EPX_OK) {
        free(kept);
        return status;
    }
    kept->bytes = bytes;
    kept->recorded = captured;
    kept->next = group->kept_rows;
    group->kept_rows = kept;
    return EPX_OK;
}

/* Several nodes whose sums may not be rounded: one launch for every place in the top-k (kernel/ht_combine.h). */
static epx_status combine_in_rounds(struct epx_handle *handle, struct ht_combine_params *p, int max_sms,
                                    struct device_stream *stream)
{
    struct epx_group *group = handle->group;
    epx_status status;

    p->rounds = handle->config.topk;
    p->kept_stride = (p->signature.hidden_bytes + 15) / 16 * 16;
    status = reserve_kept(group, (uint64_t)handle->ntokens * (uint64_t)p->rounds * (uint64_t)p->kept_stride, stream);
    p->kept = group->kept_rows ? group->kept_rows->memory : NULL;
    for (p->round = 0; p->round < p->rounds && status == EPX_OK; p->round++) {
        status = launch_sms(group, stream, KERNEL_HT_COMBINE, p, sizeof(*p), max_sms);
        /* Staged rows stay where they are, but not in windows; and the weights have returned. */
        if (!group->plan.ht.window)
            p->tokens = NULL;
        p->weights = NULL;
        p->out_weights = NULL;
        p->signature.extra &= ~SIGNATURE_WEIGHTS;
        p->desc.signature = p->signature;
    }
    return status;
}

epx_status ht_combine(struct epx_handle *handle, const struct combine_args *args, struct device_stream *stream)
{
    const int64_t element = (int64_t)epx_dtype_size((epx_dtype)args->tokens.dtype);
    struct ht_combine_params p;
    epx_status status;

    memset(&p, 0, sizeof(p));
    p.g = handle->group->dev;
    p.h = handle->dev;
    p.layout = handle->config.layout;
    p.compact = (handle->config.flags & EPX_HANDLE_COMPACT_TOPK) != 0;
    /* FLAT has one row of each rank: there is nothing to round. */
    p.sum = p.layout == EPX_FLAT && args->sum == SUM_ROUND_RANKS ? 0 : (int32_t)args->sum;
    p.signature =
        make_signature(handle, &args->tokens, 0,
                       signature_bits(args->out_weights.ndim, args->backward, p.compact) | p.sum << SIGNATURE_SUM_AT);
    p.nodes = handle->group->nnodes > 1;
    p.stride = args->tokens.stride[0] * element;
    regions_import(handle->group, stream);
    make_combine_desc(handle, args, stream, &p);
    regions_import_captured(handle->group, stream);
    /* The first step shows what owners of rows have to know; see hc_steps(), and combine_stages() for one more. */
    const struct turn_bounds bounds = turn_bounds_of(handle, stream);
    p.turns = turns_of(handle, &bounds, handle->group->plan.ht.sum_tokens, p.nodes ? 2 : 1, p.tokens || p.weights);
    for (int i = 0; i < 2; i++) {
        p.bias[i] = args->bias[i].data;
        p.bias_stride[i] = args->bias[i].stride[0] * element;
    }
    p.out = args->out_tokens.data;
    p.out_stride = args->out_tokens.stride[0] * element;
    p.out_weights = args->out_weights.data;
    p.key = handle_key(handle);
    p.ntokens = args->out_tokens.shape[0];
    p.hidden = (int32_t)args->tokens.shape[1];
    p.dtype = args->tokens.dtype;
    const int counted = handle_is_counted(handle);
    status = counted ? handle_check_tokens(handle, "epx_combine") : EPX_OK;
    if (status == EPX_OK && counted)
        status = recv_buf_check(handle, p.tokens || p.weights, handle->info->used_rows, "epx_combine");
    if (status == EPX_OK && p.nodes && p.sum & SUM_TOPK_ORDER && !(p.sum & SUM_ROUND_NODES))
        status = combine_in_rounds(handle, &p, args->max_sms, stream);
    else if (status == EPX_OK)
        status = launch_sms(handle->group, stream, KERNEL_HT_COMBINE, &p, sizeof(p), args->max_sms);
    if (status == EPX_OK)
        handle->group->stats.ht_combines++;
    return status;
}
