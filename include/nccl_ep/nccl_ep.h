/* SPDX-License-Identifier: Apache-2.0 */
/*
 * NCCL EP's C interface, served by EPX: a program written for nccl_ep.h (API version 3, 2 or 1) compiles against this
 * one and links libnccl_ep.so of EPX instead. docs/nccl_ep.md says how to switch, what differs, and has the table of
 * tensor shapes.
 *
 * Letters as in epx.h: B tokens of this rank, M = max_dispatch_tokens_per_rank, R ranks, L local experts, K top-k, H
 * hidden, N rows of a receive tensor of the high-throughput algorithm.
 *
 * Every struct begins with its size and a magic number, which its NCCL_EP_*_INIT macro fills in. A size below that of
 * version 1 or another magic number is refused with ncclInvalidArgument (nccl_ep/ep_abi.h).
 * What was wrong is told by ncclEpxGetLastError and, with EPX_LOG=info, on stderr.
 */
#ifndef EPX_NCCL_EP_NCCL_EP_H
#define EPX_NCCL_EP_NCCL_EP_H

#include <cuda.h>
#include <nccl.h>
#include <stddef.h>
#include <stdint.h>

#include "nccl_ep/ep_abi.h"
#include "nccl_ep/ep_enums.h"

#define NCCL_EP_MAJOR 0
#define NCCL_EP_MINOR 2
#define NCCL_EP_PATCH 0
#define NCCL_EP_VERSION_CODE (NCCL_EP_MAJOR * 10000 + NCCL_EP_MINOR * 100 + NCCL_EP_PATCH)
#define NCCL_EP_API_VERSION 3

#define NCCL_EP_MAGIC 0xC00FFFEEu
#define NCCL_EP_TENSOR_MAGIC 0xCAFECAFE
#define NCCL_EP_AUTO 0

/* A byte with two FP4 values. */
#ifndef ncclFloat4x2
#define ncclFloat4x2 ((ncclDataType_t)12)
#endif

/* This is EPX's: for programs that want to know. */
#define NCCL_EP_IS_EPX 1

