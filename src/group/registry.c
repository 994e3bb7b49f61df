/* SPDX-License-Identifier: Apache-2.0 */
#include "group/registry.h"

#include <pthread.h>
#include <stdlib.h>

#include "util/status.h"

struct entry {
    const void *object;
    enum registry_kind kind;
    struct entry *next;
};

/* Open hashing by address; a few dozen objects at most, so the table never grows. */
#define BUCKETS 256
static struct entry *table[BUCKETS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

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

epx_status registry_add(enum registry_kind kind, const void *object)
{
    struct entry *e = malloc(sizeof(*e));

    if (!e)
        return fail(EPX_ERR_MEMORY, "no memory for a registry entry");
    pthread_mutex_lock(&lock);
    *e = (struct entry){.object = object, .kind = kind, .next = *bucket(object)};
    *bucket(object) = e;
    pthread_mutex_unlock(&lock);
    return EPX_OK;
}

int registry_remove(enum registry_kind kind, const void *object)
{
    pthread_mutex_lock(&lock);
    struct entry **link = find(kind, object);
    struct entry *found = *link;
    const int was_there = found != NULL;
    if (found)
        *link = found->next;
    pthread_mutex_unlock(&lock);
    free(found);
    return was_there;
}

int registry_has(enum registry_kind kind, const void *object)
{
    int has;

    pthread_mutex_lock(&lock);
    has = *find(kind, object) != NULL;
    pthread_mutex_unlock(&lock);
    return has;
}

static epx_status check(enum registry_kind kind, const void *object, const char *function, const char *what)
{
    if (!object)
        return fail(EPX_ERR_ARGUMENT, "%s: %s: expected a pointer, got NULL", function, what);
    if (!registry_has(kind, object))
        return fail(EPX_ERR_ARGUMENT, "%s: %s: %p is not a living %s (destroyed already?)", function, what, object,
                    what);
    return EPX_OK;
}

epx_status group_check(const epx_group *group, const char *function)
{
    return check(REGISTRY_GROUP, group, function, "group");
}

epx_status handle_check(const epx_handle *handle, const char *function)
{
    return check(REGISTRY_HANDLE, handle, function, "handle");
}

epx_status event_check(const epx_event *event, const char *function)
{
    return check(REGISTRY_EVENT, event, function, "event");
}

epx_status graph_check(const epx_graph *graph, const char *function)
{
    return check(REGISTRY_GRAPH, graph, function, "graph");
}

epx_status stream_check(const epx_group *group, epx_stream stream, const char *function)
{
    if (!stream || !(group->device->ops->caps & DEVICE_HOST_ACCESS))
        return EPX_OK;
    return check(REGISTRY_STREAM, stream, function, "stream");
}
