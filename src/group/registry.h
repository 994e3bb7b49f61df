/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which groups and handles exist: a pointer from a caller is looked up before it is followed, so that a destroyed or
 * made-up one is an error and not a crash.
 */
#ifndef EPX_GROUP_REGISTRY_H
#define EPX_GROUP_REGISTRY_H

#include "group/objects.h"

enum registry_kind { REGISTRY_GROUP, REGISTRY_HANDLE, REGISTRY_EVENT, REGISTRY_STREAM, REGISTRY_GRAPH };

epx_status registry_add(enum registry_kind kind, const void *object);
/* Non-zero if it was there. */
int registry_remove(enum registry_kind kind, const void *object);
int registry_has(enum registry_kind kind, const void *object);

epx_status group_check(const epx_group *group, const char *function);
epx_status handle_check(const epx_handle *handle, const char *function);
epx_status event_check(const epx_event *event, const char *function);
epx_status graph_check(const epx_graph *graph, const char *function);
/* NULL is the default stream. A stream of a GPU may be the caller's own and is not looked up. */
epx_status stream_check(const epx_group *group, epx_stream stream, const char *function);

#endif
