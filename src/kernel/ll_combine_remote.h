/* SPDX-License-Identifier: Apache-2.0 */
/* Low-latency combine: rows that go to another node, through the stage. The protocol is drawn in ll_combine.h. */
#ifndef EPX_KERNEL_LL_COMBINE_REMOTE_H
#define EPX_KERNEL_LL_COMBINE_REMOTE_H

#include "kernel/ll_combine_rows.h"

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

    return !is_local(g, s) && is_active(g, s) && ag_index(ag) < stage->parts &&
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
    waits_begin(ag, g);
    for (int steps = stage->first; steps <= stage->last; steps++) {
        const int s = (g->rank + steps) % g->nranks;
        if (lc_serves(ag, g, stage, steps) &&
            wait_word(ag, g, &g->sent[s], ag_load_acquire(&g->pushed[s]), PHASE_LC_SENT, s))
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
    return p->pulled && p->rows_in == 0 && !ll_split(p->g);
}

KFN int lc_short(const struct ll_combine_params *p, const struct lc_block *b)
{
    const uint64_t bytes = (uint64_t)b->n * (uint64_t)p->signature.hidden_bytes;

    return p->layout == LAYOUT_EXPERT_MAJOR && AG_ROW_BYTES(bytes) < LC_SHORT_BYTES;
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
            return push_failed(ag, g, stage->batch.failed);
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
    /* All blocks follow each other there. */
    uint64_t rows = 0, packed = recv_buf + lc_row_at(p, lc_block_at(p, s, 0).place);

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
            const uint64_t target = LC_LOGFMT(p) ? packed : recv_buf + lc_row_at(p, b.place + (uint64_t)i);
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
            return push_failed(ag, g, stage->batch.failed);
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
            return push_failed(ag, g, stage->batch.failed);
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

    if (!ll_split(g) || LC_LOGFMT(p) || p->signals)
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
        return push_failed(ag, g, stage.batch.failed);
    return 0;
}

#endif
