/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Placement of a group's heaps: in the device's memory or in the host's (EPX_GPU_HEAP).
 *
 *   device, host   as requested; `device` fails at registration if the network cannot reach it
 *   split          several nodes: the device's memory, and beside it some of the host's, through which all rows between
 *                  nodes pass. Ranks of a node, whose rows are most of all, then never cross the bus to reach each
 *                  other, and nothing but what the network touches is pinned. With masks: as host
 *   auto           one node: the device's memory. Several nodes: the device's memory if, on every rank, the network
 *                  registers a piece of it and the device has a rule that makes a card's writes visible; otherwise
 *                  split, on all ranks
 *
 * A device whose memory is the host's (CPU) has only one place.
 */
#include "group/heap.h"

#include <stdlib.h>
#include <strings.h>
#include <unistd.h>

#include "group/fabric.h"
#include "group/handshake.h"
#include "device/arrivals.h"
#include "util/env.h"
#include "util/log.h"
#include "util/runtime.h"
#include "util/status.h"

#define PROBE_BYTES ((uint64_t)2 << 20)

enum place { PLACE_AUTO, PLACE_DEVICE, PLACE_HOST, PLACE_SPLIT };

static epx_status asked_place(enum place *place)
{
    const char *value = env_string("EPX_GPU_HEAP");

    *place = PLACE_AUTO;
    if (!value || strcasecmp(value, "auto") == 0)
        return EPX_OK;
    *place = strcasecmp(value, "host") == 0 ? PLACE_HOST : strcasecmp(value, "split") == 0 ? PLACE_SPLIT : PLACE_DEVICE;
    if (*place == PLACE_DEVICE && strcasecmp(value, "device") != 0)
        return fail(EPX_ERR_ARGUMENT, "EPX_GPU_HEAP: expected auto, device, host or split, got \"%s\"", value);
    return EPX_OK;
}

int heap_asked_for_host(void)
{
    enum place place;

    return asked_place(&place) == EPX_OK && place == PLACE_HOST;
}

int32_t heap_asked(void)
{
    enum place place;

    return asked_place(&place) == EPX_OK ? (int32_t)place : -1;
}

const char *heap_asked_word(int32_t asked)
{
    static const char *const words[] = {"auto", "device", "host", "split"};

    return asked >= 0 && asked <= PLACE_SPLIT ? words[asked] : "another word";
}

static int heaps_are_host(const struct epx_group *group)
{
    return (group->device->ops->caps & DEVICE_HOST_HEAP) != 0;
}

epx_status heap_place(struct epx_group *group)
{
    enum place place;
    epx_status status = heaps_are_host(group) ? EPX_OK : asked_place(&place);

    if (status != EPX_OK || heaps_are_host(group))
        return status;
    return group->device->ops->heap_place(group->device, place == PLACE_HOST ? HEAP_HOST : HEAP_DEVICE);
}

/* An endpoint registers a piece of the device's memory. */
struct attempt {
    struct epx_group *group;
    struct heap piece;
};

static epx_status attempt_registering(void *arg)
{
    struct attempt *a = arg;
    struct epx_group *group = a->group;
    const struct device_ops *ops = group->device->ops;
    struct net_options o = {.rank = group->rank,
                            .nranks = group->nranks,
                            .timeout_ms = group->set.timeout_ms,
                            .world = runtime()->net_world,
                            .memory_kind = ops->kind};
    struct net_memory memory = {
        .kind = ops->kind, .index = group->set.device_index, .base = a->piece.base, .bytes = a->piece.bytes};
    const struct net_ops *net_ops;
    struct net_region region;
    struct net *net = NULL;
    epx_status status = net_find(group->set.net, &net_ops, &o.provider);

    if (status == EPX_OK)
        status = net_ops->open(&o, &net);
    if (status == EPX_OK && !(net_ops->caps(net) & NET_DEVICE_MEMORY))
        status = fail(EPX_ERR_UNSUPPORTED, "the network %s registers no GPU memory", net_ops->name);
    if (status == EPX_OK)
        status = ops->use(group->device);
    if (status == EPX_OK) {
        if (ops->heap_dmabuf(group->device, &a->piece, &memory.dmabuf) != EPX_OK)
            memory.dmabuf = -1; /* a peer memory module may be able to */
        status = net_ops->add_region(net, &memory, &region);
        if (memory.dmabuf >= 0)
            close(memory.dmabuf);
    }
    if (net)
        net_ops->close(net);
    return status;
}

/* EPX_OK if the network can register the device's memory. */
static epx_status try_registering(struct epx_group *group)
{
    const struct device_ops *ops = group->device->ops;
    struct attempt *a = calloc(1, sizeof(*a));
    epx_status status = a ? EPX_OK : fail(EPX_ERR_MEMORY, "epx_group_create: no memory");
    int left = 0;

    if (status == EPX_OK)
        status = ops->heap_create(group->device, PROBE_BYTES, &a->piece);
    if (status == EPX_OK) {
        a->group = group;
        status = proxy_guard("registering GPU memory", handshake_step_ms(group), attempt_registering, a, &left);
    }
    group->kept |= left;
    if (left)
        return status; /* the thread that is left still uses it */
    if (a && a->piece.base)
        ops->heap_destroy(group->device, &a->piece);
    free(a);
    return status;
}

static epx_status network_reaches(struct epx_group *group)
{
    if (group->device->ops->arrivals(group->device) == ARRIVALS_NEVER)
        return fail(EPX_ERR_UNSUPPORTED, "the device has no way to see what a card writes into its memory");
    return try_registering(group);
}

/* With masks a process may join, and would have to know of it. */
static int may_split(const struct epx_group *group)
{
    return !group->set.enable_mask;
}

epx_status heap_place_agree(struct epx_group *group)
{
    enum place place = PLACE_DEVICE;
    int host = 0;
    epx_status status = asked_place(&place);

    if (group->fabric) {
        status = fabric_try(group, status);
        if (status != EPX_OK)
            return status;
    }
    group->set.split = place == PLACE_SPLIT && group->nnodes > 1 && may_split(group);
    if (group->nnodes == 1 || heaps_are_host(group))
        return EPX_OK;
    if (status == EPX_OK && place == PLACE_AUTO && network_reaches(group) != EPX_OK) {
        host = 1;
        log_line(LOG_INFO, "rows between nodes pass through host memory: %s", epx_last_error());
    }
    host |= place == PLACE_SPLIT;
    status = handshake_any(group, status, &host);
    group->set.split = host && may_split(group);
    if (status == EPX_OK && host && !group->set.split && group->fabric)
        status = fabric_leave(group); /* other hosts map no heap in host memory */
    if (status == EPX_OK && host && !group->set.split)
        status = group->device->ops->heap_place(group->device, HEAP_HOST);
    return status;
}

uint64_t heap_offset(const struct epx_group *group, const void *data, uint64_t bytes)
{
    const uintptr_t base = (uintptr_t)group->heap.base, at = (uintptr_t)data;

    if (at < base || at - base > group->heap.bytes || bytes > group->heap.bytes - (at - base))
        return 0;
    return at - base;
}
