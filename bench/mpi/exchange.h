/* SPDX-License-Identifier: Apache-2.0 */
/* Ways to move the rows of a flow with MPI. Which is fastest depends on shape and machine, so the benchmark tries
 * all. */
#ifndef EPX_MPI_EXCHANGE_H
#define EPX_MPI_EXCHANGE_H

#include <mpi.h>
#include <stddef.h>

#include "plan.h"

enum way {
    WAY_ALLTOALLV, /* pack what is scattered, one MPI_Alltoallv */
    WAY_ISEND,     /* receives posted first; pack for one destination, send, pack for the next */
    WAY_TYPES      /* MPI_Isend and MPI_Irecv with derived datatypes instead of packing */
};

struct exchange {
    int ranks, rank;
    void *pack; /* room for packed rows */
    MPI_Request *requests;
};

/* Where received rows go: in the order of the side, each rank's at its `disp` (PACKED), at its `start` (a contiguous
 * side), or to the rows that the side names (needs WAY_TYPES). */
enum placement { PLACE_PACKED, PLACE_START, PLACE_ROWS };

/* 0 or -1. pack_bytes: most bytes that one call sends. */
int exchange_open(struct exchange *x, int ranks, int rank, size_t pack_bytes);

/* Sends the rows of `out` (a tensor with rows of row_bytes at `from`) and receives those of `in` to `to`. */
void exchange_rows(struct exchange *x, enum way way, struct side *out, const void *from, struct side *in, void *to,
                   enum placement placement, int row_bytes);

#endif
