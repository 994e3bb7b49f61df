/* SPDX-License-Identifier: Apache-2.0 */
#include "device/gpu/entry.cuh"

#include "kernel/ll_dispatch.h"

static __shared__ int32_t route_counts[LAUNCH_WARPS * ROUTE_SMEM_KEYS];

GPU_KERNEL(epx_ll, dispatch, ll_dispatch, route_counts)
