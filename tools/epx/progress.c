/* SPDX-License-Identifier: Apache-2.0 */
#include "progress.h"

#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "terminal.h"
#include "util/clock.h"

#define QUIET_NS 2000000000u /* what ends sooner needs no progress */
#define STEP_NS 100000000u

static uint64_t began_ns, shown_ns;
static int shown;

/* progress_wait: its thread alone shows lines until progress_end has joined it. */
static struct {
    pthread_t thread;
    int running;
    pthread_mutex_t lock;
    pthread_cond_t woken;
    int stop; /* under the lock */
    const char *program;
    double percent;
    char text[120];
    uint64_t began_ns;
} ticker = {.lock = PTHREAD_MUTEX_INITIALIZER, .woken = PTHREAD_COND_INITIALIZER};

void progress_show(const char *program, double percent, const char *format, ...)
{
    const uint64_t now = clock_ns();
    const int columns = terminal_columns(STDERR_FILENO, 80);
    char text[200];
    size_t used;
    va_list args;

    began_ns = began_ns ? began_ns : now;
    if (!isatty(STDERR_FILENO) || now - began_ns < QUIET_NS || now - shown_ns < STEP_NS)
        return;
    if (percent >= 0)
        snprintf(text, sizeof(text), "%s: %.0f %%, ", program, percent);
    else
        snprintf(text, sizeof(text), "%s: ", program);
    used = strlen(text);
    va_start(args, format);
    vsnprintf(text + used, sizeof(text) - used, format, args);
    va_end(args);
    shown_ns = now;
    shown = 1;
    fprintf(stderr, "\r\033[K%.*s", columns - 1, text); /* one that wraps could not be removed */
    fflush(stderr);
}

static void *tick(void *unused)
{
    struct timespec until;

    pthread_mutex_lock(&ticker.lock);
    while (!ticker.stop) {
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += STEP_NS;
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        pthread_cond_timedwait(&ticker.woken, &ticker.lock, &until);
        if (!ticker.stop)
            progress_show(ticker.program, ticker.percent, "%s, %.0f s", ticker.text,
                          (double)(clock_ns() - ticker.began_ns) / 1e9);
    }
    pthread_mutex_unlock(&ticker.lock);
    return unused;
}

void progress_wait(const char *program, double percent, const char *format, ...)
{
    sigset_t all, before;
    va_list args;

    if (!isatty(STDERR_FILENO))
        return;
    began_ns = began_ns ? began_ns : clock_ns();
    ticker.program = program;
    ticker.percent = percent;
    ticker.began_ns = clock_ns();
    ticker.stop = 0;
    va_start(args, format);
    vsnprintf(ticker.text, sizeof(ticker.text), format, args);
    va_end(args);
    sigfillset(&all); /* signals are the program's */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    ticker.running = pthread_create(&ticker.thread, NULL, tick, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void stop_ticker(void)
{
    if (!ticker.running)
        return;
    pthread_mutex_lock(&ticker.lock);
    ticker.stop = 1;
    pthread_cond_signal(&ticker.woken);
    pthread_mutex_unlock(&ticker.lock);
    pthread_join(ticker.thread, NULL);
    ticker.running = 0;
}

void progress_end(void)
{
    stop_ticker();
    if (shown)
        fputs("\r\033[K", stderr);
    fflush(stderr);
    shown = 0;
}
