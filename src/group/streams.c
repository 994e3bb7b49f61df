/* SPDX-License-Identifier: Apache-2.0 */
#include "group/streams.h"

#include <stdlib.h>
#include <string.h>

#include "group/launch.h"
#include "group/registry.h"
#include "util/status.h"

struct owned_stream {
    struct device_stream *stream;
    struct owned_stream *next;
};

epx_status streams_create(struct epx_group *group, epx_stream *stream)
{
    struct owned_stream *owned = calloc(1, sizeof(*owned));
    epx_status status;

    if (!owned)
        return fail(EPX_ERR_MEMORY, "epx_stream_create: out of memory");
    status = group->device->ops->stream_create(group->device, &owned->stream);
    if (status != EPX_OK)
        goto free_owned;
    status = registry_add(REGISTRY_STREAM, owned->stream, group);
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

static epx_status destroy_owned(struct epx_group *group, struct owned_stream **link, const char *call)
{
    struct owned_stream *owned = *link;
    struct device_stream *stream = owned->stream;
    epx_status status = launch_await(group, stream, call);

    if (status == EPX_OK)
        status = registry_retire(REGISTRY_STREAM, stream, call);
    if (status != EPX_OK)
        return status;
    *link = owned->next;
    free(owned);
    launch_forget_stream(group, stream);
    return group->device->ops->stream_destroy(group->device, stream);
}

epx_status streams_destroy(struct epx_group *group, epx_stream stream)
{
    struct owned_stream **link = &group->streams;

    while (*link && (*link)->stream != stream)
        link = &(*link)->next;
    if (!*link)
        return fail(EPX_ERR_ARGUMENT, "epx_stream_destroy: stream: expected one that this group created, got %p",
                    stream);
    return destroy_owned(group, link, "epx_stream_destroy");
}

epx_status streams_sync_all(struct epx_group *group)
{
    static const char call[] = "epx_group_destroy";
    const struct device_ops *ops = group->device->ops;
    epx_status status = launch_await(group, group->default_stream, call);

    for (const struct owned_stream *o = group->streams; o && status == EPX_OK; o = o->next)
        status = launch_await(group, o->stream, call);
    /* May be the caller's own. A wait would end its capture: see group_drain(). */
    if (status == EPX_OK && group->last_stream && !ops->stream_captures(group->device, group->last_stream))
        status = ops->stream_sync(group->device, group->last_stream);
    return status;
}

epx_status streams_destroy_all(struct epx_group *group)
{
    epx_status status = EPX_OK;

    while (group->streams && status == EPX_OK)
        status = destroy_owned(group, &group->streams, "epx_group_destroy");
    return status;
}

epx_status events_create(struct epx_group *group, struct epx_event **out)
{
    struct epx_event *event = calloc(1, sizeof(*event));
    epx_status status;

    if (!event)
        return fail(EPX_ERR_MEMORY, "epx_event_create: out of memory");
    event->group = group;
    status = group->device->ops->event_create(group->device, &event->event);
    if (status != EPX_OK)
        goto free_event;
    status = registry_add(REGISTRY_EVENT, event, group);
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

void events_destroy(struct epx_event *event)
{
    struct epx_event **link = &event->group->events;

    registry_remove(REGISTRY_EVENT, event);
    while (*link && *link != event)
        link = &(*link)->next;
    if (*link)
        *link = event->next;
    event->group->device->ops->event_destroy(event->group->device, event->event);
    free(event);
}

void events_destroy_all(struct epx_group *group)
{
    while (group->events)
        events_destroy(group->events);
}

epx_status graphs_begin(struct epx_group *group, struct device_stream *stream)
{
    struct recording *recording = calloc(1, sizeof(*recording));
    epx_status status;

    if (!recording)
        return fail(EPX_ERR_MEMORY, "epx_graph_begin: out of memory");
    status = group->device->ops->graph_begin(group->device, stream);
    if (status != EPX_OK) {
        free(recording);
        return status;
    }
    recording->stream = stream;
    recording->next = group->recordings;
    group->recordings = recording;
    return EPX_OK;
}

static struct recording *find_recording(const struct epx_group *group, const struct device_stream *stream)
{
    struct recording *recording = group->recordings;

    while (recording && recording->stream != stream)
        recording = recording->next;
    return recording;
}

/* A caller may have ended it by the vendor's call. */
struct recording *graphs_recording(const struct epx_group *group, struct device_stream *stream)
{
    struct recording *recording = find_recording(group, stream);

    return recording && group->device->ops->stream_captures(group->device, stream) ? recording : NULL;
}

static void end_recording(struct epx_group *group, struct recording *recording)
{
    struct recording **link = &group->recordings;

    while (*link && *link != recording)
        link = &(*link)->next;
    if (*link)
        *link = recording->next;
    free(recording);
}

/* Takes over what the device has captured; destroys it when it fails. */
static epx_status add_graph(struct epx_group *group, struct device_graph *captured, const struct recording *recording,
                            struct epx_graph **out)
{
    struct epx_graph *graph = calloc(1, sizeof(*graph));
    epx_status status;

    status = graph ? registry_add(REGISTRY_GRAPH, graph, group) : fail(EPX_ERR_MEMORY, "epx_graph_end: out of memory");
    if (status != EPX_OK) {
        free(graph);
        group->device->ops->graph_destroy(group->device, captured);
        return status;
    }
    graph->group = group;
    graph->graph = captured;
    if (recording)
        memcpy(graph->operations, recording->operations, sizeof(graph->operations));
    graph->next = group->graphs;
    group->graphs = graph;
    *out = graph;
    return EPX_OK;
}

epx_status graphs_end(struct epx_group *group, struct device_stream *stream, struct epx_graph **out)
{
    struct recording *recording = find_recording(group, stream);
    struct device_graph *captured = NULL;
    epx_status status = group->device->ops->graph_end(group->device, stream, &captured);

    if (status == EPX_OK)
        status = add_graph(group, captured, recording, out);
    end_recording(group, recording);
    return status;
}

void graphs_destroy(struct epx_graph *graph)
{
    struct epx_graph **link = &graph->group->graphs;

    registry_remove(REGISTRY_GRAPH, graph);
    while (*link && *link != graph)
        link = &(*link)->next;
    if (*link)
        *link = graph->next;
    graph->group->device->ops->graph_destroy(graph->group->device, graph->graph);
    free(graph);
}

void graphs_destroy_all(struct epx_group *group)
{
    while (group->recordings)
        end_recording(group, group->recordings);
    while (group->graphs)
        graphs_destroy(group->graphs);
}
