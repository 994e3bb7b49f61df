/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which groups, handles, events, streams and graphs exist: a pointer from a caller is looked up before it is followed,
 * so that a destroyed or made-up one is an error and not a crash. And who is inside which group:
 *
 *   a call that issues something   API_ISSUE   one thread at a time; others wait for it, at most the group's timeout
 *   a query, or a wait             API_WAIT    any number of threads, also beside one that issues
 *   epx_group_destroy                          refused while another thread is inside
 *   epx_*_destroy of something else            refused while another thread waits for it, or asks after it
 *
 * A call enters with its first check and leaves when its function returns. In a child of fork() nothing that was made
 * before exists.
 */
#ifndef EPX_GROUP_REGISTRY_H
#define EPX_GROUP_REGISTRY_H

#include "group/objects.h"

enum registry_kind { REGISTRY_GROUP, REGISTRY_HANDLE, REGISTRY_EVENT, REGISTRY_STREAM, REGISTRY_GRAPH };

/* `group`: whose object it is. */
epx_status registry_add(enum registry_kind kind, const void *object, struct epx_group *group);
/* Non-zero if it was there. */
int registry_remove(enum registry_kind kind, const void *object);
/* For the call that destroys an object: removed, so that nobody finds it any more; or EPX_ERR_USAGE: another thread is
 * inside a call with it. */
epx_status registry_retire(enum registry_kind kind, const void *object, const char *function);
/* Around a call that makes or ends a group: a child that is forked meanwhile inherits locks that nobody releases, and
 * cannot use EPX, as if the parent had a group. EPX_ERR_USAGE: this process was forked from one that had groups, whose
 * threads and descriptors it lacks. */
epx_status registry_begin(const char *function);
void registry_end(void);

struct entry;

/* One call of the API on the stack of its thread. */
struct api_call {
    struct epx_group *group, *other; /* entered; the second one by an event of another group */
    int shared, locked;
    struct entry *held[2]; /* objects that nobody may destroy before the call ends */
    int nheld;
    const char *function; /* of a call that is traced */
    int rank;
    uint64_t began_ns;
};

void api_leave(struct api_call *call);
#define API_ISSUE struct api_call api_call __attribute__((cleanup(api_leave))) = {.shared = 0}
#define API_WAIT struct api_call api_call __attribute__((cleanup(api_leave))) = {.shared = 1}

/* Look the object up and enter its group. They need API_ISSUE or API_WAIT before them in the function. */
#define group_check(group, function) api_enter(&api_call, REGISTRY_GROUP, group, function)
#define handle_check(handle, function) api_enter(&api_call, REGISTRY_HANDLE, handle, function)
#define event_check(event, function) api_enter(&api_call, REGISTRY_EVENT, event, function)
#define graph_check(graph, function) api_enter(&api_call, REGISTRY_GRAPH, graph, function)
epx_status api_enter(struct api_call *call, enum registry_kind kind, const void *object, const char *function);
/* A wait that has to do what only one thread may at a time. */
epx_status api_issue(struct api_call *call, const char *function);
/* The same for a moment, and without a wait: 0 = another thread is inside. api_release() follows. */
int api_try_issue(struct api_call *call);
void api_release(struct api_call *call);
/* epx_group_destroy: waits for the streams, and sees to it that nobody enters the group; registry_end() follows.
 * EPX_ERR_USAGE: another thread is inside. */
epx_status api_end(struct api_call *call);
/* NULL is the default stream. A stream of another group is refused. A stream of a GPU that nobody has registered is the
 * caller's own. */
epx_status stream_check(const epx_group *group, epx_stream stream, const char *function);
/* The same for API_WAIT: nobody destroys the stream before the call ends. */
epx_status stream_enter(struct api_call *call, epx_stream stream, const char *function);

#endif
