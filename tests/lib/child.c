/* SPDX-License-Identifier: Apache-2.0 */
#include "child.h"

#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
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
