/* SPDX-License-Identifier: Apache-2.0 */
/* Low-latency combine: where the rows of a token are, and their sum. The protocol is drawn in ll_combine.h. */
#ifndef EPX_KERNEL_LL_COMBINE_SUM_H
#define EPX_KERNEL_LL_COMBINE_SUM_H

#include "kernel/ll_combine_rows.h"

/* Where the row of (t, k) lands, for this rank as the source. */
KFN int64_t lc_place(const struct ll_combine_params *p, int d, int64_t i)
{
    const struct handle_dev *h = p->h;

    return p->layout == LAYOUT_EXPERT_MAJOR ? (int64_t)h->back[h->ids[i]] + h->eidx[i]
                                            : (int64_t)h->back[d] + h->ridx[i];
}

/* With masks: the others have gone on without this rank, which slept. What it has just read of them may be of a later
 * operation, and no address follows from it. They set its abort word first, so this operation is not good. On a GPU,
 * whose kernels only a debugger stops for a whole deadline, nobody looks: it would cost a load for each row. */
KFN int lc_is_stale(const struct group_dev *g)
{
    return AG_ONE_LANE && has_masks(g) && ag_look_behind(&control_of(g, g->rank)->abort_word) != 0;
}

/* Where the row of (t, k) is, for this rank as the source. What is in remote memory is loaded at once. */
KFN_STEP const char *lc_row(const struct ll_combine_params *p, uint64_t epoch, const struct lc_desc *desc, int d,
                            int64_t i)
{
    const struct group_dev *g = p->g;

    if (LC_LOGFMT(p) && !is_local(g, d))
        return lc_net_rows(g, epoch) + (size_t)g->packed_at[lc_place(p, d, i)] * 16;
    if (!is_local(g, d))
        return lc_net_rows(g, epoch) + lc_row_at(p, (uint64_t)lc_place(p, d, i));
    const int by_rank = p->layout == LAYOUT_RANK_MAJOR;
    const int l = by_rank ? 0 : p->h->ids[i] - d * g->local_experts;
    const int32_t *begin = (const int32_t *)(lc_slot(g, d, epoch) + g->ll.begin);
    const int32_t first = by_rank ? 0 : begin[l * g->nranks + g->rank]; /* only with `pulled`: else not used */
    const int32_t number = by_rank ? p->h->ridx[i] : p->h->eidx[i];
    const struct lc_desc at = *desc;
    if (!at.pulled || lc_is_stale(g))
        return lc_slot(g, g->rank, epoch) + g->ll.crows + lc_row_at(p, (uint64_t)lc_place(p, d, i));
    return reach_at(g, d, at.rows_in, at.rows) + (size_t)(by_rank ? g->rank : l) * at.outer_stride +
           (size_t)(first + number) * at.row_stride;
}

/* Has the caller taken (t, k) out since the dispatch? */
KFN int lc_taken_out(const struct ll_combine_params *p, int64_t i)
{
    if (!p->topk)
        return 0;
    return p->topk_idx64 ? ((const int64_t *)p->topk)[i] < 0 : ((const int32_t *)p->topk)[i] < 0;
}

/* Does (t, k) have a row of its own that comes back, and that counts? */
KFN_STEP int lc_returns(const struct ll_combine_params *p, int64_t i)
{
    const int32_t id = p->h->ids[i];

    if (id < 0 || !is_active(p->g, id / p->g->local_experts) || lc_taken_out(p, i))
        return 0;
    return p->layout == LAYOUT_EXPERT_MAJOR || p->h->rord[i] >= 0;
}

/* The next token's rows will be wanted soon. */
KFN void lc_look_ahead(const struct ll_combine_params *p, uint64_t epoch, int64_t t)
{
    const struct group_dev *g = p->g;
    const int K = p->h->state->topk;

    for (int64_t i = t * K; t < p->h->state->ntokens && i < (t + 1) * K; i++) {
        if (!lc_returns(p, i))
            continue;
        const int d = p->h->ids[i] / g->local_experts;
        AG_PREFETCH(lc_row(p, epoch, lc_desc_of(g, d, epoch), d, i));
    }
}

