/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Launches. All agents of a launch run at the same time, or one of them would wait for another that never starts: a
 * launch has no more blocks than the GPU holds at once. That other ranks on the same GPU fit too is the business of
 * whoever chooses the number of agents (gpu_default_agents, epx_group_config.num_agents).
 */
#include "device/gpu/launch.h"

#include "device/gpu/gpu.h"
#include "kernel/stages.h"

/* The address of a __global__ function is its name for the runtime (entry.cuh). */
extern const void *const epx_ll_dispatch, *const epx_ll_combine, *const epx_ll_combine_logfmt;
extern const void *const epx_ll_dispatch_one_node, *const epx_ll_combine_one_node;
extern const void *const epx_ll_combine_logfmt_one_node;
extern const void *const epx_ll_dispatch_marks, *const epx_ll_combine_marks;
extern const void *const epx_ht_notify, *const epx_ht_dispatch, *const epx_ht_combine;
extern const void *const epx_mask, *const epx_layout_count, *const epx_ring_bench;
void epx_first(void); /* first.cu; its address too */

static const void *const *const kernels[KERNEL_COUNT] = {
    [KERNEL_LL_DISPATCH] = &epx_ll_dispatch,
    [KERNEL_LL_COMBINE] = &epx_ll_combine,
    [KERNEL_LL_COMBINE_LOGFMT] = &epx_ll_combine_logfmt,
    [KERNEL_HT_NOTIFY] = &epx_ht_notify,
    [KERNEL_HT_DISPATCH] = &epx_ht_dispatch,
    [KERNEL_HT_COMBINE] = &epx_ht_combine,
    [KERNEL_MASK] = &epx_mask,
    [KERNEL_LAYOUT] = &epx_layout_count,
    [KERNEL_RING_BENCH] = &epx_ring_bench,
};

/* The flavours for one node without masks, which make no marks (kernel/flavour.h). */
static const void *const *const one_node_kernels[KERNEL_COUNT] = {
    [KERNEL_LL_DISPATCH] = &epx_ll_dispatch_one_node,
    [KERNEL_LL_COMBINE] = &epx_ll_combine_one_node,
    [KERNEL_LL_COMBINE_LOGFMT] = &epx_ll_combine_logfmt_one_node,
};

/* The same with marks, for a group that is traced. */
static const void *const *const marks_kernels[KERNEL_COUNT] = {
    [KERNEL_LL_DISPATCH] = &epx_ll_dispatch_marks,
    [KERNEL_LL_COMBINE] = &epx_ll_combine_marks,
};

static const void *entry_of(int id, int one_node, int marks)
{
    const void *const *const small = !one_node ? NULL : marks ? marks_kernels[id] : one_node_kernels[id];

    return small ? *small : *kernels[id];
}

/* More shared memory than every kernel may have is asked for in advance. */
static epx_status reserve_rings(const struct cudaFuncAttributes *attributes, enum kernel_id id, const void *entry)
{
#if RING_SLOTS
    if (attributes->binaryVersion >= 90 && (id == KERNEL_HT_COMBINE || id == KERNEL_LL_COMBINE_LOGFMT))
        return gpu_check(
            cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize, LAUNCH_WARPS * RING_BYTES),
            "shared memory for rings");
#endif
    (void)attributes;
    (void)id;
    (void)entry;
    return EPX_OK;
}

/* Asking loads the code now: the first launch might otherwise have to, and wait for kernels that wait for it. */
static epx_status kernel_load(struct gpu_device *gpu, enum kernel_id id, const void *entry)
{
    struct cudaFuncAttributes attributes;
    int blocks = 0;
    epx_status status = gpu_check(cudaFuncGetAttributes(&attributes, entry), "loading a kernel");

    if (status == EPX_OK)
        status = gpu_check(
            cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, entry, LAUNCH_WARPS * LAUNCH_LANES, 0), "occupancy");
    if (status == EPX_OK)
        status = reserve_rings(&attributes, id, entry);
    if (status != EPX_OK)
        return status;
    if (!gpu->resident[id] || blocks * gpu->sms < gpu->resident[id])
        gpu->resident[id] = blocks * gpu->sms;
    /* Code for older GPUs, also when it was compiled again for this one, does not wait for the launch before it
     * (grid_wait). */
    if (attributes.binaryVersion < 90 || attributes.ptxVersion < 90)
        gpu->overlaps_launches = 0;
    return EPX_OK;
}

epx_status gpu_kernels_load(struct gpu_device *gpu)
{
    epx_status status = EPX_OK;

    gpu->overlaps_launches = 1;
    for (int id = 0; id < KERNEL_COUNT && status == EPX_OK; id++) {
        gpu->resident[id] = 0;
        for (int flavour = 0; flavour < 3 && status == EPX_OK; flavour++)
            status = kernel_load(gpu, id, entry_of(id, flavour > 0, flavour > 1));
    }
    return status;
}

epx_status gpu_first_launch(cudaStream_t stream)
{
    static void (*const first)(void) = epx_first;
    const dim3 one = {1, 1, 1}, block = {LAUNCH_LANES, 1, 1};
    void *arguments[] = {NULL};

    return gpu_check(cudaLaunchKernel(*(const void *const *)&first, one, block, arguments, 0, stream), "first launch");
}

static size_t whole(size_t n, size_t unit)
{
    return (n + unit - 1) / unit * unit;
}

