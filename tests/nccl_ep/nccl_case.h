/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Work for tests of nccl_ep.h, as a user's program would do it: memory of cudaMalloc, copies, streams; what comes out
 * is copied to the host and compared with the oracle. A nccl_case is a handle with the tensors of its layout.
 */
#ifndef EPX_TESTS_NCCL_EP_NCCL_CASE_H
#define EPX_TESTS_NCCL_EP_NCCL_CASE_H

#include <cuda_runtime.h>
#include <nccl.h>
#include <nccl_ep.h>

#include "nccl_calls.h"
#include "tests/lib/oracle.h"

/* The process's rank and communicator. */
struct world {
    int rank, nranks;
    int ranks_per_node; /* 0: one node */
    ncclComm_t comm;
    cudaStream_t stream, other;
};
extern struct world world;

/* Prints rank, file, line and the library's message unless `got` is `expected`; then returns non-zero. */
int wrong_result(const char *file, int line, const char *call, int got, int expected);
/* A short deadline, EPX_TEST_SLOW times as long: the same on all ranks. A rank without a core is not a missing one. */
int deadline_ms(int ms);
/* Both return -1 from the calling function. */
#define TRY(call)                                                    \
    do {                                                             \
        if (wrong_result(__FILE__, __LINE__, #call, (int)(call), 0)) \
            return -1;                                               \
    } while (0)
#define EXPECT(result, call)                                                     \
    do {                                                                         \
        if (wrong_result(__FILE__, __LINE__, #call, (int)(call), (int)(result))) \
            return -1;                                                           \
    } while (0)
/* A condition of a test. */
#define CHECK(condition)                                                   \
    do {                                                                   \
        if (wrong_result(__FILE__, __LINE__, #condition, !(condition), 0)) \
            return -1;                                                     \
    } while (0)

/* `c` is `good` with one change, and creating a group of it fails. */
#define BAD_GROUP(result, change)                                  \
    do {                                                           \
        c = good;                                                  \
        change;                                                    \
        EXPECT(result, ncclEpCreateGroup(&group, world.comm, &c)); \
    } while (0)

enum memory { PLAIN, WINDOW, SHARED }; /* of cudaMalloc; a window into memory of ncclMemAlloc; of ncclEpxMemAlloc */

/* A tensor on the device and its shadow on the host. */
struct tensor_pair {
    ncclEpTensor_t *tensor;
    epx_tensor view; /* of the shadow */
    size_t bytes;
    void *device; /* what is freed */
    char *data;   /* where the tensor begins */
    enum memory memory;
    ncclEpGroup_t group;
};
int tensor_pair_open(struct tensor_pair *pair, ncclEpGroup_t group, enum memory memory, epx_dtype dtype, int ndim,
                     int64_t d0, int64_t d1, int64_t d2);
int tensor_pair_put(struct tensor_pair *pair);            /* host to device, on the world's stream */
int tensor_pair_get(struct tensor_pair *pair);            /* device to host, and wait */
int tensor_pair_fill(struct tensor_pair *pair, int byte); /* both */
int tensor_pair_close(struct tensor_pair *pair);

enum { POISON = 0x5a };

#define LL NCCL_EP_ALGO_LOW_LATENCY
#define HT NCCL_EP_ALGO_HIGH_THROUGHPUT
#define EXPERT_MAJOR NCCL_EP_LAYOUT_EXPERT_MAJOR
#define RANK_MAJOR NCCL_EP_LAYOUT_RANK_MAJOR
#define FLAT NCCL_EP_LAYOUT_FLAT

/* Tables of specs give the fields up to `experts` by position, the others by name. */
struct spec {
    const char *name;
    ncclEpAlgorithm_t algorithm;
    ncclEpLayout_t layout;
    epx_dtype dtype, received; /* of tokens; BF16 to FP8_E4M3 is a cast */
    epx_dtype counter;
    int alignment, topk, hidden, tokens, experts;
    epx_dtype scale; /* fp8: FP32 */
    int index32, round_scales, global_ids;
    int even;      /* every rank has as many tokens as it may */
    int rows;      /* high throughput: of receive tensors; 0: the worst case */
    int rows_open; /* the group does not say how many */
    enum memory memory;
};

struct nccl_case {
    const struct spec *spec;
    struct workload work;
    struct oracle_route route;
    struct oracle_recv recv;
    struct oracle_data data;
    int routed;
    ncclEpGroup_t group;
    ncclEpHandle_t handle;
    struct tensor_pair idx, tokens, scales, weights;                              /* of this rank */
    struct tensor_pair received, received_scales, received_weights, received_idx; /* of dispatch */
    struct tensor_pair expert_counters, rank_counters, offsets, total;
    struct tensor_pair results, result_weights, combined, combined_weights; /* of combine */
};

void nccl_calls_init(struct nccl_calls *c, struct nccl_case *nc, int backward);

int64_t most_rows(const struct spec *spec); /* of high throughput's receive tensors */
/* A group fit for the spec. `timeout_ms` 0: the default. */
int group_open(ncclEpGroup_t *group, const struct spec *spec, int enable_mask, int timeout_ms);
int nccl_case_open(struct nccl_case *nc, ncclEpGroup_t group, const struct spec *spec);
int nccl_case_close(struct nccl_case *nc);
/* The same with a group that has this case only. */
int nccl_case_open_alone(struct nccl_case *nc, const struct spec *spec);
int nccl_case_close_alone(struct nccl_case *nc);
/* A new routing, drawn from the seed; high throughput's counts are checked. */
int nccl_case_route(struct nccl_case *nc, uint64_t seed);
/* active[r] 0: the oracle knows that rank r takes no part. NULL: all do. */
int nccl_case_expect_active(struct nccl_case *nc, const int *active);
/* Other numbers for the same routing. The halves of a staged operation are `send` and `complete`. */
int nccl_case_dispatch(struct nccl_case *nc, uint64_t round, int backward, int send_only);
int nccl_case_check_dispatch(struct nccl_case *nc, int backward);
int nccl_case_combine(struct nccl_case *nc, int backward, int send_only);
int nccl_case_check_combine(struct nccl_case *nc, int backward);
/* All of it in one go. */
int nccl_case_round(struct nccl_case *nc, uint64_t round, int backward);

int test_layouts(void);
int test_misuse(void);
int test_masks(void);
int test_standin(void);
int test_runtime(void);

#endif
