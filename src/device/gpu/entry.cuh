/* SPDX-License-Identifier: Apache-2.0 */
/* How a kernel of src/kernel becomes one of a GPU: included by one file per kernel, each its own compilation. */
#ifndef EPX_DEVICE_GPU_ENTRY_CUH
#define EPX_DEVICE_GPU_ENTRY_CUH

#include "device/gpu/prims.cuh"
#include "device/gpu/times.cuh"

#define SMEM_RANKS 64 /* ranks whose heap addresses and masks are kept in shared memory */

/* What every step of a kernel reads, in shared memory. */
template <typename params> struct smem_copy {
    struct agent agent[LAUNCH_WARPS];
    uint32_t arrived[BLOCK_POINTS];
    params p;
    struct group_dev g;
    struct handle_dev h;
    char *heap[SMEM_RANKS];
    int32_t mask[SMEM_RANKS];
};

KFN void copy_words(void *to, const void *from, size_t bytes)
{
    for (size_t i = threadIdx.x; i < bytes / 4; i += blockDim.x)
        ((uint32_t *)to)[i] = ((const uint32_t *)from)[i];
}

/* `marks`: NULL where a kernel has none. */
KFN void make_agent(struct agent *ag, const struct launch_info &info, uint32_t *arrived, int32_t *counts,
                    struct kernel_marks *marks)
{
    grid_wait(); /* what came before in the stream is done, and visible */
    words_begin(info.relaxed_words);
    if (threadIdx.x < BLOCK_POINTS)
        arrived[threadIdx.x] = 0;
    if (lane_id() == 0) {
        ag->index = (int)blockIdx.x + (int)(threadIdx.x / WARP) * (int)gridDim.x; /* neighbours on different SMs */
        ag->count = info.agents;
        ag->stage = info.stage;
        ag->narrow = 0;
        ag->scratch = info.scratch + (size_t)ag->index * info.scratch_stride;
        ag->scratch_bytes = info.scratch_stride;
        ag->arrived = arrived;
        ag->block_agents = (uint32_t)(info.agents - (int)blockIdx.x + (int)gridDim.x - 1) / gridDim.x;
        ag->counts = counts;
        ag->ring = info.rings ? ring_memory() + threadIdx.x / WARP * RING_BYTES : NULL;
        ag->ring_next = 0;
        if (ag->ring)
            ring_begin(ag->ring);
#if FLAVOUR_MARKS
        marks_begin(ag, info, marks);
#else
        (void)marks;
#endif
    }
    __syncthreads();
}

template <typename params>
KFN void copy_to_smem(struct smem_copy<params> *smem, const params &given, const struct launch_info &info)
{
    copy_words(&smem->p, &given, sizeof(given));
    copy_words(&smem->g, given.g, sizeof(smem->g));
    copy_words(&smem->h, given.h, sizeof(smem->h));
#if FLAVOUR_MARKS
    if (info.marks)
        marks_head(info.marks);
#endif
    __syncthreads();
    const int fits = smem->g.nranks <= SMEM_RANKS;
    if (fits) {
        copy_words(smem->heap, smem->g.heap, (size_t)smem->g.nranks * sizeof(char *));
        if (!FLAVOUR_ONE_NODE)
            copy_words(smem->mask, smem->g.mask, (size_t)smem->g.nranks * sizeof(int32_t));
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        if (fits)
            smem->g.heap = smem->heap;
        if (!FLAVOUR_ONE_NODE && fits && !smem->g.enable_mask) /* else it may change while the kernel runs */
            smem->g.mask = smem->mask;
        smem->p.g = &smem->g;
        smem->p.h = &smem->h;
        if (smem->g.is_watched)
            times_begin(smem->g.times, info.mark_what);
    }
    __syncthreads();
}

/*
 * A profile shows a kernel as epx_ll::dispatch, epx_ht::notify and so on: what reads profiles of DeepEP looks for
 * "::dispatch" and the like. The host finds it by a pointer with a plain name, epx_ll_dispatch.
 */
#define GPU_ENTRY(space, verb, name)                                          \
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

#if FLAVOUR_MARKS
#define KERNEL_MARKS_END() (block_marks.is_first && threadIdx.x < WARP ? marks_end() : (void)0)
#else
#define KERNEL_MARKS_END() ((void)0)
#endif

/* `counts`: a __shared__ array for the tables of routing, or NULL where there is none. */
#define GPU_KERNEL(space, verb, name, counts)                      \
    GPU_ENTRY(space, verb, name)                                   \
    {                                                              \
        __shared__ struct smem_copy<struct name##_params> smem;    \
        struct agent *agent = &smem.agent[threadIdx.x / WARP];     \
        make_agent(agent, info, smem.arrived, counts, info.marks); \
        copy_to_smem(&smem, params, info);                         \
        if (agent->index < agent->count)                           \
            kernel_##name(agent, &smem.p);                         \
        grid_next();                                               \
        KERNEL_MARKS_END();                                        \
        if (threadIdx.x == 0 && smem.g.is_watched)                 \
            times_end(smem.g.times, info.mark_what);               \
    }

/* Of small kernels: the parameters stay where they are. `counts` as above. */
#define GPU_KERNEL_TABLES(name, counts)                    \
    GPU_ENTRY(epx, name, name)                             \
    {                                                      \
        __shared__ struct agent agents[LAUNCH_WARPS];      \
        __shared__ uint32_t arrived[BLOCK_POINTS];         \
        struct agent *agent = &agents[threadIdx.x / WARP]; \
        make_agent(agent, info, arrived, counts, NULL);    \
        if (agent->index < agent->count)                   \
            kernel_##name(agent, &params);                 \
    }
#define GPU_KERNEL_SMALL(name) GPU_KERNEL_TABLES(name, NULL)

#endif
