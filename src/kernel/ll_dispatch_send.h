/* SPDX-License-Identifier: Apache-2.0 */
/* Low-latency dispatch: the send half. The protocol is drawn in ll_dispatch.h. */
#ifndef EPX_KERNEL_LL_DISPATCH_SEND_H
#define EPX_KERNEL_LL_DISPATCH_SEND_H

#include "kernel/ll_remote.h"

KFN_STEP void ll_fill_tables(struct agent *ag, const struct ll_dispatch_params *p, const struct ll_view *v,
                             int32_t *list)
{
    const struct group_dev *g = p->g;
    const struct handle_dev *h = p->h;
    const int K = p->route.topk_n;

    AG_EACH_ALL(ag, int, e, g->experts) v->ecount[e] = h->ecount[e];
    AG_EACH_ALL(ag, int, r, g->nranks) v->rcount[r] = h->rcount[r];
    AG_EACH_ALL(ag, int64_t, i, (int64_t)p->route.ntokens * K)
    {
        v->ids[i] = h->ids[i];
        v->eidx[i] = h->eidx[i];
        if (p->weights)
            v->weights[i] = p->weights[i];
        const int r = h->ridx[i] < 0 ? -1 : h->ids[i] / g->local_experts;
        if (r >= 0 && is_local(g, r)) /* of others: ll_list_remote() */
            list[(size_t)r * (size_t)g->max_tokens + (size_t)h->ridx[i]] = (int32_t)(i / K);
    }
}

KFN void ll_write_desc(const struct ll_dispatch_params *p, uint64_t epoch, struct ll_desc *desc)
{
    const struct group_dev *g = p->g;

    desc->signature = p->signature;
    desc->ntokens = p->route.ntokens;
    desc->ordered = has_nodes(g);
    desc->recv_half = (int16_t)g->state->recv_half;
    desc->rows = p->in_place ? p->in_place : ll_slot_offset(g, epoch) + g->ll.rows;
    desc->row_stride = ll_row_stride(p);
    /* Not where ranks may be masked: a rank that is late rather than dead would write into a tensor that its receiver
     * uses for something else by then, and a rank that masked another counts fewer rows before its own than a receiver
     * that did not. Nor NVFP4 rows: senders encode them once, into their slot. */
    desc->open = (p->steps & STEP_RECV) && !has_masks(g) && p->open_tokens &&
                 (p->open_scales || !p->signature.scale_bytes) && p->in.cast != CAST_NVFP4;
    desc->written = 0;
    desc->tokens = p->open_tokens;
    desc->outer_stride = (uint64_t)p->out.outer_stride;
    desc->stride = (uint64_t)p->out.stride;
    desc->scales = p->open_scales;
    desc->scale_outer_stride = (uint64_t)p->out.scale_outer_stride;
    desc->scale_row_stride = (uint64_t)p->out.scale_row_stride;
    desc->scale_stride = (uint64_t)p->out.scale_stride;
    desc->src_token = p->open_src_token;
    desc->outer_rows = (uint64_t)p->outer_rows;
}

/* Statistics of what goes out. One agent. */
KFN void ll_count_sent(struct agent *ag, const struct group_dev *g, const struct handle_dev *h)
{
    int64_t all = 0, remote = 0;

    AG_EACH(ag, int, r, g->nranks)
    {
        all += h->rcount[r];
        remote += is_local(g, r) ? 0 : h->rcount[r];
    }
    all = ag_sum(ag, all);
    remote = ag_sum(ag, remote);
    if (!ag_leader(ag))
        return;
    ag_add_stat(&g->stats->rows_sent, (uint64_t)all);
    if (remote)
        ag_add_stat(&g->stats->rows_remote, (uint64_t)remote);
}

