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
/* Zeroed memory that children share with their parent; NULL: none. child_unshare: the end of it. */
void *child_share(size_t bytes);
void child_unshare(void *memory, size_t bytes);

/* The variables of a world of `ranks` on this machine, at a free port. Another run that finds the same port has another
 * job id. */
void child_world(int ranks);
/* Removes settings of a group that the test's own environment may have. */
void child_forget_settings(void);
/* Starts ranks 0 to ranks - 1 of that world: a process exits with what `be` returns. 0, or -1: not all could start. */
int child_start_ranks(pid_t *pids, int ranks, int (*be)(int rank, void *arg), void *arg);
/* Waits for all; how many did not succeed. */
int child_failures(const pid_t *pids, int count);

#endif
