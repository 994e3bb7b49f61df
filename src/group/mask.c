/* SPDX-License-Identifier: Apache-2.0 */
#include "group/mask.h"

#include <string.h>

#include "group/launch.h"

epx_status mask_read(const struct epx_group *group, int rank, int32_t *active)
{
    if (!(group->device->ops->caps & DEVICE_HOST_ACCESS))
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

epx_status mask_update(struct epx_group *group, const int32_t *host_mask, epx_stream stream)
{
    struct mask_params params;
    epx_status status;

    memset(&params, 0, sizeof(params));
    params.g = group->dev;
    params.update = 1;
    for (int r = 0; r < group->nranks; r++)
        params.bits[r / 8] |= (uint8_t)(host_mask[r] << (r % 8));
    status = launch_mask(group, &params, stream);
    for (int r = 0; status == EPX_OK && r < group->nranks; r++) {
        group->mask_updated |= !host_mask[r] && !group->map.out[r];
        group->masked_by_update[r] |= !host_mask[r];
    }
    return status;
}
