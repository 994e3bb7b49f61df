/* SPDX-License-Identifier: Apache-2.0 */
/* epx_handle_*. */
#include "api/handle.h"

#include <inttypes.h>

#include "api/args.h"
#include "api/check.h"
#include "group/abort.h"
#include "group/launch.h"
#include "group/registry.h"
#include "modes/handle.h"
#include "modes/modes.h"
#include "util/pause.h"
#include "util/structs.h"
#include "util/status.h"

#define MOST_ALIGNMENT (1 << 20)
#define QUEUE_PAUSE_NS 20000u /* between two looks at a queue */

/* Row numbers are 32 bits wide, including the padding of all zones. */
static epx_status check_zones(const struct settings *set, const epx_handle_config *c)
{
    const int64_t copies = c->topk < set->local_experts ? c->topk : set->local_experts;
    const int64_t rows =
        set->nranks * (int64_t)set->max_tokens * copies + set->local_experts * (int64_t)(c->expert_alignment - 1);

    if (rows > INT32_MAX)
        return fail(EPX_ERR_ARGUMENT,
                    "epx_handle_config.expert_alignment: %d with %d local experts makes up to %" PRId64
                    " rows; at most %d can be numbered",
                    c->expert_alignment, set->local_experts, rows, INT32_MAX);
    return EPX_OK;
}

static epx_status check_drop(const epx_handle_config *c)
{
    if (c->drop_rows < 0 || (c->drop_rows && c->mode != EPX_HIGH_THROUGHPUT))
        return fail(EPX_ERR_ARGUMENT,
                    "epx_handle_config.drop_rows: expected 0, or a number of rows in high throughput, got %d",
                    c->drop_rows);
    if (c->drop_rows && c->flags & EPX_HANDLE_SOURCE_MAP && c->flags & EPX_HANDLE_DROP_TOKENS)
        return fail(EPX_ERR_ARGUMENT,
                    "epx_handle_config.drop_rows: expected 0 with EPX_HANDLE_SOURCE_MAP and EPX_HANDLE_DROP_TOKENS, "
                    "got %d",
                    c->drop_rows);
    return EPX_OK;
}

static epx_status check_memory(const struct epx_group *group, const epx_handle_config *c)
{
    const size_t needed = handle_table_bytes(&group->set, &group->plan.ht, c);

    if (c->memory && ((uintptr_t)c->memory % 16 || c->memory_bytes < needed))
        return fail(EPX_ERR_ARGUMENT,
                    "epx_handle_config.memory: expected %zu bytes or more, aligned to 16 bytes, got %" PRIu64 " at %p",
                    needed, c->memory_bytes, c->memory);
    return EPX_OK;
}

static epx_status check_config(const struct epx_group *group, const epx_handle_config *given, epx_handle_config *c)
{
    epx_status status = struct_in(c, sizeof(*c), given, "epx_handle_config");

    if (status != EPX_OK)
        return status;
    if (c->mode != EPX_LOW_LATENCY && c->mode != EPX_HIGH_THROUGHPUT)
        return fail(EPX_ERR_ARGUMENT,
                    "epx_handle_config.mode: expected EPX_LOW_LATENCY (1) or EPX_HIGH_THROUGHPUT (2), got %d", c->mode);
    if (!(group->set.modes & (unsigned)c->mode))
        return fail(EPX_ERR_USAGE, "epx_handle_config.mode: the group was created with modes = %u, without mode %d",
                    group->set.modes, c->mode);
    const int other = c->mode == EPX_LOW_LATENCY ? EPX_RANK_MAJOR : EPX_FLAT;
    if (c->layout != EPX_EXPERT_MAJOR && c->layout != other)
        return fail(EPX_ERR_ARGUMENT, "epx_handle_config.layout: expected EXPERT_MAJOR (1) or %s (%d), got %d",
                    other == EPX_FLAT ? "FLAT" : "RANK_MAJOR", other, c->layout);
    if (c->topk < 1 || c->topk > group->set.max_topk)
        return fail(EPX_ERR_ARGUMENT, "epx_handle_config.topk: expected 1 to the group's max_topk %d, got %d",
                    group->set.max_topk, c->topk);
    if (c->expert_alignment == 0)
        c->expert_alignment = 1;
    if (c->expert_alignment < 0 || c->expert_alignment > MOST_ALIGNMENT)
        return fail(EPX_ERR_ARGUMENT, "epx_handle_config.expert_alignment: expected 1 to %d, got %d", MOST_ALIGNMENT,
                    c->expert_alignment);
    if (c->flags &
            ~(EPX_HANDLE_COMPACT_TOPK | EPX_HANDLE_SOURCE_MAP | EPX_HANDLE_ALL_WEIGHTS | EPX_HANDLE_DROP_TOKENS) ||
        (c->flags & EPX_HANDLE_ALL_WEIGHTS && (c->flags & EPX_HANDLE_COMPACT_TOPK || c->layout != EPX_RANK_MAJOR)))
        return fail(EPX_ERR_ARGUMENT,
                    "epx_handle_config.flags: expected EPX_HANDLE_* bits, EPX_HANDLE_ALL_WEIGHTS with RANK_MAJOR and "
                    "without EPX_HANDLE_COMPACT_TOPK, got 0x%x",
                    c->flags);
    status = check_drop(c);
    if (status == EPX_OK)
        status = check_zones(&group->set, c);
    return status == EPX_OK ? check_memory(group, c) : status;
}

