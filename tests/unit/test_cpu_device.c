/* SPDX-License-Identifier: Apache-2.0 */
/* ctest: timeout=60 */
/* The CPU device: opening, identity, memory, heaps between processes, streams, launches, events. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "device/cpu/cpu.h"
#include "util/clock.h"

#define MS 1000000ull
#define LONG_NS (10000 * MS)
#define GIB ((uint64_t)1 << 30)
/* ThreadSanitizer leaves a program some 20 GiB of addresses on 64-bit ARM. */
#if defined(__SANITIZE_THREAD__)
#define BIG_HEAP (8 * GIB)
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define BIG_HEAP (8 * GIB)
#endif
#endif
#ifndef BIG_HEAP
#define BIG_HEAP (64 * GIB)
#endif

/* ---- Fixture: a device with kernels of our own --------------------------------------------------------------- */

/* All agents of a launch meet: each adds one and waits for the others. */
struct meet_params {
    uint64_t *arrived;
    struct doorbell *bell;
    int *runs; /* one per agent */
    int *failures;
};

static void kernel_meet(struct agent *agent, const void *arg)
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

static void kernel_append(struct agent *agent, const void *arg)
{
    const struct append_params *params = arg;

    if (agent->index == 0)
        params->list[(*params->length)++] = params->value;
}

struct scratch_params {
    void **seen;
};

static void kernel_scratch(struct agent *agent, const void *arg)
{
    const struct scratch_params *params = arg;

    params->seen[agent->index] = agent_scratch(agent, 1000);
}

enum { MEET = 0, APPEND = 1, SCRATCH = 2 };
static const cpu_kernel_fn test_kernels[KERNEL_COUNT] = {
    [MEET] = kernel_meet, [APPEND] = kernel_append, [SCRATCH] = kernel_scratch};

static struct device *dev;
static const struct device_ops *ops;

static int set_up(void **state)
{
    (void)state;
    if (device_open(EPX_DEVICE_CPU, 0, &dev) != EPX_OK)
        return -1;
    ops = dev->ops;
    ((struct cpu_device *)dev)->kernels = test_kernels;
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    ops->close(dev);
    return 0;
}

static struct device_stream *new_stream(void)
{
    struct device_stream *stream;

    assert_int_equal(ops->stream_create(dev, &stream), EPX_OK);
    return stream;
}

static struct device_event *new_event(void)
{
    struct device_event *event;

    assert_int_equal(ops->event_create(dev, &event), EPX_OK);
    return event;
}

static void call_wait_gate(void *arg)
{
    sem_wait(arg);
}

static void call_add_one(void *arg)
{
    ++*(int *)arg;
}

/* ---- Opening ------------------------------------------------------------------------------------------------- */

static epx_status open_with(const char *value, epx_device kind)
{
    struct device *device;
    epx_status status;

    if (value)
        setenv("EPX_DEVICE", value, 1);
    else
        unsetenv("EPX_DEVICE");
    status = device_open(kind, 0, &device);
    unsetenv("EPX_DEVICE");
    if (status == EPX_OK) {
        assert_string_equal(device->ops->name, "cpu");
        device->ops->close(device);
    } else {
        assert_null(device);
    }
    return status;
}

static void auto_follows_the_environment(void **state)
{
    (void)state;
    assert_int_equal(open_with(NULL, EPX_DEVICE_AUTO), EPX_OK);
    assert_int_equal(open_with("CPU", EPX_DEVICE_AUTO), EPX_OK);
    assert_int_equal(open_with("cuda", EPX_DEVICE_AUTO), EPX_ERR_UNSUPPORTED);
    assert_int_equal(open_with("hip", EPX_DEVICE_AUTO), EPX_ERR_UNSUPPORTED);
    assert_int_equal(open_with("cuda", EPX_DEVICE_CPU), EPX_OK);
    assert_int_equal(open_with("abacus", EPX_DEVICE_AUTO), EPX_ERR_ARGUMENT);
    assert_non_null(strstr(epx_last_error(), "abacus"));
}

static void devices_of_other_builds_are_refused(void **state)
{
    (void)state;
    assert_int_equal(open_with(NULL, EPX_DEVICE_CUDA), EPX_ERR_UNSUPPORTED);
    assert_int_equal(open_with(NULL, EPX_DEVICE_HIP), EPX_ERR_UNSUPPORTED);
    assert_int_equal(open_with(NULL, (epx_device)77), EPX_ERR_ARGUMENT);
}

