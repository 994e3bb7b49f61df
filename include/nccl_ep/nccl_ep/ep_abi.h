/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How the structs of nccl_ep.h grow: fields are appended and never moved. Every struct begins with its size, as its
 * caller knew it. A library takes as many bytes as both know: what an older caller does not have is 0, and what a newer
 * one has beyond is ignored.
 *
 * For X = NCCL_EP_TENSOR, NCCL_EP_GROUP_CONFIG and so on:
 *   X_INIT              initial value: size and magic number
 *   X_SIZE              bytes of the struct here
 *   X_V1_SIZE, ...      bytes that it had in version 1, ... of the struct; X_V1_LAST_FIELD is the last field then
 *   X_CURRENT_VERSION   the version here
 */
#ifndef EPX_NCCL_EP_EP_ABI_H
#define EPX_NCCL_EP_EP_ABI_H

#ifdef __cplusplus
#define NCCL_EP_STATIC_ASSERT(cond, msg) static_assert(cond, msg)
#else
#define NCCL_EP_STATIC_ASSERT(cond, msg) _Static_assert(cond, msg)
#endif

/* Bytes from the start of a struct to past a field. */
#define NCCL_EP_FIELD_END(type, field) ((unsigned int)(offsetof(type, field) + sizeof(((type *)0)->field)))
/* Does the caller's struct, which may be of another version, have the field? */
#define NCCL_EP_HAS_FIELD(ptr, type, field) ((ptr) != NULL && (ptr)->size >= NCCL_EP_FIELD_END(type, field))

