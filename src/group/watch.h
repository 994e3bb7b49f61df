/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EPX_GROUP_WATCH_H
#define EPX_GROUP_WATCH_H

#include <stddef.h>

#include "group/objects.h"
#include "util/watch.h"

/* Where pages are: WATCH_FOLDER/epx-top-UID-PID-NUMBER. The process that shows itself holds a lock on its page. */
#define WATCH_FOLDER "/dev/shm"

/* Makes this rank's page, group->watch; without one (EPX_TOP=0, no shared memory) nothing else is different. */
void watch_create(struct epx_group *group);
/* Once group->number is known: from now on epx top shows it. */
void watch_show(struct epx_group *group);
/* Once kernels can run: counters of devices whose kernels cannot write the page. Stopped before memory goes. */
void watch_sampler_start(struct epx_group *group);
void watch_sampler_stop(struct epx_group *group);
/* Before the heap goes: where ranks were lost, pages of processes that were killed are removed. */
void watch_clean_up(struct epx_group *group);
void watch_destroy(struct epx_group *group);

#endif