static void every_operation_is_there(void **state)
{
    /* The slots from `open` on are all pointers to functions. */
    const size_t first = offsetof(struct device_ops, open), size = sizeof(void *);
    size_t at;

    (void)state;
    for (at = first; at < sizeof(cpu_device_ops); at += size) {
        void *slot;

        memcpy(&slot, (const char *)&cpu_device_ops + at, size);
        assert_non_null(slot);
    }
}

/* ---- Forked helpers ------------------------------------------------------------------------------------------ */

static int child_status(pid_t child)
{
    int status;

    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

static void write_all(int fd, const void *data, size_t bytes)
{
    if (write(fd, data, bytes) != (ssize_t)bytes)
        _exit(99);
}

static int read_all(int fd, void *data, size_t bytes)
{
    return read(fd, data, bytes) == (ssize_t)bytes;
}

/* Runs `fn` in a child that was forked BEFORE the parent makes a heap, so that it inherits nothing; the export comes
 * through a pipe. Returns the child's exit status. */
static int with_peer(int (*fn)(const struct heap_export *), const struct heap_export *(*make)(void))
{
    int pipes[2];
    pid_t child;

    assert_int_equal(pipe(pipes), 0);
    child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        struct heap_export export;

        _exit(read_all(pipes[0], &export, sizeof(export)) ? fn(&export) : 98);
    }
    assert_int_equal(write(pipes[1], make(), sizeof(struct heap_export)), sizeof(struct heap_export));
    close(pipes[0]);
    close(pipes[1]);
    return child_status(child);
}

/* ---- Identity and agents ------------------------------------------------------------------------------------- */

static void identity_is_that_of_the_machine_and_user(void **state)
{
    uint8_t mine[64], child_id[64];
    int pipes[2], round;

    (void)state;
    assert_int_equal(ops->identity(dev, mine), EPX_OK);
    assert_string_equal((char *)mine, "cpu");
    for (round = 0; round < (geteuid() == 0 ? 2 : 1); round++) { /* the second: another user */
        pid_t child;

        assert_int_equal(pipe(pipes), 0);
        child = fork();
        if (child == 0) {
            if (round == 1 && seteuid(12345) != 0)
                _exit(1);
            if (ops->identity(dev, child_id) != EPX_OK)
                _exit(2);
            write_all(pipes[1], child_id, 64);
            _exit(0);
        }
        assert_int_equal(child_status(child), 0);
        assert_true(read_all(pipes[0], child_id, 64));
        close(pipes[0]);
        close(pipes[1]);
        if (round == 0)
            assert_memory_equal(mine, child_id, 64);
        else
            assert_memory_not_equal(mine, child_id, 64);
    }
}

static void agents_share_the_cpus_among_ranks(void **state)
{
    cpu_set_t old, one;
    int cpu = 0;

    (void)state;
    assert_int_equal(sched_getaffinity(0, sizeof(old), &old), 0);
    assert_int_equal(ops->default_agents(dev, 1), CPU_COUNT(&old));
    assert_int_equal(ops->default_agents(dev, CPU_COUNT(&old)), 1);
    assert_int_equal(ops->default_agents(dev, 100000), 1);
    while (!CPU_ISSET(cpu, &old))
        cpu++;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    assert_int_equal(sched_setaffinity(0, sizeof(one), &one), 0);
    assert_int_equal(ops->default_agents(dev, 1), 1);
    assert_int_equal(sched_setaffinity(0, sizeof(old), &old), 0);
}

/* ---- Memory -------------------------------------------------------------------------------------------------- */

static void memory_is_zeroed_and_aligned(void **state)
{
    static const size_t sizes[] = {0, 1, 255, 256, 4097, 1000000};
    size_t i, j;

    (void)state;
    for (i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        uint8_t *memory[2];

        for (j = 0; j < 2; j++) { /* the second often reuses what the first left dirty */
            void *ptr;

            assert_int_equal((j ? ops->host_alloc : ops->mem_alloc)(dev, sizes[i], &ptr), EPX_OK);
            memory[j] = ptr;
            assert_int_equal((uintptr_t)ptr % 256, 0);
            for (size_t k = 0; k < sizes[i]; k++)
                assert_int_equal(memory[j][k], 0);
            memset(memory[j], 0xff, sizes[i]);
            (j ? ops->host_free : ops->mem_free)(dev, ptr);
        }
    }
    ops->mem_free(dev, NULL);
}

