/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Low-latency dispatch between nodes: what travels. A destination is told what concerns it, and nothing else:
 *
 *   sender's slot                                         receive buffer of (source, slot) at the destination
 *   headers[R]   one of each destination   --- put --->   header: signature, rows, place, count[L]
 *   rows[B]      in the order of ll_order  --- puts -->   rows[0], rows[1], ... those for this rank, without gaps
 *
 * All of it is where the network reads and writes (net_at): the heap, or, with ll.split, host memory of this rank.
 *
 * A row is staged once, whatever the number of its destinations: payload, scales, record. The record has all that a
 * receiver must know of the row, for each of its K experts: ids, its number there, weights. The number is that among
 * the rows of this source at that expert (EXPERT_MAJOR), or at that rank (RANK_MAJOR), so that the place of a row does
 * not depend on the order in which rows are staged.
 */
#ifndef EPX_KERNEL_LL_REMOTE_H
#define EPX_KERNEL_LL_REMOTE_H

#include "kernel/inject_bug.h"
#include "kernel/ll_recv_half.h"
#include "kernel/ll_slot.h"

/* ---- Headers and records -------------------------------------------------------------------------------------- */

KFN size_t ll_header_bytes(const struct group_dev *g)
{
    return up16(sizeof(struct ll_header) + (size_t)g->local_experts * 4);
}

KFN const int32_t *ll_header_counts(const struct ll_header *header)
{
    return (const int32_t *)(header + 1);
}

KFN struct signature ll_header_signature(const struct ll_header *header)
{
    struct signature a;

    a.hidden_bytes = header->hidden_bytes;
    a.dtype = header->dtype;
    a.scale_bytes = header->scale_bytes;
    a.topk = header->topk;
    a.layout = header->layout;
    a.extra = header->extra;
    return a;
}

/* Where a row's record begins: behind payload and scales, and what the encoder of NVFP4 rows writes behind these. */
KFN size_t ll_record_at(const struct ll_dispatch_params *p)
{
    const size_t scales = (size_t)p->signature.scale_bytes + (p->in.cast == CAST_NVFP4 ? sizeof(float) : 0);

    return row_scales_at(&p->signature) + up16(scales);
}

/* token, ids[K], number[K], and weights[K] where they are asked for. */
KFN size_t ll_record_bytes(const struct signature *a)
{
    return up16(4 + (size_t)a->topk * (a->extra & SIGNATURE_WEIGHTS ? 12 : 8));
}

KFN uint64_t ll_remote_stride(const struct ll_dispatch_params *p)
{
    return ll_record_at(p) + ll_record_bytes(&p->signature);
}

KFN uint64_t ll_row_stride(const struct ll_dispatch_params *p)
{
    if (p->in_place)
        return (uint64_t)p->in.stride;
    return has_nodes(p->g) ? ll_remote_stride(p) : ll_record_at(p);
}

/* Offset of the receive buffer of source number `number` where the network of its receiver writes. */
KFN uint64_t ll_remote_offset(const struct group_dev *g, uint64_t epoch, int number)
{
    const uint64_t piece = (uint64_t)slot_of(g, epoch) * (uint64_t)g->remotes + (uint64_t)number;
    return g->ll.recv_buf + piece * g->ll.recv_stride;
}

/* What rank s of another node has put here, once its LL_DATA has arrived. */
KFN_STEP const struct ll_header *ll_header_there(const struct group_dev *g, int s, uint64_t epoch)
{
    return (const struct ll_header *)net_at(g, ll_remote_offset(g, epoch, g->recv_index_of[s]));
}

/* The same for all who read it, behind the barrier that follows ll_wait_remote(): across a bus, loads of one word by
 * many agents would come one after the other. */
KFN_STEP const struct ll_header *ll_header_of(const struct group_dev *g, int s, uint64_t epoch)
{
    if (!ll_split(g))
        return ll_header_there(g, s, epoch);
    return (const struct ll_header *)heap_at(
        g, g->rank, ll_slot_offset(g, epoch) + g->ll.headers + (uint64_t)s * ll_header_bytes(g));
}

