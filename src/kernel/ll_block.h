/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Low-latency dispatch inside one node where agents form blocks (the blocks of a GPU). The protocol is that of
 * ll_dispatch.h, with fewer barriers, fewer reads of remote memory and fewer instructions, because these take the time.
 *
 *   Every block routes all tokens for itself: a bit per (expert, token) and (rank, token) in the block's shared memory.
 *   A row's number is then the count of bits before its token.
 *   The first block writes the counts and signals LL_DATA at once. Receivers need the tables only with the rows: all
 *   blocks write them together, before LL_ROWS.
 *   While peers' counts are on their way, each agent casts the first row that it will write into its scratch memory.
 *   Then lane k computes the address of the token's k-th row from the counts of earlier ranks for that expert and the
 *   descriptor of the expert's rank.
 *
 * Work that is done once per block is divided: of its n agents, agent 0 computes the offsets, agent n / 2 signals
 * LL_DATA, agent n - 1 waits for peers and reads their descriptors.
 */
#ifndef EPX_KERNEL_LL_BLOCK_H
#define EPX_KERNEL_LL_BLOCK_H

#include "kernel/ll_dispatch_recv.h"
#include "kernel/ll_wide_wait.h"

#if AG_BLOCKS

/* What all agents of a block need, in the block's shared memory. */
struct ll_block_plan {
    uint64_t lap, counts, desc;         /* offsets are the same in all heaps */
    int32_t slot, width, slices, items; /* pieces of work: ll_part() */
    int32_t bytes, per;                 /* of a channel as it travels; channels of a word of scales */
    int32_t words;                      /* of a mask */
    int32_t pad;
};
#define LL_BLOCK_PLAN_WORDS ((int)sizeof(struct ll_block_plan) / 4)

/* Masks of a key, an expert or (after them) a rank: bit t is set if token t goes there. */
KFN uint32_t *ll_block_mask(const struct ll_block_plan *plan, int key)
{
    return (uint32_t *)(plan + 1) + key * plan->words;
}

/* The block's shared memory if this file can do this dispatch, else NULL. All blocks get the same answer. */
KFN struct ll_block_plan *ll_block_memory(struct agent *ag, const struct ll_dispatch_params *p)
{
    const struct group_dev *g = p->g;
    const int words = (p->route.ntokens + 31) / 32 * (g->experts + g->nranks);

    if (has_nodes(g) || has_masks(g) || p->layout != LAYOUT_EXPERT_MAJOR || p->in.cast == CAST_NVFP4)
        return NULL;
    if (p->in.cast && !ag_scratch(ag, row_scales_at(&p->signature) + (size_t)p->signature.scale_bytes))
        return NULL;
    return (struct ll_block_plan *)ag_block_memory(ag, LL_BLOCK_PLAN_WORDS + words);
}

KFN_STEP void ll_block_make_plan(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch,
                                 struct ll_block_plan *plan)
{
    const struct group_dev *g = p->g;
    const int width = ll_slice_width(ag, p), slices = (p->in.hidden + width - 1) / width;
    const uint64_t counts = ll_counts_offset(g, epoch);

    if (!ag_leader(ag))
        return;
    plan->lap = lap_of(g, epoch);
    plan->slot = slot_of(g, epoch);
    plan->counts = counts;
    plan->desc = counts + up16((size_t)g->experts * 4) + up16((size_t)g->nranks * 4);
    plan->width = width;
    plan->slices = slices;
    plan->items = p->route.ntokens * slices;
    plan->bytes = p->signature.hidden_bytes / p->in.hidden;
    plan->per = ll_word_channels(p);
    plan->words = (p->route.ntokens + 31) / 32;
}

/* How many of the tokens before t. */
KFN int ll_block_before(const uint32_t *mask, int t)
{
    int n = ag_bits(mask[t / 32] & (((uint32_t)1 << t % 32) - 1));

    AG_ROLLED
    for (int w = 0; w < t / 32; w++)
        n += ag_bits(mask[w]);
    return n;
}

/* Fills plan and masks, and waits for the slot meanwhile. Non-zero: an index is out of range, or a wait has failed;
 * route_plan() and the waits that go with it report it. */
