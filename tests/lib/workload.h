/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Made-up work: tokens, routing, weights and expert results that any rank can compute for any other, from a seed and
 * without talking. Every value is a hash of (seed, what, rank, token, ...); nothing is stored, so a whole rank's data
 * costs no more than writing it.
 *
 * Two seeds: `seed` decides token counts and routing; `round` changes only the numbers (tokens, weights, results), so
 * that several operations of one routing carry different data.
 */
#ifndef EPX_TESTS_LIB_WORKLOAD_H
#define EPX_TESTS_LIB_WORKLOAD_H

#include <stddef.h>
#include <stdint.h>

#include "epx/epx.h"

/* GROUPS: experts form groups of neighbours; a token draws some of the groups, then its experts from these alone. */
enum workload_routing { WORKLOAD_UNIFORM = 0, WORKLOAD_ZIPF = 1, WORKLOAD_HOT = 2, WORKLOAD_GROUPS = 3 };

/* MILD: magnitudes 2^-7 .. 2. SMALL: below 1, as LogFMT wants. EXTREME: zeros, subnormals and magnitudes that differ
 * from one block of 128 channels to the next, but no infinity or NaN, and no sum of 64 rows that overflows fp32. */
enum workload_values { WORKLOAD_MILD = 0, WORKLOAD_SMALL = 1, WORKLOAD_EXTREME = 2 };

struct workload {
    uint64_t seed;
    uint64_t round;
    int nranks;
    int experts;
    int topk;
    int hidden;      /* elements */
    int max_tokens;  /* per rank */
    int dtype;       /* epx_dtype of the tokens: bf16, fp16, fp32, fp8 e4m3 */
    int scale_dtype; /* fp8: EPX_FP32 or EPX_INT32 */
    int scale_count; /* fp8: scales per token */
    enum workload_routing routing;
    int hot_experts;         /* WORKLOAD_HOT: how many experts get everything; 0 = topk */
    int groups, topk_groups; /* WORKLOAD_GROUPS: how many there are and a token draws; 0 = 8 and 4 */
    int uneven;              /* 0: every rank has max_tokens; 1: 0 .. max_tokens, different on each rank */
    int duplicates;          /* 1: one token may name an expert more than once */
    int hole_percent;        /* how many of 100 entries are -1 */
    enum workload_values values;
};

/* ceil(experts / nranks) */
int workload_local_experts(const struct workload *w);

int workload_tokens(const struct workload *w, int rank);
/* idx[topk]: expert ids, distinct unless w->duplicates; -1 where dropped, or where there are too few experts. */
void workload_topk(const struct workload *w, int rank, int token, int32_t *idx);
/* weights[topk], each in (0, 1). */
void workload_weights(const struct workload *w, int rank, int token, float *weights);
/* One token: hidden elements of w->dtype. */
void workload_token(const struct workload *w, int rank, int token, void *row);
/* fp8 tokens: scale_count elements of scale_dtype. */
void workload_scales(const struct workload *w, int rank, int token, void *scales);

/*
 * What an expert (or, with expert = -1, the whole rank `owner`) makes of token `token` of `rank`: hidden elements of
 * `dtype`. `k` is the entry of the token's top-k that the row answers, -1 with expert = -1.
 */
void workload_result(const struct workload *w, int dtype, int owner, int expert, int rank, int token, int k, void *row);
/* The weight (a gradient, say) that goes back for entry k of that token. */
float workload_result_weight(const struct workload *w, int rank, int token, int k);
/* bias[which] of that token. */
void workload_bias(const struct workload *w, int dtype, int which, int rank, int token, void *row);

/* Fills `count` elements from a key: the generator under all of the above. */
void workload_fill(void *row, int dtype, int count, enum workload_values values, uint64_t key);
/* A well mixed 64-bit hash, for callers that draw their own configuration. */
uint64_t workload_hash(uint64_t a, uint64_t b);

/* "seed 7 ranks 4 experts 9 ..." for messages; returns buf. */
const char *workload_describe(const struct workload *w, char *buf, size_t bytes);

#endif
