/* SPDX-License-Identifier: Apache-2.0 */
/* epx_alloc, epx_free, epx_register: memory that other ranks of the node reach. */
#include "group/alloc.h"
#include "group/abort.h"
#include "group/heap.h"
#include "group/region.h"
#include "group/registry.h"
#include "util/status.h"

epx_status epx_alloc(epx_group *group, size_t bytes, void **ptr)
{
    API_ISSUE;
    epx_status status = group_check(group, "epx_alloc");

    if (status != EPX_OK)
        return status;
    if (!ptr)
        return fail(EPX_ERR_ARGUMENT, "epx_alloc: ptr: expected a pointer, got NULL");
    *ptr = NULL;
    return heap_alloc(group, bytes, ptr);
}

epx_status epx_free(epx_group *group, void *ptr)
{
    API_ISSUE;
    epx_status status = group_check(group, "epx_free");

    return status != EPX_OK || !ptr ? status : heap_free(group, ptr);
}

epx_status epx_register(epx_group *group, const void *data, size_t bytes, epx_stream stream, int *in_place)
{
    uint64_t offset;
    API_ISSUE;
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
    regions_import_captured(group, (struct device_stream *)stream);
    return EPX_OK;
}
