/* SPDX-License-Identifier: Apache-2.0 */
/*
 * High-throughput dispatch, epoch e. Routing is known (ht_notify.h): every row has its final place.
 *
 *   sender s                                          receiver d of the node
 *                                                     descriptor: where its tensors are (the caller's own in epx_alloc
 *   wait HD_READY[node] >= e  <---------------------    memory, else the receive buffer); signal HD_READY = e
 *   read each row once, write it straight to its      zero its padding, mark the rows past the end
 *     place at every destination of the node
 *   signal HD_DATA = e  ---------------------------->  wait HD_DATA[node] >= e
 *                                                      copy from the receive buffer, if it was used
 *
 *                                                     relay q: one rank of each other node
 *   wait HD_FREE[q] >= e - 1
 *   put the header, counter HD_DATA  --------------->  wait HD_DATA[s] >= e, compare signatures
 *   put ONE copy of each row per node, from where it
 *     is or from the stage, at its number among the
 *     node's, counter HD_ROWS  --------------------->  chunk by chunk: wait HD_ROWS[s], write the rows straight to
 *                                                        their places in its node, as if they were its own
 *   HD_FREE counted               <------------------  put of no bytes, counter HD_FREE
 *                                                      its own HD_DATA = e to the node covers what it forwarded
 *
 * A receiver's next descriptor comes only after this epoch's HD_DATA of all: no row can land in the wrong epoch.
 */
#ifndef EPX_KERNEL_HT_DISPATCH_H
#define EPX_KERNEL_HT_DISPATCH_H

#include "kernel/ht_place.h"

KFN void hd_send_token(struct agent *ag, const struct ht_dispatch_params *p, int t, char *scratch,
                       const struct hd_desc *descs)
{
    const int K = p->h->state->topk;
    struct hd_row r;

    r.ids = p->h->ids + (size_t)t * K;
    r.pos = p->h->pos + (size_t)t * K;
    r.weights = p->weights ? p->weights + (size_t)t * K : NULL;
    r.line = p->desc.map && p->h->line ? p->h->line + (size_t)t * K : NULL;
    r.src_rank = p->g->rank;
    r.src_token = t;
    r.data = row_tokens(&p->in, t);
    r.scales = p->in.scales + t * p->in.scale_row_stride;
    r.scale_stride = p->in.scale_stride;
    r.scratch = scratch;
    r.descs = descs;
    hd_place_row(ag, p, &r);
}

/* The descriptors of the node, which do not change any more, in memory of the block; NULL where it has none. */
KFN const struct hd_desc *hd_descs(struct agent *ag, const struct group_dev *g)
{
#if AG_BLOCKS
    const int words = (int)(sizeof(struct hd_desc) / 4);
    int32_t *memory = ag_block_memory(ag, g->nranks * words);

    if (!memory)
        return NULL;
    AG_EACH_BLOCK(ag, int, i, g->nranks *words)
    {
        if (is_local(g, i / words))
            memory[i] = ((const int32_t *)hd_desc_of(g, i / words))[i % words];
    }
    ag_block_any(ag, 0);
    return (const struct hd_desc *)memory;
#else
    (void)ag;
    (void)g;
    return NULL;
#endif
}

/* ---- Between nodes -------------------------------------------------------------------------------------------- */

/*
 * Between nodes a row is its payload, then its extras: scales and weights, each from a multiple of 16. Rows that are in
 * the sender's heap in the format of the wire are put from there; the extras of all tokens then go apart from them,
 * behind the header that tells the relay which operation this is. Other rows are staged with their extras.
 *
 *   a source's receive buffer at its relay:   header | rows with extras ...
 *                                       or:   header | room for all extras, by token | rows ...
 */
KFN size_t hd_weights_at(const struct ht_dispatch_params *p) /* among the extras */
{
    return up16((size_t)p->signature.scale_bytes);
}

