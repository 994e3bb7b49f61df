/* SPDX-License-Identifier: Apache-2.0 */
/* ctest: labels=leaks */
/* Graphs of the CPU device and of epx.h: what is recorded does not run, every launch runs all of it in order. */
#include <string.h>

#include "device/device.h"
#include "group/objects.h"
#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"
#include "util/pause.h"

static struct device *device;
static struct device_stream *stream, *other;

static int open_device(void **state)
{
    (void)state;
    if (device_open(EPX_DEVICE_CPU, 0, &device) != EPX_OK || device->ops->stream_create(device, &stream) != EPX_OK)
        return -1;
    return device->ops->stream_create(device, &other) == EPX_OK ? 0 : -1;
}

static int close_device(void **state)
{
    (void)state;
    device->ops->stream_destroy(device, stream);
    device->ops->stream_destroy(device, other);
    device->ops->close(device);
    return 0;
}

static void times_three(void *arg)
{
    *(int *)arg *= 3;
}

static void plus_one(void *arg)
{
    *(int *)arg += 1;
}

static struct device_graph *record(int *value, int *copy)
{
    struct device_graph *graph = NULL;

    assert_int_equal(device->ops->graph_begin(device, stream), EPX_OK);
    assert_true(device->ops->stream_captures(device, stream));
    assert_int_equal(device->ops->stream_call(device, stream, plus_one, value), EPX_OK);
    assert_int_equal(device->ops->stream_call(device, stream, times_three, value), EPX_OK);
    assert_int_equal(device->ops->stream_copy(device, stream, copy, value, sizeof(*value)), EPX_OK);
    assert_int_equal(device->ops->graph_end(device, stream, &graph), EPX_OK);
    assert_false(device->ops->stream_captures(device, stream));
    return graph;
}

static void every_launch_runs_all_in_order(void **state)
{
    int value = 1, copy = 0;
    struct device_graph *graph = record(&value, &copy);

    (void)state;
    assert_true(device->ops->caps & DEVICE_GRAPHS);
    assert_int_equal(device->ops->stream_sync(device, stream), EPX_OK);
    assert_int_equal(value, 1); /* recording runs nothing */
    assert_int_equal(device->ops->graph_launch(device, graph, stream), EPX_OK);
    assert_int_equal(device->ops->graph_launch(device, graph, stream), EPX_OK);
    assert_int_equal(device->ops->stream_sync(device, stream), EPX_OK);
    assert_int_equal(value, 21);
    assert_int_equal(copy, 21);
    assert_int_equal(device->ops->graph_launch(device, graph, other), EPX_OK);
    assert_int_equal(device->ops->stream_sync(device, other), EPX_OK);
    assert_int_equal(value, 66);
    device->ops->graph_destroy(device, graph);
}

static void what_a_graph_cannot_have_is_refused(void **state)
{
    struct device_graph *graph = NULL, *outer = NULL;
    struct device_event *event = NULL;
    int value = 0, copy = 0;

    (void)state;
    graph = record(&value, &copy);
    assert_int_equal(device->ops->event_create(device, &event), EPX_OK);
    assert_int_equal(device->ops->graph_end(device, stream, &outer), EPX_ERR_USAGE);
    assert_null(outer);
    assert_int_equal(device->ops->graph_begin(device, stream), EPX_OK);
    assert_int_equal(device->ops->graph_begin(device, stream), EPX_ERR_USAGE);
    assert_int_equal(device->ops->stream_sync(device, stream), EPX_ERR_USAGE);
    assert_int_equal(device->ops->event_record(device, event, stream), EPX_ERR_UNSUPPORTED);
    assert_int_equal(device->ops->graph_launch(device, graph, stream), EPX_ERR_UNSUPPORTED);
    assert_int_equal(device->ops->graph_end(device, stream, &outer), EPX_OK);
    device->ops->graph_destroy(device, outer);
    device->ops->graph_destroy(device, graph);
    device->ops->event_destroy(device, event);
}

/* ---- epx.h ------------------------------------------------------------------------------------------------------ */