static void impossible_memory_is_an_error(void **state)
{
    void *ptr;

    (void)state;
    assert_int_equal(ops->mem_alloc(dev, SIZE_MAX - 5, &ptr), EPX_ERR_MEMORY);
    assert_null(ptr);
}

/* ---- Heaps --------------------------------------------------------------------------------------------------- */

static struct heap heap;

static const struct heap_export *make_heap(void)
{
    assert_int_equal(ops->heap_create(dev, 100000, &heap), EPX_OK);
    assert_true(heap.bytes >= 100000);
    strcpy(heap.base, "from the parent");
    return &heap.export;
}

static const struct heap_export *make_heap_wrong_inode(void)
{
    static struct heap_export wrong;

    wrong = *make_heap();
    wrong.opaque[8] ^= 1;
    return &wrong;
}

static int peer_reads_and_answers(const struct heap_export *export)
{
    void *base;

    if (ops->heap_open(dev, export, &base) != EPX_OK)
        return 1;
    if (strcmp(base, "from the parent") != 0)
        return 2;
    strcpy((char *)base + 50000, "from the child");
    ops->heap_close(dev, export, base);
    return 0;
}

static void heap_is_shared_between_processes(void **state)
{
    (void)state;
    assert_int_equal(with_peer(peer_reads_and_answers, make_heap), 0);
    assert_string_equal((char *)heap.base + 50000, "from the child");
    ops->heap_destroy(dev, &heap);
}

static int peer_is_refused(const struct heap_export *export)
{
    void *base = &base;

    if (ops->heap_open(dev, export, &base) != EPX_ERR_PEER || base != NULL)
        return 1;
    return strstr(epx_last_error(), "not the heap that was announced") ? 0 : 2;
}

static void another_file_is_refused(void **state)
{
    (void)state;
    assert_int_equal(with_peer(peer_is_refused, make_heap_wrong_inode), 0);
    ops->heap_destroy(dev, &heap);
}

static int other_user_is_refused(const struct heap_export *export)
{
    void *base;

    if (seteuid(12345) != 0)
        return 1;
    if (ops->heap_open(dev, export, &base) != EPX_ERR_SYSTEM)
        return 2;
    return strstr(epx_last_error(), "same user") ? 0 : 3;
}

static void another_user_gets_a_clear_message(void **state)
{
    (void)state;
    if (geteuid() != 0) {
        print_message("only root can become another user\n");
        skip();
    }
    assert_int_equal(with_peer(other_user_is_refused, make_heap), 0);
    ops->heap_destroy(dev, &heap);
}

static int peer_cannot_resize(const struct heap_export *export)
{
    char path[64];

    snprintf(path, sizeof(path), "/proc/%lld/fd/%lld", (long long)export->pid, (long long)export->token);
    return truncate(path, 4096) == 0 ? 1 : errno == EPERM ? 0 : 2;
}

static void heap_size_is_sealed(void **state)
{
    (void)state;
    assert_int_equal(with_peer(peer_cannot_resize, make_heap), 0);
    ops->heap_destroy(dev, &heap);
}

/* A child that makes a heap, sends its export, and then lives until it is killed. */
static pid_t start_owner(struct heap_export *export)
{
    int pipes[2];
    pid_t child;

    assert_int_equal(pipe(pipes), 0);
    child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        struct heap own;

        if (ops->heap_create(dev, 8192, &own) != EPX_OK)
            _exit(1);
        strcpy(own.base, "from the owner");
        write_all(pipes[1], &own.export, sizeof(own.export));
        for (;;)
            pause();
    }
    assert_true(read_all(pipes[0], export, sizeof(*export)));
    close(pipes[0]);
    close(pipes[1]);
    return child;
}

static void mapping_outlives_a_killed_owner(void **state)
{
    struct heap_export export;
    pid_t owner = start_owner(&export);
    void *base, *late;

    (void)state;
    assert_int_equal(ops->heap_open(dev, &export, &base), EPX_OK);
    kill(owner, SIGKILL);
    assert_int_equal(child_status(owner), -SIGKILL);
    assert_string_equal(base, "from the owner");
    strcpy(base, "still writable");
    assert_int_equal(ops->heap_open(dev, &export, &late), EPX_ERR_PEER);
    assert_non_null(strstr(epx_last_error(), "has ended"));
    assert_null(late);
    ops->heap_close(dev, &export, base);
}

