/* SPDX-License-Identifier: Apache-2.0 */
#include "exchange.h"

#include <stdlib.h>
#include <string.h>

int exchange_open(struct exchange *x, int ranks, int rank, size_t pack_bytes)
{
    x->ranks = ranks;
    x->rank = rank;
    x->pack = malloc(pack_bytes);
    x->requests = malloc(2 * (size_t)ranks * sizeof(*x->requests));
    return x->pack != NULL && x->requests != NULL ? 0 : -1;
}

static void *row_at(const void *base, int64_t row, int row_bytes)
{
    return (char *)base + row * row_bytes;
}

/* Rows of one rank, gathered to `to`. */
static void gather(const struct side *side, int rank, const void *from, void *to, int row_bytes)
{
    const int *row = side->row + side->disp[rank];
    int j;

    for (j = 0; j < side->count[rank]; j++)
        memcpy(row_at(to, j, row_bytes), row_at(from, row[j], row_bytes), (size_t)row_bytes);
}

static const int *row_places(const struct side *in, enum placement placement)
{
    return placement == PLACE_START ? in->start : in->disp;
}

static void by_alltoallv(struct exchange *x, struct side *out, const void *from, struct side *in, void *to,
                         enum placement placement, int row_bytes)
{
    MPI_Datatype type;
    int r;

    MPI_Type_contiguous(row_bytes, MPI_BYTE, &type);
    MPI_Type_commit(&type);
    for (r = 0; !out->contiguous && r < x->ranks; r++)
        gather(out, r, from, row_at(x->pack, out->disp[r], row_bytes), row_bytes);
    MPI_Alltoallv(out->contiguous ? from : x->pack, out->count, out->contiguous ? out->start : out->disp, type, to,
                  in->count, row_places(in, placement), type, MPI_COMM_WORLD);
    MPI_Type_free(&type);
}

/* What a rank keeps needs no message. */
static void keep_own(struct exchange *x, const struct side *out, const void *from, const struct side *in, void *to,
                     enum placement placement, int row_bytes)
{
    int me = x->rank, j;

    for (j = 0; j < out->count[me]; j++) {
        int source = out->contiguous ? out->start[me] + j : out->row[out->disp[me] + j];
        int place = placement == PLACE_ROWS ? in->row[in->disp[me] + j] : row_places(in, placement)[me] + j;

        memcpy(row_at(to, place, row_bytes), row_at(from, source, row_bytes), (size_t)row_bytes);
    }
}

/* One datatype per rank that names its scattered rows. */
static void make_types(struct side *side, int ranks, int row_bytes)
{
    MPI_Datatype row;
    int r;

    if (side->typed == row_bytes)
        return;
    for (r = 0; side->typed && r < ranks; r++)
        MPI_Type_free(&side->type[r]);
    MPI_Type_contiguous(row_bytes, MPI_BYTE, &row);
    for (r = 0; r < ranks; r++) {
        MPI_Type_create_indexed_block(side->count[r], 1, side->row + side->disp[r], row, &side->type[r]);
        MPI_Type_commit(&side->type[r]);
    }
    MPI_Type_free(&row);
    side->typed = row_bytes;
}

static void receive_one(struct exchange *x, struct side *in, int peer, void *to, enum placement placement,
                        int row_bytes, MPI_Datatype row, MPI_Request *request)
{
    if (placement == PLACE_ROWS) {
        make_types(in, x->ranks, row_bytes);
        MPI_Irecv(to, 1, in->type[peer], peer, 0, MPI_COMM_WORLD, request);
        return;
    }
    MPI_Irecv(row_at(to, row_places(in, placement)[peer], row_bytes), in->count[peer], row, peer, 0, MPI_COMM_WORLD,
              request);
}

static void send_one(struct exchange *x, struct side *out, int peer, const void *from, int types, int row_bytes,
                     MPI_Datatype row, MPI_Request *request)
{
    void *packed = row_at(x->pack, out->disp[peer], row_bytes);

    if (out->contiguous) {
        MPI_Isend(row_at(from, out->start[peer], row_bytes), out->count[peer], row, peer, 0, MPI_COMM_WORLD, request);
    } else if (types) {
        make_types(out, x->ranks, row_bytes);
        MPI_Isend(from, 1, out->type[peer], peer, 0, MPI_COMM_WORLD, request);
    } else {
        gather(out, peer, from, packed, row_bytes);
        MPI_Isend(packed, out->count[peer], row, peer, 0, MPI_COMM_WORLD, request);
    }
}

/* Everyone starts with its neighbour, so that no rank is asked by all at once. Both sides know the counts: empty
 * messages are not sent. */
static void by_messages(struct exchange *x, int types, struct side *out, const void *from, struct side *in, void *to,
                        enum placement placement, int row_bytes)
{
    MPI_Datatype row;
    int i, peer, n = 0;

    MPI_Type_contiguous(row_bytes, MPI_BYTE, &row);
    MPI_Type_commit(&row);
    for (i = 1; i < x->ranks; i++) {
        peer = (x->rank + x->ranks - i) % x->ranks;
        if (in->count[peer] > 0)
            receive_one(x, in, peer, to, placement, row_bytes, row, &x->requests[n++]);
    }
    for (i = 1; i < x->ranks; i++) {
        peer = (x->rank + i) % x->ranks;
        if (out->count[peer] > 0)
            send_one(x, out, peer, from, types, row_bytes, row, &x->requests[n++]);
    }
    keep_own(x, out, from, in, to, placement, row_bytes);
    MPI_Waitall(n, x->requests, MPI_STATUSES_IGNORE);
    MPI_Type_free(&row);
}

void exchange_rows(struct exchange *x, enum way way, struct side *out, const void *from, struct side *in, void *to,
                   enum placement placement, int row_bytes)
{
    if (way == WAY_ALLTOALLV)
        by_alltoallv(x, out, from, in, to, placement, row_bytes);
    else
        by_messages(x, way == WAY_TYPES, out, from, in, to, placement, row_bytes);
}
