/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Deadlines on a machine that is busy with other things. A test whose deadline is short, so that it need not wait long,
 * would take a rank for dead that merely has no core.
 */
#ifndef EPX_TESTS_LIB_SLOW_H
#define EPX_TESTS_LIB_SLOW_H

#include <stdint.h>

/* As many milliseconds, times more where a busy thread got less than half of a core when the program started. All
 * processes that it forks have the same factor. */
int slow_ms(int ms);
/* What has happened took `ms`, or the time since `since_ns` (clock_ns): was that more than the limit, on a machine as
 * slow as it was when the program started, or as slow as it is now? Deadlines cannot grow while ranks have them; a
 * check of what is over takes into account what other programs have begun since. */
int slow_exceeds(double ms, double limit_ms);
int slow_late(uint64_t since_ns, int limit_ms);

#endif
