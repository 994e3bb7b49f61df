/* SPDX-License-Identifier: Apache-2.0 */
/* High-throughput notify (ht_notify.h): the blocks of counts that ranks exchange, where they are, who writes them. */
#ifndef EPX_KERNEL_HT_COUNTS_H
#define EPX_KERNEL_HT_COUNTS_H

#include "kernel/ht_rounds.h"

#define HN_BATCH 8 /* words of a lane that are on their way together: each may lie across a bus */

/* Opens a block. rcount[ranks of the node], ecount[their experts], rows[rounds] follow. */
struct hn_desc {
    struct signature signature;
    int32_t ntokens;
    union {
        int32_t rounds;        /* between nodes */
        int32_t expected_rows; /* in a group of one node; 0: it does not say */
    };
    int32_t drop_rows; /* rows that this rank takes where rows are dropped; else 0 */
    int32_t reserved[3];
};
EPX_STATIC_ASSERT(sizeof(struct hn_desc) == 48, "shared between ranks");

/* Numbers 0 to nnodes - 1 are the own blocks, nnodes + j that of source number j. */
KFN uint64_t hn_block_at(const struct group_dev *g, uint64_t epoch, int number)
{
    return g->ht.counts + ((epoch % 2) * (uint64_t)(g->nnodes + g->relay_max) + (uint64_t)number) * g->ht.counts_stride;
}

/* The same where the network reads and writes it. */
KFN uint64_t hn_net_block_at(const struct group_dev *g, uint64_t epoch, int number)
{
    return hn_block_at(g, epoch, number) - g->ht.counts + g->ht.net_counts;
}

/* The own block for node n. */
KFN struct hn_desc *hn_own_block(const struct group_dev *g, uint64_t epoch, int n)
{
    return (struct hn_desc *)(n == g->node ? heap_at(g, g->rank, hn_block_at(g, epoch, n))
                                           : net_at(g, hn_net_block_at(g, epoch, n)));
}

/* How many epochs up to this one have its slot. Two epochs are on their way at a time, and the later may land first:
 * the network counts them separately. */
KFN uint64_t hn_lap(uint64_t epoch)
{
    return (epoch + 1) / 2;
}

/* What `rank` says to this node, where it was written. */
KFN const struct hn_desc *hn_desc_at(const struct group_dev *g, int rank, uint64_t epoch)
{
    if (is_local(g, rank))
        return (const struct hn_desc *)heap_at(g, rank, hn_block_at(g, epoch, g->node));
    return (const struct hn_desc *)heap_at(g, g->relay_of[rank],
                                           hn_block_at(g, epoch, g->nnodes + g->relay_number[rank]));
}

/* The same for all who read it, once all counts are there (hn_fetch). */
KFN const struct hn_desc *hn_desc_of(const struct group_dev *g, int rank, uint64_t epoch)
{
    if (AG_STAGED && g->nnodes > 1)
        return (const struct hn_desc *)(g->counts_copy + (size_t)rank * g->ht.counts_stride);
    return hn_desc_at(g, rank, epoch);
}

/* Rows of `rank` to the ranks of this node, and to each of their experts. */
KFN const int32_t *hn_rcount(const struct group_dev *g, int rank, uint64_t epoch)
{
    return (const int32_t *)(hn_desc_of(g, rank, epoch) + 1);
}

KFN const int32_t *hn_ecount(const struct group_dev *g, int rank, uint64_t epoch)
{
    return hn_rcount(g, rank, epoch) + node_size(g, g->node);
}

KFN const int32_t *hn_rounds(const struct group_dev *g, int rank, uint64_t epoch)
{
    return hn_ecount(g, rank, epoch) + node_size(g, g->node) * g->local_experts;
}

/* Where a rank says how many rows it has for expert `at` of this node's; NULL: it is masked, or there is none. */
KFN_STEP const int32_t *hn_ecount_at(const struct group_dev *g, int rank, uint64_t epoch, int at)
{
    return rank < g->nranks && g->mask[rank] ? hn_ecount(g, rank, epoch) + at : NULL;
}

/* What ranks first, first + 1 ... say, HN_BATCH of them. */
KFN void hn_ecounts(const struct group_dev *g, uint64_t epoch, int at, int first, int32_t *rows)
{
    const int32_t *from[HN_BATCH];

    AG_UNROLL
    for (int j = 0; j < HN_BATCH; j++)
        from[j] = hn_ecount_at(g, first + j, epoch, at);
    AG_UNROLL
    for (int j = 0; j < HN_BATCH; j++)
        rows[j] = from[j] ? *from[j] : 0;
}

/* Rows of all ranks to expert `at` of this node's. */
KFN_STEP int32_t hn_expert_rows(const struct group_dev *g, uint64_t epoch, int at)
{
    int32_t all = 0;

    for (int first = 0; first < g->nranks; first += HN_BATCH) {
        int32_t rows[HN_BATCH];
        hn_ecounts(g, epoch, at, first, rows);
        AG_UNROLL
        for (int j = 0; j < HN_BATCH; j++)
            all += rows[j];
    }
    return all;
}

#if AG_ONE_LANE
#define HN_CHUNK 256 /* destinations whose counts are added up together */

/* Adds up the counts of ranks [from, to) for n destinations, from number `at` of rcount[] and what follows it on. Rank
 * by rank, for what a rank says lies together: destination by destination each load would be of another heap, and so
 * of another page. */
