/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Streams: tasks that run in order, while the caller goes on.
 *
 *   caller                     queue (a list)                 runner
 *   queue a task, wake  --->   [task][task][task]   --->      takes the first, runs it, counts `done`
 *   sync: wait until done >= what was queued when it asked
 *
 * The runner is the stream's worker thread, or a thread that syncs and would otherwise sleep: it takes the next task
 * itself where the worker has not yet come to it, which saves two changes of thread on every operation that is waited
 * for at once. `running` makes sure that there is one runner at a time. User calls are left to the worker, as the API
 * promises. The queue has no limit but memory.
 *
 * While a stream captures, its tasks go to the end of a graph instead of the queue. A launch of the graph queues a copy
 * of each of them, all at once, on any stream of the device.
 */
#include <stdlib.h>
#include <string.h>

#include "device/cpu/cpu.h"
#include "util/status.h"

enum task_kind { TASK_CALL, TASK_COPY, TASK_LAUNCH, TASK_MARK, TASK_WAIT };

struct task {
    struct task *next;
    enum task_kind kind;
    union {
        struct {
            void (*fn)(void *);
            void *arg;
        } call;
        struct {
            void *to;
            const void *from;
            size_t bytes;
        } copy;
        struct {
            cpu_kernel_fn kernel;
            int agents;
        } launch;
        struct mark *mark;
    };
    _Alignas(16) uint8_t params[KERNEL_PARAMS_MAX]; /* of a launch */
};

/* Free tasks kept for reuse: enough for what is usually in flight, no monument to the longest queue ever. */
enum { SPARE_TASKS = 64 };

struct device_stream {
    struct cpu_device *cpu;
    struct team *team;
    pthread_t worker;

    pthread_mutex_t lock; /* everything below */
    pthread_cond_t work;  /* for the worker: a task may be taken, or stop */
    pthread_cond_t progress;
    struct task *head, *tail;
    struct task *spare;
    int spares;
    int running; /* someone runs a task */
    int idle;    /* the worker sleeps */
    int stop;
    uint64_t queued, done;
    struct device_graph *capture; /* what is queued goes here; NULL: to the queue */
};

struct task_list {
    struct task *head, *tail;
    int count;
};

struct device_graph {
    uint64_t number; /* of its capture */
    struct task_list tasks;
};

/* What the calling thread runs, innermost first: a call may sync another stream and so run that one's tasks too. */
struct runner {
    const struct device_stream *stream;
    struct runner *outer;
};
static _Thread_local struct runner *current_runner;

int stream_runs_here(const struct device_stream *stream)
{
    const struct runner *runner;

    for (runner = current_runner; runner; runner = runner->outer) {
        if (runner->stream == stream)
            return 1;
    }
    return 0;
}

/* ---- Running ------------------------------------------------------------------------------------------------ */

static void run_task(struct device_stream *stream, struct task *task)
{
    struct runner runner = {.stream = stream, .outer = current_runner};

    current_runner = &runner;
    switch (task->kind) {
    case TASK_CALL:
        task->call.fn(task->call.arg);
        break;
    case TASK_COPY:
        memcpy(task->copy.to, task->copy.from, task->copy.bytes);
        break;
    case TASK_LAUNCH:
        team_run(stream->team, task->launch.kernel, task->params, task->launch.agents);
        break;
    case TASK_MARK:
        mark_reach(task->mark);
        mark_put(task->mark);
        break;
    case TASK_WAIT:
        mark_wait(task->mark);
        mark_put(task->mark);
        break;
    }
    current_runner = runner.outer;
}

static void give_back(struct device_stream *stream, struct task *task)
{
    if (stream->spares >= SPARE_TASKS) {
        free(task);
        return;
    }
    task->next = stream->spare;
    stream->spare = task;
    stream->spares++;
}

/* Runs the first task. Called with the lock held, which it lets go of meanwhile; nobody else runs, the queue has
 * one. */
