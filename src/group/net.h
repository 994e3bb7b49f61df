/* SPDX-License-Identifier: Apache-2.0 */
/* The proxies of a group, where its ranks are on several nodes. */
#ifndef EPX_GROUP_NET_H
#define EPX_GROUP_NET_H

#include "group/objects.h"

/* Collective, also when a rank fails. Does nothing on one node. */
epx_status group_net_open(struct epx_group *group);
/* Its parts, for several nodes: opens the proxies and fills the message for the others; connects, given all ranks'
 * messages, one after the other. */
size_t group_net_message_bytes(const struct epx_group *group);
/* Before the nodes are known. */
size_t group_net_message_most(const struct epx_group *group);
epx_status group_net_prepare(struct epx_group *group, void *message);
epx_status group_net_connect(struct epx_group *group, const void *all, size_t stride);
/* EPX_ERR_TIMEOUT: a proxy has not returned from the network's library; `proxies` and what they use must stay. */
epx_status group_net_close(struct epx_group *group);
/* EPX_OK when the own proxies make progress; otherwise EPX_ERR_TIMEOUT, and what they are blocked in. */
epx_status group_net_responsive(struct epx_group *group);
/* After a timeout: if an own proxy is blocked, error_read() says so from now on. */
void group_net_find_stuck(struct epx_group *group);
/* Before a group that works is destroyed: waits until no peer needs this rank's endpoints any more. */
void group_net_settle(struct epx_group *group);

#endif
