/* SPDX-License-Identifier: Apache-2.0 */
#include "device/gpu/entry.cuh"

#include "kernel/ht_dispatch.h"

CUDA_KERNEL(epx_ht, dispatch, ht_dispatch, NULL)
