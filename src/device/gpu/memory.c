/* SPDX-License-Identifier: Apache-2.0 */
/* Device memory, pinned host memory, and freeing them when nothing runs. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "device/gpu/gpu.h"

/* ---- Later ------------------------------------------------------------------------------------------------------ */

struct late {
    void (*release)(void *ptr, void *context);
    void *ptr, *context;
    struct late *next;
};

#define LATE_MOST 64 /* pieces that are kept */

static struct late *late_list;
static int nlate;
static struct gpu_device *open_devices;
static pthread_mutex_t late_lock = PTHREAD_MUTEX_INITIALIZER;

void gpu_later(void (*release)(void *ptr, void *context), void *ptr, void *context)
{
    struct late *l = malloc(sizeof(*l));

    if (!l) {
        release(ptr, context);
        return;
    }
    pthread_mutex_lock(&late_lock);
    *l = (struct late){.release = release, .ptr = ptr, .context = context, .next = late_list};
    late_list = l;
    nlate++;
    pthread_mutex_unlock(&late_lock);
}

/* Under the lock: a device that is opened meanwhile must not launch before that is done. */
static void release_all(void)
{
    const int mode = gpu_capture_relax();

    while (late_list) {
        struct late *l = late_list;

        late_list = l->next;
        l->release(l->ptr, l->context);
        free(l);
    }
    nlate = 0;
    gpu_capture_restore(mode);
}

/* Under the lock. */
static int some_keeps(void)
{
    for (const struct gpu_device *gpu = open_devices; gpu; gpu = gpu->next)
        if (__atomic_load_n(&gpu->base.keeps, __ATOMIC_RELAXED))
            return 1;
    return 0;
}

/* Releases what is kept, if it is so many pieces. False: nothing was released. */
static int release_kept(int least)
{
    int release;

    pthread_mutex_lock(&late_lock);
    release = nlate >= least && !some_keeps();
    if (release)
        release_all();
    pthread_mutex_unlock(&late_lock);
    return release;
}

void gpu_opened(struct gpu_device *gpu)
{
    pthread_mutex_lock(&late_lock);
    gpu->next = open_devices;
    open_devices = gpu;
    pthread_mutex_unlock(&late_lock);
}

void gpu_closed(struct gpu_device *gpu)
{
    struct gpu_device **link = &open_devices;

    pthread_mutex_lock(&late_lock);
    while (*link != gpu)
        link = &(*link)->next;
    *link = gpu->next;
    pthread_mutex_unlock(&late_lock);
    (void)release_kept(1);
}

int gpu_release(void)
{
    return release_kept(0);
}

/* ---- Memory ----------------------------------------------------------------------------------------------------- */

static void release_device(void *ptr, void *context)
{
    (void)context;
    cudaFree(ptr);
}

static void release_host(void *ptr, void *context)
{
    (void)context;
    cudaFreeHost(ptr);
}

static epx_status try_alloc(size_t bytes, int shared, void **ptr)
{
    return shared ? gpu_check(gpuMallocShared(ptr, bytes), "allocating shared memory")
                  : gpu_check(cudaMalloc(ptr, bytes), "allocating memory");
}

epx_status gpu_mem_alloc_for(struct device *device, size_t bytes, int shared, void **ptr)
{
    struct gpu_device *gpu = (struct gpu_device *)device;
    epx_status status = gpu_use(device);
    const int mode = gpu_capture_relax();

    *ptr = NULL;
    if (status == EPX_OK) {
        (void)release_kept(LATE_MOST);
        status = try_alloc(bytes ? bytes : 1, shared, ptr);
    }
    if (status == EPX_ERR_MEMORY && release_kept(1))
        status = try_alloc(bytes ? bytes : 1, shared, ptr);
    if (status == EPX_OK)
        status = gpu_check(cudaMemsetAsync(*ptr, 0, bytes ? bytes : 1, gpu->side), "cudaMemsetAsync");
    if (status == EPX_OK)
        status = gpu_check(cudaStreamSynchronize(gpu->side), "clearing memory");
    gpu_capture_restore(mode);
    return status;
}

epx_status gpu_mem_alloc(struct device *device, size_t bytes, void **ptr)
{
    return gpu_mem_alloc_for(device, bytes, 0, ptr);
}

void gpu_mem_free(struct device *device, void *ptr)
{
    (void)device;
    if (ptr)
        gpu_later(release_device, ptr, NULL);
}

epx_status gpu_host_alloc(struct device *device, size_t bytes, void **ptr)
{
    epx_status status = gpu_use(device);
    const int mode = gpu_capture_relax();

    *ptr = NULL;
    if (status == EPX_OK)
        status = gpu_check(cudaHostAlloc(ptr, bytes ? bytes : 1, cudaHostAllocMapped | cudaHostAllocPortable),
                           "cudaHostAlloc");
    gpu_capture_restore(mode);
    if (status == EPX_OK)
        memset(*ptr, 0, bytes);
    return status;
}

void gpu_host_free(struct device *device, void *ptr)
{
    (void)device;
    if (ptr)
        gpu_later(release_host, ptr, NULL);
}

/*
 * Between the two calls the thread may do what a capture forbids because it might depend on captured work: allocate,
 * map, and wait for other streams. What EPX does so depends on no captured work.
 */
int gpu_capture_relax(void)
{
#ifdef EPX_HIP
    return 0;
#else
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    return cudaThreadExchangeStreamCaptureMode(&mode) == cudaSuccess ? (int)mode : (int)cudaStreamCaptureModeRelaxed;
#endif
}

void gpu_capture_restore(int mode)
{
#ifdef EPX_HIP
    (void)mode;
#else
    enum cudaStreamCaptureMode before = (enum cudaStreamCaptureMode)mode;
    (void)cudaThreadExchangeStreamCaptureMode(&before);
#endif
}

epx_status gpu_copy(struct device *device, void *to, const void *from, size_t bytes)
{
    struct gpu_device *gpu = (struct gpu_device *)device;
    epx_status status = bytes ? gpu_use(device) : EPX_OK;
    const int mode = gpu_capture_relax();

    if (status == EPX_OK && bytes)
        status = gpu_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, gpu->side), "cudaMemcpyAsync");
    if (status == EPX_OK && bytes)
        status = gpu_check(cudaStreamSynchronize(gpu->side), "copying memory");
    gpu_capture_restore(mode);
    return status;
}
