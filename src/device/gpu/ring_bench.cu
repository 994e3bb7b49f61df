/* SPDX-License-Identifier: Apache-2.0 */
#include "device/gpu/entry.cuh"

#include "kernel/ring_bench.h"

GPU_KERNEL_SMALL(ring_bench)
