/* SPDX-License-Identifier: Apache-2.0 */
/* The enumerations of nccl_ep.h. */
#ifndef EPX_NCCL_EP_EP_ENUMS_H
#define EPX_NCCL_EP_EP_ENUMS_H

typedef enum { NCCL_EP_ALGO_LOW_LATENCY = 0, NCCL_EP_ALGO_HIGH_THROUGHPUT = 1 } ncclEpAlgorithm_t;

/* What a rank receives, and how it lies there: the table in docs/nccl_ep.md. */
typedef enum {
    NCCL_EP_LAYOUT_UNSET = 0,
    NCCL_EP_LAYOUT_EXPERT_MAJOR = 1,
    NCCL_EP_LAYOUT_RANK_MAJOR = 2, /* low latency */
    NCCL_EP_LAYOUT_FLAT = 3        /* high throughput */
} ncclEpLayout_t;

typedef enum { NCCL_EP_FWD_PASS = 0, NCCL_EP_BWD_PASS = 1 } ncclEpPassDir_t;

/* High throughput: what happens to rows beyond max_recv_tokens_per_rank. TRAP: the operation fails. DROP: they are
 * left out, and all calls go on. AUTO is TRAP. */
typedef enum { NCCL_EP_OVERFLOW_AUTO = 0, NCCL_EP_OVERFLOW_TRAP = 1, NCCL_EP_OVERFLOW_DROP = 2 } ncclEpOverflowPolicy_t;

/* ON: receive tensors of dispatch must have windows. AUTO and OFF take any memory. */
typedef enum { NCCL_EP_ZERO_COPY_AUTO = 0, NCCL_EP_ZERO_COPY_OFF = 1, NCCL_EP_ZERO_COPY_ON = 2 } ncclEpZeroCopyMode_t;

/* What the received topk_idx counts from: the first expert of this rank (AUTO, LOCAL), or of all (GLOBAL). */
typedef enum {
    NCCL_EP_EXPERT_ID_AUTO = 0,
    NCCL_EP_EXPERT_ID_LOCAL = 1,
    NCCL_EP_EXPERT_ID_GLOBAL = 2
} ncclEpExpertIdKind_t;

#endif
