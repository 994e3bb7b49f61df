/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_ep.h as a compiler sees it, alone: sizes, places and values that programs for NCCL EP were compiled with. */
#include <nccl_ep.h>

#include <stddef.h>

#define SIZE(type, bytes) _Static_assert(sizeof(type) == (bytes), #type)
#define AT(type, field, offset) _Static_assert(offsetof(type, field) == (offset), #type "." #field)
/* SIZE, then up to four pairs of field and offset a line. */
#define AT2(type, f, o, ...) \
    AT(type, f, o);          \
    AT(type, __VA_ARGS__)
#define AT3(type, f, o, ...) \
    AT(type, f, o);          \
    AT2(type, __VA_ARGS__)
#define AT4(type, f, o, ...) \
    AT(type, f, o);          \
    AT3(type, __VA_ARGS__)

SIZE(ncclEpTensor_t, 48);
AT4(ncclEpTensor_t, size, 0, magic, 4, ndim, 8, datatype, 12);
AT4(ncclEpTensor_t, data, 16, win_hdl, 24, win_offset, 32, sizes, 40);
SIZE(ncclEpTensorAllocConfig_t, 8);
SIZE(ncclEpCompleteConfig_t, 8);
SIZE(ncclEpAllocConfig_t, 24);
AT3(ncclEpAllocConfig_t, alloc_fn, 0, free_fn, 8, context, 16);
SIZE(ncclEpGroupConfig_t, 120);
AT4(ncclEpGroupConfig_t, version, 8, algorithm, 12, num_experts, 16, max_dispatch_tokens_per_rank, 20);
AT4(ncclEpGroupConfig_t, max_recv_tokens_per_rank, 24, max_token_bytes, 28, rdma_buffer_size, 32, num_qp_per_rank, 40);
AT4(ncclEpGroupConfig_t, num_channels, 44, max_num_sms, 48, alloc, 56, enable_mask, 80);
AT(ncclEpGroupConfig_t, timeout_ns, 88);
AT4(ncclEpGroupConfig_t, zero_copy, 96, overflow_policy, 100, num_topk, 104, padding_v2, 108);
AT2(ncclEpGroupConfig_t, dispatch_num_sms, 112, combine_num_sms, 116);
SIZE(ncclEpLayoutInfo_t, 48);
AT2(ncclEpLayoutInfo_t, recv_topk_idx_kind, 40, padding_v2, 44);
AT4(ncclEpLayoutInfo_t, expert_counters, 8, src_rank_counters, 16, expert_offsets, 24, recv_total_counter, 32);
SIZE(ncclEpDispatchInputs_t, 32);
AT3(ncclEpDispatchInputs_t, tokens, 8, topk_weights, 16, scales, 24);
SIZE(ncclEpDispatchOutputs_t, 40);
AT4(ncclEpDispatchOutputs_t, tokens, 8, topk_weights, 16, scales, 24, topk_idx, 32);
SIZE(ncclEpCombineInputs_t, 32);
AT3(ncclEpCombineInputs_t, tokens, 8, topk_weights, 16, scales, 24);
SIZE(ncclEpCombineOutputs_t, 24);
AT(ncclEpCombineOutputs_t, topk_weights, 16);
SIZE(ncclEpHandleConfig_t, 16);
AT(ncclEpHandleConfig_t, dispatch_output_per_expert_alignment, 8);
SIZE(ncclEpDispatchConfig_t, 24);
AT2(ncclEpDispatchConfig_t, quant_recipe, 20, quantization_recipe, 20);
AT3(ncclEpDispatchConfig_t, send_only, 8, round_scales, 12, pass_direction, 16);
SIZE(ncclEpCombineConfig_t, 20);
AT2(ncclEpCombineConfig_t, quant_recipe, 16, quantization_recipe, 16);
AT2(ncclEpCombineConfig_t, send_only, 8, pass_direction, 12);

