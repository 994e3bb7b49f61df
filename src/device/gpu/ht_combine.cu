/* SPDX-License-Identifier: Apache-2.0 */
#include "device/gpu/entry.cuh"

#include "kernel/ht_combine.h"

/* Descriptors of the node's ranks (hc_descs), of as many as have their heaps in shared memory. */
alignas(16) static __shared__ int32_t node_descs[LAUNCH_WARPS * ROUTE_SMEM_KEYS];

GPU_KERNEL(epx_ht, combine, ht_combine, node_descs)
