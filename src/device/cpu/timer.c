/* SPDX-License-Identifier: Apache-2.0 */
/* Time stamps of the CPU device: a call in the stream reads the clock. The simulator's device uses the same functions,
 * and has no graphs. */
#include <stdlib.h>

#include "device/cpu/cpu.h"
#include "util/clock.h"
#include "util/status.h"

struct device_timers {
    int count;
    uint64_t ns[];
};

epx_status cpu_timers_create(struct device *device, int count, struct device_timers **timers)
{
    (void)device;
    *timers = count > 0 ? calloc(1, sizeof(**timers) + (size_t)count * sizeof(uint64_t)) : NULL;
    if (!*timers)
        return fail(EPX_ERR_MEMORY, "cpu device: no memory for %d time stamps", count);
    (*timers)->count = count;
    return EPX_OK;
}

void cpu_timers_destroy(struct device *device, struct device_timers *timers)
{
    (void)device;
    free(timers);
}

static void take_stamp(void *arg)
{
    *(uint64_t *)arg = clock_ns();
}

epx_status cpu_timers_record(struct device *device, struct device_timers *timers, int i, struct device_stream *stream)
{
    if (i < 0 || i >= timers->count)
        return fail(EPX_ERR_ARGUMENT, "cpu device: expected time stamp 0 to %d, got %d", timers->count - 1, i);
    return device->ops->stream_call(device, stream, take_stamp, &timers->ns[i]);
}

epx_status cpu_timers_elapsed(struct device *device, struct device_timers *timers, int from, int to, double *us)
{
    (void)device;
    *us = 0;
    if (from < 0 || to < 0 || from >= timers->count || to >= timers->count)
        return fail(EPX_ERR_ARGUMENT, "cpu device: expected time stamps 0 to %d, got %d and %d", timers->count - 1,
                    from, to);
    *us = (double)(int64_t)(timers->ns[to] - timers->ns[from]) / 1e3;
    return EPX_OK;
}

/* ---- Devices without graphs ---------------------------------------------------------------------------------- */

static epx_status no_graphs(struct device *device)
{
    return fail(EPX_ERR_UNSUPPORTED, "device %s: it has no graphs", device->ops->name);
}

uint64_t no_captures(struct device *device, struct device_stream *stream)
{
    (void)device;
    (void)stream;
    return 0;
}

epx_status no_graph_begin(struct device *device, struct device_stream *stream)
{
    (void)stream;
    return no_graphs(device);
}

epx_status no_graph_end(struct device *device, struct device_stream *stream, struct device_graph **graph)
{
    (void)stream;
    *graph = NULL;
    return no_graphs(device);
}

epx_status no_graph_launch(struct device *device, struct device_graph *graph, struct device_stream *stream)
{
    (void)graph;
    (void)stream;
    return no_graphs(device);
}

void no_graph_destroy(struct device *device, struct device_graph *graph)
{
    (void)device;
    (void)graph;
}
