/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The null network: accepts puts, completes them at the next poll and delivers nothing. It measures everything above a
 * network.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "net/net.h"
#include "util/descriptor.h"
#include "util/status.h"

/* Puts to one peer that were accepted and have not completed. */
struct null_peer {
    uint64_t cookie; /* the last one's */
    uint32_t count;
};

struct net_null {
    struct net base;
    struct null_peer *peers;
    int *waiting; /* peers with count > 0, in the order of their first put */
    int nwaiting;
    int nranks;
    int fd; /* never readable: nothing arrives */
};

static epx_status null_probe(const char *provider, char *text, size_t bytes)
{
    (void)provider;
    snprintf(text, bytes, "accepts puts and discards them, for measurements");
    return EPX_OK;
}

static void null_close(struct net *net)
{
    struct net_null *null = (struct net_null *)net;

    if (null->fd >= 0)
        close(null->fd);
    free(null->waiting);
    free(null->peers);
    free(null);
}

static epx_status null_open(const struct net_options *options, struct net **net)
{
    struct net_null *null = calloc(1, sizeof(*null));

    if (!null)
        return fail(EPX_ERR_MEMORY, "null network: no memory for %zu bytes", sizeof(*null));
    null->base.ops = &net_null_ops;
    null->nranks = options->nranks;
    null->fd = fd_own(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    null->peers = calloc((size_t)options->nranks, sizeof(*null->peers));
    null->waiting = calloc((size_t)options->nranks, sizeof(*null->waiting));
    if (null->fd < 0 || !null->peers || !null->waiting) {
        epx_status status = null->fd < 0 ? fail_errno(EPX_ERR_SYSTEM, "null network: no eventfd")
                                         : fail(EPX_ERR_MEMORY, "null network: no memory for %d peers", null->nranks);
        null_close(&null->base);
        return status;
    }
    *net = &null->base;
    return EPX_OK;
}

static unsigned null_caps(struct net *net)
{
    (void)net;
    return NET_ORDERED | NET_DEVICE_MEMORY;
}

static epx_status null_address(struct net *net, struct net_address *address)
{
    (void)net;
    memset(address, 0, sizeof(*address));
    address->version = 1;
    return EPX_OK;
}

static epx_status null_add_region(struct net *net, const struct net_memory *memory, struct net_region *region)
{
    (void)net;
    memset(region, 0, sizeof(*region));
    region->bytes = memory->bytes;
    return EPX_OK;
}

static epx_status null_connect(struct net *net, int peer, const struct net_address *address,
                               const struct net_region *region)
{
    (void)net;
    (void)peer;
    (void)region;
    if (address->version != 1)
        return fail(EPX_ERR_MISMATCH, "null network: rank %d has address format %u, expected 1", peer,
                    address->version);
    return EPX_OK;
}

static int null_put(struct net *net, const struct net_put *put)
{
    struct net_null *null = (struct net_null *)net;
    struct null_peer *peer;

    if (put->peer < 0 || put->peer >= null->nranks)
        return -EINVAL;
    peer = &null->peers[put->peer];
    if (peer->count++ == 0)
        null->waiting[null->nwaiting++] = put->peer;
    peer->cookie = put->cookie;
    return 0;
}

static int null_flush(struct net *net)
{
    (void)net;
    return 0;
}

static int null_poll(struct net *net, struct net_event *events, int max)
{
    struct net_null *null = (struct net_null *)net;
    int n = 0;

    while (n < max && null->nwaiting > 0) {
        int rank = null->waiting[--null->nwaiting];
        struct null_peer *peer = &null->peers[rank];

        events[n++] = (struct net_event){.kind = NET_SENT, .peer = rank, .count = peer->count, .cookie = peer->cookie};
        peer->count = 0;
    }
    return n;
}

static int null_wait_fd(struct net *net)
{
    return ((struct net_null *)net)->fd;
}

static int null_arm(struct net *net)
{
    return ((struct net_null *)net)->nwaiting > 0 ? -EAGAIN : 0;
}

const struct net_ops net_null_ops = {
    .name = "null",
    .probe = null_probe,
    .open = null_open,
    .caps = null_caps,
    .address = null_address,
    .add_region = null_add_region,
    .connect = null_connect,
    .put = null_put,
    .flush = null_flush,
    .poll = null_poll,
    .wait_fd = null_wait_fd,
    .arm = null_arm,
    .close = null_close,
};
