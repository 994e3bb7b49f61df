/* SPDX-License-Identifier: Apache-2.0 */
/* The all-gather over connections that meet at rank 0 (wire.h). */
#ifndef EPX_BOOT_STAR_H
#define EPX_BOOT_STAR_H

#include "boot/meet.h"

struct gather {
    int rank, nranks;
    int timeout_ms;
    uint64_t sequence;
    uint32_t group;
    const void *send;
    void *recv;
    size_t bytes;
};

/* On failure all ranks have been told and the connections closed (-1): there is no going on after it. */
epx_status star_root(const struct gather *gather, int *fds);
epx_status star_leaf(const struct gather *gather, int *fd);

#endif
