/* SPDX-License-Identifier: Apache-2.0 */
/* GPU memory and network cards: how a card's writes become visible, and the dma-buf by which a card reaches a heap. */
#include <dlfcn.h>

#include "device/arrivals.h"
#include "device/gpu/gpu.h"

#ifndef __HIP_PLATFORM_AMD__

enum { HANDLE_DMA_BUF = 1 /* CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD */, DMA_BUF_SUPPORTED = 124 };

/* Of the driver's library, which the runtime has open anyway; the one name here that is not the runtime's. */
typedef int (*range_handle_fn)(void *handle, uint64_t address, size_t bytes, int type, unsigned long long flags);
typedef int (*attribute_fn)(int *value, int which, int device);

epx_status gpu_heap_dmabuf(struct device *device, const struct heap *heap, int *fd)
{
    const int index = ((struct gpu_device *)device)->index;
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    range_handle_fn range_handle = NULL;
    attribute_fn attribute = NULL;
    epx_status status = gpu_use(device);
    int can = 0, rc;

    *fd = -1;
    if (status != EPX_OK)
        return status;
    if (library) {
        *(void **)&range_handle = dlsym(library, "cuMemGetHandleForAddressRange");
        *(void **)&attribute = dlsym(library, "cuDeviceGetAttribute");
    }
    if (!range_handle || !attribute)
        return fail(EPX_ERR_UNSUPPORTED, "device cuda: the driver has no dma-bufs (CUDA 11.7 and later have)");
    if (attribute(&can, DMA_BUF_SUPPORTED, index) != 0 || !can)
        return fail(EPX_ERR_UNSUPPORTED, "device cuda: GPU %d hands out no dma-bufs", index);
    rc = range_handle(fd, (uint64_t)(uintptr_t)heap->base, heap->bytes, HANDLE_DMA_BUF, 0);
    if (rc == 0)
        return EPX_OK;
    *fd = -1;
    return fail(EPX_ERR_UNSUPPORTED, "device cuda: no dma-buf of the heap (cuMemGetHandleForAddressRange: error %d)",
                rc);
}

int gpu_arrivals(struct device *device)
{
    const int index = ((struct gpu_device *)device)->index;
    struct gpu_direct d = {0, 0, 0};

    if (cudaDeviceGetAttribute(&d.supported, cudaDevAttrGPUDirectRDMASupported, index) != cudaSuccess ||
        cudaDeviceGetAttribute(&d.ordering, cudaDevAttrGPUDirectRDMAWritesOrdering, index) != cudaSuccess ||
        cudaDeviceGetAttribute(&d.flush, cudaDevAttrGPUDirectRDMAFlushWritesOptions, index) != cudaSuccess) {
        (void)cudaGetLastError();
        d.supported = 0;
    }
    return arrival_rule((device->ops->caps & DEVICE_HOST_HEAP) != 0, &d);
}

epx_status gpu_flush_arrivals(struct device *device)
{
    epx_status status = gpu_use(device);

    if (status == EPX_OK)
        status = gpu_check(cudaDeviceFlushGPUDirectRDMAWrites(cudaFlushGPUDirectRDMAWritesTargetCurrentDevice,
                                                              cudaFlushGPUDirectRDMAWritesToOwner),
                           "cudaDeviceFlushGPUDirectRDMAWrites");
    return status;
}

#else /* HIP tells nothing of this: heaps of groups on several nodes lie in host memory. */

epx_status gpu_heap_dmabuf(struct device *device, const struct heap *heap, int *fd)
{
    (void)heap;
    *fd = -1;
    return fail(EPX_ERR_UNSUPPORTED, "device %s: no dma-bufs of its memory", device->ops->name);
}

int gpu_arrivals(struct device *device)
{
    const struct gpu_direct none = {0, 0, 0};

    return arrival_rule((device->ops->caps & DEVICE_HOST_HEAP) != 0, &none);
}

epx_status gpu_flush_arrivals(struct device *device)
{
    return fail(EPX_ERR_UNSUPPORTED, "device %s: cannot flush what a card wrote", device->ops->name);
}

#endif
