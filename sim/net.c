/* SPDX-License-Identifier: Apache-2.0 */
/* The simulated network as proxies see it. */
#include "sim/net.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim/net_world.h"
#include "util/runtime.h"
#include "util/status.h"

enum { ADDRESS_VERSION = 1 };

static struct sim_endpoint *endpoint(struct net *net)
{
    return (struct sim_endpoint *)net;
}

static epx_status sim_probe(const char *provider, char *text, size_t bytes)
{
    (void)provider;
    snprintf(text, bytes, "%s",
             runtime()->net_world ? "simulated, in this process" : "only inside a simulation (epx sim)");
    return runtime()->net_world ? EPX_OK : EPX_ERR_UNSUPPORTED;
}

static epx_status sim_open(const struct net_options *options, struct net **net)
{
    struct sim_net *w = options->world ? options->world : runtime()->net_world;
    struct sim_endpoint *e;

    *net = NULL;
    if (!w)
        return fail(EPX_ERR_UNSUPPORTED, "network sim: there is no simulation in this process (see `epx sim`)");
    if (options->rank < 0 || options->rank >= options->nranks || options->nranks > w->o.nranks)
        return fail(EPX_ERR_ARGUMENT, "network sim: rank %d of %d does not fit a world of %d", options->rank,
                    options->nranks, w->o.nranks);
    e = calloc(1, sizeof(*e));
    if (!e)
        return fail(EPX_ERR_MEMORY, "network sim: no memory for an endpoint");
    e->base.ops = &net_sim_ops;
    e->world = w;
    e->rank = options->rank;
    e->process = w->o.process ? w->o.process(w->o.context) : options->rank;
    e->index = options->index;
    e->nranks = options->nranks;
    e->timeout_ns = (uint64_t)options->timeout_ms * 1000000u;
    e->peers = calloc((size_t)options->nranks, sizeof(*e->peers));
    e->id = e->peers ? world_add(w, e) : 0;
    if (!e->id) {
        free(e->peers);
        free(e);
        return fail(EPX_ERR_MEMORY, "network sim: no memory for %d peers", options->nranks);
    }
    *net = &e->base;
    return EPX_OK;
}

static unsigned sim_caps(struct net *net)
{
    return NET_KNOWN_SENDERS | (endpoint(net)->world->o.ordered ? NET_ORDERED : 0);
}

static epx_status sim_address(struct net *net, struct net_address *address)
{
    memset(address, 0, sizeof(*address));
    address->version = ADDRESS_VERSION;
    address->bytes = sizeof(endpoint(net)->id);
    memcpy(address->data, &endpoint(net)->id, sizeof(endpoint(net)->id));
    return EPX_OK;
}

static epx_status sim_add_region(struct net *net, const struct net_memory *memory, struct net_region *region)
{
    if (net_memory_is_gpu(memory->kind))
        return fail(EPX_ERR_UNSUPPORTED, "network sim: expected host memory, got that of device kind %d", memory->kind);
    endpoint(net)->heap = memory->base;
    endpoint(net)->heap_bytes = memory->bytes;
    memset(region, 0, sizeof(*region));
    region->bytes = memory->bytes;
    return EPX_OK;
}

static epx_status sim_connect(struct net *net, int peer, const struct net_address *address,
                              const struct net_region *region)
{
    struct sim_endpoint *e = endpoint(net);
    uint32_t id;

    if (peer < 0 || peer >= e->nranks || peer == e->rank)
        return fail(EPX_ERR_ARGUMENT, "network sim: rank %d cannot connect to rank %d of %d", e->rank, peer, e->nranks);
    if (address->version != ADDRESS_VERSION)
        return fail(EPX_ERR_MISMATCH, "network sim: rank %d has address format version %u, expected %d", peer,
                    address->version, ADDRESS_VERSION);
    memcpy(&id, address->data, sizeof(id));
    if (address->bytes != sizeof(id) || id == 0 || id >= e->world->nendpoints)
        return fail(EPX_ERR_PEER, "network sim: the address of rank %d leads nowhere", peer);
    e->peers[peer] = (struct sim_peer){.endpoint = id, .region_bytes = region->bytes};
    return EPX_OK;
}

static int fits(uint64_t at, uint32_t bytes, uint64_t region)
{
    return bytes <= region && at <= region - bytes;
}

static int sim_put(struct net *net, const struct net_put *put)
{
    struct sim_endpoint *e = endpoint(net);
    struct sim_net *w = e->world;
    struct sim_peer *peer;

    if (w->dead[e->process])
        return -ENETDOWN;
    if (put->peer < 0 || put->peer >= e->nranks || !e->peers[put->peer].endpoint)
        return -EINVAL;
    peer = &e->peers[put->peer];
    if (!fits(put->source, put->bytes, e->heap_bytes) || !fits(put->target, put->bytes, peer->region_bytes))
        return -ERANGE;
    if (peer->lost)
        return -ENOTCONN;
    if (e->in_flight >= w->o.depth || (e->in_flight && world_draw(w, 100) < (uint64_t)w->o.refuse_percent)) {
        w->totals.refused++;
        return -EAGAIN;
    }
    if (w->o.costs)
        w->o.costs->put();
    return world_post(w, e, put);
}

static int sim_flush(struct net *net)
{
    (void)net;
    return 0;
}

static int take_events(struct sim_endpoint *e, struct net_event *events, int max)
{
    int n = 0;

    while (n < max && e->head) {
        struct queued_event *q = e->head;

        events[n++] = q->event;
        e->head = q->next;
        free(q);
    }
    return n;
}

static int sim_poll(struct net *net, struct net_event *events, int max)
{
    struct sim_endpoint *e = endpoint(net);
    int n;

    if (e->world->dead[e->process])
        return -ENETDOWN;
    n = take_events(e, events, max);
    if (n < max) {
        world_lose_silent(e->world, e);
        n += take_events(e, events + n, max - n);
    }
    if (n && e->world->o.costs)
        e->world->o.costs->events(n);
    return n;
}

/* Tasks do not sleep on descriptors: the simulator wakes them. */
static int sim_wait_fd(struct net *net)
{
    (void)net;
    return -1;
}

static int sim_arm(struct net *net)
{
    return endpoint(net)->head ? -EAGAIN : 0;
}

static void sim_close(struct net *net)
{
    struct sim_endpoint *e = endpoint(net);

    world_remove(e->world, e);
    while (e->head) {
        struct queued_event *q = e->head;

        e->head = q->next;
        free(q);
    }
    free(e->peers);
    free(e);
}

const struct net_ops net_sim_ops = {
    .name = "sim",
    .probe = sim_probe,
    .open = sim_open,
    .caps = sim_caps,
    .address = sim_address,
    .add_region = sim_add_region,
    .connect = sim_connect,
    .put = sim_put,
    .flush = sim_flush,
    .poll = sim_poll,
    .wait_fd = sim_wait_fd,
    .arm = sim_arm,
    .close = sim_close,
};
