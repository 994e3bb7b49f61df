/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What epx.h promises, the plain way: loops over ranks, tokens and k. It shares nothing with the library, nor with the
 * oracle of the other tests but the conversion of single numbers.
 */
#ifndef EPX_TESTS_RANDOM_MODEL_H
#define EPX_TESTS_RANDOM_MODEL_H

#include "plan.h"

/* The routing of all ranks. */
struct routing {
    const struct plan *p;
    const struct handle_plan *h;
    int tokens[MOST_RANKS];
    int32_t *asked;        /* [R][MOST_TOKENS][K]: what ranks give */
    int32_t *idx;          /* the same without entries of ranks that are masked */
    int32_t *left;         /* the same without entries whose rows are dropped */
    int drop[MOST_RANKS];  /* drop_rows of each rank; 0 = none */
    int given[MOST_RANKS]; /* by this update; 0 = those of the handle */
};

/* active: by rank; a masked one has no tokens, and no expert. */
int routing_draw(struct routing *r, const struct plan *p, const struct handle_plan *h, uint64_t seed,
                 const int *active);
void routing_free(struct routing *r);
const int32_t *routing_idx(const struct routing *r, int rank, int token);
const int32_t *routing_left(const struct routing *r, int rank, int token);
/* drop_rows of a rank's handle. */
int model_drop(const struct plan *p, const struct handle_plan *h, int rank);

struct place {
    int64_t row;
    int src, token, l, k; /* l, k: EXPERT_MAJOR; else -1 */
};

/* What one rank receives. */
struct received {
    int n;
    struct place *place;
    int64_t rows;  /* of its tensors, at least; high throughput: with padding, without what is dropped */
    int64_t total; /* with padding and what is dropped */
    int64_t counts[MOST_LOCAL], exact[MOST_LOCAL], offsets[MOST_LOCAL];
    int64_t from[MOST_RANKS], range[MOST_LOCAL * MOST_RANKS];
};

int received_make(struct received *v, const struct routing *r, int rank);
void received_free(struct received *v);
/* Does a token come to a rank? FLAT: and stays. EXPERT_MAJOR counts those that are dropped too. */
int goes_to(const struct routing *r, int rank, int token, int to);

uint64_t key(uint64_t seed, int what, int a, int b, int c, int d);
void model_fill(void *row, const struct format *f, int dtype, int n, uint64_t k);
/* Rows that are sent, rows that experts return, their weights. */
void model_token(const struct step *s, int rank, int token, void *row);
void model_scales(const struct step *s, int rank, int token, void *row);
float model_weight(const struct step *s, int rank, int token, int k);
void model_result(const struct step *s, int owner, int expert, int src, int token, int k, void *row);
float model_back_weight(const struct step *s, int src, int token, int k);
void model_bias(const struct step *s, int which, int rank, int token, void *row);
int model_skips(const struct step *s, int rank, int token, int k);

size_t dtype_bytes(int dtype);
float load_value(int dtype, const void *at);
void store_value(int dtype, float value, void *at);
void model_cast(const struct format *f, const void *row, uint8_t *codes, void *scales);
/* Local ids (or global ones) and weights of a row of FLAT or RANK_MAJOR. */
void model_topk(const struct routing *r, const struct step *s, int rank, const struct place *at, int32_t *ids,
                float *weights);
/* docs/formats.md, "NVFP4": H / 2 bytes of codes, H / 16 of scales. */
void model_nvfp4(const uint16_t *row, int H, float row_scale, uint8_t *codes, uint8_t *scales);
float model_e2m1(int code);
/* What a caller computes for a row: 2688 / max|row|, 0 for a row of zeros. */
float model_row_scale(const uint16_t *row, int H);
/* What a rank multiplies rows with in an NVFP4 dispatch; 0: it does not say. */
float model_global_scale(const struct step *s, int rank);
/* How far each value of a row that travels as LogFMT-10 may be off (docs/formats.md). */
void model_logfmt(const uint16_t *row, int H, float *off);
/* The row that combine returns, in the dtype of rows; bound: how far each element may be off. */
void model_combine(const struct routing *r, const struct step *s, int rank, int token, void *row, float *bound);

#endif
