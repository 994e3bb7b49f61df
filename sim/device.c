/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A stream is a task that takes work out of a queue; a launch runs agent 0 on that task and the others on tasks of
 * their own, as the CPU device does with threads. Whoever waits for a stream or an event parks.
 */
#include "sim/device.h"

#include <stdlib.h>
#include <string.h>

#include "device/cpu/cpu.h"
#include "kernel/stages.h"
#include "sim/agent.h"
#include "sim/cost_memory.h"
#include "sim/sched.h"
#include "util/status.h"

struct sim_device {
    struct device base;
    int rank; /* of the task that opened it */
};

/* An event's record. Held by the event, by queues and by waiters. */
struct sim_mark {
    int refs, done;
    const struct device_stream *stream;
};

struct device_event {
    struct sim_mark *mark;
};

enum work_kind { WORK_CALL, WORK_COPY, WORK_LAUNCH, WORK_MARK, WORK_WAIT };

struct work {
    struct work *next;
    enum work_kind kind;
    void (*fn)(void *);
    void *arg;
    void *to;
    const void *from;
    size_t bytes;
    enum kernel_id kernel;
    int agents;
    struct sim_mark *mark;
    _Alignas(16) uint8_t params[KERNEL_PARAMS_MAX];
};

struct device_stream {
    int rank;
    struct work *head, *tail;
    uint64_t queued, done;
    int stop, ended;
    const void *caller; /* its task, while that runs a call of the user's: waiting for itself would never end */
    struct sim_agent *agents[CPU_MAX_AGENTS];
    int nagents;
    int running; /* agents 1.. of the launch that have not returned */
    const struct work *launch;
    int launched, stage; /* agents of it, and its stage */
};

/* ---- The agents' environment -------------------------------------------------------------------------------- */

static uint64_t env_now(void *self)
{
    (void)self;
    sim_point();
    return sim_now();
}

static void env_sleep(void *self, struct agent *agent, struct doorbell *bell, uint32_t seen, uint64_t until_ns)
{
    (void)self;
    (void)agent;
    sim_park_bell(bell, seen, until_ns, "waits for a signal");
}

static void env_wake(void *self, struct doorbell *bell)
{
    (void)self;
    if (sim_wake(bell) > 0)
        bell->waiters = 1; /* whoever rings next must not think that nobody sleeps here */
}

const struct cpu_env sim_cpu_env = {.now_ns = env_now, .sleep = env_sleep, .wake = env_wake};

/* ---- Running ------------------------------------------------------------------------------------------------ */

static void run_agent(struct sim_agent *a, int index, const struct work *launch)
{
    struct agent *agent = &a->agent;
    const int costs = cost_model() != NULL;
    void *scratch = agent->scratch;
    size_t scratch_bytes = agent->scratch_bytes;

    *agent = (struct agent){.index = index,
                            .count = a->stream->launched,
                            .env = &sim_cpu_env,
                            .scratch = scratch,
                            .scratch_bytes = scratch_bytes};
    a->stage = a->stream->stage;
    if (costs)
        cost_begins(&a->cost, a->stream->rank);
    (costs ? cost_kernels : sim_kernels)[launch->kernel](agent, launch->params);
    if (costs)
        cost_ends(&a->cost);
}

static void agent_main(void *arg)
{
    struct sim_agent *a = arg;
    struct device_stream *stream = a->stream;

    run_agent(a, a->agent.index, stream->launch);
    if (--stream->running == 0)
        sim_wake(&stream->running);
}

static void run_agents(struct device_stream *stream, const struct work *launch, int agents, int stage)
{
    stream->launch = launch;
    stream->launched = agents;
    stream->stage = stage;
    stream->running = agents - 1;
    for (int i = 1; i < agents; i++) {
        stream->agents[i]->agent.index = i;
        if (sim_spawn(SIM_AGENT, stream->rank, i, agent_main, stream->agents[i]) != 0)
            stream->running--; /* out of memory: the others will say that an agent is missing */
    }
    run_agent(stream->agents[0], 0, launch);
    while (stream->running > 0)
        sim_park(&stream->running, SIM_NEVER, "waits for its agents");
}

/* With costs as on a GPU: each stage is a launch of its own. */
static void run_launch(struct device_stream *stream, const struct work *launch)
{
    struct stage_list list;

    if (!cost_model()) {
        run_agents(stream, launch, launch->agents, 0);
        return;
    }
    list = kernel_stages(launch->kernel, launch->params);
    for (int i = 0; i < stage_launches(&list); i++) {
        const int launched = stage_launch(&list, i);

        cost_launch();
        run_agents(stream, launch, stage_is_gate(&list, launched) ? 1 : launch->agents, launched);
    }
}

