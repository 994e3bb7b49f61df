/* SPDX-License-Identifier: Apache-2.0 */
#include "tensor_memory.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "group/objects.h"

/*
 * Pinning memory may wait for the kernels that run, which may wait for this very thread: one piece is pinned once, and
 * handed out from front to back until all of it has come back.
 */
#define ARENA_BYTES ((size_t)1 << 30)

static struct {
    pthread_mutex_t lock;
    char *base;
    size_t used;
    int living;
} arena = {.lock = PTHREAD_MUTEX_INITIALIZER};

epx_device test_device(void)
{
    const char *name = getenv("EPX_TEST_DEVICE");

    if (name && strcmp(name, "cuda") == 0)
        return EPX_DEVICE_CUDA;
    return name && strcmp(name, "hip") == 0 ? EPX_DEVICE_HIP : EPX_DEVICE_CPU;
}

static int host_reaches(const epx_group *group)
{
    return (group->device->ops->caps & DEVICE_HOST_ACCESS) != 0;
}

void *tensor_memory(epx_group *group, size_t bytes)
{
    void *ptr = NULL;

    if (host_reaches(group))
        return posix_memalign(&ptr, 64, bytes) == 0 ? ptr : NULL;
    bytes = (bytes + 255) / 256 * 256;
    pthread_mutex_lock(&arena.lock);
    if (!arena.base) {
        void *base;
        if (group->device->ops->host_alloc(group->device, ARENA_BYTES, &base) == EPX_OK)
            arena.base = base;
    }
    if (arena.base && bytes <= ARENA_BYTES - arena.used) {
        ptr = arena.base + arena.used;
        arena.used += bytes;
        arena.living++;
    }
    pthread_mutex_unlock(&arena.lock);
    return ptr;
}

void tensor_memory_free(epx_group *group, void *ptr)
{
    if (!ptr)
        return;
    if (host_reaches(group)) {
        free(ptr);
        return;
    }
    pthread_mutex_lock(&arena.lock);
    if (--arena.living == 0)
        arena.used = 0;
    pthread_mutex_unlock(&arena.lock);
}
