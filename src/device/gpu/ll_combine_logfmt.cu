/* SPDX-License-Identifier: Apache-2.0 */
/* The combine of LogFMT rows: a kernel of its own, so that the loops of either kind have all registers. */
#include "device/gpu/entry.cuh"

#define LC_LOGFMT(p) 1
#include "kernel/ll_combine.h"

#define ll_combine_logfmt_params ll_combine_params
#define kernel_ll_combine_logfmt kernel_ll_combine

GPU_KERNEL(epx_ll, combine_logfmt, ll_combine_logfmt, NULL)