static void own_heap_keeps_its_address(void **state)
{
    struct heap_export export;
    void *base;

    (void)state;
    export = *make_heap();
    assert_int_equal(ops->heap_open(dev, &export, &base), EPX_OK);
    assert_ptr_equal(base, heap.base);
    ops->heap_close(dev, &export, base);
    assert_string_equal(heap.base, "from the parent");
    ops->heap_destroy(dev, &heap);
    assert_null(heap.base);
    assert_int_not_equal(ops->heap_open(dev, &export, &base), EPX_OK); /* gone */
}

static void untouched_heap_costs_nothing(void **state)
{
    struct heap big;
    struct stat st;
    char *base;

    (void)state;
    assert_int_equal(ops->heap_create(dev, BIG_HEAP, &big), EPX_OK);
    base = big.base;
    base[0] = base[BIG_HEAP / 2] = base[BIG_HEAP - 1] = 1;
    assert_int_equal(fstat((int)big.export.token, &st), 0);
    assert_true(st.st_blocks * 512 <= 3 * 2 * 1024 * 1024); /* three pages, however large pages are */
    ops->heap_destroy(dev, &big);
}

static void wrong_heap_size_is_an_error(void **state)
{
    struct heap none;

    (void)state;
    assert_int_equal(ops->heap_create(dev, 0, &none), EPX_ERR_ARGUMENT);
    assert_int_equal(ops->heap_create(dev, UINT64_MAX, &none), EPX_ERR_ARGUMENT);
    assert_int_equal(ops->heap_create(dev, (uint64_t)1 << 60, &none), EPX_ERR_MEMORY);
    assert_null(none.base);
}

static int open_descriptors(void)
{
    int fd, count = 0;
    struct stat st;

    for (fd = 0; fd < 256; fd++)
        count += fstat(fd, &st) == 0;
    return count;
}

static void heaps_leave_no_descriptor(void **state)
{
    struct heap_export export;
    int before = open_descriptors();
    pid_t owner;
    void *base;

    (void)state;
    make_heap();
    ops->heap_destroy(dev, &heap);
    owner = start_owner(&export);
    assert_int_equal(ops->heap_open(dev, &export, &base), EPX_OK);
    ops->heap_close(dev, &export, base);
    export.opaque[8] ^= 1;
    assert_int_equal(ops->heap_open(dev, &export, &base), EPX_ERR_PEER);
    kill(owner, SIGKILL);
    child_status(owner);
    assert_int_equal(open_descriptors(), before);
}

/* ---- Streams ------------------------------------------------------------------------------------------------- */

static void stream_is_asynchronous(void **state)
{
    struct device_stream *stream = new_stream();
    sem_t gate;
    int count = 0;

    (void)state;
    sem_init(&gate, 0, 0);
    assert_int_equal(ops->stream_query(dev, stream), EPX_OK);
    assert_int_equal(ops->stream_call(dev, stream, call_wait_gate, &gate), EPX_OK);
    assert_int_equal(ops->stream_call(dev, stream, call_add_one, &count), EPX_OK);
    assert_int_equal(ops->stream_query(dev, stream), EPX_ERR_NOT_READY);
    assert_int_equal(count, 0);
    sem_post(&gate);
    assert_int_equal(ops->stream_sync(dev, stream), EPX_OK);
    assert_int_equal(ops->stream_query(dev, stream), EPX_OK);
    assert_int_equal(count, 1);
    assert_int_equal(ops->stream_destroy(dev, stream), EPX_OK);
    sem_destroy(&gate);
}

static void long_queue_runs_in_order(void **state)
{
    enum { N = 10000 };
    static int list[N], copied;
    struct device_stream *stream = new_stream();
    struct append_params params = {.list = list};
    int length = 0, i;
    sem_t gate;

    (void)state;
    params.length = &length;
    sem_init(&gate, 0, 0);
    assert_int_equal(ops->stream_call(dev, stream, call_wait_gate, &gate), EPX_OK);
    for (i = 0; i < N; i++) {
        params.value = i; /* the launch has its own copy */
        assert_int_equal(ops->launch(dev, stream, (enum kernel_id)APPEND, &params, sizeof(params), 1), EPX_OK);
    }
    assert_int_equal(ops->stream_copy(dev, stream, &copied, &list[N - 1], sizeof(copied)), EPX_OK);
    params.value = -1;
    sem_post(&gate);
    assert_int_equal(ops->stream_sync(dev, stream), EPX_OK);
    assert_int_equal(length, N);
    for (i = 0; i < N; i++)
        assert_int_equal(list[i], i);
    assert_int_equal(copied, N - 1);
    assert_int_equal(ops->stream_destroy(dev, stream), EPX_OK);
    sem_destroy(&gate);
}

