/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels, compiled for the CPU. */
#include "device/cpu/cpu.h"
#include "device/cpu/prims.h"

#include "kernel/ht_combine.h"
#include "kernel/ht_dispatch.h"
#include "kernel/ht_notify.h"
#include "kernel/layout.h"
#include "kernel/ll_combine.h"
#include "kernel/ll_dispatch.h"
#include "kernel/mask.h"
#include "kernel/ring_bench.h"

#define CPU_KERNEL(name, id, title, group)                                \
    static void run_##name(struct agent *agent, const void *params)       \
    {                                                                     \
        const struct name##_params *p = params;                           \
        const uint64_t began = cpu_kernel_begin(agent, group, id, title); \
                                                                          \
        kernel_##name(agent, p);                                          \
        cpu_kernel_end(agent, group, id, began);                          \
    }

CPU_KERNEL(ll_dispatch, KERNEL_LL_DISPATCH, "ll dispatch", p->g)
CPU_KERNEL(ll_combine, KERNEL_LL_COMBINE, "ll combine", p->g)
CPU_KERNEL(ht_notify, KERNEL_HT_NOTIFY, "ht update", p->g)
CPU_KERNEL(ht_dispatch, KERNEL_HT_DISPATCH, "ht dispatch", p->g)
CPU_KERNEL(ht_combine, KERNEL_HT_COMBINE, "ht combine", p->g)
CPU_KERNEL(mask, KERNEL_MASK, "mask", p->g)
CPU_KERNEL(layout_count, KERNEL_LAYOUT, "layout", p->g)
CPU_KERNEL(ring_bench, KERNEL_RING_BENCH, "ring bench", NULL)

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
