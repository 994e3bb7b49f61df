/* SPDX-License-Identifier: Apache-2.0 */
#include "child.h"

#include <arpa/inet.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

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