KFN size_t hd_extra_bytes(const struct ht_dispatch_params *p)
{
    return hd_weights_at(p) + (p->signature.extra & SIGNATURE_WEIGHTS ? up16((size_t)p->h->state->topk * 4) : 0);
}

KFN size_t hd_wire_bytes(const struct ht_dispatch_params *p, int apart)
{
    return row_scales_at(&p->signature) + (apart ? 0 : hd_extra_bytes(p));
}

/* From the start of a receive buffer to its rows. */
KFN uint64_t hd_rows_at(const struct group_dev *g, int apart)
{
    return HD_HEADER_BYTES + (apart ? (uint64_t)g->max_tokens * (g->ht.hpitch - g->ht.pitch) : 0);
}

/* Row number i of n belongs to this chunk. */
KFN int hd_chunk(int i, int n)
{
    return i / ((n + HD_CHUNKS - 1) / HD_CHUNKS);
}

/* The receive buffer of the source with this number at its relay. */
KFN uint64_t ht_recv_buf(const struct group_dev *g, int number)
{
    return g->ht.relay + (uint64_t)number * g->ht.relay_stride;
}

/* The same bytes to all relays of this rank, at `target` from the start of its receive buffer there. One agent. */
KFN_STEP int ht_put_relays(struct agent *ag, const struct group_dev *g, int kind, uint64_t source, uint64_t target,
                           uint64_t target_stride, uint32_t bytes)
{
    struct put_batch batch;

    put_begin(&batch);
    for (int n = 0; n < g->nnodes; n++)
        if (n != g->node && g->mask[g->relay_rank[n]])
            put(ag, g, &batch, g->relay_rank[n], COUNTER(kind, 0), source,
                target + (uint64_t)g->relay_slot[n] * target_stride, bytes);
    return put_flush(ag, g, &batch);
}

/* Waits until every relay of this rank has forwarded its rows of `epoch`. One agent. */
KFN_STEP int hd_wait_free(struct agent *ag, const struct group_dev *g, uint64_t epoch)
{
    const uint64_t start = ag_now(ag);

    for (int n = 0; n < g->nnodes; n++)
        if (n != g->node && g->mask[g->relay_rank[n]] &&
            wait_word(ag, g, signal_from(g, SIG_HD_FREE, 0, g->relay_rank[n]), epoch, PHASE_HD_FREE, g->relay_rank[n],
                      start))
            return 1;
    return 0;
}

KFN void hd_stage_extras(struct agent *ag, const struct ht_dispatch_params *p, char *to, int64_t t)
{
    const int K = p->h->state->topk;

    if (p->in.nscales)
        row_copy_scales(ag, to, 4, p->in.scales + t * p->in.scale_row_stride, p->in.scale_stride, p->in.nscales);
    if (p->signature.extra & SIGNATURE_WEIGHTS)
        ag_copy(ag, to + hd_weights_at(p), p->weights + t * K, (size_t)K * 4);
}

/* Sends the header to the relays, with the extras if they go apart. */
KFN_STEP int hd_put_header(struct agent *ag, const struct ht_dispatch_params *p)
{
    const struct group_dev *g = p->g;
    const int64_t B = p->h->state->ntokens;
    const size_t extra = p->desc.apart ? hd_extra_bytes(p) : 0;
    char *header = heap_at(g, g->rank, g->ht.back);

    for (int64_t t = ag_index(ag); t < B && extra; t += ag_count(ag))
        hd_stage_extras(ag, p, header + HD_HEADER_BYTES + (size_t)t * extra, t);
    if (!sync_last(ag, g, 1))
        return 0;
    if (extra)
        ag_copy(ag, header, heap_at(g, g->rank, g->ht.dispatch_desc), HD_HEADER_BYTES);
    ag_sync(ag);
    return ht_put_relays(ag, g, SIG_HD_DATA, extra ? g->ht.back : g->ht.dispatch_desc, g->ht.relay, g->ht.relay_stride,
                         (uint32_t)(HD_HEADER_BYTES + (size_t)B * extra))
               ? push_failed(ag, g)
               : 0;
}

