/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Low-latency combine, epoch e, slot (e - 1) % W, lap v of that slot.
 *
 *   expert rank d                                     source s of the node
 *   wait LC_DONE[*] >= v - 1  (receive slots free)
 *   rows in epx_alloc memory: describe where they are   (nothing moves)
 *   otherwise: write each row, LogFMT or plain, into
 *     s's receive slot, at ll_places()
 *   signal LC_DATA = v  ---------------------------->  wait LC_DATA[*] >= v
 *                                                      out[t] = sum over k of weight * row, read in d's heap or
 *                                                      in the own receive slot
 *   (in place: wait LC_DONE[*] >= v)  <--------------  signal LC_DONE = v
 *
 *                                                     source s of another node
 *   put the descriptor, counter LC_DATA  ----------->  wait LC_DATA[d] >= v, compare what both do
 *   put each row from where it is, or from the stage,
 *     into s's receive slot, counter LC_ROWS  ------>  wait LC_ROWS[d] >= expected so far + rows it has there
 *     (LogFMT: without gaps, behind their lengths)      (find where each begins)
 *   LC_DONE counted                <-----------------  put of no bytes, counter LC_DONE
 *
 * Each row crosses between ranks once, by a read (in place) or by a write (receive buffer).
 */
#ifndef EPX_KERNEL_LL_COMBINE_H
#define EPX_KERNEL_LL_COMBINE_H

#include "kernel/rows.h"
#include "kernel/sync.h"

KFN_STEP uint64_t lc_slot_offset(const struct group_dev *g, uint64_t epoch)
{
    return g->ll.cslots + (uint64_t)slot_of(g, epoch) * g->ll.cslot_stride;
}

KFN_STEP char *lc_slot(const struct group_dev *g, int rank, uint64_t epoch)
{
    return heap_at(g, rank, lc_slot_offset(g, epoch));
}

/* The descriptor of rank d: in its heap, or put here. */
KFN_STEP const struct lc_desc *lc_desc_of(const struct group_dev *g, int d, uint64_t epoch)
{
    if (is_local(g, d))
        return (const struct lc_desc *)lc_slot(g, d, epoch);
    return (const struct lc_desc *)(lc_slot(g, g->rank, epoch) + g->ll.cdescs) + g->recv_index_of[d];
}

/* ---- Send ----------------------------------------------------------------------------------------------------- */

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
    return p->logfmt ? (size_t)p->g->ll.cpitch : up16((size_t)p->signature.hidden_bytes);
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
    if (p->logfmt)
        return (uint32_t)ag_logfmt_encode(ag, to, row, p->hidden);
    if (p->nvfp4) {
        const int64_t at = row - p->tokens, outer = at / p->outer_stride, inner = at % p->outer_stride / p->stride;
        return (uint32_t)ag_nvfp4_encode(ag, to, row, p->hidden, p->row_scales[outer * p->row_scale_rows + inner]);
    }
    ag_copy(ag, to, row, (size_t)p->signature.hidden_bytes);
    return (uint32_t)p->signature.hidden_bytes;
}

/* To a source of the node: straight into its receive slot. Rows are dealt out to the agents in one sequence. */
KFN void lc_push_local(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch, int s, int64_t *before)
{
    const struct group_dev *g = p->g;
    const int A = ag_count(ag);
    char *recv_buf = lc_slot(g, s, epoch) + g->ll.crows;

    for (int l = 0; l < lc_blocks(p); l++) {
        const struct lc_block b = lc_block_at(p, s, l);
        for (int i = (int)(((int64_t)ag_index(ag) - *before % A + A) % A); i < b.n; i += A)
            lc_write_row(ag, p, recv_buf + (b.place + (uint64_t)i) * lc_pitch(p), b.rows + i * p->stride);
        *before += b.n;
    }
}

/* LogFMT rows differ in length. To another node they go one behind the other, so that their puts merge and only their
 * own bytes travel; each follows this many bytes, which begin with its length. */
#define LC_LENGTH 16

KFN uint32_t lc_pack_row(struct agent *ag, const struct ll_combine_params *p, char *to, const char *row)
{
    const uint32_t bytes = lc_write_row(ag, p, to + LC_LENGTH, row);

    if (ag_leader(ag))
        *(uint32_t *)to = bytes;
    return LC_LENGTH + bytes;
}

/* This agent's part of the stage, and how far it is filled. Bytes. */
struct lc_stage {
    uint64_t at, room, used;
    struct put_batch batch;
};

/* Rows in the heap can be put where they are. But a network's cost per message is that of copying some ten thousand
 * bytes: short blocks are copied to the stage, where all that go to one source become neighbours. */
#define LC_SHORT_BYTES (256 << 10)

