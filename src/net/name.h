/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Names of networks, as EPX_NET, epx_group_config.net and `--net` give them:
 *
 *      NETWORK             verbs, ofi, null; in a simulation its own, "sim" (util/runtime.h)
 *      NETWORK:PROVIDER    ofi:tcp (a libfabric provider), verbs:mlx5_0 (a card filter, as EPX_IB_HCA)
 *      tcp, shm            short for ofi:tcp and ofi:shm
 *
 * NETWORK;PROVIDER is the old form. It is accepted still, but a shell takes the semicolon for the end of a command.
 */
#ifndef EPX_NET_NAME_H
#define EPX_NET_NAME_H

#include "net/net.h"

struct net_name {
    const struct net_ops *ops;
    const char *provider; /* points into the parsed text, or to a constant; "" = automatic */
};

/* EPX_ERR_ARGUMENT for an unknown network; the message lists the known ones. `text` is neither "" nor "auto". */
epx_status net_name_parse(const char *text, struct net_name *name);

#endif
