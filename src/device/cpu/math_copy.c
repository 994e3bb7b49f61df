/* SPDX-License-Identifier: Apache-2.0 */
#include "device/cpu/math.h"

#include <string.h>

/* Small enough that a piece of the source stays in the L1 cache while it is written to all destinations. */
#define COPY_PIECE ((size_t)8192)

void math_copy(void *to, const void *from, size_t bytes)
{
    if (bytes)
        memcpy(to, from, bytes);
}

void math_copy_many(void *const *to, int n, const void *from, size_t bytes)
{
    if (n == 1) {
        math_copy(to[0], from, bytes);
        return;
    }
    for (size_t at = 0; at < bytes; at += COPY_PIECE) {
        size_t piece = bytes - at < COPY_PIECE ? bytes - at : COPY_PIECE;
        for (int i = 0; i < n; i++)
            memcpy((char *)to[i] + at, (const char *)from + at, piece);
    }
}

void math_fill_zero(void *to, size_t bytes)
{
    if (bytes)
        memset(to, 0, bytes);
}