/* Puts one copy of each token to each node that wants it, staged if need be. Each agent has a run of tokens. */
KFN_STEP int hd_send_remote(struct agent *ag, const struct ht_dispatch_params *p)
{
    const struct group_dev *g = p->g;
    const struct handle_dev *h = p->h;
    const int64_t B = h->state->ntokens, me = ag_index(ag), A = ag_count(ag);
    const int apart = p->desc.apart;
    const size_t bytes = hd_wire_bytes(p, apart), M = (size_t)g->max_tokens;
    struct put_batch batch;
    uint64_t rows = 0;

    put_begin(&batch);
    for (int64_t t = B * me / A; t < B * (me + 1) / A; t++) {
        const uint64_t source = apart ? p->in_place + (uint64_t)(t * p->in.stride) : g->ht.back + (uint64_t)t * bytes;
        if (!apart) {
            char *row = heap_at(g, g->rank, source);
            row_stage(ag, row, &p->in, &p->signature, t);
            if (p->signature.extra & SIGNATURE_WEIGHTS)
                ag_copy(ag, row + row_scales_at(&p->signature) + hd_weights_at(p), p->weights + t * h->state->topk,
                        (size_t)h->state->topk * 4);
            ag_sync(ag);
        }
        for (int j = 1; j < g->nnodes; j++) {
            const int n = (g->node + j) % g->nnodes;
            const int i = h->nidx[(size_t)n * M + (size_t)t];
            if (i < 0 || !g->mask[g->relay_rank[n]])
                continue;
            put(ag, g, &batch, g->relay_rank[n], COUNTER(SIG_HD_ROWS, hd_chunk(i, h->ncount[n])), source,
                ht_recv_buf(g, g->relay_slot[n]) + hd_rows_at(g, apart) + (uint64_t)i * bytes, (uint32_t)bytes);
            rows++;
        }
    }
    if (ag_leader(ag))
        ag_add_stat(&g->stats->rows_remote, rows);
    return put_flush(ag, g, &batch) ? push_failed(ag, g) : 0;
}

KFN void hd_forward_row(struct agent *ag, const struct ht_dispatch_params *p, int j, int i, int apart)
{
    const struct group_dev *g = p->g;
    const struct handle_dev *h = p->h;
    const size_t M = (size_t)g->max_tokens, K = (size_t)h->state->topk;
    const int t = h->relay_list[(size_t)j * M + (size_t)i];
    const char *recv_buf = heap_at(g, g->rank, ht_recv_buf(g, j));
    const char *row = recv_buf + hd_rows_at(g, apart) + (size_t)i * hd_wire_bytes(p, apart);
    const char *extras =
        apart ? recv_buf + HD_HEADER_BYTES + (size_t)t * hd_extra_bytes(p) : row + row_scales_at(&p->signature);
    struct hd_row r;

    r.ids = h->relay_ids + ((size_t)j * M + (size_t)t) * K;
    r.pos = h->relay_pos + ((size_t)j * M + (size_t)t) * K;
    r.weights = p->signature.extra & SIGNATURE_WEIGHTS ? (const float *)(extras + hd_weights_at(p)) : NULL;
    r.line = p->desc.map && h->relay_line ? h->relay_line + ((size_t)j * M + (size_t)t) * K : NULL;
    r.src_rank = g->relay_sources[j];
    r.src_token = t;
    r.data = row;
    r.scales = extras;
    r.scale_stride = 4;
    r.scratch = NULL;
    r.descs = NULL;
    hd_place_row(ag, p, &r);
}

