/* SPDX-License-Identifier: Apache-2.0 */
/* Streams and events as callers see them; the work is the device's. */
#include <stdlib.h>

#include "group/group.h"
#include "group/registry.h"
#include "util/status.h"

struct epx_event {
    struct epx_group *group;
    struct device_event *event;
    struct epx_event *next; /* of the group: events end with it */
};

struct owned_stream {
    struct device_stream *stream;
    struct owned_stream *next; /* of the group: streams end with it */
};

static struct device_stream *resolve(epx_group *group, epx_stream stream)
{
    return stream ? (struct device_stream *)stream : group->default_stream;
}

epx_status epx_stream_create(epx_group *group, epx_stream *stream)
{
    struct owned_stream *owned;
    epx_status status = group_check(group, "epx_stream_create");

    if (status != EPX_OK)
        return status;
    if (!stream)
        return fail(EPX_ERR_ARGUMENT, "epx_stream_create: stream: expected a pointer, got NULL");
    *stream = NULL;
    owned = calloc(1, sizeof(*owned));
    if (!owned)
        return fail(EPX_ERR_MEMORY, "epx_stream_create: no memory");
    status = group->device->ops->stream_create(group->device, &owned->stream);
    if (status != EPX_OK)
        goto free_owned;
    status = registry_add(REGISTRY_STREAM, owned->stream);
    if (status != EPX_OK)
        goto destroy_stream;
    owned->next = group->streams;
    group->streams = owned;
    *stream = owned->stream;
    return EPX_OK;

destroy_stream:
    group->device->ops->stream_destroy(group->device, owned->stream);
free_owned:
    free(owned);
    return status;
}

/* Its work is done when it is destroyed, so that nothing later needs to be ordered after it. */
static epx_status owned_destroy(struct epx_group *group, struct owned_stream **link)
{
    struct owned_stream *owned = *link;
    struct device_stream *stream = owned->stream;
    epx_status status = group->device->ops->stream_sync(group->device, stream); /* refuses inside its own calls */

    if (status != EPX_OK)
        return status;
    *link = owned->next;
    free(owned);
    registry_remove(REGISTRY_STREAM, stream);
    if (group->last_stream == stream)
        group->last_stream = NULL;
    return group->device->ops->stream_destroy(group->device, stream);
}

epx_status epx_stream_destroy(epx_group *group, epx_stream stream)
{
    struct owned_stream **link;
    epx_status status = group_check(group, "epx_stream_destroy");

    if (status == EPX_OK)
        status = stream_check(group, stream, "epx_stream_destroy");
    if (status != EPX_OK || !stream)
        return status;
    for (link = &group->streams; *link && (*link)->stream != stream;)
        link = &(*link)->next;
    return *link ? owned_destroy(group, link)
                 : fail(EPX_ERR_ARGUMENT, "epx_stream_destroy: stream: expected one that this group created, got %p",
                        stream);
}

epx_status streams_free_all(struct epx_group *group)
{
    epx_status status = EPX_OK;

    while (group->streams && status == EPX_OK)
        status = owned_destroy(group, &group->streams);
    return status;
}

epx_status epx_stream_sync(epx_group *group, epx_stream stream)
{
    epx_status status = group_check(group, "epx_stream_sync");

    if (status == EPX_OK)
        status = stream_check(group, stream, "epx_stream_sync");
    if (status == EPX_OK)
        status = group->device->ops->stream_sync(group->device, resolve(group, stream));
    return status == EPX_OK ? epx_group_error(group, NULL) : status;
}

epx_status epx_stream_query(epx_group *group, epx_stream stream)
{
    epx_status status = group_check(group, "epx_stream_query");

    if (status == EPX_OK)
        status = stream_check(group, stream, "epx_stream_query");
    return status == EPX_OK ? group->device->ops->stream_query(group->device, resolve(group, stream)) : status;
}

epx_status epx_stream_call(epx_group *group, epx_stream stream, void (*fn)(void *arg), void *arg)
{
    epx_status status = group_check(group, "epx_stream_call");

    if (status == EPX_OK)
        status = stream_check(group, stream, "epx_stream_call");
    if (status != EPX_OK)
        return status;
    if (!fn)
        return fail(EPX_ERR_ARGUMENT, "epx_stream_call: fn: expected a function, got NULL");
    return group->device->ops->stream_call(group->device, resolve(group, stream), fn, arg);
}

epx_status epx_event_create(epx_group *group, epx_event **out)
{
    struct epx_event *event;
    epx_status status = group_check(group, "epx_event_create");

    if (status != EPX_OK)
        return status;
    if (!out)
        return fail(EPX_ERR_ARGUMENT, "epx_event_create: event: expected a pointer, got NULL");
    *out = NULL;
    event = calloc(1, sizeof(*event));
    if (!event)
        return fail(EPX_ERR_MEMORY, "epx_event_create: no memory");
    event->group = group;
    status = group->device->ops->event_create(group->device, &event->event);
    if (status != EPX_OK)
        goto free_event;
    status = registry_add(REGISTRY_EVENT, event);
    if (status != EPX_OK)
        goto destroy_event;
    event->next = group->events;
    group->events = event;
    *out = event;
    return EPX_OK;

destroy_event:
    group->device->ops->event_destroy(group->device, event->event);
free_event:
    free(event);
    return status;
}

epx_status epx_event_destroy(epx_event *event)
{
    struct epx_event **link;
    epx_status status = event_check(event, "epx_event_destroy");

    if (status != EPX_OK)
        return status;
    registry_remove(REGISTRY_EVENT, event);
    for (link = &event->group->events; *link && *link != event;)
        link = &(*link)->next;
    if (*link)
        *link = event->next;
    event->group->device->ops->event_destroy(event->group->device, event->event);
    free(event);
    return EPX_OK;
}

void events_free_all(struct epx_group *group)
{
    while (group->events)
        epx_event_destroy(group->events);
}

epx_status epx_event_record(epx_event *event, epx_stream stream)
{
    epx_status status = event_check(event, "epx_event_record");

    if (status == EPX_OK)
        status = stream_check(event->group, stream, "epx_event_record");
    if (status != EPX_OK)
        return status;
    return event->group->device->ops->event_record(event->group->device, event->event, resolve(event->group, stream));
}

epx_status epx_event_sync(epx_event *event)
{
    epx_status status = event_check(event, "epx_event_sync");

    if (status == EPX_OK)
        status = event->group->device->ops->event_sync(event->group->device, event->event);
    return status == EPX_OK ? epx_group_error(event->group, NULL) : status;
}

epx_status epx_event_query(epx_event *event)
{
    epx_status status = event_check(event, "epx_event_query");

    return status == EPX_OK ? event->group->device->ops->event_query(event->group->device, event->event) : status;
}

epx_status epx_stream_wait_event(epx_group *group, epx_stream stream, epx_event *event)
{
    epx_status status = group_check(group, "epx_stream_wait_event");

    if (status == EPX_OK)
        status = event_check(event, "epx_stream_wait_event");
    if (status == EPX_OK)
        status = stream_check(group, stream, "epx_stream_wait_event");
    return status == EPX_OK ? group->device->ops->stream_wait(group->device, resolve(group, stream), event->event)
                            : status;
}