KFN int ll_block_route(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch, struct ll_block_plan *plan)
{
    const struct group_dev *g = p->g;
    const int K = p->route.topk_n, E = g->experts, L = g->local_experts, words = (p->route.ntokens + 31) / 32;
    uint32_t *masks = (uint32_t *)(plan + 1);
    int odd = 0;

    AG_EACH_BLOCK(ag, int, i, (E + g->nranks) * words) masks[i] = 0;
    block_barrier(ag, g, 0);
    AG_MARK(ag, MARK_ZERO);
    if (ag_block_index(ag) == 0)
        ll_block_make_plan(ag, p, epoch, plan);
    if (ag_block_index(ag) == ag_block_count(ag) - 1)
        odd = wait_each(ag, g, SCOPE_NODE, SIG_LL_DONE, slot_of(g, epoch), lap_of(g, epoch) - 1, PHASE_LL_SLOT, NULL);
    AG_EACH_BLOCK(ag, int, i, p->route.ntokens *K)
    {
        const int64_t id = route_given(&p->route, i);
        const int t = i / K, word = t / 32;
        const uint32_t bit = (uint32_t)1 << t % 32;
        odd |= id < -1 || id >= E;
        if (id < 0 || id >= E)
            continue;
        ag_block_or(&masks[(int)id * words + word], bit);
        ag_block_or(&masks[(E + (int)id / L) * words + word], bit);
    }
    AG_MARK(ag, MARK_OR);
    return block_barrier(ag, g, odd);
}

/* The first block: counts and descriptor are written. */
KFN_STEP void ll_block_publish(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch,
                               const struct ll_block_plan *plan)
{
    const struct group_dev *g = p->g;
    const struct handle_dev *h = p->h;
    const int E = g->experts, nth = ag_block_index(ag), n = ag_block_count(ag);
    int32_t *ecount = (int32_t *)heap_at(g, g->rank, plan->counts), *rcount = ecount + up16((size_t)E * 4) / 4;

    AG_EACH_BLOCK(ag, int, key, E + g->nranks)
    {
        const uint32_t *mask = ll_block_mask(plan, key);
        int sum = 0;
        AG_ROLLED
        for (int w = 0; w < plan->words; w++)
            sum += ag_bits(mask[w]);
        if (key < E)
            h->ecount[key] = ecount[key] = sum;
        else
            h->rcount[key - E] = rcount[key - E] = sum;
    }
    if (nth == n - 1 && ag_leader(ag)) {
        ll_write_desc(p, epoch, (struct ll_desc *)heap_at(g, g->rank, plan->desc));
        h->state->ntokens = p->route.ntokens;
        h->state->topk = p->route.topk_n;
    }
    block_barrier(ag, g, 0);
    if (nth == n / 2)
        signal_peers(ag, g, SCOPE_NODE, SIG_LL_DATA, plan->slot, plan->lap);
}

/* What LL_ROWS announces, and what the combine that follows needs. */
KFN_STEP void ll_block_tables(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch,
                              const struct ll_block_plan *plan)
{
    const struct group_dev *g = p->g;
    const struct handle_dev *h = p->h;
    const int K = p->route.topk_n, L = g->local_experts;
    const struct ll_view v = ll_own_view(p, epoch);
    int32_t *list = (int32_t *)heap_at(g, g->rank, ll_slot_offset(g, epoch));

    AG_EACH_ALL(ag, int, i, p->route.ntokens *K)
    {
        const int id = (int)route_given(&p->route, i), t = i / K, r = id / L;
        int number = -1, nth = -1, first = id >= 0;
        AG_ROLLED
        for (int j = t * K; j < i; j++) { /* the token's first index of this rank? */
            const int64_t other = route_given(&p->route, j);
            first &= other < (int64_t)r * L || other >= (int64_t)r * L + L;
        }
        if (id >= 0)
            number = ll_block_before(ll_block_mask(plan, id), t);
        if (first) {
            nth = ll_block_before(ll_block_mask(plan, g->experts + r), t);
            list[(size_t)r * (size_t)g->max_tokens + (size_t)nth] = t;
        }
        h->ids[i] = v.ids[i] = id;
        h->eidx[i] = v.eidx[i] = number;
        h->ridx[i] = nth;
        if (p->weights)
            v.weights[i] = p->weights[i];
    }
}

/* Lane k's row of a part: the k-th index of its token, and its number among those of its expert. K is at most 32, and
 * no block's agents have fewer lanes. */
struct ll_block_row {
    int id, number;
};

KFN struct ll_block_row ll_block_row(struct agent *ag, const struct ll_dispatch_params *p,
                                     const struct ll_block_plan *plan, int t)
{
    const int K = p->route.topk_n;
    struct ll_block_row row = {-1, 0};

    AG_EACH(ag, int, k, K)
    {
        row.id = (int)route_given(&p->route, t * K + k);
        row.number = row.id < 0 ? 0 : ll_block_before(ll_block_mask(plan, row.id), t);
    }
    return row;
}

