/* SPDX-License-Identifier: Apache-2.0 */
#include "group/registry.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "group/nvtx.h"
#include "group/streams.h"
#include "util/clock.h"
#include "util/status.h"
#include "util/trace.h"
#include "util/watch.h"

struct entry {
    const void *object;
    struct epx_group *group;
    enum registry_kind kind;
    int generation;
    int users; /* calls with this object that may run beside the one that destroys it */
    struct entry *next;
};

/* Open hashing by address; a few dozen objects at most, so the table never grows. */
#define BUCKETS 256
#if defined(__SANITIZE_THREAD__)
#define THREAD_SANITIZER 1
#elif defined(__has_feature)
#define THREAD_SANITIZER __has_feature(thread_sanitizer)
#else
#define THREAD_SANITIZER 0
#endif
static struct entry *table[BUCKETS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int generation; /* of this process: counts forks with groups */
static int groups;     /* of this generation */
static int changing;   /* calls that make or end one */

static const char *const names[] = {"group", "handle", "event", "stream", "graph"};

/* ---- fork: the child inherits objects, and none of the threads that serve them --------------------------------- */

static void before_fork(void)
{
    pthread_mutex_lock(&lock);
}

static void in_parent(void)
{
    pthread_mutex_unlock(&lock);
}

static void in_child(void)
{
    generation += groups > 0 || changing > 0;
    groups = changing = 0;
    pthread_mutex_unlock(&lock);
}

static void watch_forks(void)
{
    pthread_atfork(before_fork, in_parent, in_child);
}

epx_status registry_begin(const char *function)
{
    if (generation)
        return fail(EPX_ERR_USAGE,
                    "%s: this process was forked from one that had groups, and cannot use EPX (start it by exec, or "
                    "fork before the first group)",
                    function);
    pthread_once(&once, watch_forks);
    pthread_mutex_lock(&lock);
    changing++;
    pthread_mutex_unlock(&lock);
    return EPX_OK;
}

void registry_end(void)
{
    pthread_mutex_lock(&lock);
    changing -= changing > 0; /* 0: a child that a caller's all-gather has forked */
    pthread_mutex_unlock(&lock);
}

/* ---- Objects -------------------------------------------------------------------------------------------------- */

static struct entry **bucket(const void *object)
{
    return &table[((uintptr_t)object >> 6) % BUCKETS];
}

/* Call with the lock held. */
static struct entry **find(enum registry_kind kind, const void *object)
{
    struct entry **link = bucket(object);

    while (*link && ((*link)->object != object || (*link)->kind != kind))
        link = &(*link)->next;
    return link;
}

epx_status registry_add(enum registry_kind kind, const void *object, struct epx_group *group)
{
    struct entry *e = malloc(sizeof(*e));

    if (!e)
        return fail(EPX_ERR_MEMORY, "no memory for a registry entry");
    pthread_once(&once, watch_forks);
    pthread_mutex_lock(&lock);
    *e = (struct entry){
        .object = object, .group = group, .kind = kind, .generation = generation, .next = *bucket(object)};
    *bucket(object) = e;
    groups += kind == REGISTRY_GROUP;
    pthread_mutex_unlock(&lock);
    return EPX_OK;
}

/* Call with the lock held; the caller frees the entry. */
static struct entry *unlink_entry(enum registry_kind kind, const void *object)
{
    struct entry **link = find(kind, object), *found = *link;

    if (found)
        *link = found->next;
    groups -= found && kind == REGISTRY_GROUP;
    return found;
}

int registry_remove(enum registry_kind kind, const void *object)
{
    struct entry *found;

    pthread_mutex_lock(&lock);
    found = unlink_entry(kind, object);
    pthread_mutex_unlock(&lock);
    free(found);
    return found != NULL;
}

epx_status registry_retire(enum registry_kind kind, const void *object, const char *function)
{
    struct entry *found;
    int users;

    pthread_mutex_lock(&lock);
    found = *find(kind, object);
    users = found ? found->users : 0;
    if (!users)
        found = unlink_entry(kind, object);
    pthread_mutex_unlock(&lock);
    if (users)
        return fail(EPX_ERR_USAGE, "%s: %s: %d other threads are inside calls with it", function, names[kind], users);
    free(found);
    return EPX_OK;
}

enum found { FOUND, MISSING, FOREIGN };

/* The object's group. */
static enum found look_up(enum registry_kind kind, const void *object, struct epx_group **group)
{
    enum found result = MISSING;
    const struct entry *e;

    pthread_mutex_lock(&lock);
    e = *find(kind, object);
    if (e) {
        result = e->generation == generation ? FOUND : FOREIGN;
        *group = e->group;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

/* Call with the lock held. An object is destroyed by a thread that has its group's lock. Who has it too is safe; others
 * keep the object from being destroyed: waits, and a call of another group with an event of this one. */
static void hold(struct api_call *call, struct entry *e)
{
    if (e->kind == REGISTRY_GROUP || (!call->shared && (!call->group || call->group == e->group)))
        return;
    e->users++;
    call->held[call->nheld++] = e;
}

/* The same, and this thread is inside the group from now on. */
static enum found look_up_and_enter(struct api_call *call, enum registry_kind kind, const void *object,
                                    struct epx_group **group)
{
    enum found result = MISSING;
    struct entry *e;

    pthread_mutex_lock(&lock);
    e = *find(kind, object);
    if (e) {
        result = e->generation == generation ? FOUND : FOREIGN;
        *group = e->group;
    }
    if (result == FOUND) {
        e->group->users++;
        hold(call, e);
    }
    pthread_mutex_unlock(&lock);
    return result;
}

static epx_status complain(enum found found, enum registry_kind kind, const void *object, const char *function)
{
    const char *what = names[kind];

    if (found == FOREIGN)
        return fail(EPX_ERR_USAGE, "%s: %s: it was created before fork(), and belongs to the parent process", function,
                    what);
    return fail(EPX_ERR_ARGUMENT, "%s: %s: %p is not a living %s (destroyed already?)", function, what, object, what);
}

/* ---- Calls ---------------------------------------------------------------------------------------------------- */

static void leave(struct epx_group *group)
{
    pthread_mutex_lock(&lock);
    group->users--;
    pthread_mutex_unlock(&lock);
}

static void let_go(struct api_call *call)
{
    if (!call->nheld)
        return;
    pthread_mutex_lock(&lock);
    while (call->nheld)
        call->held[--call->nheld]->users--;
    pthread_mutex_unlock(&lock);
}

/* The call as a span of the trace, and as a range of NVIDIA's profilers. */
static void trace_enter(struct api_call *call, const char *function)
{
    nvtx_push(function);
    call->function = function;
    call->rank = call->group->rank;
    call->began_ns = trace_on() ? clock_ns() : 0;
}

/* For epx top: the call that has the group. With its lock: one writer. */
static void show_call(const struct epx_group *group, const char *function)
{
    struct watch *w = group->watch;

    if (!w)
        return;
    snprintf(w->function, sizeof(w->function), "%s", function);
    __atomic_fetch_add(&w->calls, 1, __ATOMIC_RELAXED);
}

static void trace_leave(const struct api_call *call)
{
    const struct trace_event e = {.begin_ns = call->began_ns,
                                  .end_ns = call->began_ns ? clock_ns() : 0,
                                  .category = "call",
                                  .name = call->function,
                                  .rank = call->rank,
                                  .peer = -1,
                                  .kind = TRACE_SPAN};

    nvtx_pop();
    if (call->began_ns)
        trace_add(&e);
}

void api_leave(struct api_call *call)
{
    if (call->function)
        trace_leave(call);
    if (call->locked)
        pthread_mutex_unlock(&call->group->calls);
    let_go(call);
    if (call->group)
        leave(call->group);
    if (call->other)
        leave(call->other);
    *call = (struct api_call){.shared = call->shared};
}

/* 0, or an errno value. By a clock that nobody sets: by the other one a wait ends an hour late where that is set back
 * by an hour. */
static int lock_until(pthread_mutex_t *mutex, uint64_t deadline)
{
#if THREAD_SANITIZER
    /* It does not know pthread_mutex_clocklock. */
    while (pthread_mutex_trylock(mutex) != 0) {
        if (clock_ns() >= deadline)
            return ETIMEDOUT;
        sched_yield();
    }
    return 0;
#else
    const struct timespec until = {.tv_sec = (time_t)(deadline / 1000000000u),
                                   .tv_nsec = (long)(deadline % 1000000000u)};

    return pthread_mutex_clocklock(mutex, CLOCK_MONOTONIC, &until);
#endif
}

/* Waits for the thread that is inside, but not for ever. */
static epx_status lock_calls(struct epx_group *group, const char *function)
{
    const int ms = group->set.timeout_ms;

    if (lock_until(&group->calls, clock_ns() + (uint64_t)ms * 1000000u) == 0)
        return EPX_OK;
    return fail(EPX_ERR_TIMEOUT, "%s: another thread has been inside a call of this group for %d ms", function, ms);
}

epx_status api_enter(struct api_call *call, enum registry_kind kind, const void *object, const char *function)
{
    struct epx_group *group = NULL;
    enum found found;
    epx_status status = EPX_OK;

    if (!object)
        return fail(EPX_ERR_ARGUMENT, "%s: %s: expected a pointer, got NULL", function, names[kind]);
    found = look_up_and_enter(call, kind, object, &group);
    if (found != FOUND)
        return complain(found, kind, object, function);
    if (call->group) { /* the second check of one call */
        if (call->group == group)
            leave(group);
        else
            call->other = group;
        return EPX_OK;
    }
    call->group = group;
    trace_enter(call, function);
    if (call->shared)
        return EPX_OK;
    if (pthread_mutex_trylock(&group->calls) != 0)
        status = lock_calls(group, function);
    call->locked = status == EPX_OK;
    /* Until now another thread may have destroyed the object, and made another one in its place. */
    if (status == EPX_OK && look_up(kind, object, &group) != FOUND)
        found = MISSING;
    if (status == EPX_OK && (found != FOUND || group != call->group))
        status = complain(found, kind, object, function);
    if (status == EPX_OK && group->ending)
        status = fail(EPX_ERR_USAGE, "%s: the group is being destroyed", function);
    if (status == EPX_OK)
        show_call(group, function);
    return status;
}

epx_status api_issue(struct api_call *call, const char *function)
{
    const epx_status status = lock_calls(call->group, function);

    call->locked = status == EPX_OK;
    return status;
}

int api_try_issue(struct api_call *call)
{
    call->locked = pthread_mutex_trylock(&call->group->calls) == 0;
    return call->locked;
}

void api_release(struct api_call *call)
{
    pthread_mutex_unlock(&call->group->calls);
    call->locked = 0;
}

/* Call with the lock held. The group and its handles, events, streams and graphs; free_entries() follows. */
static struct entry *unlink_group(const struct epx_group *group)
{
    struct entry *all = NULL;

    for (size_t i = 0; i < BUCKETS; i++) {
        struct entry **link = &table[i];

        while (*link) {
            struct entry *e = *link;

            if (e->group != group) {
                link = &e->next;
                continue;
            }
            *link = e->next;
            e->next = all;
            all = e;
        }
    }
    groups--;
    return all;
}

static void free_entries(struct entry *e)
{
    while (e) {
        struct entry *next = e->next;

        free(e);
        e = next;
    }
}

/* Alone in the group: from now on nobody enters it, by an object of it either. */
static epx_status retire(struct api_call *call)
{
    struct entry *found = NULL;
    int users;

    pthread_mutex_lock(&lock);
    users = call->group->users;
    if (users == 1) {
        found = unlink_group(call->group);
        changing++; /* until registry_end() */
    }
    pthread_mutex_unlock(&lock);
    free_entries(found);
    if (!found)
        return fail(EPX_ERR_USAGE, "epx_group_destroy: group: %d other threads are inside calls of this group",
                    users - 1);
    pthread_mutex_unlock(&call->group->calls);
    call->group = call->other = NULL; /* nobody leaves what is freed */
    call->locked = 0;
    call->shared = 1;
    return EPX_OK;
}

epx_status api_end(struct api_call *call)
{
    struct epx_group *group = call->group;
    epx_status status;

    group->ending = 1;
    pthread_mutex_unlock(&group->calls); /* its streams may hold calls of the user, which find `ending` */
    status = streams_sync_all(group);
    pthread_mutex_lock(&group->calls);
    if (status == EPX_OK)
        status = retire(call);
    if (status != EPX_OK)
        group->ending = 0;
    return status;
}

static epx_status judge_stream(const epx_group *group, epx_stream stream, enum found found,
                               const struct epx_group *owner, const char *function)
{
    const int own = group->device->ops->caps & DEVICE_HOST_ACCESS; /* all streams of this device are EPX's */

    if (found == FOUND && owner != group)
        return fail(EPX_ERR_ARGUMENT, "%s: stream: %p belongs to another group; expected one that this group created",
                    function, stream);
    return found == FOUND || !own ? EPX_OK : complain(found, REGISTRY_STREAM, stream, function);
}

epx_status stream_check(const epx_group *group, epx_stream stream, const char *function)
{
    struct epx_group *owner = NULL;
    enum found found;

    if (!stream)
        return EPX_OK;
    found = look_up(REGISTRY_STREAM, stream, &owner); /* not among the arguments: these have no order */
    return judge_stream(group, stream, found, owner, function);
}

epx_status stream_enter(struct api_call *call, epx_stream stream, const char *function)
{
    struct epx_group *owner = NULL;
    enum found found;
    epx_status status;

    if (!stream)
        return EPX_OK;
    found = look_up_and_enter(call, REGISTRY_STREAM, stream, &owner);
    status = judge_stream(call->group, stream, found, owner, function);
    if (status != EPX_OK)
        let_go(call); /* before another group, which may be destroyed then */
    if (found == FOUND)
        leave(owner);
    return status;
}
