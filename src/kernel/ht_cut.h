/* SPDX-License-Identifier: Apache-2.0 */
/* High throughput between nodes: a rank cuts its tokens into rounds (ht_rounds.h) when their routing is known. */
#ifndef EPX_KERNEL_HT_CUT_H
#define EPX_KERNEL_HT_CUT_H

#include "kernel/ht_rounds.h"

/* The number of each token among those that go to node n, and how many there are before each block of tokens. */
KFN_STEP void hn_number_node(struct agent *ag, const struct ht_notify_params *p, int n)
{
    const struct group_dev *g = p->g;
    struct handle_dev *h = p->h;
    const int B = p->route.ntokens, K = p->route.topk_n, per = g->ht.block_tokens, N = g->nnodes;
    const int blocks = (B + per - 1) / per;
    int32_t run = 0;

    for (int b = 0; b < blocks; b++) {
        const int first = b * per, many = B - first < per ? B - first : per;
        if (ag_leader(ag))
            h->block_start[(size_t)b * (size_t)N + (size_t)n] = run;
        AG_ROUNDS(ag, int, i, many)
        {
            const int64_t at = (int64_t)(first + i) * K;
            int goes = -1;
            for (int k = 0; i < many && k < K; k++) {
                const int32_t id = h->ids[at + k];
                if (id < 0 || g->node_of[id / g->local_experts] != n)
                    continue;
                h->nidx[at + k] = -1;
                goes = goes < 0 && n != g->node ? k : goes;
            }
            const int before = (int)ag_scan(ag, goes >= 0);
            if (goes >= 0)
                h->nidx[at + goes] = run + before;
            run += (int32_t)ag_sum(ag, goes >= 0);
        }
    }
    if (ag_leader(ag))
        h->block_start[(size_t)blocks * (size_t)N + (size_t)n] = run;
}

/* Blocks of tokens become rounds: as many as fit into a slot of every node. One agent. */
KFN_STEP void hn_cut_rounds(struct agent *ag, const struct ht_notify_params *p)
{
    const struct group_dev *g = p->g;
    struct handle_dev *h = p->h;
    const int per = g->ht.block_tokens, N = g->nnodes, blocks = (p->route.ntokens + per - 1) / per;
    int rounds = 0, first = 0, rows = 0;

    for (int b = 1; b < blocks; b++) {
        int full = 0;
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

/* Stage HN_ROUTE, between nodes. */
KFN_STEP int hn_number(struct agent *ag, const struct ht_notify_params *p)
{
    const struct group_dev *g = p->g;

    for (int n = ag_index(ag); n < g->nnodes; n += ag_count(ag))
        hn_number_node(ag, p, n);
    if (sync_barrier(ag, g))
        return 1;
    if (ag_index(ag) == 0)
        hn_cut_rounds(ag, p);
    return sync_barrier(ag, g);
}

#endif
