/* SPDX-License-Identifier: Apache-2.0 */
/* What ranks must agree on in one operation (struct signature) is compared by every reader, before it reads rows. */
#ifndef EPX_KERNEL_SIGNATURE_H
#define EPX_KERNEL_SIGNATURE_H

#include "kernel/wait_word.h"

KFN int signature_differs(const struct signature *a, const struct signature *b)
{
    return a->hidden_bytes != b->hidden_bytes || a->dtype != b->dtype || a->scale_bytes != b->scale_bytes ||
           a->topk != b->topk || a->layout != b->layout || a->extra != b->extra;
}

/* `theirs` was read from a peer's heap. Non-zero: the operation has failed, and the report names the first field. */
KFN_STEP int check_signature(struct agent *ag, const struct group_dev *g, const struct signature *mine,
                             const struct signature *theirs, int phase, int peer)
{
    const int32_t *a = (const int32_t *)mine, *b = (const int32_t *)theirs;

    if (!signature_differs(mine, theirs))
        return 0;
    /* A peer masked this rank meanwhile, and `theirs` belongs to a later operation: that is no mismatch. */
    const uint64_t word = ag_load_acquire(&control_of(g, g->rank)->abort_word);
    if (word) {
        report_abort(ag, g, phase, 0, 0, word);
        return 1;
    }
    for (int i = 0; i < (int)(sizeof(*mine) / sizeof(*a)); i++) {
        if (a[i] != b[i]) {
            report(ag, g, KSTATUS_MISMATCH, phase, peer, a[i], b[i], i, 0);
            break;
        }
    }
    return fail_all(ag, g, KSTATUS_MISMATCH, phase, peer, 0, 0);
}

/* Does the signature of a rank of the node differ? With one lane rank by rank, else each lane looks at words. */
KFN int node_differs(struct agent *ag, const struct group_dev *g, const struct signature *mine, uint64_t descs,
                     size_t bytes)
{
    const int words = AG_ONE_LANE ? 1 : (int)(sizeof(*mine) / 4);
    int odd = 0;

    AG_EACH(ag, int, i, g->node_size *words)
    {
        const int r = node_rank(g, i / words);
        if (!is_active(g, r))
            continue;
        const int32_t *theirs = (const int32_t *)node_desc_at(g, r, descs, bytes);
        odd |= AG_ONE_LANE ? signature_differs(mine, (const struct signature *)theirs)
                           : theirs[i % words] != ((const int32_t *)mine)[i % words];
    }
    return ag_any(ag, odd);
}

/* The same for the descriptors of all ranks of the node, which open with a signature: one look by all lanes. */
KFN_STEP int check_node(struct agent *ag, const struct group_dev *g, const struct signature *mine, uint64_t descs,
                        size_t bytes, int phase)
{
    const int odd = node_differs(ag, g, mine, descs, bytes);

    for (int i = 0; odd && i < g->node_size; i++) {
        const int r = node_rank(g, i);
        if (is_active(g, r) &&
            check_signature(ag, g, mine, (const struct signature *)node_desc_at(g, r, descs, bytes), phase, r))
            return 1;
    }
    return 0;
}

#endif
