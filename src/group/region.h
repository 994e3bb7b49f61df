/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lending: rows that a caller has in memory of its own, rather than in the heap, are read by the other ranks of the node
 * where they are. What is lent is the whole allocation that holds them, a region.
 *
 *   lender                                     its board (host memory that the node maps)        peer
 *   a call is given rows in a region that is
 *   not lent: copies them, and
 *     offers the region  ------------------->  notice[i] = {offer, how to map it}, changes + 1
 *                                                                       next call: changes differ -> maps the region,
 *                                              the peer's board         writes its address into the table that its
 *     next call: all peers have taken[i]  <--  taken[lender][i] = offer kernels read
 *     posts "region i", and they read there
 *   the memory was freed, or the table is
 *   full: withdraws it  -------------------->  notice[i].offer = 0      next call: unmaps it
 *
 * Only its owner writes a board. Nobody waits for anybody: until the last peer has taken a region, rows in it are copied.
 * An allocation that took the place of a freed one has another number (device_ops.region_id), which is compared in every
 * call. A region whose rows are posted by a graph stays until its memory is freed.
 */
#ifndef EPX_GROUP_REGION_H
#define EPX_GROUP_REGION_H

#include "group/objects.h"

/* The own board and the table, before the heaps are exchanged. Nothing happens where nothing is to be lent. */
epx_status lend_create(struct epx_group *group);
void lend_destroy(struct epx_group *group);
/* What peers need to map the own board; 0 bytes: there is none. */
struct heap_export lend_board(const struct epx_group *group);
/* Maps the board of a rank of the node. A rank whose board cannot be mapped takes nothing, so that nothing is lent. */
void lend_meet(struct epx_group *group, int rank, const struct heap_export *board);
/* Who is a member has changed: after lend_meet for all ranks, and when the group goes on with others. */
void lend_members(struct epx_group *group);
/* For kernels: struct group_dev.lent. */
const uint64_t *lend_table(const struct epx_group *group);

/* In every call: takes what peers offer. */
void lend_look(struct epx_group *group, struct device_stream *stream);
/* The number (from 1 on) of the region that holds [data, data + bytes), if all peers have it, and the offset in it; else 0,
 * and the region is offered. */
int lend_find(struct epx_group *group, const void *data, uint64_t bytes, struct device_stream *stream,
              uint64_t *offset);

#endif
