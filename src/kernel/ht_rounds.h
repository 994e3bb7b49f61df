/* SPDX-License-Identifier: Apache-2.0 */
/*
 * High throughput between nodes: rows pass through slots of a fixed size, in rounds.
 *
 * A source cuts its tokens into rounds (ht_cut.h): consecutive tokens, of which at most C rows (ht.round_rows) go to
 * any one node. Every (source, relay) pair has HT_SLOTS slots of C rows each; round r uses slot r % HT_SLOTS.
 *
 *   dispatch   source                                     relay
 *              wait HD_FREE[slot]: round r - HT_SLOTS is
 *                forwarded (the credit)
 *              put block r, counter HD_BLOCK[slot]   --->  wait for the block: header, and a record for each row
 *              put its rows, counter HD_ROWS[slot]   --->  wait for the rows, forward them
 *                                                    <---  HD_FREE[slot]: the slot may be written again
 *
 *   combine    put block r, counter HC_BLOCK[slot]   --->  wait for the block: whose rows are asked for
 *                (asking is the credit: the rows of        sum them, put the sums, counter HC_ROWS[slot], and one
 *                round r - HT_SLOTS have been read)  <---    count more: this relay is through with the round
 *              wait HC_ROWS[slot], sum the tokens of the
 *                round
 *
 * All ranks go through the rounds in order, a turn (ht_turn) at a time: as a relay those of its sources, and
 * its own. What turn k waits for is given by others in their turns before k, or in turn k before they wait: the rank
 * that is furthest behind can always go on, whatever the numbers of rounds are.
 *
 * A round that is complete is known by counts: those of a slot add up over its rounds and operations. expected[] has
 * what all operations before this one have added; the last agent of an operation brings it up to date.
 */
#ifndef EPX_KERNEL_HT_ROUNDS_H
#define EPX_KERNEL_HT_ROUNDS_H

#include "kernel/rows.h"
#include "kernel/sync.h"

/* Does no round wait for a credit? */
KFN int ht_all_at_once(const struct handle_dev *h)
{
    return h->state->most_rounds <= HT_SLOTS;
}

/* Rounds that one turn takes. In one launch: all, where none waits for a credit, because every turn is a meeting of
 * ranks, which may share a core; else one, so that waits overlap. Where each stage is a launch: half of what may be on
 * its way, so that rows are read while others still come. */
KFN int ht_turn(const struct handle_dev *h)
{
    return AG_STAGED ? HT_TURN_STAGED : ht_all_at_once(h) ? HT_SLOTS : 1;
}

/* Rows for the network are written in runs of consecutive ones, whose puts merge. Where agents are many, few of them
 * write, one run after the other: the network has the first runs while the others are written. How many agents. */
#define HT_RUN 4
#define HT_RUNS 4     /* of an agent, if that leaves enough agents */
#define HT_WRITERS 32 /* enough to fill a bus */

KFN int ht_writers(struct agent *ag, int64_t rows)
{
    const int64_t some = rows / (HT_RUN * HT_RUNS), few = some < HT_WRITERS ? HT_WRITERS : some;
    return few < ag_count(ag) ? (int)few : ag_count(ag);
}

KFN int ht_slot(int round)
{
    return round % HT_SLOTS;
}

/* ---- The ranks of a node ------------------------------------------------------------------------------------ */

KFN int node_size(const struct group_dev *g, int n)
{
    return g->nnodes == 1 ? g->nranks : g->node_start[n + 1] - g->node_start[n];
}

KFN int node_member(const struct group_dev *g, int n, int place)
{
    return g->nnodes == 1 ? place : g->by_node[g->node_start[n] + place];
}

KFN int place_in_node(const struct group_dev *g, int rank)
{
    return g->nnodes == 1 ? rank : g->place_of[rank];
}

/* ---- Rounds of this rank's own tokens ------------------------------------------------------------------------- */

/* How many rows go to node n before round r. */
KFN int ht_rows_before(const struct group_dev *g, const struct handle_dev *h, int r, int n)
{
    return h->block_start[(size_t)h->round_block[r] * (size_t)g->nnodes + (size_t)n];
}

KFN int ht_round_rows(const struct group_dev *g, const struct handle_dev *h, int r, int n)
{
    return ht_rows_before(g, h, r + 1, n) - ht_rows_before(g, h, r, n);
}

/* The first token of round r. */
KFN int ht_round_token(const struct group_dev *g, const struct handle_dev *h, int r)
{
    const int t = h->round_block[r] * g->ht.block_tokens;
    return t < h->state->ntokens ? t : h->state->ntokens;
}

