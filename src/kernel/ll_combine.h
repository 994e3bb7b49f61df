/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Low-latency combine, epoch e, slot e % W.
 *
 *   expert rank d                                     source s
 *   wait LC_DONE[*] >= e - W  (landing slots free)
 *   rows in epx_alloc memory: post where they are       (nothing moves)
 *   otherwise: write each row, LogFMT or plain, into
 *     s's landing slot at [token][k]
 *   signal LC_DATA = e  ---------------------------->  wait LC_DATA[*] >= e
 *                                                      out[t] = sum over k of weight * row, read in d's heap or
 *                                                      in the own landing slot
 *   (in place: wait LC_DONE[*] >= e)  <--------------  signal LC_DONE = e
 *
 * Each row crosses between ranks once, by a read (in place) or by a write (landing).
 */
#ifndef EPX_KERNEL_LL_COMBINE_H
#define EPX_KERNEL_LL_COMBINE_H

#include "kernel/rows.h"
#include "kernel/sync.h"

KFN char *lc_slot(const struct group_dev *g, int rank, uint64_t epoch)
{
    return heap_at(g, rank, g->ll.cslots + (uint64_t)slot_of(g, epoch) * g->ll.cslot_stride);
}

KFN void lc_push_row(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch, int s, int32_t source,
                     const char *row)
{
    const struct group_dev *g = p->g;
    char *to = lc_slot(g, s, epoch) + g->ll.landing + (size_t)source * g->ll.cpitch;

    if (p->logfmt)
        ag_logfmt_encode(ag, to, row, p->hidden);
    else
        ag_copy(ag, to, row, (size_t)p->agree.hidden_bytes);
}

/* Blocks (outer, source s) of received rows; EXPERT_MAJOR: outer = local expert, RANK_MAJOR: outer = s, one block. */
KFN void lc_push_block(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch, int outer, int s,
                       int64_t *before)
{
    const struct group_dev *g = p->g;
    const struct handle_dev *h = p->h;
    const int R = g->nranks, M = g->max_tokens, A = ag_count(ag);
    const int major = p->layout == LAYOUT_EXPERT_MAJOR;
    const int n = major ? h->count[outer * R + s] : h->count[s];
    const int first = major ? h->begin[outer * R + s] : 0;
    const int64_t block = major ? (int64_t)outer * R * M : (int64_t)s * M;

    for (int i = (int)(((int64_t)ag_index(ag) - *before % A + A) % A); i < n; i += A)
        lc_push_row(ag, p, epoch, s, h->source[block + first + i],
                    p->tokens + outer * p->outer_stride + (first + i) * p->stride);
    *before += n;
}

KFN void lc_push_all(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    const int outers = p->layout == LAYOUT_EXPERT_MAJOR ? g->local_experts : 1;
    int64_t before = 0;

    /* Start with the next rank, so that not all ranks write to rank 0 at first. */
    for (int j = 1; j <= g->nranks; j++) {
        const int s = (g->rank + j) % g->nranks;
        if (!g->mask[s])
            continue;
        for (int o = 0; o < outers; o++)
            lc_push_block(ag, p, epoch, p->layout == LAYOUT_EXPERT_MAJOR ? o : s, s, &before);
    }
    if (ag_index(ag) == 0 && ag_leader(ag))
        ag_add_stat(&g->stats->bytes_peer, (uint64_t)before * (uint64_t)p->agree.hidden_bytes);
}

KFN int lc_send(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    char *slot = lc_slot(g, g->rank, epoch);

    if (epoch > (uint64_t)g->inflight &&
        wait_all(ag, g, SIG_LC_DONE, slot_of(g, epoch), epoch - (uint64_t)g->inflight, PHASE_LC_SLOT, NULL))
        return 1;
    if (!p->in_place) {
        lc_push_all(ag, p, epoch);
    } else if (p->layout == LAYOUT_EXPERT_MAJOR) {
        int32_t *begin = (int32_t *)(slot + g->ll.begin);
        AG_EACH_ALL(ag, int, i, g->local_experts * g->nranks) begin[i] = p->h->begin[i];
    }
    if (!sync_last(ag, g, 0))
        return 0;
    if (ag_leader(ag)) {
        struct lc_post *post = (struct lc_post *)slot;
        post->agree = p->agree;
        post->pulled = p->in_place != 0;
        post->rows = p->in_place;
        post->outer_stride = (uint64_t)p->outer_stride;
        post->row_stride = (uint64_t)p->stride;
        g->state->epoch[OP_LL_COMBINE] = epoch;
        p->h->epoch = epoch;
    }
    ag_sync(ag);
    signal_all(ag, g, SIG_LC_DATA, slot_of(g, epoch), epoch);
    return 0;
}

