/* SPDX-License-Identifier: Apache-2.0 */
/* The arguments of a dispatch and of the combine that follows it. */
#ifndef EPX_TESTS_NCCL_EP_NCCL_CALLS_H
#define EPX_TESTS_NCCL_EP_NCCL_CALLS_H

#include <nccl_ep.h>

struct nccl_calls {
    ncclEpDispatchInputs_t in;
    ncclEpDispatchOutputs_t out;
    ncclEpDispatchConfig_t config;
    ncclEpCombineInputs_t cin;
    ncclEpCombineOutputs_t cout;
    ncclEpCombineConfig_t cconfig;
    ncclEpLayoutInfo_t info;
};

/* No tensors, all settings their defaults. */
static inline struct nccl_calls nccl_calls_none(void)
{
    return (struct nccl_calls){.in = NCCL_EP_DISPATCH_INPUTS_INIT,
                               .out = NCCL_EP_DISPATCH_OUTPUTS_INIT,
                               .config = NCCL_EP_DISPATCH_CONFIG_INIT,
                               .cin = NCCL_EP_COMBINE_INPUTS_INIT,
                               .cout = NCCL_EP_COMBINE_OUTPUTS_INIT,
                               .cconfig = NCCL_EP_COMBINE_CONFIG_INIT,
                               .info = NCCL_EP_LAYOUT_INFO_INIT};
}

#endif