/* Rounds are smaller than a launch: items are shared out over all rounds of a turn. The first item of this agent in a
 * list that comes behind `before` others. */
KFN int64_t ht_first_item(struct agent *ag, int64_t before)
{
    const int64_t A = ag_count(ag), at = before % A;
    return ag_index(ag) >= at ? ag_index(ag) - at : ag_index(ag) - at + A;
}

/* ---- Where things are ----------------------------------------------------------------------------------------- */

/* The slot of a round of source number j at its relay: rows, then a block. */
KFN uint64_t ht_relay_slot(const struct group_dev *g, int number, int round)
{
    return g->ht.relay + ((uint64_t)number * HT_SLOTS + (uint64_t)ht_slot(round)) * g->ht.relay_stride;
}

KFN uint64_t ht_relay_block(const struct group_dev *g, int number, int round)
{
    return ht_relay_slot(g, number, round) + g->ht.relay_block;
}

/* Where the node finds that round while rows pass through windows (ht_window.h): in the slot, or in a copy of it, if
 * only this rank and its network reach the slot. */
KFN uint64_t ht_shown_slot(const struct group_dev *g, int number, int round)
{
    if (!g->ht.split)
        return ht_relay_slot(g, number, round);
    return g->ht.shown + ((uint64_t)(round % 2) * (uint64_t)g->relay_max + (uint64_t)number) * g->ht.relay_stride;
}

KFN uint64_t ht_shown_block(const struct group_dev *g, int number, int round)
{
    return ht_shown_slot(g, number, round) + g->ht.relay_block;
}

/* Where source s, of node s_node, keeps the sums of a round that node n returns. */
KFN uint64_t ht_back_slot(const struct group_dev *g, int s_node, int n, int round)
{
    const int number = n < s_node ? n : n - 1;
    return g->ht.back + ((uint64_t)number * HT_SLOTS + (uint64_t)ht_slot(round)) * g->ht.back_stride;
}

/* The block of (node n, round r) on its way out: all blocks lie one behind the other, by node and round. */
KFN uint64_t ht_out_block(const struct group_dev *g, const struct handle_dev *h, int n, int r, size_t record)
{
    const uint64_t headers = (uint64_t)n * (uint64_t)h->state->rounds + (uint64_t)r;
    const uint64_t rows = (uint64_t)h->node_first[n] + (uint64_t)ht_rows_before(g, h, r, n);

    return g->ht.blocks + headers * HT_HEADER_BYTES + rows * record;
}

/* ---- Records: what tells a relay where a row goes -------------------------------------------------------------- */

/* Relays need the number of the token at its rank too: for source maps, or because tokens are dropped. */
KFN int ht_has_lines(const struct handle_dev *h)
{
    return h->line != NULL || (h->state->drop & DROP_TOKENS) != 0;
}

/* token, ids[K], places[K]: the number of the row among those of this source to that rank (FLAT) or expert, or -1; with
 * source maps lines[K], likewise. The relay adds where the rows and the lines of the source begin. */
KFN size_t ht_route_bytes(const struct handle_dev *h)
{
    return up16(4 + (size_t)h->state->topk * (ht_has_lines(h) ? 12 : 8));
}

/* Where lines begin in a table of bases. */
KFN int ht_line_base(const struct group_dev *g)
{
    return node_size(g, g->node) * g->local_experts;
}

KFN void ht_write_route(struct agent *ag, const struct handle_dev *h, int layout, char *to, int64_t t)
{
    const int K = h->state->topk;
    int32_t *out = (int32_t *)to;
    const int32_t *number = layout == LAYOUT_FLAT ? h->ridx : h->eidx;

    if (ag_leader(ag))
        out[0] = (int32_t)t;
    AG_EACH(ag, int, k, K)
    {
        out[1 + k] = h->ids[t * K + k];
        out[1 + K + k] = h->ids[t * K + k] < 0 ? -1 : number[t * K + k];
        if (ht_has_lines(h))
            out[1 + 2 * K + k] = h->ids[t * K + k] < 0 ? -1 : h->ridx[t * K + k];
    }
}