/* Rows of source number j, chunk by chunk as they land; the chunks are dealt out to the agents. */
KFN_STEP int hd_forward(struct agent *ag, const struct ht_dispatch_params *p, uint64_t epoch, int j)
{
    const struct group_dev *g = p->g;
    const int s = g->relay_sources[j], n = p->h->relay_n[j];
    const int per = (n + HD_CHUNKS - 1) / HD_CHUNKS;
    const uint64_t start = ag_now(ag);
    const struct hd_desc *header = (const struct hd_desc *)heap_at(g, g->rank, ht_recv_buf(g, j));

    if (!g->mask[s])
        return 0;
    if (wait_word(ag, g, signal_from(g, SIG_HD_DATA, 0, s), epoch, PHASE_HD_ROWS, s, start))
        return 1;
    if (g->mask[s] && check_signature(ag, g, &p->signature, &header->signature, PHASE_HD_ROWS, s))
        return 1;
    for (int c = 0; c < HD_CHUNKS && c * per < n; c++) {
        const int end = (c + 1) * per < n ? (c + 1) * per : n;
        if ((j * HD_CHUNKS + c) % ag_count(ag) != ag_index(ag))
            continue;
        if (wait_rows(ag, g, SIG_HD_ROWS, c, s, (uint64_t)(end - c * per), PHASE_HD_ROWS, start))
            return 1;
        for (int i = c * per; i < end; i++)
            hd_forward_row(ag, p, j, i, header->apart);
    }
    return 0;
}

#if AG_STAGED
/* Stage HD_LANDED: all rows that this rank relays have landed. hd_forward() counts them as taken. One agent. */
KFN_STEP int hd_landed(struct agent *ag, const struct ht_dispatch_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    const uint64_t start = ag_now(ag);

    for (int j = 0; j < g->relay_count; j++) {
        const int s = g->relay_sources[j], n = p->h->relay_n[j], per = (n + HD_CHUNKS - 1) / HD_CHUNKS;
        if (!g->mask[s])
            continue;
        if (wait_word(ag, g, signal_from(g, SIG_HD_DATA, 0, s), epoch, PHASE_HD_ROWS, s, start))
            return 1;
        for (int c = 0; c < HD_CHUNKS && c * per < n; c++) {
            const size_t i = signal_index(g, SIG_HD_ROWS, c, s);
            const int rows = ((c + 1) * per < n ? (c + 1) * per : n) - c * per;
            if (wait_word(ag, g, &g->counters[i], g->expected[i] + (uint64_t)rows, PHASE_HD_ROWS, s, start))
                return 1;
        }
    }
    return 0;
}
#endif

/* The receive buffer of this relay is free again. One agent. */
KFN_STEP void hd_release(struct agent *ag, const struct group_dev *g)
{
    struct put_batch batch;

    put_begin(&batch);
    for (int j = 0; j < g->relay_count; j++)
        if (g->mask[g->relay_sources[j]])
            put(ag, g, &batch, g->relay_sources[j], COUNTER(SIG_HD_FREE, 0), 0, 0, 0);
    if (put_flush(ag, g, &batch))
        push_failed(ag, g); /* as in signal_peers() */
}

/* ---- The own receive tensors ---------------------------------------------------------------------------------- */

KFN void hd_zero_row(struct agent *ag, const struct ht_dispatch_params *p, int64_t row)
{
    ag_zero(ag, p->final.tokens + row * p->final.stride, (size_t)p->signature.hidden_bytes);
    AG_EACH(ag, int, i, p->signature.scale_bytes / 4)
    *(uint32_t *)(p->final.scales + row * p->final.scale_row_stride + i * p->final.scale_stride) = 0;
}

/* EXPERT_MAJOR, behind the last zone: weights are 0; where rows are dropped, all is. */
KFN_STEP void hd_zero_tail(struct agent *ag, const struct ht_dispatch_params *p)
{
    const int64_t rows = p->h->state->recv_rows;

    if (p->final_weights)
        AG_EACH_ALL(ag, int64_t, i, p->final_rows - rows) p->final_weights[rows + i] = 0.0f;
    for (int64_t row = rows + ag_index(ag); p->drop && row < p->final_rows; row += ag_count(ag))
        hd_zero_row(ag, p, row);
}

