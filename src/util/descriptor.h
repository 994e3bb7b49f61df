/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Descriptors 0 to 2 belong to the program, also while they are closed, as they are in daemons and under some
 * launchers: whatever prints there would write into what has the number. So no descriptor of EPX is one of them. Every
 * call that returns a new one is an argument of fd_own() (scripts/check_no_exit.sh), and before another library is
 * called, which takes the lowest number that is free, fd_hold_standard() fills those that are closed.
 *
 * A header alone: the device modules and the stand-ins link nothing of util.
 */
#ifndef EPX_UTIL_DESCRIPTOR_H
#define EPX_UTIL_DESCRIPTOR_H

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

enum { FD_FIRST_OWN = STDERR_FILENO + 1 };

/* Returns `fd`, or another descriptor of the same file that is 3 or higher. -1 stays -1, with its errno. */
static inline int fd_own(int fd)
{
    int high, error;

    if (fd < 0 || fd >= FD_FIRST_OWN)
        return fd;
    high = fcntl(fd, F_DUPFD_CLOEXEC, FD_FIRST_OWN);
    error = errno;
    close(fd);
    errno = error;
    return high;
}

/* Opens /dev/null in place of those of 0 to 2 that are closed. They stay open, in programs that this process executes
 * too, and fail with EBADF as before: the input is opened for writing, the output for reading. A root folder without
 * devices is itself a file that can be neither read nor written. */
static inline void fd_hold_standard(void)
{
    const int error = errno;

    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++) {
        int held;

        if (fcntl(fd, F_GETFD) >= 0)
            continue;
        held = open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);
        if (held < 0)
            held = open("/", O_PATH);
        if (held >= FD_FIRST_OWN) /* another thread has filled the place */
            close(held);
    }
    errno = error;
}

/* To be read; NULL: errno. */
static inline FILE *fd_open_file(const char *path)
{
    const int fd = fd_own(open(path, O_RDONLY | O_CLOEXEC));
    FILE *file = fd < 0 ? NULL : fdopen(fd, "r");

    if (fd >= 0 && !file)
        close(fd);
    return file;
}

static inline DIR *fd_open_folder(const char *path)
{
    const int fd = fd_own(open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    DIR *folder = fd < 0 ? NULL : fdopendir(fd);

    if (fd >= 0 && !folder)
        close(fd);
    return folder;
}

#endif