/* Rows beyond the limit are dropped, as hn_drop() does with those of this node. */
KFN void ht_drop_route(struct agent *ag, const struct group_dev *g, const struct handle_dev *h, int32_t *route)
{
    const int K = h->state->topk, L = g->local_experts;
    int32_t *ids = route + 1, *pos = ids + K, *line = pos + K;

    AG_EACH(ag, int, k, K)
    {
        int32_t number = -1;
        for (int j = 0; j <= k && number < 0 && pos[k] >= 0 && h->state->drop & DROP_TOKENS; j++)
            number = ids[j] >= 0 && ids[j] / L == ids[k] / L ? line[j] : -1;
        const int32_t limit = pos[k] < 0 ? 0 : h->limits[ids[k] / L];
        if (pos[k] >= limit)
            pos[k] = -1;
        else if (pos[k] >= 0 && number >= limit)
            pos[k] = PHANTOM(pos[k]);
    }
    ag_sync(ag);
}

#define HT_RECORD_BATCH 4 /* words of a lane that are on their way together */

/* A record that an agent works on, close at hand: in a heap that a GPU has across a bus, every word would be a trip of
 * its own. Not by ag_copy(), which would take registers from the sums of combine. */
KFN_STEP char *ht_copy_record(struct agent *ag, const struct group_dev *g, char *record, size_t bytes)
{
#if AG_STAGED
    uint64_t *copy = (uint64_t *)(g->records + (size_t)ag_index(ag) * g->record_stride);
    const int words = (int)(bytes / 8);

    ag_sync(ag); /* all lanes are through with the last one */
    for (int first = ag_lane(ag); first < words; first += HT_RECORD_BATCH * AG_LANES) {
        uint64_t word[HT_RECORD_BATCH];
        AG_UNROLL
        for (int i = 0; i < HT_RECORD_BATCH; i++)
            word[i] = first + i * AG_LANES < words ? ((const uint64_t *)record)[first + i * AG_LANES] : 0;
        AG_UNROLL
        for (int i = 0; i < HT_RECORD_BATCH; i++)
            if (first + i * AG_LANES < words)
                copy[first + i * AG_LANES] = word[i];
    }
    ag_sync(ag);
    return (char *)copy;
#else
    (void)ag;
    (void)g;
    (void)bytes;
    return record;
#endif
}

/* As a relay: numbers become rows of this node's ranks. A record from a network decides what this rank reads and
 * writes: every value is checked. Non-zero: one of them is wrong. */
KFN int ht_resolve_route(struct agent *ag, const struct group_dev *g, const struct handle_dev *h, int layout, int j,
                         char *record)
{
    const int K = h->state->topk, L = g->local_experts;
    int32_t *route = (int32_t *)record;
    const int32_t *base = h->relay_base + (size_t)j * g->ht.base_stride;
    const int lines = ht_has_lines(h);
    int odd = 0;

    AG_EACH(ag, int, k, K)
    {
        const int32_t id = route[1 + k], number = route[1 + K + k], line = lines ? route[1 + 2 * K + k] : -1;
        const int wrong = id < -1 || id >= g->experts || number < -1 || number >= g->max_tokens * K || line < -1 ||
                          line >= g->max_tokens;
        const int d = wrong || id < 0 ? -1 : id / L;
        const int place = d >= 0 && is_local(g, d) ? place_in_node(g, d) : -1;

        odd |= wrong;
        route[1 + K + k] =
            place < 0 || number < 0 ? -1 : base[layout == LAYOUT_FLAT ? place : place * L + id % L] + number;
        if (lines)
            route[1 + 2 * K + k] = place < 0 || line < 0 ? -1 : base[ht_line_base(g) + place] + line;
    }
    ag_sync(ag);
    if (h->state->drop)
        ht_drop_route(ag, g, h, route);
    return ag_any(ag, odd);
}

/* ---- Counts ---------------------------------------------------------------------------------------------------- */

/* How many rounds before r have its slot. */
KFN uint64_t ht_laps(int round)
{
    return (uint64_t)(round / HT_SLOTS);
}

/* Rows of source number j in the rounds up to r that have its slot. */
KFN uint64_t ht_rows_expected(const struct group_dev *g, const struct handle_dev *h, int j, int round)
{
    uint64_t n = 0;

    for (int r = INJECT_BUG(BUG_ROUND_TWICE, round, ht_slot(round)); r <= round; r += HT_SLOTS)
        n += (uint64_t)h->relay_rows[(size_t)j * (size_t)g->ht.rounds + (size_t)r];
    return n;
}

/* Has this counter of `peer` come so far? Each lane. */
KFN int ht_there(const struct group_dev *g, int kind, int round, int peer, uint64_t more)
{
    const size_t i = signal_index(g, kind, ht_slot(round), peer);
    return (int64_t)(ag_peek(&g->counters[i]) - (g->expected[i] + more)) >= 0;
}

