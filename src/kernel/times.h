/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How long operations of a GPU take, for epx top (group/watch_sample.c). Kernels keep times only while somebody looks:
 *
 *   the host                   g->is_watched = 1 in device memory; every launch copies *g into its blocks' memory
 *   first launch, agent 0      began_ns = now
 *   last launch, agent 0       count[kernel][bucket of now - began_ns] += 1, began_ns = 0
 *   the host                   copies the counts at each look; is_watched = 0 when nobody has looked for a while
 *
 * Nobody looks: agent 0 finds is_watched 0 in its block's memory, twice per launch. Launches of a group run one after
 * the other: there is one writer.
 */
#ifndef EPX_KERNEL_TIMES_H
#define EPX_KERNEL_TIMES_H

#include <stdint.h>

#include "kernel/params.h"

#ifndef TIMES_FN
#define TIMES_FN static inline
#endif

enum { TIME_BUCKETS = 256 };

/* In device memory. */
struct kernel_times {
    uint64_t began_ns; /* of the device's clock; 0: no operation has begun since somebody looks */
    uint32_t count[KERNEL_COUNT][TIME_BUCKETS];
};

/* Eight buckets for each power of two of nanoseconds: 9 % apart. */
TIMES_FN int time_bucket(uint64_t ns)
{
    int power = 3;

    if (ns < 8)
        return (int)ns;
    while (power < 34 && ns >> (power + 1))
        power++;
    return power < 34 ? (power - 2) * 8 + (int)(ns >> (power - 3) & 7) : TIME_BUCKETS - 1;
}

#endif
