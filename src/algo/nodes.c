/* SPDX-License-Identifier: Apache-2.0 */
#include "algo/nodes.h"

#include <stdlib.h>
#include <string.h>

#include "util/status.h"

static int is_in(const struct node_map *map, int rank, int node)
{
    return map->node_of[rank] == node && !map->out[rank];
}

static int node_size(const struct node_map *map, int node)
{
    int n = 0;
    for (int r = 0; r < map->nranks; r++)
        n += is_in(map, r, node);
    return n;
}

/* The rank at place `index` of a node. */
static int node_member(const struct node_map *map, int node, int index)
{
    for (int r = 0; r < map->nranks; r++)
        if (is_in(map, r, node) && index-- == 0)
            return r;
    return -1;
}

static int place_in_node(const struct node_map *map, int rank)
{
    int place = 0;
    for (int r = 0; r < rank; r++)
        place += is_in(map, r, map->node_of[rank]);
    return place;
}

/* Any, for a node that nobody is left of: whoever looks at it finds it masked. */
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
    for (int n = 0; n < map->nnodes; n++) {
        const int size = node_size(map, n);
        if (map->nranks - size > map->remotes)
            map->remotes = map->nranks - size;
        if (size < map->smallest)
            map->smallest = size;
    }
    map->relay_max = node_most_sources(map);
}

epx_status node_map_make(struct node_map *map, int nranks, const int *node_of)
{
    memset(map, 0, sizeof(*map));
    map->node_of = malloc((size_t)nranks * sizeof(int));
    map->out = calloc((size_t)nranks, 1);
    if (!map->node_of || !map->out)
        return fail(EPX_ERR_MEMORY, "no memory for the nodes of %d ranks", nranks);
    memcpy(map->node_of, node_of, (size_t)nranks * sizeof(int));
    map->nranks = nranks;
    for (int r = 0; r < nranks; r++)
        if (node_of[r] >= map->nnodes)
            map->nnodes = node_of[r] + 1;
    find_extremes(map);
    return EPX_OK;
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

int node_landing(const struct node_map *map, int source, int receiver)
{
    int number = 0;
    for (int r = 0; r < source; r++)
        number += map->node_of[r] != map->node_of[receiver];
    return number;
}

int node_relay(const struct node_map *map, int source, int node)
{
    const int size = node_size(map, node);

    if (map->node_of[source] == node)
        return -1;
    return size ? node_member(map, node, place_in_node(map, source) % size) : first_of(map, node);
}

int node_relay_number(const struct node_map *map, int source, int node)
{
    const int relay = node_relay(map, source, node);
    int number = 0;

    for (int r = 0; r < source && relay >= 0; r++)
        number += !map->out[r] && node_relay(map, r, node) == relay;
    return number;
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

int node_most_sources(const struct node_map *map)
{
    int most = 0;

    for (int r = 0; r < map->nranks; r++) {
        const int n = map->out[r] ? 0 : node_relay_sources(map, r, NULL);
        most = n > most ? n : most;
    }
    return most;
}
