/* SPDX-License-Identifier: Apache-2.0 */
#include "device/cuda/entry.cuh"

#include "kernel/ring_bench.h"

extern "C" __global__ void __launch_bounds__(LAUNCH_WARPS *WARP, 1)
    epx_ring_bench(const __grid_constant__ struct ring_bench_params params, const __grid_constant__ launch_info info)
{
    __shared__ struct agent agents[LAUNCH_WARPS];
    __shared__ uint32_t met[AG_POINTS];
    struct agent *agent = &agents[threadIdx.x / WARP];

    make_agent(agent, info, met, NULL);
    if (agent->index < agent->count)
        kernel_ring_bench(agent, &params);
}