static void run_first(struct device_stream *stream)
{
    struct task *task = stream->head;

    stream->head = task->next;
    if (!stream->head)
        stream->tail = NULL;
    stream->running = 1;
    pthread_mutex_unlock(&stream->lock);
    run_task(stream, task);
    pthread_mutex_lock(&stream->lock);
    stream->running = 0;
    stream->done++;
    give_back(stream, task);
    pthread_cond_broadcast(&stream->progress);
}

static void wake_worker(struct device_stream *stream)
{
    if (stream->idle && !stream->running)
        pthread_cond_signal(&stream->work);
}

static void *worker_main(void *arg)
{
    struct device_stream *stream = arg;

    pthread_mutex_lock(&stream->lock);
    for (;;) {
        while (stream->running || (!stream->head && !stream->stop)) {
            stream->idle = 1;
            pthread_cond_wait(&stream->work, &stream->lock);
            stream->idle = 0;
        }
        if (!stream->head)
            break;
        run_first(stream);
    }
    pthread_mutex_unlock(&stream->lock);
    return NULL;
}

epx_status cpu_stream_sync(struct device *device, struct device_stream *stream)
{
    uint64_t target;

    if (stream_runs_here(stream))
        return fail(EPX_ERR_USAGE, "stream: a call queued on a stream may not wait for that stream");
    if (cpu_stream_captures(device, stream))
        return fail(EPX_ERR_USAGE, "stream: it captures a graph and cannot be waited for");
    pthread_mutex_lock(&stream->lock);
    target = stream->queued;
    while (stream->done < target) {
        if (!stream->running && stream->head && stream->head->kind != TASK_CALL) {
            run_first(stream);
        } else {
            wake_worker(stream);
            pthread_cond_wait(&stream->progress, &stream->lock);
        }
    }
    if (stream->head)
        wake_worker(stream); /* tasks queued since the target are the worker's again */
    pthread_mutex_unlock(&stream->lock);
    return EPX_OK;
}

uint64_t cpu_stream_captures(struct device *device, struct device_stream *stream)
{
    uint64_t number;

    (void)device;
    pthread_mutex_lock(&stream->lock);
    number = stream->capture ? stream->capture->number : 0;
    pthread_mutex_unlock(&stream->lock);
    return number;
}

epx_status cpu_stream_query(struct device *device, struct device_stream *stream)
{
    int idle;

    (void)device;
    pthread_mutex_lock(&stream->lock);
    idle = stream->done == stream->queued;
    pthread_mutex_unlock(&stream->lock);
    return idle ? EPX_OK : EPX_ERR_NOT_READY;
}

/* ---- Queueing ----------------------------------------------------------------------------------------------- */

/* NULL when there is no memory; fail() has been called then. */
static struct task *task_new(struct device_stream *stream, enum task_kind kind)
{
    struct task *task;

    pthread_mutex_lock(&stream->lock);
    task = stream->spare;
    if (task) {
        stream->spare = task->next;
        stream->spares--;
    }
    pthread_mutex_unlock(&stream->lock);
    if (!task)
        task = malloc(sizeof(*task));
    if (!task) {
        (void)fail(EPX_ERR_MEMORY, "cpu device: no memory to queue an operation");
        return NULL;
    }
    task->next = NULL;
    task->kind = kind;
    return task;
}

static void list_add(struct task_list *list, struct task *task)
{
    if (list->tail)
        list->tail->next = task;
    else
        list->head = task;
    list->tail = task;
    list->count++;
}

static void list_free(struct task_list *list)
{
    while (list->head) {
        struct task *task = list->head;

        list->head = task->next;
        free(task);
    }
    *list = (struct task_list){0};
}

/* With the lock held. */
static void queue_list(struct device_stream *stream, const struct task_list *list)
{
    if (!list->head)
        return;
    if (stream->tail)
        stream->tail->next = list->head;
    else
        stream->head = list->head;
    stream->tail = list->tail;
    stream->queued += (uint64_t)list->count;
    wake_worker(stream);
}

