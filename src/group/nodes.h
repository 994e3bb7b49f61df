/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which rank is on which node, and what follows: who receives whose puts where. All ranks compute the same.
 *
 *   receive index   of rank s at rank d: how many ranks before s are on other nodes than d
 *   relay            of rank s in node n: the rank there whose place in its node is that of s (modulo the node's size),
 *                    ranks that are left out not counted
 *   relay number     of rank s at its relay: how many ranks before s have the same relay
 */
#ifndef EPX_GROUP_NODES_H
#define EPX_GROUP_NODES_H

#include "epx/epx.h"

struct node_map {
    int nranks, nnodes;
    int remotes;   /* most ranks of other nodes that any rank has */
    int relay_max; /* most sources that any rank relays for */
    int smallest;  /* ranks of the smallest node */
    int largest;
    int *node_of; /* [nranks] */
    uint8_t *out; /* [nranks]: 1 = left out: neither relay nor source. The numbers above count all ranks */
    int *place, *members,
        *start; /* of those that are not out: place in the node [nranks], members by node, from start[node] */
};

/* Memory for any number of nodes. The caller then fills node_of, and node_map_fill() the rest: nobody is out. */
epx_status node_map_alloc(struct node_map *map, int nranks);
void node_map_fill(struct node_map *map);
/* Both; `node_of` is copied. */
epx_status node_map_make(struct node_map *map, int nranks, const int *node_of);
/* Nodes of ranks_per_node consecutive ranks; 0 = one node. */
epx_status node_map_slice(struct node_map *map, int nranks, int ranks_per_node);
void node_map_free(struct node_map *map);
/* Leaves out the ranks whose mark is set. */
void node_map_leave_out(struct node_map *map, const uint8_t *out);

/* The receive indices of `rank` at each rank, and of each rank at `rank`; -1 on its own node. zeros[nnodes] is changed.
 * This and the tables below take one pass: groups have thousands of ranks. */
void node_recv_indices(const struct node_map *map, int rank, int32_t *at, int32_t *of, int32_t *zeros);
int node_relay(const struct node_map *map, int source, int node);
int node_relay_number(const struct node_map *map, int source, int node);
/* Of every rank the relay in a node, and its number there; -1 for ranks of that node. zeros[nranks] are changed. */
void node_relays_in(const struct node_map *map, int node, int32_t *relays, int32_t *numbers, int32_t *zeros);
/* The ranks by node, from start[node] on, and the place of each, those that are left out included. start[nnodes + 1]:
 * zeros at first. */
void node_order(const struct node_map *map, int32_t *by_node, int32_t *start, int32_t *place_of);
/* Fills sources[] (room for relay_max) and returns how many rank `relay` has. */
int node_relay_sources(const struct node_map *map, int relay, int *sources);
/* How puts between two ranks are spread over proxies (ROUTE_RING in kernel/command.h); the same for (b, a). */
uint32_t node_route(const struct node_map *map, int a, int b);
/* The most sources that any rank relays for now. */
int node_most_sources(const struct node_map *map);

#endif
