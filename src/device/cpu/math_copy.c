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
#include "device/cpu/math.h"

#include "device/cpu/math_vec.h"

#define COPY_LINE ((size_t)64)
#define COPY_TURNS_FROM ((size_t)2048) /* shorter rows go destination by destination */
#define COPY_PREFETCH 1024

void math_copy(void *to, const void *from, size_t bytes)
{
    if (bytes)
        memcpy(to, from, bytes);
}

static void copy_line_many(void *const *to, int n, const char *from, size_t at)
{
    u32x4 a = vec_load_u32(from + at), b = vec_load_u32(from + at + 16);
    u32x4 c = vec_load_u32(from + at + 32), d = vec_load_u32(from + at + 48);
    for (int i = 0; i < n; i++) {
        char *line = (char *)to[i] + at;
        vec_store(line, a);
        vec_store(line + 16, b);
        vec_store(line + 32, c);
        vec_store(line + 48, d);
    }
}

void math_copy_many(void *const *to, int n, const void *from, size_t bytes)
{
    size_t at = 0;
    if (n > 1 && bytes >= COPY_TURNS_FROM) {
        for (; at + COPY_LINE <= bytes; at += COPY_LINE) {
            vec_prefetch(from, at + COPY_PREFETCH);
            copy_line_many(to, n, from, at);
        }
    }
    for (int i = 0; i < n; i++)
        math_copy((char *)to[i] + at, (const char *)from + at, bytes - at);
}

void math_fill_zero(void *to, size_t bytes)
{
    if (bytes)
        memset(to, 0, bytes);
}