static void sim_mark_put(struct sim_mark *mark)
{
    if (mark && --mark->refs == 0)
        free(mark);
}

static void run_work(struct device_stream *stream, struct work *w)
{
    sim_point();
    switch (w->kind) {
    case WORK_CALL:
        stream->caller = sim_task_id();
        w->fn(w->arg);
        stream->caller = NULL;
        break;
    case WORK_COPY:
        memcpy(w->to, w->from, w->bytes);
        break;
    case WORK_LAUNCH:
        run_launch(stream, w);
        break;
    case WORK_MARK:
        w->mark->done = 1;
        sim_wake(w->mark);
        sim_mark_put(w->mark);
        break;
    case WORK_WAIT:
        while (!w->mark->done)
            sim_park(w->mark, SIM_NEVER, "waits for an event of another stream");
        sim_mark_put(w->mark);
        break;
    }
}

static void stream_main(void *arg)
{
    struct device_stream *stream = arg;

    for (;;) {
        struct work *w = stream->head;

        if (!w && stream->stop)
            break;
        if (!w) {
            sim_park(&stream->head, SIM_NEVER, "idle");
            continue;
        }
        stream->head = w->next;
        run_work(stream, w);
        free(w);
        stream->done++;
        sim_wake(&stream->done);
    }
    stream->ended = 1;
    sim_wake(&stream->ended);
}

/* ---- Queueing ----------------------------------------------------------------------------------------------- */

static struct work *work_new(enum work_kind kind)
{
    struct work *w = calloc(1, sizeof(*w));

    if (w)
        w->kind = kind;
    else
        fail(EPX_ERR_MEMORY, "sim device: no memory for a task");
    return w;
}

static void queue(struct device_stream *stream, struct work *w)
{
    if (stream->head)
        stream->tail->next = w;
    else
        stream->head = w;
    stream->tail = w;
    stream->queued++;
    sim_wake(&stream->head);
    sim_point();
}

static epx_status sim_stream_call(struct device *device, struct device_stream *stream, void (*fn)(void *), void *arg)
{
    struct work *w = work_new(WORK_CALL);

    (void)device;
    if (!w)
        return EPX_ERR_MEMORY;
    w->fn = fn;
    w->arg = arg;
    queue(stream, w);
    return EPX_OK;
}

static epx_status sim_stream_copy(struct device *device, struct device_stream *stream, void *to, const void *from,
                                  size_t bytes)
{
    struct work *w;

    (void)device;
    if (bytes == 0)
        return EPX_OK;
    w = work_new(WORK_COPY);
    if (!w)
        return EPX_ERR_MEMORY;
    w->to = to;
    w->from = from;
    w->bytes = bytes;
    queue(stream, w);
    return EPX_OK;
}

static epx_status reserve_agents(struct device_stream *stream, int agents)
{
    while (stream->nagents < agents) {
        struct sim_agent *a = calloc(1, sizeof(*a));

        if (!a)
            return fail(EPX_ERR_MEMORY, "sim device: no memory for agent %d", stream->nagents);
        a->stream = stream;
        stream->agents[stream->nagents++] = a;
    }
    return EPX_OK;
}

static epx_status sim_launch(struct device *device, struct device_stream *stream, enum kernel_id id, const void *params,
                             size_t bytes, int agents)
{
    struct work *w;
    epx_status status;

    (void)device;
    if ((int)id < 0 || id >= KERNEL_COUNT || bytes > KERNEL_PARAMS_MAX || !sim_kernels[id])
        return fail(EPX_ERR_INTERNAL, "sim launch: no kernel %d with %zu bytes of parameters", (int)id, bytes);
    if (agents < 1 || agents > CPU_MAX_AGENTS)
        return fail(EPX_ERR_ARGUMENT, "sim launch: expected 1 to %d agents, got %d", CPU_MAX_AGENTS, agents);
    status = reserve_agents(stream, agents);
    if (status != EPX_OK)
        return status;
    w = work_new(WORK_LAUNCH);
    if (!w)
        return EPX_ERR_MEMORY;
    w->kernel = id;
    w->agents = agents;
    memcpy(w->params, params, bytes);
    queue(stream, w);
    return EPX_OK;
}

static epx_status queue_mark(struct device_stream *stream, enum work_kind kind, struct sim_mark *mark)
{
    struct work *w = work_new(kind);

    if (!w)
        return EPX_ERR_MEMORY;
    mark->refs++;
    w->mark = mark;
    queue(stream, w);
    return EPX_OK;
}

static epx_status sim_stream_wait(struct device *device, struct device_stream *stream, struct device_event *event)
{
    struct sim_mark *mark = event->mark;

    (void)device;
    if (!mark || mark->done || mark->stream == stream)
        return EPX_OK;
    return queue_mark(stream, WORK_WAIT, mark);
}