/* Offset of a slot's headers and rows on their way out. */
KFN uint64_t ll_net_slot(const struct group_dev *g, uint64_t epoch)
{
    return g->ll.net_slots + (uint64_t)slot_of(g, epoch) * g->ll.net_slot_stride;
}

/* ---- Send ----------------------------------------------------------------------------------------------------- */

/* Does token t of `ids` go to `rank`? */
KFN int ll_goes_to(const struct group_dev *g, const int32_t *ids, int K, int t, int rank)
{
    for (int k = 0; k < K; k++) {
        const int32_t id = ids[(size_t)t * (size_t)K + (size_t)k];
        if (id >= 0 && id / g->local_experts == rank)
            return 1;
    }
    return 0;
}

#define LL_ORDER_BITS 10

/* Which of the next ranks of other nodes a token goes to, as its place in a Gray sequence: from one place to the next
 * one destination changes, so that tokens sorted by it form long runs for every destination. */
KFN int ll_order_key(const struct group_dev *g, const int32_t *ids, int K, int t)
{
    int code = 0, bits = 0;

    for (int j = 1; j < g->nranks && bits < LL_ORDER_BITS; j++) {
        const int r = (g->rank + j) % g->nranks;
        if (is_local(g, r))
            continue;
        code |= ll_goes_to(g, ids, K, t, r) << bits++;
    }
    for (int shift = 1; shift < LL_ORDER_BITS; shift <<= 1)
        code ^= code >> shift;
    return code;
}

/* order[i] = token of row i, pos[t] = row of token t: tokens sorted by their keys, and by number where keys are equal.
 * One agent. Each of several lanes finds the rows of some tokens by comparing all keys; a single one counts. */
KFN_STEP void ll_order(struct agent *ag, const struct ll_dispatch_params *p, int32_t *pos)
{
    const struct group_dev *g = p->g;
    const int B = p->route.ntokens, K = p->route.topk_n;
    int32_t *order = g->order, *keys = g->order + g->max_tokens;

    AG_EACH(ag, int, t, B) keys[t] = ll_order_key(g, p->h->ids, K, t);
    ag_sync(ag);
#if AG_ONE_LANE
    int32_t next[(1 << LL_ORDER_BITS) + 1] = {0}; /* row of the next token with this key */

    for (int t = 0; t < B; t++)
        next[keys[t] + 1]++;
    for (int key = 0; key < 1 << LL_ORDER_BITS; key++)
        next[key + 1] += next[key];
    for (int t = 0; t < B; t++) {
        pos[t] = next[keys[t]]++;
        order[pos[t]] = t;
    }
#else
    AG_EACH(ag, int, t, B)
    {
        const int32_t key = keys[t];
        int row = 0;
        for (int u = 0; u < B; u++)
            row += keys[u] < key || (keys[u] == key && u < t);
        order[row] = t;
        pos[t] = row;
    }
    ag_sync(ag);
#endif
}

/* at[i * stride] = base + sum of counts[0] to counts[i - 1]. Each lane takes neighbours: one scan for all. */
KFN_STEP void ll_add_up(struct agent *ag, const int32_t *counts, int n, int64_t base, int32_t *at, int stride)
{
    const int per = (n + AG_LANES - 1) / AG_LANES, first = ag_lane(ag) * per;
    const int end = first + per < n ? first + per : n;
    int64_t sum = 0;

    for (int i = first; i < end; i++)
        sum += counts[i];
    sum = base + ag_scan(ag, sum);
    for (int i = first; i < end; i++) {
        at[i * stride] = (int32_t)sum;
        sum += counts[i];
    }
}

/*
 * Where combined rows land at their source: by expert (or rank), then by number among its rows. What one rank returns
 * is then one piece, in the order in which that rank has it: `back` at the source, `source` at the rank that returns.
 * One agent.
 */
