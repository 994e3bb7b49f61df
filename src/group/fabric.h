/* SPDX-License-Identifier: Apache-2.0 */
/*
 * GPUs of several hosts as one node (epx_group_config.use_fabric): their heaps are exported by fabric handles.
 *
 *   1. offer    with the settings each rank sends two identities: that of its host, and that of its fabric, or why it
 *               has none
 *   2. choose   all ranks offer one, and two of them on different hosts have the same: nodes are ranks of one fabric.
 *               Otherwise nodes are ranks of one host, as without use_fabric; rank 0 logs the reason
 *   3. try      every rank makes a small heap, and reads that of a rank of its node on another host. If one cannot, all
 *               go back to nodes of one host
 *
 * Heaps then lie in GPU memory: signals, abort words and rows are in them, and the host reaches words of peers by
 * copies. What ranks of a node share in host memory is left out: the directory of regions (region.h), so that rows in
 * callers' own memory are copied. Heaps in host memory (EPX_GPU_HEAP=host, or masks between several nodes whose network
 * does not reach GPU memory) cannot be mapped by other hosts: nodes are ranks of one host then.
 */
#ifndef EPX_GROUP_FABRIC_H
#define EPX_GROUP_FABRIC_H

#include "group/objects.h"

struct fabric_offer {
    uint8_t host[64];   /* equal where ranks can map each other's memory by any means */
    uint8_t fabric[64]; /* all zero: none */
    int64_t asked;      /* use_fabric */
    char why[128];      /* there is no fabric; cut where it is longer: 1024 ranks read it of each other */
};

/* What this rank offers. EPX_RANKS_PER_HOST lets ranks of one machine look like those of several. */
epx_status fabric_describe(struct epx_group *group, struct fabric_offer *offer);
/* Sets group->hosts, identities and fabric; the same on all ranks. `stride` bytes from one offer to the next. */
void fabric_choose(struct epx_group *group, const struct fabric_offer *first, size_t stride);
/* Collective, with group->fabric. Clears it if a rank cannot. */
epx_status fabric_try(struct epx_group *group, epx_status mine);
/* All ranks alike: back to nodes of one host. */
epx_status fabric_leave(struct epx_group *group);
/* Ranks of this rank's node that are on its host. */
int fabric_host_ranks(const struct epx_group *group);

#endif
