/* SPDX-License-Identifier: Apache-2.0 */
/* The layout of a rank's heap: a pure function of the settings, so that all ranks compute the same. */
#ifndef EPX_GROUP_HEAP_LAYOUT_H
#define EPX_GROUP_HEAP_LAYOUT_H

#include "group/nodes.h"
#include "epx/epx.h"
#include "kernel/params.h"

/* A group's configuration with every default filled in. */
struct settings {
    int nranks;
    int device, device_index;
    unsigned modes;
    int experts, local_experts;
    int max_tokens, max_hidden_bytes, max_topk;
    int64_t max_recv_tokens;
    int max_recv_given; /* 1: the caller set max_recv_tokens */
    int inflight, agents, ranks_per_node, enable_mask, timeout_ms;
    int use_fabric;                  /* 1: asked for (fabric.h) */
    int proxy_threads;               /* EPX_PROXY_THREADS */
    int ll_wide_wait_us, ll_few_sms; /* EPX_LL_WIDE_WAIT_US, EPX_LL_FEW_SMS */
    char net[16];
    /* From the node map; one node until it is known. */
    int nnodes, remotes, relay_max, smallest_node, largest_node;
    int split; /* rows between nodes pass through host memory of their own (group/heap.c) */
    int sig_slots;
    uint64_t alloc_bytes;
    epx_device_alloc_fn device_alloc; /* epx_group_config's */
    epx_device_free_fn device_free;
    void *device_context;
    uint64_t ht_buffer_bytes; /* 0 = the default for so many nodes */
    uint64_t ht_node_bytes;   /* 0 = the default */
};

struct heap_plan {
    uint64_t signals;
    struct ll_layout ll;
    struct ht_layout ht;
    uint64_t alloc; /* where the part for epx_alloc begins */
    uint64_t total;
    uint64_t control_bytes, ll_bytes, ht_bytes;
    uint64_t ll_receive_bytes, ht_receive_bytes;
    uint64_t net_bytes; /* of memory for the network alone; 0: the network reads and writes the heap (group/heap.c) */
    uint64_t row_put, table_put; /* the largest puts between nodes; 0 on one */
};

void settings_nodes(struct settings *set, const struct node_map *map);
void heap_plan_make(const struct settings *set, struct heap_plan *plan);
/* EPX_OK if a command can address everything that is sent between nodes. */
epx_status heap_plan_check(const struct settings *set, const struct heap_plan *plan);

#endif
