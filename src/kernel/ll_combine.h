/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Low-latency combine, epoch e, slot (e - 1) % W, lap v of that slot.
 *
 *   expert rank d                                     source s of the node
 *   wait LC_DONE[*] >= v - 1  (receive slots free)
 *   rows in epx_alloc memory, or in a region that
 *   all peers imported (group/region.h): describe where they are   (nothing moves)
 *   otherwise: write each row, LogFMT or plain, into
 *     s's receive slot, at ll_places()
 *     (with signals: expert by expert, each row when
 *     the caller's kernel has said that it is there)
 *   signal LC_DATA = v  ---------------------------->  wait LC_DATA[*] >= v
 *                                                      out[t] = sum over k of weight * row, read where d has it
 *                                                      or in the own receive slot
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

#include "kernel/ll_landing.h"
#include "kernel/ll_patience.h"
#include "kernel/rows.h"
#include "kernel/sync.h"

/* Do rows travel as LogFMT? A device that has a kernel of each kind (KERNEL_LL_COMBINE_LOGFMT) knows it in advance. */
#ifndef LC_LOGFMT
#define LC_LOGFMT(p) ((p)->logfmt)
#endif

KFN_STEP uint64_t lc_slot_offset(const struct group_dev *g, uint64_t epoch)
{
    return g->ll.cslots + (uint64_t)slot_of(g, epoch) * g->ll.cslot_stride;
}

KFN_STEP char *lc_slot(const struct group_dev *g, int rank, uint64_t epoch)
{
    return heap_at(g, rank, lc_slot_offset(g, epoch));
}

/* The same of this rank where the network reads and writes: the descriptor, those of other nodes, their rows. */
KFN_STEP uint64_t lc_net_slot(const struct group_dev *g, uint64_t epoch)
{
    return g->ll.net_cslots + (uint64_t)slot_of(g, epoch) * g->ll.net_cslot_stride;
}

KFN_STEP char *lc_net_rows(const struct group_dev *g, uint64_t epoch)
{
    return net_at(g, lc_net_slot(g, epoch) + g->ll.net_crows);
}

/* The descriptor of rank d: in its heap, or put here. */
KFN_STEP const struct lc_desc *lc_desc_of(const struct group_dev *g, int d, uint64_t epoch)
{
    if (is_local(g, d))
        return (const struct lc_desc *)lc_slot(g, d, epoch);
    return (const struct lc_desc *)net_at(g, lc_net_slot(g, epoch) + g->ll.net_cdescs) + g->recv_index_of[d];
}

#if AG_STAGED
/* Between nodes the descriptors of the node are copied where every agent reads them: the tables of routing, which a
 * combine does not need. In a heap that a GPU has across a bus, the loads of all agents would come one after the
 * other. */
KFN int lc_has_near(const struct ll_combine_params *p)
{
    return p->nodes && p->g->max_agents * (p->g->experts + 2 * p->g->nranks) * 4 >= p->g->nranks * 64;
}

/* One agent; a barrier follows. */
KFN void lc_fetch_descs(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    const int words = (int)(sizeof(struct lc_desc) / 8);

    AG_EACH(ag, int, i, lc_has_near(p) ? g->nranks *words : 0)
    {
        if (is_local(g, i / words) && g->mask[i / words])
            ((uint64_t *)g->tables)[i] = ((const uint64_t *)lc_desc_of(g, i / words, epoch))[i % words];
    }
    ag_sync(ag);
}
#endif

/* The same once lc_data() has waited for it. */
KFN const struct lc_desc *lc_desc_near(const struct ll_combine_params *p, int d, uint64_t epoch)
{
#if AG_STAGED
    if (lc_has_near(p) && is_local(p->g, d))
        return (const struct lc_desc *)p->g->tables + d;
#endif
    return lc_desc_of(p->g, d, epoch);
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
    return LC_LOGFMT(p) ? (size_t)p->g->ll.cpitch : up16((size_t)p->signature.hidden_bytes);
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
        char *to = recv_buf + (b.place + (uint64_t)i) * lc_pitch(p);
        const uint32_t bytes = lc_write_row(ag, p, to, b.rows + i * p->stride);
        AG_WROTE(ag, g, s, to, bytes);
        if (p->signals)
            writes_end(ag, g);
    }
    return 0;
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
    int parts;       /* agents that have one: `shares` for each rank that is served at the same time */
    int shares;      /* agents that share out the blocks of a rank */
    int any_rank;    /* rows of any rank that this agent serves may be in it at any time */
    uint64_t fixed;  /* not 0: the stage has room for so many rows of every rank, in the order in which they land */
    int first, last; /* steps from this rank to the first and to the last rank whose rows are in it */
    struct put_batch batch;
};

