/* SPDX-License-Identifier: Apache-2.0 */
#include "group/mask.h"

#include <string.h>

#include "group/launch.h"
#include "util/status.h"

static int has_host_access(const struct epx_group *group)
{
    return (group->device->ops->caps & DEVICE_HOST_ACCESS) != 0;
}

epx_status mask_read(const struct epx_group *group, int rank, int32_t *active)
{
    if (!has_host_access(group))
        return group->device->ops->copy(group->device, active, &group->shadow.mask[rank], sizeof(*active));
    *active = __atomic_load_n(&group->shadow.mask[rank], __ATOMIC_ACQUIRE); /* pairs with wait_failed() in a kernel */
    return EPX_OK;
}

epx_status mask_is_set(const struct epx_group *group, int rank, int *masked)
{
    int32_t active = 1;
    epx_status status = mask_read(group, rank, &active);

    *masked = !active || group->masked_by_update[rank] || group->map.out[rank];
    return status;
}

static epx_status launch_mask(struct epx_group *group, const struct mask_params *params, epx_stream stream)
{
    return launch_ordered(group, (struct device_stream *)stream, KERNEL_MASK, params, sizeof(*params));
}

epx_status mask_query(struct epx_group *group, int32_t *device_mask, epx_stream stream)
{
    struct mask_params params;

    memset(&params, 0, sizeof(params));
    params.g = group->dev;
    params.query = device_mask;
    params.hidden = group->masks_hidden;
    return launch_mask(group, &params, stream);
}

/* Behind the epochs: the mask as it was with them. */
static int32_t *kept_mask(const struct epx_group *group)
{
    return (int32_t *)(group->mask_epochs + OP_COUNT);
}

/* Before the first rank is masked: what this rank has begun so far, and whom a deadline has masked. */
static epx_status keep_epochs(struct epx_group *group, epx_stream stream)
{
    const struct device_ops *ops = group->device->ops;
    struct device_stream *on = (struct device_stream *)stream;
    epx_status status = launch_order(group, &on);

    group->mask_epochs_known = 0;
    if (status != EPX_OK || ops->stream_captures(group->device, on))
        return status;
    status = ops->stream_copy(group->device, on, group->mask_epochs, group->shadow.state->epoch,
                              OP_COUNT * sizeof(uint64_t));
    if (status == EPX_OK)
        status = ops->stream_copy(group->device, on, kept_mask(group), group->shadow.mask,
                                  (size_t)group->nranks * sizeof(int32_t));
    group->mask_epochs_known = status == EPX_OK;
    return status;
}

void mask_forget_updates(struct epx_group *group)
{
    group->mask_updated = 0;
    memset(group->masked_by_update, 0, (size_t)group->nranks);
}

int mask_by_deadline(const struct epx_group *group, int rank)
{
    /* Acquire: pairs with wait_failed() in a kernel, and with group_device_members(). */
    return __atomic_load_n(&group->shadow.by_deadline[rank], __ATOMIC_ACQUIRE) != 0;
}

epx_status mask_update(struct epx_group *group, const int32_t *host_mask, epx_stream stream)
{
    struct mask_params params;
    epx_status status = group->mask_updated ? EPX_OK : keep_epochs(group, stream);

    if (status != EPX_OK)
        return status;
    memset(&params, 0, sizeof(params));
    params.g = group->dev;
    params.update = 1;
    for (int r = 0; r < group->nranks; r++)
        params.bits[r / 8] |= (uint8_t)(host_mask[r] << (r % 8));
    status = launch_mask(group, &params, stream);
    for (int r = 0; r < group->nranks && status == EPX_OK; r++) {
        group->masked_by_update[r] |= !host_mask[r] && !mask_by_deadline(group, r);
        group->mask_updated |= !host_mask[r] && !group->map.out[r];
    }
    return status;
}

/* Has this rank begun an operation since mask_update() masked the first rank? */
static epx_status began_operations(struct epx_group *group, epx_stream stream, int *began)
{
    const struct device_ops *ops = group->device->ops;
    uint64_t then[OP_COUNT], now[OP_COUNT];
    struct device_stream *on = (struct device_stream *)stream;
    epx_status status = launch_order(group, &on);

    *began = 1;
    if (status != EPX_OK || !group->mask_epochs_known || ops->stream_captures(group->device, on))
        return status;
    status = ops->stream_sync(group->device, on);
    if (status == EPX_OK)
        status = ops->copy(group->device, then, group->mask_epochs, sizeof(then));
    if (status == EPX_OK)
        status = ops->copy(group->device, now, group->shadow.state->epoch, sizeof(now));
    *began = status != EPX_OK || memcmp(then, now, sizeof(then)) != 0;
    return status;
}

/* Has a masked rank missed operations? A rank that a deadline has masked has, also if it was masked by hand later, or
 * when the operation, an epx_complete that begins none, was queued and had not run yet. */
static epx_status has_missed(struct epx_group *group, int rank, epx_stream stream, int *missed)
{
    int32_t active = 0;
    epx_status status = began_operations(group, stream, missed);

    if (status == EPX_OK && !*missed)
        status = group->device->ops->copy(group->device, &active, &kept_mask(group)[rank], sizeof(active));
    *missed |= !active || !group->masked_by_update[rank] || group->map.out[rank] || mask_by_deadline(group, rank);
    return status;
}

static epx_status activate(struct epx_group *group, int rank)
{
    static const int32_t active = 1;
    epx_status status = EPX_OK;

    if (has_host_access(group))
        __atomic_store_n(&group->shadow.mask[rank], active, __ATOMIC_RELEASE); /* pairs with mask_read() */
    else
        status = group->device->ops->copy(group->device, &group->shadow.mask[rank], &active, sizeof(active));
    if (status == EPX_OK)
        group->masked_by_update[rank] = 0;
    return status;
}

epx_status mask_restore(struct epx_group *group, const int32_t *host_mask, epx_stream stream)
{
    epx_status status = EPX_OK;
    int left = 0;

    for (int r = 0; r < group->nranks && status == EPX_OK; r++) {
        int masked = 0, missed = 0;

        status = host_mask[r] ? mask_is_set(group, r, &masked) : EPX_OK;
        if (status == EPX_OK && masked)
            status = has_missed(group, r, stream, &missed);
        if (status == EPX_OK && missed)
            status = fail(EPX_ERR_USAGE,
                          "epx_mask_update: mask[%d]: expected 0, got 1: a masked rank that has missed operations "
                          "becomes active again only by epx_mask_clean",
                          r);
    }
    for (int r = 0; r < group->nranks && status == EPX_OK; r++) {
        if (host_mask[r] && group->masked_by_update[r])
            status = activate(group, r);
        left |= group->masked_by_update[r] && !group->map.out[r];
    }
    if (status == EPX_OK)
        group->mask_updated = left;
    return status;
}
