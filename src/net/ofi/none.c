/* SPDX-License-Identifier: Apache-2.0 */
/* The ofi network of a build without <rdma/fabric.h>: says so. */
#include "net/ofi/ofi.h"

#if !EPX_HAVE_OFI

#include <errno.h>
#include <stdio.h>

#include "net/net.h"
#include "util/status.h"

#define MISSING "this EPX was built without the headers of libfabric (rdma/fabric.h)"

static epx_status probe(const char *provider, char *text, size_t bytes)
{
    (void)provider;
    snprintf(text, bytes, MISSING);
    return fail(EPX_ERR_UNSUPPORTED, "ofi: " MISSING);
}

static epx_status net_open(const struct net_options *options, struct net **net)
{
    (void)options;
    (void)net;
    return fail(EPX_ERR_UNSUPPORTED, "ofi: " MISSING);
}

static unsigned caps(struct net *net)
{
    (void)net;
    return 0;
}

static epx_status address(struct net *net, struct net_address *address)
{
    (void)net;
    (void)address;
    return fail(EPX_ERR_UNSUPPORTED, "ofi: " MISSING);
}

static epx_status add_region(struct net *net, const struct net_memory *memory, struct net_region *region)
{
    (void)net;
    (void)memory;
    (void)region;
    return fail(EPX_ERR_UNSUPPORTED, "ofi: " MISSING);
}

static epx_status net_connect(struct net *net, int peer, const struct net_address *address,
                              const struct net_region *region)
{
    (void)net;
    (void)peer;
    (void)address;
    (void)region;
    return fail(EPX_ERR_UNSUPPORTED, "ofi: " MISSING);
}

static int put(struct net *net, const struct net_put *put)
{
    (void)net;
    (void)put;
    return -ENOSYS;
}

static int nothing(struct net *net)
{
    (void)net;
    return -ENOSYS;
}

static int poll(struct net *net, struct net_event *events, int max)
{
    (void)net;
    (void)events;
    (void)max;
    return -ENOSYS;
}

static int wait_fd(struct net *net)
{
    (void)net;
    return -1;
}

static void net_close(struct net *net)
{
    (void)net;
}

const struct net_ops net_ofi_ops = {.name = "ofi",
                                    .probe = probe,
                                    .open = net_open,
                                    .caps = caps,
                                    .address = address,
                                    .add_region = add_region,
                                    .connect = net_connect,
                                    .put = put,
                                    .flush = nothing,
                                    .poll = poll,
                                    .wait_fd = wait_fd,
                                    .arm = nothing,
                                    .close = net_close};

#else

typedef int ofi_none_is_empty;

#endif
