/* SPDX-License-Identifier: Apache-2.0 */
/* A rank of a random program (random.c): its tensors and calls (random_calls.c), and what is checked
 * (random_checks.c). */
#ifndef EPX_TESTS_NCCL_EP_RANDOM_H
#define EPX_TESTS_NCCL_EP_RANDOM_H

#include <cuda_runtime.h>
#include <nccl.h>

#include "model.h"

enum { FILL = 0x5a }; /* in what has not been written */

/* Tensors have a guard behind them. */
struct tensor {
    ncclEpTensor_t t;
    size_t sizes[3], bytes;
    unsigned char *data;
    int in_window;
};

struct run {
    struct plan plan;
    int rank;
    ncclComm_t comm;
    cudaStream_t stream;
    ncclEpGroup_t group;
    ncclEpHandle_t handle, twin;
    unsigned char *handle_mem, *copied_mem;
    size_t handle_bytes;
    struct inputs in;
    struct received *received; /* of all ranks */
    cudaGraphExec_t graph;
    struct tensor idx, tokens, weights, scales;
    struct tensor out, out_scales, out_weights, out_idx;
    struct tensor counts, offsets, total, rank_counts;
    struct tensor back, back_weights;
};

/* Prints where and what; the plan too, the first time. Returns -1. */
int wrong(const struct run *run, const char *file, int line, const char *what);
#define CHECK(condition)                                       \
    do {                                                       \
        if (!(condition))                                      \
            return wrong(run, __FILE__, __LINE__, #condition); \
    } while (0)
#define TRY(call) CHECK((int)(call) == 0)

int open_tensors(struct run *run);
int close_tensors(struct run *run); /* nobody has written behind them */
int receive_rows(const struct run *run);
int put_inputs(struct run *run);
int update(struct run *run);
int dispatch(struct run *run, int backward);
int combine(struct run *run, int backward);
/* A cudaHostFn_t: what experts make of the rows that are there; arg is the run. */
void run_experts(void *arg);
int check_high(struct run *run, int backward);
int check_dispatch(struct run *run, int backward);
int check_combine(struct run *run, int backward);
/* Of a backward pass. */
int check_back_weights(struct run *run);

#endif
