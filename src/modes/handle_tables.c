/* SPDX-License-Identifier: Apache-2.0 */
/* A handle's device memory: struct handle_dev, which has addresses, and one block of tables, which has none. */
#include "modes/handle.h"

#include "group/launch.h"
#include "group/memory.h"
#include "util/status.h"

/* With base NULL only counts. */
static void *place(char *base, size_t *at, size_t bytes)
{
    void *p = base ? base + *at : NULL;
    *at += (bytes + 63) / 64 * 64;
    return p;
}

static void lay_out_relay(const struct settings *set, const struct ht_layout *ht, size_t pairs, char *base, size_t *at,
                          struct handle_dev *h)
{
    const size_t sources = (size_t)set->relay_max, nodes = (size_t)set->nnodes, rounds = (size_t)ht->rounds;
    const size_t per = (size_t)ht->block_tokens, blocks = ((size_t)set->max_tokens + per - 1) / per;

    h->nidx = place(base, at, pairs * 4);
    h->block_start = place(base, at, (blocks + 1) * nodes * 4);
    h->round_block = place(base, at, (rounds + 1) * 4);
    h->node_first = place(base, at, nodes * 4);
    h->relay_n = place(base, at, sources * 4);
    h->relay_peer = place(base, at, sources * 4);
    h->relay_rounds = place(base, at, sources * 4);
    h->relay_rows = place(base, at, sources * rounds * 4);
    h->relay_base = place(base, at, sources * (size_t)ht->base_stride * 4);
}

static size_t lay_out(const struct settings *set, const struct ht_layout *ht, const epx_handle_config *config,
                      char *base, struct handle_dev *h)
{
    const size_t R = (size_t)set->nranks, M = (size_t)set->max_tokens, L = (size_t)set->local_experts;
    const size_t pairs = M * (size_t)config->topk;
    const int low = config->mode == EPX_LOW_LATENCY;
    const int lines = config->layout == EPX_EXPERT_MAJOR && config->flags & EPX_HANDLE_SOURCE_MAP;
    size_t at = 0;

    h->state = place(base, &at, sizeof(struct handle_state));
    h->ids = place(base, &at, pairs * 4);
    h->eidx = place(base, &at, pairs * 4);
    h->ridx = place(base, &at, pairs * 4);
    h->rord = place(base, &at, pairs * 4);
    h->ecount = place(base, &at, (size_t)set->experts * 4);
    h->rcount = place(base, &at, R * 4);
    if (low) {
        h->begin = place(base, &at, L * R * 4);
        h->count = place(base, &at, L * R * 4);
        h->first = place(base, &at, (size_t)set->experts * 4);
        h->source = place(base, &at, (config->layout == EPX_EXPERT_MAJOR ? L : 1) * R * 4);
        h->back = place(base, &at, (config->layout == EPX_EXPERT_MAJOR ? (size_t)set->experts : R) * 4);
    } else {
        h->base = place(base, &at, (size_t)ht->base_stride * 4);
        h->zone = place(base, &at, L * 4);
        h->filled = place(base, &at, L * 4);
        h->padded = place(base, &at, L * 4);
        h->pos = place(base, &at, pairs * 4);
        if (lines)
            h->line = place(base, &at, pairs * 4);
        if (config->layout == EPX_FLAT && config->drop_rows)
            h->drop_base = place(base, &at, R * 4);
        if (config->drop_rows)
            h->limits = place(base, &at, R * 4);
        if (set->nnodes > 1)
            lay_out_relay(set, ht, pairs, base, &at, h);
    }
    return at;
}

size_t handle_table_bytes(const struct settings *set, const struct ht_layout *ht, const epx_handle_config *config)
{
    struct handle_dev unused;
    return lay_out(set, ht, config, NULL, &unused);
}

const int32_t *handle_places(const struct epx_handle *handle)
{
    struct handle_dev h;

    lay_out(&handle->group->set, &handle->group->plan.ht, &handle->config, handle->tables, &h);
    return h.pos;
}

uint64_t handle_key(const struct epx_handle *handle)
{
    const struct settings *set = &handle->group->set;
    const epx_handle_config *c = &handle->config;
    const int64_t fields[] = {set->nranks,
                              handle->group->rank,
                              handle->group->nnodes,
                              set->experts,
                              set->max_tokens,
                              set->max_hidden_bytes,
                              set->max_topk,
                              set->max_recv_tokens,
                              set->relay_max,
                              set->split,
                              (int64_t)set->ht_buffer_bytes,
                              (int64_t)set->ht_node_bytes,
                              c->mode,
                              c->layout,
                              c->topk,
                              c->expert_alignment,
                              c->flags,
                              c->drop_rows};
    uint64_t key = 14695981039346656037u; /* FNV-1a */

    for (size_t i = 0; i < sizeof(fields); i++)
        key = (key ^ ((const unsigned char *)fields)[i]) * 1099511628211u;
    return key ? key : 1;
}

/* Tables in the caller's memory may hold a routing: high throughput leaves them as they are. */
static epx_status init_state(struct epx_handle *handle, struct handle_state *at)
{
    const struct handle_state state = {.topk = handle->config.topk};

    if (handle->config.memory && handle->config.mode == EPX_HIGH_THROUGHPUT)
        return EPX_OK;
    return handle->group->device->ops->copy(handle->group->device, at, &state, sizeof(state));
}

epx_status handle_tables_create(struct epx_handle *handle)
{
    struct epx_group *group = handle->group;
    const struct device_ops *ops = group->device->ops;
    struct handle_dev h = {0};
    void *dev = NULL, *tables = handle->config.memory, *info = NULL;
    epx_status status = ops->mem_alloc(group->device, sizeof(h), &dev);

    if (status == EPX_OK && !tables)
        status = group_mem_alloc(group, handle_table_bytes(&group->set, &group->plan.ht, &handle->config), &tables);
    if (status != EPX_OK)
        goto free_dev;
    handle->info_bytes = sizeof(struct recv_info) + (size_t)group->set.local_experts * sizeof(int64_t);
    status = ops->host_alloc(group->device, handle->info_bytes, &info);
    if (status != EPX_OK)
        goto free_tables;
    lay_out(&group->set, &group->plan.ht, &handle->config, tables, &h);
    h.info = info;
    status = ops->copy(group->device, dev, &h, sizeof(h));
    if (status == EPX_OK)
        status = init_state(handle, h.state);
    if (status != EPX_OK)
        goto free_info;
    handle->tables = tables;
    handle->dev = dev;
    handle->info = info;
    return EPX_OK;

free_info:
    ops->host_free(group->device, info);
free_tables:
    if (!handle->config.memory)
        group_mem_free(group, tables);
free_dev:
    ops->mem_free(group->device, dev);
    return status;
}

void handle_tables_destroy(struct epx_handle *handle)
{
    struct epx_group *group = handle->group;

    group->device->ops->host_free(group->device, handle->info);
    if (!handle->config.memory)
        group_mem_free(group, handle->tables);
    group->device->ops->mem_free(group->device, handle->dev);
}

epx_status handle_state_read(struct epx_handle *handle, const char *call, struct handle_state *state)
{
    const struct device_ops *ops = handle->group->device->ops;
    epx_status status = launch_await(handle->group, handle->group->last_stream, call);

    return status == EPX_OK ? ops->copy(handle->group->device, state, handle->tables, sizeof(*state)) : status;
}
