/* SPDX-License-Identifier: Apache-2.0 */
/* Groups: creation, destruction, queries. */
#include "group/group.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "group/region.h"
#include "api/alloc.h"
#include "group/config.h"
#include "api/handle.h"
#include "group/registry.h"
#include "util/structs.h"
#include "util/env.h"
#include "util/leak.h"
#include "util/log.h"
#include "util/status.h"

/* This rank's own part, once the nodes are known: heap with its control block, streams. */
static epx_status open_own(struct epx_group *group)
{
    struct control c;
    epx_status status;

    heap_plan_make(&group->set, &group->plan);
    status = heap_plan_check(&group->set, &group->plan);
    if (status == EPX_OK)
        status = group->device->ops->heap_create(group->device, group->plan.total, &group->heap);
    if (status != EPX_OK)
        return status;
    memset(&c, 0, sizeof(c));
    c.magic = CONTROL_MAGIC;
    c.rank = (uint32_t)group->rank;
    c.nranks = (uint32_t)group->nranks;
    status = group->device->ops->copy(group->device, group->heap.base, &c, sizeof(c));
    if (status == EPX_OK)
        status = regions_create(group);
    if (status == EPX_OK)
        status = group->device->ops->stream_create(group->device, &group->default_stream);
    if (status == EPX_OK)
        status = group->device->ops->event_create(group->device, &group->order_event);
    return status;
}

/* What threads that are left in the network's library may use: the proxies' memory, the heaps, the group itself. */
static void close_memory(struct epx_group *group)
{
    const struct device_ops *ops = group->device->ops;

    group_device_destroy(group);
    for (int r = 0; group->bases && r < group->nranks; r++)
        if (group->bases[r])
            ops->heap_close(group->device, &group->exports[r], group->bases[r]);
    if (group->heap.base)
        ops->heap_destroy(group->device, &group->heap);
    ops->close(group->device);
}

static epx_status close_all(struct epx_group *group)
{
    const struct device_ops *ops = group->device ? group->device->ops : NULL;
    epx_status status = EPX_OK;

    if (ops) {
        if (group->order_event)
            ops->event_destroy(group->device, group->order_event);
        if (group->default_stream)
            ops->stream_destroy(group->device, group->default_stream);
        __atomic_store_n(&group->closing, 1, __ATOMIC_RELAXED);
        status = group_net_close(group);
        regions_destroy(group);
        if (!group->kept)
            close_memory(group);
    }
    membership_close(group->membership);
    if (group->boot)
        boot_close(group->boot);
    node_map_free(&group->map);
    free(group->asked_out);
    free(group->remote);
    free(group->exports);
    if (group->kept) {
        leak_on_purpose(group);
        return status;
    }
    free(group->bases);
    free(group);
    return status;
}

static void choose_agents(struct epx_group *group)
{
    int local = 0;

    for (int r = 0; r < group->nranks; r++)
        local += group->map.node_of[r] == group->node;
    /* Nodes cut out of one machine share its cores. */
    if (group->set.ranks_per_node)
        local = group->nranks;
    if (!group->set.agents)
        group->set.agents = group->device->ops->default_agents(group->device, local);
    if (group->set.agents < 1)
        group->set.agents = 1;
}

/* Most that a row takes which is cast on its way: payload, then a scale of four bytes for 128 channels. */
static size_t cast_row_bytes(const struct settings *set)
{
    const size_t channels = (size_t)set->max_hidden_bytes; /* one byte each at least */

    return (channels + 15) / 16 * 16 + (channels + 127) / 128 * 4;
}

/* Rank and number of ranks are known: what each rank does alone before the first meeting. */
static epx_status prepare(struct epx_group *group, const epx_group_config *config)
{
    const size_t n = (size_t)group->nranks;
    epx_status status;

    group->exports = calloc(n, sizeof(*group->exports));
    group->bases = calloc(n, sizeof(*group->bases));
    group->remote = calloc(n, sizeof(*group->remote));
    group->asked_out = calloc(n, sizeof(*group->asked_out));
    if (!group->exports || !group->bases || !group->remote || !group->asked_out)
        return fail(EPX_ERR_MEMORY, "epx_group_create: no memory for %zu ranks", n);
    status = settings_make(config, group->nranks, &group->set);
    if (status == EPX_OK)
        status = device_open((epx_device)group->set.device, group->set.device_index, &group->device);
    if (status == EPX_OK)
        group->set.device = group->device->ops->kind; /* AUTO, and the device that it stands for, are the same */
    if (status == EPX_OK)
        status = group_heap_begin(group);
    return status;
}

