/* SPDX-License-Identifier: Apache-2.0 */
#include "device/gpu/entry.cuh"

#include "kernel/ll_combine.h"

CUDA_KERNEL(epx_ll, combine, ll_combine, NULL)
