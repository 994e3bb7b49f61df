/* SPDX-License-Identifier: Apache-2.0 */
/* Low-latency combine: where slots and descriptors are. The protocol is drawn in ll_combine.h. */
#ifndef EPX_KERNEL_LL_COMBINE_SLOT_H
#define EPX_KERNEL_LL_COMBINE_SLOT_H

#include "kernel/sync.h"

/* Do rows travel as LogFMT? A device that has a kernel of each kind (KERNEL_LL_COMBINE_LOGFMT) knows it in advance. */
#ifndef LC_LOGFMT
#define LC_LOGFMT(p) ((p)->logfmt)
#endif

KFN int lc_nodes(const struct ll_combine_params *p)
{
    return !FLAVOUR_ONE_NODE && p->nodes;
}

KFN_STEP uint64_t lc_slot_offset(const struct group_dev *g, uint64_t epoch)
{
    return g->ll.cslots + (uint64_t)slot_of(g, epoch) * g->ll.cslot_stride;
}

KFN_STEP char *lc_slot(const struct group_dev *g, int rank, uint64_t epoch)
{
    return heap_at(g, rank, lc_slot_offset(g, epoch));
}

/* The same of this rank where the network reads and writes: the descriptor, those of other nodes, their rows. */
KFN_STEP uint64_t lc_net_slot(const struct group_dev *g, uint64_t epoch)
{
    return g->ll.net_cslots + (uint64_t)slot_of(g, epoch) * g->ll.net_cslot_stride;
}

KFN_STEP char *lc_net_rows(const struct group_dev *g, uint64_t epoch)
{
    return net_at(g, lc_net_slot(g, epoch) + g->ll.net_crows);
}

/* The descriptor of rank d: in its heap, or put here. */
KFN_STEP const struct lc_desc *lc_desc_of(const struct group_dev *g, int d, uint64_t epoch)
{
    if (is_local(g, d))
        return (const struct lc_desc *)lc_slot(g, d, epoch);
    return (const struct lc_desc *)net_at(g, lc_net_slot(g, epoch) + g->ll.net_cdescs) + g->recv_index_of[d];
}

#if AG_STAGED
/* Between nodes the descriptors of the node are copied where every agent reads them: the tables of routing, which a
 * combine does not need. In a heap that a GPU has across a bus, the loads of all agents would come one after the
 * other. */
KFN int lc_has_copies(const struct ll_combine_params *p)
{
    return lc_nodes(p) && p->g->max_agents * (p->g->experts + 2 * p->g->nranks) * 4 >= p->g->nranks * 64;
}

/* One agent; a barrier follows. */
KFN void lc_fetch_descs(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    const int words = (int)(sizeof(struct lc_desc) / 8);

    AG_EACH(ag, int, i, lc_has_copies(p) ? g->nranks *words : 0)
    {
        if (is_local(g, i / words) && is_active(g, i / words))
            ((uint64_t *)g->tables)[i] = ((const uint64_t *)lc_desc_of(g, i / words, epoch))[i % words];
    }
    ag_sync(ag);
}
#endif

/* The same once lc_data() has waited for it. */
KFN const struct lc_desc *lc_desc_copy(const struct ll_combine_params *p, int d, uint64_t epoch)
{
#if AG_STAGED
    if (lc_has_copies(p) && is_local(p->g, d))
        return (const struct lc_desc *)p->g->tables + d;
#endif
    return lc_desc_of(p->g, d, epoch);
}

#endif
