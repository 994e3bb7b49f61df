/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/lib/slow.h"

#include <stdint.h>
#include <stdio.h>
#include <time.h>

enum { SAMPLE_NS = 20000000, TOLERATED = 2, MOST = 10 };

static double factor = 1;

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

    factor = factor_of(share);
    if (factor > 1)
        fprintf(stderr, "one of %.0f on this core: short deadlines are %.1f times as long\n", share, factor);
}

int slow_ms(int ms)
{
    return (int)(ms * factor);
}

int slow_exceeds(double ms, double limit_ms)
{
    double now;

    if (ms <= limit_ms * factor)
        return 0;
    now = factor_of(sample());
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
