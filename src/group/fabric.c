/* SPDX-License-Identifier: Apache-2.0 */
#include "group/fabric.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "group/handshake.h"
#include "group/heap.h"
#include "kernel/command.h"
#include "util/env.h"
#include "util/log.h"
#include "util/status.h"
#include "util/text.h"

#define TRIAL_BYTES ((uint64_t)2 << 20)
#define TRIAL_MAGIC 0x3174736569727446u

/* ---- Offer ------------------------------------------------------------------------------------------------------- */

static int ranks_per_host(void)
{
    return (int)env_int("EPX_RANKS_PER_HOST", 0, 1, KERNEL_MAX_RANKS);
}

static void pretend_host(const struct epx_group *group, uint8_t host[64])
{
    const int per = ranks_per_host();
    const uint32_t number = per ? (uint32_t)(group->rank / per) : 0;

    for (int i = 0; i < 4; i++)
        host[60 + i] ^= (uint8_t)(number >> 8 * i);
}

epx_status fabric_describe(struct epx_group *group, struct fabric_offer *offer)
{
    const struct device_ops *ops = group->device->ops;
    epx_status status = ops->identity(group->device, offer->host);

    if (status != EPX_OK)
        return status;
    pretend_host(group, offer->host);
    offer->asked = group->set.use_fabric;
    if (!offer->asked)
        snprintf(offer->why, sizeof(offer->why), "use_fabric and EPX_FABRIC are not set there");
    else if (heap_asked_for_host())
        snprintf(offer->why, sizeof(offer->why), "EPX_GPU_HEAP=host puts heaps into host memory");
    else if (ops->fabric(group->device, offer->fabric) != EPX_OK)
        snprintf(offer->why, sizeof(offer->why), "%s", epx_last_error());
    return EPX_OK;
}

/* ---- Choose ------------------------------------------------------------------------------------------------------ */

static const struct fabric_offer *offer_of(const struct fabric_offer *first, size_t stride, int rank)
{
    return (const struct fabric_offer *)((const char *)first + (size_t)rank * stride);
}

static int is_offered(const struct fabric_offer *offer)
{
    static const uint8_t none[64];

    return memcmp(offer->fabric, none, sizeof(none)) != 0;
}

static int same(const uint8_t *a, const uint8_t *b)
{
    return memcmp(a, b, 64) == 0;
}

/* Two ranks of one fabric are on different hosts. */
static int joins_hosts(const struct epx_group *group, const struct fabric_offer *first, size_t stride)
{
    const int per = group->set.ranks_per_node;

    for (int r = 1; r < group->nranks; r++)
        for (int s = 0; s < r; s++) {
            const struct fabric_offer *a = offer_of(first, stride, r), *b = offer_of(first, stride, s);

            if ((!per || r / per == s / per) && same(a->fabric, b->fabric) && !same(a->host, b->host))
                return 1;
        }
    return 0;
}

/* Where fabric handles would change something. */
static void warn_unused(const struct epx_group *group, const struct fabric_offer *first, size_t stride, int rank)
{
    static int printed; /* once in a process: a buffer has several groups */
    char text[sizeof(first->why)];
    int hosts = 0;

    for (int r = 1; r < group->nranks; r++)
        hosts |= !same(offer_of(first, stride, r)->host, first->host);
    if (group->rank || !hosts || __atomic_exchange_n(&printed, 1, __ATOMIC_RELAXED))
        return;
    if (rank >= 0)
        log_line(LOG_WARN, "use_fabric: no effect, hosts are reached by the network: rank %d: %s", rank,
                 text_clean(text, sizeof(text), offer_of(first, stride, rank)->why, sizeof(text)));
    else
        log_line(LOG_WARN, "use_fabric: no effect, hosts are reached by the network: no two of them are in one fabric");
}