/* Where the rows of a part go, once the counts are there: EXPERT_MAJOR. */
KFN_STEP void ll_block_goals(struct agent *ag, const struct ll_dispatch_params *p, const struct ll_block_plan *plan,
                             const struct ll_part *part, struct ll_block_row row, struct ll_goals *goals)
{
    const struct group_dev *g = p->g;
    const int d = row.id < 0 ? 0 : row.id / g->local_experts, l = row.id - d * g->local_experts;
    const struct ll_desc *desc = (const struct ll_desc *)heap_at(g, d, plan->desc);
    int64_t at = row.number;

    AG_ROLLED
    for (int s = 0; s < g->rank && row.id >= 0; s += LL_COUNTS) {
        int32_t n[LL_COUNTS];
        AG_UNROLL
        for (int j = 0; j < LL_COUNTS; j++)
            n[j] = s + j < g->rank ? ((const int32_t *)heap_at(g, s + j, plan->counts))[row.id] : 0;
        AG_UNROLL
        for (int j = 0; j < LL_COUNTS; j++)
            at += n[j];
    }
    const int goes = row.id >= 0 && at < (int64_t)g->nranks * g->max_tokens; /* else the receiver reports it */
    int before;
    goals->n = ag_vote(ag, goes, &before);
    copy_set_begin(&goals->rows);
    word_set_begin(&goals->scales);
    if (goes) {
        if (part->begin == 0)
            ll_write_source(g, desc, d, (uint64_t)l, (uint64_t)at, part->t);
        copy_set_offer(&goals->rows, before,
                       heap_at(g, d,
                               desc->tokens + (uint64_t)l * desc->outer_stride + (uint64_t)at * desc->stride +
                                   (uint64_t)part->begin * (uint64_t)plan->bytes));
        word_set_offer(&goals->scales, before,
                       heap_at(g, d,
                               desc->scales + (uint64_t)l * desc->scale_outer_stride +
                                   (uint64_t)at * desc->scale_row_stride +
                                   (uint64_t)(part->begin / plan->per) * desc->scale_stride),
                       (int64_t)desc->scale_stride);
    }
    ll_goals_end(ag, p, goals);
}

/* The scratch gets the part as it travels: payload, then scales. */
KFN_STEP void ll_block_cast(struct agent *ag, const struct ll_dispatch_params *p, const struct ll_part *part,
                            char *scratch)
{
    const int channels = part->end - part->begin;

    ag_cast_fp8(ag, scratch, scratch + up16((size_t)channels), p->in.scale_ue8m0, p->in.round_scale,
                ll_part_tokens(p, part), p->in.dtype, channels);
    ag_sync(ag);
}

KFN_STEP void ll_block_write(struct agent *ag, const struct ll_dispatch_params *p, const struct ll_block_plan *plan,
                             const struct ll_part *part, const struct ll_goals *goals, const char *scratch)
{
    const int channels = part->end - part->begin;

    if (!p->in.cast) {
        ll_copy_part(ag, p, part, goals);
        return;
    }
    ag_copy_many(ag, &goals->rows, goals->n, scratch, (size_t)channels);
    ag_copy_words(ag, &goals->scales, goals->n, scratch + up16((size_t)channels), 4,
                  (channels + plan->per - 1) / plan->per);
    ag_sync(ag);
}

/* Tokens are in remote memory: most of their cache lines are requested before they are needed. */
KFN void ll_block_prefetch(struct agent *ag, const struct ll_dispatch_params *p)
{
    const int64_t row = (int64_t)p->in.hidden * ll_source_bytes(p), bytes = row * p->route.ntokens;

    if (p->in.stride == row)
        AG_EACH_ALL(ag, int64_t, i, (bytes + AG_LINE - 1) / AG_LINE) ag_fetch(p->in.tokens + i * AG_LINE);
}

/* May rows be written to all ranks, and do all signatures match? Else ll_check_descs() and ll_all_open() report which.
 * One agent. */
KFN_STEP int ll_block_descs_fit(struct agent *ag, const struct ll_dispatch_params *p, const struct ll_block_plan *plan)
{
    const struct group_dev *g = p->g;
    int odd = 0;

    AG_EACH(ag, int, s, g->nranks)
    {
        const struct ll_desc *desc = (const struct ll_desc *)heap_at(g, s, plan->desc);
        odd |= signature_differs(&p->signature, &desc->signature) | (desc->ntokens < 0) |
               (desc->ntokens > g->max_tokens) | !desc->open;
    }
    return !ag_any(ag, odd);
}

