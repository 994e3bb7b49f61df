/* SPDX-License-Identifier: Apache-2.0 */
#include "util/runtime.h"

#include <stddef.h>
#include <time.h>

#include "util/clock.h"

static uint64_t real_now_ns(void)
{
    return clock_ns();
}

static void real_pause_ns(uint64_t ns)
{
    const struct timespec nap = {.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};

    nanosleep(&nap, NULL); /* ended early by a signal: every caller looks again anyway */
}

#define REAL                                             \
    {                                                    \
        .now_ns = real_now_ns, .pause_ns = real_pause_ns \
    }

static struct runtime current = REAL;

const struct runtime *runtime(void)
{
    return &current;
}

void runtime_swap(const struct runtime *given)
{
    static const struct runtime real = REAL;

    current = given ? *given : real;
    if (!current.now_ns)
        current.now_ns = real.now_ns;
    if (!current.pause_ns)
        current.pause_ns = real.pause_ns;
}