static void destroy_waits_for_queued_work(void **state)
{
    struct device_stream *stream = new_stream();
    int count = 0, i;

    (void)state;
    for (i = 0; i < 1000; i++)
        assert_int_equal(ops->stream_call(dev, stream, call_add_one, &count), EPX_OK);
    assert_int_equal(ops->stream_destroy(dev, stream), EPX_OK);
    assert_int_equal(count, 1000);
    assert_int_equal(ops->stream_destroy(dev, NULL), EPX_OK);
}

struct self_check {
    struct device_stream *stream;
    struct device_event *event;
    epx_status sync, destroy, event_sync;
    pthread_t thread;
    int open_signals;
};

static void call_self_check(void *arg)
{
    struct self_check *check = arg;
    sigset_t mask;

    check->thread = pthread_self();
    check->sync = ops->stream_sync(dev, check->stream);
    check->destroy = ops->stream_destroy(dev, check->stream);
    ops->event_record(dev, check->event, check->stream);
    check->event_sync = ops->event_sync(dev, check->event);
    pthread_sigmask(SIG_BLOCK, NULL, &mask);
    check->open_signals = !sigismember(&mask, SIGINT) || !sigismember(&mask, SIGTERM) || !sigismember(&mask, SIGUSR1);
}

static void call_runs_on_a_thread_of_the_device(void **state)
{
    struct self_check check = {.stream = new_stream(), .event = new_event()};

    (void)state;
    assert_int_equal(ops->stream_call(dev, check.stream, call_self_check, &check), EPX_OK);
    assert_int_equal(ops->stream_sync(dev, check.stream), EPX_OK);
    assert_false(pthread_equal(check.thread, pthread_self()));
    assert_int_equal(check.open_signals, 0);
    assert_int_equal(ops->stream_destroy(dev, check.stream), EPX_OK);
    ops->event_destroy(dev, check.event);
}

static void call_that_waits_for_its_own_stream_is_refused(void **state)
{
    struct self_check check = {.stream = new_stream(), .event = new_event()};

    (void)state;
    assert_int_equal(ops->stream_call(dev, check.stream, call_self_check, &check), EPX_OK);
    assert_int_equal(ops->stream_sync(dev, check.stream), EPX_OK);
    assert_int_equal(check.sync, EPX_ERR_USAGE);
    assert_int_equal(check.destroy, EPX_ERR_USAGE);
    assert_int_equal(check.event_sync, EPX_ERR_USAGE);
    assert_int_equal(ops->stream_destroy(dev, check.stream), EPX_OK);
    ops->event_destroy(dev, check.event);
}

/* Several threads queue on one stream and sync it: the counter has no lock of its own. */
struct crowd {
    struct device_stream *stream;
    int *count;
    int failures;
};

static void *crowd_main(void *arg)
{
    struct crowd *crowd = arg;
    int i;

    for (i = 0; i < 300; i++) {
        static int source = 5;
        int *copy = malloc(sizeof(*copy));

        *copy = 0;
        crowd->failures += ops->stream_call(dev, crowd->stream, call_add_one, crowd->count) != EPX_OK;
        crowd->failures += ops->stream_copy(dev, crowd->stream, copy, &source, sizeof(source)) != EPX_OK;
        crowd->failures += ops->stream_sync(dev, crowd->stream) != EPX_OK;
        crowd->failures += *copy != 5;
        free(copy);
    }
    return NULL;
}

static void many_threads_share_a_stream(void **state)
{
    enum { N = 4 };
    struct device_stream *stream = new_stream();
    struct crowd crowd[N];
    pthread_t threads[N];
    int count = 0, i;

    (void)state;
    for (i = 0; i < N; i++) {
        crowd[i] = (struct crowd){.stream = stream, .count = &count};
        assert_int_equal(pthread_create(&threads[i], NULL, crowd_main, &crowd[i]), 0);
    }
    for (i = 0; i < N; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(crowd[i].failures, 0);
    }
    assert_int_equal(count, N * 300);
    assert_int_equal(ops->stream_destroy(dev, stream), EPX_OK);
}

