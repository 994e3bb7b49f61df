/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that other processes have mapped is freed when they have unmapped it, and not before: freeing exported GPU
 * memory earlier is undefined, and its address may be another allocation's by then.
 *
 *   importer p                                   exporter r
 *   its group ends: ledger_closing(1)            its group ends: giveback_keep()
 *   unmaps the heap of r
 *   its word for r: closed, in a file of p's ->  giveback_sweep(): all importers' words say so: frees the heap
 *   its process ends                 --------->  its pidfd is readable: that counts as the word
 *
 * Who tells whom: each importer each exporter, by one word in a memory file (a ledger) of which only the importer
 * writes and which both have mapped since the group was created. A mapping outlives the file's owner, and the group.
 * When: after the unmapping has returned. On a GPU that waits for what the process has queued; so it is done when the
 * group ends only where no other rank of the group is a thread of this process, and otherwise, as the freeing itself,
 * when the process has no such group left (device_ops.release).
 * The end of a group is no barrier: a rank says its own words first, and then looks for those of the others, for
 * GIVEBACK_WAIT_MS, and longer only for ranks whose word is that they are ending the group too: unmapping may take
 * seconds, where many gigabytes of the host's memory are pinned. What is not closed then is kept, with a line in the
 * log that names a rank. It is looked at again whenever a group is created or ends. When the last group that has a
 * ledger ends, everything is freed.
 *
 *   a rank is dead       the system has unmapped all that it had: its pidfd, opened while the ranks met, says so
 *   stopped, or late     its word comes when it goes on; until then the memory is kept
 *   masked, left out     as any other: what counts is its process, not whether the group counts on it
 *   replaced by a join   the old process is dead; the new one has a ledger of its own (ledger_set_peer())
 *   not to be seen       no pidfd (another PID namespace, an old kernel): only its word counts
 *   without a ledger     EPX_GIVEBACK=0 there, or a file that cannot be mapped: kept until no group is left
 *   creation fails       who has mapped what is in doubt (ledger_doubt()): kept until no group is left
 */
#ifndef EPX_GROUP_GIVEBACK_H
#define EPX_GROUP_GIVEBACK_H

#include "device/device.h"

enum { GIVEBACK_WAIT_MS = 20 };

struct ledger;

/* How peers map a ledger; all zero: there is none. Goes through the bootstrap as it is. */
struct ledger_address {
    uint64_t address;
    int64_t token;
    uint8_t file[16];
};

/* The ledger of this rank. */
epx_status ledger_create(int nranks, int rank, struct ledger **ledger);
/* NULL: none. */
struct ledger_address ledger_address(const struct ledger *ledger);
/* While the peer is alive: as the ranks meet. Of a rank that was there before: another process has it from now on, and
 * that has mapped nothing of what was exported before. */
void ledger_set_peer(struct ledger *ledger, int rank, int64_t pid, const struct ledger_address *address);
/* 1: others may have mapped the heap of whom this rank does not know. */
void ledger_doubt(struct ledger *ledger, int doubt);

/* 1: the group of this rank is ending, and it unmaps the heaps of others soon. 0: it does not, after all. */
void ledger_closing(struct ledger *ledger, int closing);
/* The group has ended and unmapped all heaps of others, or has freed them for ops->release() to unmap. Takes the ledger
 * and the heap, which may be empty. Ranks that are ending the group too have closing_ms to unmap it. */
void giveback_keep(struct ledger *ledger, const struct device_ops *ops, const struct heap *heap, int closing_ms);
/* Frees what no peer has mapped. How many heaps are still kept. */
int giveback_sweep(void);

#endif
