/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How ranks meet when some of them may be gone. The bootstrap needs everybody; this needs only those that are left.
 *
 *   muster_open, boot's all-gather of addresses, muster_know      when the group is created
 *   muster_begin                                                  agrees on who is left out
 *   muster_gather ...                                             all-gathers among the rest
 *   muster_end
 *
 * A rank is out when a caller says so (it is masked), or when its port is gone, which its process closes when it ends.
 */
#ifndef EPX_BOOT_MUSTER_H
#define EPX_BOOT_MUSTER_H

#include "boot/line.h"

struct muster;

epx_status muster_open(int rank, int nranks, int near, struct line_address *own, struct muster **muster);
/* The addresses of all ranks, and a number that ranks of this group share and others do not know. */
void muster_know(struct muster *muster, const struct line_address *all, uint64_t token);
/*
 * Collective over the ranks that are not out. out[nranks]: in, whom this rank leaves out; on success, whom all leave out,
 * the same on every rank that succeeds. `purpose`: ranks that meet for different ones are told so. Ranks that neither come
 * nor are known to be gone are named when timeout_ms are over. After a failure: muster_end; after success at least one
 * gather, for who hangs up before all have agreed has given up.
 */
epx_status muster_begin(struct muster *muster, int purpose, uint8_t *out, int timeout_ms);
/* Every rank that was met gives `bytes`; recv[nranks * bytes], zeros for those that are out. */
epx_status muster_gather(struct muster *muster, const void *send, void *recv, size_t bytes);
void muster_end(struct muster *muster);
void muster_close(struct muster *muster);

#endif
