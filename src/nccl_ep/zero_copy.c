/* SPDX-License-Identifier: Apache-2.0 */
/* NCCL_EP_DEBUG: why rows of a call are moved in place or not. Memory of ncclEpxMemAlloc is in reach of all ranks of
 * the node; of a window EPX only knows where it begins, so that being in one decides nothing. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "nccl_ep/compat.h"

struct block {
    const struct ncclEpGroup *group;
    const char *start;
    size_t bytes;
    struct block *next;
};

static struct block *blocks; /* only of groups with NCCL_EP_DEBUG */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void zero_copy_add(const struct ncclEpGroup *group, const void *start, size_t bytes)
{
    struct block *b = group->env.debug ? malloc(sizeof(*b)) : NULL;

    if (!b)
        return;
    *b = (struct block){.group = group, .start = start, .bytes = bytes};
    pthread_mutex_lock(&lock);
    b->next = blocks;
    blocks = b;
    pthread_mutex_unlock(&lock);
}

void zero_copy_forget(const struct ncclEpGroup *group, const void *start)
{
    pthread_mutex_lock(&lock);
    for (struct block **link = &blocks; *link;) {
        struct block *b = *link;

        if (b->group == group && (!start || b->start == start)) {
            *link = b->next;
            free(b);
        } else {
            link = &b->next;
        }
    }
    pthread_mutex_unlock(&lock);
}

static int is_in_reach(const struct ncclEpGroup *group, const char *data)
{
    int found = 0;

    pthread_mutex_lock(&lock);
    for (const struct block *b = blocks; b && !found; b = b->next)
        found = b->group == group && data >= b->start && data < b->start + b->bytes;
    pthread_mutex_unlock(&lock);
    return found;
}

void zero_copy_log(const struct ncclEpGroup *group, const char *call, const char *name, const struct compat_tensor *t)
{
    int in_reach;

    if (!group->env.debug || !t->at || !t->at->data)
        return;
    in_reach = is_in_reach(group, t->at->data);
    fprintf(
        stderr, "NCCL EP: rank %d: %s: %s%s: %s\n", group->comm.rank, call, name, t->window ? " (in a window)" : "",
        in_reach ? "zero-copy: memory of ncclEpxMemAlloc, which the ranks of the node reach"
        : group->is_cpu || group->low_latency
            ? "no zero-copy: not memory of ncclEpxMemAlloc, rows are copied once more"
            : "no zero-copy: not memory of ncclEpxMemAlloc, rows are copied once more unless EPX has registered them");
}
