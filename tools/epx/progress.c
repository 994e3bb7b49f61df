/* SPDX-License-Identifier: Apache-2.0 */
#include "progress.h"

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

#include "util/clock.h"

#define QUIET_NS 2000000000u /* what ends sooner needs no progress */
#define STEP_NS 100000000u

static uint64_t began_ns, shown_ns;
static int shown;

void progress_show(const char *program, double percent, const char *format, ...)
{
    const uint64_t now = clock_ns();
    char text[160];
    va_list args;

    began_ns = began_ns ? began_ns : now;
    if (!isatty(STDERR_FILENO) || now - began_ns < QUIET_NS || now - shown_ns < STEP_NS)
        return;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    shown_ns = now;
    shown = 1;
    fprintf(stderr, "\r\033[K%s: ", program);
    if (percent >= 0)
        fprintf(stderr, "%.0f %%, ", percent);
    fprintf(stderr, "%s", text);
    fflush(stderr);
}

void progress_end(void)
{
    if (shown)
        fputs("\r\033[K", stderr);
    fflush(stderr);
    shown = 0;
}
