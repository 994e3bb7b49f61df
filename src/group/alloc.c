/* SPDX-License-Identifier: Apache-2.0 */
#include "group/alloc.h"

#include <inttypes.h>
#include <stdlib.h>

#include "util/status.h"

#define ALIGN 256u
#define SMALL_SHARE 64 /* of the whole: blocks of at most so much lie at the end */

struct heap_block {
    uint64_t begin, end; /* offsets in the heap */
    struct heap_block *next;
};

/* Where a block of `bytes` goes, or 0: where the first hole that has room begins; a small block where the last one
 * ends. *link is where it is inserted, *largest the largest hole seen. */
static uint64_t find_hole(struct epx_group *group, uint64_t bytes, struct heap_block ***link, uint64_t *largest)
{
    const int small = bytes <= (group->plan.total - group->plan.alloc) / SMALL_SHARE;
    uint64_t at = (group->plan.alloc + ALIGN - 1) / ALIGN * ALIGN, found = 0;
    struct heap_block **where = &group->blocks;

    *link = where;
    *largest = 0;
    for (;; where = &(*where)->next) {
        const uint64_t end = *where ? (*where)->begin : group->plan.total;
        if (end > at && end - at > *largest)
            *largest = end - at;
        if (end >= at && end - at >= bytes) {
            *link = where;
            found = small ? (end - bytes) / ALIGN * ALIGN : at;
        }
        if (!*where || (found && !small))
            return found;
        at = ((*where)->end + ALIGN - 1) / ALIGN * ALIGN;
    }
}

epx_status heap_alloc(struct epx_group *group, size_t bytes, void **ptr)
{
    struct heap_block **link, *block;
    uint64_t largest;
    const uint64_t at = find_hole(group, bytes ? bytes : 1, &link, &largest);

    if (!at)
        return fail(EPX_ERR_MEMORY,
                    "epx_alloc: %zu bytes requested, the largest free block has %" PRIu64 " of %" PRIu64
                    " bytes in all: raise epx_group_config.alloc_bytes or EPX_ALLOC_BYTES",
                    bytes, largest, group->plan.total - group->plan.alloc);
    block = malloc(sizeof(*block));
    if (!block)
        return fail(EPX_ERR_MEMORY, "epx_alloc: out of memory for the list of blocks");
    *block = (struct heap_block){.begin = at, .end = at + (bytes ? bytes : 1), .next = *link};
    *link = block;
    *ptr = (char *)group->heap.base + at;
    return EPX_OK;
}

epx_status heap_free(struct epx_group *group, void *ptr)
{
    for (struct heap_block **link = &group->blocks; *link; link = &(*link)->next) {
        struct heap_block *block = *link;
        if ((char *)group->heap.base + block->begin == (char *)ptr) {
            *link = block->next;
            free(block);
            return EPX_OK;
        }
    }
    return fail(EPX_ERR_ARGUMENT, "epx_free: expected a pointer from epx_alloc of this group, got %p", ptr);
}

void heap_free_all(struct epx_group *group)
{
    while (group->blocks) {
        struct heap_block *block = group->blocks;
        group->blocks = block->next;
        free(block);
    }
}
