/* SPDX-License-Identifier: Apache-2.0 */
/* The low-latency combine of a traced group: all ranks are in one node and none is masked (kernel/flavour.h). */
#define FLAVOUR_ONE_NODE 1
#include "device/gpu/entry.cuh"

#define LC_LOGFMT(p) 0
#include "kernel/ll_combine.h"

#define ll_combine_marks_params ll_combine_params
#define kernel_ll_combine_marks kernel_ll_combine

GPU_KERNEL(epx_ll_marks, combine, ll_combine_marks, NULL)
