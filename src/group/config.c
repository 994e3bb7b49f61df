/* SPDX-License-Identifier: Apache-2.0 */
#include "group/config.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "proxy/proxy.h"
#include "util/structs.h"
#include "util/env.h"
#include "util/status.h"

#define DEFAULT_ALLOC_BYTES ((uint64_t)4 << 30)
#define MAX_ALLOC_BYTES ((uint64_t)1 << 60) /* the sum of all parts stays far below 64 bits */
#define PADDING_PER_EXPERT 127

#define SAME_BYTES(a, b) EPX_STATIC_ASSERT(sizeof(a) == sizeof(b), #a " is a copy of " #b)
SAME_BYTES(((struct settings *)0)->net, ((epx_group_config *)0)->net);

static epx_status need_range(const char *field, int64_t value, int64_t low, int64_t high)
{
    if (value < low || value > high)
        return fail(EPX_ERR_ARGUMENT, "epx_group_config.%s: expected %" PRId64 " to %" PRId64 ", got %" PRId64, field,
                    low, high, value);
    return EPX_OK;
}

static epx_status check_ranges(const epx_group_config *c)
{
    const struct {
        const char *field;
        int64_t value, low, high;
    } checks[] = {
        {"device", c->device, EPX_DEVICE_AUTO, EPX_DEVICE_HIP},
        {"device_index", c->device_index, 0, 1023},
        {"modes", c->modes, 0, EPX_LOW_LATENCY | EPX_HIGH_THROUGHPUT},
        {"num_experts", c->num_experts, 1, 1 << 20},
        {"max_tokens_per_rank", c->max_tokens_per_rank, 1, 1 << 20},
        {"max_hidden_bytes", c->max_hidden_bytes, 16, 1 << 24},
        {"max_topk", c->max_topk, 0, EPX_MAX_TOPK},
        {"max_recv_tokens", c->max_recv_tokens, 0, INT32_MAX},
        {"max_inflight", c->max_inflight, 0, 64},
        {"num_agents", c->num_agents, 0, 1024},
        {"ranks_per_node", c->ranks_per_node, 0, KERNEL_MAX_RANKS},
        {"enable_mask", c->enable_mask, 0, 1},
        {"timeout_ms", c->timeout_ms, 0, INT32_MAX},
        {"use_fabric", c->use_fabric, 0, 1},
    };

    for (size_t i = 0; i < sizeof(checks) / sizeof(checks[0]); i++) {
        epx_status status = need_range(checks[i].field, checks[i].value, checks[i].low, checks[i].high);
        if (status != EPX_OK)
            return status;
    }
    if (c->max_hidden_bytes % 16)
        return fail(EPX_ERR_ARGUMENT, "epx_group_config.max_hidden_bytes: expected a multiple of 16, got %d",
                    c->max_hidden_bytes);
    if (!c->device_alloc != !c->device_free)
        return fail(EPX_ERR_ARGUMENT, "epx_group_config.%s: expected both of device_alloc and device_free or neither",
                    c->device_alloc ? "device_free" : "device_alloc");
    if (c->alloc_bytes > MAX_ALLOC_BYTES)
        return fail(EPX_ERR_ARGUMENT, "epx_group_config.alloc_bytes: expected at most %" PRIu64 ", got %" PRIu64,
                    MAX_ALLOC_BYTES, c->alloc_bytes);
    if (c->ht_buffer_bytes > MAX_ALLOC_BYTES)
        return fail(EPX_ERR_ARGUMENT, "epx_group_config.ht_buffer_bytes: expected at most %" PRIu64 ", got %" PRIu64,
                    MAX_ALLOC_BYTES, c->ht_buffer_bytes);
    if (c->ht_node_bytes > MAX_ALLOC_BYTES)
        return fail(EPX_ERR_ARGUMENT, "epx_group_config.ht_node_bytes: expected at most %" PRIu64 ", got %" PRIu64,
                    MAX_ALLOC_BYTES, c->ht_node_bytes);
    if (c->layouts & ~(EPX_LAYOUT_BIT(EPX_FLAT) | EPX_LAYOUT_BIT(EPX_EXPERT_MAJOR)))
        return fail(EPX_ERR_ARGUMENT, "epx_group_config.layouts: expected bits of FLAT and EXPERT_MAJOR, got 0x%x",
                    c->layouts);
    return EPX_OK;
}