/* A dispatch and a combine, each a graph, with new rows at every launch. */
static int replay(struct fixture *s)
{
    epx_graph *dispatch = NULL, *combine = NULL;
    epx_status status = epx_graph_begin(s->group, NULL);

    if (status == EPX_OK)
        status = epx_dispatch(s->ll, &s->in, &s->ll_out, &s->ll_info, NULL, NULL);
    if (epx_graph_end(s->group, NULL, &dispatch) != EPX_OK || status != EPX_OK)
        return fixture_fail(s, "recording a dispatch");
    status = epx_graph_begin(s->group, NULL);
    if (status == EPX_OK)
        status = epx_combine(s->ll, &s->ll_cin, &s->cout, NULL, NULL);
    if (epx_graph_end(s->group, NULL, &combine) != EPX_OK || status != EPX_OK)
        return fixture_fail(s, "recording a combine");
    for (int round = 0; round < 3; round++) {
        fixture_refill(s);
        if (fixture_sync(s, epx_graph_launch(dispatch, NULL)) != EPX_OK)
            return fixture_fail(s, "launching a dispatch");
        if (fixture_check_ll_dispatch(s))
            return -1;
        if (fixture_sync(s, epx_graph_launch(combine, NULL)) != EPX_OK)
            return fixture_fail(s, "launching a combine");
        if (fixture_check_ll_combine(s))
            return -1;
    }
    if (epx_graph_destroy(dispatch) != EPX_OK || epx_graph_destroy(dispatch) != EPX_ERR_ARGUMENT)
        return fixture_fail(s, "a graph is destroyed once");
    return 0; /* the other one goes with its group */
}

static int live_update(struct fixture *s)
{
    return fixture_ll(s) ? -1 : replay(s); /* the handle has its routing now */
}

static void operations_are_recorded_and_replayed(void **state)
{
    (void)state;
    assert_int_equal(fixture_run(3, NULL, live_update, NULL), 0);
}

static epx_status dispatch_again(struct fixture *s)
{
    return epx_dispatch(s->ll, &s->in, &s->ll_out, &s->ll_info, NULL, NULL);
}

/* A dispatch that is staged, in one of two slots, and a graph of `count` dispatches. */
static int stage_and_record(struct fixture *s, epx_handle **staged, epx_graph **graph, int count)
{
    const epx_handle_config as_ll = fixture_handle_config(EPX_LOW_LATENCY, EPX_EXPERT_MAJOR, FIXTURE_TOPK);
    epx_dispatch_config send_only = EPX_DISPATCH_CONFIG_INIT;

    send_only.send_only = 1;
    if (fixture_ll(s) || epx_handle_create(staged, s->group, &as_ll) != EPX_OK ||
        epx_handle_update(*staged, &s->idx, NULL, NULL) != EPX_OK)
        return fixture_fail(s, "a second handle");
    if (epx_dispatch(*staged, &s->in, &s->ll_out, NULL, &send_only, NULL) != EPX_OK)
        return fixture_fail(s, "a staged dispatch");
    if (epx_graph_begin(s->group, NULL) != EPX_OK)
        return fixture_fail(s, "recording");
    for (int i = 0; i < count; i++)
        if (dispatch_again(s) != EPX_OK)
            return fixture_fail(s, "recording beside a staged dispatch");
    return epx_graph_end(s->group, NULL, graph) == EPX_OK ? 0 : fixture_fail(s, "the end of a recording");
}

static int refuses(struct fixture *s, epx_status status, const char *message)
{
    if (status == EPX_ERR_BUSY && strstr(epx_last_error(), message) && strstr(epx_last_error(), "max_inflight = 2"))
        return 0;
    return fixture_fail(s, message);
}

/* The second dispatch of the graph needs the slot of the one that is staged: of two, the graph uses both. */
static int launch_while_staged(struct fixture *s)
{
    epx_handle *staged = NULL;
    epx_graph *graph = NULL;

    if (stage_and_record(s, &staged, &graph, 2) ||
        refuses(s, epx_graph_launch(graph, NULL), "epx_graph_launch: 1 staged"))
        return -1;
    if (epx_complete(staged, NULL) != EPX_OK || epx_handle_destroy(staged) != EPX_OK)
        return fixture_fail(s, "completing");
    fixture_refill(s);
    if (fixture_sync(s, epx_graph_launch(graph, NULL)) != EPX_OK)
        return fixture_fail(s, "launching after the completion");
    return fixture_check_ll_dispatch(s);
}

