/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Agreement on the ranks that are left, and an all-gather among them. The bootstrap needs all ranks; this does not.
 *
 *   membership_open, all-gather of addresses by the bootstrap, membership_set_peers      when the group is created
 *   membership_agree                                                                     a round begins: who is
 *   excluded membership_allgather ...                                                             among the ranks that
 *   are left membership_end                                                                       the round ends
 *
 * A rank is excluded when a caller excludes it (it is masked), or when its port is closed, as it is when its process
 * ends.
 */
#ifndef EPX_BOOT_MEMBERSHIP_H
#define EPX_BOOT_MEMBERSHIP_H

#include "boot/conn.h"

struct membership;

/* key: of the group, 32 bytes; NULL = connections are not authenticated. */
epx_status membership_open(int rank, int nranks, int one_host, const uint8_t *key, struct conn_address *own,
                           struct membership **membership);
/* The addresses of all ranks, and a random number that only ranks of this group know. */
void membership_set_peers(struct membership *membership, const struct conn_address *all, uint64_t token);
/*
 * Collective over the ranks that are not excluded. excluded[nranks]: in, the ranks that this rank excludes; on success,
 * the ranks that any rank excludes, the same on every rank that succeeds. Ranks with different values of `purpose` all
 * fail. A timeout names the ranks that neither joined nor ended. After a failure call membership_end. After success
 * call membership_allgather at least once: a rank that closes its connections before all have agreed counts as having
 * given up.
 */
epx_status membership_agree(struct membership *membership, int purpose, uint8_t *excluded, int timeout_ms);
/* Every rank that is left sends `bytes`; recv[nranks * bytes] has zeros for the excluded ones. */
epx_status membership_allgather(struct membership *membership, const void *send, void *recv, size_t bytes);
void membership_end(struct membership *membership);
void membership_close(struct membership *membership);

#endif
