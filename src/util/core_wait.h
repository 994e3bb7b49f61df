/* SPDX-License-Identifier: Apache-2.0 */
/* Whether a thread is blocked, or has work and waits for a core. */
#ifndef EPX_UTIL_CORE_WAIT_H
#define EPX_UTIL_CORE_WAIT_H

#include <stdint.h>

/* Nanoseconds that a thread of this process has run so far, by its kernel id; 0 where the kernel does not tell. */
uint64_t thread_ran_ns(int tid);
/* Whether it is runnable. A thread that sleeps, or waits for a device, is not. */
int thread_is_runnable(int tid);

#endif
