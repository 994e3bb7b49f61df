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

static struct late *late_list;
static int open_devices;
static pthread_mutex_t late_lock = PTHREAD_MUTEX_INITIALIZER;

void cuda_later(void (*release)(void *ptr, void *context), void *ptr, void *context)
{
    struct late *l = malloc(sizeof(*l));

    if (!l) {
        release(ptr, context);
        return;
    }
    pthread_mutex_lock(&late_lock);
    *l = (struct late){.release = release, .ptr = ptr, .context = context, .next = late_list};
    late_list = l;
    pthread_mutex_unlock(&late_lock);
}

static void release_all(struct late *l)
{
    while (l) {
        struct late *next = l->next;
        l->release(l->ptr, l->context);
        free(l);
        l = next;
    }
}

void cuda_opened(void)
{
    pthread_mutex_lock(&late_lock);
    open_devices++;
    pthread_mutex_unlock(&late_lock);
}

/* The last one frees what was kept. Under the lock: a device opened meanwhile must not launch before that is done. */
void cuda_closed(void)
{
    pthread_mutex_lock(&late_lock);
    if (--open_devices == 0) {
        struct late *list = late_list;
        late_list = NULL;
        release_all(list);
    }
    pthread_mutex_unlock(&late_lock);
}

int cuda_release(void)
{
    int release;

    pthread_mutex_lock(&late_lock);
    release = open_devices == 0;
    if (release) {
        struct late *list = late_list;
        late_list = NULL;
        release_all(list);
    }
    pthread_mutex_unlock(&late_lock);
    return release;
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

epx_status cuda_mem_alloc_for(struct device *device, size_t bytes, int shared, void **ptr)
{
    struct cuda_device *cuda = (struct cuda_device *)device;
    epx_status status = cuda_use(device);

    *ptr = NULL;
    if (status == EPX_OK && shared)
        status = cuda_check(gpuMallocShared(ptr, bytes ? bytes : 1), "allocating shared memory");
    else if (status == EPX_OK)
        status = cuda_check(cudaMalloc(ptr, bytes ? bytes : 1), "allocating memory");
    if (status == EPX_OK)
        status = cuda_check(cudaMemsetAsync(*ptr, 0, bytes ? bytes : 1, cuda->side), "cudaMemsetAsync");
    if (status == EPX_OK)
        status = cuda_check(cudaStreamSynchronize(cuda->side), "clearing memory");
    return status;
}

epx_status cuda_mem_alloc(struct device *device, size_t bytes, void **ptr)
{
    return cuda_mem_alloc_for(device, bytes, 0, ptr);
}

void cuda_mem_free(struct device *device, void *ptr)
{
    (void)device;
    if (ptr)
        cuda_later(release_device, ptr, NULL);
}

epx_status cuda_host_alloc(struct device *device, size_t bytes, void **ptr)
{
    epx_status status = cuda_use(device);

    *ptr = NULL;
    if (status == EPX_OK)
        status = cuda_check(cudaHostAlloc(ptr, bytes ? bytes : 1, cudaHostAllocMapped | cudaHostAllocPortable),
                            "cudaHostAlloc");
    if (status == EPX_OK)
        memset(*ptr, 0, bytes);
    return status;
}

void cuda_host_free(struct device *device, void *ptr)
{
    (void)device;
    if (ptr)
        cuda_later(release_host, ptr, NULL);
}

/*
 * Between the two calls the thread may do what a capture forbids because it might depend on captured work: allocate,
 * map, and wait for other streams. What EPX does so depends on no captured work.
 */
int cuda_capture_relax(void)
{
#ifdef EPX_HIP
    return 0;
#else
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    return cudaThreadExchangeStreamCaptureMode(&mode) == cudaSuccess ? (int)mode : (int)cudaStreamCaptureModeRelaxed;
#endif
}

void cuda_capture_restore(int mode)
{
#ifdef EPX_HIP
    (void)mode;
#else
    enum cudaStreamCaptureMode before = (enum cudaStreamCaptureMode)mode;
    (void)cudaThreadExchangeStreamCaptureMode(&before);
#endif
}

epx_status cuda_copy(struct device *device, void *to, const void *from, size_t bytes)
{
    struct cuda_device *cuda = (struct cuda_device *)device;
    epx_status status = bytes ? cuda_use(device) : EPX_OK;
    const int mode = cuda_capture_relax();

    if (status == EPX_OK && bytes)
        status = cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, cuda->side), "cudaMemcpyAsync");
    if (status == EPX_OK && bytes)
        status = cuda_check(cudaStreamSynchronize(cuda->side), "copying memory");
    cuda_capture_restore(mode);
    return status;
}
