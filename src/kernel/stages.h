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
 *   notify      0 route   1 GATE counts    2 places
 *   dispatch    0 GATE ready   1 rows   [ 2 GATE rows landed   3 forward ]*   4 GATE data    5 copy out+
 *   combine     0 stage+   1 GATE data    2 ask*   [ 3 GATE sums landed* ]   [ 4 sum ]   5 GATE done
 *
 *   Low-latency operations are one launch each: a combine in three took 83 instead of 69 us in a graph of the H200, and
 *   a pair 350 instead of 160 us without one, under MPS, where every launch of eight processes takes its time.
 *
 *   * between nodes only, but for gates of windows   + only where a tensor lies in memory that peers do not reach
 *   [ ] as often as there are turns (ht_rounds.h) or steps (ht_window.h): a launch that waits for rows never has SMs
 *   that move rows, and the number of launches is bounded by that of rounds or windows, which the host knows or can
 *   bound
 */
#ifndef EPX_KERNEL_STAGES_H
#define EPX_KERNEL_STAGES_H

#include "kernel/marks.h"
#include "kernel/params.h"

enum { HN_ROUTE, HN_COUNTS, HN_PLACES };
enum { HD_READY, HD_ROWS, HD_LANDED, HD_FORWARD, HD_DATA, HD_COPY_OUT };
enum { HC_STAGE, HC_DATA, HC_ASK, HC_LANDED, HC_SUM, HC_DONE };
#define STAGES_MAX 6

/* What a launch is told: a stage, and which turn of it. */
#define STAGE_NUMBER(launched) ((launched)&0xff)
#define STAGE_TURN(launched) ((launched) >> 8)

/* The stages of one call, in order; bit s of `gates`: stage s is a gate. The stages from place `first` on, `repeated`
 * of them, run `turns` times in turn. */
struct stage_list {
    int32_t count;
    uint8_t stage[STAGES_MAX];
    uint32_t gates;
    int32_t first, repeated, turns;
};

#define STAGE_BIT(s) (1u << (s))

static inline struct stage_list stages_make(uint32_t present, uint32_t gates)
{
    struct stage_list list = {0, {0}, gates, 0, 0, 1};

    for (int s = 0; s < STAGES_MAX; s++)
        if (present & STAGE_BIT(s))
            list.stage[list.count++] = (uint8_t)s;
    return list;
}

/* Stages s and s + 1 run `turns` times. */
static inline struct stage_list stages_repeat(struct stage_list list, int s, int turns)
{
    while (list.first < list.count && list.stage[list.first] != s)
        list.first++;
    list.repeated = 2;
    list.turns = turns;
    return list;
}

static inline int stage_launches(const struct stage_list *list)
{
    return list->count + (list->turns - 1) * list->repeated;
}

/* What launch number i is told. */
static inline int stage_launch(const struct stage_list *list, int i)
{
    const int in = i - list->first;

    if (list->repeated == 0 || in < 0)
        return list->stage[i];
    if (in < list->repeated * list->turns)
        return list->stage[list->first + in % list->repeated] | in / list->repeated << 8;
    return list->stage[i - (list->turns - 1) * list->repeated];
}

static inline int stage_is_gate(const struct stage_list *list, int launched)
{
    return (list->gates & STAGE_BIT(STAGE_NUMBER(launched))) != 0;
}

/* MARK_IS_*: is launch number i the first, the last? */
static inline uint32_t stage_place(const struct stage_list *list, int i)
{
    return (i == 0 ? MARK_IS_FIRST : 0) | (i == stage_launches(list) - 1 ? MARK_IS_LAST : 0);
}

static inline struct stage_list notify_stages(void)
{
    return stages_make(STAGE_BIT(HN_ROUTE) | STAGE_BIT(HN_COUNTS) | STAGE_BIT(HN_PLACES), STAGE_BIT(HN_COUNTS));
}

static inline struct stage_list dispatch_stages(const struct ht_dispatch_params *p)
{
    const uint32_t nodes = STAGE_BIT(HD_LANDED) | STAGE_BIT(HD_FORWARD);
    const struct stage_list list = stages_make(STAGE_BIT(HD_READY) | STAGE_BIT(HD_ROWS) | STAGE_BIT(HD_DATA) |
                                                   (p->turns ? nodes : 0) | (p->buffered ? STAGE_BIT(HD_COPY_OUT) : 0),
                                               STAGE_BIT(HD_READY) | STAGE_BIT(HD_LANDED) | STAGE_BIT(HD_DATA));

    return p->turns ? stages_repeat(list, HD_LANDED, p->turns) : list;
}

static inline struct stage_list combine_stages(const struct ht_combine_params *p)
{
    const uint32_t turns = STAGE_BIT(HC_LANDED) | (p->nodes ? STAGE_BIT(HC_ASK) : 0);
    const struct stage_list list =
        stages_make(STAGE_BIT(HC_DATA) | STAGE_BIT(HC_SUM) | STAGE_BIT(HC_DONE) | (p->turns ? turns : 0) |
                        (p->tokens || p->weights ? STAGE_BIT(HC_STAGE) : 0),
                    STAGE_BIT(HC_DATA) | STAGE_BIT(HC_LANDED) | STAGE_BIT(HC_DONE));

    /* The own sums of a turn are computed in the one after it. */
    return p->turns ? stages_repeat(list, HC_LANDED, p->turns + 1) : list;
}

/* For a device that runs each stage in a launch of its own. One stage and no gate: kernels that are not divided. */
static inline struct stage_list kernel_stages(enum kernel_id id, const void *params)
{
    switch (id) {
    case KERNEL_HT_NOTIFY:
        return notify_stages();
    case KERNEL_HT_DISPATCH:
        return dispatch_stages((const struct ht_dispatch_params *)params);
    case KERNEL_HT_COMBINE:
        return combine_stages((const struct ht_combine_params *)params);
    default:
        return stages_make(1, 0);
    }
}

/* Does the flavour for one node without masks serve (flavour.h)? */
static inline int launch_is_one_node(enum kernel_id id, const void *params)
{
    switch (id) {
    case KERNEL_LL_DISPATCH:
        return ((const struct ll_dispatch_params *)params)->one_node;
    case KERNEL_LL_COMBINE:
    case KERNEL_LL_COMBINE_LOGFMT:
        return ((const struct ll_combine_params *)params)->one_node;
    default:
        return 0;
    }
}

/* Does it sum many rows? Then warps get memory to fetch ahead into, where the device has it. */
static inline int launch_has_rings(enum kernel_id id, int launched)
{
    return id == KERNEL_LL_COMBINE_LOGFMT || (id == KERNEL_HT_COMBINE && STAGE_NUMBER(launched) == HC_SUM);
}

#endif
