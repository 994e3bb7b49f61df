/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EPX_GROUP_CREATE_H
#define EPX_GROUP_CREATE_H

#include "group/objects.h"

/* Collective. The group is registered (group/registry.h). */
epx_status group_create(const epx_bootstrap *bootstrap, const epx_group_config *config, struct epx_group **group);
/* The steps of it that a process takes alone, also one that joins (joiner.c). A group without rank; then its settings
 * and device; then, once the nodes are known, its heap, streams and tables for kernels. */
epx_status group_new(const char *call, struct epx_group **group);
/* From group->map.node_of. */
void group_take_nodes(struct epx_group *group);
epx_status group_prepare(struct epx_group *group, const epx_group_config *config);
epx_status group_open_heap(struct epx_group *group);
epx_status group_open_tables(struct epx_group *group);
/* Frees whatever there is. */
epx_status group_free(struct epx_group *group);
/* Waits for all queued work and destroys the caller's streams. Fails, and changes nothing, inside an epx_stream_call
 * on one of the group's own streams. */
epx_status group_drain(struct epx_group *group);
/* After group_drain(), and when no handle is left. EPX_ERR_TIMEOUT: the group is gone, but a thread has not returned
 * from the network's library, and the memory that it may use stays allocated. */
epx_status group_destroy(struct epx_group *group);

#endif