static int64_t worst_rows(const struct settings *set, uint32_t layouts)
{
    const int64_t flat = (int64_t)set->nranks * set->max_tokens;

    if (layouts & EPX_LAYOUT_BIT(EPX_EXPERT_MAJOR)) /* a row for each entry, also of those that name the same expert */
        return flat * set->max_topk + (int64_t)set->local_experts * PADDING_PER_EXPERT;
    return flat;
}

/* The caller's value, or the environment's, or the default. */
static int64_t pick(int64_t given, const char *variable, int64_t fallback, int64_t high)
{
    return given ? given : env_int(variable, fallback, 1, high);
}

int settings_timeout(int given)
{
    return (int)pick(given, "EPX_TIMEOUT_MS", DEFAULT_TIMEOUT_MS, INT32_MAX);
}

static epx_status check_products(const struct settings *set)
{
    const int64_t limit = INT32_MAX; /* row numbers are sent as 32 bits */

    if ((int64_t)set->nranks * set->max_tokens * set->max_topk > limit || set->max_recv_tokens > limit)
        return fail(EPX_ERR_ARGUMENT,
                    "epx_group_config: ranks * max_tokens_per_rank * max_topk is %" PRId64 " rows; at most %" PRId64
                    " can be numbered",
                    (int64_t)set->nranks * set->max_tokens * set->max_topk, limit);
    return EPX_OK;
}

/* EPX_FABRIC: 0 overrides the configuration. */
static int asks_for_fabric(const epx_group_config *c)
{
    const char *value = env_string("EPX_FABRIC");

    return value ? strcmp(value, "0") != 0 : c->use_fabric;
}

epx_status settings_make(const epx_group_config *config, int nranks, struct settings *set)
{
    epx_group_config c;
    epx_status status = struct_in(&c, sizeof(c), config, "epx_group_config");

    if (status == EPX_OK)
        status = need_range("(number of ranks)", nranks, 1, KERNEL_MAX_RANKS);
    if (status == EPX_OK)
        status = check_ranges(&c);
    if (status != EPX_OK)
        return status;
    memset(set, 0, sizeof(*set));
    set->nranks = nranks;
    set->device = c.device;
    set->device_index = c.device_index;
    set->modes = c.modes ? c.modes : EPX_LOW_LATENCY | EPX_HIGH_THROUGHPUT;
    set->experts = c.num_experts;
    set->local_experts = (c.num_experts + nranks - 1) / nranks;
    set->max_tokens = c.max_tokens_per_rank;
    set->max_hidden_bytes = c.max_hidden_bytes;
    set->max_topk = c.max_topk ? c.max_topk : 8;
    set->max_recv_given = c.max_recv_tokens != 0;
    set->max_recv_tokens = c.max_recv_tokens ? c.max_recv_tokens : worst_rows(set, c.layouts);
    set->proxy_threads = proxy_threads_asked();
    set->ll_wide_wait_us = (int)env_int("EPX_LL_WIDE_WAIT_US", 100, 0, 100000);
    set->ll_few_sms = (int)env_int("EPX_LL_FEW_SMS", 2, 1, 1024);
    set->inflight = c.max_inflight ? c.max_inflight : 2;
    set->agents = (int)(c.num_agents ? c.num_agents : env_int("EPX_NUM_AGENTS", 0, 1, 1024));
    set->ranks_per_node =
        (int)(c.ranks_per_node ? c.ranks_per_node : env_int("EPX_RANKS_PER_NODE", 0, 1, KERNEL_MAX_RANKS));
    set->enable_mask = c.enable_mask;
    set->use_fabric = asks_for_fabric(&c);
    set->timeout_ms = settings_timeout(c.timeout_ms);
    set->alloc_bytes = (uint64_t)pick((int64_t)c.alloc_bytes, "EPX_ALLOC_BYTES", (int64_t)DEFAULT_ALLOC_BYTES,
                                      (int64_t)MAX_ALLOC_BYTES);
    set->device_alloc = c.device_alloc;
    set->device_free = c.device_free;
    set->device_context = c.device_context;
    set->ht_buffer_bytes =
        (uint64_t)pick((int64_t)c.ht_buffer_bytes, "EPX_HT_BUFFER_BYTES", 0, (int64_t)MAX_ALLOC_BYTES);
    set->ht_node_bytes = (uint64_t)pick((int64_t)c.ht_node_bytes, "EPX_HT_NODE_BYTES", 0, (int64_t)MAX_ALLOC_BYTES);
    memcpy(set->net, c.net, sizeof(set->net));
    set->net[sizeof(set->net) - 1] = 0;
    set->nnodes = 1;
    set->smallest_node = set->largest_node = nranks;
    set->sig_slots = set->inflight;
    return check_products(set);
}