void fabric_choose(struct epx_group *group, const struct fabric_offer *first, size_t stride)
{
    int asked = 0, without = -1;

    for (int r = group->nranks - 1; r >= 0; r--) {
        const struct fabric_offer *offer = offer_of(first, stride, r);

        memcpy(group->hosts[r], offer->host, sizeof(offer->host));
        memcpy(group->identities[r], offer->host, sizeof(offer->host));
        asked |= offer->asked != 0;
        without = is_offered(offer) ? without : r;
    }
    group->fabric = asked && without < 0 && joins_hosts(group, first, stride);
    if (asked && !group->fabric)
        warn_unused(group, first, stride, without);
    for (int r = 0; group->fabric && r < group->nranks; r++)
        memcpy(group->identities[r], offer_of(first, stride, r)->fabric, sizeof(first->fabric));
}

int fabric_host_ranks(const struct epx_group *group)
{
    const int one = ranks_per_host() != 0; /* hosts that are played are one */
    int n = 0;

    for (int r = 0; r < group->nranks; r++)
        n += one || (group->map.node_of[r] == group->node && same(group->hosts[r], group->hosts[group->rank]));
    return n;
}

/* ---- Try --------------------------------------------------------------------------------------------------------- */

/* The next rank of the node that is on another host; -1: none. */
static int farther_rank(const struct epx_group *group)
{
    for (int i = 1; i < group->nranks; i++) {
        const int r = (group->rank + i) % group->nranks;

        if (!group->remote[r] && !same(group->hosts[r], group->hosts[group->rank]))
            return r;
    }
    return -1;
}

static epx_status read_trial(struct epx_group *group, int rank, const struct heap_export *export)
{
    const struct device_ops *ops = group->device->ops;
    uint64_t word = 0;
    void *base = NULL;
    epx_status status = export->bytes ? ops->heap_open(group->device, export, &base)
                                      : fail(EPX_ERR_PEER, "rank %d has no heap to map", rank);

    if (status == EPX_OK)
        status = ops->copy(group->device, &word, base, sizeof(word));
    if (status == EPX_OK && word != TRIAL_MAGIC + (uint64_t)rank)
        status = fail(EPX_ERR_PEER, "the heap of rank %d, once mapped, does not begin as expected", rank);
    if (base)
        ops->heap_close(group->device, export, base);
    return status;
}

static epx_status make_trial(struct epx_group *group, struct heap *heap)
{
    const uint64_t word = TRIAL_MAGIC + (uint64_t)group->rank;
    epx_status status = group->device->ops->heap_place(group->device, HEAP_FABRIC);

    if (status == EPX_OK)
        status = group->device->ops->heap_create(group->device, TRIAL_BYTES, heap);
    if (status == EPX_OK)
        status = group->device->ops->copy(group->device, heap->base, &word, sizeof(word));
    return status;
}

epx_status fabric_try(struct epx_group *group, epx_status mine)
{
    struct heap_export *all = handshake_room(group);
    const int other = farther_rank(group);
    struct heap heap = {0};
    epx_status status, trial;
    int refused;

    static_assert(sizeof(*all) <= HANDSHAKE_ROOM, "of one rank");
    trial = make_trial(group, &heap);
    status = handshake_allgather(group, &heap.export, all, sizeof(*all));
    if (status == EPX_OK && trial == EPX_OK && other >= 0)
        trial = read_trial(group, other, &all[other]);
    refused = trial != EPX_OK;
    if (refused)
        log_line(LOG_WARN, "use_fabric: no effect, hosts are reached by the network: rank %d: %s", group->rank,
                 epx_last_error());
    if (status == EPX_OK)
        status = handshake_any(group, mine, &refused);
    if (heap.base)
        group->device->ops->heap_destroy(group->device, &heap);
    return status == EPX_OK && refused ? fabric_leave(group) : status;
}

epx_status fabric_leave(struct epx_group *group)
{
    epx_status status = group->device->ops->heap_place(group->device, HEAP_DEVICE);

    group->fabric = 0;
    memcpy(group->identities, group->hosts, (size_t)group->nranks * sizeof(*group->hosts));
    handshake_find_nodes(group);
    return status;
}
