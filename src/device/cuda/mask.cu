/* SPDX-License-Identifier: Apache-2.0 */
#include "device/cuda/entry.cuh"

#include "kernel/mask.h"

CUDA_KERNEL_FAR(mask)
