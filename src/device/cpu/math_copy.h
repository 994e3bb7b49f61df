/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copies. Expected for one source and many destinations: non-temporal stores win, as nothing written is read again
 * here. Seen on a Neoverse V1 (destinations in memory, GB/s written, one core): they change nothing, and clearing the
 * line first (dc zva) halves the speed. What wins is to write 64 bytes to every destination in turn: the page walks and
 * line fills of several destinations then overlap, where a whole row at a time waits for each.
 *
 *     row bytes, destinations    memcpy each    64 bytes each in turn
 *     1024,  4                       8.1             6.7
 *     4096,  4                      14.0            15.7
 *     14336, 2                      15.8            20.6
 *     14336, 4                      20.6            27.9
 *     14336, 8                      26.7            34.4
 *     65536, 8                      33.5            48.5
 */
#ifndef EPX_DEVICE_CPU_MATH_COPY_H
#define EPX_DEVICE_CPU_MATH_COPY_H

#include "device/cpu/math_vec.h"

#define COPY_LINE ((size_t)64)
#define COPY_TURNS_FROM ((size_t)2048) /* shorter rows go destination by destination */
#define COPY_PREFETCH 1024

/* One to four vectors, by name: gcc keeps an array of them in memory, at two thirds of the speed. */
static void copy_line_many(void *const *to, int n, const char *from, size_t at)
{
    const size_t second = VEC_BYTES < 64 ? VEC_BYTES : 0, third = VEC_BYTES < 32 ? 32 : 0, fourth = third ? 48 : 0;
    vu32 a = vec_load_u32(from + at), b = vec_load_u32(from + at + second);
    vu32 c = vec_load_u32(from + at + third), d = vec_load_u32(from + at + fourth);
    for (int i = 0; i < n; i++) {
        char *line = (char *)to[i] + at;
        vec_store(line, a);
        if (second)
            vec_store(line + second, b);
        if (third)
            vec_store(line + third, c);
        if (fourth)
            vec_store(line + fourth, d);
    }
}

static void copy_many(void *const *to, int n, const void *from, size_t bytes)
{
    size_t at = 0;
    if (n > 1 && bytes >= COPY_TURNS_FROM) {
        for (; at + COPY_LINE <= bytes; at += COPY_LINE) {
            vec_prefetch(from, at + COPY_PREFETCH);
            copy_line_many(to, n, from, at);
        }
    }
    for (int i = 0; i < n && at < bytes; i++)
        memcpy((char *)to[i] + at, (const char *)from + at, bytes - at);
}

#endif
