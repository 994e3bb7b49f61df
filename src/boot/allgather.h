/* SPDX-License-Identifier: Apache-2.0 */
/* The all-gather: up over the connections of all ranks to rank 0 (wire.h), down through the tree (tree.h). */
#ifndef EPX_BOOT_ALLGATHER_H
#define EPX_BOOT_ALLGATHER_H

#include "boot/rendezvous.h"
#include "boot/tree.h"

struct gather {
    int rank, nranks;
    int timeout_ms;
    uint64_t sequence;
    uint32_t group;
    const void *send;
    void *recv;
    size_t bytes;
    struct tree *tree; /* NULL = all results come from rank 0 */
};

struct wire_frame gather_frame(const struct gather *gather, enum wire_op op, uint64_t bytes);
/* What rank 0 thinks of the frame with which `rank` begins. */
epx_status gather_check_frame(const struct gather *gather, int rank, const struct wire_frame *frame);
/* On failure all ranks have got the error and the connections are closed: they cannot be used again. */
epx_status allgather_root(const struct gather *gather, struct channel *channels);
epx_status allgather_client(const struct gather *gather, struct channel *channel);

#endif
