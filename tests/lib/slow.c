/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/lib/slow.h"

#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>
#include <time.h>

/* MOST_LATER: what came since may make checks this many times as lenient, so that they still can fail. */
enum { SAMPLE_NS = 20000000, TOLERATED = 2, MOST = 10, MOST_LATER = 4 };

static double factor = 1;
/* Processes that are forked share it: all of a test that are late sample one after the other, or each would find the
 * cores busy with the others' samples. NULL: they do not know of each other. */
static pthread_mutex_t *one_samples;

static uint64_t read_clock(clockid_t clock)
{
    struct timespec t;

    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* How long it takes to be busy for SAMPLE_NS, as a multiple of that. */
static double sample(void)
{
    const uint64_t start = read_clock(CLOCK_MONOTONIC), busy = read_clock(CLOCK_THREAD_CPUTIME_ID);

    while (read_clock(CLOCK_THREAD_CPUTIME_ID) - busy < SAMPLE_NS)
        ;
    return (double)(read_clock(CLOCK_MONOTONIC) - start) / SAMPLE_NS;
}

static double factor_of(double share)
{
    return share / TOLERATED < 1 ? 1 : share / TOLERATED > MOST ? MOST : share / TOLERATED;
}

/* Before main(): ranks that are forked must agree on their deadlines. */
__attribute__((constructor)) static void measure(void)
{
    const double share = sample();
    pthread_mutexattr_t attr;
    void *page = mmap(NULL, sizeof(pthread_mutex_t), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    if (page != MAP_FAILED) {
        one_samples = page;
        pthread_mutexattr_init(&attr);
        pthread_mutexattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
        pthread_mutexattr_setrobust(&attr, PTHREAD_MUTEX_ROBUST);
        pthread_mutex_init(one_samples, &attr);
        pthread_mutexattr_destroy(&attr);
    }
    factor = factor_of(share);
    if (factor > 1)
        fprintf(stderr, "one of %.0f on this core: short deadlines are %.1f times as long\n", share, factor);
}

int slow_ms(int ms)
{
    return (int)(ms * factor);
}

static double factor_now(void)
{
    const int rc = one_samples ? pthread_mutex_lock(one_samples) : EINVAL;
    const double share = sample();

    if (rc == EOWNERDEAD)
        pthread_mutex_consistent(one_samples);
    if (rc == 0 || rc == EOWNERDEAD)
        pthread_mutex_unlock(one_samples);
    return factor_of(share) < factor * MOST_LATER ? factor_of(share) : factor * MOST_LATER;
}

int slow_exceeds(double ms, double limit_ms)
{
    double now;

    if (ms <= limit_ms * factor)
        return 0;
    now = factor_now();
    if (now > factor)
        fprintf(stderr,
                "%.0f ms, expected %.0f: other programs came since this one started, %.1f times as long is fine\n", ms,
                limit_ms * factor, now / factor);
    return ms > limit_ms * (now > factor ? now : factor);
}

int slow_late(uint64_t since_ns, int limit_ms)
{
    return slow_exceeds((double)(read_clock(CLOCK_MONOTONIC) - since_ns) * 1e-6, limit_ms);
}
