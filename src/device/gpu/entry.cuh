/* SPDX-License-Identifier: Apache-2.0 */
/* How a kernel of src/kernel becomes one of a GPU: included by one file per kernel, each its own compilation. */
#ifndef EPX_DEVICE_GPU_ENTRY_CUH
#define EPX_DEVICE_GPU_ENTRY_CUH

#include "device/gpu/prims.cuh"

#define RANKS_NEAR 64 /* ranks whose heap addresses and masks are kept in shared memory */

/* What every step of a kernel looks up, near at hand. */
template <typename params> struct near_copy {
    struct agent agent[LAUNCH_WARPS];
    uint32_t met[AG_POINTS];
    params p;
    struct group_dev g;
    struct handle_dev h;
    char *heap[RANKS_NEAR];
    int32_t mask[RANKS_NEAR];
};

KFN void copy_words(void *to, const void *from, size_t bytes)
{
    for (size_t i = threadIdx.x; i < bytes / 4; i += blockDim.x)
        ((uint32_t *)to)[i] = ((const uint32_t *)from)[i];
}

KFN void make_agent(struct agent *ag, const struct launch_info &info, uint32_t *met, int32_t *counts)
{
    words_begin(info.relaxed_words);
    if (threadIdx.x < AG_POINTS)
        met[threadIdx.x] = 0;
    if (lane_id() == 0) {
        ag->index = (int)blockIdx.x + (int)(threadIdx.x / WARP) * (int)gridDim.x; /* neighbours on different SMs */
        ag->count = info.agents;
        ag->scratch = info.scratch + (size_t)ag->index * info.scratch_stride;
        ag->scratch_bytes = info.scratch_stride;
        ag->met = met;
        ag->mates = (uint32_t)(info.agents - (int)blockIdx.x + (int)gridDim.x - 1) / gridDim.x;
        ag->counts = counts;
#ifdef EPX_KERNEL_MARKS
        ag->marks = 0;
        mark(ag, "begin");
#endif
    }
    __syncthreads();
}

template <typename params> KFN void take_near(struct near_copy<params> *near, const params &given)
{
    copy_words(&near->p, &given, sizeof(given));
    copy_words(&near->g, given.g, sizeof(near->g));
    copy_words(&near->h, given.h, sizeof(near->h));
    __syncthreads();
    const int fits = near->g.nranks <= RANKS_NEAR;
    if (fits) {
        copy_words(near->heap, near->g.heap, (size_t)near->g.nranks * sizeof(char *));
        copy_words(near->mask, near->g.mask, (size_t)near->g.nranks * sizeof(int32_t));
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        if (fits)
            near->g.heap = near->heap;
        if (fits && !near->g.enable_mask) /* else it may change while the kernel runs */
            near->g.mask = near->mask;
        near->p.g = &near->g;
        near->p.h = &near->h;
    }
    __syncthreads();
}

#ifdef EPX_KERNEL_MARKS
#define MARKS_PRINT(ag, kernel) (mark(ag, "end"), marks_print(ag, kernel))
#else
#define MARKS_PRINT(ag, kernel) ((void)0)
#endif

/*
 * A profile shows a kernel as epx_ll::dispatch, epx_ht::notify and so on: what reads profiles of DeepEP looks for "::dispatch"
 * and the like. The host finds it by a pointer with a plain name, epx_ll_dispatch.
 */
#define CUDA_ENTRY(space, verb, name)                                         \
    namespace space                                                           \
    {                                                                         \
    __global__ void verb(const __grid_constant__ struct name##_params params, \
                         const __grid_constant__ launch_info info);           \
    }                                                                         \
    extern "C" {                                                              \
    extern const void *const epx_##name;                                      \
    const void *const epx_##name = (const void *)space::verb;                 \
    }                                                                         \
    __global__ void __launch_bounds__(LAUNCH_WARPS *WARP, 1)                  \
        space::verb(const __grid_constant__ struct name##_params params, const __grid_constant__ launch_info info)

/* `counts`: a __shared__ array for the tables of routing, or NULL where there is none. */
#define CUDA_KERNEL(space, verb, name, counts)                  \
    CUDA_ENTRY(space, verb, name)                               \
    {                                                           \
        __shared__ struct near_copy<struct name##_params> near; \
        struct agent *agent = &near.agent[threadIdx.x / WARP];  \
        make_agent(agent, info, near.met, counts);              \
        take_near(&near, params);                               \
        if (agent->index < agent->count)                        \
            kernel_##name(agent, &near.p);                      \
        MARKS_PRINT(agent, #name);                              \
    }

/* Of small kernels: the parameters stay where they are. */
#define CUDA_KERNEL_FAR(name)                              \
    CUDA_ENTRY(epx, name, name)                            \
    {                                                      \
        __shared__ struct agent agents[LAUNCH_WARPS];      \
        __shared__ uint32_t met[AG_POINTS];                \
        struct agent *agent = &agents[threadIdx.x / WARP]; \
        make_agent(agent, info, met, NULL);                \
        if (agent->index < agent->count)                   \
            kernel_##name(agent, &params);                 \
    }

#endif
