/* SPDX-License-Identifier: Apache-2.0 */
/* epx_mask_*: which ranks take part. */
#include "group/mask.h"

#include "group/abort.h"
#include "group/launch.h"
#include "group/recover.h"
#include "group/registry.h"
#include "util/status.h"

static epx_status check_call(struct api_call *call, epx_group *group, epx_stream stream, const char *function)
{
    epx_status status = api_enter(call, REGISTRY_GROUP, group, function);

    if (status == EPX_OK && !group->set.enable_mask)
        status = fail(EPX_ERR_USAGE, "%s: expected a group created with enable_mask = 1", function);
    return status == EPX_OK ? stream_check(group, stream, function) : status;
}

epx_status epx_mask_query(epx_group *group, int32_t *mask, epx_stream stream)
{
    API_ISSUE;
    epx_status status = check_call(&api_call, group, stream, "epx_mask_query");

    if (status != EPX_OK)
        return status;
    if (!mask)
        return fail(EPX_ERR_ARGUMENT, "epx_mask_query: mask: expected a pointer, got NULL");
    return mask_query(group, mask, stream);
}

static epx_status check_value(epx_group *group, int rank, int32_t value)
{
    if (value != 0 && value != 1)
        return fail(EPX_ERR_ARGUMENT, "epx_mask_update: mask[%d]: expected 0 or 1, got %d", rank, value);
    if (rank == group->rank && !value)
        return fail(EPX_ERR_ARGUMENT, "epx_mask_update: mask[%d]: a rank cannot mask itself", rank);
    return EPX_OK;
}

epx_status epx_mask_update(epx_group *group, const int32_t *mask, epx_stream stream)
{
    API_ISSUE;
    epx_status status = check_call(&api_call, group, stream, "epx_mask_update");

    if (status != EPX_OK)
        return status;
    if (!mask)
        return fail(EPX_ERR_ARGUMENT, "epx_mask_update: mask: expected a pointer, got NULL");
    for (int r = 0; r < group->nranks && status == EPX_OK; r++)
        status = check_value(group, r, mask[r]);
    if (status == EPX_OK)
        status = mask_restore(group, mask, stream);
    return status == EPX_OK ? mask_update(group, mask, stream) : status;
}

epx_status epx_mask_left_out(epx_group *group, int *left_out)
{
    API_ISSUE;
    epx_status status = check_call(&api_call, group, NULL, "epx_mask_left_out");

    if (status == EPX_OK && !left_out)
        status = fail(EPX_ERR_ARGUMENT, "epx_mask_left_out: left_out: expected a pointer, got NULL");
    if (status == EPX_OK) {
        const uint64_t word = abort_word(group);

        /* A rank whose own recovery has failed has a word of its own, and nobody goes on without it. */
        *left_out = (word & ABORT_LEFT_OUT) && ABORT_RANK(word) != group->rank;
    }
    return status;
}

epx_status epx_mask_clean_active(epx_group *group, epx_stream stream)
{
    API_ISSUE;
    epx_status status = check_call(&api_call, group, stream, "epx_mask_clean_active");

    if (status == EPX_OK)
        status = launch_await(group, group_stream(group, stream), "epx_mask_clean_active");
    if (status == EPX_OK)
        status = group_recover(group, "epx_mask_clean_active", 0);
    if (status == EPX_OK)
        group->masks_hidden = 1;
    return status;
}

epx_status epx_mask_clean(epx_group *group, epx_stream stream)
{
    API_ISSUE;
    epx_status status = check_call(&api_call, group, stream, "epx_mask_clean");

    if (status == EPX_OK)
        status = launch_await(group, group_stream(group, stream), "epx_mask_clean");
    if (status == EPX_OK)
        status = group_recover(group, "epx_mask_clean", 1);
    if (status == EPX_OK)
        group->masks_hidden = 0;
    return status;
}
