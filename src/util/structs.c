/* SPDX-License-Identifier: Apache-2.0 */
#include "util/structs.h"

#include <stddef.h>
#include <string.h>

#include "util/status.h"

enum { SIZE_MOST = 4096 };

/* Structs that have grown, and each size that they had before: the offset of the first field that was added then. A
 * caller that was compiled with the older header passes that size; any other smaller size would cut a field. */
static const struct {
    const char *name;
    uint32_t size;
} older[] = {
    {"epx_group_config", offsetof(epx_group_config, ht_buffer_bytes)},
    {"epx_layout_info", offsetof(epx_layout_info, rank_matrix)},
    {"epx_layout_info", offsetof(epx_layout_info, expert_rows)},
    {"epx_layout_info", offsetof(epx_layout_info, drop_rows)},
    {"epx_dispatch_outputs", offsetof(epx_dispatch_outputs, source_map)},
    {"epx_dispatch_config", offsetof(epx_dispatch_config, source_stride)},
    {"epx_dispatch_config", offsetof(epx_dispatch_config, max_sms)},
    {"epx_dispatch_config", offsetof(epx_dispatch_config, nvfp4)},
    {"epx_dispatch_inputs", offsetof(epx_dispatch_inputs, global_scale)},
    {"epx_combine_config", offsetof(epx_combine_config, sum)},
    {"epx_combine_config", offsetof(epx_combine_config, nvfp4)},
    {"epx_combine_config", offsetof(epx_combine_config, signal_value)},
    {"epx_combine_inputs", offsetof(epx_combine_inputs, row_scales)},
    {"epx_combine_inputs", offsetof(epx_combine_inputs, signals)},
    {"epx_combine_inputs", offsetof(epx_combine_inputs, topk_idx)},
    {"epx_stats", offsetof(epx_stats, net_stuck)},
    {"epx_group_config", offsetof(epx_group_config, device_alloc)},
    {"epx_group_config", offsetof(epx_group_config, ht_node_bytes)},
    {"epx_group_config", offsetof(epx_group_config, use_fabric)},
    {"epx_handle_config", offsetof(epx_handle_config, memory)},
};

static int is_older(const char *name, uint32_t size)
{
    for (size_t i = 0; i < sizeof(older) / sizeof(older[0]); i++)
        if (older[i].size == size && !strcmp(older[i].name, name))
            return 1;
    return 0;
}

static epx_status check_tail(const void *theirs, uint32_t size, size_t bytes, const char *name)
{
    for (size_t i = bytes; i < size; i++)
        if (((const unsigned char *)theirs)[i])
            return fail(EPX_ERR_ARGUMENT, "%s: byte %zu is set, but this library knows only %zu bytes of it", name, i,
                        bytes);
    return EPX_OK;
}

static epx_status check_size(const void *theirs, size_t bytes, const char *name, uint32_t *size)
{
    if (!theirs)
        return fail(EPX_ERR_ARGUMENT, "%s: expected a pointer, got NULL", name);
    memcpy(size, theirs, sizeof(*size));
    if (*size == bytes || is_older(name, *size))
        return EPX_OK;
    if (*size < bytes || *size > SIZE_MOST || *size % sizeof(uint32_t))
        return fail(EPX_ERR_ARGUMENT,
                    "%s.size: expected %zu, got %u (initialise the struct with its EPX_..._INIT macro)", name, bytes,
                    *size);
    return check_tail(theirs, *size, bytes, name);
}

epx_status struct_in(void *ours, size_t bytes, const void *theirs, const char *name)
{
    uint32_t size = 0;
    epx_status status = check_size(theirs, bytes, name, &size);

    if (status != EPX_OK)
        return status;
    memset(ours, 0, bytes);
    memcpy(ours, theirs, size < bytes ? size : bytes);
    return EPX_OK;
}

epx_status struct_out(void *theirs, const void *ours, size_t bytes, const char *name)
{
    uint32_t size = 0;
    epx_status status = check_size(theirs, bytes, name, &size);

    if (status != EPX_OK)
        return status;
    memcpy((char *)theirs + sizeof(size), (const char *)ours + sizeof(size),
           (size < bytes ? size : bytes) - sizeof(size));
    return EPX_OK;
}