KFN_STEP void ll_places(struct agent *ag, const struct ll_dispatch_params *p)
{
    const int64_t first = ll_recv_half_row(p->g, p->g->state->recv_half);

    if (p->layout == LAYOUT_EXPERT_MAJOR)
        ll_add_up(ag, p->h->ecount, p->g->experts, first, p->h->back, 1);
    else
        ll_add_up(ag, p->h->rcount, p->g->nranks, first, p->h->back, 1);
}

/* The rows for each rank of another node, in the order of the stage: list[d][j] is the row that becomes the j-th of d.
 * A single lane goes through all pairs once; several find those of a rank when they put them (ll_list_remote). One
 * agent, after ll_order. */
KFN void ll_list_all_remote(struct agent *ag, const struct ll_dispatch_params *p, int32_t *list)
{
#if AG_ONE_LANE
    const struct group_dev *g = p->g;
    const int B = p->route.ntokens, K = p->route.topk_n;
    int32_t *next = g->tables; /* of the routing, which is done */

    AG_EACH(ag, int, r, g->nranks) next[r] = 0;
    for (int row = 0; row < B; row++) {
        const int64_t first = (int64_t)g->order[row] * K;
        for (int64_t i = first; i < first + K; i++) {
            const int d = p->h->ridx[i] < 0 ? g->rank : p->h->ids[i] / g->local_experts;
            if (!is_local(g, d))
                list[(size_t)d * (size_t)g->max_tokens + (size_t)next[d]++] = row;
        }
    }
#else
    (void)ag;
    (void)p;
    (void)list;
#endif
}

/* The same for rank d, where ll_list_all_remote() does nothing. */
KFN_STEP void ll_list_remote(struct agent *ag, const struct ll_dispatch_params *p, int d, int32_t *list)
{
#if AG_ONE_LANE
    (void)ag;
    (void)p;
    (void)d;
    (void)list;
#else
    const int B = p->route.ntokens, K = p->route.topk_n;
    int found = 0;

    AG_ROUNDS(ag, int, row, B)
    {
        const int goes = row < B && ll_goes_to(p->g, p->h->ids, K, p->g->order[row], d);
        int before;
        const int all = ag_vote(ag, goes, &before);
        if (goes)
            list[found + before] = row;
        found += all;
    }
    ag_sync(ag);
#endif
}

/* What a receiver must know of token t's row. */
KFN void ll_write_record(struct agent *ag, const struct ll_dispatch_params *p, char *row, int t)
{
    const int K = p->route.topk_n;
    const int32_t *number = p->layout == LAYOUT_EXPERT_MAJOR ? p->h->eidx : p->h->ridx;
    int32_t *record = (int32_t *)(row + ll_record_at(p));

    if (ag_leader(ag))
        record[0] = t;
    AG_EACH(ag, int, k, K)
    {
        const int64_t i = (int64_t)t * K + k;
        record[1 + k] = p->h->ids[i];
        record[1 + K + k] = number[i];
        if (p->signature.extra & SIGNATURE_WEIGHTS)
            ((float *)record)[1 + 2 * K + k] = p->weights ? p->weights[i] : 0.0f;
    }
}

KFN void ll_write_header(struct agent *ag, const struct ll_dispatch_params *p, int d, struct ll_header *header)
{
    const struct group_dev *g = p->g;
    const struct handle_dev *h = p->h;
    const int L = g->local_experts, first = d * L, by_expert = p->layout == LAYOUT_EXPERT_MAJOR;
    int32_t *count = (int32_t *)(header + 1);

    if (ag_leader(ag)) {
        header->hidden_bytes = p->signature.hidden_bytes;
        header->scale_bytes = p->signature.scale_bytes;
        header->dtype = (uint8_t)p->signature.dtype;
        header->topk = (uint8_t)p->signature.topk;
        header->layout = (uint8_t)p->signature.layout;
        header->extra = (uint8_t)p->signature.extra;
        header->rows = h->rcount[d];
        header->place = !by_expert ? h->back[d] : first < g->experts ? h->back[first] : 0;
        header->place = INJECT_BUG(BUG_HEADER_PLACE, header->place / 2, header->place);
    }
    AG_EACH(ag, int, l, L) count[l] = first + l < g->experts ? h->ecount[first + l] : 0;
    ag_sync(ag);
}

