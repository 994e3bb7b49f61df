/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Deadlines on a machine that is busy with other things. A test whose deadline is short, so that it need not wait long,
 * would take a rank for dead that merely has no core.
 */
#ifndef EPX_TESTS_LIB_SLOW_H
#define EPX_TESTS_LIB_SLOW_H

/* As many milliseconds, times more where a busy thread got less than half of a core when the program started. All
 * processes that it forks have the same factor. */
int slow_ms(int ms);

#endif