/* Every lane has looked at some words: the number of one that is missing (`mine`, else -1) of any lane; -1: all are
 * there, and what they stand for is visible. So one look serves many words, and waits are for what is missing. */
KFN_STEP int ht_missing(struct agent *ag, int mine)
{
    int before;

    if (ag_vote(ag, mine >= 0, &before) > 0)
        return (int)ag_sum(ag, mine >= 0 && before == 0 ? mine : 0);
    ag_peeked(ag);
    return -1;
}

KFN int ht_wait_counter(struct agent *ag, const struct group_dev *g, int kind, int round, int peer, uint64_t more,
                        int phase, uint64_t start)
{
    const size_t i = signal_index(g, kind, ht_slot(round), peer);
    return wait_word_since(ag, g, &g->counters[i], g->expected[i] + more, phase, peer, start);
}

/* At the end of an operation: `n` more have been counted in this slot. One lane. */
KFN void ht_count(const struct group_dev *g, int kind, int slot, int peer, uint64_t n)
{
    g->expected[signal_index(g, kind, slot, peer)] += n;
}

/* How many of `rounds` rounds have this slot. */
KFN uint64_t ht_uses(int rounds, int slot)
{
    return rounds > slot ? (uint64_t)((rounds - 1 - slot) / HT_SLOTS + 1) : 0;
}

/* Credits in this slot: one for each round; one in all, when the operation ends, where no round waits for one. */
KFN uint64_t ht_credits(int rounds, int slot)
{
    return rounds > HT_SLOTS ? ht_uses(rounds, slot) : slot == 0;
}

/* The relay of this rank in node n takes part. */
KFN int ht_sends_to(const struct group_dev *g, int n)
{
    return n != g->node && g->mask[g->relay_rank[n]];
}

/* What slot `slot` at the relay in node n has given back by all earlier operations. */
KFN uint64_t ht_freed(const struct group_dev *g, int n, int slot)
{
    const uint64_t all = g->expected[signal_index(g, SIG_HD_FREE, slot, g->relay_rank[n])];
    return INJECT_BUG(BUG_EPOCH, all ? all - 1 : 0, all);
}

/* All slots of this rank at its relays are free: they have forwarded all that earlier operations sent. One agent. */
KFN_STEP int ht_wait_all_free(struct agent *ag, const struct group_dev *g)
{
    const uint64_t start = ag_now(ag);

    for (;;) {
        int mine = -1;
        AG_EACH(ag, int, i, g->nnodes *HT_SLOTS)
        {
            const int n = i / HT_SLOTS, slot = i % HT_SLOTS;
            if (mine >= 0 || !ht_sends_to(g, n))
                continue;
            const size_t at = signal_index(g, SIG_HD_FREE, slot, g->relay_rank[n]);
            mine = (int64_t)(ag_peek(&g->counters[at]) - ht_freed(g, n, slot)) < 0 ? i : -1;
        }
        const int late = ht_missing(ag, mine), n = late / HT_SLOTS, slot = late % HT_SLOTS;
        if (late < 0)
            return 0;
        if (wait_word_since(ag, g, &g->counters[signal_index(g, SIG_HD_FREE, slot, g->relay_rank[n])],
                            ht_freed(g, n, slot), PHASE_HD_FREE, g->relay_rank[n], start))
            return 1;
    }
}

/* The blocks of round r to all relays. One agent, when all agents have written them. */
KFN_STEP int ht_put_blocks(struct agent *ag, const struct group_dev *g, const struct handle_dev *h, int kind, int r,
                           size_t record)
{
    struct put_batch batch;

    put_begin(&batch);
    for (int j = 1; j < g->nnodes; j++) {
        const int n = (g->node + j) % g->nnodes;
        if (ht_sends_to(g, n))
            put(ag, g, &batch, g->relay_rank[n], COUNTER(kind, ht_slot(r)), ht_out_block(g, h, n, r, record),
                ht_relay_block(g, g->relay_slot[n], r),
                (uint32_t)(HT_HEADER_BYTES + (size_t)ht_round_rows(g, h, r, n) * record));
    }
    return put_flush(ag, g, &batch) ? push_failed(ag, g, batch.failed) : 0;
}

/* The headers of all blocks. All agents. */
KFN void ht_write_headers(struct agent *ag, const struct group_dev *g, const struct handle_dev *h,
                          const struct signature *signature, size_t record)
{
    const int R = h->state->rounds;

    for (int i = ag_index(ag); i < g->nnodes * R; i += ag_count(ag))
        if (i / R != g->node)
            ag_copy(ag, net_at(g, ht_out_block(g, h, i / R, i % R, record)), signature, sizeof(*signature));
}