/* ---- Launches ------------------------------------------------------------------------------------------------ */

static void agents_of_a_launch_run_at_once(void **state)
{
    enum { MOST = 16 };
    struct device_stream *stream = new_stream();
    struct doorbell bell = {0};
    uint64_t arrived[2 * MOST] = {0};
    int runs[2 * MOST][MOST] = {{0}}, failures = 0, n, i;

    (void)state;
    for (n = 0; n < 2 * MOST; n++) { /* up and down again, all queued before the first sync */
        int agents = n < MOST ? n + 1 : 2 * MOST - n;
        struct meet_params params = {&arrived[n], &bell, runs[n], &failures};

        assert_int_equal(ops->launch(dev, stream, (enum kernel_id)MEET, &params, sizeof(params), agents), EPX_OK);
    }
    assert_int_equal(ops->stream_sync(dev, stream), EPX_OK);
    assert_int_equal(failures, 0);
    for (n = 0; n < 2 * MOST; n++) {
        for (i = 0; i < MOST; i++)
            assert_int_equal(runs[n][i], i < (n < MOST ? n + 1 : 2 * MOST - n));
    }
    assert_int_equal(ops->stream_destroy(dev, stream), EPX_OK);
}

static void call_meet(void *arg)
{
    pthread_barrier_wait(arg);
}

static void streams_run_side_by_side(void **state)
{
    enum { N = 6 };
    struct device_stream *streams[N];
    pthread_barrier_t barrier;
    int i;

    (void)state;
    pthread_barrier_init(&barrier, NULL, N); /* returns only once every stream is there */
    for (i = 0; i < N; i++) {
        streams[i] = new_stream();
        assert_int_equal(ops->stream_call(dev, streams[i], call_meet, &barrier), EPX_OK);
    }
    for (i = 0; i < N; i++)
        assert_int_equal(ops->stream_destroy(dev, streams[i]), EPX_OK);
    pthread_barrier_destroy(&barrier);
}

static void scratch_is_kept_between_launches(void **state)
{
    struct device_stream *stream = new_stream();
    void *first[3] = {0}, *second[3] = {0};
    struct scratch_params a = {first}, b = {second};
    int i;

    (void)state;
    assert_int_equal(ops->launch(dev, stream, (enum kernel_id)SCRATCH, &a, sizeof(a), 3), EPX_OK);
    assert_int_equal(ops->launch(dev, stream, (enum kernel_id)SCRATCH, &b, sizeof(b), 3), EPX_OK);
    assert_int_equal(ops->stream_sync(dev, stream), EPX_OK);
    for (i = 0; i < 3; i++) {
        assert_non_null(first[i]);
        assert_ptr_equal(first[i], second[i]);
        assert_ptr_not_equal(first[i], first[(i + 1) % 3]);
    }
    assert_int_equal(ops->stream_destroy(dev, stream), EPX_OK);
}

static void wrong_launches_are_refused(void **state)
{
    static uint8_t params[KERNEL_PARAMS_MAX + 1];
    struct device_stream *stream = new_stream();

    (void)state;
    assert_int_equal(ops->launch(dev, stream, KERNEL_COUNT, params, 8, 1), EPX_ERR_INTERNAL);
    assert_int_equal(ops->launch(dev, stream, (enum kernel_id)APPEND, params, sizeof(params), 1), EPX_ERR_INTERNAL);
    assert_int_equal(ops->launch(dev, stream, (enum kernel_id)APPEND, params, 8, 0), EPX_ERR_ARGUMENT);
    assert_int_equal(ops->launch(dev, stream, (enum kernel_id)APPEND, params, 8, CPU_MAX_AGENTS + 1), EPX_ERR_ARGUMENT);
    assert_int_equal(ops->stream_query(dev, stream), EPX_OK);
    assert_int_equal(ops->stream_destroy(dev, stream), EPX_OK);
}

/* Stacks larger than the address space: no thread can be started. */
static void set_stack_size(size_t bytes, size_t *old)
{
    pthread_attr_t attr;

    assert_int_equal(pthread_getattr_default_np(&attr), 0);
    if (old)
        assert_int_equal(pthread_attr_getstacksize(&attr, old), 0);
    assert_int_equal(pthread_attr_setstacksize(&attr, bytes), 0);
    assert_int_equal(pthread_setattr_default_np(&attr), 0);
    pthread_attr_destroy(&attr);
}

