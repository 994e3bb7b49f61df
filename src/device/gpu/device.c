/* SPDX-License-Identifier: Apache-2.0 */
/* A GPU as a device: its operations tables, for heaps in its own memory, in the host's, and in memory that GPUs of
 * other hosts map. */
#include "device/gpu/gpu.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "device/gpu/launch.h"
#include "util/build.h"

#define SIDES_MOST 64

const struct device_host *gpu_host;

epx_status gpu_check(cudaError_t error, const char *what)
{
    if (error == cudaSuccess)
        return EPX_OK;
    (void)cudaGetLastError(); /* or the next launch would report it */
    return fail(error == cudaErrorMemoryAllocation ? EPX_ERR_MEMORY : EPX_ERR_SYSTEM, GPU_NAME ": %s: %s (%s)", what,
                cudaGetErrorString(error), cudaGetErrorName(error));
}

/* The current device belongs to the thread, and threads of callers and proxies come as they like. */
epx_status gpu_use(struct device *device)
{
    return gpu_check(cudaSetDevice(((struct gpu_device *)device)->index), "cudaSetDevice");
}

/*
 * The stream for copies of set-up, one per GPU for all devices of the process: a GPU has 32 queues for the streams of a
 * process, and two streams in one queue may wait for each other. Stays until the process ends.
 */
static epx_status side_stream(int index, cudaStream_t *side)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static cudaStream_t made[SIDES_MOST];
    epx_status status = EPX_OK;

    if (index >= SIDES_MOST)
        return fail(EPX_ERR_UNSUPPORTED, "device " GPU_NAME ": expected a device_index below %d, got %d", SIDES_MOST,
                    index);
    pthread_mutex_lock(&lock);
    if (!made[index])
        status = gpu_check(cudaStreamCreateWithFlags(&made[index], cudaStreamNonBlocking), "cudaStreamCreate");
    *side = made[index];
    pthread_mutex_unlock(&lock);
    return status;
}

static epx_status gpu_device_open(const struct device_ops *ops, int index, struct device **device)
{
    struct gpu_device *gpu;
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    epx_status status;

    *device = NULL;
    if (error != cudaSuccess)
        return fail(EPX_ERR_UNSUPPORTED, "device " GPU_NAME ": no GPU can be used: %s", cudaGetErrorString(error));
    if (index < 0 || index >= count)
        return fail(EPX_ERR_ARGUMENT, "device " GPU_NAME ": expected device_index 0 to %d, got %d", count - 1, index);
    gpu = calloc(1, sizeof(*gpu));
    if (!gpu)
        return fail(EPX_ERR_MEMORY, "device " GPU_NAME ": no memory for %zu bytes", sizeof(*gpu));
    gpu->base.ops = ops;
    gpu->index = index;
    status = gpu_use(&gpu->base);
    if (status == EPX_OK)
        status = gpu_check(cudaDeviceGetAttribute(&gpu->sms, cudaDevAttrMultiProcessorCount, index), "number of SMs");
    if (status == EPX_OK)
        status = gpu_kernels_load(gpu);
    if (status == EPX_OK)
        status = side_stream(index, &gpu->side);
    if (status != EPX_OK) {
        free(gpu);
        return status;
    }
    gpu_opened(gpu);
    *device = &gpu->base;
    return EPX_OK;
}

static void gpu_close(struct device *device)
{
    struct gpu_device *gpu = (struct gpu_device *)device;

    gpu_mem_free(device, gpu->scratch);
    gpu_closed(gpu);
    free(gpu);
}

/* Ranks that share a booted kernel and a user map each other's heaps: by an IPC handle, or a memory file. Whether one
 * GPU reaches the other is seen when the heap is opened. */
static epx_status identity(struct device *device, const char *name, uint8_t id[64])
{
    epx_status status = gpu_host->cpu->identity(device, id);

    if (status == EPX_OK)
        strncpy((char *)id, name, 8); /* filled up with zeros */
    return status;
}

static epx_status gpu_identity(struct device *device, uint8_t id[64])
{
    return identity(device, GPU_NAME, id);
}

static epx_status gpu_host_identity(struct device *device, uint8_t id[64])
{
    return identity(device, GPU_NAME "hst", id);
}

/* All ranks that share the GPU must run at the same time. A rank alone needs no more SMs than move what its links
 * carry, and leaves the others to computation. */
static void gpu_pci(struct device *device, char text[DEVICE_PCI])
{
    text[0] = 0;
    if (gpu_check(cudaDeviceGetPCIBusId(text, DEVICE_PCI, ((struct gpu_device *)device)->index), "PCI address") !=
        EPX_OK)
        text[0] = 0;
}

static int gpu_default_agents(struct device *device, int local_ranks)
{
    const int sms = ((struct gpu_device *)device)->sms / (local_ranks > 0 ? local_ranks : 1);

    return (sms < 1 ? 1 : sms < 32 ? sms : 32) * LAUNCH_WARPS;
}

