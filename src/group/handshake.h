/* SPDX-License-Identifier: Apache-2.0 */
/* The collective steps of creation and recovery. `mine` is this rank's result so far: if any rank has failed, all
 * fail. */
#ifndef EPX_GROUP_HANDSHAKE_H
#define EPX_GROUP_HANDSHAKE_H

#include "group/objects.h"

/* Memory for what the steps receive, all of them: a rank that had none would leave the others waiting. Before the
 * first step of a creation; the group keeps what recoveries need of it. */
epx_status handshake_begin(struct epx_group *group);
void handshake_keep(struct epx_group *group);
void handshake_end(struct epx_group *group);
/* That memory, until the next step: HANDSHAKE_ROOM bytes of each rank at least. */
enum { HANDSHAKE_ROOM = 512 };
void *handshake_room(struct epx_group *group);

/* Also finds the nodes, and makes the group's key. */
epx_status handshake_compare(struct epx_group *group, epx_status mine);

/* From group->identities. */
void handshake_find_nodes(struct epx_group *group);

/* All that ranks tell each other once they have opened their own side: one round. */
struct heap_message;
struct exchange {
    void *own;        /* this rank's message */
    void *net;        /* what the network tells of this rank, `net_bytes` (net.h) */
    uint8_t *all_net; /* afterwards: of all ranks, one after the other */
    size_t net_bytes;
    struct conn_address address; /* with enable_mask: of the port where ranks find each other when some have ended */
    uint64_t token;
    struct heap_message *heaps;     /* afterwards: of all ranks */
    struct conn_address *addresses; /* the same */
    uint8_t *out;                   /* ranks that cannot be reached */
};
/* All that the exchange needs, before the nodes are known: a rank that has no memory says so in the step before. */
epx_status exchange_alloc(struct epx_group *group, struct exchange *exchange);
void exchange_free(struct exchange *exchange);
/* With enable_mask. */
epx_status handshake_open_membership(struct epx_group *group, struct exchange *exchange);
/* `mine`: how far this rank has come. All ranks fail if one does. */
epx_status handshake_exchange(struct epx_group *group, struct exchange *exchange, epx_status mine);
/* Maps the heaps of the node. This rank's part alone. */
epx_status handshake_map(struct epx_group *group, const struct exchange *exchange);
/* The last round: all have connected. With enable_mask it goes over the connections that ranks make when one has
 * failed, so that these are known to work. */
epx_status handshake_connected(struct epx_group *group, struct exchange *exchange, epx_status mine);
epx_status handshake_ready(struct epx_group *group, epx_status mine);
/* *flag is 1 afterwards if it was on any rank. */
epx_status handshake_any(struct epx_group *group, epx_status mine, int *flag);
/* An all-gather of all ranks; during recovery, of the remaining ranks: the others' parts are zero. */
epx_status handshake_allgather(struct epx_group *group, const void *send, void *recv, size_t bytes);
/* Maps the memory of ranks whose process has changed since (group->mapped), also in the tables of kernels. */
epx_status handshake_heaps_again(struct epx_group *group);
/* The group's key, from group->seed and the secret of the job. */
epx_status handshake_make_key(struct epx_group *group, const uint8_t *secret);
/* 32 bytes that only the ranks of this group know; NULL: nobody proves anything. */
const uint8_t *handshake_key(const struct epx_group *group);
/* How long this rank may take between two steps: its peers must still be waiting when it reports why it failed. */
int handshake_step_ms(const struct epx_group *group);

#endif
