/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The table of a network that this build was made without. Every slot is filled. probe and open say which CMake option
 * brings the network; the other operations need an open endpoint, which never exists here.
 */
#include "net/net.h"

#if !EPX_HAVE_OFI || !EPX_HAVE_VERBS

#include <errno.h>
#include <stdio.h>

#include "util/status.h"

static epx_status unsupported_probe(const char *network, const char *why, char *text, size_t bytes)
{
    snprintf(text, bytes, "%s", why);
    return fail(EPX_ERR_UNSUPPORTED, "%s: %s", network, why);
}

static unsigned unsupported_caps(struct net *net)
{
    (void)net;
    return 0;
}

static epx_status unsupported_address(struct net *net, struct net_address *address)
{
    (void)address;
    return fail(EPX_ERR_UNSUPPORTED, "%s: not part of this build", net->ops->name);
}

static epx_status unsupported_add_region(struct net *net, const struct net_memory *memory, struct net_region *region)
{
    (void)memory;
    (void)region;
    return fail(EPX_ERR_UNSUPPORTED, "%s: not part of this build", net->ops->name);
}

static epx_status unsupported_connect(struct net *net, int peer, const struct net_address *address,
                                      const struct net_region *region)
{
    (void)peer;
    (void)address;
    (void)region;
    return fail(EPX_ERR_UNSUPPORTED, "%s: not part of this build", net->ops->name);
}

static int unsupported_put(struct net *net, const struct net_put *put)
{
    (void)net;
    (void)put;
    return -ENOSYS;
}

static int unsupported_poll(struct net *net, struct net_event *events, int max)
{
    (void)net;
    (void)events;
    (void)max;
    return -ENOSYS;
}

static int unsupported_flush(struct net *net)
{
    (void)net;
    return -ENOSYS;
}

static int unsupported_wait_fd(struct net *net)
{
    (void)net;
    return -1;
}

static void unsupported_close(struct net *net)
{
    (void)net;
}

/* The table `ops` of the network `network`, whose `library` the CMake option EPX_`option` left out. */
#define UNSUPPORTED_NETWORK(ops_, network, library, option)                                                        \
    static const char network##_why[] =                                                                            \
        "this build was made without " library " (-DEPX_" #option "=OFF); configure it with -DEPX_" #option "=ON"; \
                                                                                                                   \
    static epx_status network##_probe(const char *provider, char *text, size_t bytes)                              \
    {                                                                                                              \
        (void)provider;                                                                                            \
        return unsupported_probe(#network, network##_why, text, bytes);                                            \
    }                                                                                                              \
                                                                                                                   \
    static epx_status network##_open(const struct net_options *options, struct net **net)                          \
    {                                                                                                              \
        (void)options;                                                                                             \
        *net = NULL;                                                                                               \
        return fail(EPX_ERR_UNSUPPORTED, "%s: %s", #network, network##_why);                                       \
    }                                                                                                              \
                                                                                                                   \
    const struct net_ops ops_ = {                                                                                  \
        .name = #network,                                                                                          \
        .probe = network##_probe,                                                                                  \
        .open = network##_open,                                                                                    \
        .caps = unsupported_caps,                                                                                  \
        .address = unsupported_address,                                                                            \
        .add_region = unsupported_add_region,                                                                      \
        .connect = unsupported_connect,                                                                            \
        .put = unsupported_put,                                                                                    \
        .flush = unsupported_flush,                                                                                \
        .poll = unsupported_poll,                                                                                  \
        .wait_fd = unsupported_wait_fd,                                                                            \
        .arm = unsupported_flush,                                                                                  \
        .close = unsupported_close,                                                                                \
    }

#if !EPX_HAVE_OFI
UNSUPPORTED_NETWORK(net_ofi_ops, ofi, "libfabric", OFI);
#endif
#if !EPX_HAVE_VERBS
UNSUPPORTED_NETWORK(net_verbs_ops, verbs, "libibverbs", VERBS);
#endif

#endif