/* The last agent: tables and descriptor are written. */
KFN_STEP void ll_publish(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch, const struct ll_view *v)
{
    const struct group_dev *g = p->g;

    if (ag_leader(ag)) {
        if (!has_nodes(g))
            ll_write_desc(p, epoch, v->desc);
        g->state->epoch[OP_LL_DISPATCH] = epoch;
        p->h->state->epoch = epoch;
    }
    ag_sync(ag);
    signal_peers(ag, g, SCOPE_NODE, SIG_LL_DATA, slot_of(g, epoch), lap_of(g, epoch));
    ll_count_sent(ag, g, p->h);
}

KFN_STEP int ll_send_tables(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    const struct ll_view v = ll_own_view(p, epoch);
    int32_t *list = (int32_t *)heap_at(g, g->rank, ll_slot_offset(g, epoch));

    if (INJECT_BUG(
            BUG_SLOT, 0,
            wait_peers(ag, g, SCOPE_ALL, SIG_LL_DONE, slot_of(g, epoch), lap_of(g, epoch) - 1, PHASE_LL_SLOT, NULL)))
        return 1;
    AG_MARK(ag, MARK_SLOT);
    if (route_plan(ag, g, p->h, &p->route))
        return 1;
    AG_MARK(ag, MARK_ROUTE);
    ll_fill_tables(ag, p, &v, list);
    if (has_nodes(g)) {
        if (ag_index(ag) == 0) {
            if (ll_choose_recv_half(ag, g, p->h->state))
                return 1;
            ll_order(ag, p, v.pos);
            ll_list_all_remote(ag, p, list);
            ll_places(ag, p);
            if (ag_leader(ag))
                ll_write_desc(p, epoch, v.desc);
        }
        if (sync_barrier(ag, g))
            return 1;
    }
    if (sync_last(ag, g, 0))
        ll_publish(ag, p, epoch, &v);
    AG_MARK(ag, MARK_TABLES);
    return 0;
}

/* Rows to `rows`, with records where they go to other nodes. */
KFN void ll_copy_rows(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch, char *rows, int records)
{
    const struct ll_view v = ll_own_view(p, epoch);
    const uint64_t stride = ll_row_stride(p);

    for (int t = ag_index(ag); t < p->route.ntokens && !p->in_place; t += ag_count(ag)) {
        char *row = rows + (size_t)(has_nodes(p->g) ? v.pos[t] : t) * stride;
        row_stage(ag, row, &p->in, &p->signature, t);
        if (records)
            ll_write_record(ag, p, row, t);
    }
}

/* Rows into the own slot, for receivers that read them there, and for the proxies; with ll.split these have copies of
 * their own, which are on their way while those for the node are written. */
KFN_STEP int ll_stage_rows(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    const int spread = has_nodes(g);
    char *rows = heap_at(g, g->rank, ll_slot_offset(g, epoch) + g->ll.rows);

    ll_copy_rows(ag, p, epoch, ll_split(g) ? net_at(g, ll_net_slot(g, epoch) + g->ll.net_rows) : rows, spread);
    if (spread && (sync_barrier(ag, g) || ll_put_remote(ag, p, epoch)))
        return 1;
    if (ll_split(g))
        ll_copy_rows(ag, p, epoch, rows, 0);
    if (!sync_last(ag, g, 1))
        return 0;
    if (ag_leader(ag) && !p->in_place)
        ag_add_stat(&g->stats->bytes_local, (uint64_t)p->route.ntokens * (uint64_t)p->signature.hidden_bytes);
    signal_peers(ag, g, SCOPE_NODE, SIG_LL_ROWS, slot_of(g, epoch), lap_of(g, epoch));
    return 0;
}

/* The send half of a staged operation: it waits for peers only to free the slot. */
KFN_STEP int ll_dispatch_send(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch)
{
    return ll_send_tables(ag, p, epoch) || ll_stage_rows(ag, p, epoch);
}

/* May all ranks write into each other's receive tensors? All read the same descriptors and get the same answer. */
KFN int ll_all_open(struct agent *ag, const struct group_dev *g, uint64_t epoch)
{
    int closed = 0;

    AG_EACH(ag, int, s, g->nranks) closed |= !is_local(g, s) || (is_active(g, s) && !ll_desc_of(g, s, epoch)->open);
    return !ag_any(ag, closed);
}

