/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a group does when the process of one of its ranks has ended, or a machine does not reply (liveness.h):
 *
 *   without masks, or high throughput alone   abort words of the node and the own one: what runs ends
 *   with masks                                group_dev.ended: low latency masks the rank when it waits for it,
 *                                             and high throughput ends (wait_failed() in kernel/wait_word.h)
 *   always                                    an error for epx_group_error(); epx_group_error_fd() is readable
 *
 * A recovery learns of it by itself; what comes meanwhile is taken after it.
 */
#ifndef EPX_GROUP_ENDED_H
#define EPX_GROUP_ENDED_H

#include "group/liveness.h"
#include "group/objects.h"

/* Before the exchange of heaps: what the others must know of this rank goes into `card`. */
epx_status ended_open(struct epx_group *group, struct liveness_card *card);
/* What `rank` has told, of the process that has its place now. */
void ended_set_peer(struct epx_group *group, int rank, int64_t pid, const struct liveness_card *card);
/* All peers are set. `alone`: all ranks are threads of this process. */
epx_status ended_start(struct epx_group *group, int alone);
/* The group is made: from now on it is told. */
void ended_tell(struct epx_group *group);
/* All have recovered. */
void ended_met_again(struct epx_group *group);
/* 1: the process of the rank has ended, without epx_group_destroy. */
int ended_is(const struct epx_group *group, int rank);
/* The first member that has ended; -1: none. */
int ended_member(const struct epx_group *group);
/* With masks: the first member that has ended or is unreachable, and is not masked here yet; -1: none. */
int ended_unmasked(struct epx_group *group);
/* This rank ends its group in order. */
void ended_leave(struct epx_group *group);
void ended_close(struct epx_group *group);
/* "rank 3 has ended", or its machine does not reply. `phase`: PHASE_ENDED or PHASE_UNREACHABLE. */
void ended_text(const struct epx_group *group, int phase, int rank, char *text, size_t bytes);

epx_status ended_fd(struct epx_group *group, int *fd);
/* The errors have been cleared. */
void ended_fd_clear(struct epx_group *group);

#endif
