/* SPDX-License-Identifier: Apache-2.0 */
/* The CPU device: opening, identity, memory, launches. */
#include "tests/unit/cpu_fixture.h"

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

/* ---- Identity and agents ------------------------------------------------------------------------------------- */

static void identity_is_that_of_the_machine_and_user(void **state)
{
    uint8_t mine[64], child_id[64];
    int pipes[2], round;

    (void)state;
    assert_int_equal(ops->identity(dev, mine), EPX_OK);
    assert_string_equal((char *)mine, "cpu");
    for (round = 0; round < (geteuid() == 0 ? 2 : 1); round++) { /* the second: another user */
        const pid_t child = fork_with_pipe(pipes);

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
        close_pipe(pipes);
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

UNIT_TESTS_WITHIN(set_up, tear_down, auto_follows_the_environment, devices_of_other_builds_are_refused,
                  every_operation_is_there, identity_is_that_of_the_machine_and_user, agents_share_the_cpus_among_ranks,
                  memory_is_zeroed_and_aligned, impossible_memory_is_an_error, agents_of_a_launch_run_at_once,
                  streams_run_side_by_side, scratch_is_kept_between_launches, wrong_launches_are_refused,
                  missing_threads_are_an_error_and_nothing_more)
