/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels, compiled for simulation: the CPU's table with primitives at which tasks may change. */
#include "sim/prims.h"

#define cpu_kernels sim_kernels
#include "device/cpu/kernels.c"
