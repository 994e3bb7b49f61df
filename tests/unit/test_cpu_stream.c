/* SPDX-License-Identifier: Apache-2.0 */
/* Streams and events of the CPU device. */
#include "tests/unit/cpu_fixture.h"

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

/* What call_self_check has found. Its stream and event are gone. */
static struct self_check self_checked(void)
{
    struct self_check check = {.stream = new_stream(), .event = new_event()};

    assert_int_equal(ops->stream_call(dev, check.stream, call_self_check, &check), EPX_OK);
    assert_int_equal(ops->stream_sync(dev, check.stream), EPX_OK);
    assert_int_equal(ops->stream_destroy(dev, check.stream), EPX_OK);
    ops->event_destroy(dev, check.event);
    return check;
}

static void call_runs_on_a_thread_of_the_device(void **state)
{
    const struct self_check check = self_checked();

    (void)state;
    assert_false(pthread_equal(check.thread, pthread_self()));
    assert_int_equal(check.open_signals, 0);
}

static void call_that_waits_for_its_own_stream_is_refused(void **state)
{
    const struct self_check check = self_checked();

    (void)state;
    assert_int_equal(check.sync, EPX_ERR_USAGE);
    assert_int_equal(check.destroy, EPX_ERR_USAGE);
    assert_int_equal(check.event_sync, EPX_ERR_USAGE);
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

UNIT_TESTS_WITHIN(set_up, tear_down, stream_is_asynchronous, long_queue_runs_in_order, destroy_waits_for_queued_work,
                  call_runs_on_a_thread_of_the_device, call_that_waits_for_its_own_stream_is_refused,
                  many_threads_share_a_stream, event_never_recorded_is_reached,
                  event_is_reached_when_its_stream_gets_there, recording_anew_moves_the_event_not_its_waiters,
                  streams_take_turns_by_events, wait_for_an_event_of_the_same_stream_is_no_wait)
