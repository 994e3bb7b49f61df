/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A module that takes the place of libepx_cuda.so: the CPU device under the name of a GPU. Its heaps for other hosts
 * are made as on a GPU, by src/device/gpu/fabric.c and the driver of fake_driver.c.
 */
#include <stdlib.h>
#include <string.h>

#include "../lib/device_module.h"
#include "device/gpu/fabric.h"

const struct device_host *gpu_host; /* fabric.c's */
static struct device_ops fabric_ops;

static epx_status fabric(struct device *device, uint8_t id[64])
{
    uint8_t own[64];
    const epx_status status = host->cpu->identity(device, own);

    return status == EPX_OK ? fabric_identity(0, own, id) : status;
}

static epx_status heap_place(struct device *device, enum heap_place place)
{
    device->ops = place == HEAP_FABRIC ? &fabric_ops : &ops;
    return EPX_OK;
}

static epx_status heap_create(struct device *device, uint64_t bytes, struct heap *heap)
{
    (void)device;
    return fabric_heap_create(0, bytes, heap);
}

static void heap_destroy(struct device *device, struct heap *heap)
{
    (void)device;
    if (heap->base)
        fabric_heap_free(heap);
    memset(heap, 0, sizeof(*heap));
}

static epx_status heap_open(struct device *device, const struct heap_export *peer, void **base)
{
    (void)device;
    return fabric_heap_open(0, peer, base);
}

static void heap_close(struct device *device, const struct heap_export *peer, void *base)
{
    (void)device;
    if (base && fabric_heap_is_mapped(peer))
        fabric_heap_unmap(base, peer->bytes);
}

const struct device_ops *epx_device_module(const struct device_host *given)
{
    gpu_host = given;
    if (!make_ops(given, "cuda", EPX_DEVICE_CUDA))
        return NULL;
    ops.fabric = fabric;
    ops.heap_place = heap_place;
    if (getenv("FAKE_GPU_MEMORY")) /* the host copies what kernels count, as on a GPU */
        ops.caps &= ~(unsigned)DEVICE_HOST_ACCESS;
    fabric_ops = ops;
    fabric_ops.heap_create = heap_create;
    fabric_ops.heap_destroy = heap_destroy;
    fabric_ops.heap_open = heap_open;
    fabric_ops.heap_close = heap_close;
    return &ops;
}
