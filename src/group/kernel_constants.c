/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels do not include epx.h and have copies of its constants (kernel/params.h): here the compiler compares them. */
#include "epx/epx.h"
#include "kernel/command.h"
#include "kernel/params.h"

#define SAME(copy, original) EPX_STATIC_ASSERT((int)(copy) == (int)(original), #copy " is a copy of " #original)

SAME(DTYPE_BF16, EPX_BF16);
SAME(DTYPE_FP16, EPX_FP16);
SAME(DTYPE_FP32, EPX_FP32);

SAME(LAYOUT_EXPERT_MAJOR, EPX_EXPERT_MAJOR);
SAME(LAYOUT_RANK_MAJOR, EPX_RANK_MAJOR);
SAME(LAYOUT_FLAT, EPX_FLAT);

SAME(KSTATUS_ARGUMENT, EPX_ERR_ARGUMENT);
SAME(KSTATUS_USAGE, EPX_ERR_USAGE);
SAME(KSTATUS_MISMATCH, EPX_ERR_MISMATCH);
SAME(KSTATUS_OVERFLOW, EPX_ERR_OVERFLOW);
SAME(KSTATUS_MEMORY, EPX_ERR_MEMORY);
SAME(KSTATUS_TIMEOUT, EPX_ERR_TIMEOUT);
SAME(KSTATUS_PEER, EPX_ERR_PEER);
SAME(KSTATUS_LAST, EPX_ERR_INTERNAL);

SAME(KERNEL_MAX_TOPK, EPX_MAX_TOPK);

SAME(SUM_TOPK_ORDER, EPX_SUM_TOPK_ORDER);
SAME(SUM_ROUND_RANKS, EPX_SUM_ROUND_RANKS);
SAME(SUM_ROUND_NODES, EPX_SUM_ROUND_NODES);

EPX_STATIC_ASSERT((int)EPX_ERR_INTERNAL < (int)COUNTER_SLOTS, "SIG_ABORT carries a status in the place of a slot");
EPX_STATIC_ASSERT(EPX_ERR_INTERNAL <= 0xff, "an abort word has eight bits of status");
