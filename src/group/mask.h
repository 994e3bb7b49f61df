/* SPDX-License-Identifier: Apache-2.0 */
/* Masks: which ranks take part in low-latency operations. Kernels read and write them in device memory. */
#ifndef EPX_GROUP_MASK_H
#define EPX_GROUP_MASK_H

#include "group/objects.h"

/* The kernels' word for one rank, as it is now: 1 = active. Any thread. */
epx_status mask_read(const struct epx_group *group, int rank, int32_t *active);
/* *masked: by a timeout, by mask_update(), or because the ranks left it out when they recovered. */
epx_status mask_is_set(const struct epx_group *group, int rank, int *masked);
/* From any thread: a deadline has masked this rank, or the ranks left it out when they recovered. Not epx_mask_update,
 * by which it may become active again. */
int mask_by_deadline(const struct epx_group *group, int rank);
/* In stream order. */
epx_status mask_query(struct epx_group *group, int32_t *device_mask, epx_stream stream);
epx_status mask_update(struct epx_group *group, const int32_t *host_mask, epx_stream stream);
/* The ranks have agreed on who is left. */
void mask_forget_updates(struct epx_group *group);
/* Masked ranks whose entry is 1 are active again: those that mask_update() masked, if this rank has begun no operation
 * since. Waits for the stream. EPX_ERR_USAGE: they have missed operations. */
epx_status mask_restore(struct epx_group *group, const int32_t *host_mask, epx_stream stream);

#endif
