/* SPDX-License-Identifier: Apache-2.0 */
/* The collective steps of creation and recovery. `mine` is this rank's result so far: if any rank has failed, all
 * fail. */
#ifndef EPX_GROUP_HANDSHAKE_H
#define EPX_GROUP_HANDSHAKE_H

#include "group/objects.h"

/* Also finds the nodes, and makes the group's key. */
epx_status handshake_compare(struct epx_group *group, epx_status mine);
epx_status handshake_heaps(struct epx_group *group, epx_status mine);
epx_status handshake_ready(struct epx_group *group, epx_status mine);
/* *flag is 1 afterwards if it was on any rank. */
epx_status handshake_any(struct epx_group *group, epx_status mine, int *flag);
/* With enable_mask: prepares how ranks find each other later, when some have ended. */
epx_status handshake_membership(struct epx_group *group);
/* An all-gather of all ranks; during recovery, of the remaining ranks: the others' parts are zero. */
epx_status handshake_allgather(struct epx_group *group, const void *send, void *recv, size_t bytes);
/* Maps the memory of ranks whose process has changed since (group->mapped), also in the tables of kernels. */
epx_status handshake_heaps_again(struct epx_group *group);
/* The group's key, from group->seed and the secret of the job. */
epx_status handshake_make_key(struct epx_group *group, const uint8_t *secret);
/* 32 bytes that only the ranks of this group know; NULL: nobody proves anything. */
const uint8_t *handshake_key(const struct epx_group *group);
/* How long this rank may take between two steps: its peers must still be waiting when it reports why it failed. */
int handshake_step_ms(const struct epx_group *group);

#endif