/* The graph uses the slot that is left. Its launch counts: what follows needs the slot of the one that is staged. */
static int launch_beside_staged(struct fixture *s)
{
    epx_handle *staged = NULL;
    epx_graph *graph = NULL;

    if (stage_and_record(s, &staged, &graph, 1))
        return -1;
    if (epx_graph_launch(graph, NULL) != EPX_OK)
        return fixture_fail(s, "a launch that finds a slot");
    if (refuses(s, epx_graph_launch(graph, NULL), "epx_graph_launch: 1 staged") ||
        refuses(s, dispatch_again(s), "epx_dispatch: 1 staged"))
        return -1;
    if (epx_complete(staged, NULL) != EPX_OK || epx_handle_destroy(staged) != EPX_OK)
        return fixture_fail(s, "completing");
    fixture_refill(s);
    return fixture_sync(s, dispatch_again(s)) == EPX_OK ? fixture_check_ll_dispatch(s) : fixture_fail(s, "afterwards");
}

static void a_launch_that_needs_a_staged_slot_is_refused(void **state)
{
    (void)state;
    assert_int_equal(fixture_run(2, NULL, launch_while_staged, NULL), 0);
}

static void a_launch_beside_a_staged_operation_counts(void **state)
{
    (void)state;
    assert_int_equal(fixture_run(2, NULL, launch_beside_staged, NULL), 0);
}

static void take_a_while(void *arg)
{
    (void)arg;
    pause_ns(200000000u);
}

/* Behind something slow, so that its count cannot be there already. */
static int expect_rows(struct fixture *s, const epx_tensor *idx, int64_t expected)
{
    int64_t rows = -1;

    if (epx_stream_call(s->group, NULL, take_a_while, NULL) != EPX_OK ||
        epx_handle_update(s->ht, idx, NULL, NULL) != EPX_OK || epx_handle_recv_count(s->ht, &rows, NULL) != EPX_OK)
        return fixture_fail(s, "an update beside a graph's");
    return rows == expected ? 0 : fixture_fail(s, "the count is that of another update");
}

/* A graph's update counts neither as one that is still to run, nor, when it has run more than once, as the next. */
static int update_in_a_graph(struct fixture *s)
{
    int64_t none[FIXTURE_TOKENS * FIXTURE_TOPK];
    const epx_tensor nowhere = epx_tensor_make(none, EPX_INT64, 2, FIXTURE_TOKENS, FIXTURE_TOPK, 0, 0);
    epx_graph *graph = NULL;

    memset(none, 0xff, sizeof(none));
    fixture_refill(s);
    if (epx_graph_begin(s->group, NULL) != EPX_OK || epx_handle_update(s->ht, &s->idx, NULL, NULL) != EPX_OK ||
        epx_graph_end(s->group, NULL, &graph) != EPX_OK)
        return fixture_fail(s, "recording an update");
    if (expect_rows(s, &s->idx, s->ht_recv.total) || fixture_ht(s))
        return -1;
    for (int i = 0; i < 3; i++)
        if (fixture_sync(s, epx_graph_launch(graph, NULL)) != EPX_OK)
            return fixture_fail(s, "launching an update");
    return expect_rows(s, &nowhere, 0) || fixture_ht(s) ? -1 : 0;
}

static void updates_beside_those_of_graphs_are_counted(void **state)
{
    epx_group_config config = fixture_config(20000);

    (void)state;
    assert_int_equal(fixture_run(3, &config, update_in_a_graph, NULL), 0);
}

static int end_to_nowhere(struct fixture *s)
{
    epx_graph *graph = NULL;

    if (epx_graph_begin(s->group, NULL) != EPX_OK || epx_handle_update(s->ht, &s->idx, NULL, NULL) != EPX_OK ||
        epx_graph_end(s->group, NULL, NULL) != EPX_ERR_ARGUMENT)
        return fixture_fail(s, "ending a recording without a place for the graph");
    if (epx_stream_sync(s->group, NULL) != EPX_OK || epx_graph_end(s->group, NULL, &graph) != EPX_ERR_USAGE || graph)
        return fixture_fail(s, "the stream still records");
    return fixture_ht(s);
}

/* As epx.h says: the recording ends also when epx_graph_end fails. */
static void a_recording_ends_without_a_place_for_the_graph(void **state)
{
    (void)state;
    assert_int_equal(fixture_run(2, NULL, end_to_nowhere, NULL), 0);
}

/* ---- Calls that wait for earlier operations ---------------------------------------------------------------------- */

static const struct device_ops *real;
static int bad_waits; /* for streams that capture: on a GPU that fails, and ends the capture */

static epx_status spy_sync(struct device *d, struct device_stream *on)
{
    bad_waits += real->stream_captures(d, on) != 0;
    return real->stream_sync(d, on);
}

