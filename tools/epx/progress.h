/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One line of progress on standard error: only on a terminal, only once a command has run for two seconds, and at most
 * ten times a second.
 */
#ifndef EPX_TOOLS_PROGRESS_H
#define EPX_TOOLS_PROGRESS_H

/* "PROGRAM: 42 %, FORMAT"; percent below 0: unknown. */
void progress_show(const char *program, double percent, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* The same for work that cannot report itself: adds the seconds that pass, by a thread, until progress_end. */
void progress_wait(const char *program, double percent, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* Removes the line. Called before anything else is printed. */
void progress_end(void);

#endif