static void queue_task(struct device_stream *stream, struct task *task)
{
    const struct task_list one = {.head = task, .tail = task, .count = 1};

    pthread_mutex_lock(&stream->lock);
    if (stream->capture)
        list_add(&stream->capture->tasks, task);
    else
        queue_list(stream, &one);
    pthread_mutex_unlock(&stream->lock);
}

epx_status cpu_stream_call(struct device *device, struct device_stream *stream, void (*fn)(void *), void *arg)
{
    struct task *task = task_new(stream, TASK_CALL);

    (void)device;
    if (!task)
        return EPX_ERR_MEMORY;
    task->call.fn = fn;
    task->call.arg = arg;
    queue_task(stream, task);
    return EPX_OK;
}

epx_status cpu_stream_copy(struct device *device, struct device_stream *stream, void *to, const void *from,
                           size_t bytes)
{
    struct task *task;

    (void)device;
    if (bytes == 0)
        return EPX_OK;
    task = task_new(stream, TASK_COPY);
    if (!task)
        return EPX_ERR_MEMORY;
    task->copy.to = to;
    task->copy.from = from;
    task->copy.bytes = bytes;
    queue_task(stream, task);
    return EPX_OK;
}

epx_status cpu_launch(struct device *device, struct device_stream *stream, enum kernel_id id, const void *params,
                      size_t bytes, int agents)
{
    struct task *task;
    epx_status status;

    (void)device;
    if ((int)id < 0 || id >= KERNEL_COUNT || bytes > KERNEL_PARAMS_MAX || !stream->cpu->kernels[id])
        return fail(EPX_ERR_INTERNAL,
                    "cpu launch: kernel %d with %zu bytes of parameters (expected 0 to %d, at most %d)", (int)id, bytes,
                    KERNEL_COUNT - 1, KERNEL_PARAMS_MAX);
    if (agents < 1 || agents > CPU_MAX_AGENTS)
        return fail(EPX_ERR_ARGUMENT, "cpu launch: expected 1 to %d agents, got %d", CPU_MAX_AGENTS, agents);
    status = team_reserve(stream->team, agents);
    if (status != EPX_OK)
        return status;
    task = task_new(stream, TASK_LAUNCH);
    if (!task)
        return EPX_ERR_MEMORY;
    task->launch.kernel = stream->cpu->kernels[id];
    task->launch.agents = agents;
    if (bytes)
        memcpy(task->params, params, bytes);
    queue_task(stream, task);
    return EPX_OK;
}

/* A mark is reached once, and a graph runs more often. */
static epx_status queue_with_mark(struct device_stream *stream, enum task_kind kind, struct mark *mark)
{
    struct task *task;

    if (cpu_stream_captures(NULL, stream))
        return fail(EPX_ERR_UNSUPPORTED, "cpu device: a graph cannot record or wait for an event");
    task = task_new(stream, kind);
    if (!task)
        return EPX_ERR_MEMORY;
    task->mark = mark;
    queue_task(stream, task);
    return EPX_OK;
}

epx_status stream_queue_mark(struct device_stream *stream, struct mark *mark)
{
    return queue_with_mark(stream, TASK_MARK, mark);
}

epx_status cpu_stream_wait(struct device *device, struct device_stream *stream, struct device_event *event)
{
    struct mark *mark = event_mark(event);
    epx_status status;

    (void)device;
    if (!mark)
        return EPX_OK;
    /* A mark of this very stream lies before anything queued from now on. */
    if (mark_reached(mark) || mark_stream(mark) == stream) {
        mark_put(mark);
        return EPX_OK;
    }
    status = queue_with_mark(stream, TASK_WAIT, mark);
    if (status != EPX_OK)
        mark_put(mark);
    return status;
}

/* ---- Graphs ------------------------------------------------------------------------------------------------- */