static void missing_threads_are_an_error_and_nothing_more(void **state)
{
    struct device_stream *stream = new_stream(), *none;
    struct doorbell bell = {0};
    uint64_t arrived = 0;
    int runs[4] = {0}, failures = 0;
    struct meet_params params = {&arrived, &bell, runs, &failures};
    size_t old;

    (void)state;
    set_stack_size((size_t)1 << 50, &old);
    assert_int_equal(ops->stream_create(dev, &none), EPX_ERR_SYSTEM);
    assert_null(none);
    assert_int_equal(ops->launch(dev, stream, (enum kernel_id)MEET, &params, sizeof(params), 4), EPX_ERR_SYSTEM);
    set_stack_size(old, NULL);
    assert_int_equal(ops->launch(dev, stream, (enum kernel_id)MEET, &params, sizeof(params), 4), EPX_OK);
    assert_int_equal(ops->stream_sync(dev, stream), EPX_OK);
    assert_int_equal(arrived, 4);
    assert_int_equal(failures, 0);
    assert_int_equal(ops->stream_destroy(dev, stream), EPX_OK);
}

/* ---- Events -------------------------------------------------------------------------------------------------- */

static void event_never_recorded_is_reached(void **state)
{
    struct device_stream *stream = new_stream();
    struct device_event *event = new_event();

    (void)state;
    assert_int_equal(ops->event_query(dev, event), EPX_OK);
    assert_int_equal(ops->event_sync(dev, event), EPX_OK);
    assert_int_equal(ops->stream_wait(dev, stream, event), EPX_OK);
    assert_int_equal(ops->stream_sync(dev, stream), EPX_OK);
    ops->event_destroy(dev, event);
    ops->event_destroy(dev, NULL);
    assert_int_equal(ops->stream_destroy(dev, stream), EPX_OK);
}

static void event_is_reached_when_its_stream_gets_there(void **state)
{
    struct device_stream *stream = new_stream();
    struct device_event *event = new_event();
    int count = 0;
    sem_t gate, later;

    (void)state;
    sem_init(&gate, 0, 0);
    sem_init(&later, 0, 0);
    ops->stream_call(dev, stream, call_wait_gate, &gate);
    ops->stream_call(dev, stream, call_add_one, &count);
    assert_int_equal(ops->event_record(dev, event, stream), EPX_OK);
    ops->stream_call(dev, stream, call_wait_gate, &later);
    assert_int_equal(ops->event_query(dev, event), EPX_ERR_NOT_READY);
    sem_post(&gate);
    assert_int_equal(ops->event_sync(dev, event), EPX_OK);
    assert_int_equal(count, 1);
    assert_int_equal(ops->event_query(dev, event), EPX_OK);
    assert_int_equal(ops->stream_query(dev, stream), EPX_ERR_NOT_READY); /* not the work after it */
    sem_post(&later);
    assert_int_equal(ops->stream_destroy(dev, stream), EPX_OK);
    ops->event_destroy(dev, event);
}

static void recording_anew_moves_the_event_not_its_waiters(void **state)
{
    struct device_stream *slow = new_stream(), *fast = new_stream(), *waiter = new_stream();
    struct device_event *event = new_event();
    int count = 0;
    sem_t gate;

    (void)state;
    sem_init(&gate, 0, 0);
    ops->stream_call(dev, slow, call_wait_gate, &gate);
    assert_int_equal(ops->event_record(dev, event, slow), EPX_OK);
    assert_int_equal(ops->stream_wait(dev, waiter, event), EPX_OK); /* this record */
    ops->stream_call(dev, waiter, call_add_one, &count);
    assert_int_equal(ops->event_record(dev, event, fast), EPX_OK);
    assert_int_equal(ops->event_sync(dev, event), EPX_OK); /* the new one, which nothing holds up */
    assert_int_equal(ops->stream_query(dev, waiter), EPX_ERR_NOT_READY);
    assert_int_equal(ops->stream_query(dev, slow), EPX_ERR_NOT_READY);
    ops->event_destroy(dev, event); /* waiters keep what they wait for */
    sem_post(&gate);
    assert_int_equal(ops->stream_sync(dev, waiter), EPX_OK);
    assert_int_equal(count, 1);
    ops->stream_destroy(dev, slow);
    ops->stream_destroy(dev, fast);
    ops->stream_destroy(dev, waiter);
}

