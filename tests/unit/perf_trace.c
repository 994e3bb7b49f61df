/* SPDX-License-Identifier: Apache-2.0 */
/* What one event of a trace costs who records it: a look at the clock and trace_add(), in CPU time, the best of many
 * rounds, so that other work on the machine does not count. Not run by the tests: build/tests/perf_trace. */
#include <stdio.h>
#include <time.h>

#include "util/clock.h"
#include "util/trace.h"

enum { ROUNDS = 400, EVENTS = 1000 };

static double cpu_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

int main(void)
{
    double best = 1e9;

    trace_switch(1);
    for (int round = 0; round < ROUNDS; round++) {
        const double start = cpu_ns();
        uint64_t last = clock_ns();

        for (int i = 0; i < EVENTS; i++) {
            struct trace_event e = {.kind = TRACE_SPAN, .category = "phase", .name = "rows", .of = "ll dispatch"};

            e.peer = -1;
            e.begin_ns = last;
            e.end_ns = last = clock_ns();
            trace_add(&e);
        }
        best = (cpu_ns() - start) / EVENTS < best ? (cpu_ns() - start) / EVENTS : best;
    }
    printf("%.1f ns of CPU time per event\n", best);
    return 0;
}
