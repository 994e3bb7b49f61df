/* SPDX-License-Identifier: Apache-2.0 */
/* Creation and destruction of a group. The collective steps are those of handshake.c. */
#include "group/create.h"

#include <stdlib.h>
#include <string.h>

#include "group/alloc.h"
#include "group/config.h"
#include "group/fabric.h"
#include "group/giveback.h"
#include "group/handshake.h"
#include "group/heap.h"
#include "group/launch.h"
#include "group/marks.h"
#include "group/memory.h"
#include "group/net.h"
#include "group/region.h"
#include "group/registry.h"
#include "group/streams.h"
#include "group/watch.h"
#include "group/align.h"
#include "util/env.h"
#include "util/leak.h"
#include "util/log.h"
#include "util/runtime.h"
#include "util/status.h"
#include "util/trace.h"

/* Ranks of a simulation are not processes. Without a ledger what peers have mapped is freed with the last group. */
static epx_status open_ledger(struct epx_group *group)
{
    const int mapped = (group->device->ops->caps & DEVICE_MAPPED_HEAPS) != 0;

    if (!runtime()->env && env_int("EPX_GIVEBACK", mapped, 0, 1))
        return ledger_create(group->nranks, group->rank, &group->ledger);
    if (mapped)
        __atomic_store_n(&group->device->keeps, 1, __ATOMIC_RELAXED);
    return EPX_OK;
}

/* This rank's own part, once the nodes are known: heap with its control block, streams. */
epx_status group_open_heap(struct epx_group *group)
{
    struct control c;
    epx_status status;

    heap_plan_make(&group->set, &group->plan);
    status = heap_plan_check(&group->set, &group->plan);
    if (status == EPX_OK)
        status = group->device->ops->heap_create(group->device, group->plan.total, &group->heap);
    if (status == EPX_OK)
        status = open_ledger(group);
    if (status == EPX_OK && group->plan.net_bytes)
        status = group->device->ops->host_alloc(group->device, group->plan.net_bytes, &group->net_memory);
    if (status != EPX_OK)
        return status;
    memset(&c, 0, sizeof(c));
    c.magic = CONTROL_MAGIC;
    c.rank = (uint32_t)group->rank;
    c.nranks = (uint32_t)group->nranks;
    c.process = group->joining ? membership_incarnation(group->membership, group->rank) : 0;
    status = group->device->ops->copy(group->device, group->heap.base, &c, sizeof(c));
    if (status == EPX_OK)
        status = regions_create(group);
    if (status == EPX_OK)
        status = group->device->ops->stream_create(group->device, &group->default_stream);
    if (status == EPX_OK)
        status = group->device->ops->event_create(group->device, &group->order_event);
    return status;
}

/* Frees what threads that are blocked in the network's library could still use: not called if there are any. */
static void close_memory(struct epx_group *group)
{
    const struct device_ops *ops = group->device->ops;
    struct heap exported = {0};

    group_marks_free(group);
    group_device_destroy(group);
    for (int r = 0; group->bases && r < group->nranks; r++)
        if (group->bases[r] && group->bases[r] != group->stand_in.base)
            ops->heap_close(group->device, &group->exports[r], group->bases[r]);
    for (struct kept_rows *kept = group->kept_rows, *next; kept; kept = next) {
        next = kept->next;
        ops->mem_free(group->device, kept->memory);
        free(kept);
    }
    if (group->net_memory)
        ops->host_free(group->device, group->net_memory);
    if (group->ledger)
        exported = group->heap;
    else if (group->heap.base)
        ops->heap_destroy(group->device, &group->heap);
    if (group->stand_in.base)
        ops->heap_destroy(group->device, &group->stand_in);
    ops->close(group->device);
    if (group->ledger)
        giveback_keep(group->ledger, ops, &exported, group->set.timeout_ms); /* behind close(): others' are unmapped */
}

epx_status group_free(struct epx_group *group)
{
    const struct device_ops *ops = group->device ? group->device->ops : NULL;
    epx_status status = EPX_OK;

    if (group->ledger)
        ledger_closing(group->ledger, 1);
    watch_sampler_stop(group);
    watch_clean_up(group);
    launch_leave_turns(group);
    if (ops) {
        if (group->order_event)
            ops->event_destroy(group->device, group->order_event);
        if (group->default_stream)
            ops->stream_destroy(group->device, group->default_stream);
        __atomic_store_n(&group->closing, CLOSING_MEMORY, __ATOMIC_RELAXED);
        status = group_net_close(group);
        regions_destroy(group);
        if (!group->kept)
            close_memory(group);
        else if (group->ledger)
            ledger_closing(group->ledger, 0);
    }
    watch_destroy(group);
    membership_close(group->membership);
    if (group->boot)
        boot_close(group->boot);
    node_map_free(&group->map);
    free(group->masked_by_update);
    free(group->identities);
    free(group->hosts);
    free(group->mapped);
    free(group->stale);
    free(group->recovery_mask);
    free(group->recovery_out);
    handshake_end(group);
    free(group->remote);
    free(group->exports);
    if (group->kept) {
        leak_on_purpose(group);
        return status;
    }
    free(group->bases);
    pthread_mutex_destroy(&group->giving_up);
    pthread_mutex_destroy(&group->calls);
    free(group);
    return status;
}

