/* SPDX-License-Identifier: Apache-2.0 */
/* Which groups and handles exist. */
#include "nccl_ep/compat.h"

#include <pthread.h>
#include <stdlib.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of everything here */
static pthread_cond_t waiter_left = PTHREAD_COND_INITIALIZER;
static struct ncclEpGroup *groups;

void group_list_add(struct ncclEpGroup *group)
{
    pthread_mutex_lock(&lock);
    group->next = groups;
    groups = group;
    pthread_mutex_unlock(&lock);
}

void group_list_remove(struct ncclEpGroup *group)
{
    struct ncclEpGroup **link = &groups;

    pthread_mutex_lock(&lock);
    while (*link && *link != group)
        link = &(*link)->next;
    if (*link)
        *link = group->next;
    while (group->waiters) /* ends: the deadlines of EPX's operations bound what streams do */
        pthread_cond_wait(&waiter_left, &lock);
    pthread_mutex_unlock(&lock);
}

void group_waiter_leave(struct ncclEpGroup *group)
{
    pthread_mutex_lock(&lock);
    if (!--group->waiters)
        pthread_cond_broadcast(&waiter_left);
    pthread_mutex_unlock(&lock);
}

void handle_list_add(struct ncclEpHandle *handle)
{
    pthread_mutex_lock(&lock);
    handle->next = handle->group->handles;
    handle->group->handles = handle;
    pthread_mutex_unlock(&lock);
}

void handle_list_remove(struct ncclEpHandle *handle)
{
    struct ncclEpHandle **link = &handle->group->handles;

    pthread_mutex_lock(&lock);
    while (*link && *link != handle)
        link = &(*link)->next;
    if (*link)
        *link = handle->next;
    pthread_mutex_unlock(&lock);
}

struct ncclEpGroup *group_list_lock(void)
{
    pthread_mutex_lock(&lock);
    return groups;
}

void group_list_unlock(void)
{
    pthread_mutex_unlock(&lock);
}

ncclResult_t group_need(const struct ncclEpGroup *group, const char *call)
{
    const struct ncclEpGroup *at;

    pointers_begin();
    pthread_mutex_lock(&lock);
    for (at = groups; at && at != group;)
        at = at->next;
    pthread_mutex_unlock(&lock);
    if (!at)
        return compat_fail(ncclInvalidArgument, "%s: ep_group: expected one of ncclEpCreateGroup, got %p", call,
                           (const void *)group);
    return ncclSuccess;
}

ncclResult_t handle_need(const struct ncclEpHandle *handle, const char *call)
{
    const struct ncclEpHandle *found = NULL;

    pointers_begin();
    pthread_mutex_lock(&lock);
    for (const struct ncclEpGroup *g = groups; g && !found; g = g->next)
        for (found = g->handles; found && found != handle;)
            found = found->next;
    pthread_mutex_unlock(&lock);
    if (!found)
        return compat_fail(ncclInvalidArgument, "%s: handle: expected one of ncclEpInitHandle, got %p", call,
                           (const void *)handle);
    return ncclSuccess;
}