/* EXPERT_MAJOR: rows between the tokens of an expert and the next zone. */
KFN_STEP void hd_zero_padding(struct agent *ag, const struct ht_dispatch_params *p)
{
    const struct handle_dev *h = p->h;

    hd_zero_tail(ag, p);
    for (int l = ag_index(ag); l < p->g->local_experts; l += ag_count(ag)) {
        for (int64_t row = h->zone[l] + h->filled[l]; row < h->zone[l] + h->padded[l]; row++) {
            if (row >= p->desc.capacity)
                break;
            hd_zero_row(ag, p, row);
            if (!ag_leader(ag))
                continue;
            if (p->final_weights)
                p->final_weights[row] = 0.0f;
            if (p->final_src_rank)
                p->final_src_rank[row] = -1;
            if (p->final_src_token)
                p->final_src_token[row] = -1;
        }
    }
}

/* FLAT: rows past the last one carry no expert. */
KFN_STEP void hd_mark_tail(struct agent *ag, const struct ht_dispatch_params *p)
{
    const int K = p->h->state->topk;
    const int64_t first = p->h->state->recv_rows * K, end = p->final_rows * K;

    AG_EACH_ALL(ag, int64_t, i, end - first)
    {
        if (p->final_idx.data)
            index_put(&p->final_idx, first + i, -1);
        if (p->final_weights)
            p->final_weights[first + i] = 0.0f;
    }
}

/* One received row from the receive buffer to the caller's tensors; what is already in place has no BUFFERED_ bit. */
KFN void hd_take_row(struct agent *ag, const struct ht_dispatch_params *p, int64_t row)
{
    const struct group_dev *g = p->g;
    const int K = p->layout == LAYOUT_FLAT ? p->h->state->topk : 1;
    const char *heap = heap_at(g, g->rank, 0);

    if (p->buffered & BUFFERED_TOKENS)
        ag_copy(ag, p->final.tokens + row * p->final.stride,
                heap + p->desc.tokens + (uint64_t)row * p->desc.token_stride, (size_t)p->signature.hidden_bytes);
    if (p->buffered & BUFFERED_SCALES)
        row_copy_scales(ag, p->final.scales + row * p->final.scale_row_stride, p->final.scale_stride,
                        heap + p->desc.scales + (uint64_t)row * p->desc.scale_row_stride, (int64_t)p->desc.scale_stride,
                        p->signature.scale_bytes / 4);
    AG_EACH(ag, int, k, K)
    {
        const int64_t i = row * K + k;
        if (p->buffered & BUFFERED_WEIGHTS)
            p->final_weights[i] = ((const float *)(heap + p->desc.weights))[i];
        if (p->buffered & BUFFERED_IDX)
            index_put(&p->final_idx, i,
                      p->desc.idx & IDX_64 ? ((const int64_t *)(heap + p->desc.topk_idx))[i]
                                           : ((const int32_t *)(heap + p->desc.topk_idx))[i]);
    }
    if (!ag_leader(ag))
        return;
    if (p->buffered & BUFFERED_SRC_RANK)
        p->final_src_rank[row] = ((const int32_t *)(heap + p->desc.src_rank))[row];
    if (p->buffered & BUFFERED_SRC_TOKEN)
        p->final_src_token[row] = ((const int32_t *)(heap + p->desc.src_token))[row];
}

KFN_STEP void hd_copy_map(struct agent *ag, const struct ht_dispatch_params *p)
{
    const struct handle_state *state = p->h->state;
    const int64_t lines = state->tokens < p->desc.map_lines ? state->tokens : p->desc.map_lines;
    const int32_t *from = (const int32_t *)heap_at(p->g, p->g->rank, p->desc.map);

    AG_EACH_ALL(ag, int64_t, i, lines * (state->topk + 2)) p->final_map[i] = from[i];
}

