/* SPDX-License-Identifier: Apache-2.0 */
/* Operations of a group run in the order in which they are issued, on whatever streams; captured ones are apart. */
#include <string.h>

#include "group/launch.h"
#include "group/streams.h"
#include "tests/lib/unit.h"

/* Streams are numbers here, and what a device is asked is written down. */
#define STREAM(n) ((struct device_stream *)(uintptr_t)(n))

static char story[256];
static uint64_t capture_of[10]; /* of each stream; 0: none */

static void tell(const char *what, struct device_stream *stream)
{
    const size_t at = strlen(story);

    assert_true(at + strlen(what) + 3 < sizeof(story));
    story[at] = what[0];
    story[at + 1] = (char)('0' + (int)(uintptr_t)stream);
    story[at + 2] = ' ';
    story[at + 3] = 0;
}

static int refuses; /* to record events */

static epx_status record(struct device *device, struct device_event *event, struct device_stream *stream)
{
    (void)device;
    (void)event;
    if (refuses)
        return EPX_ERR_SYSTEM;
    tell("record", stream);
    return EPX_OK;
}

static epx_status sync_stream(struct device *device, struct device_stream *stream)
{
    (void)device;
    tell("sync", stream);
    return EPX_OK;
}

static epx_status wait(struct device *device, struct device_stream *stream, struct device_event *event)
{
    (void)device;
    (void)event;
    tell("wait", stream);
    return EPX_OK;
}

static epx_status launch(struct device *device, struct device_stream *stream, enum kernel_id id, const void *params,
                         size_t bytes, int agents)
{
    (void)device;
    (void)id;
    (void)params;
    (void)bytes;
    (void)agents;
    tell("launch", stream);
    return EPX_OK;
}

static uint64_t captures(struct device *device, struct device_stream *stream)
{
    (void)device;
    return capture_of[(uintptr_t)stream];
}

static const struct device_ops fake_ops = {.caps = DEVICE_HOST_ACCESS,
                                           .event_record = record,
                                           .stream_wait = wait,
                                           .stream_sync = sync_stream,
                                           .launch = launch,
                                           .stream_captures = captures};
static struct device fake = {.ops = &fake_ops};

static void run(struct epx_group *group, const int *streams)
{
    story[0] = 0;
    for (; *streams; streams++)
        assert_int_equal(launch_ordered(group, STREAM(*streams), KERNEL_LL_DISPATCH, NULL, 0), EPX_OK);
}

static void test_streams_wait_for_each_other(void **state)
{
    struct epx_group group = {.device = &fake};

    (void)state;
    memset(capture_of, 0, sizeof(capture_of));
    run(&group, (const int[]){1, 1, 2, 1, 0});
    assert_string_equal(story, "l1 l1 r1 w2 l2 r2 w1 l1 ");
}

/* A captured stream may not wait for one outside its graph, and no later work may wait for it: CUDA refuses both. */
static void test_captured_stream_stands_apart(void **state)
{
    struct epx_group group = {.device = &fake};

    (void)state;
    memset(capture_of, 0, sizeof(capture_of));
    capture_of[3] = 7;
    run(&group, (const int[]){1, 3, 3, 1, 2, 0});
    assert_string_equal(story, "l1 l3 l3 l1 r1 w2 l2 ");
    assert_ptr_equal(group.last_stream, STREAM(2));
}

/* Kernels count operations when they run: two branches of a graph would do so in another order on each rank. */
static void test_streams_of_one_capture_wait_for_each_other(void **state)
{
    struct epx_group group = {.device = &fake};

    (void)state;
    memset(capture_of, 0, sizeof(capture_of));
    capture_of[3] = capture_of[4] = 7;
    capture_of[5] = 8;
    run(&group, (const int[]){1, 3, 4, 4, 3, 5, 1, 0}); /* 5 is of another capture, 1 of none */
    assert_string_equal(story, "l1 l3 r3 w4 l4 l4 r4 w3 l3 l5 l1 ");
    run(&group, (const int[]){4, 5, 3, 0}); /* both go on */
    assert_string_equal(story, "r3 w4 l4 l5 r4 w3 l3 ");
    capture_of[3] = capture_of[4] = 9; /* the next capture of the same streams */
    run(&group, (const int[]){4, 3, 0});
    assert_string_equal(story, "l4 r4 w3 l3 ");
}

