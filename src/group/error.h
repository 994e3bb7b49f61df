/* SPDX-License-Identifier: Apache-2.0 */
/* The group's two error records: one is written by kernels, one by proxy threads. The first error of each stays. */
#ifndef EPX_GROUP_ERROR_H
#define EPX_GROUP_ERROR_H

#include "group/objects.h"

/* The first recorded error; EPX_OK if there is none. */
epx_status error_read(const struct epx_group *group, epx_error_info *info);
/* The same from an abort word, where no kernel of this rank has recorded it yet. Returns EPX_ERR_PEER. */
epx_status error_of_abort(const struct epx_group *group, uint64_t word, epx_error_info *info);
/* From a proxy thread. */
void error_record_net(struct epx_group *group, int status, int peer, int64_t expected, int64_t seen, const char *text);
/* Empties the records. Nothing may run that would write them. */
epx_status errors_clear(struct epx_group *group);

#endif
