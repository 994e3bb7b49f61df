/* SPDX-License-Identifier: Apache-2.0 */
/* A group's configuration: defaults and environment filled in, ranges checked, compared between ranks. */
#ifndef EPX_GROUP_CONFIG_H
#define EPX_GROUP_CONFIG_H

#include "group/heap_layout.h"

#define DEFAULT_TIMEOUT_MS 100000

epx_status settings_make(const epx_group_config *config, int nranks, struct settings *set);
/* The deadline that a configuration with this timeout_ms has. */
int settings_timeout(int given);
/* The heap of a group that has not been created yet, with nodes as the configuration says. */
epx_status settings_plan(const epx_group_config *config, int nranks, struct heap_plan *plan);

/* What ranks must have in common, as numbers in a fixed order. */
#define SETTINGS_FIELDS 17
void settings_pack(const struct settings *set, int64_t fields[SETTINGS_FIELDS]);
/* `all` holds every rank's fields. Fails naming the first rank that differs from rank 0, the field and both values. */
epx_status settings_compare(const int64_t *all, int nranks, size_t stride);
/* "max_topk = 4 where the group has 8": the first field in which a process differs from a group. 0: none. */
int settings_difference(const int64_t *process, const int64_t *group, char *text, size_t bytes);

#endif
