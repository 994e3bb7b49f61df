/* SPDX-License-Identifier: Apache-2.0 */
#include "device/gpu/entry.cuh"

#include "kernel/ht_combine.h"

CUDA_KERNEL(epx_ht, combine, ht_combine, NULL)