/* Is the rank so many steps from this one served by this agent? */
KFN int lc_serves(struct agent *ag, const struct group_dev *g, const struct lc_stage *stage, int steps)
{
    const int s = (g->rank + steps) % g->nranks;

    return !is_local(g, s) && g->mask[s] && ag_index(ag) < stage->parts &&
           g->recv_index_of[s] % (stage->parts / stage->shares) == ag_index(ag) / stage->shares;
}

/* The first block of a rank that share number n has. */
KFN int lc_share_block(const struct ll_combine_params *p, const struct lc_stage *stage, int n)
{
    return lc_blocks(p) * n / stage->shares;
}

/* The network has read this agent's part of the stage: its puts to the ranks whose rows are there. */
KFN_STEP int lc_wait_stage(struct agent *ag, const struct group_dev *g, struct lc_stage *stage)
{
    const uint64_t start = ag_now(ag);

    for (int steps = stage->first; steps <= stage->last; steps++) {
        const int s = (g->rank + steps) % g->nranks;
        if (lc_serves(ag, g, stage, steps) &&
            wait_word(ag, g, &g->sent[s], ag_load_acquire(&g->pushed[s]), PHASE_LC_SENT, s, start))
            return 1;
    }
    if (!stage->any_rank)
        stage->first = stage->last;
    stage->used = 0;
    return 0;
}

/* Rows in the heap can be put where they are. But a network's cost per message is that of copying some ten thousand
 * bytes: short blocks are copied to the stage, where all that go to one source become neighbours. A GPU's agents would
 * copy them across a bus, or take SMs from others: only the shortest. */
#define LC_SHORT_BYTES (AG_ONE_LANE ? 256 << 10 : 16 << 10)

KFN int lc_in_heap(const struct ll_combine_params *p)
{
    return p->pulled && p->rows_in == 0 && !p->g->ll.split;
}

KFN int lc_short(const struct ll_combine_params *p, const struct lc_block *b)
{
    return p->layout == LAYOUT_EXPERT_MAJOR && (int64_t)b->n * p->signature.hidden_bytes < LC_SHORT_BYTES;
}

#define LC_EARLY_ROWS 4 /* that are put before an agent goes on copying */

/* A place in the stage for row i of block b of source s; used up: after those in it have left. Non-zero: failed. */
KFN_STEP int lc_stage_place(struct agent *ag, const struct ll_combine_params *p, int s, const struct lc_block *b, int i,
                            struct lc_stage *stage, uint64_t *place)
{
    const struct group_dev *g = p->g;
    const size_t pitch = lc_pitch(p);

    if (stage->fixed) {
        const uint64_t row = b->place - lc_block_at(p, s, 0).place + (uint64_t)i;
        *place = g->ll.stage + ((uint64_t)g->recv_index_of[s] * stage->fixed + row) * pitch;
        return 0;
    }
    if (stage->used + pitch > stage->room) {
        if (put_flush(ag, g, &stage->batch))
            return push_failed(ag, g);
        if (lc_wait_stage(ag, g, stage))
            return 1;
    }
    *place = stage->at + stage->used;
    return 0;
}

