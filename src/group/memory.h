/* SPDX-License-Identifier: Apache-2.0 */
/* The group's device memory, and memory that host and device share. */
#ifndef EPX_GROUP_MEMORY_H
#define EPX_GROUP_MEMORY_H

#include "group/objects.h"

/* Device memory of this rank alone, by the caller's functions if it gave any; zeroed, 256-byte aligned. */
epx_status group_mem_alloc(struct epx_group *group, size_t bytes, void **ptr);
void group_mem_free(struct epx_group *group, void *ptr);

epx_status group_device_alloc(struct epx_group *group);
/* Once the heaps of the node are mapped. */
epx_status group_device_fill(struct epx_group *group);
void group_device_destroy(struct epx_group *group);
/* Writes mask, members and relays to device memory as group->map.out has them. */
epx_status group_device_members(struct epx_group *group);
/* Stores the group's deadline where kernels read it; none runs. */
epx_status group_device_timeout(struct epx_group *group);
/* Where the heaps of the node are mapped. */
epx_status group_device_heaps(struct epx_group *group);
/* After group_net_open, or group_net_close: the rings, or none, for kernels. */
epx_status group_device_rings(struct epx_group *group);

#endif
