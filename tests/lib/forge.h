/* SPDX-License-Identifier: Apache-2.0 */
/* A stranger that writes to the endpoints of a job, as ranks do for signals. */
#ifndef EPX_TESTS_LIB_FORGE_H
#define EPX_TESTS_LIB_FORGE_H

#include <netinet/in.h>
#include <stdatomic.h>

enum { FORGE_PORTS = 64 };

/* Ports of libfabric's tcp, in memory that may be shared: others add to it while the stranger writes. */
struct forge_targets {
    struct in_addr host;
    atomic_int count;
    atomic_int ports[FORGE_PORTS]; /* 0: not told yet */
};

/* Beyond FORGE_PORTS they are left out. */
void forge_add(struct forge_targets *targets, int port);

/*
 * Writes nothing, with completion data that count as signals of each of `ranks` ranks, for counters of every kind, to
 * the newest ports, `newest` at most, until the process is killed. Returns only if it cannot: no libfabric.
 */
void forge_signals(const struct forge_targets *targets, int newest, uint32_t ranks);

#endif
