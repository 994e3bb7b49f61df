/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Clocks of several machines, for a trace of all ranks. Nobody leaves an all-gather before everybody has entered it:
 *
 *      rank 0    enter0 ------------- leave0          enter0 was before leave:  offset <= leave - enter0
 *      this rank      enter ---------------- leave    enter was before leave0:  offset >= enter - leave0
 *
 * The offset is how far this clock is ahead. Of several rounds the narrowest bounds count; their middle is taken, and
 * half their width is the error. Ranks that have rank 0's clock (the same machine, the same time namespace) need none.
 */
#include "group/align.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "group/handshake.h"
#include "util/clock.h"
#include "util/descriptor.h"
#include "util/runtime.h"
#include "util/status.h"
#include "util/trace.h"

enum { ROUNDS = 8 };

struct clock_message {
    uint64_t enter_ns, leave_ns; /* this round; the round before */
    char machine[80];            /* equal where clocks are one */
};

/* The kernel's identity and the time namespace. */
static void describe_clock(int rank, char *text, size_t bytes)
{
    char boot[40] = "", space[32] = "";
    FILE *file = fd_open_file("/proc/sys/kernel/random/boot_id");
    ssize_t n = readlink("/proc/self/ns/time", space, sizeof(space) - 1);

    if (file && !fgets(boot, sizeof(boot), file))
        boot[0] = 0;
    if (file)
        fclose(file);
    space[n > 0 ? n : 0] = 0;
    if (boot[0])
        snprintf(text, bytes, "%.36s %s", boot, space);
    else /* not known: as another machine's */
        snprintf(text, bytes, "rank %d", rank);
}

static epx_status measure(struct epx_group *group, struct clock_message *all, int64_t *low, int64_t *high)
{
    struct clock_message own = {0};
    epx_status status = EPX_OK;

    describe_clock(group->rank, own.machine, sizeof(own.machine));
    *low = INT64_MIN;
    *high = INT64_MAX;
    for (int i = 0; i <= ROUNDS && status == EPX_OK; i++) {
        const uint64_t entered = own.enter_ns;

        own.enter_ns = clock_ns();
        status = handshake_allgather(group, &own, all, sizeof(own));
        if (i > 0 && (int64_t)(entered - all[0].leave_ns) > *low)
            *low = (int64_t)(entered - all[0].leave_ns);
        own.leave_ns = clock_ns();
        if ((int64_t)(own.leave_ns - all[0].enter_ns) < *high)
            *high = (int64_t)(own.leave_ns - all[0].enter_ns);
    }
    return status;
}

epx_status align_clocks(struct epx_group *group)
{
    struct clock_message *all;
    char machine[80];
    int64_t low, high;
    epx_status status;

    if (runtime()->env) /* a simulation has one clock */
        return EPX_OK;
    static_assert(sizeof(*all) <= HANDSHAKE_ROOM, "of one rank");
    all = handshake_room(group);
    status = measure(group, all, &low, &high);
    describe_clock(group->rank, machine, sizeof(machine));
    if (status == EPX_OK && strcmp(machine, all[0].machine) != 0)
        trace_align(low / 2 + high / 2, (uint64_t)(high - low) / 2);
    return status;
}
