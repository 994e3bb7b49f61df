/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Simulated cases: a property case (prop.h), a schedule and faults, all drawn from one seed, run on the simulator and
 * compared with the oracle. What the options fix is not drawn.
 */
#ifndef EPX_TESTS_LIB_SIM_CASE_H
#define EPX_TESTS_LIB_SIM_CASE_H

#include "prop.h"
#include "sim/ranks.h"

/* JOIN: processes come for the places of ranks that die. */
/* LATE: stalls beyond the deadline, in groups with masks: the others go on, and the rank wakes up among them. */
/* RECOVER: ranks stall or die between any two messages of a recovery, and all recover until they are through. */
/* STOP: one rank stops for many deadlines, and others are kept from running for a part of one meanwhile. */
enum {
    SIM_FAULT_DELAY = 1,
    SIM_FAULT_DEATH = 2,
    SIM_FAULT_JOIN = 4,
    SIM_FAULT_LATE = 8,
    SIM_FAULT_RECOVER = 16,
    SIM_FAULT_STOP = 32
};

struct sim_case_options {
    int ranks;       /* 0 = drawn */
    int nodes;       /* 0 = drawn */
    int modes;       /* epx_mode bits; several = drawn from them */
    unsigned faults; /* SIM_FAULT_*: drawn from them, also none */
    int stopped;     /* 1 + enum sim_net_stopped; 0 = drawn */
    int in_reach;    /* 1: dispatches of high throughput take rows where they are (prop_force_in_reach) */
};

struct sim_case {
    uint64_t seed;
    struct prop_case prop;
    struct sim_setup setup; /* its network is filled in when it runs */
    struct sim_net_options net;
    unsigned faults; /* those that were drawn */
};

struct sim_report {
    struct sim_outcome outcome;
    char error[2000];        /* "" = good */
    char wrong_culprit[300]; /* "" = none: who was accused wrongly, see told() */
    int named, misnamed;     /* failures that healthy ranks were told of; those that do not name a rank with a fault */
    int masks, masked_healthy; /* by ranks without a fault that recover; the latter: of such ranks too */
};

void sim_case_draw(struct sim_case *c, uint64_t seed, const struct sim_case_options *options);
/* 0, or -1 with report->error. */
int sim_case_run(const struct sim_case *c, struct sim_report *report);
void sim_case_print(const struct sim_case *c);

#endif
