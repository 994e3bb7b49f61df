/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EPX_GROUP_ALIGN_H
#define EPX_GROUP_ALIGN_H

#include "group/objects.h"

/* Collective: finds how far this machine's clock is from rank 0's, for the trace. */
epx_status align_clocks(struct epx_group *group);

#endif
