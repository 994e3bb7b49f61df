/* SPDX-License-Identifier: Apache-2.0 */
/* What the statistics of a group must say: counted from the routing alone, row by row. */
#include "oracle.h"

static int node_of(const struct oracle_route *route, int rank)
{
    if (route->node_of)
        return route->node_of[rank];
    return route->ranks_per_node ? rank / route->ranks_per_node : 0;
}

static int is_in(const struct oracle_route *route, int rank, int node)
{
    return route->active[rank] && node_of(route, rank) == node;
}

/* Who carries rows of `source` into `node`: itself, or the rank there of the same place in its node. */
static int carrier(const struct oracle_route *route, int source, int node)
{
    int place = 0, size = 0;

    if (node_of(route, source) == node)
        return source;
    for (int r = 0; r < source; r++)
        place += is_in(route, r, node_of(route, source));
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

/* Rows of one token at rank `owner`. One row per token and rank, or per entry of its top-k. */
static int rows_at(const struct oracle_route *route, int source, int token, int owner, int by_expert)
{
    const int32_t *idx = oracle_idx(route, source, token);
    int n = 0;

    if (!route->active[source] || !route->active[owner])
        return 0;
    if (!by_expert)
        return oracle_names_rank(route, idx, owner);
    for (int k = 0; k < route->topk; k++)
        n += idx[k] >= 0 && idx[k] / route->local_experts == owner;
    return n;
}

static int64_t rows_between(const struct oracle_route *route, int source, int owner, int by_expert)
{
    int64_t n = 0;

    for (int t = 0; t < route->tokens[source]; t++)
        n += rows_at(route, source, t, owner, by_expert);
    return n;
}

void oracle_count_dispatch(const struct oracle_route *route, int rank, struct oracle_counts *c)
{
    const int expert_major = route->layout == EPX_EXPERT_MAJOR, high = route->mode == EPX_HIGH_THROUGHPUT;
    const int travels = expert_major && high; /* how rows travel */

    for (int r = 0; r < route->nranks; r++) {
        const int from = high ? carrier(route, r, node_of(route, rank)) : r;

        c->rows_sent += (uint64_t)rows_between(route, rank, r, travels);
        c->rows_received += (uint64_t)rows_between(route, r, rank, expert_major);
        if (from >= 0 && from != rank && node_of(route, from) == node_of(route, rank))
            c->rows_peer += (uint64_t)rows_between(route, r, rank, travels);
    }
}

/* Does the token have a row anywhere on `node`? */
static int goes_to(const struct oracle_route *route, int source, int token, int node)
{
    for (int r = 0; r < route->nranks; r++)
        if (node_of(route, r) == node && rows_at(route, source, token, r, 0))
            return 1;
    return 0;
}

void oracle_count_combine(const struct oracle_route *route, int rank, struct oracle_counts *c)
{
    const int by_expert = route->layout == EPX_EXPERT_MAJOR, high = route->mode == EPX_HIGH_THROUGHPUT;
    const int node = node_of(route, rank);

    for (int r = 0; r < route->nranks; r++) {
        const int64_t rows = rows_between(route, rank, r, by_expert);

        if (!high || node_of(route, r) == node)
            c->rows_returned += (uint64_t)rows;
        if (r != rank && node_of(route, r) == node)
            c->rows_peer += (uint64_t)rows;
    }
    /* Another node sends one sum per token, and whoever relays reads what others of its node hold. */
    for (int n = 0; high && n < route->nranks; n++)
        for (int t = 0; n != node && t < route->tokens[rank]; t++)
            c->rows_returned += (uint64_t)goes_to(route, rank, t, n);
    for (int s = 0; high && s < route->nranks; s++)
        for (int r = 0; node_of(route, s) != node && carrier(route, s, node) == rank && r < route->nranks; r++)
            if (r != rank && node_of(route, r) == node)
                c->rows_peer += (uint64_t)rows_between(route, s, r, by_expert);
}
