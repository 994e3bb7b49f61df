/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The heap of a rank, which the other ranks of the node map too.
 *
 *   in GPU memory:  gpuMallocShared, cudaIpcGetMemHandle  --->  cudaIpcOpenMemHandle (another process)
 *                                                               the same address (the same process)
 *   in host memory: the CPU device's memory file          --->  the same file, mapped; both register it with CUDA
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "device/gpu/gpu.h"

/* The runtime serves what is smaller out of common pieces, which a handle would export whole. */
#define HEAP_UNIT ((uint64_t)2 << 20)

EPX_STATIC_ASSERT(sizeof(cudaIpcMemHandle_t) <= sizeof(((struct heap_export *)0)->opaque), "fits");

static void release_heap(void *ptr, void *context)
{
    (void)context;
    cudaFree(ptr);
}

static void release_peer(void *ptr, void *context)
{
    (void)context;
    if (cudaIpcCloseMemHandle(ptr) != cudaSuccess)
        (void)cudaGetLastError(); /* the exporting process may have ended: there is nothing left to close */
}

epx_status gpu_heap_create(struct device *device, uint64_t bytes, struct heap *heap)
{
    struct gpu_device *gpu = (struct gpu_device *)device;
    cudaIpcMemHandle_t handle;
    epx_status status;

    memset(heap, 0, sizeof(*heap));
    bytes = (bytes + HEAP_UNIT - 1) / HEAP_UNIT * HEAP_UNIT;
    status = gpu_mem_alloc_for(device, bytes, 1, &heap->base);
    if (status != EPX_OK)
        return status;
    status = gpu_check(cudaIpcGetMemHandle(&handle, heap->base), "cudaIpcGetMemHandle");
    if (status != EPX_OK) {
        cudaFree(heap->base);
        heap->base = NULL;
        return status;
    }
    heap->bytes = bytes;
    heap->export = (struct heap_export){
        .bytes = bytes, .address = (uint64_t)(uintptr_t)heap->base, .pid = (int64_t)getpid(), .token = gpu->index};
    memcpy(heap->export.opaque, &handle, sizeof(handle));
    return EPX_OK;
}

void gpu_heap_destroy(struct device *device, struct heap *heap)
{
    (void)device;
    if (heap->base)
        gpu_later(release_heap, heap->base, NULL);
    memset(heap, 0, sizeof(*heap));
}

/* Another GPU of the same process. */
static epx_status reach_gpu(struct gpu_device *gpu, int peer)
{
    cudaError_t error = cudaErrorPeerAccessAlreadyEnabled;

    if (peer != gpu->index)
        error = cudaDeviceEnablePeerAccess(peer, 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled) {
        (void)cudaGetLastError();
        return EPX_OK;
    }
    return gpu_check(error, "cudaDeviceEnablePeerAccess");
}

epx_status gpu_heap_open(struct device *device, const struct heap_export *peer, void **base)
{
    cudaIpcMemHandle_t handle;
    epx_status status = gpu_use(device);

    *base = NULL;
    if (status != EPX_OK)
        return status;
    if (peer->pid == (int64_t)getpid()) {
        status = reach_gpu((struct gpu_device *)device, (int)peer->token);
        *base = status == EPX_OK ? (void *)(uintptr_t)peer->address : NULL;
        return status;
    }
    memcpy(&handle, peer->opaque, sizeof(handle));
    return gpu_check(cudaIpcOpenMemHandle(base, handle, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
}

void gpu_heap_close(struct device *device, const struct heap_export *peer, void *base)
{
    (void)device;
    if (base && peer->pid != (int64_t)getpid())
        gpu_later(release_peer, base, NULL);
}

/* ---- In host memory --------------------------------------------------------------------------------------------- */

static epx_status register_heap(struct device *device, void *base, uint64_t bytes)
{
    epx_status status = gpu_use(device);

    if (status == EPX_OK)
        status = gpu_check(cudaHostRegister(base, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable),
                           "cudaHostRegister");
    return status;
}

static void release_host_heap(void *ptr, void *context)
{
    struct heap *heap = context;

    cudaHostUnregister(ptr);
    gpu_host->cpu->heap_destroy(NULL, heap);
    free(heap);
}

static void release_host_peer(void *ptr, void *context)
{
    struct heap_export *peer = context;

    if (peer->pid != (int64_t)getpid())
        cudaHostUnregister(ptr);
    gpu_host->cpu->heap_close(NULL, peer, ptr);
    free(peer);
}

epx_status gpu_host_heap_create(struct device *device, uint64_t bytes, struct heap *heap)
{
    epx_status status = gpu_host->cpu->heap_create(NULL, bytes, heap);

    if (status != EPX_OK)
        return status;
    status = register_heap(device, heap->base, heap->bytes);
    if (status != EPX_OK)
        gpu_host->cpu->heap_destroy(NULL, heap);
    return status;
}

void gpu_host_heap_destroy(struct device *device, struct heap *heap)
{
    struct heap *kept = malloc(sizeof(*kept));

    (void)device;
    if (heap->base && kept) {
        *kept = *heap;
        gpu_later(release_host_heap, heap->base, kept);
    } else {
        free(kept);
    }
    memset(heap, 0, sizeof(*heap));
}

epx_status gpu_host_heap_open(struct device *device, const struct heap_export *peer, void **base)
{
    epx_status status = gpu_host->cpu->heap_open(NULL, peer, base);

    if (status != EPX_OK || peer->pid == (int64_t)getpid())
        return status;
    status = register_heap(device, *base, peer->bytes);
    if (status != EPX_OK)
        gpu_host->cpu->heap_close(NULL, peer, *base);
    return status;
}

void gpu_host_heap_close(struct device *device, const struct heap_export *peer, void *base)
{
    struct heap_export *kept = malloc(sizeof(*kept));

    (void)device;
    if (!base || !kept) {
        free(kept);
        return;
    }
    *kept = *peer;
    gpu_later(release_host_peer, base, kept);
}
