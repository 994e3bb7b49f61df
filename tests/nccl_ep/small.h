/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A small case whose every number is written down in the test: token i of rank r has the value 4 * r + i + 1 in all its
 * columns. For rules that are about single rows; nccl_case.h is for those that the oracle knows.
 */
#ifndef EPX_TESTS_NCCL_EP_SMALL_H
#define EPX_TESTS_NCCL_EP_SMALL_H

#include "nccl_case.h"

enum { SMALL_TOKENS = 4, SMALL_HIDDEN = 16 };

struct small {
    ncclEpGroup_t group;
    ncclEpHandle_t handle;
    ncclEpAlgorithm_t algorithm;
    ncclEpLayout_t layout;
    int topk, experts, local;
    int64_t rows; /* of receive tensors, in high throughput */
    struct tensor_pair idx, tokens, weights;
    struct tensor_pair out, out_weights, out_idx;
    struct tensor_pair counts, offsets, total, rank_counts;
    struct tensor_pair back, back_weights, in_weights;
    struct nccl_calls calls; /* arguments of the next calls */
};

/* 2 experts on each rank, 4 tokens, 16 bfloat16. */
ncclEpGroupConfig_t small_config(ncclEpAlgorithm_t algorithm, unsigned int max_recv);
int small_open(struct small *s, const ncclEpGroupConfig_t *config, ncclEpLayout_t layout, int alignment, int topk,
               int64_t rows, enum memory memory);
int small_close(struct small *s);
/* The update, with all counters; ids[tokens * topk] of this rank. */
int small_route(struct small *s, const int *ids, int tokens);
/* Fills what will be written with `byte`, sends, waits, and fetches. */
int small_dispatch(struct small *s, int byte);
/* Sends back what is in `out`; `byte` is in `back` before. */
int small_combine(struct small *s, int byte);
/* Both, and every token of this rank comes back as it was. */
int small_there_and_back(struct small *s);
/* The value that row `row` of a bfloat16 tensor has in all its columns; -1: not the same in all. */
float small_row(const struct tensor_pair *pair, int64_t row);
int64_t small_count(const struct tensor_pair *pair, int64_t i);
/* Has row `row` this byte everywhere? */
int small_row_is(const struct tensor_pair *pair, int64_t row, int byte);
/* Token `token` of rank `rank`. */
float small_value(int rank, int token);
/* Anew, as small_open made them. */
void small_calls(struct small *s, int backward);

int test_rules(void);
int test_drop(void);
int test_recipes(void);
int test_eager(void);
int test_memory(void);
int test_nvfp4(void);
int test_elastic(void);
int test_pinned(void);
int test_counts(void);
int test_mxfp8(void);

#endif