#if AG_ONE_LANE
/* Rows of earlier ranks at each expert: where this rank's begin there. Rank by rank, for what a rank says lies
 * together: expert by expert each load would be of another heap, and so of another page. One node. */
KFN_STEP void ll_first_rows(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    const int64_t E = g->experts, begin = E * ag_index(ag) / ag_count(ag), end = E * (ag_index(ag) + 1) / ag_count(ag);
    const uint64_t offset = ll_counts_offset(g, epoch);
    int32_t *first = p->h->first;

    for (int64_t e = begin; e < end; e++)
        first[e] = 0;
    for (int s = 0; s < g->rank && begin < end; s++) {
        const int32_t *count = is_active(g, s) ? (const int32_t *)heap_at(g, s, offset) : NULL;
        for (int64_t e = begin; e < end && count; e++)
            first[e] += count[e];
    }
}
#else
#define LL_COUNTS 8 /* loads in flight before the first result is used */

/* Rows of earlier ranks at expert e's rank: where this rank's begin there. `offset` is ll_counts_offset(). One node. */
KFN int32_t ll_first_row(const struct group_dev *g, uint64_t offset, int e)
{
    int32_t run = 0, n[LL_COUNTS];

    for (int s = 0; s < g->rank; s += LL_COUNTS) {
        AG_UNROLL
        for (int j = 0; j < LL_COUNTS; j++)
            n[j] = s + j < g->rank && is_active(g, s + j) ? ((const int32_t *)heap_at(g, s + j, offset))[e] : 0;
        AG_UNROLL
        for (int j = 0; j < LL_COUNTS; j++)
            run += n[j];
    }
    return run;
}

/* Of all experts. Every block computes them for itself. */
KFN_STEP void ll_first_rows(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch)
{
    const uint64_t offset = ll_counts_offset(p->g, epoch);

    AG_EACH_BLOCK(ag, int, e, p->g->experts) p->h->first[e] = ll_first_row(p->g, offset, e);
}
#endif

/* Does (t, k) have a place of its own, EXPERT_MAJOR by expert, RANK_MAJOR by this rank? */
KFN_STEP int ll_has_target(const struct ll_dispatch_params *p, int64_t i)
{
    const struct group_dev *g = p->g;
    const int32_t id = p->h->ids[i];

    if (id < 0 || !is_active(g, id / g->local_experts))
        return 0;
    if (p->layout == LAYOUT_RANK_MAJOR)
        return p->h->ridx[i] >= 0;
    /* Else the receiver reports it. */
    return p->h->first[id] + p->h->eidx[i] < (int64_t)g->nranks * g->max_tokens;
}

/* Where a row goes, for one of its channels: by one lane. */
struct ll_target {
    char *token, *scale;
    int64_t scale_stride;
};

/* EXPERT_MAJOR: says at rank d, at the row's place, which token it is. By each lane. */
KFN void ll_write_source(const struct group_dev *g, const struct ll_desc *desc, int d, uint64_t l, uint64_t row, int t)
{
    if (desc->src_token)
        ((int32_t *)heap_at(g, d, desc->src_token))[l * desc->outer_rows + row] = t;
}

/* Row `row` of block `outer` (an expert's, or a source's) of rank d, as its descriptor says. */
KFN struct ll_target ll_target_at(const struct group_dev *g, uint64_t epoch, int d, uint64_t outer, uint64_t row)
{
    const struct ll_desc *desc = ll_desc_of(g, d, epoch);
    struct ll_target to;

    to.token = heap_at(g, d, desc->tokens + outer * desc->outer_stride + row * desc->stride);
    to.scale = heap_at(g, d, desc->scales + outer * desc->scale_outer_stride + row * desc->scale_row_stride);
    to.scale_stride = (int64_t)desc->scale_stride;
    return to;
}

