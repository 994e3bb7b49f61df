/* SPDX-License-Identifier: Apache-2.0 */
/* Low-latency combine: the receive half. The protocol is drawn in ll_combine.h. */
#ifndef EPX_KERNEL_LL_COMBINE_RECV_H
#define EPX_KERNEL_LL_COMBINE_RECV_H

#include "kernel/ll_combine_remote.h"
#include "kernel/ll_combine_sum.h"
#include "kernel/ll_recv_half.h"
#include "kernel/ll_wide_wait.h"

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
    rows += d != g->rank && is_local(g, d) && is_active(g, d) ? lc_rows_from(p, d) : 0;
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
    const char *rows = lc_net_rows(g, epoch);
    uint64_t at = lc_row_at(p, (uint64_t)first);
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

/* Rows that come back through a ring; counts those of each rank. One agent. */
KFN uint64_t lc_ring_rows(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch, int ring)
{
    const struct group_dev *g = p->g;
    int64_t rows = 0;

    AG_EACH(ag, int, d, g->nranks)
    {
        if (is_local(g, d) || ring_of(g, d, COUNTER(SIG_LC_ROWS, 0)) != ring)
            continue;
        const uint64_t n = lc_rows_from(p, d);
        g->expected[signal_index(g, SIG_LC_ROWS, slot_of(g, epoch), d)] += n; /* see late_rows() */
        rows += (int64_t)n;
    }
    return (uint64_t)ag_sum(ag, rows);
}

KFN_STEP int lc_wait_remote(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    waits_begin(ag, g);
    for (int d = 0; d < g->nranks && has_masks(g); d++) {
        if (is_local(g, d) || !is_active(g, d) || g->recv_index_of[d] % ag_count(ag) != ag_index(ag))
            continue;
        if (wait_rows(ag, g, SIG_LC_ROWS, slot_of(g, epoch), d, lc_rows_from(p, d), PHASE_LC_ROWS))
            return 1;
    }
    for (int ring = 0; ring < g->nrings && !has_masks(g) && ag_index(ag) == 0; ring++)
        if (wait_ring_rows(ag, g, ring, lc_ring_rows(ag, p, epoch, ring), SIG_LC_ROWS, slot_of(g, epoch),
                           PHASE_LC_ROWS))
            return 1;
    return sync_barrier(ag, g);
}

/* LogFMT rows of other nodes, shared out to the agents by rank. */
KFN_STEP int lc_unpack_all(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    for (int d = 0; d < g->nranks; d++) {
        if (is_local(g, d) || !is_active(g, d) || g->recv_index_of[d] % ag_count(ag) != ag_index(ag))
            continue;
        if (lc_unpack(ag, p, epoch, d))
            return 1;
    }
    return sync_barrier(ag, g);
}

KFN int lc_check_descs(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    int odd = 0;

    AG_EACH(ag, int, d, g->nranks)
    odd |= is_active(g, d) && signature_differs(&p->signature, &lc_desc_of(g, d, epoch)->signature);
    if (!ag_any(ag, odd))
        return 0;
    for (int d = 0; d < g->nranks; d++)
        if (is_active(g, d) &&
            check_signature(ag, g, &p->signature, &lc_desc_of(g, d, epoch)->signature, PHASE_LC_DATA, d))
            return 1;
    return 0;
}

#if AG_BLOCKS
/* A block in which the wait has not ended well. `waited` as for ll_block_goes_on(). */
KFN_STEP int lc_wait_stops(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch, enum ll_waited waited)
{
    const struct group_dev *g = p->g;

    if (!ll_block_goes_on(ag, &p->wide_wait, waited) || !ag_is_narrow(ag))
        return 1;
    if (wait_peers(ag, g, SCOPE_NODE, SIG_LC_DATA, slot_of(g, epoch), lap_of(g, epoch), PHASE_LC_DATA, NULL))
        return 1;
    if (ag_index(ag) == 0)
        ll_mark_narrow(ag, g);
    return lc_check_descs(ag, p, epoch);
}

/* One node, nobody masked: the first agent of each block waits and checks for all of it. Late peers: few blocks go on,
 * the others leave (ll_wide_wait.h). Non-zero: failed, or the block leaves. */
KFN int lc_wait_node(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    enum ll_waited waited = LL_ALL_GO_ON;
    int bad = 0;

    if (ag_block_index(ag) == 0) {
        waited = ll_wait(ag, g, OP_LL_COMBINE, SIG_LC_DATA, epoch, PHASE_LC_DATA, &p->wide_wait,
                         ag_index(ag) == 0 ? p->wait_ns : NULL);
        bad = waited != LL_ALL_GO_ON || lc_check_descs(ag, p, epoch);
    }
    return block_barrier(ag, g, bad) && lc_wait_stops(ag, p, epoch, waited);
}
#endif

/* The descriptors of all ranks are there, and all rows of this node. */
KFN_STEP int lc_wait(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

#if AG_BLOCKS
    if (!lc_nodes(p) && !has_masks(g))
        return lc_wait_node(ag, p, epoch);
#endif
    if (wait_peers(ag, g, SCOPE_ALL, SIG_LC_DATA, slot_of(g, epoch), lap_of(g, epoch), PHASE_LC_DATA, p->wait_ns))
        return 1;
    /* As in ll_wait_tables(): between nodes a barrier follows before rows are read (lc_wait_remote). */
    return (!lc_nodes(p) || ag_index(ag) == 0) && lc_check_descs(ag, p, epoch);
}

/* All rows can be read. */
KFN int lc_data(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch)
{
    if (lc_wait(ag, p, epoch))
        return 1;
    AG_MARK(ag, MARK_DATA);
#if AG_STAGED
    if (lc_nodes(p) && ag_index(ag) == 0)
        lc_fetch_descs(ag, p, epoch);
#endif
    return lc_nodes(p) && lc_wait_remote(ag, p, epoch);
}

/* The own tokens. */
KFN_STEP int lc_sum(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    if (lc_nodes(p) && LC_LOGFMT(p) && lc_unpack_all(ag, p, epoch))
        return 1;
    count_returned(ag, g, lc_sum_tokens(ag, p, epoch));
    AG_MARK(ag, MARK_SUM);
    if (sync_last(ag, g, 1)) {
        ll_record_recv_half(ag, g, p->h->state, slot_of(g, epoch));
        signal_peers(ag, g, SCOPE_ALL, SIG_LC_DONE, slot_of(g, epoch), lap_of(g, epoch));
        report_returned(ag, g);
        lc_count_peer(ag, p);
    }
    return 0;
}

#endif
