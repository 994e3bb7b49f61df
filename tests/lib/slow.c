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

/* How long it takes to be busy for SAMPLE_NS. Before main(): ranks that are forked must agree on their deadlines. */
__attribute__((constructor)) static void measure(void)
{
    const uint64_t start = read_clock(CLOCK_MONOTONIC), busy = read_clock(CLOCK_THREAD_CPUTIME_ID);
    double share;

    while (read_clock(CLOCK_THREAD_CPUTIME_ID) - busy < SAMPLE_NS)
        ;
    share = (double)(read_clock(CLOCK_MONOTONIC) - start) / SAMPLE_NS;
    factor = share / TOLERATED < 1 ? 1 : share / TOLERATED > MOST ? MOST : share / TOLERATED;
    if (factor > 1)
        fprintf(stderr, "one of %.0f on this core: short deadlines are %.1f times as long\n", share, factor);
}

int slow_ms(int ms)
{
    return (int)(ms * factor);
}
