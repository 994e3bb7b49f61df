/* SPDX-License-Identifier: Apache-2.0 */
/* Which part of an operation a launch runs: one stage of it where AG_STAGED is 1 (stages.h), else all. */
#ifndef EPX_KERNEL_LAUNCH_STAGE_H
#define EPX_KERNEL_LAUNCH_STAGE_H

#include "kernel/agent.h"
#include "kernel/stages.h"

/* Does this launch run stage s of the operation? */
KFN int stage_runs(const struct agent *ag, int s)
{
#if AG_STAGED
    return STAGE_NUMBER(ag_stage(ag)) == s;
#else
    (void)ag;
    (void)s;
    return 1;
#endif
}

/* The phase that a stage is has ended. Where each is a launch, the host knows its name (group/marks.c). */
#if AG_STAGED
#define STAGE_MARK(ag, s, name) ((void)0)
#else
#define STAGE_MARK(ag, s, name) AG_MARK(ag, name)
#endif

#if AG_STAGED
/* Which turn of a repeated stage this launch runs. */
KFN int stage_turn(const struct agent *ag)
{
    return STAGE_TURN(ag_stage(ag));
}
#endif

/* An operation stores its epoch at the end of stage `stored`: is that behind this launch? */
KFN uint64_t stage_epoch(const struct agent *ag, const struct group_dev *g, int operation, int stored)
{
    const uint64_t last = g->state->epoch[operation];

#if AG_STAGED
    if (STAGE_NUMBER(ag_stage(ag)) > stored)
        return last;
#else
    (void)ag;
    (void)stored;
#endif
    return last + 1;
}

#endif
