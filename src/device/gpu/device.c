/* SPDX-License-Identifier: Apache-2.0 */
/* A GPU as a device: its operations tables, for heaps in its own memory, in the host's, and in memory that GPUs of
 * other hosts map. */
#include "device/gpu/gpu.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "device/gpu/launch.h"

#define SIDES_MOST 64

const struct device_host *cuda_host;

epx_status cuda_check(cudaError_t error, const char *what)
{
    if (error == cudaSuccess)
        return EPX_OK;
    (void)cudaGetLastError(); /* or the next launch would report it */
    return fail(error == cudaErrorMemoryAllocation ? EPX_ERR_MEMORY : EPX_ERR_SYSTEM, GPU_NAME ": %s: %s (%s)", what,
                cudaGetErrorString(error), cudaGetErrorName(error));
}

/* The current device belongs to the thread, and threads of callers and proxies come as they like. */
epx_status cuda_use(struct device *device)
{
    return cuda_check(cudaSetDevice(((struct cuda_device *)device)->index), "cudaSetDevice");
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
        return fail(EPX_ERR_UNSUPPORTED, "device cuda: expected a device_index below %d, got %d", SIDES_MOST, index);
    pthread_mutex_lock(&lock);
    if (!made[index])
        status = cuda_check(cudaStreamCreateWithFlags(&made[index], cudaStreamNonBlocking), "cudaStreamCreate");
    *side = made[index];
    pthread_mutex_unlock(&lock);
    return status;
}

static epx_status cuda_device_open(const struct device_ops *ops, int index, struct device **device)
{
    struct cuda_device *cuda;
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    epx_status status;

    *device = NULL;
    if (error != cudaSuccess)
        return fail(EPX_ERR_UNSUPPORTED, "device " GPU_NAME ": no GPU can be used: %s", cudaGetErrorString(error));
    if (index < 0 || index >= count)
        return fail(EPX_ERR_ARGUMENT, "device " GPU_NAME ": expected device_index 0 to %d, got %d", count - 1, index);
    cuda = calloc(1, sizeof(*cuda));
    if (!cuda)
        return fail(EPX_ERR_MEMORY, "device " GPU_NAME ": no memory for %zu bytes", sizeof(*cuda));
    cuda->base.ops = ops;
    cuda->index = index;
    status = cuda_use(&cuda->base);
    if (status == EPX_OK)
        status = cuda_check(cudaDeviceGetAttribute(&cuda->sms, cudaDevAttrMultiProcessorCount, index), "number of SMs");
    if (status == EPX_OK)
        status = cuda_kernels_load(cuda);
    if (status == EPX_OK)
        status = side_stream(index, &cuda->side);
    if (status != EPX_OK) {
        free(cuda);
        return status;
    }
    cuda_opened(cuda);
    *device = &cuda->base;
    return EPX_OK;
}

static void cuda_close(struct device *device)
{
    struct cuda_device *cuda = (struct cuda_device *)device;

    cuda_mem_free(device, cuda->scratch);
    cuda_closed(cuda);
    free(cuda);
}

/* Ranks that share a booted kernel and a user map each other's heaps: by an IPC handle, or a memory file. Whether one
 * GPU reaches the other is seen when the heap is opened. */
static epx_status identity(struct device *device, const char *name, uint8_t id[64])
{
    epx_status status = cuda_host->cpu->identity(device, id);

    if (status == EPX_OK)
        strncpy((char *)id, name, 8); /* filled up with zeros */
    return status;
}

static epx_status cuda_identity(struct device *device, uint8_t id[64])
{
    return identity(device, GPU_NAME, id);
}

static epx_status cuda_host_identity(struct device *device, uint8_t id[64])
{
    return identity(device, GPU_NAME "hst", id);
}

/* All ranks that share the GPU must run at the same time. A rank alone needs no more SMs than move what its links
 * carry, and leaves the others to computation. */
static void cuda_pci(struct device *device, char text[DEVICE_PCI])
{
    text[0] = 0;
    if (cuda_check(cudaDeviceGetPCIBusId(text, DEVICE_PCI, ((struct cuda_device *)device)->index), "PCI address") !=
        EPX_OK)
        text[0] = 0;
}

static int cuda_default_agents(struct device *device, int local_ranks)
{
    const int sms = ((struct cuda_device *)device)->sms / (local_ranks > 0 ? local_ranks : 1);

    return (sms < 1 ? 1 : sms < 32 ? sms : 32) * LAUNCH_WARPS;
}

static epx_status cuda_open(int index, struct device **device);
static epx_status cuda_heap_place(struct device *device, enum heap_place place);

