/* SPDX-License-Identifier: Apache-2.0 */
/* What the statistics of a group must say: counted from the routing alone, row by row. */
#include "oracle.h"

static int is_in(const struct oracle_route *route, int rank, int node)
{
    return route->active[rank] && oracle_node_of(route, rank) == node;
}

/* Who carries rows of `source` into `node`: itself, or the rank there of the same place in its node. */
static int carrier(const struct oracle_route *route, int source, int node)
{
    int place = 0, size = 0;

    if (oracle_node_of(route, source) == node)
        return source;
    for (int r = 0; r < source; r++)
        place += is_in(route, r, oracle_node_of(route, source));
    for (int r = 0; r < route->nranks; r++)
        size += is_in(route, r, node);
    if (!size)
        return -1;
    place %= size;
    for (int r = 0; r < route->nranks; r++)
        if (is_in(route, r, node) && place-- == 0)
            return r;
    return -1;
}

/* How to count: tokens; rows of experts (in low latency entries of a token may share one); entries of a token's
 * top-k. */
enum count { BY_RANK, BY_EXPERT, BY_ENTRY };

static int is_new(const int32_t *idx, int k)
{
    for (int before = 0; before < k; before++)
        if (idx[before] == idx[k])
            return 0;
    return 1;
}

/* Rows of one token at rank `owner`. */
static int rows_at(const struct oracle_route *route, int source, int token, int owner, enum count by)
{
    const int shared = by == BY_EXPERT && route->mode == EPX_LOW_LATENCY;
    const int32_t *idx = oracle_idx(route, source, token);
    int n = 0;

    if (!route->active[source] || !route->active[owner])
        return 0;
    if (by == BY_RANK)
        return oracle_names_rank(route, idx, owner);
    for (int k = 0; k < route->topk; k++)
        n += idx[k] >= 0 && idx[k] / route->local_experts == owner && (!shared || is_new(idx, k));
    return n;
}

static int64_t rows_between(const struct oracle_route *route, int source, int owner, enum count by)
{
    int64_t n = 0;

    for (int t = 0; t < route->tokens[source]; t++)
        n += rows_at(route, source, t, owner, by);
    return n;
}

void oracle_count_dispatch(const struct oracle_route *route, int rank, struct oracle_counts *c)
{
    const int high = route->mode == EPX_HIGH_THROUGHPUT;
    const enum count by = route->layout == EPX_EXPERT_MAJOR ? BY_EXPERT : BY_RANK;
    const enum count travels = high ? by : BY_RANK; /* how rows travel */

    for (int r = 0; r < route->nranks; r++) {
        const int from = high ? carrier(route, r, oracle_node_of(route, rank)) : r;

        c->rows_sent += (uint64_t)rows_between(route, rank, r, travels);
        c->rows_received += (uint64_t)rows_between(route, r, rank, by);
        if (from >= 0 && from != rank && oracle_node_of(route, from) == oracle_node_of(route, rank))
            c->rows_peer += (uint64_t)rows_between(route, r, rank, travels);
    }
}

/* The node of entry k of a token's top-k; -1: it has no row. */
static int entry_node(const struct oracle_route *route, const int32_t *idx, int k)
{
    const int owner = idx[k] >= 0 ? idx[k] / route->local_experts : -1;

    return owner >= 0 && route->active[owner] ? oracle_node_of(route, owner) : -1;
}

/* On how many nodes other than its own does the token have rows? */
static int other_nodes(const struct oracle_route *route, int source, int token)
{
    const int32_t *idx = oracle_idx(route, source, token);
    int n = 0;

    for (int k = 0; k < route->topk && route->active[source]; k++) {
        const int node = entry_node(route, idx, k);
        int before = 0;

        while (before < k && entry_node(route, idx, before) != node)
            before++;
        n += node >= 0 && node != oracle_node_of(route, source) && before == k;
    }
    return n;
}

void oracle_count_combine(const struct oracle_route *route, int rank, struct oracle_counts *c)
{
    const int expert_major = route->layout == EPX_EXPERT_MAJOR, high = route->mode == EPX_HIGH_THROUGHPUT;
    const enum count by = expert_major ? BY_EXPERT : BY_RANK, summed = expert_major ? BY_ENTRY : BY_RANK;
    const int node = oracle_node_of(route, rank);

    for (int r = 0; r < route->nranks; r++) {
        if (!high || oracle_node_of(route, r) == node)
            c->rows_returned += (uint64_t)rows_between(route, rank, r, summed);
        if (r != rank && oracle_node_of(route, r) == node)
            c->rows_peer += (uint64_t)rows_between(route, rank, r, by);
    }
    /* Another node sends one sum per token, and whoever relays reads what others of its node hold. */
    for (int t = 0; high && t < route->tokens[rank]; t++)
        c->rows_returned += (uint64_t)other_nodes(route, rank, t);
    for (int s = 0; high && s < route->nranks; s++) {
        if (oracle_node_of(route, s) == node || carrier(route, s, node) != rank)
            continue;
        for (int r = 0; r < route->nranks; r++)
            if (r != rank && oracle_node_of(route, r) == node)
                c->rows_peer += (uint64_t)rows_between(route, s, r, by);
    }
}
