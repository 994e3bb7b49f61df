/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EPX_GROUP_STATS_H
#define EPX_GROUP_STATS_H

#include "group/objects.h"

epx_status stats_read(struct epx_group *group, epx_stats *stats);
epx_status stats_reset(struct epx_group *group);
/* What proxies had counted that are closed: those of the next network go on from there. */
void stats_keep_net(struct epx_group *group, const struct proxy_stats *counted);

#endif