/* Where the row of (t, k) goes. Zero: nowhere. */
KFN_STEP int ll_target(const struct ll_dispatch_params *p, uint64_t epoch, int64_t i, struct ll_target *to)
{
    const struct group_dev *g = p->g;
    const int32_t id = p->h->ids[i];
    const int major = p->layout == LAYOUT_EXPERT_MAJOR;

    if (!ll_has_target(p, i))
        return 0;
    *to = ll_target_at(g, epoch, id / g->local_experts, (uint64_t)(major ? id % g->local_experts : g->rank),
                       (uint64_t)(major ? p->h->first[id] + p->h->eidx[i] : p->h->ridx[i]));
    if (major)
        ll_write_source(g, ll_desc_of(g, id / g->local_experts, epoch), id / g->local_experts,
                        (uint64_t)(id % g->local_experts), (uint64_t)p->h->first[id] + (uint64_t)p->h->eidx[i],
                        (int)(i / p->route.topk_n));
    return 1;
}

#define LL_SLICE 512 /* channels: a whole number of scales in any format, and of vectors */

/* With more agents than tokens each token is cut into slices of so many channels. */
KFN int ll_slice_width(struct agent *ag, const struct ll_dispatch_params *p)
{
    const int tokens = p->route.ntokens > 0 ? p->route.ntokens : 1;
    const int units = (p->in.hidden + LL_SLICE - 1) / LL_SLICE, spare = ag_count(ag) / tokens;

    return spare < 2 ? p->in.hidden : (units + spare - 1) / spare * LL_SLICE;
}

/* A piece of work: channels [begin, end) of token t. */
struct ll_part {
    int t, begin, end;
};

KFN struct ll_part ll_part(const struct ll_dispatch_params *p, int item, int width, int slices)
{
    struct ll_part part;

    part.t = item / slices;
    part.begin = item % slices * width;
    part.end = part.begin + width < p->in.hidden ? part.begin + width : p->in.hidden;
    return part;
}

/* Where a part goes. */
struct ll_goals {
    struct copy_set rows;
    struct word_set scales;
    int n;
};

KFN void ll_goals_begin(struct ll_goals *goals)
{
    copy_set_begin(&goals->rows);
    word_set_begin(&goals->scales);
    goals->n = 0;
}

#define LL_ALL_CHANNELS (1 << 30)

/* Channels of a word of scales. A caller's own scales may be of any number: all of them go with the first part. */
KFN int ll_word_channels(const struct ll_dispatch_params *p)
{
    const int words = p->signature.scale_bytes / 4;

    if (words == (p->in.hidden + 127) / 128)
        return 128;
    return words == (p->in.hidden + 511) / 512 ? 512 : LL_ALL_CHANNELS;
}

/* Words of scales of a part. */
KFN int ll_part_words(const struct ll_dispatch_params *p, const struct ll_part *part)
{
    const int per = ll_word_channels(p);

    if (per == LL_ALL_CHANNELS)
        return part->begin == 0 ? p->signature.scale_bytes / 4 : 0;
    return (part->end - part->begin + per - 1) / per;
}

/* By all lanes; `to` is of those that have one. */
KFN void ll_goals_add(struct agent *ag, const struct ll_dispatch_params *p, const struct ll_part *part,
                      struct ll_goals *goals, int goes, const struct ll_target *to)
{
    int before;
    const int all = ag_vote(ag, goes, &before), place = goals->n + before;

    if (goes) {
        copy_set_offer(&goals->rows, place, to->token + part->begin * (p->signature.hidden_bytes / p->in.hidden));
        word_set_offer(&goals->scales, place, to->scale + part->begin / ll_word_channels(p) * to->scale_stride,
                       to->scale_stride);
    }
    goals->n += all;
}

KFN void ll_goals_end(struct agent *ag, const struct ll_dispatch_params *p, struct ll_goals *goals)
{
    copy_set_settle(ag, &goals->rows);
    if (p->signature.scale_bytes)
        word_set_settle(ag, &goals->scales);
}

