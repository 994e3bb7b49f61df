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

#endif
