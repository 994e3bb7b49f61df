/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels, compiled for the CPU. */
#include "device/cpu/prims.h"

#include "kernel/ht_combine.h"
#include "kernel/ht_dispatch.h"
#include "kernel/ht_notify.h"
#include "kernel/layout.h"
#include "kernel/ll_combine.h"
#include "kernel/ll_dispatch.h"
#include "kernel/mask.h"
#include "kernel/ring_bench.h"

#define CPU_KERNEL(name)                                            \
    static void run_##name(struct agent *agent, const void *params) \
    {                                                               \
        kernel_##name(agent, (const struct name##_params *)params); \
    }

CPU_KERNEL(ll_dispatch)
CPU_KERNEL(ll_combine)
CPU_KERNEL(ht_notify)
CPU_KERNEL(ht_dispatch)
CPU_KERNEL(ht_combine)
CPU_KERNEL(mask)
CPU_KERNEL(layout_count)
CPU_KERNEL(ring_bench)

const cpu_kernel_fn cpu_kernels[KERNEL_COUNT] = {
    [KERNEL_LL_DISPATCH] = run_ll_dispatch,
    [KERNEL_LL_COMBINE] = run_ll_combine,
    [KERNEL_LL_COMBINE_LOGFMT] = run_ll_combine,
    [KERNEL_HT_NOTIFY] = run_ht_notify,
    [KERNEL_HT_DISPATCH] = run_ht_dispatch,
    [KERNEL_HT_COMBINE] = run_ht_combine,
    [KERNEL_MASK] = run_mask,
    [KERNEL_LAYOUT] = run_layout_count,
    [KERNEL_RING_BENCH] = run_ring_bench,
};
