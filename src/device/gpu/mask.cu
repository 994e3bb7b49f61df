/* SPDX-License-Identifier: Apache-2.0 */
#include "device/gpu/entry.cuh"

#include "kernel/mask.h"

CUDA_KERNEL_SMALL(mask)
