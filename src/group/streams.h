/* SPDX-License-Identifier: Apache-2.0 */
/* The streams, events and graphs of a group: it keeps a list of each and destroys what is left with itself. */
#ifndef EPX_GROUP_STREAMS_H
#define EPX_GROUP_STREAMS_H

#include "group/objects.h"

epx_status streams_create(struct epx_group *group, epx_stream *stream);
/* Waits for the work of the stream (launch_await), so that nothing later needs to be ordered after it. */
epx_status streams_destroy(struct epx_group *group, epx_stream stream);
epx_status streams_destroy_all(struct epx_group *group);
/* For epx_group_destroy: waits for the default stream and those of epx_stream_create (launch_await), and for that of
 * the last operation unless it captures. */
epx_status streams_sync_all(struct epx_group *group);

epx_status events_create(struct epx_group *group, struct epx_event **event);
void events_destroy(struct epx_event *event);
void events_destroy_all(struct epx_group *group);

epx_status graphs_begin(struct epx_group *group, struct device_stream *stream);
/* What the stream records since graphs_begin(); NULL: nothing, or a graph of the caller's own. */
struct recording *graphs_recording(const struct epx_group *group, struct device_stream *stream);
epx_status graphs_end(struct epx_group *group, struct device_stream *stream, struct epx_graph **graph);
void graphs_destroy(struct epx_graph *graph);
void graphs_destroy_all(struct epx_group *group);

#endif
