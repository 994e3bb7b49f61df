/* SPDX-License-Identifier: Apache-2.0 */
/* Launching: one order for all operations of a group, whatever streams they are given. */
#include "group/launch.h"

#include "util/status.h"
#include "util/trace.h"

/* What `stream` is given from now on runs after what `earlier` has been given. */
static epx_status put_after(struct epx_group *group, struct device_stream *stream, struct device_stream *earlier)
{
    const struct device_ops *ops = group->device->ops;
    epx_status status = EPX_OK;

    if (!earlier || earlier == stream)
        return EPX_OK;
    status = ops->event_record(group->device, group->order_event, earlier);
    return status == EPX_OK ? ops->stream_wait(group->device, stream, group->order_event) : status;
}

/* The caller decides when a graph runs: it does not wait for work that is queued now, and later work does not wait for
 * it. Within it the operations keep the order of their calls, on whatever streams: kernels count operations when they
 * run, and branches of a graph that run side by side would begin in another order on each rank. */
static epx_status order_captured(struct epx_group *group, struct device_stream *stream, uint64_t capture)
{
    epx_status status = EPX_OK;

    if (group->captured_in == capture)
        status = put_after(group, stream, group->captured_stream);
    group->captured_in = capture;
    group->captured_stream = stream;
    return status;
}

/* An event of a stream that captures by now would pull `stream` into that capture, and nothing else says when the work
 * that it had before has ended. */
static epx_status put_after_last(struct epx_group *group, struct device_stream *stream)
{
    struct device_stream *last = group->last_stream;

    if (last && last != stream && group->device->ops->stream_captures(group->device, last))
        return fail(EPX_ERR_USAGE, "the stream of the group's last operation captures a graph; expected the end of the "
                                   "capture first, or a call on that stream");
    return put_after(group, stream, last);
}

epx_status launch_order(struct epx_group *group, struct device_stream **stream)
{
    epx_status status;
    uint64_t capture;

    if (!*stream)
        *stream = group->default_stream;
    capture = group->device->ops->stream_captures(group->device, *stream);
    if (capture)
        return order_captured(group, *stream, capture);
    status = put_after_last(group, *stream);
    if (status == EPX_OK)
        group->last_stream = *stream;
    return status;
}

epx_status launch_agents(struct epx_group *group, struct device_stream *stream, enum kernel_id id, const void *params,
                         size_t bytes, int most)
{
    epx_status status = launch_order(group, &stream);

    if (status != EPX_OK)
        return status;
    group->device->marks = trace_on() ? group->marks.device : NULL;
    return group->device->ops->launch(group->device, stream, id, params, bytes,
                                      most < group->set.agents ? most : group->set.agents);
}

epx_status launch_ordered(struct epx_group *group, struct device_stream *stream, enum kernel_id id, const void *params,
                          size_t bytes)
{
    return launch_agents(group, stream, id, params, bytes, group->set.agents);
}

epx_status launch_sms(struct epx_group *group, struct device_stream *stream, enum kernel_id id, const void *params,
                      size_t bytes, int sms)
{
    const int per_sm = group->device->ops->agents_per_sm;
    const int most = sms > 0 && per_sm && sms < group->set.agents / per_sm ? sms * per_sm : group->set.agents;

    return launch_agents(group, stream, id, params, bytes, most);
}
