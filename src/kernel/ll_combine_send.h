/* SPDX-License-Identifier: Apache-2.0 */
/* Low-latency combine: the send half. The protocol is drawn in ll_combine.h. */
#ifndef EPX_KERNEL_LL_COMBINE_SEND_H
#define EPX_KERNEL_LL_COMBINE_SEND_H

#include "kernel/ll_combine_remote.h"
#include "kernel/ll_recv_half.h"

/* Rows i, i + A, ... of a block, straight into the receive slot of a source of the node. Non-zero: failed. */
KFN int lc_push_block(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch, int s, int l, int i)
{
    const struct group_dev *g = p->g;
    const struct lc_block b = lc_block_at(p, s, l);
    char *recv_buf = lc_slot(g, s, epoch) + g->ll.crows;

    for (; i < b.n; i += ag_count(ag)) {
        if (p->signals && (lc_wait_row(ag, p, l, b.rows + i * p->stride) || writes_begin(ag, g, PHASE_LC_DATA)))
            return 1;
        AG_WRITES(ag, g, s);
        char *to = recv_buf + lc_row_at(p, b.place + (uint64_t)i);
        const uint32_t bytes = lc_write_row(ag, p, to, b.rows + i * p->stride);
        AG_WROTE(ag, g, s, to, bytes);
        if (p->signals)
            writes_end(ag, g);
    }
    return 0;
}

/* The rank that block q of all blocks is for, by rank: the next one first, so that not all ranks begin with rank 0.
 * With signals by expert: as they become ready. */
KFN int lc_push_rank(const struct ll_combine_params *p, int q)
{
    return (p->g->rank + 1 + (p->signals ? q % p->g->nranks : q / lc_blocks(p))) % p->g->nranks;
}

KFN int lc_push_expert(const struct ll_combine_params *p, int q)
{
    return p->signals ? q / p->g->nranks : q % lc_blocks(p);
}

KFN int lc_push_count(const struct ll_combine_params *p, int q)
{
    const struct group_dev *g = p->g;
    const int s = lc_push_rank(p, q), l = lc_push_expert(p, q);

    return is_local(g, s) && is_active(g, s) ? p->h->count[l * g->nranks + s] : 0;
}

/* Rows for sources of the node, dealt out to the agents in one sequence. The lanes look at a block each. */
KFN_STEP int lc_push_node(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch)
{
    const uint32_t A = (uint32_t)ag_count(ag);
    const int blocks = p->g->nranks * lc_blocks(p);
    uint32_t before = 0;

    AG_ROUNDS(ag, int, q, blocks)
    {
        const int n = q < blocks ? lc_push_count(p, q) : 0;
        const uint32_t first = before + (uint32_t)ag_scan(ag, n);
        const uint32_t i = ((uint32_t)ag_index(ag) + A - first % A) % A; /* this agent's first row of the block */
        const int has = n > 0 && i < (uint32_t)n;
        struct pair_set set;
        int place;
        const int all = ag_vote(ag, has, &place);
        pair_set_begin(&set);
        if (has)
            pair_set_offer(&set, place, q, (int)i);
        pair_set_settle(ag, &set);
        for (int k = 0; k < all; k++) {
            const struct int_pair one = pair_set_get(ag, &set, k);
            if (lc_push_block(ag, p, epoch, lc_push_rank(p, one.a), lc_push_expert(p, one.a), one.b))
                return 1;
        }
        before += (uint32_t)ag_sum(ag, n);
    }
    if (ag_index(ag) == 0 && ag_leader(ag))
        ag_add_stat(&p->g->stats->bytes_local, (uint64_t)before * (uint64_t)p->signature.hidden_bytes);
    return 0;
}

KFN void lc_write_desc(const struct ll_combine_params *p, struct lc_desc *desc)
{
    desc->signature = p->signature;
    desc->pulled = p->pulled;
    desc->rows_in = p->rows_in;
    desc->rows = p->in_place;
    desc->outer_stride = (uint64_t)p->outer_stride;
    desc->row_stride = (uint64_t)p->stride;
}

/* Does this rank send rows, rather than only say where they are? */
KFN int lc_moves(const struct ll_combine_params *p)
{
    return lc_nodes(p) || !p->pulled;
}

/* All that this rank sends is in the slots of the node, or on its way: the last agent says so. */
KFN_STEP void lc_publish(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    if (ag_leader(ag)) {
        g->state->epoch[OP_LL_COMBINE] = epoch;
        p->h->state->epoch = epoch;
    }
    ag_sync(ag);
    signal_peers(ag, g, SCOPE_NODE, SIG_LC_DATA, slot_of(g, epoch), lap_of(g, epoch));
}

/* Is the slot known to be free without a look? The combine that had it before waited for its readers (lc_run). */
KFN int lc_slot_known(const struct group_dev *g, uint64_t epoch)
{
    return g->inflight == 2 && g->state->combined[epoch & 1] + 2 == epoch && !has_nodes(g) && !has_masks(g);
}

/* The slot is free and has the descriptor; the network has read the last combine's rows in the stage. */
KFN_STEP int lc_take_slot(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    char *slot = lc_slot(g, g->rank, epoch);

    if (ll_check_recv_half(ag, g, p->h->state, slot_of(g, epoch)) ||
        (!lc_slot_known(g, epoch) &&
         wait_peers(ag, g, SCOPE_ALL, SIG_LC_DONE, slot_of(g, epoch), lap_of(g, epoch) - 1, PHASE_LC_SLOT, NULL)))
        return 1;
    AG_MARK(ag, MARK_SLOT);
    if (ag_index(ag) == 0 && ag_leader(ag)) {
        lc_write_desc(p, (struct lc_desc *)slot);
        if (ll_split(g))
            lc_write_desc(p, (struct lc_desc *)net_at(g, lc_net_slot(g, epoch)));
    }
    if (lc_nodes(p) && ag_index(ag) == 0 && wait_all_sent(ag, g, PHASE_LC_SENT))
        return 1;
    if (p->pulled && p->layout == LAYOUT_EXPERT_MAJOR) {
        int32_t *begin = (int32_t *)(slot + g->ll.begin);
        AG_EACH_ALL(ag, int, i, g->local_experts * g->nranks) begin[i] = p->h->begin[i];
    }
    if (!lc_moves(p) && sync_last(ag, g, 0))
        lc_publish(ag, p, epoch);
    return 0;
}

/* Rows that are not read where they are. */
KFN_STEP int lc_push(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    if (lc_nodes(p) && sync_barrier(ag, g)) /* the descriptor is written, and the stage is free */
        return 1;
    if (lc_nodes(p) && lc_push_others(ag, p, epoch))
        return 1;
    /* With signals each row is a write of its own: the next one may be far away. */
    if (!p->pulled && ((!p->signals && writes_begin(ag, g, PHASE_LC_DATA)) || lc_push_node(ag, p, epoch)))
        return 1;
    if (!p->pulled && !p->signals)
        writes_end(ag, g);
    if (sync_last(ag, g, 0))
        lc_publish(ag, p, epoch);
    return 0;
}

#endif
