/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EPX_GROUP_RECOVER_H
#define EPX_GROUP_RECOVER_H

#include "group/objects.h"

/* Collective over the remaining ranks: epochs, signals and error state start again from one common point. `unmask`:
 * masked ranks come back, unless their processes have ended. `call`: the user's, for messages. */
epx_status group_recover(struct epx_group *group, const char *call, int unmask);
/* Clears the error; collective (group_recover) if an operation was aborted or ranks were masked by a call. */
epx_status group_clear_error(struct epx_group *group);

#endif