/* Where the row of (t, k) is, for this rank as the source. */
KFN const char *lc_row(const struct ll_combine_params *p, uint64_t epoch, const struct lc_post *post, int d, int64_t i)
{
    const struct group_dev *g = p->g;

    if (!post->pulled)
        return lc_slot(g, g->rank, epoch) + g->ll.landing + (size_t)i * g->ll.cpitch;
    const char *rows = heap_at(g, d, post->rows);
    if (p->layout == LAYOUT_RANK_MAJOR)
        return rows + (size_t)g->rank * post->outer_stride + (size_t)p->h->ridx[i] * post->row_stride;
    const int l = p->h->ids[i] - d * g->local_experts;
    const int32_t *begin = (const int32_t *)(lc_slot(g, d, epoch) + g->ll.begin);
    return rows + (size_t)l * post->outer_stride +
           (size_t)(begin[l * g->nranks + g->rank] + p->h->eidx[i]) * post->row_stride;
}

KFN void lc_sum_token(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch, int t)
{
    const struct group_dev *g = p->g;
    const int K = p->h->topk, L = g->local_experts;
    const int weighted = p->layout == LAYOUT_EXPERT_MAJOR;
    struct sum_set set;
    int n = 0, lost = 0;

    for (int k = 0; k < K; k++) {
        const int64_t i = (int64_t)t * K + k;
        const int32_t id = p->h->ids[i];
        if (id < 0 || (!weighted && p->h->rord[i] < 0))
            continue;
        lost |= !g->mask[id / L];
    }
    for (int k = 0; k < K; k++) {
        const int64_t i = (int64_t)t * K + k;
        const int32_t id = p->h->ids[i];
        if (id < 0 || (!weighted && p->h->rord[i] < 0) || !g->mask[id / L])
            continue;
        /* RANK_MAJOR sums by ascending rank; a rank masked since the dispatch leaves a gap to close. */
        int place = weighted ? n : p->h->rord[i];
        for (int j = 0; lost && !weighted && j < K; j++) {
            const int64_t o = (int64_t)t * K + j;
            if (p->h->rord[o] >= 0 && p->h->rord[o] < p->h->rord[i] && !g->mask[p->h->ids[o] / L])
                place--;
        }
        const int d = id / L;
        const struct lc_post *post = (const struct lc_post *)lc_slot(g, d, epoch);
        sum_set_put(ag, &set, place, lc_row(p, epoch, post, d, i), weighted ? p->weights[i] : 1.0f,
                    p->logfmt && !post->pulled);
        n++;
    }
    ag_reduce(ag, p->out + t * p->out_stride, p->dtype, p->hidden, &set, n, weighted,
              p->bias[0] ? p->bias[0] + t * p->bias_stride[0] : NULL,
              p->bias[1] ? p->bias[1] + t * p->bias_stride[1] : NULL);
    if (ag_leader(ag))
        ag_add_stat(&g->stats->rows_returned, (uint64_t)n);
}

KFN int lc_recv(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    if (wait_all(ag, g, SIG_LC_DATA, slot_of(g, epoch), epoch, PHASE_LC_DATA, p->wait_ns))
        return 1;
    for (int s = 0; s < g->nranks; s++) {
        const struct agreement *theirs = &((const struct lc_post *)lc_slot(g, s, epoch))->agree;
        if (g->mask[s] && check_agreement(ag, g, &p->agree, theirs, PHASE_LC_DATA, s))
            return 1;
    }
    for (int t = ag_index(ag); t < p->h->ntokens; t += ag_count(ag))
        lc_sum_token(ag, p, epoch, t);
    if (sync_last(ag, g, 1))
        signal_all(ag, g, SIG_LC_DONE, slot_of(g, epoch), epoch);
    /* The caller may change its tensor once this operation has completed: not before all have read it. */
    return p->in_place ? wait_all(ag, g, SIG_LC_DONE, slot_of(g, epoch), epoch, PHASE_LC_DONE, NULL) : 0;
}

KFN void kernel_ll_combine(struct agent *ag, const struct ll_combine_params *p)
{
    const struct group_dev *g = p->g;
    uint64_t epoch = g->state->epoch[OP_LL_COMBINE] + 1;
    int failed = kernel_begin(ag, g);

    if (!failed && (p->steps & STEP_SEND))
        failed = lc_send(ag, p, epoch);
    else
        epoch = p->h->epoch;
    if (!failed && (p->steps & STEP_RECV))
        failed = lc_recv(ag, p, epoch);
    kernel_end(ag, g);
}

#endif