KFN int lc_short(const struct ll_combine_params *p, const struct lc_block *b)
{
    return p->layout == LAYOUT_EXPERT_MAJOR && (int64_t)b->n * p->signature.hidden_bytes < LC_SHORT_BYTES;
}

/* To a source of another node. */
KFN_STEP int lc_push_remote(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch, int s,
                            struct lc_stage *stage)
{
    const struct group_dev *g = p->g;
    const int slot = slot_of(g, epoch);
    const uint64_t recv_buf = lc_slot_offset(g, epoch) + g->ll.crows;
    const size_t pitch = lc_pitch(p);
    uint64_t rows = 0, packed = recv_buf + lc_block_at(p, s, 0).place * pitch; /* all blocks follow each other there */

    put(ag, g, &stage->batch, s, COUNTER(SIG_LC_DATA, slot), lc_slot_offset(g, epoch),
        lc_slot_offset(g, epoch) + g->ll.cdescs + (uint64_t)g->recv_index_at[s] * sizeof(struct lc_desc),
        sizeof(struct lc_desc));
    for (int l = 0; l < lc_blocks(p); l++) {
        const struct lc_block b = lc_block_at(p, s, l);
        for (int i = 0; i < b.n; i++) {
            const char *row = b.rows + i * p->stride;
            const uint64_t target = p->logfmt ? packed : recv_buf + (b.place + (uint64_t)i) * pitch;
            uint64_t source = (uint64_t)(row - heap_at(g, g->rank, 0));
            uint32_t bytes = (uint32_t)p->signature.hidden_bytes;
            if (!p->in_place || (lc_short(p, &b) && stage->used + pitch <= stage->room)) {
                if (stage->used + pitch > stage->room) {
                    if (put_flush(ag, g, &stage->batch))
                        return push_failed(ag, g);
                    if (wait_sent(ag, g, PHASE_LC_SENT))
                        return 1;
                    stage->used = 0;
                }
                source = stage->at + stage->used;
                bytes = p->logfmt ? lc_pack_row(ag, p, heap_at(g, g->rank, source), row)
                                  : lc_write_row(ag, p, heap_at(g, g->rank, source), row);
                stage->used += p->logfmt ? bytes : pitch;
                packed += bytes;
                ag_sync(ag);
            }
            put(ag, g, &stage->batch, s, COUNTER(SIG_LC_ROWS, slot), source, target, bytes);
        }
        rows += (uint64_t)b.n;
    }
    if (ag_leader(ag))
        ag_add_stat(&g->stats->rows_remote, rows);
    return 0;
}

/* Each agent serves some of the sources elsewhere, with its own part of the stage. */
KFN_STEP int lc_push_others(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    const int A = ag_count(ag);
    struct lc_stage stage;
    int nth = 0;

    /* With fewer rows, or fewer ranks elsewhere, than agents only the first agents have a part. */
    const int most = g->remotes < (int)g->ll.stage_rows ? g->remotes : (int)g->ll.stage_rows;
    const int parts = A < most ? A : most;
    stage.room = g->ll.stage_rows / (uint64_t)parts * g->ll.cpitch;
    stage.at = g->ll.stage + (uint64_t)ag_index(ag) * stage.room;
    stage.used = 0;
    put_begin(&stage.batch);
    for (int j = 1; j < g->nranks; j++) {
        const int s = (g->rank + j) % g->nranks;
        if (is_local(g, s) || !g->mask[s])
            continue;
        if (nth++ % parts == ag_index(ag) && lc_push_remote(ag, p, epoch, s, &stage))
            return 1;
    }
    if (put_flush(ag, g, &stage.batch))
        return push_failed(ag, g);
    return 0;
}

KFN_STEP void lc_push_node(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    int64_t before = 0;

    /* Start with the next rank, so that not all ranks write to rank 0 at first. */
    for (int j = 1; j <= g->nranks; j++) {
        const int s = (g->rank + j) % g->nranks;
        if (is_local(g, s) && g->mask[s])
            lc_push_local(ag, p, epoch, s, &before);
    }
}

KFN void lc_write_desc(const struct ll_combine_params *p, struct lc_desc *desc)
{
    desc->signature = p->signature;
    desc->pulled = p->in_place != 0;
    desc->rows = p->in_place;
    desc->outer_stride = (uint64_t)p->outer_stride;
    desc->row_stride = (uint64_t)p->stride;
}