KFN_STEP void hn_add_counts(const struct group_dev *g, uint64_t epoch, int from, int to, int at, int n, int32_t *rows)
{
    for (int s = from; s < to; s++) {
        const int32_t *count = g->mask[s] ? hn_rcount(g, s, epoch) + at : NULL;
        for (int i = 0; i < n && count; i++)
            rows[i] += count[i];
    }
}
#endif

/* All of its rows, by rank: in updates that drop FLAT rows. */
KFN const int32_t *hn_all_rcount(const struct group_dev *g, int rank, uint64_t epoch)
{
    return hn_rounds(g, rank, epoch) + g->ht.rounds;
}

KFN void hn_write_block(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch, int n)
{
    const struct group_dev *g = p->g;
    const struct handle_dev *h = p->h;
    const int P = node_size(g, n), L = g->local_experts;
    int32_t *counts = (int32_t *)(hn_own_block(g, epoch, n) + 1);

    AG_EACH_ALL(ag, int, i, P) counts[i] = h->rcount[node_member(g, n, i)];
    AG_EACH_ALL(ag, int, i, P *L)
    {
        const int e = node_member(g, n, i / L) * L + i % L;
        counts[P + i] = e < g->experts ? h->ecount[e] : 0;
    }
    AG_EACH_ALL(ag, int, r, n == g->node ? 0 : h->state->rounds) counts[P + P * L + r] = ht_round_rows(g, h, r, n);
    AG_EACH_ALL(ag, int, r, p->drop &DROP_FLAT ? g->nranks : 0) counts[P + P * L + g->ht.rounds + r] = h->rcount[r];
}

KFN_STEP void hn_put_blocks(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    struct put_batch batch;

    put_begin(&batch);
    for (int n = 0; n < g->nnodes; n++) {
        const int more = p->drop & DROP_FLAT ? g->ht.rounds + g->nranks : p->h->state->rounds;
        const size_t words = (size_t)node_size(g, n) * (size_t)(1 + g->local_experts) + (size_t)more;
        if (ht_sends_to(g, n))
            put(ag, g, &batch, g->relay_rank[n], COUNTER(SIG_HN_DATA, epoch % 2), hn_net_block_at(g, epoch, n),
                hn_net_block_at(g, epoch, g->nnodes + g->relay_slot[n]),
                (uint32_t)up16(sizeof(struct hn_desc) + words * 4));
    }
    if (put_flush(ag, g, &batch))
        push_failed(ag, g, batch.failed); /* as in signal_peers() */
}

KFN_STEP void hn_publish(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    for (int n = 0; n < g->nnodes; n++)
        hn_write_block(ag, p, epoch, n);
    if (!sync_last(ag, g, 0))
        return;
    AG_EACH(ag, int, n, g->nnodes)
    {
        struct hn_desc *desc = hn_own_block(g, epoch, n);
        desc->signature = p->signature;
        desc->ntokens = p->too_many ? (int32_t)p->too_many : p->route.ntokens;
        desc->rounds = g->nnodes > 1 ? p->h->state->rounds : (int32_t)p->expected_rows;
        desc->drop_rows = (int32_t)p->drop_rows;
    }
    if (ag_leader(ag)) {
        p->h->state->key = 0; /* until hn_done() */
        g->state->epoch[OP_HT_NOTIFY] = epoch;
    }
    ag_sync(ag);
    if (g->nnodes > 1)
        hn_put_blocks(ag, p, epoch);
    signal_peers(ag, g, SCOPE_NODE, SIG_HN_DATA, 0, epoch);
}

#if AG_STAGED
/* Words of 8 bytes of what `rank` says: its descriptor and counts; its rounds, to its relay; all of its rows. */
KFN int hn_words(const struct ht_notify_params *p, int rank)
{
    const struct group_dev *g = p->g;
    const int P = node_size(g, g->node), relayed = !is_local(g, rank) && g->relay_of[rank] == g->rank;
    const int rounds = p->drop & DROP_FLAT ? g->ht.rounds + g->nranks : relayed ? g->ht.rounds : 0;

    return ((int)sizeof(struct hn_desc) + (P + P * g->local_experts + rounds) * 4 + 7) / 8;
}

/* Copies the counts of all ranks to the device's memory: they are read many times, and each word that lies across a bus
 * would be a trip of its own. One agent. */
KFN_STEP void hn_fetch(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    /* Ranks that this one relays for say more: they come by themselves, and the others as if they were one text. */
    const int each = ((int)sizeof(struct hn_desc) + node_size(g, g->node) * (1 + g->local_experts) * 4 + 7) / 8;
    for (int first = ag_lane(ag); first < g->nranks * each; first += HN_BATCH * AG_LANES) {
        uint64_t words[HN_BATCH];
        AG_UNROLL
        for (int i = 0; i < HN_BATCH; i++) {
            const int at = first + i * AG_LANES, s = at < g->nranks * each ? at / each : 0;
            words[i] = at < g->nranks * each && g->mask[s] ? ((const uint64_t *)hn_desc_at(g, s, epoch))[at % each] : 0;
        }
        AG_UNROLL
        for (int i = 0; i < HN_BATCH; i++) {
            const int at = first + i * AG_LANES;
            if (at < g->nranks * each)
                ((uint64_t *)(g->counts_copy + (size_t)(at / each) * g->ht.counts_stride))[at % each] = words[i];
        }
    }
    ag_sync(ag);
    for (int s = 0; s < g->nranks; s++)
        if (g->mask[s] && hn_words(p, s) > each)
            ag_copy(ag, g->counts_copy + (size_t)s * g->ht.counts_stride, hn_desc_at(g, s, epoch),
                    (size_t)hn_words(p, s) * 8);
    ag_sync(ag);
}
#endif

#endif