/* A launch of each group in turn: "A1" is group A on stream 1. */
static void run_groups(struct epx_group *a, struct epx_group *b, const char *calls)
{
    story[0] = 0;
    for (; *calls; calls += 2)
        assert_int_equal(launch_ordered(*calls == 'A' ? a : b, STREAM(calls[1] - '0'), KERNEL_LL_DISPATCH, NULL, 0),
                         EPX_OK);
}

/* Two kernels that wait for other ranks may not fit on a GPU at the same time. */
static void test_groups_wait_for_each_other(void **state)
{
    struct epx_group a = {.device = &fake}, b = a, c = a, d = a, e = a;

    (void)state;
    memset(capture_of, 0, sizeof(capture_of));
    run_groups(&a, &b, "A1B2A3");
    assert_string_equal(story, "l1 l2 r1 w3 l3 "); /* not yet */
    assert_int_equal(launch_share_turns(&a, &b), EPX_OK);
    assert_int_equal(launch_share_turns(&a, &b), EPX_OK);
    run_groups(&a, &b, "A3B2A1B1A1");
    assert_string_equal(story, "l3 r3 w2 l2 r3 w1 r2 w1 l1 r2 w1 l1 l1 ");
    assert_int_equal(launch_share_turns(&c, &b), EPX_OK); /* a third one */
    run_groups(&c, &a, "A1B1A2B3");
    assert_string_equal(story, "l1 l1 r1 w2 r1 w2 l2 r1 w3 r2 w3 l3 ");
    assert_int_equal(launch_share_turns(&d, &e), EPX_OK);
    assert_int_equal(launch_share_turns(&d, &b), EPX_ERR_USAGE);
    for (int i = 0; i < 5; i++)
        launch_leave_turns((struct epx_group *[]){&a, &b, &c, &d, &e}[i]);
}

/* An operation that fails has no turn. */
static void test_a_group_that_fails(void **state)
{
    struct epx_group a = {.device = &fake}, b = a, c = a;

    (void)state;
    memset(capture_of, 0, sizeof(capture_of));
    assert_int_equal(launch_share_turns(&a, &b), EPX_OK);
    assert_int_equal(launch_share_turns(&c, &b), EPX_OK);
    run_groups(&a, &b, "A1");
    refuses = 1;
    assert_int_equal(launch_ordered(&b, STREAM(2), KERNEL_LL_DISPATCH, NULL, 0), EPX_ERR_SYSTEM);
    refuses = 0;
    run_groups(&c, &b, "A3");
    assert_string_equal(story, "r1 w3 l3 ");
    for (int i = 0; i < 3; i++)
        launch_leave_turns((struct epx_group *[]){&a, &b, &c}[i]);
}

/* A wait for a stream that captures would end the capture. */
static void test_the_end_of_a_group_beside_a_capture(void **state)
{
    struct epx_group group = {.device = &fake, .default_stream = STREAM(9)};

    (void)state;
    memset(capture_of, 0, sizeof(capture_of));
    run(&group, (const int[]){1, 0});
    assert_int_equal(streams_sync_all(&group), EPX_OK);
    assert_string_equal(story, "l1 s9 s1 ");
    capture_of[1] = 7;
    story[0] = 0;
    assert_int_equal(streams_sync_all(&group), EPX_OK);
    assert_string_equal(story, "s9 ");
}

/* Streams and groups that have ended are not waited for. */
static void test_groups_that_end(void **state)
{
    struct epx_group a = {.device = &fake}, b = {.device = &fake};

    (void)state;
    memset(capture_of, 0, sizeof(capture_of));
    assert_int_equal(launch_share_turns(&a, &b), EPX_OK);
    run_groups(&a, &b, "A1");
    launch_forget_stream(&a, STREAM(1));
    run_groups(&a, &b, "B2A1");
    assert_string_equal(story, "l2 r2 w1 l1 ");
    launch_leave_turns(&a);
    run_groups(&a, &b, "B3");
    assert_string_equal(story, "r2 w3 l3 ");
    launch_leave_turns(&b);
    assert_null(b.turns);
}

