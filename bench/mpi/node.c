/* SPDX-License-Identifier: Apache-2.0 */
#include "node.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* 0 or -1: a small file of this process's own. */
static int write_file(const char *path, const char *text)
{
    const int fd = open(path, O_WRONLY);
    ssize_t n;

    if (fd < 0)
        return -1;
    n = write(fd, text, strlen(text));
    close(fd);
    return n == (ssize_t)strlen(text) ? 0 : -1;
}

/* A host name of its own takes a namespace, and that root, or a namespace in which this user is root. */
static int enter(void)
{
    char map[64];
    const unsigned uid = (unsigned)getuid(), gid = (unsigned)getgid();

    if (unshare(CLONE_NEWUTS) == 0)
        return 0;
    if (errno != EPERM || unshare(CLONE_NEWUSER | CLONE_NEWUTS) != 0)
        return -1;
    snprintf(map, sizeof(map), "0 %u 1", uid);
    if (write_file("/proc/self/uid_map", map) != 0)
        return -1;
    snprintf(map, sizeof(map), "0 %u 1", gid);
    return write_file("/proc/self/setgroups", "deny") != 0 || write_file("/proc/self/gid_map", map) != 0 ? -1 : 0;
}

int node_run(const char *name, char **command, int words)
{
    char line[65536];
    size_t used = 0;
    int i;

    if (enter() != 0 || sethostname(name, strlen(name)) != 0) {
        fprintf(stderr, "epx-mpi-baseline: cannot give the processes of node %s a host name of their own: %s\n", name,
                strerror(errno));
        return 1;
    }
    /* As ssh does: the words make one line for the shell. */
    for (i = 0; i < words; i++) {
        const int n = snprintf(line + used, sizeof(line) - used, "%s%s", i > 0 ? " " : "", command[i]);

        if (n < 0 || (size_t)n >= sizeof(line) - used) {
            fprintf(stderr, "epx-mpi-baseline: the command for node %s is too long\n", name);
            return 1;
        }
        used += (size_t)n;
    }
    execl("/bin/sh", "sh", "-c", line, (char *)NULL);
    return 127;
}
