/* SPDX-License-Identifier: Apache-2.0 */
#include "boot/fork.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MOST_FILES = 1 << 16 };

/* By descriptor: the socket that it was, or 0. Nobody says when it is closed: another file that has the number then is
 * another inode. */
static uint64_t sockets[MOST_FILES];
static int most; /* of the descriptors that were ever here, plus 1 */
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* Only what a signal handler may do too: the parent may have had many threads. */
static void in_child(void)
{
    const int saved = errno, count = __atomic_load_n(&most, __ATOMIC_RELAXED);
    struct stat about;

    for (int fd = 0; fd < count; fd++) {
        const uint64_t was = __atomic_exchange_n(&sockets[fd], 0, __ATOMIC_RELAXED);

        if (was && fstat(fd, &about) == 0 && S_ISSOCK(about.st_mode) && about.st_ino == was)
            close(fd);
    }
    errno = saved;
}

static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, in_child);
}

/* Not fstat(), which ThreadSanitizer takes for a use of what the descriptor is. */
uint64_t fork_inode(int fd)
{
    struct statx about;

    return fd >= 0 && statx(fd, "", AT_EMPTY_PATH, STATX_INO, &about) == 0 ? about.stx_ino : 0;
}

void fork_hides_inode(int fd, uint64_t inode)
{
    int seen = __atomic_load_n(&most, __ATOMIC_RELAXED);

    if (fd < 0 || fd >= MOST_FILES || !inode)
        return;
    pthread_once(&once, watch_forks);
    __atomic_store_n(&sockets[fd], inode, __ATOMIC_RELAXED);
    while (seen <= fd && !__atomic_compare_exchange_n(&most, &seen, fd + 1, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
}

int fork_hides(int fd)
{
    const int saved = errno;

    fork_hides_inode(fd, fork_inode(fd));
    errno = saved;
    return fd;
}