KFN_STEP void hd_copy_recv_buf(struct agent *ag, const struct ht_dispatch_params *p)
{
    const struct handle_dev *h = p->h;
    const int A = ag_count(ag);
    int64_t rows = h->state->recv_rows < p->desc.capacity ? h->state->recv_rows : p->desc.capacity;

    if (p->buffered & BUFFERED_MAP)
        hd_copy_map(ag, p);
    if (p->layout == LAYOUT_FLAT) {
        for (int64_t row = ag_index(ag); row < rows; row += A)
            hd_take_row(ag, p, row);
        return;
    }
    for (int l = 0; l < p->g->local_experts; l++) {
        const int64_t end = h->zone[l] + h->filled[l] < rows ? h->zone[l] + h->filled[l] : rows;
        for (int64_t row = h->zone[l] + ag_index(ag); row < end; row += A)
            hd_take_row(ag, p, row);
    }
}

/* Counted once per operation, by one lane. */
KFN_STEP void hd_count(const struct ht_dispatch_params *p)
{
    const struct group_dev *g = p->g;
    const struct handle_dev *h = p->h;
    uint64_t all = 0;

    for (int e = 0; e < g->experts && p->layout == LAYOUT_EXPERT_MAJOR; e++)
        all += (uint64_t)h->ecount[e];
    for (int r = 0; r < g->nranks && p->layout == LAYOUT_FLAT; r++)
        all += (uint64_t)h->rcount[r];
    ag_add_stat(&g->stats->rows_sent, all);
    ag_add_stat(&g->stats->bytes_peer, (uint64_t)h->state->peer_rows * (uint64_t)p->signature.hidden_bytes);
    ag_add_stat(&g->stats->rows_received, (uint64_t)h->state->filled_rows);
    if (p->buffered & BUFFERED_TOKENS)
        ag_add_stat(&g->stats->bytes_local, (uint64_t)h->state->filled_rows * (uint64_t)p->signature.hidden_bytes);
}

/* The own descriptor, and the signal that it is written. One agent. */
KFN_STEP int hd_open(struct agent *ag, const struct ht_dispatch_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    if (g->nnodes > 1 && hd_wait_free(ag, g, INJECT_BUG(BUG_EPOCH, epoch - 2, epoch - 1)))
        return 1;
    if (ag_leader(ag))
        *(struct hd_desc *)heap_at(g, g->rank, g->ht.dispatch_desc) = p->desc;
    ag_sync(ag);
    signal_peers(ag, g, SCOPE_NODE, SIG_HD_READY, 0, epoch);
    return 0;
}

/* Stage HD_READY: the descriptors of the node are written, and agree. */
KFN_STEP int hd_ready(struct agent *ag, const struct ht_dispatch_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    if (ht_check_routing(ag, g, p->h, p->key, p->ntokens, PHASE_HD_READY))
        return 1;
    if (ag_index(ag) == 0 && hd_open(ag, p, epoch))
        return 1;
    if (wait_peers(ag, g, SCOPE_NODE, SIG_HD_READY, 0, epoch, PHASE_HD_READY, NULL))
        return 1;
    for (int d = 0; d < g->nranks; d++)
        if (in_scope(g, SCOPE_NODE, d) &&
            check_signature(ag, g, &p->signature, &hd_desc_of(g, d)->signature, PHASE_HD_READY, d))
            return 1;
    return 0;
}

/* All rows that this rank writes into its node are written. */
KFN void hd_rows_done(struct agent *ag, const struct ht_dispatch_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    if (!sync_last(ag, g, 0))
        return;
    if (ag_leader(ag))
        g->state->epoch[OP_HT_DISPATCH] = epoch;
    ag_sync(ag);
    signal_peers(ag, g, SCOPE_NODE, SIG_HD_DATA, 0, epoch);
    if (g->nnodes > 1)
        hd_release(ag, g);
    if (ag_leader(ag))
        hd_count(p);
}

