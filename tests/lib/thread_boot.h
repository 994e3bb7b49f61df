/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks as threads of one process: an all-gather among them with a deadline, and a runner. For tests and examples. */
#ifndef EPX_TESTS_LIB_THREAD_BOOT_H
#define EPX_TESTS_LIB_THREAD_BOOT_H

#include "epx/epx.h"

enum { THREAD_BOOT_TIMEOUT_MS = 300000, THREAD_BOOT_MAX_RANKS = 1024 };

struct thread_boot;

/* NULL when out of memory or nranks is not 1..THREAD_BOOT_MAX_RANKS. */
struct thread_boot *thread_boot_create(int nranks);
/* Only after the last all-gather has returned on every rank. */
void thread_boot_destroy(struct thread_boot *boot);
/* What rank `rank` gives to epx_group_create; usable any number of times. */
epx_bootstrap thread_boot_rank(struct thread_boot *boot, int rank);
/* Fails the current and all later all-gathers: a rank that gives up calls it so that the others do not wait. */
void thread_boot_abort(struct thread_boot *boot);

/* Runs fn(rank, n, boot, arg) on n threads; returns how many returned non-zero, or could not be started. A failing
 * rank aborts the bootstrap, so that ranks that gather at that time fail at once too. */
int run_ranks(int n, int (*fn)(int rank, int n, epx_bootstrap *boot, void *arg), void *arg);

#endif
