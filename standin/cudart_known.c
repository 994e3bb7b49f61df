/* SPDX-License-Identifier: Apache-2.0 */
/* Which events, graphs and pieces of memory exist: a handle is looked up before it is followed, so that one that is
 * none, or was destroyed, is refused and does not end the process. */
#include <pthread.h>
#include <stdlib.h>

#include "standin/cudart.h"

enum { BUCKETS = 64 };

struct known {
    const void *handle;
    enum known_kind kind;
    struct known *next;
};

static struct known *buckets[BUCKETS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Where the handle hangs, or would; with the lock held. */
static struct known **find(enum known_kind kind, const void *handle)
{
    struct known **link = &buckets[((uintptr_t)handle >> 5 ^ (uintptr_t)handle >> 11) % BUCKETS];

    while (*link && ((*link)->handle != handle || (*link)->kind != kind))
        link = &(*link)->next;
    return link;
}

int known_add(enum known_kind kind, const void *handle)
{
    struct known *entry = malloc(sizeof(*entry)), **link;

    if (!entry)
        return -1;
    pthread_mutex_lock(&lock);
    link = find(kind, handle);
    *entry = (struct known){.handle = handle, .kind = kind};
    *link = entry;
    pthread_mutex_unlock(&lock);
    return 0;
}

int known_has(enum known_kind kind, const void *handle)
{
    int has;

    pthread_mutex_lock(&lock);
    has = *find(kind, handle) != NULL;
    pthread_mutex_unlock(&lock);
    return has;
}

int known_remove(enum known_kind kind, const void *handle)
{
    struct known **link, *entry;

    pthread_mutex_lock(&lock);
    link = find(kind, handle);
    entry = *link;
    if (entry)
        *link = entry->next;
    pthread_mutex_unlock(&lock);
    free(entry);
    return entry != NULL;
}