epx_status settings_plan(const epx_group_config *config, int nranks, struct heap_plan *plan)
{
    struct settings set;
    struct node_map map;
    epx_status status = settings_make(config, nranks, &set);

    if (status == EPX_OK)
        status = node_map_slice(&map, nranks, set.ranks_per_node);
    if (status != EPX_OK)
        return status;
    settings_nodes(&set, &map);
    node_map_free(&map);
    heap_plan_make(&set, plan);
    return heap_plan_check(&set, plan);
}

static const char *const field_names[SETTINGS_FIELDS] = {
    "version",     "device",          "modes",         "num_experts",       "max_tokens_per_rank", "max_hidden_bytes",
    "max_topk",    "max_recv_tokens", "max_inflight",  "ranks_per_node",    "enable_mask",         "timeout_ms",
    "alloc_bytes", "ht_buffer_bytes", "ht_node_bytes", "(number of ranks)", "EPX_PROXY_THREADS"};

void settings_pack(const struct settings *set, int64_t fields[SETTINGS_FIELDS])
{
    const int64_t values[SETTINGS_FIELDS] = {EPX_VERSION_CODE,
                                             set->device,
                                             set->modes,
                                             set->experts,
                                             set->max_tokens,
                                             set->max_hidden_bytes,
                                             set->max_topk,
                                             set->max_recv_tokens,
                                             set->inflight,
                                             set->ranks_per_node,
                                             set->enable_mask,
                                             set->timeout_ms,
                                             (int64_t)set->alloc_bytes,
                                             (int64_t)set->ht_buffer_bytes,
                                             (int64_t)set->ht_node_bytes,
                                             set->nranks,
                                             set->proxy_threads};
    memcpy(fields, values, sizeof(values));
}

epx_status settings_compare(const int64_t *all, int nranks, size_t stride)
{
    for (int r = 1; r < nranks; r++) {
        const int64_t *theirs = (const int64_t *)((const char *)all + (size_t)r * stride);
        for (int f = 0; f < SETTINGS_FIELDS; f++) {
            if (theirs[f] != all[f])
                return fail(EPX_ERR_MISMATCH,
                            "epx_group_create: rank %d has %s = %" PRId64 " where rank 0 has %" PRId64, r,
                            field_names[f], theirs[f], all[f]);
        }
    }
    return EPX_OK;
}

int settings_difference(const int64_t *process, const int64_t *group, char *text, size_t bytes)
{
    for (int f = 0; f < SETTINGS_FIELDS; f++)
        if (process[f] != group[f]) {
            snprintf(text, bytes, "%s = %" PRId64 " where the group has %" PRId64, field_names[f], process[f],
                     group[f]);
            return 1;
        }
    return 0;
}
