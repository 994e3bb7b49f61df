/* SPDX-License-Identifier: Apache-2.0 */
/* Times of operations for epx top (kernel/times.h), by the first thread of each block. */
#ifndef EPX_DEVICE_GPU_TIMES_CUH
#define EPX_DEVICE_GPU_TIMES_CUH

#include "kernel/times.h"

KFN_STEP void times_begin(struct kernel_times *times, uint32_t what)
{
    if (blockIdx.x == 0 && MARK_A(what) & MARK_IS_FIRST)
        times->began_ns = clock_global();
}

KFN_STEP void times_end(struct kernel_times *times, uint32_t what)
{
    if (blockIdx.x != 0 || !(MARK_A(what) & MARK_IS_LAST) || !times->began_ns)
        return;
    times->count[MARK_B(what)][time_bucket(clock_global() - times->began_ns)]++;
    times->began_ns = 0;
}

#endif