/* ---- Streams ------------------------------------------------------------------------------------------------ */

static epx_status sim_stream_create(struct device *device, struct device_stream **result)
{
    struct device_stream *stream = calloc(1, sizeof(*stream));

    *result = NULL;
    if (!stream)
        return fail(EPX_ERR_MEMORY, "sim device: no memory for a stream");
    stream->rank = ((struct sim_device *)device)->rank;
    if (sim_spawn(SIM_STREAM, stream->rank, 0, stream_main, stream) != 0) {
        free(stream);
        return fail(EPX_ERR_MEMORY, "sim device: no memory for a stream's task");
    }
    *result = stream;
    return EPX_OK;
}

static epx_status sim_stream_sync(struct device *device, struct device_stream *stream)
{
    const uint64_t target = stream->queued;

    (void)device;
    if (stream->caller && stream->caller == sim_task_id())
        return fail(EPX_ERR_USAGE, "stream: a call queued on a stream may not wait for that stream");
    while (stream->done < target)
        sim_park(&stream->done, SIM_NEVER, "waits for a stream");
    return EPX_OK;
}

static epx_status sim_stream_query(struct device *device, struct device_stream *stream)
{
    (void)device;
    sim_point();
    return stream->done == stream->queued ? EPX_OK : EPX_ERR_NOT_READY;
}

static epx_status sim_stream_destroy(struct device *device, struct device_stream *stream)
{
    epx_status status;

    if (!stream)
        return EPX_OK;
    status = sim_stream_sync(device, stream);
    if (status != EPX_OK)
        return status;
    stream->stop = 1;
    sim_wake(&stream->head);
    while (!stream->ended)
        sim_park(&stream->ended, SIM_NEVER, "waits for a stream to end");
    for (int i = 0; i < stream->nagents; i++) {
        agent_scratch_free(&stream->agents[i]->agent);
        free(stream->agents[i]);
    }
    free(stream);
    return EPX_OK;
}

/* ---- Events ------------------------------------------------------------------------------------------------- */

static epx_status sim_event_create(struct device *device, struct device_event **event)
{
    (void)device;
    *event = calloc(1, sizeof(**event));
    return *event ? EPX_OK : fail(EPX_ERR_MEMORY, "sim device: no memory for an event");
}

static void sim_event_destroy(struct device *device, struct device_event *event)
{
    (void)device;
    if (!event)
        return;
    sim_mark_put(event->mark);
    free(event);
}

static epx_status sim_event_record(struct device *device, struct device_event *event, struct device_stream *stream)
{
    struct sim_mark *mark = calloc(1, sizeof(*mark));
    epx_status status;

    (void)device;
    if (!mark)
        return fail(EPX_ERR_MEMORY, "sim device: no memory to record an event");
    mark->refs = 1;
    mark->stream = stream;
    status = queue_mark(stream, WORK_MARK, mark);
    if (status != EPX_OK) {
        free(mark);
        return status;
    }
    sim_mark_put(event->mark);
    event->mark = mark;
    return EPX_OK;
}

static epx_status sim_event_sync(struct device *device, struct device_event *event)
{
    struct sim_mark *mark = event->mark;

    (void)device;
    if (!mark)
        return EPX_OK;
    mark->refs++;
    while (!mark->done)
        sim_park(mark, SIM_NEVER, "waits for an event");
    sim_mark_put(mark);
    return EPX_OK;
}

static epx_status sim_event_query(struct device *device, struct device_event *event)
{
    (void)device;
    sim_point();
    return !event->mark || event->mark->done ? EPX_OK : EPX_ERR_NOT_READY;
}

/* ---- The device --------------------------------------------------------------------------------------------- */

/* A prediction's machine has GPUs. */
static const struct device_ops *predicted_ops(void)
{
    static struct device_ops ops;

    ops = sim_device_ops;
    ops.caps |= DEVICE_OWN_LINKS;
    return &ops;
}

static epx_status sim_open(int index, struct device **device)
{
    struct sim_device *d = calloc(1, sizeof(*d));

    (void)index;
    *device = NULL;
    if (!d)
        return fail(EPX_ERR_MEMORY, "sim device: no memory");
    d->base.ops = cost_model() ? predicted_ops() : &sim_device_ops;
    d->rank = sim_rank();
    *device = &d->base;
    return EPX_OK;
}

static void sim_close(struct device *device)
{
    free(device);
}

const uint8_t *sim_machines;

static epx_status sim_identity(struct device *device, uint8_t id[64])
{
    const int rank = ((struct sim_device *)device)->rank;

    memset(id, 0, 64);
    memcpy(id, "sim", 4);
    if (sim_machines) /* else nodes come from ranks_per_node */
        id[3] = (uint8_t)(1 + sim_machines[rank]);
    return EPX_OK;
}