KFN const char *lc_bias(const struct ll_combine_params *p, int i, int t, int64_t at)
{
    return p->bias[i] ? p->bias[i] + t * p->bias_stride[i] + at : NULL;
}

/* How a row arrives. */
KFN int lc_format(const struct ll_combine_params *p, int pulled)
{
    if (LC_LOGFMT(p))
        return pulled ? ROWS_ROUNDED : ROWS_LOGFMT;
    return p->nvfp4 ? ROWS_NVFP4 : ROWS_PLAIN;
}

/* Channels [begin, end) of token t. Returns how many rows there were. */
KFN_STEP int lc_sum_token(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch, int t, int begin,
                          int end)
{
    const struct group_dev *g = p->g;
    const int K = p->h->state->topk, L = g->local_experts;
    const int weighted = p->layout == LAYOUT_EXPERT_MAJOR;
    const int64_t at = (int64_t)begin * (p->signature.hidden_bytes / p->hidden);
    struct sum_set set;
    int n = 0;

    sum_set_begin(&set);
    AG_ROUNDS(ag, int, k, K)
    {
        const int64_t i = (int64_t)t * K + k;
        const int returns = k < K && lc_returns(p, i);
        int before;
        const int all = ag_vote(ag, returns, &before);
        if (returns) {
            const int d = p->h->ids[i] / L;
            const struct lc_desc *desc = lc_desc_copy(p, d, epoch);
            const char *row = lc_row(p, epoch, desc, d, i);
            if (!is_local(g, d) || !desc->pulled)
                AG_SUMS(ag, g, d, row, LC_LOGFMT(p) ? 16 : lc_pitch(p));
            sum_set_offer(&set, n + before, LC_LOGFMT(p) ? row : row + at, weighted ? p->weights[i] : 1.0f,
                          lc_format(p, is_local(g, d) && desc->pulled));
        }
        n += all;
    }
    sum_set_settle(ag, &set);
    if (LC_LOGFMT(p))
        ag_reduce_logfmt(ag, p->out + t * p->out_stride + at, p->hidden, begin, end, &set, n, weighted,
                         lc_bias(p, 0, t, at), lc_bias(p, 1, t, at));
    else
        ag_reduce(ag, p->out + t * p->out_stride + at, p->dtype, end - begin, &set, n, weighted, lc_bias(p, 0, t, at),
                  lc_bias(p, 1, t, at));
    return n;
}

#define LC_SLICE 1024 /* channels: least that is worth an agent of its own */

/* With more agents than tokens each token is cut into slices. LogFMT rows are not by a single lane: it would have to
 * find each block's place anew. Nor are NVFP4 rows. */
KFN int lc_slices(struct agent *ag, const struct ll_combine_params *p)
{
    const int tokens = p->h->state->ntokens > 0 ? p->h->state->ntokens : 1;
    const int most = p->nvfp4 || (LC_LOGFMT(p) && AG_ONE_LANE) ? 1 : (p->hidden + LC_SLICE - 1) / LC_SLICE;
    const int spare = ag_count(ag) / tokens;

    return spare < 1 ? 1 : spare < most ? spare : most;
}

/* All tokens, dealt out; returns the rows of this agent's (of each token's first slice). */
KFN uint64_t lc_sum_tokens(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch)
{
    const int slices = lc_slices(ag, p), items = p->h->state->ntokens * slices;
    const int width = ((p->hidden + slices - 1) / slices + 255) / 256 * 256;
    uint64_t rows = 0;

    for (int item = ag_index(ag); item < items; item += ag_count(ag)) {
        if (AG_LOOK_AHEAD)
            lc_look_ahead(p, epoch, ((int64_t)item + ag_count(ag)) / slices);
        const int begin = item % slices * width, end = begin + width < p->hidden ? begin + width : p->hidden;
        const int n = begin < end ? lc_sum_token(ag, p, epoch, item / slices, begin, end) : 0;
        rows += begin ? 0 : (uint64_t)n;
    }
    return rows;
}

#endif