/* Stage HD_ROWS: the own tokens. */
KFN int hd_rows(struct agent *ag, const struct ht_dispatch_params *p)
{
    const struct group_dev *g = p->g;
    const struct hd_desc *descs = hd_descs(ag, g);
    char *scratch = NULL;

    if (p->in.cast &&
        !(scratch = (char *)ag_scratch(ag, row_scales_at(&p->signature) + (size_t)p->signature.scale_bytes)))
        return fail_all(ag, g, KSTATUS_MEMORY, PHASE_HD_READY, -1, p->signature.hidden_bytes, 0);
    if (p->layout == LAYOUT_EXPERT_MAJOR)
        hd_zero_padding(ag, p);
    else
        hd_mark_tail(ag, p);
    if (g->nnodes > 1 && (hd_put_header(ag, p) || hd_send_remote(ag, p)))
        return 1;
    for (int t = ag_index(ag); t < p->h->state->ntokens; t += ag_count(ag))
        hd_send_token(ag, p, t, scratch, descs);
    return 0;
}

/* Stage HD_FORWARD, as a relay: rows of other nodes. */
KFN int hd_forward_all(struct agent *ag, const struct ht_dispatch_params *p, uint64_t epoch)
{
    for (int j = 0; j < p->g->relay_count; j++)
        if (hd_forward(ag, p, epoch, j))
            return 1;
    return 0;
}

/* Stage HD_DATA: all rows of this rank are there, and the network has read those that it sends from the caller's
 * tensor. */
KFN_STEP int hd_data(struct agent *ag, const struct ht_dispatch_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    if (wait_peers(ag, g, SCOPE_NODE, SIG_HD_DATA, 0, epoch, PHASE_HD_DATA, NULL))
        return 1;
    if (p->h->state->recv_rows > p->desc.capacity)
        report(ag, g, KSTATUS_OVERFLOW, PHASE_HD_DATA, -1, p->h->state->recv_rows, p->desc.capacity, 0, 0);
    else if (p->desc.map && p->h->state->tokens > p->desc.map_lines)
        report(ag, g, KSTATUS_OVERFLOW, PHASE_HD_DATA, -1, p->h->state->tokens, p->desc.map_lines, 0, 0);
    return p->desc.apart && ag_index(ag) == 0 ? wait_sent(ag, g, PHASE_HD_SENT) : 0;
}

KFN int hd_run(struct agent *ag, const struct ht_dispatch_params *p, uint64_t epoch)
{
    if (stage_runs(ag, HD_READY) && hd_ready(ag, p, epoch))
        return 1;
    if (stage_runs(ag, HD_ROWS) && hd_rows(ag, p))
        return 1;
#if AG_STAGED
    if (stage_runs(ag, HD_LANDED) && hd_landed(ag, p, epoch))
        return 1;
#endif
    if (stage_runs(ag, HD_FORWARD) && hd_forward_all(ag, p, epoch))
        return 1;
    if (stage_runs(ag, p->nodes ? HD_FORWARD : HD_ROWS))
        hd_rows_done(ag, p, epoch);
    if (stage_runs(ag, HD_DATA) && hd_data(ag, p, epoch))
        return 1;
    if (stage_runs(ag, HD_COPY_OUT) && p->buffered)
        hd_copy_recv_buf(ag, p);
    return 0;
}

KFN void kernel_ht_dispatch(struct agent *ag, const struct ht_dispatch_params *p)
{
    const uint64_t epoch = stage_epoch(ag, p->g, OP_HT_DISPATCH, HD_FORWARD);

    if (!kernel_begin_agreed(ag, p->g))
        hd_run(ag, p, epoch);
    kernel_end(ag, p->g);
}

#endif
