/* SPDX-License-Identifier: Apache-2.0 */
/* epx_world_query: what the launcher of this process says. */
#include <stdio.h>

#include "boot/launcher.h"
#include "util/status.h"
#include "util/structs.h"

_Static_assert(sizeof(((epx_world *)0)->host) >= LAUNCHER_HOST_BYTES, "a launcher's host fits");

epx_status epx_world_query(epx_world *world)
{
    epx_world own = EPX_WORLD_INIT;
    struct launcher launcher;
    epx_status status;

    if (!world)
        return fail(EPX_ERR_ARGUMENT, "epx_world_query: world: expected a pointer, got NULL");
    own.nranks = own.local_nranks = 1;
    if (launcher_name()) {
        status = launcher_read(&launcher);
        if (status != EPX_OK)
            return status;
        own.rank = launcher.rank;
        own.nranks = launcher.nranks;
        own.local_rank = launcher.local_rank;
        own.local_nranks = launcher.local_nranks;
        own.port = launcher.port;
        snprintf(own.host, sizeof(own.host), "%s", launcher.host);
        snprintf(own.launcher, sizeof(own.launcher), "%s", launcher.name);
    }
    return struct_out(world, &own, sizeof(own), "epx_world");
}
