/* SPDX-License-Identifier: Apache-2.0 */
/* A CPU device with kernels of the test's own, and child processes that share its heaps. */
#ifndef EPX_TESTS_UNIT_CPU_FIXTURE_H
#define EPX_TESTS_UNIT_CPU_FIXTURE_H

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "device/cpu/cpu.h"
#include "util/clock.h"
#include "tests/lib/child.h"
#include "tests/lib/unit.h"

#define MS 1000000ull
#define LONG_NS (10000 * MS)
#define GIB ((uint64_t)1 << 30)

/* ---- Fixture: a device with kernels of our own --------------------------------------------------------------- */

/* All agents of a launch meet: each adds one and waits for the others. */
struct meet_params {
    uint64_t *arrived;
    struct doorbell *bell;
    int *runs; /* one per agent */
    int *failures;
};

static inline void kernel_meet(struct agent *agent, const void *arg)
{
    const struct meet_params *params = arg;

    agent->bell = params->bell;
    __atomic_fetch_add(params->arrived, 1, __ATOMIC_ACQ_REL);
    cpu_ring_bell(agent, params->bell);
    if (cpu_wait_ge(agent, params->arrived, (uint64_t)agent->count, LONG_NS) != WAIT_OK)
        __atomic_fetch_add(params->failures, 1, __ATOMIC_RELAXED);
    params->runs[agent->index]++;
}

/* Appends its value; the stream's order alone keeps the list whole. */
struct append_params {
    int *list, *length;
    int value;
    uint8_t filler[200];
};

static inline void kernel_append(struct agent *agent, const void *arg)
{
    const struct append_params *params = arg;

    if (agent->index == 0)
        params->list[(*params->length)++] = params->value;
}

struct scratch_params {
    void **seen;
};

static inline void kernel_scratch(struct agent *agent, const void *arg)
{
    const struct scratch_params *params = arg;

    params->seen[agent->index] = agent_scratch(agent, 1000);
}

enum { MEET = 0, APPEND = 1, SCRATCH = 2 };
static const cpu_kernel_fn test_kernels[KERNEL_COUNT] = {
    [MEET] = kernel_meet, [APPEND] = kernel_append, [SCRATCH] = kernel_scratch};

static struct device *dev;
static const struct device_ops *ops;

static inline int set_up(void **state)
{
    (void)state;
    if (device_open(EPX_DEVICE_CPU, 0, &dev) != EPX_OK)
        return -1;
    ops = dev->ops;
    ((struct cpu_device *)dev)->kernels = test_kernels;
    return 0;
}

static inline int tear_down(void **state)
{
    (void)state;
    ops->close(dev);
    return 0;
}

static inline struct device_stream *new_stream(void)
{
    struct device_stream *stream;

    assert_int_equal(ops->stream_create(dev, &stream), EPX_OK);
    return stream;
}

static inline struct device_event *new_event(void)
{
    struct device_event *event;

    assert_int_equal(ops->event_create(dev, &event), EPX_OK);
    return event;
}

static inline void call_wait_gate(void *arg)
{
    sem_wait(arg);
}

static inline void call_add_one(void *arg)
{
    ++*(int *)arg;
}

/* ---- Forked helpers ------------------------------------------------------------------------------------------ */

static inline int child_status(pid_t child)
{
    int status;

    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

static inline void write_all(int fd, const void *data, size_t bytes)
{
    if (write(fd, data, bytes) != (ssize_t)bytes)
        _exit(99);
}

static inline int read_all(int fd, void *data, size_t bytes)
{
    return read(fd, data, bytes) == (ssize_t)bytes;
}

/* A child that shares a pipe with its parent. */
static inline pid_t fork_with_pipe(int pipes[2])
{
    pid_t child;

    assert_int_equal(pipe(pipes), 0);
    child = child_fork();
    assert_true(child >= 0);
    return child;
}

static inline void close_pipe(const int pipes[2])
{
    close(pipes[0]);
    close(pipes[1]);
}

/* Runs `fn` in a child that was forked BEFORE the parent makes a heap, so that it inherits nothing; the export comes
 * through a pipe. Returns the child's exit status. */
static inline int with_peer(int (*fn)(const struct heap_export *), const struct heap_export *(*make)(void))
{
    int pipes[2];
    const pid_t child = fork_with_pipe(pipes);

    if (child == 0) {
        struct heap_export export;

        _exit(read_all(pipes[0], &export, sizeof(export)) ? fn(&export) : 98);
    }
    assert_int_equal(write(pipes[1], make(), sizeof(struct heap_export)), sizeof(struct heap_export));
    close_pipe(pipes);
    return child_status(child);
}

#endif
