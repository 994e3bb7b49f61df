/* SPDX-License-Identifier: Apache-2.0 */
#include "device/cuda/entry.cuh"

#include "kernel/ht_dispatch.h"

CUDA_KERNEL(ht_dispatch, NULL)
