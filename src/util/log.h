/* SPDX-License-Identifier: Apache-2.0 */
/* Log lines on stderr: "epx: rank 3: warn: ...". EPX_LOG = none, error, warn (default), info, debug. Keeps errno. */
#ifndef EPX_UTIL_LOG_H
#define EPX_UTIL_LOG_H

enum log_level { LOG_ERROR = 1, LOG_WARN = 2, LOG_INFO = 3, LOG_DEBUG = 4 };

/* Rank shown in this thread's lines; -1 = none. */
void log_set_rank(int rank);
int log_enabled(enum log_level level);
void log_line(enum log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