epx_status cpu_graph_begin(struct device *device, struct device_stream *stream)
{
    static uint64_t captures;
    struct device_graph *graph = calloc(1, sizeof(*graph));
    int busy;

    (void)device;
    if (!graph)
        return fail(EPX_ERR_MEMORY, "cpu device: no memory for a graph");
    graph->number = __atomic_add_fetch(&captures, 1, __ATOMIC_RELAXED);
    pthread_mutex_lock(&stream->lock);
    busy = stream->capture != NULL;
    if (!busy)
        stream->capture = graph;
    pthread_mutex_unlock(&stream->lock);
    if (busy)
        free(graph);
    return busy ? fail(EPX_ERR_USAGE, "cpu device: the stream captures a graph already") : EPX_OK;
}

epx_status cpu_graph_end(struct device *device, struct device_stream *stream, struct device_graph **graph)
{
    (void)device;
    pthread_mutex_lock(&stream->lock);
    *graph = stream->capture;
    stream->capture = NULL;
    pthread_mutex_unlock(&stream->lock);
    return *graph ? EPX_OK : fail(EPX_ERR_USAGE, "cpu device: the stream captures no graph");
}

static struct task *task_copy(struct device_stream *stream, const struct task *from)
{
    struct task *task;

    if (from->kind == TASK_LAUNCH && team_reserve(stream->team, from->launch.agents) != EPX_OK)
        return NULL;
    task = task_new(stream, from->kind);
    if (task) {
        *task = *from;
        task->next = NULL;
    }
    return task;
}

epx_status cpu_graph_launch(struct device *device, struct device_graph *graph, struct device_stream *stream)
{
    struct task_list copies = {0};

    if (cpu_stream_captures(device, stream))
        return fail(EPX_ERR_UNSUPPORTED, "cpu device: a graph cannot be launched into another graph");
    for (const struct task *from = graph->tasks.head; from; from = from->next) {
        struct task *task = task_copy(stream, from);

        if (!task) {
            list_free(&copies);
            return EPX_ERR_MEMORY;
        }
        list_add(&copies, task);
    }
    pthread_mutex_lock(&stream->lock);
    queue_list(stream, &copies);
    pthread_mutex_unlock(&stream->lock);
    return EPX_OK;
}

void cpu_graph_destroy(struct device *device, struct device_graph *graph)
{
    (void)device;
    if (graph)
        list_free(&graph->tasks);
    free(graph);
}

/* ---- Life --------------------------------------------------------------------------------------------------- */

static void stream_free(struct device_stream *stream)
{
    while (stream->spare) {
        struct task *task = stream->spare;

        stream->spare = task->next;
        free(task);
    }
    team_destroy(stream->team);
    pthread_cond_destroy(&stream->progress);
    pthread_cond_destroy(&stream->work);
    pthread_mutex_destroy(&stream->lock);
    free(stream);
}

epx_status cpu_stream_create(struct device *device, struct device_stream **result)
{
    struct device_stream *stream = calloc(1, sizeof(*stream));
    epx_status status;

    *result = NULL;
    if (!stream)
        return fail(EPX_ERR_MEMORY, "cpu device: no memory for a stream");
    stream->cpu = (struct cpu_device *)device;
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->work, NULL);
    pthread_cond_init(&stream->progress, NULL);
    status = team_create(&stream->team);
    if (status == EPX_OK)
        status = cpu_thread_start(&stream->worker, "epx-stream", worker_main, stream);
    if (status != EPX_OK) {
        stream_free(stream);
        return status;
    }
    *result = stream;
    return EPX_OK;
}

epx_status cpu_stream_destroy(struct device *device, struct device_stream *stream)
{
    epx_status status;

    if (!stream)
        return EPX_OK;
    cpu_graph_destroy(device, stream->capture);
    stream->capture = NULL;
    status = cpu_stream_sync(device, stream);
    if (status != EPX_OK)
        return status;
    pthread_mutex_lock(&stream->lock);
    stream->stop = 1;
    pthread_cond_signal(&stream->work);
    pthread_mutex_unlock(&stream->lock);
    pthread_join(stream->worker, NULL);
    stream_free(stream);
    return EPX_OK;
}