_Static_assert(NCCL_EP_MAGIC == 0xC00FFFEEu && NCCL_EP_TENSOR_MAGIC == 0xCAFECAFE, "magic numbers");
_Static_assert(NCCL_EP_AUTO == 0 && NCCL_EP_API_VERSION == 3 && NCCL_EP_VERSION_CODE == 200, "versions");
_Static_assert(NCCL_EP_MAJOR == 0 && NCCL_EP_MINOR == 2 && NCCL_EP_PATCH == 0, "versions");
_Static_assert(NCCL_EP_ALGO_LOW_LATENCY == 0 && NCCL_EP_ALGO_HIGH_THROUGHPUT == 1, "algorithms");
_Static_assert(NCCL_EP_LAYOUT_UNSET == 0 && NCCL_EP_LAYOUT_EXPERT_MAJOR == 1 && NCCL_EP_LAYOUT_RANK_MAJOR == 2 &&
                   NCCL_EP_LAYOUT_FLAT == 3,
               "layouts");
_Static_assert(NCCL_EP_FWD_PASS == 0 && NCCL_EP_BWD_PASS == 1, "directions");
_Static_assert(NCCL_EP_OVERFLOW_AUTO == 0 && NCCL_EP_OVERFLOW_TRAP == 1 && NCCL_EP_OVERFLOW_DROP == 2, "policies");
_Static_assert(NCCL_EP_ZERO_COPY_AUTO == 0 && NCCL_EP_ZERO_COPY_OFF == 1 && NCCL_EP_ZERO_COPY_ON == 2, "zero copy");
_Static_assert(NCCL_EP_EXPERT_ID_AUTO == 0 && NCCL_EP_EXPERT_ID_LOCAL == 1 && NCCL_EP_EXPERT_ID_GLOBAL == 2, "ids");
_Static_assert(NCCL_EP_DISP_QUANT_NONE == 0 && NCCL_EP_DISP_QUANT_FWD == 1 && NCCL_EP_DISP_QUANT_DS_FP8E3M4 == 2,
               "recipes of dispatch");
_Static_assert(NCCL_EP_COMB_QUANT_NONE == 0 && NCCL_EP_COMB_QUANT_NVFP4 == 1, "recipes of combine");
_Static_assert(NCCL_EP_DISPATCH_QUANT_NONE == 0 && NCCL_EP_DISPATCH_QUANT_SCALES_FORWARD == 1 &&
                   NCCL_EP_DISPATCH_QUANT_DS_FP8E3M4 == 2 && NCCL_EP_COMBINE_QUANT_NONE == 0,
               "older names");
_Static_assert((int)ncclFloat4x2 == 12, "two FP4 in a byte");
_Static_assert(sizeof(ncclEpOverflowPolicy_t) == 4 && sizeof(ncclEpZeroCopyMode_t) == 4 &&
                   sizeof(ncclEpExpertIdKind_t) == 4 && sizeof(ncclEpDispQuant_t) == 4 &&
                   sizeof(ncclEpCombQuant_t) == 4,
               "enumerations have 4 bytes");

/* Each family of macros is whole. */
#define FAMILY(X, type)                                                                               \
    _Static_assert(X##_SIZE == sizeof(type) && X##_V1_SIZE <= X##_SIZE && X##_CURRENT_VERSION >= 1 && \
                       NCCL_EP_FIELD_END(type, X##_V1_LAST_FIELD) == X##_V1_SIZE,                     \
                   #X)
FAMILY(NCCL_EP_TENSOR, ncclEpTensor_t);
FAMILY(NCCL_EP_TENSOR_ALLOC_CONFIG, ncclEpTensorAllocConfig_t);
FAMILY(NCCL_EP_GROUP_CONFIG, ncclEpGroupConfig_t);
FAMILY(NCCL_EP_LAYOUT_INFO, ncclEpLayoutInfo_t);
FAMILY(NCCL_EP_DISPATCH_INPUTS, ncclEpDispatchInputs_t);
FAMILY(NCCL_EP_DISPATCH_OUTPUTS, ncclEpDispatchOutputs_t);
FAMILY(NCCL_EP_COMBINE_INPUTS, ncclEpCombineInputs_t);
FAMILY(NCCL_EP_COMBINE_OUTPUTS, ncclEpCombineOutputs_t);
FAMILY(NCCL_EP_HANDLE_CONFIG, ncclEpHandleConfig_t);
FAMILY(NCCL_EP_DISPATCH_CONFIG, ncclEpDispatchConfig_t);
FAMILY(NCCL_EP_COMBINE_CONFIG, ncclEpCombineConfig_t);
FAMILY(NCCL_EP_COMPLETE_CONFIG, ncclEpCompleteConfig_t);
