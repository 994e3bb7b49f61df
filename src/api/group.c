/* SPDX-License-Identifier: Apache-2.0 */
/* epx_group_create, destroy, order_with, query, memory, stats. */
#include <stdio.h>

#include "group/config.h"
#include "group/create.h"
#include "group/launch.h"
#include "group/memory.h"
#include "group/net.h"
#include "group/registry.h"
#include "group/stats.h"
#include "modes/handle.h"
#include "util/status.h"
#include "util/structs.h"

epx_status epx_group_create(epx_group **out, const epx_bootstrap *bootstrap, const epx_group_config *config)
{
    epx_status status;

    if (!out)
        return fail(EPX_ERR_ARGUMENT, "epx_group_create: group: expected a pointer, got NULL");
    *out = NULL;
    status = registry_begin("epx_group_create");
    if (status != EPX_OK)
        return status;
    status = group_create(bootstrap, config, out);
    registry_end();
    return status;
}

epx_status epx_group_destroy(epx_group *group)
{
    API_ISSUE;
    epx_status status = group_check(group, "epx_group_destroy");

    if (status == EPX_OK)
        status = api_end(&api_call);
    if (status != EPX_OK)
        return status;
    (void)group_drain(group);
    group_net_settle(group);
    handles_free_all(group);
    status = group_destroy(group);
    registry_end();
    return status;
}

static int on_one_device(const epx_group *a, const epx_group *b)
{
    return a->device->ops->kind == b->device->ops->kind &&
           (a->device->ops->kind == EPX_DEVICE_CPU || a->set.device_index == b->set.device_index);
}

epx_status epx_group_order_with(epx_group *group, epx_group *other)
{
    API_ISSUE;
    epx_status status = group_check(group, "epx_group_order_with");

    if (status == EPX_OK)
        status = group_check(other, "epx_group_order_with");
    if (status != EPX_OK)
        return status;
    if (group == other)
        return fail(EPX_ERR_ARGUMENT, "epx_group_order_with: other: expected another group, got the same");
    if (!on_one_device(group, other))
        return fail(EPX_ERR_ARGUMENT, "epx_group_order_with: other: expected a group on %s %d, got %s %d",
                    group->device->ops->name, group->set.device_index, other->device->ops->name,
                    other->set.device_index);
    return group->device->ops->kind == EPX_DEVICE_CPU ? EPX_OK : launch_share_turns(group, other);
}

epx_status epx_group_query(const epx_group *group, epx_group_info *out)
{
    epx_group_info info = EPX_GROUP_INFO_INIT;
    API_WAIT;
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
    snprintf(info.net_name, sizeof(info.net_name), "%s", group->nnodes > 1 ? group->net_name : "none");
    return struct_out(out, &info, sizeof(info), "epx_group_info");
}

epx_status epx_group_set_timeout(epx_group *group, int timeout_ms)
{
    static const char call[] = "epx_group_set_timeout";
    API_ISSUE;
    epx_status status = group_check(group, call);

    if (status != EPX_OK)
        return status;
    if (timeout_ms < 0)
        return fail(EPX_ERR_ARGUMENT, "%s: timeout_ms: expected at least 0, got %d", call, timeout_ms);
    if (group->nnodes > 1)
        return fail(EPX_ERR_USAGE, "%s: expected a group of one node, got %d nodes", call, group->nnodes);
    status = launch_await(group, group->last_stream, call);
    if (status == EPX_ERR_USAGE)
        return status;
    group->set.timeout_ms = settings_timeout(timeout_ms);
    return group_device_timeout(group);
}

epx_status epx_group_memory(const epx_group_config *config, int nranks, epx_memory_info *out)
{
    epx_memory_info info = EPX_MEMORY_INFO_INIT;
    struct heap_plan plan;
    epx_status status = settings_plan(config, nranks, &plan);

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

epx_status epx_group_stats(epx_group *group, epx_stats *out)
{
    epx_stats stats;
    API_ISSUE;
    epx_status status = group_check(group, "epx_group_stats");

    if (status == EPX_OK)
        status = stats_read(group, &stats);
    return status == EPX_OK ? struct_out(out, &stats, sizeof(stats), "epx_stats") : status;
}

epx_status epx_group_stats_reset(epx_group *group)
{
    API_ISSUE;
    epx_status status = group_check(group, "epx_group_stats_reset");

    return status == EPX_OK ? stats_reset(group) : status;
}