KFN_STEP int lc_send(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    char *slot = lc_slot(g, g->rank, epoch);

    if (wait_peers(ag, g, SCOPE_ALL, SIG_LC_DONE, slot_of(g, epoch), lap_of(g, epoch) - 1, PHASE_LC_SLOT, NULL))
        return 1;
    AG_MARK(ag, "slot");
    if (ag_index(ag) == 0 && ag_leader(ag))
        lc_write_desc(p, (struct lc_desc *)slot);
    if (g->nnodes > 1) {
        /* The stage still holds the last combine's rows until the network has read them. */
        if (ag_index(ag) == 0 && wait_sent(ag, g, PHASE_LC_SENT))
            return 1;
        if (sync_barrier(ag, g) || lc_push_others(ag, p, epoch))
            return 1;
    }
    if (!p->in_place) {
        lc_push_node(ag, p, epoch);
    } else if (p->layout == LAYOUT_EXPERT_MAJOR) {
        int32_t *begin = (int32_t *)(slot + g->ll.begin);
        AG_EACH_ALL(ag, int, i, g->local_experts * g->nranks) begin[i] = p->h->begin[i];
    }
    if (!sync_last(ag, g, 0))
        return 0;
    if (ag_leader(ag)) {
        g->state->epoch[OP_LL_COMBINE] = epoch;
        p->h->state->epoch = epoch;
    }
    ag_sync(ag);
    signal_peers(ag, g, SCOPE_NODE, SIG_LC_DATA, slot_of(g, epoch), lap_of(g, epoch));
    return 0;
}

/* ---- Receive -------------------------------------------------------------------------------------------------- */

/* Where the row of (t, k) lands, for this rank as the source. */
KFN int64_t lc_place(const struct ll_combine_params *p, int d, int64_t i)
{
    const struct handle_dev *h = p->h;

    return p->layout == LAYOUT_EXPERT_MAJOR ? (int64_t)h->back[h->ids[i]] + h->eidx[i]
                                            : (int64_t)h->back[d] + h->ridx[i];
}

/* Where the row of (t, k) is, for this rank as the source. */
KFN_STEP const char *lc_row(const struct ll_combine_params *p, uint64_t epoch, const struct lc_desc *desc, int d,
                            int64_t i)
{
    const struct group_dev *g = p->g;

    if (p->logfmt && !is_local(g, d))
        return lc_slot(g, g->rank, epoch) + g->ll.crows + (size_t)g->packed_at[lc_place(p, d, i)] * 16;
    if (!desc->pulled || !is_local(g, d))
        return lc_slot(g, g->rank, epoch) + g->ll.crows + (size_t)lc_place(p, d, i) * lc_pitch(p);
    const char *rows = heap_at(g, d, desc->rows);
    if (p->layout == LAYOUT_RANK_MAJOR)
        return rows + (size_t)g->rank * desc->outer_stride + (size_t)p->h->ridx[i] * desc->row_stride;
    const int l = p->h->ids[i] - d * g->local_experts;
    const int32_t *begin = (const int32_t *)(lc_slot(g, d, epoch) + g->ll.begin);
    return rows + (size_t)l * desc->outer_stride +
           (size_t)(begin[l * g->nranks + g->rank] + p->h->eidx[i]) * desc->row_stride;
}

/* Does (t, k) have a row of its own that comes back? */
KFN_STEP int lc_returns(const struct ll_combine_params *p, int64_t i)
{
    const int32_t id = p->h->ids[i];

    if (id < 0 || !p->g->mask[id / p->g->local_experts])
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
            const char *row = lc_row(p, epoch, lc_desc_of(g, d, epoch), d, i);
            sum_set_offer(&set, n + before, row + at, weighted ? p->weights[i] : 1.0f,
                          p->nvfp4 ? ROWS_NVFP4 : p->logfmt);
        }
        n += all;
    }
    sum_set_settle(ag, &set);
    ag_reduce(ag, p->out + t * p->out_stride + at, p->dtype, end - begin, &set, n, weighted,
              p->bias[0] ? p->bias[0] + t * p->bias_stride[0] + at : NULL,
              p->bias[1] ? p->bias[1] + t * p->bias_stride[1] + at : NULL);
    return n;
}

#define LC_SLICE 1024 /* channels: least that is worth an agent of its own */

/* With more agents than tokens each token is cut into slices. LogFMT rows are not: their blocks have no fixed
 * places; nor NVFP4 rows. */
KFN int lc_slices(struct agent *ag, const struct ll_combine_params *p)
{
    const int tokens = p->h->state->ntokens > 0 ? p->h->state->ntokens : 1;
    const int most = p->logfmt || p->nvfp4 ? 1 : (p->hidden + LC_SLICE - 1) / LC_SLICE;
    const int spare = ag_count(ag) / tokens;

    return spare < 1 ? 1 : spare < most ? spare : most;
}

/* All tokens, dealt out; returns the rows of this agent's (of each token's first slice). */
KFN_STEP uint64_t lc_sum_tokens(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch)
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

/* Rows that come back from rank d. */
KFN uint64_t lc_rows_from(const struct ll_combine_params *p, int d)
{
    const struct group_dev *g = p->g;
    const int L = g->local_experts;
    uint64_t n = 0;

    if (p->layout == LAYOUT_RANK_MAJOR)
        return (uint64_t)p->h->rcount[d];
    for (int e = d * L; e < d * L + L && e < g->experts; e++)
        n += (uint64_t)p->h->ecount[e];
    return n;
}