/* The last of all agents: this operation is the newest. All have begun it by now. */
KFN void ll_block_advance(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch)
{
    if (ag_leader(ag)) {
        p->g->state->epoch[OP_LL_DISPATCH] = epoch;
        p->h->state->epoch = epoch;
    }
    ll_count_sent(ag, p->g, p->h);
}

/* Rows were written into the peers' tensors; some rank's tensors cannot be written; failed, or this block leaves;
 * nothing was signalled yet, and ll_dispatch_whole() does the operation; peers are late, and this block begins again
 * with the few that stay (ll_wide_wait.h): it signals once more what it has signalled. */
enum ll_block_result { LL_BLOCK_WRITTEN, LL_BLOCK_CLOSED, LL_BLOCK_FAILED, LL_BLOCK_ELSEWHERE, LL_BLOCK_AGAIN };

/* A block that cannot write its rows. `waited` as for ll_block_goes_on(). */
KFN_STEP enum ll_block_result ll_block_stops(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch,
                                             enum ll_waited waited)
{
    const int wide = ll_waits_wide(ag, &p->wide_wait);

    if (!ll_block_goes_on(ag, &p->wide_wait, waited))
        return LL_BLOCK_FAILED;
    if (wide && ag_is_narrow(ag))
        return LL_BLOCK_AGAIN;
    if (ll_wait_tables(ag, p, epoch))
        return LL_BLOCK_FAILED;
    if (sync_last(ag, p->g, 0))
        ll_block_advance(ag, p, epoch);
    return LL_BLOCK_CLOSED;
}

/* The send half, up to LL_ROWS. */
KFN_STEP enum ll_block_result ll_dispatch_block(struct agent *ag, const struct ll_dispatch_params *p, uint64_t epoch,
                                                struct ll_block_plan *plan)
{
    const struct group_dev *g = p->g;
    char *scratch = p->in.cast ? (char *)ag_scratch(ag, 0) : NULL;
    const int waits = ag_block_index(ag) == ag_block_count(ag) - 1;
    enum ll_waited waited = LL_ALL_GO_ON;
    int item = ag_index(ag), bad = 0;
    struct ll_block_row row = {-1, 0};
    struct ll_part part;
    struct ll_goals goals;

    if (ag_block_number(ag) != 0) /* all peers wait for the counts of the first block */
        ll_block_prefetch(ag, p);
    if (ll_block_route(ag, p, epoch, plan))
        return LL_BLOCK_ELSEWHERE;
    AG_MARK(ag, MARK_ROUTE);
    part = ll_part(p, item, plan->width, plan->slices);
    if (ag_block_number(ag) == 0)
        ll_block_publish(ag, p, epoch, plan);
    AG_MARK(ag, MARK_PUBLISH);
    ll_block_tables(ag, p, epoch, plan);
    AG_MARK(ag, MARK_TABLES);
    if (item < plan->items) {
        row = ll_block_row(ag, p, plan, part.t);
        if (p->in.cast)
            ll_block_cast(ag, p, &part, scratch);
    }
    AG_MARK(ag, MARK_CAST);
    if (waits) {
        waited = ll_wait(ag, g, OP_LL_DISPATCH, SIG_LL_DATA, epoch, PHASE_LL_DATA, &p->wide_wait,
                         ag_block_number(ag) == 0 ? p->wait_ns : NULL);
        bad = waited != LL_ALL_GO_ON || !ll_block_descs_fit(ag, p, plan);
    }
    if (block_barrier(ag, g, bad)) /* in all blocks, unless something has failed */
        return ll_block_stops(ag, p, epoch, waited);
    AG_MARK(ag, MARK_DATA);
    ll_block_goals(ag, p, plan, &part, row, &goals);
    AG_MARK(ag, MARK_PLACES);
    while (item < plan->items) {
        ll_block_write(ag, p, plan, &part, &goals, scratch);
        item += ag_count(ag);
        if (item >= plan->items)
            break;
        part = ll_part(p, item, plan->width, plan->slices);
        if (p->in.cast)
            ll_block_cast(ag, p, &part, scratch);
        ll_block_goals(ag, p, plan, &part, ll_block_row(ag, p, plan, part.t), &goals);
    }
    AG_MARK(ag, MARK_ROWS);
    if (ll_signal_written(ag, p, epoch))
        ll_block_advance(ag, p, epoch);
    AG_MARK(ag, MARK_LAST);
    return LL_BLOCK_WRITTEN;
}

#endif
#endif