static const struct device_ops cuda_ops = {
    .name = GPU_NAME,
    .kind = GPU_KIND,
    .caps = GPU_EXPORTS_REGIONS | DEVICE_GRAPHS | DEVICE_MARKS | DEVICE_MAPPED_HEAPS | DEVICE_OWN_LINKS,
    .open = cuda_open,
    .close = cuda_close,
    .identity = cuda_identity,
    .fabric = cuda_fabric,
    .pci = cuda_pci,
    .default_agents = cuda_default_agents,
    .agents_per_sm = LAUNCH_WARPS,
    .mem_alloc = cuda_mem_alloc,
    .mem_free = cuda_mem_free,
    .host_alloc = cuda_host_alloc,
    .host_free = cuda_host_free,
    .rows_reserve = cuda_rows_reserve,
    .clock = cuda_clock,
    .copy = cuda_copy,
    .heap_place = cuda_heap_place,
    .heap_create = cuda_heap_create,
    .heap_destroy = cuda_heap_destroy,
    .heap_open = cuda_heap_open,
    .heap_close = cuda_heap_close,
    .release = cuda_release,
    .heap_dmabuf = cuda_heap_dmabuf,
    .arrivals = cuda_arrivals,
    .flush_arrivals = cuda_flush_arrivals,
    .use = cuda_use,
    .region_id = cuda_region_id,
    .region_export = cuda_region_export,
    .region_open = cuda_region_open,
    .region_close = cuda_region_close,
    .stream_create = cuda_stream_create,
    .stream_destroy = cuda_stream_destroy,
    .stream_sync = cuda_stream_sync,
    .stream_query = cuda_stream_query,
    .stream_captures = cuda_stream_captures,
    .stream_call = cuda_stream_call,
    .stream_wait = cuda_stream_wait,
    .stream_copy = cuda_stream_copy,
    .launch = cuda_launch,
    .event_create = cuda_event_create,
    .event_destroy = cuda_event_destroy,
    .event_record = cuda_event_record,
    .event_sync = cuda_event_sync,
    .event_query = cuda_event_query,
    .timers_create = cuda_timers_create,
    .timers_destroy = cuda_timers_destroy,
    .timers_record = cuda_timers_record,
    .timers_elapsed = cuda_timers_elapsed,
    .graph_begin = cuda_graph_begin,
    .graph_end = cuda_graph_end,
    .graph_launch = cuda_graph_launch,
    .graph_destroy = cuda_graph_destroy,
};

/* The same with heaps in host memory, and with heaps for other hosts; made of the other when the module is opened. */
static struct device_ops cuda_host_ops, cuda_fabric_ops;

static void make_other_ops(void)
{
    cuda_fabric_ops = cuda_ops;
    cuda_fabric_ops.caps &= ~(unsigned)DEVICE_MAPPED_HEAPS; /* the driver keeps what others have mapped */
    cuda_fabric_ops.heap_create = cuda_fabric_heap_create;
    cuda_fabric_ops.heap_destroy = cuda_fabric_heap_destroy;
    cuda_fabric_ops.heap_open = cuda_fabric_heap_open;
    cuda_fabric_ops.heap_close = cuda_fabric_heap_close;
    cuda_host_ops = cuda_ops;
    cuda_host_ops.caps |= DEVICE_HOST_HEAP;
    cuda_host_ops.caps &= ~(unsigned)DEVICE_OWN_LINKS; /* rows in heaps cross the same bus */
    cuda_host_ops.identity = cuda_host_identity;
    cuda_host_ops.heap_create = cuda_host_heap_create;
    cuda_host_ops.heap_destroy = cuda_host_heap_destroy;
    cuda_host_ops.heap_open = cuda_host_heap_open;
    cuda_host_ops.heap_close = cuda_host_heap_close;
}

static epx_status cuda_open(int index, struct device **device)
{
    return cuda_device_open(&cuda_ops, index, device);
}

static epx_status cuda_heap_place(struct device *device, enum heap_place place)
{
    device->ops = place == HEAP_HOST ? &cuda_host_ops : place == HEAP_FABRIC ? &cuda_fabric_ops : &cuda_ops;
    return EPX_OK;
}

/* The one symbol of the module. */
__attribute__((visibility("default"))) const struct device_ops *epx_device_module(const struct device_host *host);

const struct device_ops *epx_device_module(const struct device_host *host)
{
    if (host->version != DEVICE_MODULE_VERSION ||
        host->params_bytes != sizeof(struct group_dev) + sizeof(struct handle_dev))
        return NULL;
    cuda_host = host;
    make_other_ops();
    return &cuda_ops;
}