void group_take_nodes(struct epx_group *group)
{
    node_map_fill(&group->map);
    group->nnodes = group->map.nnodes;
    group->node = group->map.node_of[group->rank];
    for (int r = 0; r < group->nranks; r++)
        group->remote[r] = group->map.node_of[r] != group->node;
    settings_nodes(&group->set, &group->map);
}

static void choose_agents(struct epx_group *group)
{
    int local = fabric_host_ranks(group); /* they may share a GPU */

    /* Nodes simulated on one machine share its cores. */
    if (group->set.ranks_per_node)
        local = group->nranks;
    if (!group->set.agents)
        group->set.agents = group->device->ops->default_agents(group->device, local);
    if (group->set.agents < 1)
        group->set.agents = 1;
}

/* The largest row that is cast while it is sent: payload, then a scale of four bytes per 128 channels. */
static size_t cast_row_bytes(const struct settings *set)
{
    const size_t channels = (size_t)set->max_hidden_bytes; /* one byte each at least */

    return (channels + 15) / 16 * 16 + (channels + 127) / 128 * 4;
}

/* The local steps before the first collective one, once rank and number of ranks are known. */
epx_status group_prepare(struct epx_group *group, const epx_group_config *config)
{
    const size_t n = (size_t)group->nranks;
    epx_status status;

    group->exports = calloc(n, sizeof(*group->exports));
    group->bases = calloc(n, sizeof(*group->bases));
    group->remote = calloc(n, sizeof(*group->remote));
    group->masked_by_update = calloc(n, sizeof(*group->masked_by_update));
    group->identities = calloc(n, sizeof(*group->identities));
    group->hosts = calloc(n, sizeof(*group->hosts));
    group->mapped = calloc(n, sizeof(*group->mapped));
    group->stale = calloc(n, sizeof(*group->stale));
    group->recovery_mask = calloc(n, sizeof(*group->recovery_mask));
    group->recovery_out = calloc(n, sizeof(*group->recovery_out));
    if (!group->exports || !group->bases || !group->remote || !group->masked_by_update || !group->identities ||
        !group->hosts || !group->mapped || !group->stale || !group->recovery_mask || !group->recovery_out)
        return fail(EPX_ERR_MEMORY, "%s: no memory for %zu ranks", group->call, n);
    status = settings_make(config, group->nranks, &group->set);
    if (status == EPX_OK)
        status = node_map_alloc(&group->map, group->nranks);
    if (status == EPX_OK)
        status = device_open((epx_device)group->set.device, group->set.device_index, &group->device);
    if (status == EPX_OK)
        group->set.device = group->device->ops->kind; /* ranks compare it: AUTO equals the device that it resolves to */
    if (status == EPX_OK)
        status = heap_place(group);
    return status;
}

static epx_status alloc_tables(struct epx_group *group)
{
    epx_status status;

    watch_create(group);
    choose_agents(group);
    status = group->device->ops->rows_reserve(group->device, cast_row_bytes(&group->set), group->set.agents);
    if (status == EPX_OK)
        group_marks_open(group);
    return status == EPX_OK ? group_device_alloc(group) : status;
}

epx_status group_open_tables(struct epx_group *group)
{
    epx_status status = alloc_tables(group);

    watch_show(group);
    if (status == EPX_OK)
        status = group_device_fill(group);
    if (status == EPX_OK)
        watch_sampler_start(group);
    return status;
}

/* What this rank needs of no other: what the others must know of it is in the exchange then. */
static epx_status open_own_side(struct epx_group *group, struct exchange *exchange)
{
    epx_status status = group_open_heap(group);

    if (status == EPX_OK)
        status = alloc_tables(group);
    if (status == EPX_OK && group->nnodes > 1)
        status = group_net_prepare(group, exchange->net);
    if (status == EPX_OK)
        status = handshake_open_membership(group, exchange);
    return status;
}

/* Once all is known of the others. */
static epx_status connect_sides(struct epx_group *group, const struct exchange *exchange)
{
    epx_status status = handshake_map(group, exchange);

    watch_show(group);
    if (status == EPX_OK)
        status = group_device_fill(group);
    if (status == EPX_OK && group->nnodes > 1)
        status = group_net_connect(group, exchange->all_net, exchange->net_bytes);
    if (status == EPX_OK && group->nnodes > 1)
        status = group_device_rings(group);
    return status;
}

