/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where the words are through which ranks wait for each other: control blocks, signals, counters and aggregates.
 *
 *   signal of a rank of the node    the own heap: signals[kind][slot][from], stored by `from`
 *   with AG_NODE_WORD               the heap of `from`: signals[kind][slot][from], stored by `from`
 *   ... and of all of them          the heap of the node's first rank: signals[kind][slot][first].all, by the last one
 *   of a rank elsewhere             counters[kind][slot][from], counted by the own proxy (proxy/count.c)
 *   of all ranks of a ring          aggregates[ring][kind][slot], likewise: the least counter, or the sum of rows
 */
#ifndef EPX_KERNEL_SIGNAL_WORDS_H
#define EPX_KERNEL_SIGNAL_WORDS_H

#include "kernel/flavour.h"
#include "kernel/put.h"

KFN struct control *control_of(const struct group_dev *g, int rank)
{
    return (struct control *)g->heap[rank];
}

/* A low-latency epoch uses slot (e - 1) % W, and is that slot's ((e - 1) / W + 1)-th. High throughput has one operation
 * of a kind in flight at a time: slot 0, and the epoch itself. */
KFN_STEP int slot_of_many(const struct group_dev *g, uint64_t epoch)
{
    return (int)((epoch - 1) % (uint64_t)g->inflight);
}

KFN_STEP uint64_t lap_of_many(const struct group_dev *g, uint64_t epoch)
{
    return (epoch - 1) / (uint64_t)g->inflight + 1;
}

/* Two slots are what most groups have, and a GPU's division of 64 bits is a hundred instructions. */
KFN int slot_of(const struct group_dev *g, uint64_t epoch)
{
    return g->inflight == 2 ? (int)((epoch - 1) & 1) : slot_of_many(g, epoch);
}

KFN uint64_t lap_of(const struct group_dev *g, uint64_t epoch)
{
    return g->inflight == 2 ? (epoch + 1) >> 1 : lap_of_many(g, epoch);
}

/* The i-th rank of this node. Where all ranks are, nothing is loaded to know it. */
KFN int node_rank(const struct group_dev *g, int i)
{
    return !has_nodes(g) ? i : g->node_ranks[i];
}

KFN size_t signal_index(const struct group_dev *g, int kind, int slot, int from)
{
    return ((size_t)kind * (size_t)g->sig_slots + (size_t)slot) * (size_t)g->nranks + (size_t)from;
}

/* The word in `owner`'s heap that `from`, of the same node, writes. */
KFN_STEP uint64_t *signal_at(const struct group_dev *g, int owner, int kind, int slot, int from)
{
    return &((struct signal *)heap_at(g, owner, g->signals))[signal_index(g, kind, slot, from)].value;
}

/* Does one word say that all ranks of the node have given a signal? With masks each rank may count on others. */
KFN int has_node_word(const struct group_dev *g)
{
    return AG_NODE_WORD(g) && !has_masks(g);
}

KFN struct signal *node_signal(const struct group_dev *g, int kind, int slot)
{
    const int first = node_rank(g, 0);

    return &((struct signal *)heap_at(g, first, g->signals))[signal_index(g, kind, slot, first)];
}

/* Where `rank`, of this node, has its descriptor of so many bytes. With one word for the node all are in the heap of
 * the first rank, one behind the other: whoever reads them all reads a few pages, not one of each rank. */
KFN char *node_desc_at(const struct group_dev *g, int rank, uint64_t descs, size_t bytes)
{
    return has_node_word(g) ? heap_at(g, node_rank(g, 0), descs + (uint64_t)rank * bytes) : heap_at(g, rank, descs);
}

/* Where this rank sees the signal of `from`, wherever that is. */
KFN_STEP const uint64_t *signal_from(const struct group_dev *g, int kind, int slot, int from)
{
    return is_local(g, from) ? signal_at(g, has_node_word(g) ? from : g->rank, kind, slot, from)
                             : &g->counters[signal_index(g, kind, slot, from)];
}

/* What the proxy of ring i has of all its peers. */
KFN size_t aggregate_index(const struct group_dev *g, int ring, int kind, int slot)
{
    return ((size_t)ring * SIG_COUNT + (size_t)kind) * (size_t)g->sig_slots + (size_t)slot;
}

enum scope { SCOPE_ALL, SCOPE_NODE, SCOPE_REMOTE };

KFN int in_scope(const struct group_dev *g, enum scope scope, int rank)
{
    if (!is_active(g, rank))
        return 0;
    return scope == SCOPE_ALL || (scope == SCOPE_NODE) == is_local(g, rank);
}

KFN int scope_has_rings(const struct group_dev *g, enum scope scope)
{
    return has_nodes(g) && scope != SCOPE_NODE;
}

#endif
