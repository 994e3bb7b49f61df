/* SPDX-License-Identifier: Apache-2.0 */
/*
 * epx-ep-bench: NVIDIA's ep_bench for NCCL EP, as a program for nccl_ep.h: the same options, the same timing, the same
 * byte formulae, so that lines can be compared. `epx ep-bench` starts its ranks.
 *
 *      options.c   the command line
 *      world.c     ranks, communicator, what MPI does there: barriers and reductions
 *      data.c      routing, tokens and weights, drawn from seeds: every rank can make those of every other
 *      bench.c     tensors, group, handle, the timed loop
 *      validate.c  what dispatch and combine must have brought
 *      masks.c     --mask-test
 *      report.c    the lines
 */
#ifndef EPX_BENCH_EP_BENCH_H
#define EPX_BENCH_EP_BENCH_H

#include <cuda_runtime.h>
#include <nccl_ep.h>
#include <stdint.h>

enum { EXIT_GOOD = 0, EXIT_BAD = 1, EXIT_INVALID = 2 };

enum dtype { BF16, FP16, FP32, E4M3, E5M2, FP4X2, U8, DTYPES };

struct options {
    int32_t algorithm; /* ncclEpAlgorithm_t */
    int32_t layout;    /* ncclEpLayout_t; UNSET: the algorithm's first */
    int32_t tokens, hidden, topk, experts, warmup, iters;
    int32_t validate, dispatch_only, non_uniform, alignment, zcopy, max_sms, mask_test;
    int32_t dispatch_quant, combine_quant, mxfp8, forward_token, forward_scale; /* enum dtype */
    int32_t id_kind, datatype, idx32, keep_all, em_mode, shuffle_sms, preprocess_sms, dynamic;
};

/* EXIT_GOOD, EXIT_BAD, or -1: only help was asked for. */
int options_read(struct options *o, int argc, char **argv);

/* ---- world.c ----------------------------------------------------------------------------------------------------- */

struct world {
    int rank, nranks, lsa_ranks;
    ncclComm_t comm;
    cudaStream_t stream;
};
extern struct world world;

/* Prints the call and what its library says; ends the process with EXIT_BAD. */
void failed(const char *call, int result, const char *why) __attribute__((noreturn));
#define NCCL(call)                                              \
    do {                                                        \
        ncclResult_t result_ = (call);                          \
        if (result_ != ncclSuccess)                             \
            failed(#call, (int)result_, ncclEpxGetLastError()); \
    } while (0)
#define CUDA(call)                                                    \
    do {                                                              \
        cudaError_t result_ = (call);                                 \
        if (result_ != cudaSuccess)                                   \
            failed(#call, (int)result_, cudaGetErrorString(result_)); \
    } while (0)

void world_open(void);
void world_close(void);
void world_barrier(void);
/* Every rank's number, in rank order. */
void world_gather(double mine, double *all);

/* ---- data.c ------------------------------------------------------------------------------------------------------ */

struct shape { /* of one run, the same on all ranks */
    const struct options *o;
    int R, L, M, K, E, H; /* as in docs/nccl_ep.md */
    int64_t T;
    enum dtype token, scale; /* of what dispatch is given */
    int S;                   /* elements of a row of scales; 0: none */
    size_t token_bytes, scale_bytes, payload, combine_payload, plain_bytes;
};

struct routing {
    int tokens;
    int64_t *idx; /* [M][K] */
    float *weights;
};

size_t dtype_size(enum dtype dtype);
ncclDataType_t dtype_nccl(enum dtype dtype);
/* 0, or EXIT_BAD after a message. */
int shape_make(struct shape *s, const struct options *o);
struct routing routing_make(const struct shape *s, int rank);
void routing_free(struct routing *r);
/* One row as a rank sends it: tokens, or with scales-forward both as bytes. `row` has token_bytes. */
void token_row(const struct shape *s, int rank, int token, unsigned char *row);
void scale_row(const struct shape *s, int rank, int token, unsigned char *row);
void store_float(enum dtype dtype, unsigned char *at, float value);
float load_float(enum dtype dtype, const unsigned char *at);
/* The k-th expert of a token is on which rank; -1 = dropped. */
int expert_rank(const struct shape *s, int64_t expert);

/* (token, destination rank) pairs, those to another LSA team, and valid (token, k). */
struct traffic {
    double pairs, remote, valid;
};
struct traffic traffic_sent(const struct shape *s, const struct routing *r, int rank);
struct traffic traffic_received(const struct shape *s, int rank);

/* ---- bench.c ----------------------------------------------------------------------------------------------------- */

struct buffer { /* device memory and its descriptor */
    ncclEpTensor_t *tensor;
    void *memory;
    size_t bytes;
    ncclWindow_t window;
};

struct bench {
    struct shape shape;
    struct routing mine;
    ncclEpGroup_t group;
    ncclEpHandle_t handle;
    struct buffer idx, tokens, scales, weights;
    struct buffer received, received_scales, received_weights, received_idx, counters, total, offsets;
    struct buffer combine_scales, out;
    double group_ms, handle_ms;
    size_t memory_before, memory_group, memory_handle, memory_end;
};

void bench_open(struct bench *b, const struct options *o, int enable_mask, int timeout_ms);
void bench_close(struct bench *b);
void bench_dispatch(struct bench *b);
void bench_combine(struct bench *b);
/* NVFP4: the caller's scales of the rows that were received. */
void bench_set_combine_scales(struct bench *b);
void *buffer_to_host(const struct buffer *b);

struct times { /* microseconds of this rank, over the iterations that count */
    double dispatch, combine, total;
};
struct times bench_time(struct bench *b);

/* ---- validate.c, masks.c, report.c: EXIT_GOOD or EXIT_INVALID ---------------------------------------------------- */

int validate(struct bench *b);
int mask_test(const struct options *o);
void report(const struct bench *b, const struct times *mine);

#endif