/* Everything after the settings agree. A rank that fails goes on to the next meeting and says so there. */
static epx_status build(struct epx_group *group)
{
    epx_status status = group_heap_settle(group);

    if (status == EPX_OK)
        status = meet_heaps(group, open_own(group));
    if (status == EPX_OK) {
        choose_agents(group);
        status = group->device->ops->rows_reserve(group->device, cast_row_bytes(&group->set), group->set.agents);
        if (status == EPX_OK)
            status = group_device_create(group);
    }
    status = meet_ready(group, status);
    if (status == EPX_OK && group->nnodes > 1) {
        status = group_net_open(group);
        if (status == EPX_OK)
            status = group_device_rings(group);
        status = meet_ready(group, status);
    }
    if (status == EPX_OK && group->set.enable_mask && group->nranks > 1)
        status = meet_membership(group);
    return status;
}

epx_status epx_group_create(epx_group **out, const epx_bootstrap *bootstrap, const epx_group_config *config)
{
    struct epx_group *group;
    struct settings first;
    epx_status status;
    const int boot_ms = (int)env_int("EPX_BOOT_TIMEOUT_MS", 0, 1, INT32_MAX);

    if (!out)
        return fail(EPX_ERR_ARGUMENT, "epx_group_create: group: expected a pointer, got NULL");
    *out = NULL;
    group = calloc(1, sizeof(*group));
    if (!group)
        return fail(EPX_ERR_MEMORY, "epx_group_create: no memory");
    /* A wrong configuration still meets the others, to tell them. */
    const int good = settings_make(config, 1, &first) == EPX_OK;
    status = boot_open(bootstrap, boot_ms ? boot_ms : good ? first.timeout_ms : 100000, &group->boot);
    if (status != EPX_OK)
        goto fail;
    group->rank = boot_rank(group->boot);
    group->nranks = boot_nranks(group->boot);
    log_set_rank(group->rank);
    status = meet_compare(group, prepare(group, config));
    if (status == EPX_OK)
        status = build(group);
    if (status == EPX_OK)
        status = registry_add(REGISTRY_GROUP, group);
    if (status != EPX_OK)
        goto fail;
    log_line(LOG_INFO, "group of %d ranks on %d nodes, %s, %d agents, heap %llu bytes", group->nranks, group->nnodes,
             group->device->ops->name, group->set.agents, (unsigned long long)group->plan.total);
    *out = group;
    return EPX_OK;

fail:
    (void)close_all(group); /* what made it fail is the message */
    return status;
}

epx_status epx_group_destroy(epx_group *group)
{
    epx_status status = group_check(group, "epx_group_destroy");

    if (status != EPX_OK)
        return status;
    /* Refused inside a call that runs on one of its own streams: nothing is taken apart then. */
    status = group->device->ops->stream_sync(group->device, group->default_stream);
    if (status == EPX_OK)
        status = streams_free_all(group);
    if (status == EPX_OK && group->last_stream)
        status = group->device->ops->stream_sync(group->device, group->last_stream);
    if (status != EPX_OK)
        return status;
    registry_remove(REGISTRY_GROUP, group);
    group_net_settle(group);
    while (group->handles)
        handle_free(group->handles);
    events_free_all(group);
    blocks_free_all(group);
    return close_all(group);
}

epx_status epx_group_query(const epx_group *group, epx_group_info *out)
{
    epx_group_info info = EPX_GROUP_INFO_INIT;
    epx_status status = group_check(group, "epx_group_query");

    if (status != EPX_OK)
        return status;
    info.rank = group->rank;
    info.nranks = group->nranks;
    info.node = group->node;
    info.nnodes = group->nnodes;
    info.ranks_per_node = group->map.smallest;
    info.num_experts = group->set.experts;
    info.local_experts = group->set.local_experts;
    info.device = group->device->ops->kind;
    info.num_agents = group->set.agents;
    info.timeout_ms = group->set.timeout_ms;
    info.max_recv_tokens = (int32_t)group->set.max_recv_tokens;
    snprintf(info.device_name, sizeof(info.device_name), "%s", group->device->ops->name);
    snprintf(info.net_name, sizeof(info.net_name), "%s", group->proxies ? group->net_name : "none");
    return struct_out(out, &info, sizeof(info), "epx_group_info");
}