epx_status epx_handle_create(epx_handle **out, epx_group *group, const epx_handle_config *config)
{
    epx_handle_config checked;
    API_ISSUE;
    epx_status status = group_check(group, "epx_handle_create");

    if (status != EPX_OK)
        return status;
    if (!out)
        return fail(EPX_ERR_ARGUMENT, "epx_handle_create: handle: expected a pointer, got NULL");
    *out = NULL;
    status = check_config(group, config, &checked);
    return status == EPX_OK ? handle_create(group, &checked, out) : status;
}

epx_status epx_handle_destroy(epx_handle *handle)
{
    API_ISSUE;
    epx_status status = handle_check(handle, "epx_handle_destroy");

    if (status != EPX_OK)
        return status;
    if (handle->staged != STAGED_NONE && group_usable(handle->group) == EPX_OK)
        return fail(EPX_ERR_USAGE,
                    "epx_handle_destroy: the handle has a staged operation; call epx_complete first, or its slot is "
                    "never free again");
    /* Kernels in the queue may still use its tables. */
    status = launch_await(handle->group, handle->group->last_stream, "epx_handle_destroy");
    if (status == EPX_ERR_USAGE)
        return status;
    if (registry_retire(REGISTRY_HANDLE, handle, "epx_handle_destroy") != EPX_OK)
        return EPX_ERR_USAGE;
    handle_free(handle);
    return status;
}

epx_status epx_handle_memory(const epx_group *group, const epx_handle_config *config, size_t *bytes)
{
    epx_handle_config c;
    API_WAIT;
    epx_status status = group_check(group, "epx_handle_memory");

    if (status != EPX_OK)
        return status;
    if (!bytes)
        return fail(EPX_ERR_ARGUMENT, "epx_handle_memory: bytes: expected a pointer, got NULL");
    status = check_config(group, config, &c);
    if (status != EPX_OK)
        return status;
    *bytes = handle_table_bytes(&group->set, &group->plan.ht, &c);
    return EPX_OK;
}

/* The indices of a routing, checked but for their values. */
static epx_status check_topk(struct epx_handle *handle, const epx_tensor *topk_idx, const char *call, const char *name,
                             epx_tensor *topk)
{
    const struct want want = {call, name, DTYPES_INDEX, 2, {-1, handle->config.topk}, STRIDES_NONE};
    epx_status status;

    if (handle->staged != STAGED_NONE)
        return fail(EPX_ERR_USAGE, "%s: the handle has a staged operation; call epx_complete first", call);
    status = check_tensor(topk_idx, &want, topk);
    /* High throughput: the ranks tell each other, or all but this one would wait for its update. */
    const int64_t most = handle->config.mode == EPX_HIGH_THROUGHPUT ? INT32_MAX : handle->group->set.max_tokens;
    if (status == EPX_OK && topk->shape[0] > most)
        status = fail(EPX_ERR_ARGUMENT, "%s: %s: expected at most max_tokens_per_rank = %d tokens, got %" PRId64, call,
                      name, (int)most, topk->shape[0]);
    return status;
}

epx_status handle_route(struct epx_handle *handle, const epx_tensor *topk_idx, const char *call, const char *name)
{
    epx_tensor topk;
    epx_status status;

    if (handle->config.mode != EPX_LOW_LATENCY)
        return fail(EPX_ERR_ARGUMENT, "%s: %s: high throughput takes it in epx_handle_update, expected NULL", call,
                    name);
    status = check_topk(handle, topk_idx, call, name, &topk);
    if (status == EPX_OK)
        handle_set_routing(handle, &topk);
    return status;
}

