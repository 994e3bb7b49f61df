/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EPX_MODES_HANDLE_H
#define EPX_MODES_HANDLE_H

#include "group/objects.h"

/* `config` is checked. */
epx_status handle_create(struct epx_group *group, const epx_handle_config *config, struct epx_handle **handle);
/* No kernel may use its tables any more. */
void handle_free(struct epx_handle *handle);
void handles_free_all(struct epx_group *group);
/* Low latency: what the next dispatch reads. */
void handle_set_routing(struct epx_handle *handle, const epx_tensor *topk);
/* Has it a routing? By any thread. */
int handle_has_tokens(const struct epx_handle *handle);
/* How many were queued. Counts that were read from handle->info are those of one update if no other was queued
 * meanwhile. */
uint64_t handle_updates(const struct epx_handle *handle);
/* The same, with those whose launch failed: it never falls. What was seen of such an update is not to be believed. */
uint64_t handle_attempts(const struct epx_handle *handle);
/* High throughput: until the last update has exchanged counts, or for max_us: EPX_ERR_NOT_READY. */
epx_status handle_poll_update(struct epx_handle *handle, const char *call, uint64_t max_us);

/* Does handle->info say what the next operation finds? Not before the last update has run, nor where a graph may run
 * one of its own in between. */
int handle_is_counted(const struct epx_handle *handle);
/* EPX_ERR_OVERFLOW: the update has found a rank with more tokens than the group is for. On all ranks alike. */
epx_status handle_check_tokens(const struct epx_handle *handle, const char *call);

/* Device memory of a handle (handle_tables.c). */
size_t handle_table_bytes(const struct settings *set, const struct ht_layout *ht, const epx_handle_config *config);
epx_status handle_tables_create(struct epx_handle *handle);
void handle_tables_destroy(struct epx_handle *handle);
/* Says for which handles a routing in memory is good. */
uint64_t handle_key(const struct epx_handle *handle);
/* High throughput: struct handle_dev.pos, an address of the device. */
const int32_t *handle_places(const struct epx_handle *handle);
/* Waits for the group's queued work (launch_await). */
epx_status handle_state_read(struct epx_handle *handle, const char *call, struct handle_state *state);
/* High throughput, a handle that was never updated, in memory of the caller's: takes the routing that is in it when the
 * work of the stream and of the group has run, for so many tokens of this rank. */
epx_status handle_adopt(struct epx_handle *handle, int64_t ntokens, epx_stream stream, const char *call);

#endif
