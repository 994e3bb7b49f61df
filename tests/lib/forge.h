/* SPDX-License-Identifier: Apache-2.0 */
/* A stranger that writes to the endpoints of a job, as ranks do for signals. */
#ifndef EPX_TESTS_LIB_FORGE_H
#define EPX_TESTS_LIB_FORGE_H

#include <netinet/in.h>

/*
 * Writes nothing, with completion data that count as signals of each of `ranks` ranks, for counters of every kind, to
 * the `count` ports of libfabric's tcp at `at`, until the process is killed. Returns only if it cannot: no libfabric,
 * no port, or more than 32 of them.
 */
void forge_signals(const struct sockaddr_in *at, int count, uint32_t ranks);

#endif
