/* SPDX-License-Identifier: Apache-2.0 */
/*
 * High-throughput combine between nodes, as a source: where the sums are that relays of other nodes have returned for
 * a token. The protocol is in ht_combine.h.
 */
#ifndef EPX_KERNEL_HT_RETURNED_H
#define EPX_KERNEL_HT_RETURNED_H

#include "kernel/ht_relay.h"

/* What returned for entry k of token t, of round r, or NULL; *n is the node. */
KFN const char *hc_back_row(const struct ht_combine_params *p, int r, int64_t t, int k, int *n)
{
    const struct group_dev *g = p->g;
    const struct handle_dev *h = p->h;
    const int64_t at = t * h->state->topk + k;
    const int i = g->nnodes == 1 || h->ids[at] < 0 ? -1 : h->nidx[at];

    if (i < 0)
        return NULL;
    *n = g->node_of[h->ids[at] / g->local_experts];
    if (!ht_sends_to(g, *n))
        return NULL;
    return net_at(g, ht_back_slot(g, g->node, *n, r)) + (size_t)(i - ht_rows_before(g, h, r, *n)) * hc_wire_bytes(p);
}

/* What node n returned for token t, of round r, or NULL. */
KFN const char *hc_back_of_node(const struct ht_combine_params *p, int r, int64_t t, int n)
{
    const char *row = NULL;
    int other = -1;

    for (int k = 0; k < p->h->state->topk && !row; k++) {
        row = hc_back_row(p, r, t, k, &other);
        row = other == n ? row : NULL;
    }
    return row;
}

/* Nodes that returned something for token t and come before node n. */
KFN int hc_back_before(const struct ht_combine_params *p, int r, int64_t t, int n)
{
    int before = 0, other = 0;

    for (int k = 0; k < p->h->state->topk; k++)
        before += hc_back_row(p, r, t, k, &other) != NULL && other < n;
    return before;
}

#endif
