/* SPDX-License-Identifier: Apache-2.0 */
/* Child processes of a test program. */
#ifndef EPX_TESTS_LIB_CHILD_H
#define EPX_TESTS_LIB_CHILD_H

#include <sys/types.h>

/* fork(); the child ends with its parent and has the default signal handlers instead of the test framework's. */
pid_t child_fork(void);
/* Waits for it: 1 if it exited with status 0. */
int child_succeeded(pid_t pid);
/* A TCP port of the loopback interface that nobody listens on just now; -1: none. */
int child_free_port(void);
/* setenv with a number. */
void child_set_int(const char *name, int value);

#endif
