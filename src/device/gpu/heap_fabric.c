/* SPDX-License-Identifier: Apache-2.0 */
/* Heaps that the GPUs of other hosts map too: fabric.h has the way. */
#include <stdlib.h>
#include <string.h>

#include "device/gpu/fabric.h"
#include "device/gpu/gpu.h"

#ifndef __HIP_PLATFORM_AMD__

epx_status gpu_fabric(struct device *device, uint8_t id[64])
{
    const int index = ((struct gpu_device *)device)->index;
    uint8_t host[64];
    epx_status status = gpu_use(device);

    if (status == EPX_OK)
        status = gpu_host->cpu->identity(device, host);
    return status == EPX_OK ? fabric_identity(index, host, id) : status;
}

static epx_status clear(struct gpu_device *gpu, const struct heap *heap)
{
    epx_status status = gpu_check(cudaMemsetAsync(heap->base, 0, heap->bytes, gpu->side), "cudaMemsetAsync");

    if (status == EPX_OK)
        status = gpu_check(cudaStreamSynchronize(gpu->side), "clearing a heap");
    return status;
}

epx_status gpu_fabric_heap_create(struct device *device, uint64_t bytes, struct heap *heap)
{
    struct gpu_device *gpu = (struct gpu_device *)device;
    epx_status status = gpu_use(device);

    memset(heap, 0, sizeof(*heap));
    if (status == EPX_OK)
        status = fabric_heap_create(gpu->index, bytes, heap);
    if (status != EPX_OK)
        return status;
    status = clear(gpu, heap);
    if (status != EPX_OK) {
        fabric_heap_free(heap);
        memset(heap, 0, sizeof(*heap));
    }
    return status;
}

static void release_own(void *ptr, void *context)
{
    (void)ptr;
    fabric_heap_free(context);
    free(context);
}

static void release_peer(void *ptr, void *context)
{
    fabric_heap_unmap(ptr, ((struct heap_export *)context)->bytes);
    free(context);
}

void gpu_fabric_heap_destroy(struct device *device, struct heap *heap)
{
    struct heap *kept = heap->base ? malloc(sizeof(*kept)) : NULL;

    (void)device;
    if (kept) {
        *kept = *heap;
        gpu_later(release_own, heap->base, kept);
    }
    memset(heap, 0, sizeof(*heap));
}

epx_status gpu_fabric_heap_open(struct device *device, const struct heap_export *peer, void **base)
{
    epx_status status = gpu_use(device);

    *base = NULL;
    return status == EPX_OK ? fabric_heap_open(((struct gpu_device *)device)->index, peer, base) : status;
}

void gpu_fabric_heap_close(struct device *device, const struct heap_export *peer, void *base)
{
    struct heap_export *kept = base && fabric_heap_is_mapped(peer) ? malloc(sizeof(*kept)) : NULL;

    (void)device;
    if (!kept)
        return;
    *kept = *peer;
    gpu_later(release_peer, base, kept);
}

#else /* HIP has no fabric handles. */

epx_status gpu_fabric(struct device *device, uint8_t id[64])
{
    (void)id;
    return fail(EPX_ERR_UNSUPPORTED, "device %s has no fabric handles", device->ops->name);
}

epx_status gpu_fabric_heap_create(struct device *device, uint64_t bytes, struct heap *heap)
{
    (void)bytes;
    (void)heap;
    return fail(EPX_ERR_UNSUPPORTED, "device %s has no fabric handles", device->ops->name);
}

void gpu_fabric_heap_destroy(struct device *device, struct heap *heap)
{
    (void)device;
    (void)heap;
}

epx_status gpu_fabric_heap_open(struct device *device, const struct heap_export *peer, void **base)
{
    (void)peer;
    *base = NULL;
    return fail(EPX_ERR_UNSUPPORTED, "device %s has no fabric handles", device->ops->name);
}

void gpu_fabric_heap_close(struct device *device, const struct heap_export *peer, void *base)
{
    (void)device;
    (void)peer;
    (void)base;
}

#endif
