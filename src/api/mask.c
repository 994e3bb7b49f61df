/* SPDX-License-Identifier: Apache-2.0 */
/* Masks: which ranks take part. */
#include <string.h>

#include "group/group.h"
#include "group/registry.h"
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

/* Masked by a timeout, by hand, or by agreement. */
static epx_status is_masked(epx_group *group, int rank, int *masked)
{
    int32_t word = 1;
    epx_status status = group->device->ops->copy(group->device, &word, &group->shadow.mask[rank], sizeof(word));

    *masked = !word || group->asked_out[rank] || group->map.out[rank];
    return status;
}

/* By what a rank missed while it was masked, it would be an operation behind: only a meeting brings it back. */
static epx_status check_unmask(epx_group *group, int rank)
{
    int masked = 0;
    epx_status status = is_masked(group, rank, &masked);

    if (status == EPX_OK && masked)
        status = fail(
            EPX_ERR_USAGE,
            "epx_mask_update: mask[%d]: expected 0, got 1: a rank that is masked comes back by epx_mask_clean", rank);
    return status;
}

epx_status epx_mask_update(epx_group *group, const int32_t *mask, epx_stream stream)
{
    struct mask_params params;
    int more = 0;
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
        if (mask[r] && (status = check_unmask(group, r)) != EPX_OK)
            return status;
        params.bits[r / 8] |= (uint8_t)(mask[r] << (r % 8));
        more |= !mask[r] && !group->map.out[r];
    }
    status = launch_mask(group, &params, stream);
    if (status != EPX_OK)
        return status;
    group->masked_by_hand |= more;
    for (int r = 0; r < group->nranks; r++)
        group->asked_out[r] |= !mask[r];
    return EPX_OK;
}

epx_status epx_mask_clean(epx_group *group, epx_stream stream)
{
    epx_status status = need_mask(group, "epx_mask_clean");

    if (status != EPX_OK)
        return status;
    status =
        group->device->ops->stream_sync(group->device, stream ? (struct device_stream *)stream : group->default_stream);
    return status == EPX_OK ? group_rejoin(group, 1) : status;
}
