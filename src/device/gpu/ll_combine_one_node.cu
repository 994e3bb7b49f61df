/* SPDX-License-Identifier: Apache-2.0 */
/* The low-latency combine where all ranks are in one node and none is masked, without marks (kernel/flavour.h). */
#define FLAVOUR_ONE_NODE 1
#define FLAVOUR_MARKS 0
#include "device/gpu/entry.cuh"

#define LC_LOGFMT(p) 0
#include "kernel/ll_combine.h"

#define ll_combine_one_node_params ll_combine_params
#define kernel_ll_combine_one_node kernel_ll_combine

GPU_KERNEL(epx_ll_one_node, combine, ll_combine_one_node, NULL)
