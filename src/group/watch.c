/* SPDX-License-Identifier: Apache-2.0 */
#include "group/watch.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "group/abort.h"
#include "util/clock.h"
#include "util/descriptor.h"
#include "util/env.h"
#include "util/log.h"
#include "util/runtime.h"

static int pages; /* made by this process so far */

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
    w->created_ns = clock_ns();
    snprintf(w->device, sizeof(w->device), "%s", group->device->ops->name);
    for (int r = 0; r < group->nranks; r++)
        watch_mask(w)[r] = 1;
}

void watch_show(struct epx_group *group)
{
    if (!group->watch)
        return;
    group->watch->group = group->number;
    __atomic_store_n(&group->watch->magic, WATCH_MAGIC, __ATOMIC_RELEASE); /* pairs with the acquire in epx top */
}

/* The lock ends with the process, however it ends: whoever finds a page without one may remove it. So a page has its
 * name only when it has its lock. */
static struct watch *map_page(struct epx_group *group, size_t bytes)
{
    const int number = __atomic_add_fetch(&pages, 1, __ATOMIC_RELAXED);
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    struct watch *w = MAP_FAILED;
    char made[sizeof(group->watch_path)];

    snprintf(made, sizeof(made), WATCH_FOLDER "/epx-new-%ld-%ld-%d", (long)getuid(), (long)getpid(), number);
    snprintf(group->watch_path, sizeof(group->watch_path), WATCH_FOLDER "/epx-top-%ld-%ld-%d", (long)getuid(),
             (long)getpid(), number);
    unlink(made); /* of a process that had this number */
    group->watch_fd = fd_own(open(made, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (group->watch_fd < 0)
        return NULL;
    if (fcntl(group->watch_fd, F_SETLK, &lock) == 0 && posix_fallocate(group->watch_fd, 0, (off_t)bytes) == 0 &&
        rename(made, group->watch_path) == 0)
        w = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, group->watch_fd, 0);
    if (w != MAP_FAILED)
        return w;
    unlink(made);
    unlink(group->watch_path);
    close(group->watch_fd);
    return NULL;
}

/* Removes a page of a process that has ended without its last lines. */
static void remove_if_left(int folder, const char *name)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    const int fd = fd_own(openat(folder, name, O_RDWR | O_NOFOLLOW | O_CLOEXEC));
    struct stat file;

    if (fd < 0)
        return;
    if (fstat(fd, &file) == 0 && file.st_uid == getuid() && fcntl(fd, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK)
        unlinkat(folder, name, 0);
    close(fd);
}

/* Pages of this process are left alone: closing one of them would end its lock. */
static void sweep(void)
{
    DIR *folder = fd_open_folder(WATCH_FOLDER);
    char mine[48], own[64];

    if (!folder)
        return;
    snprintf(mine, sizeof(mine), "epx-top-%ld-", (long)getuid());
    snprintf(own, sizeof(own), "%s%ld-", mine, (long)getpid());
    for (struct dirent *e = readdir(folder); e; e = readdir(folder))
        if (!strncmp(e->d_name, mine, strlen(mine)) && strncmp(e->d_name, own, strlen(own)) != 0)
            remove_if_left(dirfd(folder), e->d_name);
    closedir(folder);
}

void watch_create(struct epx_group *group)
{
    const size_t bytes = sizeof(struct watch) + (size_t)group->nranks * (sizeof(struct watch_window) + sizeof(int32_t));

    if (runtime()->env || !env_int("EPX_TOP", 1, 0, 1)) /* ranks of a simulation are not processes */
        return;
    if (group->rank == 0)
        sweep();
    group->watch = map_page(group, bytes);
    if (group->watch)
        fill(group, group->watch, bytes);
    else
        log_line(LOG_DEBUG, "no page for epx top: %s cannot be made", group->watch_path);
}

void watch_clean_up(struct epx_group *group)
{
    int lost = group->heap.base && abort_word(group);

    for (int r = 0; group->map.out && r < group->nranks; r++)
        lost |= group->map.out[r];
    if (group->watch && lost)
        sweep();
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