/* Waits until the block of (source number j, round r) is there, and compares signatures. */
KFN_STEP int ht_wait_block(struct agent *ag, const struct group_dev *g, int kind, int phase, int j, int r,
                           const struct signature *mine, uint64_t start)
{
    const int s = g->relay_sources[j];
    const struct signature *theirs = (const struct signature *)net_at(g, ht_relay_block(g, j, r));

    if (ht_wait_counter(ag, g, kind, r, s, ht_laps(r) + 1, phase, start))
        return 1;
    return check_signature(ag, g, mine, theirs, phase, s);
}

/* Round r of source number j exists, and its source takes part. */
KFN int ht_relays(const struct group_dev *g, const struct handle_dev *h, int j, int r)
{
    return g->mask[g->relay_sources[j]] && r < h->relay_rounds[j];
}

/* Whose round is item i of the rounds from `first` on: those of all sources, round by round. */
KFN int ht_item_source(const struct group_dev *g, int i)
{
    return i % g->relay_count;
}

KFN int ht_item_round(const struct group_dev *g, int first, int i)
{
    return first + i / g->relay_count;
}

/* The blocks of rounds [first, end) are those of this operation: all signatures by one look. */
KFN_STEP int ht_check_blocks(struct agent *ag, const struct group_dev *g, const struct handle_dev *h, int first,
                             int end, const struct signature *mine, int phase)
{
    const int words = (int)(sizeof(*mine) / 4), items = (end - first) * g->relay_count;
    int odd = 0;

    AG_EACH(ag, int, i, items *words)
    {
        const int j = ht_item_source(g, i / words), r = ht_item_round(g, first, i / words);
        if (ht_relays(g, h, j, r))
            odd |=
                ((const int32_t *)net_at(g, ht_relay_block(g, j, r)))[i % words] != ((const int32_t *)mine)[i % words];
    }
    for (int i = 0; ag_any(ag, odd) && i < items; i++) {
        const int j = ht_item_source(g, i), r = ht_item_round(g, first, i);
        if (ht_relays(g, h, j, r) &&
            check_signature(ag, g, mine, (const struct signature *)net_at(g, ht_relay_block(g, j, r)), phase,
                            g->relay_sources[j]))
            return 1;
    }
    return 0;
}

/* In which phase a relay waits for what the blocks of this kind announce. */
KFN int ht_block_phase(int kind)
{
    return kind == SIG_HD_BLOCK ? PHASE_HD_ROWS : PHASE_HC_BLOCK;
}

/* The block of (source number j, round r) is there, and in a dispatch its rows. One agent. */
KFN_STEP int ht_wait_round(struct agent *ag, const struct group_dev *g, const struct handle_dev *h, int kind, int j,
                           int r, const struct signature *mine, uint64_t start)
{
    const int s = g->relay_sources[j], phase = ht_block_phase(kind);

    return ht_wait_block(ag, g, kind, phase, j, r, mine, start) ||
           (kind == SIG_HD_BLOCK &&
            ht_wait_counter(ag, g, SIG_HD_ROWS, r, s, ht_rows_expected(g, h, j, r), phase, start));
}

#if AG_STAGED
KFN int ht_round_there(const struct group_dev *g, const struct handle_dev *h, int kind, int j, int r)
{
    const int s = g->relay_sources[j];

    return ht_there(g, kind, r, s, ht_laps(r) + 1) &&
           (kind != SIG_HD_BLOCK || ht_there(g, SIG_HD_ROWS, r, s, ht_rows_expected(g, h, j, r)));
}

/* The same for `many` rounds of all sources: one look serves all of them, and waits are for what is missing. */
KFN_STEP int ht_wait_rounds(struct agent *ag, const struct group_dev *g, const struct handle_dev *h, int kind,
                            int first, int many, const struct signature *mine)
{
    const uint64_t start = ag_now(ag);

    for (;;) {
        int missing = -1;
        AG_EACH(ag, int, i, many * g->relay_count)
        {
            const int j = ht_item_source(g, i), r = ht_item_round(g, first, i);
            if (missing < 0 && ht_relays(g, h, j, r) && !ht_round_there(g, h, kind, j, r))
                missing = i;
        }
        const int late = ht_missing(ag, missing);
        if (late < 0)
            return ht_check_blocks(ag, g, h, first, first + many, mine, ht_block_phase(kind));
        if (ht_wait_round(ag, g, h, kind, ht_item_source(g, late), ht_item_round(g, first, late), mine, start))
            return 1;
    }
}
#endif

#endif
