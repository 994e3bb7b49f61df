/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Time as host code sees it when it waits for something: the real clock and real sleep, unless a simulation has put its
 * own in their place. Whatever waits on the host's side of an operation uses these two.
 */
#ifndef EPX_UTIL_PAUSE_H
#define EPX_UTIL_PAUSE_H

#include <stdint.h>

struct time_source {
    uint64_t (*now_ns)(void);
    void (*pause_ns)(uint64_t ns);
};

/* NULL = the real ones. Only while nothing runs. */
void time_source_set(const struct time_source *source);
uint64_t host_now_ns(void);
/* Gives way for about so long. */
void pause_ns(uint64_t ns);

#endif
