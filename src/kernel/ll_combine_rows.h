/* SPDX-License-Identifier: Apache-2.0 */
/* Low-latency combine: the rows that a rank sends, and how one travels. The protocol is drawn in ll_combine.h. */
#ifndef EPX_KERNEL_LL_COMBINE_ROWS_H
#define EPX_KERNEL_LL_COMBINE_ROWS_H

#include "kernel/ll_combine_slot.h"
#include "kernel/ll_recv_half.h"
#include "kernel/rows.h"

/* A block: the rows of source s that are contiguous. EXPERT_MAJOR: one per local expert, RANK_MAJOR: one. */
struct lc_block {
    const char *rows; /* first one */
    uint64_t place;   /* of the first one in the receive buffer at s; the others follow */
    int n;
};

/* Two values a byte, a scale for each 16, and one for all (util/nvfp4.h). */
KFN size_t lc_nvfp4_bytes(int hidden)
{
    return up16((size_t)hidden / 2 + (size_t)hidden / 16 + sizeof(float));
}

/* From one row of a receive buffer to the next: rows that travel as they are touch, so that puts of neighbours
 * merge. */
KFN size_t lc_pitch(const struct ll_combine_params *p)
{
    if (p->nvfp4)
        return lc_nvfp4_bytes(p->hidden);
    return LC_LOGFMT(p) ? (size_t)p->g->ll.cpitch : up16((size_t)p->signature.hidden_bytes);
}

/* From the first receive row to that of a place: the halves (ll_recv_half.h) are apart for rows of any size. */
KFN uint64_t lc_row_at(const struct ll_combine_params *p, uint64_t place)
{
    const struct group_dev *g = p->g;
    const uint64_t half = (uint64_t)ll_recv_half_row(g, 1);

    if (!ll_has_halves(g) || place < half || INJECT_BUG(BUG_HALF_ROWS, 1, 0))
        return place * lc_pitch(p);
    return half * g->ll.cpitch + (place - half) * lc_pitch(p);
}

KFN int lc_blocks(const struct ll_combine_params *p)
{
    return p->layout == LAYOUT_EXPERT_MAJOR ? p->g->local_experts : 1;
}

KFN struct lc_block lc_block_at(const struct ll_combine_params *p, int s, int l)
{
    const struct group_dev *g = p->g;
    const struct handle_dev *h = p->h;
    const int64_t R = g->nranks;
    struct lc_block b;

    if (p->layout == LAYOUT_EXPERT_MAJOR) {
        const int32_t first = h->begin[l * R + s];
        b.n = h->count[l * R + s];
        b.rows = p->tokens + l * p->outer_stride + first * p->stride;
        b.place = (uint64_t)h->source[l * R + s];
    } else {
        b.n = h->count[s];
        b.rows = p->tokens + s * p->outer_stride;
        b.place = (uint64_t)h->source[s];
    }
    return b;
}

/* Writes one row as it travels; returns its bytes. */
KFN uint32_t lc_write_row(struct agent *ag, const struct ll_combine_params *p, char *to, const char *row)
{
    if (LC_LOGFMT(p))
        return (uint32_t)ag_logfmt_encode(ag, to, row, p->hidden);
    if (p->nvfp4) {
        const int64_t at = row - p->tokens, outer = at / p->outer_stride, inner = at % p->outer_stride / p->stride;
        return (uint32_t)ag_nvfp4_encode(ag, to, row, p->hidden, p->row_scales[outer * p->row_scale_rows + inner]);
    }
    ag_copy(ag, to, row, (size_t)p->signature.hidden_bytes);
    return (uint32_t)p->signature.hidden_bytes;
}

#define LC_SIGNAL_PAUSE_NS 2000 /* between two looks at a signal of the caller's, which rings no bell */

/* The row of expert l at `row` is there: the caller's kernel has said so. Non-zero: failed. */
KFN_STEP int lc_wait_row(struct agent *ag, const struct ll_combine_params *p, int l, const char *row)
{
    const struct group_dev *g = p->g;
    const uint64_t start = ag_now(ag);
    const int64_t number = (row - p->tokens - l * p->outer_stride) / p->stride;
    uint32_t *word = p->signals + l * p->signal_stride + (p->signal_rows ? number / p->signal_rows : 0), seen;

    /* Acquires what the caller wrote before it set the word. */
    while ((seen = ag_fetch_add(ag, word, 0)) < p->signal_value) {
        /* Waits compare words by their difference: this one ends by the pause or by the abort word. */
        const uint64_t never = ag_load_acquire(&g->state->barrier) + INT64_MAX;
        const int ended = ag_wait_ge(ag, &g->state->barrier, never, LC_SIGNAL_PAUSE_NS) == WAIT_ABORTED;
        if (ag_any(ag, ended || ag_now(ag) - start > g->timeout_ns))
            return wait_failed(ag, g, ended ? WAIT_ABORTED : WAIT_TIMEOUT, PHASE_LC_SIGNAL, -1, -1, p->signal_value,
                               seen);
    }
    return 0;
}

#endif
