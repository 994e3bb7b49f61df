/* SPDX-License-Identifier: Apache-2.0 */
/* Handles: the objects. Their tables in device memory are those of handle_tables.c. */
#include "modes/handle.h"

#include <inttypes.h>
#include <stdlib.h>

#include "group/abort.h"
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
    status = registry_add(REGISTRY_HANDLE, handle);
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

void handle_set_routing(struct epx_handle *handle, const epx_tensor *topk)
{
    handle->topk = *topk;
    handle->ntokens = topk->shape[0];
    handle->dispatched = 0;
}

/* The notify kernel stores the update's number in shared memory when it has finished; its own deadlines bound it. */
epx_status handle_wait_update(struct epx_handle *handle, const char *call)
{
    const uint64_t start = host_now_ns();
    const uint64_t limit = 4ull * (uint64_t)handle->group->set.timeout_ms * 1000000u;

    /* Pairs with the release at the end of the notify kernel. */
    while (__atomic_load_n(&handle->info->epoch, __ATOMIC_ACQUIRE) < handle->updates) {
        epx_status status = group_usable(handle->group);
        if (status != EPX_OK)
            return status;
        if (host_now_ns() - start > limit)
            return fail(EPX_ERR_TIMEOUT,
                        "%s: rank %d: the update did not run within %" PRIu64 " ms (is its stream "
                        "blocked?)",
                        call, handle->group->rank, limit / 1000000u);
        pause_ns(20000);
    }
    return EPX_OK;
}
