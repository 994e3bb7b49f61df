/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Abort words: one in each rank's heap (struct control). Whoever fails writes the words of its node, and sends the same to
 * other nodes by put; every wait of a kernel ends when its own word is set.
 */
#ifndef EPX_GROUP_ABORT_H
#define EPX_GROUP_ABORT_H

#include "group/objects.h"

/* The own word; 0 = no operation was aborted. */
uint64_t abort_word(struct epx_group *group);
/* This rank has failed: aborts what it and the other ranks of its node wait for. */
void group_abort(struct epx_group *group, int status);
/* A rank of another node has failed: aborts this rank only, because that rank tells all others too. */
void group_aborted_by(struct epx_group *group, int rank, int status);
/* The group continues without that rank of the node. If it is late rather than dead, it must not take data that it finds
 * from now on for data of its own operation. */
void group_abort_left_out(struct epx_group *group, int rank);
/* EPX_OK unless the group has failed: then its error is returned again, with its message. */
epx_status group_usable(struct epx_group *group);

#endif
