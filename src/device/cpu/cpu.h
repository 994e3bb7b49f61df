/* SPDX-License-Identifier: Apache-2.0 */
/* The CPU device's own objects, shared by the files of this folder and by its tests. */
#ifndef EPX_DEVICE_CPU_CPU_H
#define EPX_DEVICE_CPU_CPU_H

#include <pthread.h>

#include "device/cpu/agent.h"
#include "device/device.h"

/* More agents than this in one launch is a mistake rather than a machine. */
#define CPU_MAX_AGENTS 1024

struct cpu_device {
    struct device base;           /* first: a struct device * is a struct cpu_device * */
    const cpu_kernel_fn *kernels; /* cpu_kernels, unless a test puts its own table here */
};

/* ---- device.c: threads -------------------------------------------------------------------------------------- */

/* Starts a thread with all signals blocked (they belong to the application's threads), named at most 15 characters. */
epx_status cpu_thread_start(pthread_t *thread, const char *name, void *(*main)(void *), void *arg);

/* ---- wait.c ------------------------------------------------------------------------------------------------- */

/* Frees what agent_scratch gave. */
void agent_scratch_free(struct agent *agent);

/* ---- heap.c ------------------------------------------------------------------------------------------------- */

epx_status cpu_heap_create(struct device *device, uint64_t bytes, struct heap *heap);
void cpu_heap_destroy(struct device *device, struct heap *heap);
epx_status cpu_heap_open(struct device *device, const struct heap_export *peer, void **base);
void cpu_heap_close(struct device *device, const struct heap_export *peer, void *base);
int cpu_release(void);

/* ---- device.c ------------------------------------------------------------------------------------------------ */

epx_status cpu_clock(struct device *device, int64_t *ahead_ns, uint64_t *error_ns);
epx_status cpu_rows_reserve(struct device *device, size_t row_bytes, int agents);
epx_status cpu_heap_place(struct device *device, enum heap_place place);
epx_status cpu_fabric(struct device *device, uint8_t id[64]);
epx_status cpu_heap_dmabuf(struct device *device, const struct heap *heap, int *fd);
int cpu_arrivals(struct device *device);
void cpu_pci(struct device *device, char text[DEVICE_PCI]);
epx_status cpu_flush_arrivals(struct device *device);
epx_status cpu_use(struct device *device);
uint64_t cpu_region_id(struct device *device, const void *data);
epx_status cpu_region_export(struct device *device, const void *data, struct heap_export *region);
epx_status cpu_region_open(struct device *device, const struct heap_export *region, void **base);
void cpu_region_close(struct device *device, const struct heap_export *region, void *base, int now);

/* ---- team.c: the threads that run the agents of a stream's launches ------------------------------------------ */

struct team;

epx_status team_create(struct team **team);
void team_destroy(struct team *team);
/* Makes sure that `agents` agents can run at once. Safe while another thread runs the team. */
epx_status team_reserve(struct team *team, int agents);
/* Runs the kernel with `agents` agents (reserved before), all at once, agent 0 on the calling thread. One at a time. */
void team_run(struct team *team, cpu_kernel_fn kernel, const void *params, int agents);

/* ---- stream.c ----------------------------------------------------------------------------------------------- */

epx_status cpu_stream_create(struct device *device, struct device_stream **stream);
epx_status cpu_stream_destroy(struct device *device, struct device_stream *stream);
epx_status cpu_stream_sync(struct device *device, struct device_stream *stream);
epx_status cpu_stream_query(struct device *device, struct device_stream *stream);
uint64_t cpu_stream_captures(struct device *device, struct device_stream *stream);
epx_status cpu_stream_call(struct device *device, struct device_stream *stream, void (*fn)(void *), void *arg);
epx_status cpu_stream_wait(struct device *device, struct device_stream *stream, struct device_event *event);
epx_status cpu_stream_copy(struct device *device, struct device_stream *stream, void *to, const void *from,
                           size_t bytes);
epx_status cpu_launch(struct device *device, struct device_stream *stream, enum kernel_id id, const void *params,
                      size_t bytes, int agents);

struct mark;
/* Queues "this mark is reached". The queue takes over one reference on success. */
epx_status stream_queue_mark(struct device_stream *stream, struct mark *mark);
/* One agent's kernel, for a trace and for epx top (marks.c). g NULL: a kernel without a group. Returns when it began,
 * or 0 where nobody wants to know. */
uint64_t cpu_kernel_begin(struct agent *agent, const struct group_dev *g, enum kernel_id id, const char *name);
void cpu_kernel_end(struct agent *agent, const struct group_dev *g, enum kernel_id id, uint64_t began);
/* This agent does not wait any more. */
void cpu_watch_clear(struct agent *agent);
/* `is_over`: the signal came. Else it is a slice of a wait that goes on, or was given up. */
void cpu_trace_wait(const struct agent *agent, uint64_t began, uint64_t now, int is_over);
/* Does the calling thread run a task of this stream just now? Then waiting for the stream would never end. */
int stream_runs_here(const struct device_stream *stream);

/* ---- event.c ------------------------------------------------------------------------------------------------ */

epx_status cpu_event_create(struct device *device, struct device_event **event);
void cpu_event_destroy(struct device *device, struct device_event *event);
epx_status cpu_event_record(struct device *device, struct device_event *event, struct device_stream *stream);
epx_status cpu_event_sync(struct device *device, struct device_event *event);
epx_status cpu_event_query(struct device *device, struct device_event *event);

/* The record that is current now, with a reference, or NULL: never recorded. */
struct mark *event_mark(struct device_event *event);
void mark_reach(struct mark *mark);
int mark_reached(struct mark *mark);
void mark_wait(struct mark *mark);
void mark_put(struct mark *mark);
/* Only to compare: the stream may be gone once the mark is reached. */
const struct device_stream *mark_stream(const struct mark *mark);

/* ---- stream.c: graphs; a captured stream cannot record or wait for events --------------------------------------- */

epx_status cpu_graph_begin(struct device *device, struct device_stream *stream);
epx_status cpu_graph_end(struct device *device, struct device_stream *stream, struct device_graph **graph);
epx_status cpu_graph_launch(struct device *device, struct device_graph *graph, struct device_stream *stream);
void cpu_graph_destroy(struct device *device, struct device_graph *graph);

/* ---- timer.c: time stamps by calls in the stream; the slots of a device without graphs -------------------------- */

epx_status cpu_timers_create(struct device *device, int count, struct device_timers **timers);
void cpu_timers_destroy(struct device *device, struct device_timers *timers);
epx_status cpu_timers_record(struct device *device, struct device_timers *timers, int i, struct device_stream *stream);
epx_status cpu_timers_elapsed(struct device *device, struct device_timers *timers, int from, int to, double *us);
uint64_t no_captures(struct device *device, struct device_stream *stream);
epx_status no_graph_begin(struct device *device, struct device_stream *stream);
epx_status no_graph_end(struct device *device, struct device_stream *stream, struct device_graph **graph);
epx_status no_graph_launch(struct device *device, struct device_graph *graph, struct device_stream *stream);
void no_graph_destroy(struct device *device, struct device_graph *graph);

#endif