/* Blocks `first` to end - 1 to a source of another node; the descriptor goes before the first of all. */
KFN_STEP int lc_push_remote(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch, int s, int first,
                            int end, struct lc_stage *stage)
{
    const struct group_dev *g = p->g;
    const int slot = slot_of(g, epoch);
    const uint64_t recv_buf = lc_net_slot(g, epoch) + g->ll.net_crows;
    const size_t pitch = lc_pitch(p);
    uint64_t rows = 0, packed = recv_buf + lc_block_at(p, s, 0).place * pitch; /* all blocks follow each other there */

    if (first == 0)
        put(ag, g, &stage->batch, s, COUNTER(SIG_LC_DATA, slot), lc_net_slot(g, epoch),
            lc_net_slot(g, epoch) + g->ll.net_cdescs + (uint64_t)g->recv_index_at[s] * sizeof(struct lc_desc),
            sizeof(struct lc_desc));
    for (int l = first; l < end; l++) {
        const struct lc_block b = lc_block_at(p, s, l);
        for (int i = 0; i < b.n; i++) {
            const char *row = b.rows + i * p->stride;
            if (p->signals && lc_wait_row(ag, p, l, row))
                return 1;
            const uint64_t target = LC_LOGFMT(p) ? packed : recv_buf + (b.place + (uint64_t)i) * pitch;
            uint64_t source = (uint64_t)(row - heap_at(g, g->rank, 0));
            uint32_t bytes = (uint32_t)p->signature.hidden_bytes;
            if (!lc_in_heap(p) || (lc_short(p, &b) && stage->used + pitch <= stage->room)) {
                if (lc_stage_place(ag, p, s, &b, i, stage, &source))
                    return 1;
                bytes = LC_LOGFMT(p) ? lc_pack_row(ag, p, net_at(g, source), row)
                                     : lc_write_row(ag, p, net_at(g, source), row);
                stage->used += LC_LOGFMT(p) ? bytes : pitch;
                packed += bytes;
                ag_sync(ag);
            }
            put(ag, g, &stage->batch, s, COUNTER(SIG_LC_ROWS, slot), source, target, bytes);
        }
        /* The network has something to do while the other blocks are copied. */
        if (stage->fixed && stage->batch.n >= LC_EARLY_ROWS && put_flush(ag, g, &stage->batch))
            return push_failed(ag, g);
        rows += (uint64_t)b.n;
    }
    if (ag_leader(ag))
        ag_add_stat(&g->stats->rows_remote, rows);
    return 0;
}

KFN int lc_push_by_rank(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch, struct lc_stage *stage)
{
    const struct group_dev *g = p->g;

    for (int j = 1; j < g->nranks; j++) {
        if (!lc_serves(ag, g, stage, j))
            continue;
        const int share = ag_index(ag) % stage->shares;
        stage->last = j;
        if (lc_push_remote(ag, p, epoch, (g->rank + j) % g->nranks, lc_share_block(p, stage, share),
                           lc_share_block(p, stage, share + 1), stage))
            return 1;
    }
    return 0;
}

/* Expert by expert, as they become ready. What is put is posted at once, not when a batch is full: the next signal may
 * be far away. */
KFN int lc_push_in_order(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch, struct lc_stage *stage)
{
    const struct group_dev *g = p->g;

    stage->last = g->nranks - 1;
    for (int l = 0; l < lc_blocks(p); l++) {
        for (int j = 1; j < g->nranks; j++)
            if (lc_serves(ag, g, stage, j) && lc_push_remote(ag, p, epoch, (g->rank + j) % g->nranks, l, l + 1, stage))
                return 1;
        if (put_flush(ag, g, &stage->batch))
            return push_failed(ag, g);
    }
    return 0;
}

#define LC_SHARE_ROWS 4   /* least rows of the stage that an agent has */
#define LC_FIXED_SHARES 8 /* agents of a rank where rows lie as they land: few, so that each has rows that touch */

