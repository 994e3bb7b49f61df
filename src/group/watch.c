/* SPDX-License-Identifier: Apache-2.0 */
#include "group/watch.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "util/clock.h"
#include "util/env.h"
#include "util/log.h"
#include "util/runtime.h"

static int pages; /* made by this process so far */

/* FNV-1a over what all ranks know of each other: the same number everywhere, and another for each group. */
static uint64_t group_number(const struct epx_group *group)
{
    const uint8_t *at = (const uint8_t *)group->exports;
    const size_t n = (size_t)group->nranks * sizeof(*group->exports);
    uint64_t hash = 0xcbf29ce484222325u;

    for (size_t i = 0; i < n; i++)
        hash = (hash ^ at[i]) * 0x100000001b3u;
    return hash;
}

static void fill(const struct epx_group *group, struct watch *w, size_t bytes)
{
    w->version = WATCH_VERSION;
    w->bytes = (uint32_t)bytes;
    w->pid = (int32_t)getpid();
    w->rank = group->rank;
    w->nranks = group->nranks;
    w->node = group->node;
    w->nnodes = group->nnodes;
    w->timeout_ms = group->set.timeout_ms;
    w->group = group_number(group);
    w->created_ns = clock_ns();
    snprintf(w->device, sizeof(w->device), "%s", group->device->ops->name);
    for (int r = 0; r < group->nranks; r++)
        watch_mask(w)[r] = 1;
    __atomic_store_n(&w->magic, WATCH_MAGIC, __ATOMIC_RELEASE); /* pairs with the acquire in epx top */
}

/* The lock ends with the process, however it ends: whoever finds a page without one may remove it. */
static struct watch *map_page(struct epx_group *group, size_t bytes)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    struct watch *w = MAP_FAILED;

    snprintf(group->watch_path, sizeof(group->watch_path), WATCH_FOLDER "/epx-top-%ld-%ld-%d", (long)getuid(),
             (long)getpid(), __atomic_add_fetch(&pages, 1, __ATOMIC_RELAXED));
    unlink(group->watch_path); /* of a process that had this number */
    group->watch_fd = open(group->watch_path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (group->watch_fd < 0)
        return NULL;
    if (fcntl(group->watch_fd, F_SETLK, &lock) == 0 && posix_fallocate(group->watch_fd, 0, (off_t)bytes) == 0)
        w = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, group->watch_fd, 0);
    if (w != MAP_FAILED)
        return w;
    unlink(group->watch_path);
    close(group->watch_fd);
    return NULL;
}

void watch_create(struct epx_group *group)
{
    const size_t bytes = sizeof(struct watch) + (size_t)group->nranks * (sizeof(struct watch_window) + sizeof(int32_t));

    if (runtime()->env || !env_int("EPX_TOP", 1, 0, 1)) /* ranks of a simulation are not processes */
        return;
    group->watch = map_page(group, bytes);
    if (group->watch)
        fill(group, group->watch, bytes);
    else
        log_line(LOG_DEBUG, "no page for epx top: %s cannot be made", group->watch_path);
}

void watch_destroy(struct epx_group *group)
{
    if (!group->watch)
        return;
    unlink(group->watch_path);
    if (group->kept) /* a thread that is blocked may write there yet */
        return;
    munmap(group->watch, group->watch->bytes);
    close(group->watch_fd);
    group->watch = NULL;
}
