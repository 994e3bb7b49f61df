/* SPDX-License-Identifier: Apache-2.0 */
/* epx_group_error, epx_group_error_clear, epx_group_abort. */
#include "group/abort.h"
#include "group/error.h"
#include "group/net.h"
#include "group/recover.h"
#include "group/registry.h"
#include "util/status.h"
#include "util/structs.h"

epx_status epx_group_error(epx_group *group, epx_error_info *out)
{
    epx_error_info info;
    uint64_t word;
    API_WAIT;
    epx_status status = group_check(group, "epx_group_error");

    if (status != EPX_OK)
        return status;
    word = group_give_up(group);
    status = error_read(group, &info);
    if (status == EPX_ERR_TIMEOUT || status == EPX_ERR_PEER) {
        group_net_find_stuck(group);
        status = error_read(group, &info);
    }
    if (status == EPX_OK && word)
        status = error_of_abort(group, word, &info);
    if (out) {
        epx_status copied = struct_out(out, &info, sizeof(info), "epx_error_info");
        if (copied != EPX_OK)
            return copied;
    }
    return status == EPX_OK ? EPX_OK : fail(status, "%s", info.message);
}

epx_status epx_group_error_clear(epx_group *group)
{
    API_ISSUE;
    epx_status status = group_check(group, "epx_group_error_clear");

    return status == EPX_OK ? group_clear_error(group) : status;
}

epx_status epx_group_abort(epx_group *group, epx_status why)
{
    API_ISSUE;
    epx_status status = group_check(group, "epx_group_abort");

    if (status != EPX_OK)
        return status;
    if (why <= EPX_OK || why > EPX_ERR_INTERNAL)
        return fail(EPX_ERR_ARGUMENT, "epx_group_abort: why: expected an error of epx_status, got %d", (int)why);
    group_abort(group, why, -1);
    return EPX_OK;
}