static epx_status gpu_open(int index, struct device **device);
static epx_status gpu_heap_place(struct device *device, enum heap_place place);

static const struct device_ops gpu_ops = {
    .name = GPU_NAME,
    .kind = GPU_KIND,
    .caps = GPU_EXPORTS_REGIONS | DEVICE_GRAPHS | DEVICE_MARKS | DEVICE_MAPPED_HEAPS | DEVICE_OWN_LINKS,
    .open = gpu_open,
    .close = gpu_close,
    .identity = gpu_identity,
    .fabric = gpu_fabric,
    .pci = gpu_pci,
    .default_agents = gpu_default_agents,
    .agents_per_sm = LAUNCH_WARPS,
    .mem_alloc = gpu_mem_alloc,
    .mem_free = gpu_mem_free,
    .host_alloc = gpu_host_alloc,
    .host_free = gpu_host_free,
    .rows_reserve = gpu_rows_reserve,
    .clock = gpu_clock,
    .copy = gpu_copy,
    .heap_place = gpu_heap_place,
    .heap_create = gpu_heap_create,
    .heap_destroy = gpu_heap_destroy,
    .heap_open = gpu_heap_open,
    .heap_close = gpu_heap_close,
    .release = gpu_release,
    .heap_dmabuf = gpu_heap_dmabuf,
    .arrivals = gpu_arrivals,
    .flush_arrivals = gpu_flush_arrivals,
    .use = gpu_use,
    .region_id = gpu_region_id,
    .region_export = gpu_region_export,
    .region_open = gpu_region_open,
    .region_close = gpu_region_close,
    .stream_create = gpu_stream_create,
    .stream_destroy = gpu_stream_destroy,
    .stream_sync = gpu_stream_sync,
    .stream_query = gpu_stream_query,
    .stream_captures = gpu_stream_captures,
    .stream_call = gpu_stream_call,
    .stream_wait = gpu_stream_wait,
    .stream_copy = gpu_stream_copy,
    .launch = gpu_launch,
    .event_create = gpu_event_create,
    .event_destroy = gpu_event_destroy,
    .event_record = gpu_event_record,
    .event_sync = gpu_event_sync,
    .event_query = gpu_event_query,
    .timers_create = gpu_timers_create,
    .timers_destroy = gpu_timers_destroy,
    .timers_record = gpu_timers_record,
    .timers_elapsed = gpu_timers_elapsed,
    .graph_begin = gpu_graph_begin,
    .graph_end = gpu_graph_end,
    .graph_launch = gpu_graph_launch,
    .graph_destroy = gpu_graph_destroy,
};

/* The same with heaps in host memory, and with heaps for other hosts; made of the other when the module is opened. */
static struct device_ops gpu_host_ops, gpu_fabric_ops;

static void make_other_ops(void)
{
    gpu_fabric_ops = gpu_ops;
    gpu_fabric_ops.caps &= ~(unsigned)DEVICE_MAPPED_HEAPS; /* the driver keeps what others have mapped */
    gpu_fabric_ops.heap_create = gpu_fabric_heap_create;
    gpu_fabric_ops.heap_destroy = gpu_fabric_heap_destroy;
    gpu_fabric_ops.heap_open = gpu_fabric_heap_open;
    gpu_fabric_ops.heap_close = gpu_fabric_heap_close;
    gpu_host_ops = gpu_ops;
    gpu_host_ops.caps |= DEVICE_HOST_HEAP;
    gpu_host_ops.caps &= ~(unsigned)DEVICE_OWN_LINKS; /* rows in heaps cross the same bus */
    gpu_host_ops.identity = gpu_host_identity;
    gpu_host_ops.heap_create = gpu_host_heap_create;
    gpu_host_ops.heap_destroy = gpu_host_heap_destroy;
    gpu_host_ops.heap_open = gpu_host_heap_open;
    gpu_host_ops.heap_close = gpu_host_heap_close;
}

static epx_status gpu_open(int index, struct device **device)
{
    return gpu_device_open(&gpu_ops, index, device);
}

static epx_status gpu_heap_place(struct device *device, enum heap_place place)
{
    device->ops = place == HEAP_HOST ? &gpu_host_ops : place == HEAP_FABRIC ? &gpu_fabric_ops : &gpu_ops;
    return EPX_OK;
}

/* The one symbol of the module. */
__attribute__((visibility("default"))) const struct device_ops *epx_device_module(const struct device_host *host);

const struct device_ops *epx_device_module(const struct device_host *host)
{
    if (host->version != DEVICE_MODULE_VERSION || host->build != build_number() ||
        host->params_bytes != sizeof(struct group_dev) + sizeof(struct handle_dev))
        return NULL;
    gpu_host = host;
    make_other_ops();
    return &gpu_ops;
}
