/* SPDX-License-Identifier: Apache-2.0 */
#include "device/gpu/entry.cuh"

#include "kernel/mask.h"

GPU_KERNEL_SMALL(mask)
