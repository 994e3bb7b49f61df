/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who sends which rows to whom, and where they end up: worked out by every rank for itself from the routing of all.
 *
 *      a COPY is one row per (token, destination rank); a PAIR is one row per (token, expert)
 *
 *      sender's order          (destination, token)            (destination, expert, token)
 *      receiver's order        (source, token)                 (source, expert, token)
 *
 * The order in which a rank sends copies (pairs) in dispatch is the order in which it gets them back in combine.
 */
#ifndef EPX_MPI_PLAN_H
#define EPX_MPI_PLAN_H

#include <mpi.h>
#include <stdint.h>

#include "tests/lib/bench_config.h"

/* One side of a flow: rows for or from each rank. */
struct side {
    int *count; /* [R] rows */
    int *disp;  /* [R] first of them in order */
    int *row;   /* [total] which row of the tensor each is */
    int total;
    int contiguous; /* rows of one rank follow each other in the tensor, from `start` */
    int *start;     /* [R] */
    /* Derived datatypes of the scattered rows, one per rank, made when first used; typed = row bytes, 0 = none yet. */
    MPI_Datatype *type;
    int typed;
};

struct flow {
    struct side out; /* in dispatch: tokens of this rank */
    struct side in;  /* in dispatch: rows of the tokens tensor */
};

struct plan {
    const struct bench_config *config;
    int rank, local_experts;
    struct flow copies, pairs;
    int *expand_first; /* [copies.in.total + 1]: copy j goes to rows expand[first[j]] .. of the tokens tensor */
    int *expand;
    int *sum_slot; /* [B][K]: which returned rows make up a token, in the order of the sum; -1 after the last */
    int *sum_k;    /* [B][K]: the top-k entry that each of them answers (pairs) */
    int *expert_counts, *expert_offsets; /* [L], padded, as the layout says */
    int *expert_rows;                    /* [L], not padded */
    int *zone;                           /* scratch [L] */
};

/* 0, or -1 without memory. */
int plan_open(struct plan *plan, const struct bench_config *config, int rank);
/* From the routing of all ranks, idx[R][B][K]. */
void plan_build(struct plan *plan, const int32_t *idx);
/* Forgets the datatypes of the last routing. */
void plan_drop_types(struct plan *plan);

#endif
