/* SPDX-License-Identifier: Apache-2.0 */
/* The verbs network of a build without <infiniband/verbs.h>: says so. */
#include "net/verbs/lib.h"

#if !EPX_HAVE_VERBS

#include <errno.h>
#include <stdio.h>

#include "net/net.h"
#include "util/status.h"

static const char missing[] = "this build knows no verbs: <infiniband/verbs.h> (libibverbs-dev) was not there";

static epx_status none_probe(const char *provider, char *text, size_t bytes)
{
    (void)provider;
    snprintf(text, bytes, "%s", missing);
    return EPX_ERR_UNSUPPORTED;
}

static epx_status none_open(const struct net_options *options, struct net **net)
{
    (void)options;
    *net = NULL;
    return fail(EPX_ERR_UNSUPPORTED, "verbs: %s", missing);
}

static unsigned none_caps(struct net *net)
{
    (void)net;
    return 0;
}

static epx_status none_address(struct net *net, struct net_address *address)
{
    (void)net;
    (void)address;
    return fail(EPX_ERR_UNSUPPORTED, "verbs: %s", missing);
}

static epx_status none_add_region(struct net *net, const struct net_memory *memory, struct net_region *region)
{
    (void)net;
    (void)memory;
    (void)region;
    return fail(EPX_ERR_UNSUPPORTED, "verbs: %s", missing);
}

static epx_status none_connect(struct net *net, int peer, const struct net_address *address,
                               const struct net_region *region)
{
    (void)net;
    (void)peer;
    (void)address;
    (void)region;
    return fail(EPX_ERR_UNSUPPORTED, "verbs: %s", missing);
}

static int none_put(struct net *net, const struct net_put *put)
{
    (void)net;
    (void)put;
    return -ENOSYS;
}

static int none_poll(struct net *net, struct net_event *events, int max)
{
    (void)net;
    (void)events;
    (void)max;
    return -ENOSYS;
}

static int none_call(struct net *net)
{
    (void)net;
    return -ENOSYS;
}

static void none_close(struct net *net)
{
    (void)net;
}

const struct net_ops net_verbs_ops = {
    .name = "verbs",
    .probe = none_probe,
    .open = none_open,
    .caps = none_caps,
    .address = none_address,
    .add_region = none_add_region,
    .connect = none_connect,
    .put = none_put,
    .flush = none_call,
    .poll = none_poll,
    .wait_fd = none_call,
    .arm = none_call,
    .close = none_close,
};

#endif
