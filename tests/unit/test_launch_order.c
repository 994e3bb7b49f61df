/* SPDX-License-Identifier: Apache-2.0 */
/* Operations of a group run in the order in which they are issued, on whatever streams; captured ones are apart. */
#include <string.h>

#include "group/launch.h"
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

static epx_status record(struct device *device, struct device_event *event, struct device_stream *stream)
{
    (void)device;
    (void)event;
    tell("record", stream);
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

static const struct device_ops fake_ops = {
    .event_record = record, .stream_wait = wait, .launch = launch, .stream_captures = captures};
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
    capture_of[3] = capture_of[4] = 9; /* the next capture of the same streams */
    run(&group, (const int[]){4, 3, 0});
    assert_string_equal(story, "l4 r4 w3 l3 ");
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

UNIT_TESTS(test_streams_wait_for_each_other, test_captured_stream_stands_apart,
           test_streams_of_one_capture_wait_for_each_other, test_nobody_is_pulled_into_a_capture)
