/* SPDX-License-Identifier: Apache-2.0 */
#include "util/pause.h"

#include <stddef.h>
#include <time.h>

#include "util/clock.h"

static const struct time_source *source;

void time_source_set(const struct time_source *given)
{
    source = given;
}

uint64_t host_now_ns(void)
{
    return source ? source->now_ns() : clock_ns();
}

void pause_ns(uint64_t ns)
{
    struct timespec nap = {.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};

    if (source)
        source->pause_ns(ns);
    else
        nanosleep(&nap, NULL); /* ended early by a signal: every caller looks again anyway */
}
