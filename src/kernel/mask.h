/* SPDX-License-Identifier: Apache-2.0 */
/* Small things in stream order. Reads, or masks more. A rank that was masked meanwhile stays so: it has missed operations. */
#ifndef EPX_KERNEL_MASK_H
#define EPX_KERNEL_MASK_H

#include "kernel/sync.h"

KFN void kernel_mask(struct agent *ag, const struct mask_params *p)
{
    const struct group_dev *g = p->g;

    AG_EACH_ALL(ag, int, r, g->nranks)
    {
        if (p->update && !(p->bits[r / 8] >> (r % 8) & 1))
            ag_store_release32((uint32_t *)&g->mask[r], 0);
        if (p->query)
            p->query[r] = g->mask[r];
    }
    /* Its slots elsewhere are free again: nobody shall wait for a reader that never comes. */
    if (p->staged && ag_index(ag) == 0)
        signal_peers(ag, g, SCOPE_ALL, p->staged_kind, slot_of(g, p->staged->state->epoch),
                     lap_of(g, p->staged->state->epoch));
}

#endif
