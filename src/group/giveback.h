/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that other processes have mapped is freed when they have unmapped it, and not before: freeing exported GPU
 * memory earlier is undefined, and its address may be another allocation's by then.
 *
 *   importer p                                   exporter r
 *   its group ends: unmaps the heap of r         its group ends: giveback_keep(), no wait
 *   closed[r] = 1, in a file of p's  --------->  giveback_sweep(): all importers' words are 1: frees the heap
 *   its process ends                 --------->  its pidfd is readable: that counts as the word
 *
 * Who tells whom: each importer each exporter, by one word in a memory file (a ledger) of which only the importer
 * writes and which both have mapped since the group was created. A mapping outlives the file's owner, and the group.
 * When: after the unmapping has returned. On a GPU that waits for what the process has queued; so it is done when the
 * group ends only where no other rank of the group is a thread of this process, and otherwise, as the freeing itself,
 * when the process has no group left.
 * Nobody waits for a word: what is not closed yet is kept, and looked at again whenever a group is created or ends.
 *
 *   a rank is dead       the system has unmapped all that it had: its pidfd, opened while the ranks met, says so
 *   stopped, or late     its word comes when it goes on; until then the memory is kept
 *   masked, left out     as any other: what counts is its process, not whether the group counts on it
 *   replaced by a join   the old process is dead; the new one has a ledger of its own (ledger_replace_peer())
 *   not to be seen       no pidfd (another PID namespace, an old kernel): only its word counts
 *   on another host      it maps no files: such a heap is kept until the process has no group left
 */
#ifndef EPX_GROUP_GIVEBACK_H
#define EPX_GROUP_GIVEBACK_H

#include "device/device.h"

struct ledger;

/* The ledger of this rank. */
epx_status ledger_create(int nranks, struct ledger **ledger);
/* How peers map it. */
struct heap_export ledger_export(const struct ledger *ledger);
/* While the peer is alive: as the ranks meet. A ledger that cannot be mapped: its rank's word never comes. */
void ledger_add_peer(struct ledger *ledger, int rank, const struct heap_export *export);
/* Another process has that rank from now on. It has mapped nothing of what was exported before. */
void ledger_replace_peer(struct ledger *ledger, int rank, const struct heap_export *export);
/* This rank has unmapped the heap of `exporter`, or has never mapped it. */
void ledger_closed(struct ledger *ledger, int exporter);
/* The group has not come to be: nobody has mapped anything of this rank. */
void ledger_destroy(struct ledger *ledger);

/* The group of rank `rank` has ended: calls release(context) once no peer has its memory mapped. Takes the ledger. */
void giveback_keep(struct ledger *ledger, int rank, void (*release)(void *context), void *context);
/* Releases what can be; `all`: everything, for the process has no group left. How many are still kept. */
int giveback_sweep(int all);

#endif
