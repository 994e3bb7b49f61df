/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a compilation of the kernels knows in advance. One source gives several flavours of a kernel, and a launch takes
 * the smallest that serves (device/gpu/launch.c): code runs once per launch and comes from memory line by line, so that
 * code which is there but not used takes time too.
 *
 *   FLAVOUR_ONE_NODE   1: all ranks are in one node, and none is ever masked
 *   FLAVOUR_MARKS      0: nothing is traced (device/gpu/marks.cuh)
 */
#ifndef EPX_KERNEL_FLAVOUR_H
#define EPX_KERNEL_FLAVOUR_H

#include "kernel/agent.h"

#ifndef FLAVOUR_ONE_NODE
#define FLAVOUR_ONE_NODE 0
#endif

/* Does the group have several nodes? */
KFN int has_nodes(const struct group_dev *g)
{
    return !FLAVOUR_ONE_NODE && g->nnodes > 1;
}

/* May ranks be masked? */
KFN int has_masks(const struct group_dev *g)
{
    return !FLAVOUR_ONE_NODE && g->enable_mask;
}

/* Is this rank not masked? */
KFN int is_active(const struct group_dev *g, int rank)
{
    return FLAVOUR_ONE_NODE || g->mask[rank];
}

/* Is it of this node? */
KFN int is_local(const struct group_dev *g, int rank)
{
    return FLAVOUR_ONE_NODE || g->heap[rank] != NULL;
}

/* Low latency: is what the network reads and writes in memory of its own? */
KFN int ll_split(const struct group_dev *g)
{
    return !FLAVOUR_ONE_NODE && g->ll.split;
}

#endif