/* Header and rows to one rank of another node. */
KFN_STEP void ll_put_to(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch, int d,
                        struct put_batch *batch)
{
    const struct group_dev *g = p->g;
    const uint64_t from = ll_net_slot(g, epoch), stride = ll_row_stride(p);
    const uint64_t header = from + g->ll.net_headers + (uint64_t)d * ll_header_bytes(g), rows = from + g->ll.net_rows;
    const uint64_t target = ll_remote_offset(g, epoch, g->recv_index_at[d]);
    const int n = p->h->rcount[d], slot = slot_of(g, epoch);
    int32_t *list = (int32_t *)heap_at(g, g->rank, ll_slot_offset(g, epoch)) + (size_t)d * (size_t)g->max_tokens;

    ll_write_header(ag, p, d, (struct ll_header *)net_at(g, header));
    put(ag, g, batch, d, COUNTER(SIG_LL_DATA, slot), header, target, (uint32_t)ll_header_bytes(g));
    ll_list_remote(ag, p, d, list);
    for (int j = 0; j < n; j++) {
        const int to = INJECT_BUG(BUG_ROW_PLACE, list[j], j);
        put(ag, g, batch, d, COUNTER(SIG_LL_ROWS, slot), rows + (uint64_t)list[j] * stride,
            target + g->ll.head + (uint64_t)to * stride, (uint32_t)stride);
    }
}

/* All rows are staged: each agent serves some of the destinations, beginning with the next rank. */
KFN_STEP int ll_put_remote(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    struct put_batch batch;
    int nth = 0;

    put_begin(&batch);
    for (int j = 1; j < g->nranks; j++) {
        const int d = (g->rank + j) % g->nranks;
        if (is_local(g, d) || !is_active(g, d))
            continue;
        if (nth++ % ag_count(ag) == ag_index(ag))
            ll_put_to(ag, p, epoch, d, &batch);
    }
    if (put_flush(ag, g, &batch))
        return push_failed(ag, g, batch.failed);
    return 0;
}

/* ---- Receive -------------------------------------------------------------------------------------------------- */

/* A header from a network decides where this rank writes, and where it returns rows to: every value is checked. Zero:
 * it is valid. By all lanes. */
KFN_STEP int ll_header_unsound(struct agent *ag, const struct ll_dispatch_params *p, const struct ll_header *header)
{
    const struct group_dev *g = p->g;
    const int L = g->local_experts, left = g->experts - g->rank * L;
    const int32_t *count = ll_header_counts(header);
    const int64_t room = ll_recv_half_row(g, (int)g->ll.halves);
    int64_t pairs = 0;
    int odd = header->rows < 0 || header->rows > g->max_tokens || header->place < 0;

    AG_EACH(ag, int, l, L)
    {
        odd |= count[l] < 0 || (l >= left && count[l] > 0);
        pairs += count[l];
    }
    if (ag_any(ag, odd))
        return 1;
    pairs = ag_sum(ag, pairs);
    return pairs < header->rows || pairs > (int64_t)header->rows * p->route.topk_n ||
           header->place + (p->layout == LAYOUT_EXPERT_MAJOR ? pairs : header->rows) > room;
}

/* All rows from other nodes, through each ring. One agent; what others find wrong in the headers ends the wait. */
KFN_STEP int ll_wait_all_rows(struct agent *ag, const struct group_dev *g, uint64_t epoch)
{
    for (int ring = 0; ring < g->nrings; ring++) {
        int64_t rows = 0;
        AG_EACH(ag, int, s, g->nranks)
        if (!is_local(g, s) && ring_of(g, s, COUNTER(SIG_LL_ROWS, 0)) == ring)
            rows += ll_header_there(g, s, epoch)->rows;
        rows = ag_sum(ag, rows);
        if (wait_ring_rows(ag, g, ring, (uint64_t)rows, SIG_LL_ROWS, slot_of(g, epoch), PHASE_LL_ROWS))
            return 1;
    }
    return 0;
}