epx_status epx_handle_update(epx_handle *handle, const epx_tensor *topk_idx, const epx_layout_info *info,
                             epx_stream stream)
{
    static const char call[] = "epx_handle_update";
    struct layout_tensors tensors;
    epx_tensor topk;
    API_ISSUE;
    epx_status status = handle_check(handle, call);

    if (status == EPX_OK)
        status = group_usable(handle->group);
    if (status == EPX_OK)
        status = stream_check(handle->group, stream, call);
    if (status == EPX_OK)
        status = check_topk(handle, topk_idx, call, "topk_idx", &topk);
    if (status == EPX_OK)
        status = layout_tensors_check(handle, info, call, &tensors);
    if (status != EPX_OK)
        return status;
    if (handle->config.mode == EPX_LOW_LATENCY) {
        if (info)
            return fail(EPX_ERR_ARGUMENT, "%s: info: low latency takes it in epx_dispatch, expected NULL", call);
        handle_set_routing(handle, &topk);
        return EPX_OK;
    }
    status = indices_check(handle, &topk, stream, call);
    return status == EPX_OK ? ht_update(handle, &topk, &tensors, (struct device_stream *)stream) : status;
}

/* A handle whose receive count may be asked for. */
static epx_status check_counted(const epx_handle *handle, const char *call)
{
    if (handle->config.mode != EPX_HIGH_THROUGHPUT)
        return fail(EPX_ERR_USAGE, "%s: expected a high-throughput handle", call);
    if (!handle_has_tokens(handle))
        return fail(EPX_ERR_USAGE, "%s: expected a handle that was updated (epx_handle_update)", call);
    return EPX_OK;
}

/* A handle that was never updated may be over memory with a routing. */
static int is_over_memory(const epx_handle *handle)
{
    return handle->config.mode == EPX_HIGH_THROUGHPUT && handle->config.memory && !handle_updates(handle);
}

struct counts {
    int64_t rows, tokens;
    int fits;
};

static epx_status count_in_memory(epx_handle *handle, const char *call, struct counts *counts,
                                  const int64_t *expert_counts)
{
    struct handle_state state;
    epx_status status = handle_state_read(handle, call, &state);

    if (status != EPX_OK)
        return status;
    if (state.key != handle_key(handle) || expert_counts)
        return fail(EPX_ERR_USAGE, "%s: expected a handle that was updated (epx_handle_update)", call);
    *counts = (struct counts){.rows = state.recv_rows, .tokens = state.tokens, .fits = !state.unexpected};
    return EPX_OK;
}

/* What is in the memory can be read when all work of the group that is queued has run. */
static epx_status look_at_memory(epx_handle *handle, const char *call)
{
    struct epx_group *group = handle->group;
    const struct device_ops *ops = group->device->ops;
    struct device_stream *last = group->last_stream;
    struct counts counts;
    epx_status status = EPX_OK;

    if (last && !ops->stream_captures(group->device, last))
        status = ops->stream_query(group->device, last);
    return status == EPX_OK ? count_in_memory(handle, call, &counts, NULL) : status;
}

/* For max_us at most, and beside the calls of other threads, one of which may update the handle. */
static epx_status poll_memory(struct api_call *api, epx_handle *handle, const char *call, uint64_t max_us)
{
    const uint64_t start = host_now_ns(), most = 4000u * (uint64_t)handle->group->set.timeout_ms;
    uint64_t us = 0;

    while (is_over_memory(handle)) {
        epx_status status = EPX_ERR_NOT_READY;

        if (api_try_issue(api)) {
            status = look_at_memory(handle, call);
            api_release(api);
        }
        if (status != EPX_ERR_NOT_READY)
            return status;
        status = group_usable(handle->group);
        if (status != EPX_OK)
            return status;
        us = (host_now_ns() - start) / 1000;
        if (us >= max_us || us >= most) /* a caller's own work may take any time */
            return EPX_ERR_NOT_READY;
        pause_ns(QUEUE_PAUSE_NS);
    }
    return handle_poll_update(handle, call, us < max_us ? max_us - us : 0);
}

epx_status epx_handle_recv_poll(epx_handle *handle, uint64_t max_us)
{
    static const char call[] = "epx_handle_recv_poll";
    API_WAIT;
    epx_status status = handle_check(handle, call);

    if (status == EPX_OK && is_over_memory(handle))
        return poll_memory(&api_call, handle, call, max_us);
    if (status == EPX_OK)
        status = check_counted(handle, call);
    return status == EPX_OK ? handle_poll_update(handle, call, max_us) : status;
}