epx_status epx_group_memory(const epx_group_config *config, int nranks, epx_memory_info *out)
{
    epx_memory_info info = EPX_MEMORY_INFO_INIT;
    struct settings set;
    struct heap_plan plan;
    struct node_map map;
    epx_status status = settings_make(config, nranks, &set);

    if (status == EPX_OK)
        status = node_map_slice(&map, nranks, set.ranks_per_node);
    if (status != EPX_OK)
        return status;
    settings_nodes(&set, &map);
    node_map_free(&map);
    heap_plan_make(&set, &plan);
    status = heap_plan_check(&set, &plan);
    if (status != EPX_OK)
        return status;
    info.heap_bytes = plan.total;
    info.control_bytes = plan.total - plan.ll_bytes - plan.ht_bytes - (plan.total - plan.alloc);
    info.low_latency_bytes = plan.ll_bytes;
    info.high_throughput_bytes = plan.ht_bytes;
    info.alloc_bytes = plan.total - plan.alloc;
    info.ll_receive_bytes = plan.ll_receive_bytes;
    info.ht_receive_bytes = plan.ht_receive_bytes;
    return struct_out(out, &info, sizeof(info), "epx_memory_info");
}

/* What kernels count lies in device memory: read in place where the host can, else copied. */
static epx_status read_device_stats(struct epx_group *group, struct device_stats *out)
{
    const struct device_ops *ops = group->device->ops;
    const uint64_t *from = (const uint64_t *)group->shadow.stats;
    uint64_t *to = (uint64_t *)out;

    if (!(ops->caps & DEVICE_HOST_ACCESS))
        return ops->copy(group->device, out, group->shadow.stats, sizeof(*out));
    for (size_t i = 0; i < sizeof(*out) / sizeof(*to); i++)
        to[i] = __atomic_load_n(&from[i], __ATOMIC_RELAXED);
    return EPX_OK;
}

static epx_status clear_device_stats(struct epx_group *group)
{
    static const struct device_stats none;
    const struct device_ops *ops = group->device->ops;
    uint64_t *words = (uint64_t *)group->shadow.stats;

    if (!(ops->caps & DEVICE_HOST_ACCESS))
        return ops->copy(group->device, group->shadow.stats, &none, sizeof(none));
    for (size_t i = 0; i < sizeof(none) / sizeof(*words); i++)
        __atomic_store_n(&words[i], 0, __ATOMIC_RELAXED);
    return EPX_OK;
}

epx_status epx_group_stats(epx_group *group, epx_stats *out)
{
    struct device_stats d;
    epx_stats stats;
    epx_status status = group_check(group, "epx_group_stats");

    if (status != EPX_OK)
        return status;
    status = read_device_stats(group, &d);
    if (status != EPX_OK)
        return status;
    stats = group->stats;
    stats.size = sizeof(stats);
    stats.rows_sent = d.rows_sent;
    stats.rows_received = d.rows_received;
    stats.rows_remote = d.rows_remote;
    stats.rows_returned = d.rows_returned;
    stats.bytes_peer = d.bytes_peer;
    stats.bytes_local = d.bytes_local;
    stats.waits = d.waits;
    stats.wait_ns = d.wait_ns;
    stats.timeouts = d.timeouts;
    if (group->proxies) {
        struct proxy_stats p;
        proxy_stats_read(group->proxies, &p);
        stats.net_commands = p.commands - group->net_base.commands;
        stats.net_puts = p.puts - group->net_base.puts;
        stats.net_signals = p.signals - group->net_base.signals;
        stats.net_bytes = p.bytes - group->net_base.bytes;
        stats.net_arrivals = p.arrivals - group->net_base.arrivals;
        stats.net_window_waits = p.window_waits - group->net_base.window_waits;
        stats.net_sleeps = p.sleeps - group->net_base.sleeps;
        stats.net_refused = p.refused - group->net_base.refused;
        stats.net_stuck = p.stuck;
    }
    return struct_out(out, &stats, sizeof(stats), "epx_stats");
}

epx_status epx_group_stats_reset(epx_group *group)
{
    epx_status status = group_check(group, "epx_group_stats_reset");

    if (status != EPX_OK)
        return status;
    status = clear_device_stats(group);
    if (status != EPX_OK)
        return status;
    memset(&group->stats, 0, sizeof(group->stats));
    if (group->proxies)
        proxy_stats_read(group->proxies, &group->net_base);
    return EPX_OK;
}
