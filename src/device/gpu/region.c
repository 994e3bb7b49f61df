/* SPDX-License-Identifier: Apache-2.0 */
/* The caller's own memory that other ranks read in place: whole allocations, exported as IPC handles. */
#include <dlfcn.h>
#include <inttypes.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "device/gpu/gpu.h"

#ifndef __HIP_PLATFORM_AMD__

/* Smaller allocations share a block of memory with others, which a handle would export too; copying them is cheap. */
#define REGION_LEAST ((size_t)2 << 20)

/* Functions of the driver's library, which the runtime has open anyway. Attribute numbers are those of cuda.h. */
enum { BUFFER_ID = 7, DEVICE_ORDINAL = 9, IPC_CAPABLE = 10 };

static struct {
    int (*attributes)(unsigned count, const int *attributes, void **values, uint64_t address);
    int (*range)(uint64_t *base, size_t *bytes, uint64_t address);
} driver;

static void find_driver(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);

    if (!library)
        return;
    *(void **)&driver.attributes = dlsym(library, "cuPointerGetAttributes");
    *(void **)&driver.range = dlsym(library, "cuMemGetAddressRange_v2");
}

/* cuPointerGetAttributes returns zeros for memory that CUDA did not allocate. IPC_CAPABLE is 0 for host memory, for
 * memory of cudaMallocAsync and for mapped address ranges, such as PyTorch's expandable segments. */
uint64_t gpu_region_id(struct device *device, const void *data)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    static const int asked[] = {BUFFER_ID, IPC_CAPABLE, DEVICE_ORDINAL};
    uint64_t id = 0, capable = 0; /* wide enough for any boolean */
    int ordinal = -1;
    void *values[] = {&id, &capable, &ordinal};

    pthread_once(&once, find_driver);
    if (!driver.attributes || !driver.range || gpu_use(device) != EPX_OK)
        return 0;
    if (driver.attributes(3, asked, values, (uint64_t)(uintptr_t)data) != 0)
        return 0;
    return capable && ordinal == ((struct gpu_device *)device)->index ? id : 0;
}

epx_status gpu_region_export(struct device *device, const void *data, struct heap_export *region)
{
    const int index = ((struct gpu_device *)device)->index;
    cudaIpcMemHandle_t handle;
    uint64_t base = 0;
    size_t bytes = 0;
    int error, mode;
    epx_status status = gpu_use(device);

    if (status != EPX_OK)
        return status;
    error = driver.range(&base, &bytes, (uint64_t)(uintptr_t)data);
    if (error != 0)
        return fail(EPX_ERR_UNSUPPORTED,
                    "device " GPU_NAME ": no allocation found at %p (cuMemGetAddressRange: error %d)", data, error);
    if (bytes < REGION_LEAST)
        return fail(EPX_ERR_UNSUPPORTED,
                    "device " GPU_NAME ": expected an allocation of at least %zu bytes to export, got %zu",
                    REGION_LEAST, bytes);
    mode = gpu_capture_relax();
    status = gpu_check(cudaIpcGetMemHandle(&handle, (void *)(uintptr_t)base), "cudaIpcGetMemHandle");
    gpu_capture_restore(mode);
    if (status != EPX_OK)
        return status;
    memset(region, 0, sizeof(*region));
    region->bytes = bytes;
    region->address = base;
    region->pid = (int64_t)getpid();
    region->token = index;
    memcpy(region->opaque, &handle, sizeof(handle));
    return EPX_OK;
}

/* Like a heap in GPU memory, even where the heaps are in host memory. */
epx_status gpu_region_open(struct device *device, const struct heap_export *region, void **base)
{
    const int mode = gpu_capture_relax();
    const epx_status status = gpu_heap_open(device, region, base);

    gpu_capture_restore(mode);
    return status;
}

void gpu_region_close(struct device *device, const struct heap_export *region, void *base, int now)
{
    if (!now || region->pid == (int64_t)getpid())
        gpu_heap_close(device, region, base);
    else if (gpu_use(device) == EPX_OK && cudaIpcCloseMemHandle(base) != cudaSuccess)
        (void)cudaGetLastError(); /* the exporting process may have ended: there is nothing left to close */
}

#else /* hipMalloc memory is coherent between GPUs only at the start and end of kernels: not supported yet. */

uint64_t gpu_region_id(struct device *device, const void *data)
{
    (void)device;
    (void)data;
    return 0;
}

epx_status gpu_region_export(struct device *device, const void *data, struct heap_export *region)
{
    (void)region;
    return fail(EPX_ERR_UNSUPPORTED, "device %s: the memory at %p cannot be exported", device->ops->name, data);
}

epx_status gpu_region_open(struct device *device, const struct heap_export *region, void **base)
{
    *base = NULL;
    return fail(EPX_ERR_UNSUPPORTED, "device %s: a region of %" PRIu64 " bytes cannot be imported", device->ops->name,
                region->bytes);
}

void gpu_region_close(struct device *device, const struct heap_export *region, void *base, int now)
{
    (void)device;
    (void)region;
    (void)base;
    (void)now;
}

#endif