/* Rows from other nodes: as many as the headers say. */
KFN_STEP int ll_wait_remote(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    waits_begin(ag, g);
    for (int s = 0; s < g->nranks; s++) {
        if (is_local(g, s) || !is_active(g, s) || g->recv_index_of[s] % ag_count(ag) != ag_index(ag))
            continue;
        if (ll_split(g))
            ag_copy(ag, (char *)(uintptr_t)ll_header_of(g, s, epoch), (const char *)ll_header_there(g, s, epoch),
                    ll_header_bytes(g));
        ag_sync(ag);
        const struct ll_header *header = ll_header_of(g, s, epoch);
        const uint64_t n = (uint64_t)header->rows;
        if (ll_header_unsound(ag, p, header))
            return fail_all(ag, g, KSTATUS_MISMATCH, PHASE_LL_ROWS, s, 0, 0);
        if (!has_masks(g))
            expect_rows(ag, g, SIG_LL_ROWS, slot_of(g, epoch), s, n);
        else if (wait_rows(ag, g, SIG_LL_ROWS, slot_of(g, epoch), s, n, PHASE_LL_ROWS))
            return 1;
    }
    return !has_masks(g) && ag_index(ag) == 0 && ll_wait_all_rows(ag, g, epoch);
}

/* A received row, wherever it is. */
struct ll_row {
    const char *data;
    const int32_t *ids, *number; /* [K]; EXPERT_MAJOR: its number among the source's rows at each expert */
    const float *weights;        /* [K] */
    int token, place;            /* RANK_MAJOR: its place among the source's rows */
};

/* Row i of source s of another node. Each lane gets it. */
KFN struct ll_row ll_remote_row(const struct ll_dispatch_params *p, uint64_t epoch, int s, int i)
{
    const struct group_dev *g = p->g;
    const int K = p->route.topk_n, first = g->rank * g->local_experts;
    const char *rows = net_at(g, ll_remote_offset(g, epoch, g->recv_index_of[s]) + g->ll.head);
    struct ll_row row;

    row.data = rows + (size_t)i * ll_remote_stride(p);
    const int32_t *record = (const int32_t *)(row.data + ll_record_at(p));
    row.token = record[0];
    row.ids = record + 1;
    row.number = row.ids + K;
    row.weights = (const float *)(row.number + K);
    row.place = -1;
    for (int k = 0; k < K && p->layout == LAYOUT_RANK_MAJOR; k++)
        if (row.ids[k] >= first && row.ids[k] < first + g->local_experts && row.number[k] >= 0)
            row.place = row.number[k];
    return row;
}

/* Is the record of a row from a network invalid: a token, an expert or a number out of range, or no expert here? By all
 * lanes. */
KFN_STEP int ll_record_unsound(struct agent *ag, const struct ll_dispatch_params *p, const struct ll_header *header,
                               const struct ll_row *row)
{
    const struct group_dev *g = p->g;
    const int K = p->route.topk_n, first = g->rank * g->local_experts, by_expert = p->layout == LAYOUT_EXPERT_MAJOR;
    int odd = row->token < 0 || row->token >= g->max_tokens || (!by_expert && row->place >= header->rows);
    int here = !by_expert && row->place >= 0;

    AG_EACH(ag, int, k, K)
    {
        const int32_t id = row->ids[k], l = id - first;
        odd |= id < -1 || id >= g->experts;
        if (id < 0 || l < 0 || l >= g->local_experts || !by_expert)
            continue;
        odd |= row->number[k] < 0 || row->number[k] >= ll_header_counts(header)[l];
        here = 1;
    }
    return ag_any(ag, odd) || !ag_any(ag, here);
}

#endif