/* In a capture they keep their order; outside of it nobody waits for a stream that captures. */
static void test_groups_and_captures(void **state)
{
    struct epx_group a = {.device = &fake}, b = {.device = &fake};

    (void)state;
    memset(capture_of, 0, sizeof(capture_of));
    assert_int_equal(launch_share_turns(&a, &b), EPX_OK);
    capture_of[3] = capture_of[4] = 7;
    run_groups(&a, &b, "A1A3B4B2A3B4");
    assert_string_equal(story, "l1 l3 r3 w4 l4 r1 w2 l2 r4 w3 l3 r3 w4 l4 ");
    capture_of[5] = 8; /* of another capture, which goes on at the same time */
    run_groups(&a, &b, "A5B3");
    assert_string_equal(story, "l5 r4 w3 l3 ");
    launch_forget_stream(&b, STREAM(3));
    run_groups(&a, &b, "A4");
    assert_string_equal(story, "r3 w4 l4 "); /* A's own */
    capture_of[5] = 0;
    capture_of[3] = capture_of[4] = 0;
    capture_of[2] = 8; /* the stream of B's last operation */
    run_groups(&a, &b, "A5");
    assert_string_equal(story, "r1 w5 l5 ");
    launch_leave_turns(&a);
    launch_leave_turns(&b);
}

/* An event of a captured stream would pull the other stream into the capture. */
static void test_nobody_is_pulled_into_a_capture(void **state)
{
    struct epx_group group = {.device = &fake};

    (void)state;
    memset(capture_of, 0, sizeof(capture_of));
    run(&group, (const int[]){1, 0});
    capture_of[1] = 7;
    assert_int_equal(launch_ordered(&group, STREAM(2), KERNEL_LL_DISPATCH, NULL, 0), EPX_ERR_USAGE);
    capture_of[1] = 0;
    run(&group, (const int[]){2, 0});
    assert_string_equal(story, "r1 w2 l2 ");
}

/* On a GPU 2 is cudaStreamPerThread: to the thread that comes next it is another stream. The default stream, which is 9
 * here, stands for it. */
static void test_the_stream_of_a_thread_is_named_by_no_other(void **state)
{
    struct device_ops gpu_ops = fake_ops;
    struct device gpu = {.ops = &gpu_ops};
    struct epx_group a = {.device = &gpu, .default_stream = STREAM(9)}, b = a;

    (void)state;
    memset(capture_of, 0, sizeof(capture_of));
    gpu_ops.caps = 0;
    run(&a, (const int[]){2, 2, 3, 0});
    assert_string_equal(story, "l2 r2 w9 r9 w2 l2 r2 w9 r9 w3 l3 ");
    run(&a, (const int[]){2, 0});
    assert_ptr_equal(a.last_stream, STREAM(9));
    assert_int_equal(launch_share_turns(&a, &b), EPX_OK);
    run_groups(&a, &b, "B1");
    assert_string_equal(story, "r9 w1 l1 ");
    launch_leave_turns(&a);
    launch_leave_turns(&b);
    capture_of[2] = 7; /* a graph of this thread has its own order */
    run(&a, (const int[]){2, 2, 0});
    assert_string_equal(story, "l2 l2 ");
    capture_of[2] = 0;
    capture_of[9] = 8; /* what captures waits for nothing outside its graph */
    a.last_stream = NULL;
    run(&a, (const int[]){2, 2, 0});
    assert_string_equal(story, "l2 l2 ");
}

UNIT_TESTS(test_the_stream_of_a_thread_is_named_by_no_other, test_streams_wait_for_each_other,
           test_captured_stream_stands_apart, test_streams_of_one_capture_wait_for_each_other,
           test_nobody_is_pulled_into_a_capture, test_groups_wait_for_each_other, test_groups_that_end,
           test_groups_and_captures, test_a_group_that_fails, test_the_end_of_a_group_beside_a_capture)
