/* SPDX-License-Identifier: Apache-2.0 */
/* High throughput between nodes: a rank cuts its tokens into rounds (ht_rounds.h) when their routing is known. */
#ifndef EPX_KERNEL_HT_CUT_H
#define EPX_KERNEL_HT_CUT_H

#include "kernel/ht_rounds.h"

/* Entry k of a token names its node for the first time; `nodes` has those of the entries before, or -1. */
KFN int hn_first_of_node(const int *nodes, int k)
{
    int first = nodes[k] >= 0;

    for (int j = 0; j < k && first; j++)
        first = nodes[j] != nodes[k];
    return first;
}

#if AG_ONE_LANE
/* Numbers the tokens of a block among those of it that go to each node; `counts` [nnodes] of them are numbered. */
KFN void hn_number_tokens(struct agent *ag, const struct ht_notify_params *p, int first, int many, int32_t *counts)
{
    const struct group_dev *g = p->g;
    struct handle_dev *h = p->h;
    const int K = p->route.topk_n;
    int nodes[KERNEL_MAX_TOPK];

    (void)ag;
    for (int i = 0; i < many; i++) {
        const int64_t at = (int64_t)(first + i) * K;
        for (int k = 0; k < K; k++) {
            const int32_t id = h->ids[at + k];
            nodes[k] = id < 0 ? -1 : g->node_of[id / g->local_experts];
            nodes[k] = nodes[k] == g->node ? -1 : nodes[k];
            h->nidx[at + k] = hn_first_of_node(nodes, k) ? counts[nodes[k]]++ : -1;
        }
    }
}
#else
/* The entry of a token that names node n first, or -1. The others of that node, and all of the own node, get -1. */
KFN int hn_entry_of_node(const struct ht_notify_params *p, int64_t at, int n)
{
    const struct group_dev *g = p->g;
    int goes = -1;

    for (int k = 0; k < p->route.topk_n; k++) {
        const int32_t id = p->h->ids[at + k];
        if (id < 0 || g->node_of[id / g->local_experts] != n)
            continue;
        p->h->nidx[at + k] = -1;
        goes = goes < 0 && n != g->node ? k : goes;
    }
    return goes;
}

/* The same by lanes that have a token each: node by node, for a vote says how many lanes before this one go there. */
KFN void hn_number_tokens(struct agent *ag, const struct ht_notify_params *p, int first, int many, int32_t *counts)
{
    const int K = p->route.topk_n;

    for (int n = 0; n < p->g->nnodes; n++) {
        int32_t run = 0;
        AG_ROUNDS(ag, int, i, many)
        {
            const int64_t at = (int64_t)(first + i) * K;
            const int goes = i < many ? hn_entry_of_node(p, at, n) : -1;
            int before;
            const int all = ag_vote(ag, goes >= 0, &before);
            if (goes >= 0)
                p->h->nidx[at + goes] = run + before;
            run += all;
        }
        if (ag_leader(ag))
            counts[n] = run;
    }
}
#endif

/* The blocks of tokens, shared out among the agents. Block b leaves its counts where block b + 1 will begin. */
KFN_STEP void hn_number_blocks(struct agent *ag, const struct ht_notify_params *p, int blocks)
{
    const struct group_dev *g = p->g;
    const int B = p->route.ntokens, per = g->ht.block_tokens, N = g->nnodes;

    AG_EACH_ALL(ag, int, n, N) p->h->block_start[n] = 0;
    for (int b = ag_index(ag); b < blocks; b += ag_count(ag)) {
        int32_t *counts = p->h->block_start + (size_t)(b + 1) * (size_t)N;
        AG_EACH(ag, int, n, N) counts[n] = 0;
        ag_sync(ag);
        hn_number_tokens(ag, p, b * per, B - b * per < per ? B - b * per : per, counts);
    }
}

/* Counts of blocks become what comes before them. */
KFN_STEP void hn_add_blocks(struct agent *ag, const struct ht_notify_params *p, int blocks)
{
    const size_t N = (size_t)p->g->nnodes;

    AG_EACH_ALL(ag, size_t, n, N)
    {
        for (size_t b = 1; b <= (size_t)blocks; b++)
            p->h->block_start[b * N + n] += p->h->block_start[(b - 1) * N + n];
    }
}

/* Numbers in a block become numbers of all tokens. */
KFN_STEP void hn_number_all(struct agent *ag, const struct ht_notify_params *p)
{
    const struct group_dev *g = p->g;
    const struct handle_dev *h = p->h;
    const int64_t K = p->route.topk_n, per = g->ht.block_tokens * K;

    AG_EACH_ALL(ag, int64_t, i, (int64_t)p->route.ntokens * K)
    {
        if (h->ids[i] >= 0 && h->nidx[i] >= 0)
            h->nidx[i] += h->block_start[(size_t)(i / per) * (size_t)g->nnodes +
                                         (size_t)g->node_of[h->ids[i] / g->local_experts]];
    }
}

/* Blocks of tokens become rounds: as many as fit into a slot of every node, and into a window. One agent. */
KFN_STEP void hn_cut_rounds(struct agent *ag, const struct ht_notify_params *p)
{
    const struct group_dev *g = p->g;
    struct handle_dev *h = p->h;
    const int per = g->ht.block_tokens, N = g->nnodes, blocks = (p->route.ntokens + per - 1) / per;
    int rounds = 0, first = 0, rows = 0;

    for (int b = 1; b < blocks; b++) {
        int full = g->ht.window && (b + 1 - first) * per > g->ht.sum_tokens;
        AG_EACH(ag, int, n, N)
        full |= h->block_start[(size_t)(b + 1) * (size_t)N + (size_t)n] -
                    h->block_start[(size_t)first * (size_t)N + (size_t)n] >
                g->ht.round_rows;
        if (!ag_any(ag, full))
            continue;
        first = b;
        rounds++;
        if (ag_leader(ag))
            h->round_block[rounds] = first;
    }
    if (!ag_leader(ag))
        return;
    h->round_block[0] = 0;
    h->round_block[rounds + 1] = blocks;
    h->state->rounds = rounds + 1;
    for (int n = 0; n < N; n++) {
        h->node_first[n] = rows;
        rows += h->block_start[(size_t)blocks * (size_t)N + (size_t)n];
    }
}

/* Stage HN_ROUTE, between nodes. One pass over the tokens, whatever the number of nodes. */
KFN_STEP int hn_number(struct agent *ag, const struct ht_notify_params *p)
{
    const struct group_dev *g = p->g;
    const int per = g->ht.block_tokens, blocks = (p->route.ntokens + per - 1) / per;

    hn_number_blocks(ag, p, blocks);
    if (sync_barrier(ag, g))
        return 1;
    hn_add_blocks(ag, p, blocks);
    if (sync_barrier(ag, g))
        return 1;
    hn_number_all(ag, p);
    if (ag_index(ag) == 0)
        hn_cut_rounds(ag, p);
    return sync_barrier(ag, g);
}

#endif
