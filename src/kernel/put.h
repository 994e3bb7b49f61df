/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Puts to ranks of other nodes: commands for the proxies, gathered up to 32 for one push.
 *
 *   kernel                    ring              proxy                      network            peer's proxy
 *   put(), put_flush()  --->  16-byte commands  merge, window, post  --->  write + immediate  counter += n
 */
#ifndef EPX_KERNEL_PUT_H
#define EPX_KERNEL_PUT_H

#include "kernel/agent.h"
#include "kernel/command.h"
#include "kernel/flavour.h"
#include "kernel/ring.h"

struct put_batch {
    struct command_set set;
    int n, ring;
    int failed; /* 1 + the first ring that took a push no more; 0 = none */
};

KFN char *heap_at(const struct group_dev *g, int rank, uint64_t offset)
{
    return (char *)((uintptr_t)g->heap[rank] + offset); /* of struct ht_dispatch_params.own: anywhere */
}

/* What the ranks of the node may read `offset` bytes into the heap of one of them (`in` 0), or into the region in slot
 * `in` - 1 that it exports (group/region.h). */
KFN const char *reach_at(const struct group_dev *g, int rank, int32_t in, uint64_t offset)
{
    if (in == 0)
        return heap_at(g, rank, offset);
    return (const char *)(uintptr_t)(g->regions[rank * REGION_SLOTS + in - 1] + offset);
}

/* Where the network of this rank reads and writes. */
KFN char *net_at(const struct group_dev *g, uint64_t offset)
{
    return g->net + offset;
}

/* The ring, and so the proxy, of puts with this counter to a rank of another node, and from it. */
KFN int ring_of(const struct group_dev *g, int peer, uint32_t counter)
{
    return ROUTE_RING(g->routes[peer], counter, g->nrings);
}

KFN void put_begin(struct put_batch *batch)
{
    batch->n = 0;
    batch->ring = 0;
    batch->failed = 0;
}

/* Non-zero: the ring stayed full for a whole deadline, or the group has failed. */
KFN_STEP int put_flush(struct agent *ag, const struct group_dev *g, struct put_batch *batch)
{
    /* Each push into a ring that stays full would wait for a whole deadline. */
    if (batch->n && !batch->failed &&
        ag_push(ag, &g->rings[batch->ring], command_set_list(&batch->set), batch->n) != WAIT_OK)
        batch->failed = batch->ring + 1;
    batch->n = 0;
    return batch->failed;
}

/* Offsets (net_at) and bytes are multiples of 16; target is in the peer's memory. The counter goes up by one there. */
KFN_STEP void put(struct agent *ag, const struct group_dev *g, struct put_batch *batch, int peer, uint32_t counter,
                  uint64_t source, uint64_t target, uint32_t bytes)
{
    const int ring = ring_of(g, peer, counter);

    if (batch->n == RING_MAX_PUSH || (batch->n && batch->ring != ring))
        put_flush(ag, g, batch);
    batch->ring = ring;
    command_set_put(ag, &batch->set, batch->n++, command_pack((uint32_t)peer, counter, source, target, bytes));
    if (ag_leader(ag)) {
        ag_add_stat(&g->pushed[peer], 1);
        ag_add_stat(&g->pushed_all[ring], 1);
    }
}

/*
 * The abort word to ranks of other nodes, through a word of each ring, which has room when the ring has none. Nothing
 * is written into their heaps, which they read at any time: an alarm says what the word says, and their proxies store
 * the word. Who noticed tells all ranks. Who heard of it tells the rank that relays for it in each node: should the
 * proxy of the first be stuck, its word still reaches all nodes.
 */
KFN_STEP void put_abort(struct agent *ag, const struct group_dev *g, uint64_t word)
{
    struct control *own = (struct control *)g->heap[g->rank];
    const uint64_t alarm = ALARM_SET | (ABORT_RANK(word) == g->rank ? ALARM_ALL : 0) | alarm_of_abort(word);

    if (!has_nodes(g))
        return;
    if (ag_leader(ag))
        ag_store_release(&own->abort_told, word); /* pairs with the acquire in give_up(), of another agent */
    for (int i = 0; i < g->nrings; i++) {
        if (ag_leader(ag) && !ag_peek(g->rings[i].alarm))
            ag_store_release(g->rings[i].alarm, alarm); /* pairs with the acquire in alarm_waits() */
        ag_sync(ag);
        ag_ring(ag, g->rings[i].bell);
    }
}

#endif
