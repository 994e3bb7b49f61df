/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels, compiled for predictions: the CPU's table with primitives that charge what they cost. */
#include "sim/cost_prims.h"

#define cpu_kernels cost_kernels
#include "device/cpu/kernels.c"