static int sim_default_agents(struct device *device, int local_ranks)
{
    (void)device;
    (void)local_ranks;
    return 2;
}

/* With costs, memory knows whose it is; all of it is freed at the end. */
static epx_status cost_alloc(struct device *device, size_t bytes, int host, void **ptr)
{
    *ptr = cost_memory(((struct sim_device *)device)->rank, bytes, host);
    return *ptr ? EPX_OK : fail(EPX_ERR_MEMORY, "sim device: no memory for %zu bytes", bytes);
}

static epx_status sim_mem_alloc(struct device *device, size_t bytes, void **ptr)
{
    return cost_model() ? cost_alloc(device, bytes, 0, ptr) : cpu_device_ops.mem_alloc(device, bytes, ptr);
}

static epx_status sim_host_alloc(struct device *device, size_t bytes, void **ptr)
{
    return cost_model() ? cost_alloc(device, bytes, 1, ptr) : cpu_device_ops.mem_alloc(device, bytes, ptr);
}

static void sim_mem_free(struct device *device, void *ptr)
{
    if (!cost_model())
        cpu_device_ops.mem_free(device, ptr);
}

static epx_status sim_heap_create(struct device *device, uint64_t bytes, struct heap *heap)
{
    epx_status status;

    if (!cost_model())
        return cpu_heap_create(device, bytes, heap);
    memset(heap, 0, sizeof(*heap));
    status = cost_alloc(device, bytes, 0, &heap->base);
    heap->bytes = bytes;
    heap->export = (struct heap_export){.bytes = bytes, .address = (uint64_t)(uintptr_t)heap->base};
    return status;
}

static void sim_heap_destroy(struct device *device, struct heap *heap)
{
    if (!cost_model())
        cpu_heap_destroy(device, heap);
}

static epx_status sim_heap_open(struct device *device, const struct heap_export *peer, void **base)
{
    if (!cost_model())
        return cpu_heap_open(device, peer, base);
    *base = (void *)(uintptr_t)peer->address;
    return EPX_OK;
}

static void sim_heap_close(struct device *device, const struct heap_export *peer, void *base)
{
    if (!cost_model())
        cpu_heap_close(device, peer, base);
}

static epx_status sim_copy(struct device *device, void *to, const void *from, size_t bytes)
{
    sim_point();
    sim_copies();
    return cpu_device_ops.copy(device, to, from, bytes);
}

const struct device_ops sim_device_ops = {
    .name = "sim",
    .kind = EPX_DEVICE_CPU,
    .caps = DEVICE_HOST_ACCESS | DEVICE_SPARSE_HEAP | DEVICE_HOST_HEAP,
    .open = sim_open,
    .close = sim_close,
    .identity = sim_identity,
    .fabric = cpu_fabric,
    .default_agents = sim_default_agents,
    .mem_alloc = sim_mem_alloc,
    .mem_free = sim_mem_free,
    .host_alloc = sim_host_alloc,
    .host_free = sim_mem_free,
    .rows_reserve = cpu_rows_reserve,
    .clock = cpu_clock,
    .copy = sim_copy,
    .heap_place = cpu_heap_place,
    .heap_create = sim_heap_create,
    .heap_destroy = sim_heap_destroy,
    .heap_open = sim_heap_open,
    .heap_close = sim_heap_close,
    .release = cpu_release,
    .heap_dmabuf = cpu_heap_dmabuf,
    .arrivals = cpu_arrivals,
    .pci = cpu_pci,
    .flush_arrivals = cpu_flush_arrivals,
    .use = cpu_use,
    .region_id = cpu_region_id,
    .region_export = cpu_region_export,
    .region_open = cpu_region_open,
    .region_close = cpu_region_close,
    .stream_create = sim_stream_create,
    .stream_destroy = sim_stream_destroy,
    .stream_sync = sim_stream_sync,
    .stream_query = sim_stream_query,
    .stream_captures = no_captures,
    .stream_call = sim_stream_call,
    .stream_wait = sim_stream_wait,
    .stream_copy = sim_stream_copy,
    .launch = sim_launch,
    .event_create = sim_event_create,
    .event_destroy = sim_event_destroy,
    .event_record = sim_event_record,
    .event_sync = sim_event_sync,
    .event_query = sim_event_query,
    .timers_create = cpu_timers_create,
    .timers_destroy = cpu_timers_destroy,
    .timers_record = cpu_timers_record,
    .timers_elapsed = cpu_timers_elapsed,
    .graph_begin = no_graph_begin,
    .graph_end = no_graph_end,
    .graph_launch = no_graph_launch,
    .graph_destroy = no_graph_destroy,
};
