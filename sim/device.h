/* SPDX-License-Identifier: Apache-2.0 */
/* The simulated device: memory is the CPU device's, streams and agents are tasks of the simulation. */
#ifndef EPX_SIM_DEVICE_H
#define EPX_SIM_DEVICE_H

#include "device/cpu/agent.h"
#include "device/device.h"

extern const struct device_ops sim_device_ops;
/* [ranks]: which machine each rank is on, for the run; NULL = all on one. */
extern const uint8_t *sim_machines;
/* Of agents, and of whoever rings their bells. */
extern const struct cpu_env sim_cpu_env;
/* As cpu_kernels; the second charges what it does (sim/cost.h). */
extern const cpu_kernel_fn sim_kernels[KERNEL_COUNT], cost_kernels[KERNEL_COUNT];

#endif
