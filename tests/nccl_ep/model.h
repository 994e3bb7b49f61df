/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What NCCL EP delivers, worked out the plain way: loops over ranks, tokens and k, one line for each rule of
 * docs/nccl_rules.md. It shares nothing with the library, nor with the oracle of the other tests. All ranks draw a
 * whole plan, and the inputs of all ranks, from one seed.
 */
#ifndef EPX_TESTS_NCCL_EP_MODEL_H
#define EPX_TESTS_NCCL_EP_MODEL_H

#include <nccl_ep.h>

enum room { ENOUGH, DROPS, EAGER }; /* high throughput: max_recv_tokens_per_rank */

struct plan {
    uint64_t seed;
    int R, per_node;
    int low, layout;
    int L, K, M, H; /* H: elements of a row of tokens */
    ncclDataType_t type, scale_type;
    int scales; /* FWD: of a row */
    ncclEpDispQuant_t recipe;
    int round_scales, index32, counter64, alignment, global_ids;
    enum room room;
    int T;
    ncclEpZeroCopyMode_t zero_copy;
    int windows;
    /* How it is run. */
    int rounds, staged, graph, twin, backward;
    int default_stream;
    int tight;  /* combine gets no more rows than have come */
    int masked; /* the rank that sits one round out; -1: none */
};

/* A plan for so many ranks. */
struct plan plan_draw(uint64_t seed, int R, int per_node);
void plan_print(const struct plan *p);

/* One round's inputs of all ranks. Token t of rank r is number r * M + t. */
struct inputs {
    const struct plan *p;
    int masked;    /* of this round */
    int *tokens;   /* [R] */
    int *idx;      /* [R * M * K] */
    float *weight; /* the same */
    unsigned char *rows, *scales;
};

int inputs_draw(struct inputs *in, const struct plan *p, int round);
void inputs_free(struct inputs *in);
size_t row_bytes(const struct plan *p);   /* of tokens that are sent */
size_t scale_bytes(const struct plan *p); /* of scales that are sent */
size_t type_bytes(ncclDataType_t type);

float load_value(ncclDataType_t type, const void *at);
void store_value(ncclDataType_t type, float value, void *at); /* to nearest even */
/* What an expert makes of one value. */
float expert_value(int expert, float x);

/* Where rows go, of one receiving rank. */
struct received {
    int total;             /* rows before anything is dropped; EXPERT_MAJOR: with padding */
    int *counts, *offsets; /* [L], as the counters say them */
    int rows;              /* of the list */
    int *token;            /* [rows]: r * M + t, or -1: zeros */
    int *expert;           /* [rows]: EXPERT_MAJOR */
    int *row_of;           /* [R * M * L] EXPERT_MAJOR, [R * M] FLAT: the row of a token, or -1 */
};

/* High throughput. */
int received_make(struct received *v, const struct inputs *in, int rank);
void received_free(struct received *v);

/* Is rank `rank` one of those that the token goes to? */
int goes_to(const struct inputs *in, int token, int rank);
/* The cast of DS_FP8E3M4: H codes and H / 128 scales. */
void model_cast(const struct plan *p, const unsigned char *row, unsigned char *codes, float *scales);
/* The row that a rank returns for a token where the caller reduces: RANK_MAJOR (k ascending), FLAT (ids ascending). */
void model_reduce(const struct inputs *in, int token, int rank, float *out);
/* The row that combine brings for a token, as values. v: of all ranks, high throughput. backward: no weights. */
void model_combine(const struct inputs *in, const struct received *v, int token, int backward, float *out);

#endif
