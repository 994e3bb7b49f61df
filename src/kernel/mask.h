/* SPDX-License-Identifier: Apache-2.0 */
/* Reads, or masks more, in stream order. A rank that was masked meanwhile stays so: it has missed operations. */
#ifndef EPX_KERNEL_MASK_H
#define EPX_KERNEL_MASK_H

#include "kernel/sync.h"

KFN void kernel_mask(struct agent *ag, const struct mask_params *p)
{
    const struct group_dev *g = p->g;

    AG_EACH_ALL(ag, int, r, g->nranks)
    {
        if (p->update)
            g->mask[r] &= p->bits[r / 8] >> (r % 8) & 1;
        if (p->query)
            p->query[r] = g->mask[r];
    }
}

#endif
