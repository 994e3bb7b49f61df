/* SPDX-License-Identifier: Apache-2.0 */
/* Between the module's host part (C) and its kernels (CUDA C++, HIP). */
#ifndef EPX_DEVICE_GPU_LAUNCH_H
#define EPX_DEVICE_GPU_LAUNCH_H

#include <stddef.h>

#include "kernel/marks.h"

/*
 * Warps of a block and lanes of a warp. With the registers that its kernels take a block fills an SM: agents /
 * LAUNCH_WARPS is the number of SMs that an operation takes, and no block of another rank shares them. AMD's compute
 * units hold 16 wavefronts of 64 registers that a kernel can use, or 8 of 128.
 */
#ifdef EPX_HIP
#define LAUNCH_LANES 64
#ifndef LAUNCH_WARPS
#define LAUNCH_WARPS 8
#endif
#else
#define LAUNCH_LANES 32
#ifndef LAUNCH_WARPS
#define LAUNCH_WARPS 16
#endif
#endif

/*
 * A warp's ring in shared memory, where the GPU copies there by itself: rows to be summed are fetched so far ahead that
 * few SMs keep memory busy (reduce.cuh). One slot holds two vectors of every lane. Behind the slots, a word for each,
 * and room for what is computed of the rows' LogFMT ranges.
 */
#ifdef EPX_HIP
#define RING_SLOTS 0
#else
#define RING_SLOTS 6
#endif
#define RING_SLOT_BYTES (LAUNCH_LANES * 32)
#define RING_SCALES (RING_SLOTS * RING_SLOT_BYTES + 128)
#define RING_SCALES_BYTES 2048
#define RING_BYTES (RING_SCALES + RING_SCALES_BYTES)

struct launch_info {
    int agents;
    int stage;         /* kernel/stages.h */
    int relaxed_words; /* HIP: EPX_AGGRESSIVE_ATOMIC */
    int rings;         /* each warp has one */
    char *scratch;     /* agent i's piece begins at i * scratch_stride */
    size_t scratch_stride;
    struct kernel_marks *marks; /* for a trace, or NULL */
    uint32_t mark_what;         /* of MARK_LAUNCH */
};

#endif
