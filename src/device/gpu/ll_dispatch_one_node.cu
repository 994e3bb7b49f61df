/* SPDX-License-Identifier: Apache-2.0 */
/* The low-latency dispatch where all ranks are in one node and none is masked, without marks (kernel/flavour.h). */
#define FLAVOUR_ONE_NODE 1
#define FLAVOUR_MARKS 0
#include "device/gpu/entry.cuh"

#include "kernel/ll_dispatch.h"

static __shared__ int32_t route_counts[LAUNCH_WARPS * ROUTE_SMEM_KEYS];

#define ll_dispatch_one_node_params ll_dispatch_params
#define kernel_ll_dispatch_one_node kernel_ll_dispatch

GPU_KERNEL(epx_ll_one_node, dispatch, ll_dispatch_one_node, route_counts)
