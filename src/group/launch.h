/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EPX_GROUP_LAUNCH_H
#define EPX_GROUP_LAUNCH_H

#include "group/objects.h"

/* From now on operations of both run in the order of their calls (epx_group_order_with). */
epx_status launch_share_turns(struct epx_group *group, struct epx_group *other);
/* The group ends, and has waited for its operations. */
void launch_leave_turns(struct epx_group *group);
/* A stream ends, and has been waited for. */
void launch_forget_stream(struct epx_group *group, const struct device_stream *stream);

/* Puts *stream (NULL = the default stream) after the previous operation of the group and of those that share turns with
 * it, and remembers it. A stream that captures is put after the previous operation in the same capture alone. */
epx_status launch_order(struct epx_group *group, struct device_stream **stream);

/* Waits for what is queued on a stream; NULL: nothing is. EPX_ERR_USAGE: it captures a graph by now, and a wait
 * would fail, and end the capture. */
epx_status launch_await(struct epx_group *group, struct device_stream *stream, const char *call);

/* Launches a kernel on `stream` (NULL = the default stream), in that order. */
epx_status launch_ordered(struct epx_group *group, struct device_stream *stream, enum kernel_id id, const void *params,
                          size_t bytes);
/* The same on at most `sms` multiprocessors, where the device has them; 0 = as many as the group takes. */
epx_status launch_sms(struct epx_group *group, struct device_stream *stream, enum kernel_id id, const void *params,
                      size_t bytes, int sms);

/* The same with at most so many agents. */
epx_status launch_agents(struct epx_group *group, struct device_stream *stream, enum kernel_id id, const void *params,
                         size_t bytes, int most);

/* A graph, in the same order. */
epx_status launch_graph(struct epx_graph *graph, struct device_stream *stream);

#endif
