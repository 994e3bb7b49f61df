/* SPDX-License-Identifier: Apache-2.0 */
/* Between the module's host part (C) and its kernels (CUDA C++). */
#ifndef EPX_DEVICE_CUDA_LAUNCH_H
#define EPX_DEVICE_CUDA_LAUNCH_H

#include <stddef.h>

/*
 * Warps of a block. With the registers that its kernels take a block fills an SM: agents / LAUNCH_WARPS is the number of
 * SMs that an operation takes, and no block of another rank shares them.
 */
#ifndef LAUNCH_WARPS
#define LAUNCH_WARPS 16
#endif

struct launch_info {
    int agents, reserved;
    char *scratch; /* agent i's piece begins at i * scratch_stride */
    size_t scratch_stride;
};

#endif
