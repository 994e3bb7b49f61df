/* SPDX-License-Identifier: Apache-2.0 */
#include "util/cloexec.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "util/descriptor.h"

/* Without /proc: as many as the process may have, one by one. */
static void each_possible(void (*fn)(int fd, void *arg), void *arg)
{
    struct rlimit limit;
    int most = CLOEXEC_FILES;

    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < (rlim_t)most)
        most = (int)limit.rlim_cur;
    for (int fd = 0; fd < most; fd++)
        if (fcntl(fd, F_GETFD) >= 0)
            fn(fd, arg);
}

void cloexec_each(void (*fn)(int fd, void *arg), void *arg)
{
    const int saved = errno;
    DIR *folder = fd_open_folder("/proc/self/fd");
    const struct dirent *entry;

    if (!folder)
        each_possible(fn, arg);
    while (folder && (entry = readdir(folder))) {
        char *end;
        const long fd = strtol(entry->d_name, &end, 10);

        if (end != entry->d_name && !*end && fd != dirfd(folder))
            fn((int)fd, arg);
    }
    if (folder)
        closedir(folder);
    errno = saved;
}

void cloexec_set(int fd)
{
    const int flags = fcntl(fd, F_GETFD);

    if (flags >= 0 && !(flags & FD_CLOEXEC))
        (void)fcntl(fd, F_SETFD, flags | FD_CLOEXEC);
}

static void add(int fd, void *arg)
{
    struct cloexec *before = arg;

    if (fd < CLOEXEC_FILES)
        before->open[fd / 64] |= (uint64_t)1 << fd % 64;
}

void cloexec_begin(struct cloexec *before)
{
    memset(before, 0, sizeof(*before));
    cloexec_each(add, before);
}

/* Event queues have no type at all. */
static int is_vendors(int fd)
{
    struct stat about;

    return fstat(fd, &about) == 0 &&
           (S_ISSOCK(about.st_mode) || S_ISCHR(about.st_mode) || (about.st_mode & S_IFMT) == 0);
}

static void set_new(int fd, void *arg)
{
    const struct cloexec *before = arg;

    if (fd < CLOEXEC_FILES && !(before->open[fd / 64] >> fd % 64 & 1) && is_vendors(fd))
        cloexec_set(fd);
}

void cloexec_end(const struct cloexec *before)
{
    cloexec_each(set_new, (void *)(uintptr_t)before);
}
