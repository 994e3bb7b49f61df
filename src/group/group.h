/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EPX_GROUP_GROUP_H
#define EPX_GROUP_GROUP_H

#include "group/objects.h"

/* EPX_OK unless the group has failed: a fatal error is returned again, with its message. */
epx_status group_usable(struct epx_group *group);
/* The records of errors are empty again. Nothing may run that would write them. */
epx_status errors_forget(struct epx_group *group);
/* Collective over those that go on: epochs, signals and error state start over from one common point (rejoin.c).
 * `unmask`: those that are masked too, if they are not gone. */
epx_status group_rejoin(struct epx_group *group, int unmask);
/* The group's device memory and its peers' heaps (group_memory.c). */
epx_status group_device_create(struct epx_group *group);
void group_device_destroy(struct epx_group *group);
/* Mask, members and relays in device memory as group->map.out has them. */
epx_status group_device_members(struct epx_group *group);
/* Proxies, where ranks are on several nodes (group_net.c). Opening is collective, also when a rank fails. */
epx_status group_net_open(struct epx_group *group);
/* EPX_ERR_TIMEOUT: a proxy has not come back from the network's library; `proxies` and what they use must stay. */
epx_status group_net_close(struct epx_group *group);
/* EPX_OK when the own proxies make turns; else EPX_ERR_TIMEOUT, and what they do instead. */
epx_status group_net_answers(struct epx_group *group);
/* How long this rank may take between two meetings: those that wait for it shall still be told why it failed. */
int group_meeting_ms(const struct epx_group *group);
/* Before the end of a group that works: until no peer misses it. */
void group_net_settle(struct epx_group *group);
/* The group has failed: wakes and ends what this rank and those of its node wait for (error.c). */
void group_abort(struct epx_group *group, int status);
/* A rank of another node has failed: the same for this rank alone, for that rank tells all others too. */
void group_aborted_by(struct epx_group *group, int rank, int status);
/* The group goes on without that rank of the node: should it be late rather than dead, it must not take what it finds from
 * now on for its own operation's. */
void group_tell_left_out(struct epx_group *group, int rank);
/* After group_net_open: tells kernels of the rings. */
epx_status group_device_rings(struct epx_group *group);
/* Collective steps of creation that exchange what ranks must know (group_meet.c). */
/* Also finds the nodes. */
epx_status meet_compare(struct epx_group *group, epx_status mine);
epx_status meet_heaps(struct epx_group *group, epx_status mine);
epx_status meet_ready(struct epx_group *group, epx_status mine);
/* *flag is 1 afterwards if it was on any rank. */
epx_status meet_any(struct epx_group *group, epx_status mine, int *flag);
/* Where heaps lie (group_heap.c): after the device is open; and once the nodes are known, collectively. */
epx_status group_heap_begin(struct epx_group *group);
epx_status group_heap_settle(struct epx_group *group);
/* With enable_mask: how ranks meet later, when some may be gone. */
epx_status meet_membership(struct epx_group *group);
/* An all-gather of all ranks, or while the group starts over without some, of the others: zeros stand for those. */
epx_status meet_gather(struct epx_group *group, const void *send, void *recv, size_t bytes);

#endif
