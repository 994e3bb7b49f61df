/* SPDX-License-Identifier: Apache-2.0 */
/* epx_stream_*, epx_event_*: arguments are checked here, the device does the work. */
#include "group/launch.h"
#include "group/registry.h"
#include "group/streams.h"
#include "util/status.h"

epx_status epx_stream_create(epx_group *group, epx_stream *stream)
{
    API_ISSUE;
    epx_status status = group_check(group, "epx_stream_create");

    if (status != EPX_OK)
        return status;
    if (!stream)
        return fail(EPX_ERR_ARGUMENT, "epx_stream_create: stream: expected a pointer, got NULL");
    *stream = NULL;
    return streams_create(group, stream);
}

epx_status epx_stream_destroy(epx_group *group, epx_stream stream)
{
    API_ISSUE;
    epx_status status = group_check(group, "epx_stream_destroy");

    if (status == EPX_OK)
        status = stream_check(group, stream, "epx_stream_destroy");
    return status != EPX_OK || !stream ? status : streams_destroy(group, stream);
}

epx_status epx_stream_sync(epx_group *group, epx_stream stream)
{
    API_WAIT;
    epx_status status = group_check(group, "epx_stream_sync");

    if (status == EPX_OK)
        status = stream_enter(&api_call, stream, "epx_stream_sync");
    if (status == EPX_OK)
        status = launch_await(group, group_stream(group, stream), "epx_stream_sync");
    return status == EPX_OK ? epx_group_error(group, NULL) : status;
}

epx_status epx_stream_query(epx_group *group, epx_stream stream)
{
    API_WAIT;
    epx_status status = group_check(group, "epx_stream_query");

    if (status == EPX_OK)
        status = stream_enter(&api_call, stream, "epx_stream_query");
    if (status != EPX_OK)
        return status;
    if (group->device->ops->stream_captures(group->device, group_stream(group, stream)))
        return fail(EPX_ERR_USAGE, "epx_stream_query: the stream captures a graph; expected the end of the capture "
                                   "first");
    return group->device->ops->stream_query(group->device, group_stream(group, stream));
}

epx_status epx_stream_call(epx_group *group, epx_stream stream, void (*fn)(void *arg), void *arg)
{
    API_ISSUE;
    epx_status status = group_check(group, "epx_stream_call");

    if (status == EPX_OK)
        status = stream_check(group, stream, "epx_stream_call");
    if (status != EPX_OK)
        return status;
    if (!fn)
        return fail(EPX_ERR_ARGUMENT, "epx_stream_call: fn: expected a function, got NULL");
    return group->device->ops->stream_call(group->device, group_stream(group, stream), fn, arg);
}

epx_status epx_event_create(epx_group *group, epx_event **event)
{
    API_ISSUE;
    epx_status status = group_check(group, "epx_event_create");

    if (status != EPX_OK)
        return status;
    if (!event)
        return fail(EPX_ERR_ARGUMENT, "epx_event_create: event: expected a pointer, got NULL");
    *event = NULL;
    return events_create(group, event);
}

epx_status epx_event_destroy(epx_event *event)
{
    API_ISSUE;
    epx_status status = event_check(event, "epx_event_destroy");

    if (status == EPX_OK)
        status = registry_retire(REGISTRY_EVENT, event, "epx_event_destroy");
    if (status == EPX_OK)
        events_destroy(event);
    return status;
}

epx_status epx_event_record(epx_event *event, epx_stream stream)
{
    API_ISSUE;
    epx_status status = event_check(event, "epx_event_record");

    if (status == EPX_OK)
        status = stream_check(event->group, stream, "epx_event_record");
    if (status != EPX_OK)
        return status;
    const int before = event->captured, captures = group_captures(event->group, stream);
    __atomic_store_n(&event->captured, before || captures, __ATOMIC_RELAXED); /* other threads ask for the event */
    status =
        event->group->device->ops->event_record(event->group->device, event->event, group_stream(event->group, stream));
    __atomic_store_n(&event->captured, status == EPX_OK ? captures : before, __ATOMIC_RELAXED);
    return status;
}

/* A device that is asked for an event of a capture ends the capture, like one that is asked for its stream. */
static epx_status check_point(const epx_event *event, const char *call)
{
    if (!__atomic_load_n(&event->captured, __ATOMIC_RELAXED))
        return EPX_OK;
    return fail(EPX_ERR_USAGE,
                "%s: event: it was recorded on a stream that captures a graph; expected one that a "
                "stream reaches",
                call);
}

epx_status epx_event_sync(epx_event *event)
{
    API_WAIT;
    epx_status status = event_check(event, "epx_event_sync");

    if (status == EPX_OK)
        status = check_point(event, "epx_event_sync");
    if (status == EPX_OK)
        status = event->group->device->ops->event_sync(event->group->device, event->event);
    return status == EPX_OK ? epx_group_error(event->group, NULL) : status;
}

epx_status epx_event_query(epx_event *event)
{
    API_WAIT;
    epx_status status = event_check(event, "epx_event_query");

    if (status == EPX_OK)
        status = check_point(event, "epx_event_query");
    return status == EPX_OK ? event->group->device->ops->event_query(event->group->device, event->event) : status;
}

epx_status epx_stream_wait_event(epx_group *group, epx_stream stream, epx_event *event)
{
    API_ISSUE;
    epx_status status = group_check(group, "epx_stream_wait_event");

    if (status == EPX_OK)
        status = event_check(event, "epx_stream_wait_event");
    if (status == EPX_OK)
        status = stream_check(group, stream, "epx_stream_wait_event");
    return status == EPX_OK ? group->device->ops->stream_wait(group->device, group_stream(group, stream), event->event)
                            : status;
}