/* Initial values: compound literals in C; in C++, which has none, calls that return the same. */
#ifdef __cplusplus
#if __cplusplus >= 201402L
#define NCCL_EPX_CONSTEXPR constexpr
#else
#define NCCL_EPX_CONSTEXPR inline
#endif
template <typename T> NCCL_EPX_CONSTEXPR T ncclEpxInit(unsigned int magic)
{
    T value = T();
    value.size = (unsigned int)sizeof(T);
    value.magic = magic;
    return value;
}
template <typename T> NCCL_EPX_CONSTEXPR T ncclEpxInitGroup()
{
    T value = ncclEpxInit<T>(NCCL_EP_MAGIC);
    value.version = NCCL_EP_API_VERSION;
    return value;
}
#define NCCL_EP_STRUCT_INIT(type, magic_number) (ncclEpxInit<type>(magic_number))
#define NCCL_EP_TENSOR_INIT NCCL_EP_STRUCT_INIT(ncclEpTensor_t, NCCL_EP_TENSOR_MAGIC)
#define NCCL_EP_GROUP_CONFIG_INIT (ncclEpxInitGroup<ncclEpGroupConfig_t>())
extern "C" {
#else
#define NCCL_EP_STRUCT_INIT(type, magic_number) ((type){.size = (unsigned int)sizeof(type), .magic = (magic_number)})
#define NCCL_EP_TENSOR_INIT ((ncclEpTensor_t){NCCL_EP_TENSOR_INIT_INLINE})
#define NCCL_EP_GROUP_CONFIG_INIT \
    ((ncclEpGroupConfig_t){       \
        .size = (unsigned int)sizeof(ncclEpGroupConfig_t), .magic = NCCL_EP_MAGIC, .version = NCCL_EP_API_VERSION})
#endif

#if defined(__GNUC__)
#define NCCL_EP_API __attribute__((visibility("default")))
#else
#define NCCL_EP_API
#endif

/* ---- Version ---------------------------------------------------------------------------------------------------- */

/* NCCL_EP_VERSION_CODE of the library in use. */
NCCL_EP_API ncclResult_t ncclEpGetVersion(int *version);

/* ---- Tensors: descriptions of the caller's memory -------------------------------------------------------------- */

/* Contiguous, row-major. The memory is `data` or, where that is NULL, win_offset bytes into the window win_hdl. `sizes`
 * has ndim entries and is the caller's, but for tensors of ncclEpTensorAlloc. */
typedef struct ncclEpTensor {
    unsigned int size;
    unsigned int magic;
    unsigned int ndim;
    ncclDataType_t datatype;
    void *data;
    ncclWindow_t win_hdl;
    uint64_t win_offset;
    size_t *sizes;
} ncclEpTensor_t;

/* For a list of designated initialisers: ncclEpTensor_t t = {NCCL_EP_TENSOR_INIT_INLINE, .ndim = 2, ...}; */
#define NCCL_EP_TENSOR_INIT_INLINE .size = (unsigned int)sizeof(ncclEpTensor_t), .magic = NCCL_EP_TENSOR_MAGIC

typedef struct ncclEpTensorAllocConfig {
    unsigned int size;
    unsigned int magic;
} ncclEpTensorAllocConfig_t;
#define NCCL_EP_TENSOR_ALLOC_CONFIG_INIT NCCL_EP_STRUCT_INIT(ncclEpTensorAllocConfig_t, NCCL_EP_MAGIC)

/* A description on the heap with a copy of `sizes`; it has no memory yet: set its data, or win_hdl. config may be
 * NULL. */
NCCL_EP_API ncclResult_t ncclEpTensorAlloc(ncclEpTensor_t **tensor, unsigned int ndim, ncclDataType_t datatype,
                                           const size_t *sizes, const ncclEpTensorAllocConfig_t *config);
/* Of ncclEpTensorAlloc; NULL does nothing. Its memory stays the caller's. */
NCCL_EP_API ncclResult_t ncclEpTensorDestroy(ncclEpTensor_t *tensor);

/* ---- Groups ----------------------------------------------------------------------------------------------------- */

typedef cudaError_t (*ncclEpAllocFn_t)(void **ptr, size_t size, void *context);
typedef cudaError_t (*ncclEpFreeFn_t)(void *ptr, void *context);

/* Both or neither. Device memory that belongs to one rank alone: tables of groups, and of handles without handle_mem.
 * Memory that other ranks map is EPX's own. alloc_fn returns 0 or the call fails; 256-byte aligned, as cudaMalloc. */
typedef struct ncclEpAllocConfig {
    ncclEpAllocFn_t alloc_fn;
    ncclEpFreeFn_t free_fn;
    void *context;
} ncclEpAllocConfig_t;

typedef struct ncclEpGroupConfig {
    unsigned int size;
    unsigned int magic;
    unsigned int version; /* NCCL_EP_API_VERSION; no value is refused */
    ncclEpAlgorithm_t algorithm;
    unsigned int num_experts;
    unsigned int max_dispatch_tokens_per_rank;
    unsigned int
        max_recv_tokens_per_rank;       /* high throughput, T: N is at least this; AUTO (eager): what a routing needs */
    unsigned int max_token_bytes;       /* of one row, with the scales that travel with it; high throughput: in 16s */
    unsigned long int rdma_buffer_size; /* low latency: AUTO, or room for R*M rows at least; EPX takes what it needs */
    unsigned int num_qp_per_rank;       /* no meaning here */
    unsigned int num_channels;          /* no meaning here */
    unsigned int max_num_sms;           /* of a GPU; no meaning on the CPU device */
    ncclEpAllocConfig_t alloc;
    unsigned int enable_mask;
    uint64_t timeout_ns; /* whole milliseconds of it; 0: 100 s; NCCL_EP_TIMEOUT_MS comes first */
    /* since version 2 */
    ncclEpZeroCopyMode_t zero_copy;
    ncclEpOverflowPolicy_t overflow_policy; /* high throughput */
    unsigned int num_topk; /* high throughput: most K of a handle; 0 = 32; needed for eager EXPERT_MAJOR */
    unsigned char padding_v2[4];
    /* since version 3 */
    unsigned int dispatch_num_sms; /* of a GPU; AUTO: as max_num_sms */
    unsigned int combine_num_sms;
} ncclEpGroupConfig_t;

typedef struct ncclEpGroup *ncclEpGroup_t;

/* Collective. The communicator must live as long as the group. */
NCCL_EP_API ncclResult_t ncclEpCreateGroup(ncclEpGroup_t *ep_group, ncclComm_t comm, const ncclEpGroupConfig_t *config);
/* Waits for the group's own work, frees its handles too. NULL does nothing. */
NCCL_EP_API ncclResult_t ncclEpGroupDestroy(ncclEpGroup_t ep_group);

/* ---- Handles: one routing each ---------------------------------------------------------------------------------- */

/* Where counts go, int32 or int64; NULL: not wanted. High throughput fills them in ncclEpUpdateHandle; its dispatch
 * reads recv_topk_idx_kind, and in EXPERT_MAJOR fills expert_counters and recv_total_counter (count mode). Low latency
 * fills them in dispatch: EXPERT_MAJOR needs expert_counters, RANK_MAJOR has none. */
typedef struct ncclEpLayoutInfo {
    unsigned int size;
    unsigned int magic;
    ncclEpTensor_t *expert_counters;    /* [L]; padded in high throughput's EXPERT_MAJOR */
    ncclEpTensor_t *src_rank_counters;  /* [R] */
    ncclEpTensor_t *expert_offsets;     /* [L]: high throughput's EXPERT_MAJOR */
    ncclEpTensor_t *recv_total_counter; /* [1]; with overflow_policy DROP: before anything is dropped */
    /* since version 2 */
    ncclEpExpertIdKind_t recv_topk_idx_kind; /* of dispatch: RANK_MAJOR, FLAT */
    unsigned char padding_v2[4];
} ncclEpLayoutInfo_t;
#define NCCL_EP_LAYOUT_INFO_INIT NCCL_EP_STRUCT_INIT(ncclEpLayoutInfo_t, NCCL_EP_MAGIC)

typedef struct ncclEpHandleConfig {
    unsigned int size;
    unsigned int magic;
    size_t dispatch_output_per_expert_alignment; /* high throughput's EXPERT_MAJOR: a power of two; 0 = 1 */
} ncclEpHandleConfig_t;
#define NCCL_EP_HANDLE_CONFIG_INIT NCCL_EP_STRUCT_INIT(ncclEpHandleConfig_t, NCCL_EP_MAGIC)

typedef struct ncclEpHandle *ncclEpHandle_t;

/* Bytes of device memory that such a handle takes. num_topk: K. */
NCCL_EP_API ncclResult_t ncclEpHandleMemSize(ncclEpGroup_t ep_group, ncclEpLayout_t layout,
                                             const ncclEpHandleConfig_t *config, size_t *size_out, int num_topk);
/* Local. handle_mem: uint8 [at least ncclEpHandleMemSize], 16-byte aligned, which has the handle's tables and stays the
 * caller's; NULL: memory of alloc_fn. High throughput: the whole routing is in it. A second handle over the same
 * memory, or over a copy of its bytes, with the same group, layout, K and configuration needs no update. */
NCCL_EP_API ncclResult_t ncclEpInitHandle(ncclEpHandle_t *handle, ncclEpGroup_t ep_group, ncclEpLayout_t layout,
                                          const ncclEpHandleConfig_t *config, int num_topk,
                                          const ncclEpTensor_t *handle_mem);
/* topk_idx: int64 or int32 [B, K], -1 = dropped. Collective in high throughput, which keeps a copy of it; in low
 * latency local, and the indices are read when each dispatch runs. layout_info is high throughput's, or NULL. */
NCCL_EP_API ncclResult_t ncclEpUpdateHandle(ncclEpHandle_t handle, const ncclEpTensor_t *topk_idx,
                                            const ncclEpLayoutInfo_t *layout_info, cudaStream_t stream);
/* ncclEpInitHandle, then ncclEpUpdateHandle. */
NCCL_EP_API ncclResult_t ncclEpCreateHandle(ncclEpHandle_t *handle, ncclEpGroup_t ep_group, ncclEpLayout_t layout,
                                            const ncclEpTensor_t *topk_idx, const ncclEpLayoutInfo_t *layout_info,
                                            const ncclEpHandleConfig_t *config, cudaStream_t stream);
/* NULL does nothing. */
NCCL_EP_API ncclResult_t ncclEpHandleDestroy(ncclEpHandle_t handle);

/* ---- Dispatch, combine, complete: collective, asynchronous on the stream ---------------------------------------- */

/*
 * How rows travel in dispatch.
 *  NONE        bfloat16, float16 or float32, without scales
 *  FWD         tokens and scales of any of the types in docs/nccl_ep.md, as they are: rows of both in 16s of bytes
 *  DS_FP8E3M4  low latency: bfloat16 in; float8e4m3 out, with a float32 scale for each 128 values
 */
typedef enum {
    NCCL_EP_DISP_QUANT_NONE = 0,
    NCCL_EP_DISP_QUANT_FWD = 1,
    NCCL_EP_DISP_QUANT_DS_FP8E3M4 = 2
} ncclEpDispQuant_t;
/*
 * In combine.
 *  NVFP4   low latency, bfloat16; two values a byte with a scale for each 16, and one of the caller's for a row
 *  MXFP8   high throughput's EXPERT_MAJOR on one node, bfloat16, no scales: each rank's sum is rounded to FP8 with a
 *          power of two for each 32 values
 */
typedef enum {
    NCCL_EP_COMB_QUANT_NONE = 0,
    NCCL_EP_COMB_QUANT_NVFP4 = 1,
    NCCL_EP_COMB_QUANT_MXFP8 = 2 /* since version 3 */
} ncclEpCombQuant_t;

/* Older names of the same. */
typedef ncclEpDispQuant_t ncclEpDispatchQuantizationRecipe_t;
typedef ncclEpCombQuant_t ncclEpCombineQuantizationRecipe_t;
#define NCCL_EP_DISPATCH_QUANT_NONE NCCL_EP_DISP_QUANT_NONE
#define NCCL_EP_DISPATCH_QUANT_SCALES_FORWARD NCCL_EP_DISP_QUANT_FWD
#define NCCL_EP_DISPATCH_QUANT_DS_FP8E3M4 NCCL_EP_DISP_QUANT_DS_FP8E3M4
#define NCCL_EP_COMBINE_QUANT_NONE NCCL_EP_COMB_QUANT_NONE

typedef struct ncclEpDispatchInputs {
    unsigned int size;
    unsigned int magic;
    ncclEpTensor_t *tokens; /* [B, H] */
    ncclEpTensor_t *topk_weights;
    ncclEpTensor_t *scales; /* FWD: [B, S] */
} ncclEpDispatchInputs_t;
#define NCCL_EP_DISPATCH_INPUTS_INIT NCCL_EP_STRUCT_INIT(ncclEpDispatchInputs_t, NCCL_EP_MAGIC)

typedef struct ncclEpDispatchOutputs {
    unsigned int size;
    unsigned int magic;
    ncclEpTensor_t *tokens;
    ncclEpTensor_t *topk_weights;
    ncclEpTensor_t *scales;
    ncclEpTensor_t *topk_idx;
} ncclEpDispatchOutputs_t;
#define NCCL_EP_DISPATCH_OUTPUTS_INIT NCCL_EP_STRUCT_INIT(ncclEpDispatchOutputs_t, NCCL_EP_MAGIC)

typedef struct ncclEpDispatchConfig {
    unsigned int size;
    unsigned int magic;
    unsigned int send_only;    /* low latency: ncclEpComplete runs the receive half */
    unsigned int round_scales; /* DS_FP8E3M4: scales are powers of two */
    ncclEpPassDir_t pass_direction;
    union { /* since version 2; two names */
        ncclEpDispQuant_t quant_recipe;
        ncclEpDispQuant_t quantization_recipe;
    };
} ncclEpDispatchConfig_t;
#define NCCL_EP_DISPATCH_CONFIG_INIT NCCL_EP_STRUCT_INIT(ncclEpDispatchConfig_t, NCCL_EP_MAGIC)

NCCL_EP_API ncclResult_t ncclEpDispatch(ncclEpHandle_t handle, const ncclEpDispatchInputs_t *inputs,
                                        const ncclEpDispatchOutputs_t *outputs, const ncclEpLayoutInfo_t *layout_info,
                                        const ncclEpDispatchConfig_t *config, cudaStream_t stream);

typedef struct ncclEpCombineInputs {
    unsigned int size;
    unsigned int magic;
    ncclEpTensor_t *tokens;       /* shaped as dispatch's output tokens */
    ncclEpTensor_t *topk_weights; /* high throughput, backward */
    ncclEpTensor_t *scales;       /* since version 2: NVFP4, float32 [L, R*M, 1] or [R, M, 1] */
} ncclEpCombineInputs_t;
#define NCCL_EP_COMBINE_INPUTS_INIT NCCL_EP_STRUCT_INIT(ncclEpCombineInputs_t, NCCL_EP_MAGIC)

typedef struct ncclEpCombineOutputs {
    unsigned int size;
    unsigned int magic;
    ncclEpTensor_t *tokens;       /* [B, H] */
    ncclEpTensor_t *topk_weights; /* [B, K]: low latency's EXPERT_MAJOR READS it; high throughput's backward pass writes
                                     it, and its forward pass does not look at it */
} ncclEpCombineOutputs_t;
#define NCCL_EP_COMBINE_OUTPUTS_INIT NCCL_EP_STRUCT_INIT(ncclEpCombineOutputs_t, NCCL_EP_MAGIC)

typedef struct ncclEpCombineConfig {
    unsigned int size;
    unsigned int magic;
    unsigned int send_only;
    ncclEpPassDir_t pass_direction;
    union { /* since version 2; two names */
        ncclEpCombQuant_t quant_recipe;
        ncclEpCombQuant_t quantization_recipe;
    };
} ncclEpCombineConfig_t;
#define NCCL_EP_COMBINE_CONFIG_INIT NCCL_EP_STRUCT_INIT(ncclEpCombineConfig_t, NCCL_EP_MAGIC)

NCCL_EP_API ncclResult_t ncclEpCombine(ncclEpHandle_t handle, const ncclEpCombineInputs_t *inputs,
                                       const ncclEpCombineOutputs_t *outputs, const ncclEpCombineConfig_t *config,
                                       cudaStream_t stream);

typedef struct ncclEpCompleteConfig {
    unsigned int size;
    unsigned int magic;
} ncclEpCompleteConfig_t;
#define NCCL_EP_COMPLETE_CONFIG_INIT NCCL_EP_STRUCT_INIT(ncclEpCompleteConfig_t, NCCL_EP_MAGIC)

/* The receive half of the handle's staged operation, on this stream; nothing to do where there is none. */
NCCL_EP_API ncclResult_t ncclEpComplete(ncclEpHandle_t handle, const ncclEpCompleteConfig_t *config,
                                        cudaStream_t stream);

NCCL_EP_STATIC_ASSERT_STRUCT_ABI(ncclEpTensor_t, NCCL_EP_TENSOR);
NCCL_EP_STATIC_ASSERT_STRUCT_ABI(ncclEpTensorAllocConfig_t, NCCL_EP_TENSOR_ALLOC_CONFIG);
NCCL_EP_STATIC_ASSERT_STRUCT_ABI(ncclEpGroupConfig_t, NCCL_EP_GROUP_CONFIG);
NCCL_EP_STATIC_ASSERT_STRUCT_ABI_BOUNDARY(ncclEpGroupConfig_t, NCCL_EP_GROUP_CONFIG, 1);
NCCL_EP_STATIC_ASSERT_STRUCT_ABI_BOUNDARY(ncclEpGroupConfig_t, NCCL_EP_GROUP_CONFIG, 2);
NCCL_EP_STATIC_ASSERT_STRUCT_ABI(ncclEpLayoutInfo_t, NCCL_EP_LAYOUT_INFO);
NCCL_EP_STATIC_ASSERT_STRUCT_ABI_BOUNDARY(ncclEpLayoutInfo_t, NCCL_EP_LAYOUT_INFO, 1);
NCCL_EP_STATIC_ASSERT_STRUCT_ABI(ncclEpDispatchInputs_t, NCCL_EP_DISPATCH_INPUTS);
NCCL_EP_STATIC_ASSERT_STRUCT_ABI(ncclEpDispatchOutputs_t, NCCL_EP_DISPATCH_OUTPUTS);
NCCL_EP_STATIC_ASSERT_STRUCT_ABI(ncclEpCombineInputs_t, NCCL_EP_COMBINE_INPUTS);
NCCL_EP_STATIC_ASSERT_STRUCT_ABI_BOUNDARY(ncclEpCombineInputs_t, NCCL_EP_COMBINE_INPUTS, 1);
NCCL_EP_STATIC_ASSERT_STRUCT_ABI(ncclEpCombineOutputs_t, NCCL_EP_COMBINE_OUTPUTS);
NCCL_EP_STATIC_ASSERT_STRUCT_ABI(ncclEpHandleConfig_t, NCCL_EP_HANDLE_CONFIG);
NCCL_EP_STATIC_ASSERT_STRUCT_ABI(ncclEpDispatchConfig_t, NCCL_EP_DISPATCH_CONFIG);
NCCL_EP_STATIC_ASSERT_STRUCT_ABI_BOUNDARY(ncclEpDispatchConfig_t, NCCL_EP_DISPATCH_CONFIG, 1);
NCCL_EP_STATIC_ASSERT_STRUCT_ABI(ncclEpCombineConfig_t, NCCL_EP_COMBINE_CONFIG);
NCCL_EP_STATIC_ASSERT_STRUCT_ABI_BOUNDARY(ncclEpCombineConfig_t, NCCL_EP_COMBINE_CONFIG, 1);
NCCL_EP_STATIC_ASSERT_STRUCT_ABI(ncclEpCompleteConfig_t, NCCL_EP_COMPLETE_CONFIG);

/* ---- Masks and errors: 1 = active, 0 = masked. All need enable_mask, else ncclInvalidUsage ---------------------- */

NCCL_EP_API ncclResult_t ncclEpMaskQuery(ncclEpGroup_t ep_group, int *mask_status,
                                         cudaStream_t stream); /* device [R] */
/* Stores the array. 1 for a rank that it masked before: as long as no operation has begun since; else ncclEpMaskClean
 * brings the rank back. */
NCCL_EP_API ncclResult_t ncclEpMaskUpdate(ncclEpGroup_t ep_group, const int *mask, cudaStream_t stream); /* host [R] */
/* Low latency: collective over the ranks that are not masked; one that is returns at once. All are active again: those
 * that were masked take part from the next operation on, where all ranks meet. High throughput: collective over the
 * ranks that live. The error of before stays until ncclEpErrorClear. */
NCCL_EP_API ncclResult_t ncclEpMaskClean(ncclEpGroup_t ep_group, cudaStream_t stream);
/* 0, or 1 after a failure on the device (a rank that timed out, say). Does not wait for operations; epx_group_error
 * says for what it may wait between nodes. */
NCCL_EP_API ncclResult_t ncclEpGetAsyncError(ncclEpGroup_t ep_group, int *error_out);
/* Local after a rank was masked for being late; after a failure that ended an operation all ranks meet here. */
NCCL_EP_API ncclResult_t ncclEpErrorClear(ncclEpGroup_t ep_group);

/* ---- EPX's own additions ---------------------------------------------------------------------------------------- */

/* The sentence of the last failed call on this thread ("" if none): what was expected and what was given. */
NCCL_EP_API const char *ncclEpxGetLastError(void);
/* ncclEpGetAsyncError and ncclEpErrorClear for every group, with enable_mask or without. */
NCCL_EP_API ncclResult_t ncclEpxGetAsyncError(ncclEpGroup_t ep_group, int *error_out);
NCCL_EP_API ncclResult_t ncclEpxErrorClear(ncclEpGroup_t ep_group);
/* Another timeout_ns for a group of one node; waits for its operations. 0: the default. Every rank calls it. */
NCCL_EP_API ncclResult_t ncclEpxSetTimeout(ncclEpGroup_t ep_group, uint64_t timeout_ns);
/* Device memory that the node's ranks read and write in place: for tensors. It ends with the group, or by MemFree. */
NCCL_EP_API ncclResult_t ncclEpxMemAlloc(ncclEpGroup_t ep_group, size_t bytes, void **ptr);
NCCL_EP_API ncclResult_t ncclEpxMemFree(ncclEpGroup_t ep_group, void *ptr);
/* On the CPU device any value serves as a stream: this waits until what this process queued on it is done. Where
 * streams are a GPU's it does nothing: its runtime knows them. */
NCCL_EP_API ncclResult_t ncclEpxStreamSynchronize(cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