/* Of a channel of the caller's tokens. */
KFN int ll_source_bytes(const struct ll_dispatch_params *p)
{
    return p->in.cast ? (p->in.dtype == DTYPE_FP32 ? 4 : 2) : p->signature.hidden_bytes / p->in.hidden;
}

KFN const char *ll_part_tokens(const struct ll_dispatch_params *p, const struct ll_part *part)
{
    return row_tokens(&p->in, part->t) + (int64_t)part->begin * ll_source_bytes(p);
}

/* A part of a row that travels as it is. */
KFN void ll_copy_part(struct agent *ag, const struct ll_dispatch_params *p, const struct ll_part *part,
                      const struct ll_goals *goals)
{
    const int64_t bytes = (int64_t)(part->end - part->begin) * (p->signature.hidden_bytes / p->in.hidden);
    const int per = ll_word_channels(p);

    ag_copy_many(ag, &goals->rows, goals->n, ll_part_tokens(p, part), (size_t)bytes);
    if (p->signature.scale_bytes)
        ag_copy_words(ag, &goals->scales, goals->n,
                      p->in.scales + part->t * p->in.scale_row_stride + part->begin / per * p->in.scale_stride,
                      p->in.scale_stride, ll_part_words(p, part));
}

/* A part of a token to all its places on all ranks. */
KFN_STEP void ll_write_part(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch,
                            const struct ll_part *part, char *scratch)
{
    const int K = p->route.topk_n;
    struct ll_goals goals;

    ll_goals_begin(&goals);
    AG_ROUNDS(ag, int, k, K)
    {
        struct ll_target to;
        const int goes = k < K && ll_target(p, epoch, (int64_t)part->t * K + k, &to);
        ll_goals_add(ag, p, part, &goals, goes, &to);
    }
    ll_goals_end(ag, p, &goals);
    if (p->in.cast)
        ag_cast_fp8_many(ag, &goals.rows, &goals.scales, goals.n, scratch, p->in.scale_ue8m0, p->in.round_scale,
                         ll_part_tokens(p, part), p->in.dtype, part->end - part->begin);
    else
        ll_copy_part(ag, p, part, &goals);
}

/* All agents have written their rows into the peers' tensors: the last one signals it, and gets true. */
KFN_STEP int ll_signal_written(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    if (!sync_last(ag, g, 1))
        return 0;
    if (ag_leader(ag))
        ll_own_view(p, epoch).desc->written = 1;
    ag_sync(ag);
    signal_peers(ag, g, SCOPE_NODE, SIG_LL_ROWS, slot_of(g, epoch), lap_of(g, epoch));
    return 1;
}

KFN_STEP int ll_write_rows(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    const size_t bytes = row_scales_at(&p->signature) + (size_t)p->signature.scale_bytes;
    const int width = ll_slice_width(ag, p), slices = (p->in.hidden + width - 1) / width;
    char *scratch = p->in.cast ? (char *)ag_scratch(ag, bytes) : NULL;

    if (p->in.cast && !scratch)
        return fail_all(ag, g, KSTATUS_MEMORY, PHASE_LL_ROWS, -1, (int64_t)bytes, 0);
    if (p->layout == LAYOUT_EXPERT_MAJOR) {
        ll_first_rows(ag, p, epoch);
        if (block_barrier(ag, g, 0))
            return 1;
    }
    AG_MARK(ag, MARK_PLACES);
    AG_WILL_WRITE(ag, (uint64_t)g->node_size * (uint64_t)p->route.ntokens * (uint64_t)p->route.topk_n *
                          (uint64_t)p->signature.hidden_bytes); /* if the others have as many tokens */
    for (int item = ag_index(ag); item < p->route.ntokens * slices; item += ag_count(ag)) {
        const struct ll_part part = ll_part(p, item, width, slices);
        ll_write_part(ag, p, epoch, &part, scratch);
    }
    AG_MARK(ag, MARK_ROWS);
    ll_signal_written(ag, p, epoch);
    AG_MARK(ag, MARK_LAST);
    return 0;
}

#endif