/* Memory for one row per agent, as far as this kernel asks for it. */
static size_t scratch_row(enum kernel_id id, const void *params)
{
    const struct signature *a;

    if (id == KERNEL_HT_DISPATCH && ((const struct ht_dispatch_params *)params)->in.cast)
        a = &((const struct ht_dispatch_params *)params)->signature;
    else if (id == KERNEL_LL_DISPATCH && ((const struct ll_dispatch_params *)params)->in.cast)
        a = &((const struct ll_dispatch_params *)params)->signature;
    else
        return 0;
    return whole(whole((size_t)a->hidden_bytes, 16) + (size_t)a->scale_bytes, 256);
}

/*
 * Before the first launch: memory is not always had while kernels run, and those of other ranks may already wait for
 * the launch that needs it. Operations of a group run one after the other, whatever their streams: one scratch serves
 * them all.
 */
epx_status gpu_rows_reserve(struct device *device, size_t row_bytes, int agents)
{
    struct gpu_device *gpu = (struct gpu_device *)device;
    /* Blocks have equal numbers of warps: the last ones may have no agent. */
    const size_t warps = (size_t)agents + whole((size_t)agents, LAUNCH_WARPS) / LAUNCH_WARPS;
    const size_t bytes = whole(row_bytes, 256) * warps;
    void *block;
    epx_status status = gpu_use(device);

    if (status == EPX_OK)
        status = gpu_mem_alloc(device, bytes, &block);
    if (status != EPX_OK)
        return status;
    gpu_mem_free(device, gpu->scratch);
    gpu->scratch = block;
    gpu->scratch_bytes = bytes;
    return EPX_OK;
}

/* Asking for the thread's device is cheaper than setting it, and most callers have the right one. */
static epx_status use_for_launch(struct device *device)
{
    int current = -1;

    if (cudaGetDevice(&current) == cudaSuccess && current == ((struct gpu_device *)device)->index)
        return EPX_OK;
    return gpu_use(device);
}

/* Where the GPU can: prepared while the launch before it still runs; kernels wait for its end themselves
 * (grid_wait). */
static cudaError_t launch_next(const struct gpu_device *gpu, const void *kernel, dim3 grid, dim3 block,
                               size_t shared_bytes, void **arguments, cudaStream_t stream)
{
#ifdef EPX_HIP
    (void)gpu;
#else
    cudaLaunchAttribute early = {.id = cudaLaunchAttributeProgrammaticStreamSerialization};
    cudaLaunchConfig_t config = {.gridDim = grid,
                                 .blockDim = block,
                                 .dynamicSmemBytes = shared_bytes,
                                 .stream = stream,
                                 .attrs = &early,
                                 .numAttrs = 1};

    early.val.programmaticStreamSerializationAllowed = 1;
    if (gpu->overlaps_launches)
        return cudaLaunchKernelExC(&config, kernel, arguments);
#endif
    return cudaLaunchKernel(kernel, grid, block, arguments, shared_bytes, stream);
}

static epx_status launch_stage(struct device *device, struct device_stream *stream, enum kernel_id id,
                               const void *params, int agents, int stage, uint32_t place)
{
    struct gpu_device *gpu = (struct gpu_device *)device;
    struct launch_info info = {.agents = agents,
                               .stage = stage,
                               .relaxed_words = gpu_host->relaxed_atomics,
                               .marks = device->marks,
                               .mark_what = MARK_WHAT(MARK_LAUNCH, place, id)};
    void *arguments[] = {(void *)(uintptr_t)params, &info};
    dim3 grid = {1, 1, 1}, block = {LAUNCH_LANES, 1, 1};

    grid.x = (unsigned)((agents + LAUNCH_WARPS - 1) / LAUNCH_WARPS);
    if (grid.x > (unsigned)gpu->resident[id])
        grid.x = (unsigned)gpu->resident[id];
    if (info.agents > (int)grid.x * LAUNCH_WARPS)
        info.agents = (int)grid.x * LAUNCH_WARPS;
    block.x = LAUNCH_LANES * (((unsigned)info.agents + grid.x - 1) / grid.x);
    info.scratch_stride = scratch_row(id, params);
    if (info.scratch_stride * (size_t)grid.x * (block.x / LAUNCH_LANES) > gpu->scratch_bytes)
        return fail(EPX_ERR_MEMORY, "device %s: rows of %zu bytes for %d agents are more than was reserved",
                    device->ops->name, info.scratch_stride, info.agents);
    info.scratch = gpu->scratch;
    info.rings = RING_SLOTS && gpu->overlaps_launches && launch_has_rings(id, stage);
    const size_t rings = info.rings ? block.x / LAUNCH_LANES * (size_t)RING_BYTES : 0;
    const void *entry = entry_of(id, launch_is_one_node(id, params), device->marks != NULL);
    return gpu_check(launch_next(gpu, entry, grid, block, rings, arguments, (cudaStream_t)stream), "launch");
}

/* A gate is one warp: what waits for peers leaves the GPU to others. */
epx_status gpu_launch(struct device *device, struct device_stream *stream, enum kernel_id id, const void *params,
                      size_t bytes, int agents)
{
    const struct stage_list list = kernel_stages(id, params);
    epx_status status = use_for_launch(device);

    (void)bytes;
    for (int i = 0; i < stage_launches(&list) && status == EPX_OK; i++) {
        const int stage = stage_launch(&list, i);
        status = launch_stage(device, stream, id, params, stage_is_gate(&list, stage) ? 1 : agents, stage,
                              stage_place(&list, i));
    }
    return status;
}
