/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How results of all-gathers get from rank 0 to all ranks: through relays, so that what rank 0 seals and sends grows
 * with the root of the number of ranks and not with it. Ranks are in blocks of `block`:
 *
 *     rank 0 --+--> 1, 2, .. block - 1              its own block
 *              +--> block ----> block + 1, ..       a relay and its children
 *              +--> 2 block --> 2 block + 1, ..
 *
 * Every rank keeps its connection to rank 0 (wire.h). What a rank gives still goes up there, and so rank 0 sees who
 * comes, who does not and who ends, and its errors reach all ranks at once; only results come down through the tree. It
 * is made after START:
 *
 *      child                          relay                                    rank 0
 *        |                              | listens                                |
 *        |                              | -- PORT (its address) ---------------> | waits for all relays
 *        | <------------------------------- PARENT (rank and address of the relay)|
 *        | -- both prove that they know the secret, hello --> |                   |
 *        | <------------------- WELCOME |                                         |
 *        | -- READY (1: it has its relay; 0: rank 0 sends to it) --------------> | waits for all children
 *        |                              | <---------------------------------- GO |
 *
 * A child that cannot reach its relay (another network, a firewall) says so and gets results from rank 0.
 */
#ifndef EPX_BOOT_TREE_H
#define EPX_BOOT_TREE_H

#include "boot/rendezvous.h"

enum {
    TREE_MIN_RANKS = 64, /* fewer ranks have no tree unless the user asks for one */
    TREE_CONNECT_MS = 2000,
    TREE_REPLY_MS = 10000 /* for a relay, which may be one of many processes of a core */
};

struct tree {
    int block;             /* 0 = every rank gets results from rank 0 */
    unsigned char *served; /* rank 0: [nranks]: it has a relay */
    struct channel parent; /* a child's relay; closed = rank 0 */
    int parent_rank;
    struct channel *children; /* a relay's: [count]; closed = lost */
    int *child_ranks;
    int count;
};

#define TREE_NONE ((struct tree){.parent = CHANNEL_CLOSED})

/* Ranks in a block, from EPX_BOOT_BLOCK or the number of ranks; 0 = no tree. */
int tree_block(int nranks);
/* The rank from which `rank` gets results: 0, or its relay. */
int tree_parent(int block, int rank);
/* Collective, right after the rendezvous. On failure of rank 0 all ranks have its error and `channels` are closed. */
epx_status tree_open_root(const struct rendezvous_config *config, int block, struct channel *channels,
                          struct tree *tree);
epx_status tree_open_client(const struct rendezvous_config *config, int block, struct channel *channel,
                            struct tree *tree);
void tree_close(struct tree *tree);

#endif
