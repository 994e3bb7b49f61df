/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EPX_GROUP_LAUNCH_H
#define EPX_GROUP_LAUNCH_H

#include "group/objects.h"

/* Puts *stream (NULL = the default stream) after the group's previous operation, and remembers it. A stream that
 * captures is put after the group's previous operation in the same capture alone. */
epx_status launch_order(struct epx_group *group, struct device_stream **stream);

/* Launches a kernel on `stream` (NULL = the default stream), after the group's previous operation. */
/* The same on at most `sms` multiprocessors, where the device has them; 0 = as many as the group takes. */
epx_status launch_sms(struct epx_group *group, struct device_stream *stream, enum kernel_id id, const void *params,
                      size_t bytes, int sms);
epx_status launch_ordered(struct epx_group *group, struct device_stream *stream, enum kernel_id id, const void *params,
                          size_t bytes);

/* The same with at most so many agents. */
epx_status launch_agents(struct epx_group *group, struct device_stream *stream, enum kernel_id id, const void *params,
                         size_t bytes, int most);

#endif
