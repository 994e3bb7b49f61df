/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How a group comes to be, step by step; each step is an all-gather that also carries how the rank fares, so that a
 * rank that cannot go on says so and no other waits for it.
 *
 *   1. compare   settings of all ranks: equal, or EPX_ERR_MISMATCH everywhere
 *   2. heaps     who shares memory with whom; each rank maps the heaps of its node
 *   3. ready     all have mapped: from here on signals may fly
 */
#include <stdlib.h>
#include <string.h>

#include "api/config.h"
#include "api/group.h"
#include "util/status.h"

struct fate {
    int32_t status;
    char message[252];
};

struct hello {
    struct fate fate;
    int64_t fields[SETTINGS_FIELDS];
};

struct heap_card {
    struct fate fate;
    uint8_t identity[64];
    struct heap_export export;
};

static void fate_set(struct fate *fate, epx_status mine)
{
    memset(fate, 0, sizeof(*fate));
    fate->status = mine;
    if (mine != EPX_OK)
        strncpy(fate->message, epx_last_error(), sizeof(fate->message) - 1);
}

/* The first rank that cannot go on decides for all; a rank's own trouble comes first for itself. */
static epx_status fates_judge(const struct epx_group *group, const void *cards, size_t stride)
{
    const struct fate *own = (const struct fate *)((const char *)cards + (size_t)group->rank * stride);

    if (own->status != EPX_OK)
        return fail((epx_status)own->status, "%s", own->message);
    for (int r = 0; r < group->nranks; r++) {
        const struct fate *fate = (const struct fate *)((const char *)cards + (size_t)r * stride);
        if (fate->status != EPX_OK)
            return fail(EPX_ERR_PEER, "epx_group_create: rank %d failed: %.200s", r, fate->message);
    }
    return EPX_OK;
}

epx_status meet_compare(struct epx_group *group, epx_status mine)
{
    struct hello own, *all = calloc((size_t)group->nranks, sizeof(*all));
    epx_status status;

    if (!all)
        return fail(EPX_ERR_MEMORY, "epx_group_create: no memory to compare %d ranks", group->nranks);
    memset(&own, 0, sizeof(own));
    fate_set(&own.fate, mine);
    settings_pack(&group->set, own.fields);
    status = boot_allgather(group->boot, &own, all, sizeof(own));
    if (status == EPX_OK)
        status = fates_judge(group, all, sizeof(*all));
    if (status == EPX_OK)
        status = settings_compare(all[0].fields, group->nranks, sizeof(*all));
    free(all);
    return status;
}

/* Nodes: ranks of one identity, cut to ranks_per_node where that is set. Node numbers go by the lowest rank. */
static void find_nodes(struct epx_group *group, const struct heap_card *all, int *node_of)
{
    int nodes = 0;

    for (int r = 0; r < group->nranks; r++) {
        const int slice = group->set.ranks_per_node ? r / group->set.ranks_per_node : 0;
        node_of[r] = -1;
        for (int s = 0; s < r && node_of[r] < 0; s++) {
            const int other = group->set.ranks_per_node ? s / group->set.ranks_per_node : 0;
            if (other == slice && !memcmp(all[r].identity, all[s].identity, sizeof(all[r].identity)))
                node_of[r] = node_of[s];
        }
        if (node_of[r] < 0)
            node_of[r] = nodes++;
    }
    group->nnodes = nodes;
    group->node = node_of[group->rank];
}

static epx_status map_heaps(struct epx_group *group, const struct heap_card *all)
{
    for (int r = 0; r < group->nranks; r++) {
        group->exports[r] = all[r].export;
        epx_status status = group->device->ops->heap_open(group->device, &all[r].export, &group->bases[r]);
        if (status != EPX_OK)
            return status;
        const struct control *c = group->bases[r];
        if (group->device->ops->caps & DEVICE_HOST_ACCESS && (c->magic != CONTROL_MAGIC || c->rank != (uint32_t)r))
            return fail(EPX_ERR_INTERNAL, "epx_group_create: the heap of rank %d does not begin as expected", r);
    }
    return EPX_OK;
}

epx_status meet_heaps(struct epx_group *group, epx_status mine)
{
    const size_t n = (size_t)group->nranks;
    struct heap_card own, *all = calloc(n, sizeof(*all));
    int *node_of = calloc(n, sizeof(*node_of));
    epx_status status = all && node_of ? EPX_OK : fail(EPX_ERR_MEMORY, "epx_group_create: no memory for %zu ranks", n);

    if (status != EPX_OK)
        goto out;
    memset(&own, 0, sizeof(own));
    if (mine == EPX_OK)
        mine = group->device->ops->identity(group->device, own.identity);
    fate_set(&own.fate, mine);
    own.export = group->heap.export;
    status = boot_allgather(group->boot, &own, all, sizeof(own));
    if (status == EPX_OK)
        status = fates_judge(group, all, sizeof(*all));
    if (status != EPX_OK)
        goto out;
    find_nodes(group, all, node_of);
    if (group->nnodes > 1)
        status = fail(EPX_ERR_UNSUPPORTED,
                      "epx_group_create: the %d ranks are on %d nodes; this version exchanges inside one node only "
                      "(ranks_per_node = %d)",
                      group->nranks, group->nnodes, group->set.ranks_per_node);
    else
        status = map_heaps(group, all);

out:
    free(node_of);
    free(all);
    return status;
}

epx_status meet_ready(struct epx_group *group, epx_status mine)
{
    struct fate own, *all = calloc((size_t)group->nranks, sizeof(*all));
    epx_status status;

    if (!all)
        return fail(EPX_ERR_MEMORY, "epx_group_create: no memory for %d ranks", group->nranks);
    fate_set(&own, mine);
    status = boot_allgather(group->boot, &own, all, sizeof(own));
    if (status == EPX_OK)
        status = fates_judge(group, all, sizeof(*all));
    free(all);
    return status;
}
