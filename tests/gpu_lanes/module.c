/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A device module whose GPU is emulated by the CPU: the CPU device's memory, heaps and streams, and the GPU's kernels
 * on lanes (lanes.h). A launch has a thread per block.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "../lib/device_module.h"
#include "device/gpu/launch.h"
#include "kernel/stages.h"
#include "bus.h"
#include "lanes.h"

#define SCRATCH_BYTES ((size_t)1 << 17) /* of an agent: one row and its scales */

#define KERNEL(name)                                                                      \
    extern const void *const epx_##name; /* its address: entry.cuh */                     \
    static void run_##name(const void *params, const void *info)                          \
    {                                                                                     \
        void (*kernel)(struct name##_params, struct launch_info);                         \
                                                                                          \
        memcpy(&kernel, &epx_##name, sizeof(kernel));                                     \
        kernel(*(const struct name##_params *)params, *(const struct launch_info *)info); \
    }
KERNEL(ll_dispatch)
KERNEL(ll_combine)
#define ll_combine_logfmt_params ll_combine_params
KERNEL(ll_combine_logfmt)
#define ll_dispatch_one_node_params ll_dispatch_params
#define ll_combine_one_node_params ll_combine_params
#define ll_combine_logfmt_one_node_params ll_combine_params
KERNEL(ll_dispatch_one_node)
KERNEL(ll_combine_one_node)
KERNEL(ll_combine_logfmt_one_node)
KERNEL(ht_notify)
KERNEL(ht_dispatch)
KERNEL(ht_combine)
KERNEL(mask)
KERNEL(layout_count)
KERNEL(ring_bench)

struct job {
    enum kernel_id id;
    int agents, stage, one_node;
    struct kernel_marks *marks;
    uint32_t mark_what;
    _Alignas(16) char params[KERNEL_PARAMS_MAX];
};

static void (*entry_of(enum kernel_id id, int one_node))(const void *, const void *)
{
    switch (id) {
    case KERNEL_LL_DISPATCH:
        return one_node ? run_ll_dispatch_one_node : run_ll_dispatch;
    case KERNEL_LL_COMBINE:
        return one_node ? run_ll_combine_one_node : run_ll_combine;
    case KERNEL_LL_COMBINE_LOGFMT:
        return one_node ? run_ll_combine_logfmt_one_node : run_ll_combine_logfmt;
    case KERNEL_HT_NOTIFY:
        return run_ht_notify;
    case KERNEL_HT_DISPATCH:
        return run_ht_dispatch;
    case KERNEL_HT_COMBINE:
        return run_ht_combine;
    case KERNEL_MASK:
        return run_mask;
    case KERNEL_LAYOUT:
        return run_layout_count;
    case KERNEL_RING_BENCH:
        return run_ring_bench;
    default:
        return NULL;
    }
}

struct part {
    const struct lanes_launch *launch;
    unsigned block;
    uint64_t chain; /* bus.h */
    pthread_t thread;
};

static void *run_part(void *arg)
{
    struct part *part = arg;

    lanes_run_block(part->launch, part->block);
    part->chain = bus_chain(part->launch->threads);
    return NULL;
}

static void run_job(void *arg)
{
    struct job *job = arg;
    const unsigned blocks = (unsigned)(job->agents + LAUNCH_WARPS - 1) / LAUNCH_WARPS;
    const unsigned warps = ((unsigned)job->agents + blocks - 1) / blocks;
    struct launch_info info = {.agents = job->agents, .stage = job->stage, .scratch_stride = SCRATCH_BYTES};
    info.marks = job->marks;
    info.mark_what = job->mark_what;
    info.rings = RING_SLOTS && launch_has_rings(job->id, job->stage);
    const struct lanes_launch launch = {
        entry_of(job->id, job->one_node), job->params, &info, LAUNCH_LANES, warps * LAUNCH_LANES, blocks};
    struct part *parts = calloc(blocks, sizeof(*parts));
    uint64_t chain = 0;

    info.scratch = malloc(SCRATCH_BYTES * blocks * warps);
    if (!parts || !info.scratch)
        abort();
    for (unsigned b = 0; b < blocks; b++) {
        parts[b] = (struct part){.launch = &launch, .block = b};
        if (pthread_create(&parts[b].thread, NULL, run_part, &parts[b]) != 0)
            abort();
    }
    for (unsigned b = 0; b < blocks; b++) {
        pthread_join(parts[b].thread, NULL);
        chain = parts[b].chain > chain ? parts[b].chain : chain;
    }
    bus_launched((int)job->id, STAGE_NUMBER(job->stage), chain);
    free(info.scratch);
    free(parts);
    free(job);
}

static epx_status launch_stage(struct device *device, struct device_stream *stream, enum kernel_id id,
                               const void *params, size_t bytes, int agents, int stage, uint32_t place)
{
    struct job *job = malloc(sizeof(*job));

    if (!job || !entry_of(id, 0) || bytes > sizeof(job->params)) {
        free(job);
        return host->fail(EPX_ERR_UNSUPPORTED, "device %s: no kernel %d here", ops.name, (int)id);
    }
    job->id = id;
    job->agents = agents;
    job->stage = stage;
    job->one_node = !device->marks && launch_is_one_node(id, params);
    job->marks = device->marks;
    job->mark_what = MARK_WHAT(MARK_LAUNCH, place, id);
    memcpy(job->params, params, bytes);
    return host->cpu->stream_call(device, stream, run_job, job);
}

static epx_status launch(struct device *device, struct device_stream *stream, enum kernel_id id, const void *params,
                         size_t bytes, int agents)
{
    const struct stage_list list = kernel_stages(id, params);
    epx_status status = EPX_OK;

    for (int i = 0; i < stage_launches(&list) && status == EPX_OK; i++) {
        const int stage = stage_launch(&list, i);
        status = launch_stage(device, stream, id, params, bytes, stage_is_gate(&list, stage) ? 1 : agents, stage,
                              stage_place(&list, i));
    }
    return status;
}

static int default_agents(struct device *device, int local_ranks)
{
    (void)device;
    (void)local_ranks;
    return LAUNCH_WARPS + 1; /* two blocks, of which the second is not full */
}

/* As on a GPU whose heaps are in host memory: what is there, and what proxies write, is across a bus. */
static epx_status host_alloc(struct device *device, size_t bytes, void **ptr)
{
    const epx_status status = host->cpu->host_alloc(device, bytes, ptr);

    if (status == EPX_OK)
        bus_add(*ptr, bytes);
    return status;
}

static epx_status heap_create(struct device *device, uint64_t bytes, struct heap *heap)
{
    const epx_status status = host->cpu->heap_create(device, bytes, heap);

    if (status == EPX_OK)
        bus_add(heap->base, bytes);
    return status;
}

static epx_status heap_open(struct device *device, const struct heap_export *peer, void **base)
{
    const epx_status status = host->cpu->heap_open(device, peer, base);

    if (status == EPX_OK)
        bus_add(*base, peer->bytes);
    return status;
}

static epx_status no_graph(struct device *device, struct device_stream *stream)
{
    (void)device;
    (void)stream;
    return host->fail(EPX_ERR_UNSUPPORTED, "device %s: emulated lanes have no graphs", ops.name);
}

const struct device_ops *epx_device_module(const struct device_host *given)
{
#ifdef EPX_HIP
    if (!make_ops(given, "hip", EPX_DEVICE_HIP))
#else
    if (!make_ops(given, "cuda", EPX_DEVICE_CUDA))
#endif
        return NULL;
    ops.default_agents = default_agents;
    ops.launch = launch;
    ops.agents_per_sm = LAUNCH_WARPS;
    ops.host_alloc = host_alloc;
    ops.heap_create = heap_create;
    ops.heap_open = heap_open;
    if (getenv("FAKE_GPU_MEMORY")) /* the host copies what kernels count, as on a GPU */
        ops.caps &= ~(unsigned)DEVICE_HOST_ACCESS;
    ops.caps |= DEVICE_MARKS; /* by the CPU device's clock */
#ifndef EPX_HIP
    ops.caps |= DEVICE_OWN_LINKS; /* as on a GPU; the other way of low latency between nodes is tested, too */
#endif
    ops.caps &= ~(unsigned)DEVICE_GRAPHS; /* a job is freed when it has run: it cannot be launched again */
    ops.graph_begin = no_graph;
    return &ops;
}
