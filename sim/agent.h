/* SPDX-License-Identifier: Apache-2.0 */
/* An agent of the simulation, around the CPU device's. */
#ifndef EPX_SIM_AGENT_H
#define EPX_SIM_AGENT_H

#include <stddef.h>

#include "device/cpu/agent.h"
#include "sim/cost.h"

struct sim_agent {
    struct agent agent; /* its scratch is kept from launch to launch */
    struct device_stream *stream;
    int stage; /* of the launch, where stages are launches of their own (kernel/stages.h) */
    struct cost_agent cost;
};

static inline struct sim_agent *sim_agent_of(const struct agent *agent)
{
    return (struct sim_agent *)(void *)((char *)(uintptr_t)agent - offsetof(struct sim_agent, agent));
}

#endif
