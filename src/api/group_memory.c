/* SPDX-License-Identifier: Apache-2.0 */
/* What a group keeps in device memory and in memory that host and device share. */
#include <stdlib.h>
#include <string.h>

#include "api/group.h"
#include "util/status.h"

struct blocks {
    size_t state, mask, heaps, tables, total;
};

static size_t take(size_t *at, size_t bytes)
{
    const size_t place = (*at + 255) / 256 * 256;
    *at = place + bytes;
    return place;
}

static struct blocks lay_out(const struct epx_group *group)
{
    const size_t R = (size_t)group->nranks;
    struct blocks b;
    size_t at = sizeof(struct group_dev);

    b.state = take(&at, sizeof(struct group_state));
    b.mask = take(&at, R * sizeof(int32_t));
    b.heaps = take(&at, R * sizeof(char *));
    b.tables = take(&at, (size_t)group->set.agents * ((size_t)group->set.experts + R) * sizeof(int32_t));
    b.total = at;
    return b;
}

static void fill_shadow(struct epx_group *group, const struct blocks *b)
{
    char *base = group->device_memory;
    struct group_dev *g = &group->shadow;

    memset(g, 0, sizeof(*g));
    g->rank = group->rank;
    g->nranks = group->nranks;
    g->experts = group->set.experts;
    g->local_experts = group->set.local_experts;
    g->max_tokens = group->set.max_tokens;
    g->max_topk = group->set.max_topk;
    g->inflight = group->set.inflight;
    g->enable_mask = group->set.enable_mask;
    g->timeout_ns = (uint64_t)group->set.timeout_ms * 1000000u;
    g->heap = (char *const *)(base + b->heaps);
    g->state = (struct group_state *)(base + b->state);
    g->mask = (int32_t *)(base + b->mask);
    g->error = group->error;
    g->stats = group->device_stats;
    g->tables = (int32_t *)(base + b->tables);
    g->max_agents = group->set.agents;
    g->signals = group->plan.signals;
    g->ll = group->plan.ll;
    g->ht = group->plan.ht;
}

static epx_status copy_in(struct epx_group *group, const struct blocks *b)
{
    const struct device_ops *ops = group->device->ops;
    char *base = group->device_memory;
    int32_t *ones = malloc((size_t)group->nranks * sizeof(*ones));
    epx_status status;

    if (!ones)
        return fail(EPX_ERR_MEMORY, "epx_group_create: no memory for %d ranks", group->nranks);
    for (int r = 0; r < group->nranks; r++)
        ones[r] = 1;
    status = ops->copy(group->device, base, &group->shadow, sizeof(group->shadow));
    if (status == EPX_OK)
        status = ops->copy(group->device, base + b->mask, ones, (size_t)group->nranks * sizeof(*ones));
    if (status == EPX_OK)
        status = ops->copy(group->device, base + b->heaps, group->bases, (size_t)group->nranks * sizeof(void *));
    free(ones);
    return status;
}

epx_status group_device_create(struct epx_group *group)
{
    const struct device_ops *ops = group->device->ops;
    const struct blocks b = lay_out(group);
    epx_status status;

    status = ops->host_alloc(group->device, sizeof(struct error_record) + sizeof(struct device_stats) + 64,
                             &group->host_memory);
    if (status != EPX_OK)
        return status;
    group->error = group->host_memory;
    group->device_stats = (struct device_stats *)((char *)group->host_memory + 64);
    EPX_STATIC_ASSERT(sizeof(struct error_record) <= 64, "the statistics follow it");
    status = ops->mem_alloc(group->device, b.total, &group->device_memory);
    if (status != EPX_OK)
        return status;
    fill_shadow(group, &b);
    group->dev = group->device_memory;
    return copy_in(group, &b);
}

void group_device_destroy(struct epx_group *group)
{
    if (group->device_memory)
        group->device->ops->mem_free(group->device, group->device_memory);
    if (group->host_memory)
        group->device->ops->host_free(group->device, group->host_memory);
}
