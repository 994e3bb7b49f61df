/* SPDX-License-Identifier: Apache-2.0 */
/* Handles: the objects. Their tables in device memory are those of handle_tables.c. */
#include "modes/handle.h"

#include <inttypes.h>
#include <stdlib.h>

#include "group/abort.h"
#include "group/launch.h"
#include "group/registry.h"
#include "util/pause.h"
#include "util/status.h"

epx_status handle_create(struct epx_group *group, const epx_handle_config *config, struct epx_handle **out)
{
    struct epx_handle *handle = calloc(1, sizeof(*handle));
    epx_status status;

    if (!handle)
        return fail(EPX_ERR_MEMORY, "epx_handle_create: out of memory");
    handle->group = group;
    handle->config = *config;
    handle->ntokens = -1;
    status = handle_tables_create(handle);
    if (status != EPX_OK)
        goto free_handle;
    status = registry_add(REGISTRY_HANDLE, handle, group);
    if (status != EPX_OK)
        goto destroy_tables;
    handle->next = group->handles;
    group->handles = handle;
    *out = handle;
    return EPX_OK;

destroy_tables:
    handle_tables_destroy(handle);
free_handle:
    free(handle);
    return status;
}

void handle_free(struct epx_handle *handle)
{
    struct epx_handle **link = &handle->group->handles;

    registry_remove(REGISTRY_HANDLE, handle);
    while (*link && *link != handle)
        link = &(*link)->next;
    if (*link)
        *link = handle->next;
    handle_tables_destroy(handle);
    free(handle);
}

void handles_free_all(struct epx_group *group)
{
    while (group->handles)
        handle_free(group->handles);
}

epx_status handle_adopt(struct epx_handle *handle, int64_t ntokens, epx_stream stream, const char *call)
{
    struct epx_group *group = handle->group;
    struct handle_state state;
    epx_status status;

    /* Not while a graph is captured: kernels look, too. */
    if (!handle->adopted && !group_captures(group, stream)) {
        /* What the caller's work there fills the memory with may be a copy of another handle's. */
        status = launch_await(group, group_stream(group, stream), call);
        if (status == EPX_OK)
            status = handle_state_read(handle, call, &state);
        if (status != EPX_OK)
            return status;
        if (state.key != handle_key(handle))
            return fail(EPX_ERR_USAGE,
                        "%s: expected a handle with a routing (epx_handle_update), or over memory that has one for the "
                        "same configuration",
                        call);
        handle->adopted = 1;
    }
    __atomic_store_n(&handle->ntokens, ntokens, __ATOMIC_RELAXED); /* waits look at it */
    return EPX_OK;
}

void handle_set_routing(struct epx_handle *handle, const epx_tensor *topk)
{
    handle->topk = *topk;
    handle->ntokens = topk->shape[0];
    handle->dispatched = 0;
}

/* The notify kernel stores the update's number in shared memory when it has finished; its own deadlines bound it. */
#define UPDATE_SPIN_NS 20000000u /* how long the host looks without sleeping, where kernels take none of its cores */
#define UPDATE_LOOKS 64

/* The update is short, but what is queued before it may not be. */
static void update_pause(const struct epx_handle *handle, uint64_t waited_ns)
{
    const int device_is_host = (handle->group->device->ops->caps & DEVICE_HOST_ACCESS) != 0;

    if (device_is_host || waited_ns > UPDATE_SPIN_NS)
        pause_ns(20000);
}

int handle_is_counted(const struct epx_handle *handle)
{
    /* Pairs with the release of the notify kernel (hn_report_counts). */
    return __atomic_load_n(&handle->info->epoch, __ATOMIC_ACQUIRE) == handle->updates && !handle->recorded;
}

epx_status handle_check_tokens(const struct epx_handle *handle, const char *call)
{
    const struct recv_info *info = handle->info;

    if (!info->too_many)
        return EPX_OK;
    return fail(EPX_ERR_OVERFLOW,
                "%s: rank %" PRId64 " has %" PRId64 " tokens, and the group was created with max_tokens_per_rank = %d: "
                "no rank can use this routing, and a larger group is needed",
                call, info->too_many_rank, info->too_many, handle->group->set.max_tokens);
}

/* Of the last update, when its wait is over. A recovery ends that of an update which never ran. */
static epx_status handle_check_counts(const struct epx_handle *handle, const char *call)
{
    if (!handle_has_tokens(handle))
        return fail(EPX_ERR_USAGE,
                    "%s: the group has recovered from a failure, and the update did not run: expected "
                    "another epx_handle_update",
                    call);
    return handle_check_tokens(handle, call);
}

int handle_has_tokens(const struct epx_handle *handle)
{
    return __atomic_load_n(&handle->ntokens, __ATOMIC_ACQUIRE) >= 0; /* pairs with the release in launch_update() */
}

uint64_t handle_updates(const struct epx_handle *handle)
{
    return __atomic_load_n(&handle->updates, __ATOMIC_ACQUIRE); /* pairs with the release in launch_update() */
}

uint64_t handle_attempts(const struct epx_handle *handle)
{
    return __atomic_load_n(&handle->attempts, __ATOMIC_ACQUIRE); /* pairs with the release in launch_update() */
}

/* Since the first call that waited for the last update. Several threads may wait, and one may queue another update. */
static uint64_t waited_ns(struct epx_handle *handle, uint64_t now)
{
    const uint64_t since = __atomic_load_n(&handle->wait_since, __ATOMIC_RELAXED);

    if (!since)
        __atomic_store_n(&handle->wait_since, now, __ATOMIC_RELAXED);
    return since && now > since ? now - since : 0;
}

epx_status handle_poll_update(struct epx_handle *handle, const char *call, uint64_t max_us)
{
    const uint64_t start = host_now_ns(), deadline = 4ull * (uint64_t)handle->group->set.timeout_ms * 1000000u;

    for (;;) {
        epx_status status;
        for (int i = 0; i < UPDATE_LOOKS; i++)
            /* Pairs with the release of the notify kernel (hn_report_counts). */
            if (__atomic_load_n(&handle->info->epoch, __ATOMIC_ACQUIRE) >= handle_updates(handle))
                return handle_check_counts(handle, call);
        status = group_usable(handle->group);
        if (status != EPX_OK)
            return status;
        const uint64_t now = host_now_ns(), waited = waited_ns(handle, now);
        if (waited > deadline || now - start > deadline) {
            __atomic_store_n(&handle->wait_since, 0, __ATOMIC_RELAXED); /* a later call waits anew */
            return fail(EPX_ERR_TIMEOUT,
                        "%s: rank %d: the update did not run within %" PRIu64 " ms (is its stream blocked?)", call,
                        handle->group->rank, deadline / 1000000u);
        }
        if ((now - start) / 1000 >= max_us)
            return EPX_ERR_NOT_READY;
        update_pause(handle, waited);
    }
}
