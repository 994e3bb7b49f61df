/* SPDX-License-Identifier: Apache-2.0 */
/* The low-latency dispatch of a traced group: all ranks are in one node and none is masked (kernel/flavour.h). */
#define FLAVOUR_ONE_NODE 1
#include "device/gpu/entry.cuh"

#include "kernel/ll_dispatch.h"

static __shared__ int32_t route_counts[LAUNCH_WARPS * ROUTE_SMEM_KEYS];

#define ll_dispatch_marks_params ll_dispatch_params
#define kernel_ll_dispatch_marks kernel_ll_dispatch

GPU_KERNEL(epx_ll_marks, dispatch, ll_dispatch_marks, route_counts)
