/* SPDX-License-Identifier: Apache-2.0 */
/* Masks: which ranks take part. */
#include <string.h>

#include "api/group.h"
#include "api/registry.h"
#include "util/status.h"

static epx_status need_mask(epx_group *group, const char *function)
{
    epx_status status = group_check(group, function);

    if (status == EPX_OK && !group->set.enable_mask)
        status = fail(EPX_ERR_USAGE, "%s: expected a group created with enable_mask = 1", function);
    return status;
}

static epx_status launch_mask(epx_group *group, const struct mask_params *params, epx_stream stream)
{
    epx_status status = stream_check(group, stream, "epx_mask");

    if (status != EPX_OK)
        return status;
    return launch_ordered(group, (struct device_stream *)stream, KERNEL_MASK, params, sizeof(*params));
}

epx_status epx_mask_query(epx_group *group, int32_t *mask, epx_stream stream)
{
    struct mask_params params;
    epx_status status = need_mask(group, "epx_mask_query");

    if (status != EPX_OK)
        return status;
    if (!mask)
        return fail(EPX_ERR_ARGUMENT, "epx_mask_query: mask: expected a pointer, got NULL");
    memset(&params, 0, sizeof(params));
    params.g = group->dev;
    params.query = mask;
    return launch_mask(group, &params, stream);
}

epx_status epx_mask_update(epx_group *group, const int32_t *mask, epx_stream stream)
{
    struct mask_params params;
    epx_status status = need_mask(group, "epx_mask_update");

    if (status != EPX_OK)
        return status;
    if (!mask)
        return fail(EPX_ERR_ARGUMENT, "epx_mask_update: mask: expected a pointer, got NULL");
    memset(&params, 0, sizeof(params));
    params.g = group->dev;
    params.update = 1;
    for (int r = 0; r < group->nranks; r++) {
        if (mask[r] != 0 && mask[r] != 1)
            return fail(EPX_ERR_ARGUMENT, "epx_mask_update: mask[%d]: expected 0 or 1, got %d", r, mask[r]);
        if (r == group->rank && !mask[r])
            return fail(EPX_ERR_ARGUMENT, "epx_mask_update: mask[%d]: a rank cannot mask itself", r);
        params.bits[r / 8] |= (uint8_t)(mask[r] << (r % 8));
    }
    return launch_mask(group, &params, stream);
}

epx_status epx_mask_clean(epx_group *group, epx_stream stream)
{
    epx_status status = need_mask(group, "epx_mask_clean");

    if (status != EPX_OK)
        return status;
    status =
        group->device->ops->stream_sync(group->device, stream ? (struct device_stream *)stream : group->default_stream);
    return status == EPX_OK ? group_resync(group, 1) : status;
}
