/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the mask, or masks more ranks, in stream order. A rank that was masked meanwhile stays masked: it has missed
 * operations. */
#ifndef EPX_KERNEL_MASK_H
#define EPX_KERNEL_MASK_H

#include "kernel/sync.h"

KFN void kernel_mask(struct agent *ag, const struct mask_params *p)
{
    const struct group_dev *g = p->g;

    AG_EACH_ALL(ag, int, r, g->nranks)
    {
        if (p->update && !(p->bits[r / 8] >> (r % 8) & 1))
            ag_store_release32((uint32_t *)&g->mask[r], 0); /* pairs with mask_read() of the proxies */
        if (p->query)
            p->query[r] = p->hidden && !g->members[r] ? 1 : g->mask[r];
    }
    /* Its slots at other ranks are free again: no rank waits for its reads. */
    if (p->staged && ag_index(ag) == 0)
        signal_peers(ag, g, SCOPE_ALL, p->staged_kind, slot_of(g, p->staged->state->epoch),
                     lap_of(g, p->staged->state->epoch));
}

#endif