/* Of one update, also where another thread queues the next, or recovers the group and does. */
static epx_status read_counts(epx_handle *handle, const char *call, struct counts *counts, int64_t *expert_counts)
{
    const struct recv_info *info = handle->info;
    epx_status status;
    uint64_t number, attempts;

    do {
        attempts = handle_attempts(handle);
        number = handle_updates(handle);
        status = handle_poll_update(handle, call, UINT64_MAX);
        if (status != EPX_OK)
            return status;
        *counts = (struct counts){.rows = info->rows, .tokens = info->tokens, .fits = !info->unexpected};
        for (int l = 0; expert_counts && l < handle->group->set.local_experts; l++)
            expert_counts[l] = info->expert_counts[l];
        __atomic_thread_fence(__ATOMIC_ACQUIRE); /* the counts before the number */
    } while (number != handle_updates(handle) || attempts != handle_attempts(handle));
    return EPX_OK;
}

/* Enters the handle's group. */
static epx_status take_counts(struct api_call *api, epx_handle *handle, const char *call, struct counts *counts,
                              int64_t *expert_counts)
{
    epx_status status = api_enter(api, REGISTRY_HANDLE, handle, call);

    if (status == EPX_OK && is_over_memory(handle)) {
        status = api_issue(api, call); /* it waits for the streams of others */
        return status == EPX_OK ? count_in_memory(handle, call, counts, expert_counts) : status;
    }
    if (status == EPX_OK)
        status = check_counted(handle, call);
    return status == EPX_OK ? read_counts(handle, call, counts, expert_counts) : status;
}

epx_status epx_handle_recv_count(epx_handle *handle, int64_t *rows, int64_t *expert_counts)
{
    static const char call[] = "epx_handle_recv_count";
    struct counts counts = {0};
    API_WAIT;
    epx_status status = handle && !rows ? fail(EPX_ERR_ARGUMENT, "%s: rows: expected a pointer, got NULL", call)
                                        : take_counts(&api_call, handle, call, &counts, expert_counts);

    if (status == EPX_OK)
        *rows = counts.rows;
    return status;
}

epx_status epx_handle_recv_fits(epx_handle *handle, int *fits)
{
    static const char call[] = "epx_handle_recv_fits";
    struct counts counts = {0};
    API_WAIT;
    epx_status status = handle && !fits ? fail(EPX_ERR_ARGUMENT, "%s: fits: expected a pointer, got NULL", call)
                                        : take_counts(&api_call, handle, call, &counts, NULL);

    if (status == EPX_OK)
        *fits = counts.fits;
    return status;
}

epx_status epx_handle_recv_tokens(epx_handle *handle, int64_t *tokens)
{
    static const char call[] = "epx_handle_recv_tokens";
    struct counts counts = {0};
    API_WAIT;
    epx_status status = handle && !tokens ? fail(EPX_ERR_ARGUMENT, "%s: tokens: expected a pointer, got NULL", call)
                                          : take_counts(&api_call, handle, call, &counts, NULL);

    if (status == EPX_OK)
        *tokens = counts.tokens;
    return status;
}

epx_status epx_handle_recv_tensor(epx_handle *handle, epx_recv_part which, epx_dtype dtype, int64_t rows,
                                  int64_t columns, epx_tensor *tensor)
{
    static const char call[] = "epx_handle_recv_tensor";
    API_ISSUE;
    epx_status status = handle_check(handle, call);

    if (status != EPX_OK)
        return status;
    const struct ht_layout *ht = &handle->group->plan.ht;
    const uint64_t bytes = epx_dtype_size(dtype) * (uint64_t)(columns < 0 ? 0 : columns);
    const uint64_t pitch = which == EPX_RECV_TOKENS ? ht->pitch : ht->scale_pitch;
    if (handle->config.mode != EPX_HIGH_THROUGHPUT)
        return fail(EPX_ERR_USAGE, "%s: expected a high-throughput handle", call);
    if (which != EPX_RECV_TOKENS && which != EPX_RECV_SCALES)
        return fail(EPX_ERR_ARGUMENT, "%s: which: expected EPX_RECV_TOKENS or EPX_RECV_SCALES, got %d", call, which);
    if (!tensor)
        return fail(EPX_ERR_ARGUMENT, "%s: tensor: expected a pointer, got NULL", call);
    if (!epx_dtype_size(dtype) || bytes == 0 || bytes > pitch)
        return fail(EPX_ERR_ARGUMENT, "%s: expected rows of 1 to %" PRIu64 " bytes, got %" PRId64 " %s", call, pitch,
                    columns, dtype_name(dtype));
    if (rows < 0 || rows > ht->rows)
        return fail(EPX_ERR_OVERFLOW,
                    "%s: rows: expected at most %" PRId64 ", which the receive buffer holds, got %" PRId64
                    ": raise max_recv_tokens or ht_node_bytes",
                    call, ht->rows, rows);
    *tensor = epx_tensor_make((char *)handle->group->heap.base + (which == EPX_RECV_TOKENS ? ht->tokens : ht->scales),
                              dtype, 2, rows, columns, 0, 0);
    return EPX_OK;
}
