/* SPDX-License-Identifier: Apache-2.0 */
#include "util/log.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "util/env.h"

enum { LINE_BYTES = 1280, LEVEL_UNREAD = -1 };

static const char *const level_names[] = {"none", "error", "warn", "info", "debug"};
enum { LEVEL_COUNT = (int)(sizeof(level_names) / sizeof(level_names[0])) };

static _Thread_local int shown_rank = -1;
/* Read once. Relaxed is enough: every thread that finds it unread computes the same value. */
static atomic_int threshold = LEVEL_UNREAD;

void log_set_rank(int rank)
{
    shown_rank = rank;
}

static int level_of(const char *name)
{
    for (int i = 0; i < LEVEL_COUNT; i++)
        if (!strcasecmp(name, level_names[i]))
            return i;
    return -1;
}

static int read_threshold(void)
{
    const char *value = env_string("EPX_LOG");
    int level = value ? level_of(value) : LOG_WARN;
    int known = level >= 0;

    if (!known)
        level = LOG_WARN;
    /* Stored before the warning, which comes through here again. */
    atomic_store_explicit(&threshold, level, memory_order_relaxed);
    if (!known)
        log_line(LOG_WARN, "EPX_LOG is \"%s\", expected none, error, warn, info or debug: using warn", value);
    return level;
}

int log_enabled(enum log_level level)
{
    int limit = atomic_load_explicit(&threshold, memory_order_relaxed);

    if (limit == LEVEL_UNREAD) {
        int saved = errno;
        limit = read_threshold();
        errno = saved;
    }
    return (int)level <= limit;
}

/* One write per line, so that lines of several threads and ranks do not mix. */
void log_line(enum log_level level, const char *format, ...)
{
    char line[LINE_BYTES];
    int saved = errno;
    size_t used;
    va_list args;

    if (!log_enabled(level))
        return;
    if (shown_rank >= 0)
        snprintf(line, sizeof(line), "epx: rank %d: %s: ", shown_rank, level_names[level]);
    else
        snprintf(line, sizeof(line), "epx: %s: ", level_names[level]);
    used = strlen(line);
    va_start(args, format);
    errno = saved;
    vsnprintf(line + used, sizeof(line) - used - 1, format, args);
    va_end(args);
    used = strlen(line);
    line[used++] = '\n';
    if (write(STDERR_FILENO, line, used) < 0) {
        /* Nowhere left to say so. */
    }
    errno = saved;
}
