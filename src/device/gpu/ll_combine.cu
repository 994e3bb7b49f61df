/* SPDX-License-Identifier: Apache-2.0 */
#include "device/gpu/entry.cuh"

#define LC_LOGFMT(p) 0 /* ll_combine_logfmt.cu */
#include "kernel/ll_combine.h"

GPU_KERNEL(epx_ll, combine, ll_combine, NULL)
