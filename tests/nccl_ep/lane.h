/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Work for tests of nccl_ep.h, as a user's program would do it: memory of cudaMalloc, copies, streams; what comes out is
 * copied to the host and compared with the oracle. A LANE is a handle with the tensors of its layout.
 */
#ifndef EPX_TESTS_NCCL_EP_LANE_H
#define EPX_TESTS_NCCL_EP_LANE_H

#include <cuda_runtime.h>
#include <nccl.h>
#include <nccl_ep.h>

#include "tests/lib/oracle.h"

/* The process's rank and communicator. */
struct world {
    int rank, nranks;
    int ranks_per_node; /* 0: one node */
    ncclComm_t comm;
    cudaStream_t stream, other;
};
extern struct world world;

/* Complains with rank, place and the library's sentence; non-zero unless it got what it expected. */
int wrong_result(const char *file, int line, const char *call, int got, int expected);
/* Both return -1 from the function they stand in. */
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

enum memory { PLAIN, WINDOW, SHARED }; /* of cudaMalloc; a window into memory of ncclMemAlloc; of ncclEpxMemAlloc */

/* A tensor on the device and its shadow on the host. */
struct side {
    ncclEpTensor_t *tensor;
    epx_tensor view; /* of the shadow */
    size_t bytes;
    void *device; /* what is freed */
    char *data;   /* where the tensor begins */
    enum memory memory;
    ncclEpGroup_t group;
};
int side_open(struct side *side, ncclEpGroup_t group, enum memory memory, epx_dtype dtype, int ndim, int64_t d0,
              int64_t d1, int64_t d2);
int side_put(struct side *side);            /* host to device, on the world's stream */
int side_get(struct side *side);            /* device to host, and wait */
int side_fill(struct side *side, int byte); /* both */
int side_close(struct side *side);

enum { POISON = 0x5a };

struct spec {
    const char *name;
    ncclEpAlgorithm_t algorithm;
    ncclEpLayout_t layout;
    epx_dtype dtype, received; /* of tokens; BF16 to FP8_E4M3 is a cast */
    epx_dtype scale;           /* fp8: FP32, or UINT8: UE8M0 */
    epx_dtype counter;
    int alignment, topk, hidden, tokens, experts, index32;
    int round_scales;
    int even;      /* every rank has as many tokens as it may */
    int rows;      /* high throughput: of receive tensors; 0: the worst case */
    int rows_open; /* the group does not say how many */
    enum memory memory;
};

struct lane {
    const struct spec *spec;
    struct workload work;
    struct oracle_route route;
    struct oracle_recv recv;
    struct oracle_data data;
    int routed;
    ncclEpGroup_t group;
    ncclEpHandle_t handle;
    struct side idx, tokens, scales, weights;                              /* of this rank */
    struct side received, received_scales, received_weights, received_idx; /* of dispatch */
    struct side expert_counters, rank_counters, offsets, total;
    struct side results, result_weights, combined, combined_weights; /* of combine */
};

/* A group fit for the spec. `timeout_ms` 0: the default. */
int64_t most_rows(const struct spec *spec); /* of high throughput's receive tensors */
int group_open(ncclEpGroup_t *group, const struct spec *spec, int enable_mask, int timeout_ms);
/* topk_open: high throughput learns K at the first update. */
int lane_open(struct lane *lane, ncclEpGroup_t group, const struct spec *spec, int topk_open);
int lane_close(struct lane *lane);
/* A new routing, drawn from the seed; high throughput's counts are checked. */
int lane_route(struct lane *lane, uint64_t seed);
/* active[r] 0: the oracle knows that rank r takes no part. NULL: all do. */
int lane_expect_active(struct lane *lane, const int *active);
/* Other numbers for the same routing. The halves of a staged operation are `send` and `complete`. */
int lane_dispatch(struct lane *lane, uint64_t round, int backward, int send_only);
int lane_check_dispatch(struct lane *lane, int backward);
int lane_combine(struct lane *lane, int backward, int send_only);
int lane_check_combine(struct lane *lane, int backward);
/* All of it in one go. */
int lane_round(struct lane *lane, uint64_t round, int backward);

int test_layouts(void);
int test_misuse(void);
int test_masks(void);
int test_standin(void);

#endif