/* Version n of the struct ends with the field that it names, at the size that it names. */
#define NCCL_EP_STATIC_ASSERT_STRUCT_ABI_BOUNDARY(type, BASE, n)                                   \
    NCCL_EP_STATIC_ASSERT(NCCL_EP_FIELD_END(type, BASE##_V##n##_LAST_FIELD) == BASE##_V##n##_SIZE, \
                          #type " version " #n ": its last field ends where version " #n " ended")
#define NCCL_EPX_BOUNDARY(type, BASE, n) NCCL_EP_STATIC_ASSERT_STRUCT_ABI_BOUNDARY(type, BASE, n)
#define NCCL_EPX_VERSION_SIZE(BASE, n) BASE##_V##n##_SIZE
#define NCCL_EPX_SIZE_OF_VERSION(BASE, n) NCCL_EPX_VERSION_SIZE(BASE, n)
/* The struct is that of its current version. */
#define NCCL_EP_STATIC_ASSERT_STRUCT_ABI(type, BASE)                                                               \
    NCCL_EP_STATIC_ASSERT(offsetof(type, size) == 0 && offsetof(type, magic) == 4, #type " begins with its size"); \
    NCCL_EP_STATIC_ASSERT(sizeof(type) == NCCL_EPX_SIZE_OF_VERSION(BASE, BASE##_CURRENT_VERSION),                  \
                          #type " has the size of its current version");                                           \
    NCCL_EPX_BOUNDARY(type, BASE, BASE##_CURRENT_VERSION)

#define NCCL_EP_TENSOR_SIZE ((unsigned int)sizeof(ncclEpTensor_t))
#define NCCL_EP_TENSOR_V1_SIZE 48u
#define NCCL_EP_TENSOR_V1_LAST_FIELD sizes
#define NCCL_EP_TENSOR_CURRENT_VERSION 1

#define NCCL_EP_TENSOR_ALLOC_CONFIG_SIZE ((unsigned int)sizeof(ncclEpTensorAllocConfig_t))
#define NCCL_EP_TENSOR_ALLOC_CONFIG_V1_SIZE 8u
#define NCCL_EP_TENSOR_ALLOC_CONFIG_V1_LAST_FIELD magic
#define NCCL_EP_TENSOR_ALLOC_CONFIG_CURRENT_VERSION 1

#define NCCL_EP_GROUP_CONFIG_SIZE ((unsigned int)sizeof(ncclEpGroupConfig_t))
#define NCCL_EP_GROUP_CONFIG_V1_SIZE 96u
#define NCCL_EP_GROUP_CONFIG_V1_LAST_FIELD timeout_ns
#define NCCL_EP_GROUP_CONFIG_V2_SIZE 112u
#define NCCL_EP_GROUP_CONFIG_V2_LAST_FIELD padding_v2
#define NCCL_EP_GROUP_CONFIG_V3_SIZE 120u
#define NCCL_EP_GROUP_CONFIG_V3_LAST_FIELD combine_num_sms
#define NCCL_EP_GROUP_CONFIG_CURRENT_VERSION 3

#define NCCL_EP_LAYOUT_INFO_SIZE ((unsigned int)sizeof(ncclEpLayoutInfo_t))
#define NCCL_EP_LAYOUT_INFO_V1_SIZE 40u
#define NCCL_EP_LAYOUT_INFO_V1_LAST_FIELD recv_total_counter
#define NCCL_EP_LAYOUT_INFO_V2_SIZE 48u
#define NCCL_EP_LAYOUT_INFO_V2_LAST_FIELD padding_v2
#define NCCL_EP_LAYOUT_INFO_CURRENT_VERSION 2

#define NCCL_EP_DISPATCH_INPUTS_SIZE ((unsigned int)sizeof(ncclEpDispatchInputs_t))
#define NCCL_EP_DISPATCH_INPUTS_V1_SIZE 32u
#define NCCL_EP_DISPATCH_INPUTS_V1_LAST_FIELD scales
#define NCCL_EP_DISPATCH_INPUTS_CURRENT_VERSION 1

#define NCCL_EP_DISPATCH_OUTPUTS_SIZE ((unsigned int)sizeof(ncclEpDispatchOutputs_t))
#define NCCL_EP_DISPATCH_OUTPUTS_V1_SIZE 40u
#define NCCL_EP_DISPATCH_OUTPUTS_V1_LAST_FIELD topk_idx
#define NCCL_EP_DISPATCH_OUTPUTS_CURRENT_VERSION 1

#define NCCL_EP_COMBINE_INPUTS_SIZE ((unsigned int)sizeof(ncclEpCombineInputs_t))
#define NCCL_EP_COMBINE_INPUTS_V1_SIZE 24u
#define NCCL_EP_COMBINE_INPUTS_V1_LAST_FIELD topk_weights
#define NCCL_EP_COMBINE_INPUTS_V2_SIZE 32u
#define NCCL_EP_COMBINE_INPUTS_V2_LAST_FIELD scales
#define NCCL_EP_COMBINE_INPUTS_CURRENT_VERSION 2

#define NCCL_EP_COMBINE_OUTPUTS_SIZE ((unsigned int)sizeof(ncclEpCombineOutputs_t))
#define NCCL_EP_COMBINE_OUTPUTS_V1_SIZE 24u
#define NCCL_EP_COMBINE_OUTPUTS_V1_LAST_FIELD topk_weights
#define NCCL_EP_COMBINE_OUTPUTS_CURRENT_VERSION 1

#define NCCL_EP_HANDLE_CONFIG_SIZE ((unsigned int)sizeof(ncclEpHandleConfig_t))
#define NCCL_EP_HANDLE_CONFIG_V1_SIZE 16u
#define NCCL_EP_HANDLE_CONFIG_V1_LAST_FIELD dispatch_output_per_expert_alignment
#define NCCL_EP_HANDLE_CONFIG_CURRENT_VERSION 1

#define NCCL_EP_DISPATCH_CONFIG_SIZE ((unsigned int)sizeof(ncclEpDispatchConfig_t))
#define NCCL_EP_DISPATCH_CONFIG_V1_SIZE 20u
#define NCCL_EP_DISPATCH_CONFIG_V1_LAST_FIELD pass_direction
#define NCCL_EP_DISPATCH_CONFIG_V2_SIZE 24u
#define NCCL_EP_DISPATCH_CONFIG_V2_LAST_FIELD quant_recipe
#define NCCL_EP_DISPATCH_CONFIG_CURRENT_VERSION 2

#define NCCL_EP_COMBINE_CONFIG_SIZE ((unsigned int)sizeof(ncclEpCombineConfig_t))
#define NCCL_EP_COMBINE_CONFIG_V1_SIZE 16u
#define NCCL_EP_COMBINE_CONFIG_V1_LAST_FIELD pass_direction
#define NCCL_EP_COMBINE_CONFIG_V2_SIZE 20u
#define NCCL_EP_COMBINE_CONFIG_V2_LAST_FIELD quant_recipe
#define NCCL_EP_COMBINE_CONFIG_CURRENT_VERSION 2

#define NCCL_EP_COMPLETE_CONFIG_SIZE ((unsigned int)sizeof(ncclEpCompleteConfig_t))
#define NCCL_EP_COMPLETE_CONFIG_V1_SIZE 8u
#define NCCL_EP_COMPLETE_CONFIG_V1_LAST_FIELD magic
#define NCCL_EP_COMPLETE_CONFIG_CURRENT_VERSION 1

#endif
