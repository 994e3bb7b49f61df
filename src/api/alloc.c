/* SPDX-License-Identifier: Apache-2.0 */
#include "api/alloc.h"

#include <inttypes.h>
#include <stdlib.h>

#include "group/region.h"
#include "group/group.h"
#include "group/registry.h"
#include "util/status.h"

#define ALIGN 256u

struct heap_block {
    uint64_t begin, end; /* offsets in the heap */
    struct heap_block *next;
};

/* Where a hole of `bytes` is; *link is where its block goes in. 0 = none; *largest tells the largest hole seen. */
static uint64_t find_hole(struct epx_group *group, uint64_t bytes, struct heap_block ***link, uint64_t *largest)
{
    uint64_t at = (group->plan.alloc + ALIGN - 1) / ALIGN * ALIGN;
    struct heap_block **where = &group->blocks;

    *largest = 0;
    for (;; where = &(*where)->next) {
        const uint64_t end = *where ? (*where)->begin : group->plan.total;
        if (end > at && end - at > *largest)
            *largest = end - at;
        if (end >= at && end - at >= bytes) {
            *link = where;
            return at;
        }
        if (!*where)
            return 0;
        at = ((*where)->end + ALIGN - 1) / ALIGN * ALIGN;
    }
}

epx_status epx_alloc(epx_group *group, size_t bytes, void **ptr)
{
    struct heap_block **link, *block;
    uint64_t at, largest;
    epx_status status = group_check(group, "epx_alloc");

    if (status != EPX_OK)
        return status;
    if (!ptr)
        return fail(EPX_ERR_ARGUMENT, "epx_alloc: ptr: expected a pointer, got NULL");
    *ptr = NULL;
    at = find_hole(group, bytes ? bytes : 1, &link, &largest);
    if (!at)
        return fail(EPX_ERR_MEMORY,
                    "epx_alloc: %zu bytes asked for, the largest free piece has %" PRIu64 " of %" PRIu64
                    " bytes in all: raise epx_group_config.alloc_bytes or EPX_ALLOC_BYTES",
                    bytes, largest, group->plan.total - group->plan.alloc);
    block = malloc(sizeof(*block));
    if (!block)
        return fail(EPX_ERR_MEMORY, "epx_alloc: no memory for a block of the list");
    *block = (struct heap_block){.begin = at, .end = at + (bytes ? bytes : 1), .next = *link};
    *link = block;
    *ptr = (char *)group->heap.base + at;
    return EPX_OK;
}

epx_status epx_free(epx_group *group, void *ptr)
{
    epx_status status = group_check(group, "epx_free");

    if (status != EPX_OK || !ptr)
        return status;
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

epx_status epx_register(epx_group *group, const void *data, size_t bytes, epx_stream stream, int *in_place)
{
    uint64_t offset;
    epx_status status = group_check(group, "epx_register");

    if (status == EPX_OK)
        status = group_usable(group);
    if (status == EPX_OK)
        status = stream_check(group, stream, "epx_register");
    if (status != EPX_OK)
        return status;
    if (!data || !in_place)
        return fail(EPX_ERR_ARGUMENT, "epx_register: %s: expected a pointer, got NULL", data ? "in_place" : "data");
    regions_import(group, (struct device_stream *)stream);
    *in_place =
        heap_offset(group, data, bytes) || regions_find(group, data, bytes, (struct device_stream *)stream, &offset);
    return EPX_OK;
}

void blocks_free_all(struct epx_group *group)
{
    while (group->blocks) {
        struct heap_block *block = group->blocks;
        group->blocks = block->next;
        free(block);
    }
}
