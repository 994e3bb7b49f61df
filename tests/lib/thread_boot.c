/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One all-gather, seen from rank r:
 *
 *   lock; table[r] = my send pointer; arrived++                last one: phase = READING, wake all
 *   wait until phase == READING
 *   copy every table[i] into recv                              the senders' buffers stay valid: nobody has left yet
 *   left++; wait until left == nranks                          last one: phase = FILLING, wake all
 *
 * Copies are made under the lock, so that no rank can give up and return, its buffer with it, while another reads it.
 */
#include "tests/lib/thread_boot.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum phase { FILLING, READING };

struct member {
    struct thread_boot *boot;
    int rank;
    const void *send;
    size_t bytes;
};

struct thread_boot {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int nranks;
    int timeout_ms;
    enum phase phase;
    int arrived, left;
    unsigned round;
    int failed;
    struct member *members;
};

struct thread_boot *thread_boot_create(int nranks)
{
    struct thread_boot *boot;
    pthread_condattr_t attributes;

    if (nranks < 1 || nranks > THREAD_BOOT_MAX_RANKS)
        return NULL;
    boot = calloc(1, sizeof(*boot));
    if (!boot)
        return NULL;
    boot->members = calloc((size_t)nranks, sizeof(*boot->members));
    if (!boot->members) {
        free(boot);
        return NULL;
    }
    boot->nranks = nranks;
    boot->timeout_ms = THREAD_BOOT_TIMEOUT_MS;
    for (int i = 0; i < nranks; i++)
        boot->members[i] = (struct member){.boot = boot, .rank = i};
    pthread_mutex_init(&boot->lock, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&boot->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    return boot;
}

void thread_boot_destroy(struct thread_boot *boot)
{
    if (!boot)
        return;
    pthread_cond_destroy(&boot->changed);
    pthread_mutex_destroy(&boot->lock);
    free(boot->members);
    free(boot);
}

/* With the lock held. */
static void mark_failed(struct thread_boot *boot)
{
    boot->failed = 1;
    pthread_cond_broadcast(&boot->changed);
}

void thread_boot_abort(struct thread_boot *boot)
{
    pthread_mutex_lock(&boot->lock);
    mark_failed(boot);
    pthread_mutex_unlock(&boot->lock);
}

static struct timespec deadline_after(int timeout_ms)
{
    struct timespec at;

    clock_gettime(CLOCK_MONOTONIC, &at);
    at.tv_sec += timeout_ms / 1000;
    at.tv_nsec += (long)(timeout_ms % 1000) * 1000000;
    if (at.tv_nsec >= 1000000000) {
        at.tv_sec++;
        at.tv_nsec -= 1000000000;
    }
    return at;
}

/* With the lock held: waits until round `round` is in `phase` or over; non-zero when failed or too late. */
static int wait_phase(struct thread_boot *boot, enum phase phase, unsigned round, const struct timespec *deadline)
{
    while (!boot->failed && boot->phase != phase && boot->round == round)
        if (pthread_cond_timedwait(&boot->changed, &boot->lock, deadline) == ETIMEDOUT) {
            fprintf(stderr, "thread_boot: %d of %d ranks arrived in round %u within the deadline\n", boot->arrived,
                    boot->nranks, boot->round);
            mark_failed(boot);
        }
    return boot->failed && boot->round == round;
}

/* With the lock held. */
static int same_size(struct thread_boot *boot, size_t bytes)
{
    for (int i = 0; i < boot->nranks; i++)
        if (boot->members[i].bytes != bytes) {
            fprintf(stderr, "thread_boot: rank %d gathers %zu bytes, another %zu\n", i, boot->members[i].bytes, bytes);
            return 0;
        }
    return 1;
}

static void leave(struct thread_boot *boot)
{
    if (++boot->left < boot->nranks)
        return;
    boot->arrived = boot->left = 0;
    boot->round++;
    boot->phase = FILLING;
    pthread_cond_broadcast(&boot->changed);
}

static int allgather(void *context, const void *send, void *recv, size_t bytes)
{
    struct member *me = context;
    struct thread_boot *boot = me->boot;
    struct timespec deadline;
    unsigned round;
    int failed;

    pthread_mutex_lock(&boot->lock);
    deadline = deadline_after(boot->timeout_ms);
    round = boot->round;
    me->send = send;
    me->bytes = bytes;
    if (++boot->arrived == boot->nranks) {
        boot->phase = READING;
        pthread_cond_broadcast(&boot->changed);
    }
    failed = wait_phase(boot, READING, round, &deadline);
    if (!failed && !same_size(boot, bytes)) {
        mark_failed(boot);
        failed = 1;
    }
    if (!failed) {
        for (int i = 0; bytes && i < boot->nranks; i++)
            memcpy((char *)recv + (size_t)i * bytes, boot->members[i].send, bytes);
        leave(boot);
        failed = wait_phase(boot, FILLING, round, &deadline);
    }
    pthread_mutex_unlock(&boot->lock);
    return failed;
}

epx_bootstrap thread_boot_rank(struct thread_boot *boot, int rank)
{
    epx_bootstrap result = EPX_BOOTSTRAP_INIT;

    result.rank = rank;
    result.nranks = boot->nranks;
    result.allgather = allgather;
    result.context = &boot->members[rank];
    return result;
}

struct runner {
    pthread_t thread;
    int started;
    int rank, n;
    int result;
    epx_bootstrap bootstrap;
    struct thread_boot *boot;
    int (*fn)(int rank, int n, epx_bootstrap *boot, void *arg);
    void *arg;
};

static void *run_one(void *context)
{
    struct runner *me = context;

    me->result = me->fn(me->rank, me->n, &me->bootstrap, me->arg);
    if (me->result)
        thread_boot_abort(me->boot);
    return NULL;
}

static void start_one(struct runner *runner, struct thread_boot *boot)
{
    runner->boot = boot;
    runner->bootstrap = thread_boot_rank(boot, runner->rank);
    runner->started = !pthread_create(&runner->thread, NULL, run_one, runner);
    if (!runner->started) {
        runner->result = 1;
        thread_boot_abort(boot);
    }
}

int run_ranks(int n, int (*fn)(int rank, int n, epx_bootstrap *boot, void *arg), void *arg)
{
    struct thread_boot *boot = thread_boot_create(n);
    struct runner *runners = boot ? calloc((size_t)n, sizeof(*runners)) : NULL;
    int failures = 0;

    if (!runners) {
        thread_boot_destroy(boot);
        return n > 0 ? n : 1;
    }
    for (int i = 0; i < n; i++) {
        runners[i] = (struct runner){.rank = i, .n = n, .fn = fn, .arg = arg};
        start_one(&runners[i], boot);
    }
    for (int i = 0; i < n; i++) {
        if (runners[i].started)
            pthread_join(runners[i].thread, NULL);
        failures += runners[i].result != 0;
    }
    free(runners);
    thread_boot_destroy(boot);
    return failures;
}