static void streams_take_turns_by_events(void **state)
{
    enum { N = 500 };
    static int list[2 * N];
    struct device_stream *streams[2] = {new_stream(), new_stream()};
    struct device_event *events[2] = {new_event(), new_event()};
    int length = 0, i;

    (void)state;
    for (i = 0; i < 2 * N; i++) {
        struct append_params params = {.list = list, .length = &length, .value = i};
        int turn = i % 2;

        assert_int_equal(ops->stream_wait(dev, streams[turn], events[!turn]), EPX_OK);
        assert_int_equal(ops->launch(dev, streams[turn], (enum kernel_id)APPEND, &params, sizeof(params), 1 + i % 3),
                         EPX_OK);
        assert_int_equal(ops->event_record(dev, events[turn], streams[turn]), EPX_OK);
    }
    assert_int_equal(ops->event_sync(dev, events[1]), EPX_OK);
    assert_int_equal(length, 2 * N);
    for (i = 0; i < 2 * N; i++)
        assert_int_equal(list[i], i);
    for (i = 0; i < 2; i++) {
        ops->stream_destroy(dev, streams[i]);
        ops->event_destroy(dev, events[i]);
    }
}

static void wait_for_an_event_of_the_same_stream_is_no_wait(void **state)
{
    struct device_stream *stream = new_stream();
    struct device_event *event = new_event();
    int count = 0;

    (void)state;
    ops->stream_call(dev, stream, call_add_one, &count);
    assert_int_equal(ops->event_record(dev, event, stream), EPX_OK);
    assert_int_equal(ops->stream_wait(dev, stream, event), EPX_OK);
    ops->stream_call(dev, stream, call_add_one, &count);
    assert_int_equal(ops->stream_sync(dev, stream), EPX_OK);
    assert_int_equal(count, 2);
    ops->stream_destroy(dev, stream);
    assert_int_equal(ops->event_query(dev, event), EPX_OK); /* outlives its stream */
    ops->event_destroy(dev, event);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(auto_follows_the_environment),
        cmocka_unit_test(devices_of_other_builds_are_refused),
        cmocka_unit_test(every_operation_is_there),
        cmocka_unit_test(identity_is_that_of_the_machine_and_user),
        cmocka_unit_test(agents_share_the_cpus_among_ranks),
        cmocka_unit_test(memory_is_zeroed_and_aligned),
        cmocka_unit_test(impossible_memory_is_an_error),
        cmocka_unit_test(heap_is_shared_between_processes),
        cmocka_unit_test(another_file_is_refused),
        cmocka_unit_test(another_user_gets_a_clear_message),
        cmocka_unit_test(heap_size_is_sealed),
        cmocka_unit_test(mapping_outlives_a_killed_owner),
        cmocka_unit_test(own_heap_keeps_its_address),
        cmocka_unit_test(untouched_heap_costs_nothing),
        cmocka_unit_test(wrong_heap_size_is_an_error),
        cmocka_unit_test(heaps_leave_no_descriptor),
        cmocka_unit_test(stream_is_asynchronous),
        cmocka_unit_test(long_queue_runs_in_order),
        cmocka_unit_test(destroy_waits_for_queued_work),
        cmocka_unit_test(call_runs_on_a_thread_of_the_device),
        cmocka_unit_test(call_that_waits_for_its_own_stream_is_refused),
        cmocka_unit_test(many_threads_share_a_stream),
        cmocka_unit_test(agents_of_a_launch_run_at_once),
        cmocka_unit_test(streams_run_side_by_side),
        cmocka_unit_test(scratch_is_kept_between_launches),
        cmocka_unit_test(wrong_launches_are_refused),
        cmocka_unit_test(missing_threads_are_an_error_and_nothing_more),
        cmocka_unit_test(event_never_recorded_is_reached),
        cmocka_unit_test(event_is_reached_when_its_stream_gets_there),
        cmocka_unit_test(recording_anew_moves_the_event_not_its_waiters),
        cmocka_unit_test(streams_take_turns_by_events),
        cmocka_unit_test(wait_for_an_event_of_the_same_stream_is_no_wait),
    };

    return cmocka_run_group_tests(tests, set_up, tear_down);
}