/* Rows of each rank elsewhere for which the stage has room, where no rank has more; else 0. */
KFN_STEP uint64_t lc_fixed_rows(struct agent *ag, const struct ll_combine_params *p)
{
    const struct group_dev *g = p->g;
    const uint64_t each = g->remotes > 0 ? g->ll.stage_rows / (uint64_t)g->remotes : 0;
    int odd = 0;

    if (!g->ll.split || LC_LOGFMT(p) || p->signals)
        return 0;
    AG_EACH(ag, int, s, g->nranks)
    {
        uint64_t rows = 0;
        for (int l = 0; l < lc_blocks(p) && !is_local(g, s); l++)
            rows += (uint64_t)p->h->count[l * g->nranks + s];
        odd |= rows > each;
    }
    return ag_any(ag, odd) ? 0 : each;
}

/* Each agent serves some of the sources elsewhere, with its own part of the stage. */
KFN_STEP int lc_push_others(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    const int A = ag_count(ag);
    struct lc_stage stage;

    /* With fewer rows, or fewer ranks elsewhere, than agents only the first agents have a part. Where there are many
     * more agents, several share the blocks of a rank; LogFMT rows are packed one behind the other, by one agent. */
    const int most = g->remotes < (int)g->ll.stage_rows ? g->remotes : (int)g->ll.stage_rows;
    const int ranks = A < most ? A : most, by_agents = A / ranks;
    const int by_rows = (int)(g->ll.stage_rows / (uint64_t)(ranks * LC_SHARE_ROWS));
    stage.shares = by_agents < by_rows ? by_agents : by_rows;
    stage.shares = stage.shares < lc_blocks(p) ? stage.shares : lc_blocks(p);
    stage.fixed = lc_fixed_rows(ag, p);
    if (stage.fixed && stage.shares > LC_FIXED_SHARES)
        stage.shares = LC_FIXED_SHARES;
    stage.shares = AG_ONE_LANE || LC_LOGFMT(p) || p->signals || stage.shares < 1 ? 1 : stage.shares;
    stage.parts = ranks * stage.shares;
    stage.room = g->ll.stage_rows / (uint64_t)stage.parts * g->ll.cpitch;
    stage.at = g->ll.stage + (uint64_t)ag_index(ag) * stage.room;
    stage.used = 0;
    stage.first = 1;
    stage.any_rank = p->signals != NULL;
    put_begin(&stage.batch);
    if (p->signals ? lc_push_in_order(ag, p, epoch, &stage) : lc_push_by_rank(ag, p, epoch, &stage))
        return 1;
    if (put_flush(ag, g, &stage.batch))
        return push_failed(ag, g);
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

    return is_local(g, s) && g->mask[s] ? p->h->count[l * g->nranks + s] : 0;
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
    return p->nodes || !p->pulled;
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

/* The slot is free and has the descriptor; the network has read the last combine's rows in the stage. */
KFN_STEP int lc_take_slot(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    char *slot = lc_slot(g, g->rank, epoch);

    if (ll_check_landing(ag, g, p->h->state, slot_of(g, epoch)) ||
        wait_peers(ag, g, SCOPE_ALL, SIG_LC_DONE, slot_of(g, epoch), lap_of(g, epoch) - 1, PHASE_LC_SLOT, NULL))
        return 1;
    AG_MARK(ag, MARK_SLOT);
    if (ag_index(ag) == 0 && ag_leader(ag)) {
        lc_write_desc(p, (struct lc_desc *)slot);
        if (g->ll.split)
            lc_write_desc(p, (struct lc_desc *)net_at(g, lc_net_slot(g, epoch)));
    }
    if (p->nodes && ag_index(ag) == 0 && wait_all_sent(ag, g, PHASE_LC_SENT))
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

    if (p->nodes && sync_barrier(ag, g)) /* the descriptor is written, and the stage is free */
        return 1;
    if (LC_LOGFMT(p))
        ag_logfmt_begin(ag);
    if (p->nodes && lc_push_others(ag, p, epoch))
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

/* ---- Receive -------------------------------------------------------------------------------------------------- */

/* Where the row of (t, k) lands, for this rank as the source. */
KFN int64_t lc_place(const struct ll_combine_params *p, int d, int64_t i)
{
    const struct handle_dev *h = p->h;

    return p->layout == LAYOUT_EXPERT_MAJOR ? (int64_t)h->back[h->ids[i]] + h->eidx[i]
                                            : (int64_t)h->back[d] + h->ridx[i];
}

/* The rows of rank d of the node, `at` bytes into its heap, or into a region that this rank has imported. */
KFN const char *lc_rows_of(const struct group_dev *g, int d, int32_t in, uint64_t at)
{
    if (in == 0)
        return heap_at(g, d, at);
    return (const char *)(uintptr_t)(g->regions[d * REGION_SLOTS + in - 1] + at);
}

/* Where the row of (t, k) is, for this rank as the source. What is in remote memory is loaded at once. */
KFN_STEP const char *lc_row(const struct ll_combine_params *p, uint64_t epoch, const struct lc_desc *desc, int d,
                            int64_t i)
{
    const struct group_dev *g = p->g;

    if (LC_LOGFMT(p) && !is_local(g, d))
        return lc_net_rows(g, epoch) + (size_t)g->packed_at[lc_place(p, d, i)] * 16;
    if (!is_local(g, d))
        return lc_net_rows(g, epoch) + (size_t)lc_place(p, d, i) * lc_pitch(p);
    const int by_rank = p->layout == LAYOUT_RANK_MAJOR;
    const int l = by_rank ? 0 : p->h->ids[i] - d * g->local_experts;
    const int32_t *begin = (const int32_t *)(lc_slot(g, d, epoch) + g->ll.begin);
    const int32_t first = by_rank ? 0 : begin[l * g->nranks + g->rank]; /* only with `pulled`: else not used */
    const int32_t number = by_rank ? p->h->ridx[i] : p->h->eidx[i];
    const struct lc_desc at = *desc;
    if (!at.pulled)
        return lc_slot(g, g->rank, epoch) + g->ll.crows + (size_t)lc_place(p, d, i) * lc_pitch(p);
    return lc_rows_of(g, d, at.rows_in, at.rows) + (size_t)(by_rank ? g->rank : l) * at.outer_stride +
           (size_t)(first + number) * at.row_stride;
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

KFN const char *lc_bias(const struct ll_combine_params *p, int i, int t, int64_t at)
{
    return p->bias[i] ? p->bias[i] + t * p->bias_stride[i] + at : NULL;
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
            const struct lc_desc *desc = lc_desc_near(p, d, epoch);
            const char *row = lc_row(p, epoch, desc, d, i);
            if (is_local(g, d) ? !desc->pulled : !g->ll.split)
                AG_SUMS(ag, g, d, row, LC_LOGFMT(p) ? 16 : lc_pitch(p));
            sum_set_offer(&set, n + before, LC_LOGFMT(p) ? row : row + at, weighted ? p->weights[i] : 1.0f,
                          p->nvfp4 ? ROWS_NVFP4 : LC_LOGFMT(p));
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
    const char *rows = lc_net_rows(g, epoch);
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

/* Rows that come back through a ring; notes those of each rank. One agent. */
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
    const uint64_t start = ag_now(ag);

    for (int d = 0; d < g->nranks && g->enable_mask; d++) {
        if (is_local(g, d) || !g->mask[d] || g->recv_index_of[d] % ag_count(ag) != ag_index(ag))
            continue;
        if (wait_rows(ag, g, SIG_LC_ROWS, slot_of(g, epoch), d, lc_rows_from(p, d), PHASE_LC_ROWS, start))
            return 1;
    }
    for (int ring = 0; ring < g->nrings && !g->enable_mask && ag_index(ag) == 0; ring++)
        if (wait_ring_rows(ag, g, ring, lc_ring_rows(ag, p, epoch, ring), SIG_LC_ROWS, slot_of(g, epoch), PHASE_LC_ROWS,
                           start))
            return 1;
    return sync_barrier(ag, g);
}

/* LogFMT rows of other nodes, shared out to the agents by rank. */
KFN_STEP int lc_unpack_all(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    for (int d = 0; d < g->nranks; d++) {
        if (is_local(g, d) || !g->mask[d] || g->recv_index_of[d] % ag_count(ag) != ag_index(ag))
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
    odd |= g->mask[d] && signature_differs(&p->signature, &lc_desc_of(g, d, epoch)->signature);
    if (!ag_any(ag, odd))
        return 0;
    for (int d = 0; d < g->nranks; d++)
        if (g->mask[d] && check_signature(ag, g, &p->signature, &lc_desc_of(g, d, epoch)->signature, PHASE_LC_DATA, d))
            return 1;
    return 0;
}

/* Few blocks wait for peers that are late. Non-zero: the block leaves the kernel. */
KFN int lc_wait_patient(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch)
{
#if AG_BLOCKS
    enum ll_waited waited = LL_ALL_GO_ON;

    if (!ll_patient(ag, &p->patience))
        return 0;
    if (ag_block_index(ag) == 0)
        waited = ll_wait_patient(ag, p->g, OP_LL_COMBINE, SIG_LC_DATA, epoch, PHASE_LC_DATA, &p->patience);
    return !ll_block_goes_on(ag, &p->patience, waited);
#else
    (void)ag;
    (void)p;
    (void)epoch;
    return 0;
#endif
}

/* All rows of this node can be read, and the descriptors of all ranks. */
KFN_STEP int lc_wait(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    if (lc_wait_patient(ag, p, epoch) ||
        wait_peers(ag, g, SCOPE_ALL, SIG_LC_DATA, slot_of(g, epoch), lap_of(g, epoch), PHASE_LC_DATA, p->wait_ns))
        return 1;
    AG_MARK(ag, MARK_DATA);
    /* As in ll_wait_tables(): between nodes a barrier follows before rows are read (lc_wait_remote). */
    return (!p->nodes || ag_index(ag) == 0) && lc_check_descs(ag, p, epoch);
}

/* All rows can be read. */
KFN int lc_data(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch)
{
    if (lc_wait(ag, p, epoch))
        return 1;
#if AG_STAGED
    if (ag_index(ag) == 0)
        lc_fetch_descs(ag, p, epoch);
#endif
    return p->nodes && lc_wait_remote(ag, p, epoch);
}

/* The own tokens. */
KFN_STEP int lc_sum(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    if (p->nodes && LC_LOGFMT(p) && lc_unpack_all(ag, p, epoch))
        return 1;
    count_returned(ag, g, lc_sum_tokens(ag, p, epoch));
    AG_MARK(ag, MARK_SUM);
    if (sync_last(ag, g, 1)) {
        ll_note_landing(ag, g, p->h->state, slot_of(g, epoch));
        signal_peers(ag, g, SCOPE_ALL, SIG_LC_DONE, slot_of(g, epoch), lap_of(g, epoch));
        report_returned(ag, g);
        lc_count_peer(ag, p);
    }
    return 0;
}

KFN int lc_run(struct agent *ag, const struct ll_combine_params *p, uint64_t epoch)
{
    if (p->steps & STEP_SEND) {
        const int failed = lc_take_slot(ag, p, epoch) || (lc_moves(p) && lc_push(ag, p, epoch));
        /* An agent that has rows may fail alone: its signal or its ring. */
        if (lc_moves(p) && p->steps & STEP_RECV ? block_decides(ag, failed) : failed)
            return 1;
    }
    if (p->steps == STEP_WAIT)
        return lc_wait(ag, p, epoch);
    if (!(p->steps & STEP_RECV))
        return 0;
    if (lc_data(ag, p, epoch) || lc_sum(ag, p, epoch))
        return 1;
    /* The caller may change its tensor once this operation has completed: not before all have read it. */
    return p->pulled &&
           wait_peers_end(ag, p->g, SCOPE_ALL, SIG_LC_DONE, slot_of(p->g, epoch), lap_of(p->g, epoch), PHASE_LC_DONE);
}

KFN void kernel_ll_combine(struct agent *ag, const struct ll_combine_params *p)
{
    const struct group_dev *g = p->g;
    const uint64_t next = g->state->epoch[OP_LL_COMBINE] + 1;

    if (!kernel_begin(ag, g))
        lc_run(ag, p, p->steps & STEP_SEND ? next : p->h->state->epoch);
    kernel_end(ag, g);
}

#endif
