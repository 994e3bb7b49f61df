/* SPDX-License-Identifier: Apache-2.0 */
/* What the host knows of signals, generated from the table in kernel/signals.h. */
#ifndef EPX_GROUP_SIGNALS_H
#define EPX_GROUP_SIGNALS_H

#include "group/objects.h"

/* The text of a phase; "unknown" for a number that is none. */
const char *phase_name(int phase);
/* [SIG_COUNT]: enum proxy_flow of each kind. */
extern const uint8_t signal_flows[SIG_COUNT];
/* [SIG_COUNT]: 1 = counts rows, and its aggregate is the sum over the peers; 0 = the least of them. */
extern const uint8_t signal_sums[SIG_COUNT];
/* For proxy_options.missable: whether ranks go on without one that misses such signals. */
extern const uint8_t signal_missable[SIG_COUNT];
/* May `kind` from `rank` still be on its way when this rank's operations have completed? */
int signal_is_owed(const struct epx_group *group, int kind, int rank);
/* The value of a signal of every peer when nothing is outstanding after these epochs: the word in the heap, which
 * ranks of the node store, and the counter of the proxies. */
uint64_t signal_after(const struct epx_group *group, const uint64_t *epochs, int kind, int slot);
/* The counter of `rank` once all that it owes has arrived. */
uint64_t signal_owed(const struct epx_group *group, const uint64_t *epochs, int kind, int slot, int rank);
uint64_t counter_after(const struct epx_group *group, const uint64_t *epochs, int kind, int slot);

#endif
