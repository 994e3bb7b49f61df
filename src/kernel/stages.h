/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stages of an operation. A GATE waits for peers and has one agent; WORK is shared out among all agents and waits for
 * no peer. A device runs all stages in one launch (the CPU: a thread that waits costs nothing), or each in a launch of
 * its own (AG_STAGED, GPUs): then a rank that waits for a late peer takes one warp of its GPU instead of every SM that
 * its rows will need, and computation goes on beside it.
 *
 *   one launch:      all agents | agent 0 waits, the others meet it | all agents | ...
 *   staged:          [ 1 warp: gate ] [ n warps: work ] [ 1 warp: gate ] ...      one after the other in the stream
 *
 * A stage that fails sets the rank's abort word; the stages after it find the word and do nothing (kernel_begin).
 *
 *   operation   stages
 *   notify      0 route   1 GATE counts    2 places      3 GATE tables*    4 take tables*
 *   dispatch    0 GATE ready   1 rows      2 GATE rows landed*   3 forward*   4 GATE data    5 copy out+
 *   combine     0 stage+   1 GATE data     2 relay sums*   3 GATE sums landed*   4 sum   5 GATE done
 *
 *   * between nodes only   + only where a tensor lies in memory that peers do not reach
 */
#ifndef EPX_KERNEL_STAGES_H
#define EPX_KERNEL_STAGES_H

#include "kernel/params.h"

enum { HN_ROUTE, HN_COUNTS, HN_PLACES, HN_TABLES, HN_TAKE };
enum { HD_READY, HD_ROWS, HD_LANDED, HD_FORWARD, HD_DATA, HD_COPY_OUT };
enum { HC_STAGE, HC_DATA, HC_RELAY, HC_LANDED, HC_SUM, HC_DONE };
#define STAGES_MAX 6

/* The stages of one call, in order; bit s of `gates`: stage s is a gate. */
struct stage_list {
    int32_t count;
    uint8_t stage[STAGES_MAX];
    uint32_t gates;
};

#define STAGE_BIT(s) (1u << (s))

static inline struct stage_list stages_make(uint32_t present, uint32_t gates)
{
    struct stage_list list = {0, {0}, gates};

    for (int s = 0; s < STAGES_MAX; s++)
        if (present & STAGE_BIT(s))
            list.stage[list.count++] = (uint8_t)s;
    return list;
}

static inline struct stage_list notify_stages(const struct ht_notify_params *p)
{
    const uint32_t nodes = STAGE_BIT(HN_TABLES) | STAGE_BIT(HN_TAKE);

    return stages_make(STAGE_BIT(HN_ROUTE) | STAGE_BIT(HN_COUNTS) | STAGE_BIT(HN_PLACES) | (p->nodes ? nodes : 0),
                       STAGE_BIT(HN_COUNTS) | STAGE_BIT(HN_TABLES));
}

static inline struct stage_list dispatch_stages(const struct ht_dispatch_params *p)
{
    const uint32_t nodes = STAGE_BIT(HD_LANDED) | STAGE_BIT(HD_FORWARD);

    return stages_make(STAGE_BIT(HD_READY) | STAGE_BIT(HD_ROWS) | STAGE_BIT(HD_DATA) | (p->nodes ? nodes : 0) |
                           (p->buffered ? STAGE_BIT(HD_COPY_OUT) : 0),
                       STAGE_BIT(HD_READY) | STAGE_BIT(HD_LANDED) | STAGE_BIT(HD_DATA));
}

static inline struct stage_list combine_stages(const struct ht_combine_params *p)
{
    const uint32_t nodes = STAGE_BIT(HC_RELAY) | STAGE_BIT(HC_LANDED);

    return stages_make(STAGE_BIT(HC_DATA) | STAGE_BIT(HC_SUM) | STAGE_BIT(HC_DONE) | (p->nodes ? nodes : 0) |
                           (p->tokens || p->weights ? STAGE_BIT(HC_STAGE) : 0),
                       STAGE_BIT(HC_DATA) | STAGE_BIT(HC_LANDED) | STAGE_BIT(HC_DONE));
}

/* For a device that runs each stage in a launch of its own. One stage and no gate: kernels that are not divided. */
static inline struct stage_list kernel_stages(enum kernel_id id, const void *params)
{
    switch (id) {
    case KERNEL_HT_NOTIFY:
        return notify_stages((const struct ht_notify_params *)params);
    case KERNEL_HT_DISPATCH:
        return dispatch_stages((const struct ht_dispatch_params *)params);
    case KERNEL_HT_COMBINE:
        return combine_stages((const struct ht_combine_params *)params);
    default:
        return stages_make(1, 0);
    }
}

#endif
