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
 *
 * On x86_64 non-temporal stores win where the data does not fit the cache: a common store first reads the line. Seen on
 * a Xeon (AVX-512, L3 of 480 MB), rows of 14336 bytes to 4 processes each, and sums of 4: 1160 us of a process and
 * round instead of 1670 with 128 processes (940 MB of rows), 1170 instead of 1360 with 8 (59 MB) beside other work; but
 * 41 instead of 21 with 2 MB. So the caller says how much will be written (math_past_cache).
 */
#ifndef EPX_DEVICE_CPU_MATH_COPY_H
#define EPX_DEVICE_CPU_MATH_COPY_H

#include "device/cpu/math_vec.h"

#define COPY_LINE ((size_t)64)
#define COPY_TURNS_FROM ((size_t)2048) /* shorter rows go destination by destination */
#define COPY_PREFETCH 1024

VEC_INLINE void copy_store(void *to, vu32 v, int past)
{
    if (past)
        vec_stream(to, v);
    else
        vec_store(to, v);
}

/* One to four vectors, by name: gcc keeps an array of them in memory, at two thirds of the speed. */
VEC_INLINE void copy_line_many(void *const *to, int n, const char *from, size_t at, int past)
{
    const size_t second = VEC_BYTES < 64 ? VEC_BYTES : 0, third = VEC_BYTES < 32 ? 32 : 0, fourth = third ? 48 : 0;
    vu32 a = vec_load_u32(from + at), b = vec_load_u32(from + at + second);
    vu32 c = vec_load_u32(from + at + third), d = vec_load_u32(from + at + fourth);
    for (int i = 0; i < n; i++) {
        char *line = (char *)to[i] + at;
        copy_store(line, a, past);
        if (second)
            copy_store(line + second, b, past);
        if (third)
            copy_store(line + third, c, past);
        if (fourth)
            copy_store(line + fourth, d, past);
    }
}

static void copy_many(void *const *to, int n, const void *from, size_t bytes)
{
    size_t at = 0;
    if (n > 1 && bytes >= COPY_TURNS_FROM) {
        for (; at + COPY_LINE <= bytes; at += COPY_LINE) {
            vec_prefetch(from, at + COPY_PREFETCH);
            copy_line_many(to, n, from, at, 0);
        }
    }
    for (int i = 0; i < n && at < bytes; i++)
        memcpy((char *)to[i] + at, (const char *)from + at, bytes - at);
}

/* The same past the cache. Ends with a fence: a release behind it covers the rows. */
static void copy_many_past(void *const *to, int n, const void *from, size_t bytes)
{
    uintptr_t odd = 0;
    size_t at = 0;

    for (int i = 0; i < n; i++)
        odd |= (uintptr_t)to[i];
    if (!VEC_STREAMS || odd % COPY_LINE) {
        copy_many(to, n, from, bytes);
        return;
    }
    for (; at + COPY_LINE <= bytes; at += COPY_LINE) {
        vec_prefetch(from, at + COPY_PREFETCH);
        copy_line_many(to, n, from, at, 1);
    }
    for (int i = 0; i < n && at < bytes; i++)
        memcpy((char *)to[i] + at, (const char *)from + at, bytes - at);
    vec_streamed();
}

#endif
