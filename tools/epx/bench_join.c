/* SPDX-License-Identifier: Apache-2.0 */
/*
 * epx bench in a world that torchrun, mpirun, srun or a user has started:
 *
 *      every process     driver (main thread)  -- commands -->  rank (thread), with memory of their own
 *      between them      the link: all-gathers over the bootstrap's TCP connections, which the group shares
 *      rank 0            prints the report
 *
 * All drivers give the same commands, because all have the same options.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bench.h"
#include "boot/boot.h"
#include "boot/launcher.h"

static struct {
    pthread_t thread;
    const char *shm_path;
    int rank, started;
    struct boot *boot;
    struct bench_link link;
} joined;

/* Slurm says "2(x3)" or "4": tasks of each node, where all have as many. */
static int slurm_tasks_per_node(void)
{
    const char *text = getenv("SLURM_STEP_TASKS_PER_NODE");
    int tasks = 0, nodes, used = 0;

    if (!text || sscanf(text, "%d%n", &tasks, &used) != 1)
        return 0;
    if (text[used] && (sscanf(text + used, "(x%d)%n", &nodes, &used) != 1 || strchr(text, ',')))
        return 0;
    return tasks;
}

int bench_join_world(int *rank, int *per_machine)
{
    struct launcher launcher;

    if (!launcher_name())
        return 0;
    if (launcher_read(&launcher) != EPX_OK) {
        fprintf(stderr, "epx bench: %s\n", epx_last_error());
        return -1;
    }
    *rank = launcher.rank;
    *per_machine = launcher.local_nranks > 0 ? launcher.local_nranks : slurm_tasks_per_node();
    return launcher.nranks > 1 ? launcher.nranks : 0;
}

static int gather(void *context, const void *send, void *recv, size_t bytes)
{
    return boot_allgather(context, send, recv, bytes) == EPX_OK ? 0 : -1;
}

static void *run(void *arg)
{
    (void)arg;
    (void)bench_worker_joined(joined.shm_path, joined.rank, &joined.link);
    boot_close(joined.boot);
    return NULL;
}

int bench_join_start(const char *shm_path, int rank, int timeout_ms)
{
    joined.shm_path = shm_path;
    joined.rank = rank;
    if (boot_open(NULL, timeout_ms, &joined.boot) != EPX_OK) {
        fprintf(stderr, "epx bench: %s\n", epx_last_error());
        return -1;
    }
    joined.link = (struct bench_link){gather, joined.boot, epx_last_error};
    if (pthread_create(&joined.thread, NULL, run, NULL)) {
        fprintf(stderr, "epx bench: cannot start a thread\n");
        return -1;
    }
    joined.started = 1;
    return 0;
}

int bench_join_end(int limit_ms)
{
    struct timespec until;

    if (!joined.started)
        return 0;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += limit_ms / 1000 + 1;
    return pthread_clockjoin_np(joined.thread, NULL, CLOCK_MONOTONIC, &until) ? -1 : 0;
}
