/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Region sharing: the other ranks of the node read rows in a caller's own memory in place, rather than from the heap.
 * A region is the whole allocation that holds the rows. Its owner exports it; peers import it (map it).
 *
 *   exporting rank                             its directory (host memory mapped by the node)    peer
 *   a call is given rows in a region that is
 *   not exported: copies them, and
 *     exports the region  ------------------>  slot[i] = {generation, how to map it}, changes + 1
 *                                                                       next call: changes differ -> imports the region
 *                                              the peer's directory     and writes its address into the table that its
 *     next call: all peers have imported it <- imported[rank][i] =      kernels read
 *     passes "region i", and they read there            generation
 *   the memory was freed, or all slots are
 *   used: withdraws the export  ----------->  slot[i].generation = 0    next call: unmaps it
 *
 * Only its owner writes a directory. Rows in a region are copied until the last peer has imported it. No rank waits for
 * that, but in a capture of a graph, and there not for long.
 * An allocation that replaces a freed one at the same address has another id (device_ops.region_id), which is
 * compared in every call. Memory that a framework allocates while it captures a graph is exported and imported during
 * the capture, within the first call that is given it: all of the graph's operations read it in place. A region whose
 * rows a captured graph reads stays exported until its memory is freed.
 */
#ifndef EPX_GROUP_REGION_H
#define EPX_GROUP_REGION_H

#include "group/objects.h"

/* Allocates the own directory and the kernels' table. Called before heaps are exchanged. Does nothing where regions are
 * not shared (EPX_REGISTER, or a device that cannot). */
epx_status regions_create(struct epx_group *group);
void regions_destroy(struct epx_group *group);
/* What peers need to map the own directory; 0 bytes: there is none. */
struct heap_export regions_directory(const struct epx_group *group);
/* Maps the directory of a rank of the node. If it cannot be mapped, this rank exports nothing. */
void regions_add_peer(struct epx_group *group, int rank, const struct heap_export *directory);
/* Another process has the place of a rank that was added: its directory takes the place of the old one. */
void regions_replace_peer(struct epx_group *group, int rank, const struct heap_export *directory);
/* Membership has changed: call it after regions_add_peer for all ranks, and whenever ranks are left out or come
 * back. */
void regions_update_members(struct epx_group *group);
/* The table for kernels: struct group_dev.regions. */
const uint64_t *regions_table(const struct epx_group *group);

/* In every call: imports what peers have exported, and unmaps what they have withdrawn. Does nothing in a capture. */
void regions_import(struct epx_group *group, struct device_stream *stream);
/* The same in a capture, and does nothing elsewhere: in calls with rows, after regions_find(). */
void regions_import_captured(struct epx_group *group, struct device_stream *stream);
/* If all peers have imported the region that holds [data, data + bytes): its slot + 1, and the offset in it.
 * Otherwise 0, and the region is exported. */
int regions_find(struct epx_group *group, const void *data, uint64_t bytes, struct device_stream *stream,
                 uint64_t *offset);

#endif
