/* SPDX-License-Identifier: Apache-2.0 */
/* epx_group_ticket, epx_group_join. */
#include "group/join.h"

#include "group/registry.h"
#include "util/status.h"

epx_status epx_group_ticket(epx_group *group, char *text, size_t bytes)
{
    API_ISSUE;
    epx_status status = group_check(group, "epx_group_ticket");

    if (status == EPX_OK && !text)
        status = fail(EPX_ERR_ARGUMENT, "epx_group_ticket: text: expected a pointer, got NULL");
    return status == EPX_OK ? group_ticket(group, text, bytes) : status;
}

epx_status epx_group_join(epx_group **out, const char *ticket, int rank, const epx_group_config *config, int timeout_ms)
{
    epx_status status;

    if (!out)
        return fail(EPX_ERR_ARGUMENT, "epx_group_join: group: expected a pointer, got NULL");
    *out = NULL;
    status = registry_begin("epx_group_join");
    if (status != EPX_OK)
        return status;
    status = group_join(ticket, rank, config, timeout_ms, out);
    registry_end();
    return status;
}
