/* SPDX-License-Identifier: Apache-2.0 */
/* Low-latency dispatch: the slot of a rank, which the ranks of its node read. The protocol is in ll_dispatch.h. */
#ifndef EPX_KERNEL_LL_SLOT_H
#define EPX_KERNEL_LL_SLOT_H

#include "kernel/route.h"
#include "kernel/rows.h"

/*
 * The tables of a source as the ranks of its node see them. They end where the rows begin:
 *   ids[B*K] eidx[B*K] weights[B*K] pos[B] ecount[E] rcount[R] desc | rows
 * The address of the counts does not depend on the descriptor: both can be loaded at once.
 */
struct ll_view {
    char *start;
    struct ll_desc *desc;
    int32_t *ecount, *rcount, *ids, *eidx, *pos;
    float *weights;
    const int32_t *list; /* tokens for this rank */
    const char *rows;
};

KFN struct ll_view ll_view_at(const struct group_dev *g, char *rows, int ntokens, int topk)
{
    const size_t pairs = up16((size_t)ntokens * (size_t)topk * 4);
    struct ll_view v;
    char *at = rows - sizeof(struct ll_desc);

    v.desc = (struct ll_desc *)at;
    v.rcount = (int32_t *)(at -= up16((size_t)g->nranks * 4));
    v.ecount = (int32_t *)(at -= up16((size_t)g->experts * 4));
    v.pos = (int32_t *)(at -= up16((size_t)ntokens * 4));
    v.weights = (float *)(at -= pairs);
    v.eidx = (int32_t *)(at -= pairs);
    v.ids = (int32_t *)(at -= pairs);
    v.start = at;
    v.rows = rows;
    v.list = NULL;
    return v;
}

KFN_STEP uint64_t ll_slot_offset(const struct group_dev *g, uint64_t epoch)
{
    return g->ll.slots + (uint64_t)slot_of(g, epoch) * g->ll.slot_stride;
}

/* Of a rank of the node, as all below. */
KFN_STEP char *ll_rows_of(const struct group_dev *g, int rank, uint64_t epoch)
{
    return heap_at(g, rank, ll_slot_offset(g, epoch) + g->ll.rows);
}

KFN_STEP const struct ll_desc *ll_desc_of(const struct group_dev *g, int rank, uint64_t epoch)
{
    return (const struct ll_desc *)(ll_rows_of(g, rank, epoch) - sizeof(struct ll_desc));
}

/* Where the counts per expert are in the heap of each rank of the node. */
KFN uint64_t ll_counts_offset(const struct group_dev *g, uint64_t epoch)
{
    return ll_slot_offset(g, epoch) + g->ll.rows - sizeof(struct ll_desc) - up16((size_t)g->nranks * 4) -
           up16((size_t)g->experts * 4);
}

/* The tables of a rank, once its LL_DATA has arrived. *desc: its descriptor, which is loaded once. It may lie across a
 * bus, and a late rank may find it half changed. */
KFN struct ll_view ll_open(const struct group_dev *g, int rank, uint64_t epoch, struct ll_desc *desc)
{
    struct ll_view v;

    *desc = *ll_desc_of(g, rank, epoch);
    v = ll_view_at(g, ll_rows_of(g, rank, epoch), desc->ntokens, desc->signature.topk);
    v.desc = desc;
    v.rows = heap_at(g, rank, desc->rows);
    v.list = (const int32_t *)heap_at(g, rank, ll_slot_offset(g, epoch)) + (size_t)g->rank * (size_t)g->max_tokens;
    return v;
}

KFN struct ll_view ll_own_view(const struct ll_dispatch_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    return ll_view_at(g, ll_rows_of(g, g->rank, epoch), p->route.ntokens, p->route.topk_n);
}

#endif