#define REFUSED(call, word) \
    fixture_expect(s, #call, (call), EPX_ERR_USAGE, (const char *const[]){(word), "captures a graph", NULL})

static int wait_under_a_capture(struct fixture *s, epx_handle *copy, epx_stream aside)
{
    epx_graph *graph = NULL;
    int64_t rows = 0;
    int rc;

    if (epx_graph_begin(s->group, NULL) != EPX_OK)
        return fixture_fail(s, "a capture");
    rc = REFUSED(epx_handle_recv_count(copy, &rows, NULL), "epx_handle_recv_count") ||
         REFUSED(epx_handle_recv_poll(copy, 0), "epx_handle_recv_poll") ||
         REFUSED(epx_dispatch(copy, &s->in, &s->ht_out, NULL, NULL, aside), "epx_dispatch") ||
         REFUSED(epx_handle_destroy(copy), "epx_handle_destroy");
    if (!rc && epx_group_abort(s->group, EPX_ERR_USAGE) == EPX_OK)
        rc = REFUSED(epx_group_error_clear(s->group), "epx_group_error_clear");
    if (epx_graph_end(s->group, NULL, &graph) != EPX_OK || epx_graph_destroy(graph) != EPX_OK ||
        epx_group_error_clear(s->group) != EPX_OK)
        rc = fixture_fail(s, "after the capture");
    if (!rc && (epx_handle_recv_count(copy, &rows, NULL) != EPX_OK || rows != FIXTURE_TOKENS))
        rc = fixture_fail(s, "the count in the memory of another handle");
    return rc;
}

/* A second handle finds the routing of the first in the same memory; to look there is to wait. */
static int look_under_a_capture(struct fixture *s)
{
    static char tables[1 << 20] __attribute__((aligned(16)));
    epx_handle_config config = fixture_handle_config(EPX_HIGH_THROUGHPUT, EPX_FLAT, FIXTURE_TOPK);
    epx_handle *first = NULL, *copy = NULL;
    struct device_ops spied = *s->group->device->ops;
    epx_stream aside = NULL;
    size_t bytes = 0;
    int rc;

    config.memory = tables;
    config.memory_bytes = sizeof(tables);
    fixture_refill(s);
    if (epx_handle_memory(s->group, &config, &bytes) != EPX_OK || bytes > sizeof(tables) ||
        epx_handle_create(&first, s->group, &config) != EPX_OK ||
        epx_handle_create(&copy, s->group, &config) != EPX_OK || epx_stream_create(s->group, &aside) != EPX_OK ||
        fixture_sync(s, epx_handle_update(first, &s->idx, NULL, NULL)) != EPX_OK)
        return fixture_fail(s, "two handles over one memory");
    real = s->group->device->ops;
    spied.stream_sync = spy_sync;
    s->group->device->ops = &spied;
    rc = wait_under_a_capture(s, copy, aside);
    s->group->device->ops = real;
    if (!rc && bad_waits)
        rc = fixture_fail(s, "a wait for a stream that captures");
    return rc || fixture_ht(s);
}

static int clean_under_a_capture(struct fixture *s, epx_stream aside)
{
    return REFUSED(epx_mask_clean(s->group, aside), "epx_mask_clean:") ||
           REFUSED(epx_mask_clean_active(s->group, aside), "epx_mask_clean_active:") ||
           REFUSED(epx_stream_sync(s->group, aside), "epx_stream_sync:") ||
           REFUSED(epx_stream_query(s->group, aside), "epx_stream_query:") ||
           REFUSED(epx_stream_destroy(s->group, aside), "epx_stream_destroy:") ||
           REFUSED(epx_group_destroy(s->group), "epx_group_destroy:");
}

/* The default stream too, which epx_group_destroy waits for first. */
static int end_under_captures(struct fixture *s, epx_stream aside)
{
    const epx_stream streams[] = {aside, NULL};
    int rc = 0;

    for (int i = 0; i < 2 && !rc; i++) {
        epx_graph *graph = NULL;

        if (epx_graph_begin(s->group, streams[i]) != EPX_OK)
            return fixture_fail(s, "a capture");
        rc = i ? REFUSED(epx_group_destroy(s->group), "epx_group_destroy:") : clean_under_a_capture(s, aside);
        if (epx_graph_end(s->group, streams[i], &graph) != EPX_OK || epx_graph_destroy(graph) != EPX_OK)
            rc = fixture_fail(s, "the end of a capture");
    }
    return rc;
}

static int end_and_clean_under_captures(struct fixture *s)
{
    struct device_ops spied = *s->group->device->ops;
    epx_stream aside = NULL;
    int rc;

    if (epx_stream_create(s->group, &aside) != EPX_OK)
        return fixture_fail(s, "a stream");
    real = s->group->device->ops;
    spied.stream_sync = spy_sync;
    s->group->device->ops = &spied;
    rc = end_under_captures(s, aside);
    s->group->device->ops = real;
    if (!rc && bad_waits)
        rc = fixture_fail(s, "a wait for a stream that captures");
    if (!rc && (epx_mask_clean(s->group, aside) != EPX_OK || epx_mask_clean_active(s->group, aside) != EPX_OK ||
                epx_stream_destroy(s->group, aside) != EPX_OK))
        rc = fixture_fail(s, "after the captures");
    return rc || fixture_ht(s);
}

/* A device that records events in captures, as a GPU does, and counts who asks for events. */
static int asked;

static epx_status spy_record(struct device *d, struct device_event *event, struct device_stream *on)
{
    return real->stream_captures(d, on) ? EPX_OK : real->event_record(d, event, on);
}

static epx_status spy_event_sync(struct device *d, struct device_event *event)
{
    asked++;
    return real->event_sync(d, event);
}

static epx_status spy_event_query(struct device *d, struct device_event *event)
{
    asked++;
    return real->event_query(d, event);
}

static int ask_for_events_of_captures(struct fixture *s, epx_event *event)
{
    epx_graph *graph = NULL;
    int rc = 0;

    if (epx_graph_begin(s->group, NULL) != EPX_OK || epx_event_record(event, NULL) != EPX_OK)
        return fixture_fail(s, "a capture with an event");
    for (int i = 0; i < 2 && !rc; i++) { /* in the capture, and behind it */
        rc = REFUSED(epx_event_query(event), "epx_event_query: event") ||
             REFUSED(epx_event_sync(event), "epx_event_sync: event");
        if (i == 0 && (epx_graph_end(s->group, NULL, &graph) != EPX_OK || epx_graph_destroy(graph) != EPX_OK))
            rc = fixture_fail(s, "the end of a capture");
    }
    if (!rc && asked)
        rc = fixture_fail(s, "the device was asked for an event of a capture");
    if (!rc && (epx_event_record(event, NULL) != EPX_OK || epx_event_sync(event) != EPX_OK ||
                epx_event_query(event) != EPX_OK || asked != 2))
        rc = fixture_fail(s, "the same event outside of a capture");
    return rc;
}

static int look_at_events(struct fixture *s)
{
    struct device_ops spied = *s->group->device->ops;
    epx_event *event = NULL;
    int rc;

    if (epx_event_create(s->group, &event) != EPX_OK)
        return fixture_fail(s, "an event");
    real = s->group->device->ops;
    spied.event_record = spy_record;
    spied.event_sync = spy_event_sync;
    spied.event_query = spy_event_query;
    s->group->device->ops = &spied;
    rc = ask_for_events_of_captures(s, event);
    s->group->device->ops = real;
    return rc || epx_event_destroy(event) != EPX_OK;
}

static void nobody_asks_for_an_event_of_a_capture(void **state)
{
    (void)state;
    asked = 0;
    assert_int_equal(fixture_run(1, NULL, look_at_events, NULL), 0);
}

static void cleaning_and_ending_wait_for_no_capture(void **state)
{
    epx_group_config config = fixture_config(20000);

    (void)state;
    bad_waits = 0;
    config.enable_mask = 1;
    assert_int_equal(fixture_run(1, &config, end_and_clean_under_captures, NULL), 0);
}

static void nothing_waits_for_a_stream_that_captures(void **state)
{
    (void)state;
    bad_waits = 0;
    assert_int_equal(fixture_run(1, NULL, look_under_a_capture, NULL), 0);
}

UNIT_MAIN(cmocka_unit_test_setup_teardown(every_launch_runs_all_in_order, open_device, close_device),
          cmocka_unit_test_setup_teardown(what_a_graph_cannot_have_is_refused, open_device, close_device),
          cmocka_unit_test(operations_are_recorded_and_replayed),
          cmocka_unit_test(a_launch_that_needs_a_staged_slot_is_refused),
          cmocka_unit_test(a_launch_beside_a_staged_operation_counts),
          cmocka_unit_test(updates_beside_those_of_graphs_are_counted),
          cmocka_unit_test(a_recording_ends_without_a_place_for_the_graph),
          cmocka_unit_test(nothing_waits_for_a_stream_that_captures),
          cmocka_unit_test(cleaning_and_ending_wait_for_no_capture),
          cmocka_unit_test(nobody_asks_for_an_event_of_a_capture))
