/* SPDX-License-Identifier: Apache-2.0 */
/* Launching: one order for all operations of a group, whatever streams they are given. */
#include "group/launch.h"

#include "util/trace.h"

epx_status launch_order(struct epx_group *group, struct device_stream **stream)
{
    const struct device_ops *ops = group->device->ops;
    epx_status status = EPX_OK;

    if (!*stream)
        *stream = group->default_stream;
    if (group->last_stream == *stream)
        return EPX_OK;
    /* The caller decides when a graph runs: it does not wait for work that is queued now, and later work does not
     * wait for it. */
    if (ops->stream_captures(group->device, *stream))
        return EPX_OK;
    if (group->last_stream) {
        status = ops->event_record(group->device, group->order_event, group->last_stream);
        if (status == EPX_OK)
            status = ops->stream_wait(group->device, *stream, group->order_event);
    }
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
