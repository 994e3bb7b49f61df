/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_ep.h as a compiler sees it, alone: sizes, places and values that programs for NCCL EP were compiled with. */
#include <nccl_ep.h>

#include <stddef.h>

#define SIZE(type, bytes) _Static_assert(sizeof(type) == (bytes), #type)
#define AT(type, field, offset) _Static_assert(offsetof(type, field) == (offset), #type "." #field)

SIZE(ncclEpTensor_t, 48);
AT(ncclEpTensor_t, size, 0);
AT(ncclEpTensor_t, magic, 4);
AT(ncclEpTensor_t, ndim, 8);
AT(ncclEpTensor_t, datatype, 12);
AT(ncclEpTensor_t, data, 16);
AT(ncclEpTensor_t, win_hdl, 24);
AT(ncclEpTensor_t, win_offset, 32);
AT(ncclEpTensor_t, sizes, 40);
SIZE(ncclEpTensorAllocConfig_t, 8);
SIZE(ncclEpCompleteConfig_t, 8);
SIZE(ncclEpAllocConfig_t, 24);
AT(ncclEpAllocConfig_t, alloc_fn, 0);
AT(ncclEpAllocConfig_t, free_fn, 8);
AT(ncclEpAllocConfig_t, context, 16);
SIZE(ncclEpGroupConfig_t, 96);
AT(ncclEpGroupConfig_t, version, 8);
AT(ncclEpGroupConfig_t, algorithm, 12);
AT(ncclEpGroupConfig_t, num_experts, 16);
AT(ncclEpGroupConfig_t, max_dispatch_tokens_per_rank, 20);
AT(ncclEpGroupConfig_t, max_recv_tokens_per_rank, 24);
AT(ncclEpGroupConfig_t, max_token_bytes, 28);
AT(ncclEpGroupConfig_t, rdma_buffer_size, 32);
AT(ncclEpGroupConfig_t, num_qp_per_rank, 40);
AT(ncclEpGroupConfig_t, num_channels, 44);
AT(ncclEpGroupConfig_t, max_num_sms, 48);
AT(ncclEpGroupConfig_t, alloc, 56);
AT(ncclEpGroupConfig_t, enable_mask, 80);
AT(ncclEpGroupConfig_t, timeout_ns, 88);
SIZE(ncclEpLayoutInfo_t, 40);
AT(ncclEpLayoutInfo_t, expert_counters, 8);
AT(ncclEpLayoutInfo_t, src_rank_counters, 16);
AT(ncclEpLayoutInfo_t, expert_offsets, 24);
AT(ncclEpLayoutInfo_t, recv_total_counter, 32);
SIZE(ncclEpDispatchInputs_t, 32);
AT(ncclEpDispatchInputs_t, tokens, 8);
AT(ncclEpDispatchInputs_t, topk_weights, 16);
AT(ncclEpDispatchInputs_t, scales, 24);
SIZE(ncclEpDispatchOutputs_t, 40);
AT(ncclEpDispatchOutputs_t, tokens, 8);
AT(ncclEpDispatchOutputs_t, topk_weights, 16);
AT(ncclEpDispatchOutputs_t, scales, 24);
AT(ncclEpDispatchOutputs_t, topk_idx, 32);
SIZE(ncclEpCombineInputs_t, 24);
AT(ncclEpCombineInputs_t, topk_weights, 16);
SIZE(ncclEpCombineOutputs_t, 24);
AT(ncclEpCombineOutputs_t, topk_weights, 16);
SIZE(ncclEpHandleConfig_t, 16);
AT(ncclEpHandleConfig_t, dispatch_output_per_expert_alignment, 8);
SIZE(ncclEpDispatchConfig_t, 20);
AT(ncclEpDispatchConfig_t, send_only, 8);
AT(ncclEpDispatchConfig_t, round_scales, 12);
AT(ncclEpDispatchConfig_t, pass_direction, 16);
SIZE(ncclEpCombineConfig_t, 16);
AT(ncclEpCombineConfig_t, send_only, 8);
AT(ncclEpCombineConfig_t, pass_direction, 12);

_Static_assert(NCCL_EP_MAGIC == 0xC00FFFEEu && NCCL_EP_TENSOR_MAGIC == 0xCAFECAFE, "magic numbers");
_Static_assert(NCCL_EP_AUTO == 0 && NCCL_EP_API_VERSION == 1 && NCCL_EP_VERSION_CODE == 100, "versions");
_Static_assert(NCCL_EP_MAJOR == 0 && NCCL_EP_MINOR == 1 && NCCL_EP_PATCH == 0, "versions");
_Static_assert(NCCL_EP_ALGO_LOW_LATENCY == 0 && NCCL_EP_ALGO_HIGH_THROUGHPUT == 1, "algorithms");
_Static_assert(NCCL_EP_LAYOUT_UNSET == 0 && NCCL_EP_LAYOUT_EXPERT_MAJOR == 1 && NCCL_EP_LAYOUT_RANK_MAJOR == 2 &&
                   NCCL_EP_LAYOUT_FLAT == 3,
               "layouts");
_Static_assert(NCCL_EP_FWD_PASS == 0 && NCCL_EP_BWD_PASS == 1, "directions");
