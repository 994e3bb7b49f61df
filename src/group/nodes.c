/* SPDX-License-Identifier: Apache-2.0 */
#include "group/nodes.h"

#include <stdlib.h>
#include <string.h>

#include "kernel/command.h"
#include "util/status.h"

static int node_size(const struct node_map *map, int node)
{
    return map->start[node + 1] - map->start[node];
}

/* Members of all nodes, node after node, and each rank's place in its node. */
static void index_members(struct node_map *map)
{
    memset(map->start, 0, ((size_t)map->nnodes + 1) * sizeof(int));
    for (int r = 0; r < map->nranks; r++) {
        map->place[r] = map->start[map->node_of[r] + 1];
        map->start[map->node_of[r] + 1] += !map->out[r];
    }
    for (int n = 0; n < map->nnodes; n++)
        map->start[n + 1] += map->start[n];
    for (int r = 0; r < map->nranks; r++)
        if (!map->out[r])
            map->members[map->start[map->node_of[r]] + map->place[r]] = r;
}

/* Any rank, if no member of the node is left: callers find it masked. */
static int first_of(const struct node_map *map, int node)
{
    for (int r = 0; r < map->nranks; r++)
        if (map->node_of[r] == node)
            return r;
    return -1;
}

static void find_extremes(struct node_map *map)
{
    map->remotes = 0;
    map->smallest = map->nranks;
    map->largest = 1;
    for (int n = 0; n < map->nnodes; n++) {
        const int size = node_size(map, n);
        if (map->nranks - size > map->remotes)
            map->remotes = map->nranks - size;
        if (size < map->smallest)
            map->smallest = size;
        if (size > map->largest)
            map->largest = size;
    }
    map->relay_max = node_most_sources(map);
}

epx_status node_map_alloc(struct node_map *map, int nranks)
{
    const size_t n = (size_t)nranks;

    memset(map, 0, sizeof(*map));
    map->nranks = nranks;
    map->node_of = calloc(4 * n + 1, sizeof(int));
    map->out = calloc(n, 1);
    if (!map->node_of || !map->out) {
        node_map_free(map);
        return fail(EPX_ERR_MEMORY, "no memory for the nodes of %d ranks", nranks);
    }
    map->place = map->node_of + n;
    map->members = map->place + n;
    map->start = map->members + n;
    return EPX_OK;
}

void node_map_fill(struct node_map *map)
{
    memset(map->out, 0, (size_t)map->nranks);
    map->nnodes = 0;
    for (int r = 0; r < map->nranks; r++)
        if (map->node_of[r] >= map->nnodes)
            map->nnodes = map->node_of[r] + 1;
    index_members(map);
    find_extremes(map);
}

epx_status node_map_make(struct node_map *map, int nranks, const int *node_of)
{
    epx_status status = node_map_alloc(map, nranks);

    if (status != EPX_OK)
        return status;
    memcpy(map->node_of, node_of, (size_t)nranks * sizeof(int));
    node_map_fill(map);
    return EPX_OK;
}

void node_map_leave_out(struct node_map *map, const uint8_t *out)
{
    memcpy(map->out, out, (size_t)map->nranks);
    index_members(map);
}

epx_status node_map_slice(struct node_map *map, int nranks, int ranks_per_node)
{
    int *node_of = malloc((size_t)nranks * sizeof(int));
    epx_status status;

    if (!node_of)
        return fail(EPX_ERR_MEMORY, "no memory for the nodes of %d ranks", nranks);
    for (int r = 0; r < nranks; r++)
        node_of[r] = ranks_per_node ? r / ranks_per_node : 0;
    status = node_map_make(map, nranks, node_of);
    free(node_of);
    return status;
}

void node_map_free(struct node_map *map)
{
    free(map->node_of);
    free(map->out);
    map->node_of = NULL;
    map->out = NULL;
}

void node_recv_indices(const struct node_map *map, int rank, int32_t *at, int32_t *of, int32_t *zeros)
{
    int32_t *below = zeros, own_before = 0; /* ranks before `rank` of each node; of its own node, before r */

    for (int r = 0; r < rank; r++)
        below[map->node_of[r]]++;
    for (int r = 0; r < map->nranks; r++) {
        const int own = map->node_of[r] == map->node_of[rank];

        at[r] = own ? -1 : rank - below[map->node_of[r]];
        of[r] = own ? -1 : r - own_before;
        own_before += own;
    }
}

int node_relay(const struct node_map *map, int source, int node)
{
    const int size = node_size(map, node);

    if (map->node_of[source] == node)
        return -1;
    return size ? map->members[map->start[node] + map->place[source] % size] : first_of(map, node);
}

int node_relay_number(const struct node_map *map, int source, int node)
{
    const int relay = node_relay(map, source, node);
    int number = 0;

    for (int r = 0; r < source && relay >= 0; r++)
        number += !map->out[r] && node_relay(map, r, node) == relay;
    return number;
}

void node_relays_in(const struct node_map *map, int node, int32_t *relays, int32_t *numbers, int32_t *zeros)
{
    for (int r = 0; r < map->nranks; r++) {
        const int relay = node_relay(map, r, node);

        relays[r] = relay;
        numbers[r] = relay < 0 ? -1 : zeros[relay];
        if (relay >= 0)
            zeros[relay] += !map->out[r];
    }
}

void node_order(const struct node_map *map, int32_t *by_node, int32_t *start, int32_t *place_of)
{
    for (int r = 0; r < map->nranks; r++)
        place_of[r] = start[map->node_of[r] + 1]++;
    for (int n = 0; n < map->nnodes; n++)
        start[n + 1] += start[n];
    for (int r = 0; r < map->nranks; r++)
        by_node[start[map->node_of[r]] + place_of[r]] = r;
}

int node_relay_sources(const struct node_map *map, int relay, int *sources)
{
    int n = 0;

    for (int r = 0; r < map->nranks; r++) {
        if (map->out[r] || node_relay(map, r, map->node_of[relay]) != relay)
            continue;
        if (sources)
            sources[n] = r;
        n++;
    }
    return n;
}

/*
 * Low latency sends to every rank elsewhere: the sum of both numbers spreads them. High throughput sends to relays
 * only, whose numbers differ from this rank's by whole nodes: with two rings, all would be on one of them. For rounds
 * of rows the nodes' numbers are added, and as there may be one other node only, each round uses the next ring.
 */
uint32_t node_route(const struct node_map *map, int a, int b)
{
    const int na = map->node_of[a], nb = map->node_of[b];

    if (na != nb && (node_relay(map, a, nb) == b || node_relay(map, b, na) == a))
        return (uint32_t)(a + b) | ROUTE_SPREAD | (uint32_t)(na + nb) << ROUTE_SHIFT;
    return (uint32_t)(a + b);
}

/* The sources of a node are assigned to the members of another in turn: the first member gets the most. */
int node_most_sources(const struct node_map *map)
{
    int most = 0;

    for (int n = 0; n < map->nnodes; n++) {
        int sources = 0;
        for (int from = 0; from < map->nnodes && node_size(map, n); from++)
            if (from != n)
                sources += (node_size(map, from) + node_size(map, n) - 1) / node_size(map, n);
        most = sources > most ? sources : most;
    }
    return most;
}