/* Rows that other ranks of the node have returned. One agent. */
KFN void lc_count_peer(struct agent *ag, const struct ll_combine_params *p)
{
    const struct group_dev *g = p->g;
    uint64_t rows = 0;

    AG_EACH(ag, int, d, g->nranks)
    rows += d != g->rank && is_local(g, d) && g->mask[d] ? lc_rows_from(p, d) : 0;
    rows = (uint64_t)ag_sum(ag, (int64_t)rows);
    if (ag_leader(ag))
        ag_add_stat(&g->stats->bytes_peer, rows * (uint64_t)p->signature.hidden_bytes);
}

/* Where each LogFMT row of rank d begins. Lengths from a network decide what is read: all are checked. One agent. */
KFN_STEP int lc_unpack(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch, int d)
{
    const struct group_dev *g = p->g;
    const uint64_t n = lc_rows_from(p, d), pitch = lc_pitch(p);
    const int64_t first = n ? p->h->back[p->layout == LAYOUT_EXPERT_MAJOR ? d * g->local_experts : d] : 0;
    const char *rows = lc_slot(g, g->rank, epoch) + g->ll.crows;
    uint64_t at = (uint64_t)first * pitch;
    const uint64_t end = at + n * pitch;

    for (uint64_t i = 0; i < n; i++) {
        const uint32_t bytes = *(const uint32_t *)(rows + at);
        if (bytes % 16 || bytes > pitch || at + LC_LENGTH + bytes > end)
            return fail_all(ag, g, KSTATUS_MISMATCH, PHASE_LC_ROWS, d, (int64_t)pitch, bytes);
        if (ag_leader(ag))
            g->packed_at[(uint64_t)first + i] = (int32_t)((at + LC_LENGTH) / 16);
        at += LC_LENGTH + bytes;
    }
    return 0;
}

KFN_STEP int lc_wait_remote(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    const uint64_t start = ag_now(ag);

    for (int d = 0; d < g->nranks; d++) {
        if (is_local(g, d) || !g->mask[d] || g->recv_index_of[d] % ag_count(ag) != ag_index(ag))
            continue;
        if (wait_rows(ag, g, SIG_LC_ROWS, slot_of(g, epoch), d, lc_rows_from(p, d), PHASE_LC_ROWS, start))
            return 1;
        if (p->logfmt && g->mask[d] && lc_unpack(ag, p, epoch, d))
            return 1;
    }
    return sync_barrier(ag, g);
}

KFN int lc_check_descs(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    int odd = 0;

    AG_EACH(ag, int, d, g->nranks)
    odd |= g->mask[d] && signature_differs(&p->signature, &lc_desc_of(g, d, epoch)->signature);
    if (!ag_any(ag, odd))
        return 0;
    for (int d = 0; d < g->nranks; d++)
        if (g->mask[d] && check_signature(ag, g, &p->signature, &lc_desc_of(g, d, epoch)->signature, PHASE_LC_DATA, d))
            return 1;
    return 0;
}

KFN_STEP int lc_recv(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    const int slot = slot_of(g, epoch);
    const uint64_t lap = lap_of(g, epoch);

    if (wait_peers(ag, g, SCOPE_ALL, SIG_LC_DATA, slot, lap, PHASE_LC_DATA, p->wait_ns))
        return 1;
    AG_MARK(ag, "data");
    if (lc_check_descs(ag, p, epoch))
        return 1;
    if (g->nnodes > 1 && lc_wait_remote(ag, p, epoch))
        return 1;
    count_returned(ag, g, lc_sum_tokens(ag, p, epoch));
    AG_MARK(ag, "sum");
    if (sync_last(ag, g, 1)) {
        signal_peers(ag, g, SCOPE_ALL, SIG_LC_DONE, slot, lap);
        report_returned(ag, g);
        lc_count_peer(ag, p);
    }
    /* The caller may change its tensor once this operation has completed: not before all have read it. */
    return p->in_place ? wait_peers(ag, g, SCOPE_ALL, SIG_LC_DONE, slot, lap, PHASE_LC_DONE, NULL) : 0;
}

KFN void kernel_ll_combine(struct agent *ag, const struct ll_combine_params *p)
{
    const struct group_dev *g = p->g;
    uint64_t epoch = g->state->epoch[OP_LL_COMBINE] + 1;
    int failed = kernel_begin(ag, g);

    if (!failed && (p->steps & STEP_SEND))
        failed = lc_send(ag, p, epoch);
    else
        epoch = p->h->state->epoch;
    if (!failed && (p->steps & STEP_RECV))
        failed = lc_recv(ag, p, epoch);
    kernel_end(ag, g);
}

#endif
