/* SPDX-License-Identifier: Apache-2.0 */
#include "child.h"

#include <arpa/inet.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "util/clock.h"

pid_t child_fork(void)
{
    pid_t pid;

    fflush(NULL); /* otherwise both would print what is buffered */
    pid = fork();
    if (pid != 0)
        return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (int sig = SIGILL; sig <= SIGSEGV; sig++)
        signal(sig, SIG_DFL);
    return 0;
}

int child_succeeded(pid_t pid)
{
    int status = 0;

    return waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

int child_free_port(void)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof(at);
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    int port = -1;

    if (fd < 0)
        return -1;
    if (bind(fd, (struct sockaddr *)&at, bytes) == 0 && getsockname(fd, (struct sockaddr *)&at, &bytes) == 0)
        port = ntohs(at.sin_port);
    close(fd);
    return port;
}

void child_set_int(const char *name, int value)
{
    char text[16];

    snprintf(text, sizeof(text), "%d", value);
    setenv(name, text, 1);
}

void *child_share(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    return memory == MAP_FAILED ? NULL : memory;
}

void child_unshare(void *memory, size_t bytes)
{
    munmap(memory, bytes);
}

void child_world(int ranks)
{
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    child_set_int("MASTER_PORT", child_free_port());
    child_set_int("WORLD_SIZE", ranks);
    child_set_int("EPX_JOB_ID", (int)(clock_ns() >> 8 & 0x3fffffff));
}

void child_forget_settings(void)
{
    unsetenv("EPX_NET");
    unsetenv("EPX_BOOT_TIMEOUT_MS");
    unsetenv("EPX_RANKS_PER_NODE");
}

int child_start_ranks(pid_t *pids, int ranks, int (*be)(int rank, void *arg), void *arg)
{
    int failed = 0;

    for (int r = 0; r < ranks; r++) {
        child_set_int("RANK", r);
        pids[r] = child_fork();
        if (pids[r] == 0)
            exit(be(r, arg)); /* with what libraries do at exit */
        failed |= pids[r] < 0;
    }
    unsetenv("RANK");
    return failed ? -1 : 0;
}

int child_failures(const pid_t *pids, int count)
{
    int failed = 0;

    for (int i = 0; i < count; i++)
        failed += !child_succeeded(pids[i]);
    return failed;
}
