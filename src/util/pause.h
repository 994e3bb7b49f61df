/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Time for host code that waits for something: the real clock and real sleep, or a simulation's (util/runtime.h).
 * Whatever waits on the host's side of an operation uses these two.
 */
#ifndef EPX_UTIL_PAUSE_H
#define EPX_UTIL_PAUSE_H

#include <stdint.h>

uint64_t host_now_ns(void);
/* Gives way for about so long. */
void pause_ns(uint64_t ns);

#endif