/* Everything after the settings were compared. A rank that fails takes part in the next collective step and reports
 * it: what it needs for these steps it has since before the first one. */
static epx_status build(struct epx_group *group, struct exchange *exchange)
{
    epx_status status;

    (void)giveback_sweep(); /* the ranks have met: what they ended before that is unmapped */
    status = heap_place_agree(group);
    if (status == EPX_OK)
        status = handshake_exchange(group, exchange, open_own_side(group, exchange));
    if (status == EPX_OK)
        status = handshake_connected(group, exchange, connect_sides(group, exchange));
    if (status == EPX_OK && group->all_trace)
        status = align_clocks(group);
    if (status == EPX_OK)
        watch_sampler_start(group);
    return status;
}

/* Joins the bootstrap. A rank with an invalid configuration joins too, to report it to the others. */
static epx_status join(struct epx_group *group, const epx_bootstrap *bootstrap, const epx_group_config *config)
{
    const int boot_ms = (int)env_int("EPX_BOOT_TIMEOUT_MS", 0, 1, INT32_MAX);
    struct settings first;
    const int valid = settings_make(config, 1, &first) == EPX_OK;
    epx_status status = boot_open(bootstrap,
                                  boot_ms ? boot_ms
                                  : valid ? first.timeout_ms
                                          : DEFAULT_TIMEOUT_MS,
                                  &group->boot);

    if (status != EPX_OK)
        return status;
    group->rank = boot_rank(group->boot);
    group->nranks = boot_nranks(group->boot);
    log_set_rank(group->rank);
    trace_open();
    env_warn_unknown();
    return EPX_OK;
}

static void make_locks(struct epx_group *group)
{
    pthread_mutexattr_t attr;

    pthread_mutexattr_init(&attr);
    pthread_mutexattr_settype(&attr, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&group->calls, &attr);
    pthread_mutex_init(&group->giving_up, NULL);
    pthread_mutexattr_destroy(&attr);
}

epx_status group_new(const char *call, struct epx_group **out)
{
    *out = calloc(1, sizeof(**out));
    if (!*out)
        return fail(EPX_ERR_MEMORY, "%s: out of memory", call);
    (*out)->call = call;
    make_locks(*out);
    return EPX_OK;
}

/* The first collective step: do all have the same settings, and the memory for the steps that follow? A rank whose
 * memory is not enough for this one cannot take part in a caller's all-gather. */
static epx_status meet(struct epx_group *group, const epx_group_config *config, struct exchange *exchange)
{
    epx_status mine = group_prepare(group, config), status;

    if (mine == EPX_OK)
        mine = exchange_alloc(group, exchange);
    if (mine == EPX_OK) /* after the last step it could fail on this rank alone */
        mine = registry_add(REGISTRY_GROUP, group, group);
    status = handshake_begin(group);
    if (status != EPX_OK)
        return boot_abandon(group->boot, status);
    return handshake_compare(group, mine);
}

epx_status group_create(const epx_bootstrap *bootstrap, const epx_group_config *config, struct epx_group **out)
{
    struct exchange exchange = {0};
    struct epx_group *group;
    epx_status status = group_new("epx_group_create", &group);

    if (status != EPX_OK)
        return bootstrap ? status : boot_abandon(NULL, status);
    status = join(group, bootstrap, config);
    if (status == EPX_OK)
        status = meet(group, config, &exchange);
    if (status == EPX_OK)
        status = build(group, &exchange);
    exchange_free(&exchange);
    handshake_keep(group);
    if (status != EPX_OK) {
        registry_remove(REGISTRY_GROUP, group);
        (void)group_free(group); /* the message is that of the first failure */
        return status;
    }
    boot_created(group->boot);
    log_line(LOG_INFO, "group of %d ranks on %d nodes, %s, %d agents, heap %llu bytes", group->nranks, group->nnodes,
             group->device->ops->name, group->set.agents, (unsigned long long)group->plan.total);
    *out = group;
    return EPX_OK;
}

epx_status group_drain(struct epx_group *group)
{
    epx_status status = launch_await(group, group->default_stream, "epx_group_destroy");

    if (status == EPX_OK)
        status = streams_destroy_all(group);
    /* A wait for a stream that captures would end the capture. Who begins one has waited for the stream, as torch does:
     * a garbage collector may end a group at any time. */
    if (status == EPX_OK && group->last_stream &&
        !group->device->ops->stream_captures(group->device, group->last_stream))
        status = group->device->ops->stream_sync(group->device, group->last_stream);
    return status;
}

epx_status group_destroy(struct epx_group *group)
{
    events_destroy_all(group);
    graphs_destroy_all(group);
    heap_free_all(group);
    group_marks_end(group);
    trace_flush();
    return group_free(group);
}
