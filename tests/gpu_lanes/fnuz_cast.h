/* SPDX-License-Identifier: Apache-2.0 */
/* The cast to FNUZ e4m3 by its definition, for tests: the nearest of all its numbers, the even code where two are as
 * near. */
#ifndef EPX_TESTS_GPU_LANES_FNUZ_CAST_H
#define EPX_TESTS_GPU_LANES_FNUZ_CAST_H

#include <math.h>
#include <stdint.h>

static inline double fnuz_value(unsigned code)
{
    const unsigned exponent = code >> 3 & 15, mantissa = code & 7;

    return exponent ? ldexp(1 + mantissa / 8.0, (int)exponent - 8) : ldexp(mantissa / 8.0, -7);
}

/* Not NaN; from 248 on 0x7f, as what saturates. */
static inline uint8_t fnuz_cast(float x)
{
    const double abs = fabs((double)x);
    unsigned low = 0, high = 127;

    while (high - low > 1) { /* value(low) <= abs < value(high), or high is the last */
        const unsigned middle = (low + high) / 2;
        if (fnuz_value(middle) <= abs)
            low = middle;
        else
            high = middle;
    }
    const double down = abs - fnuz_value(low), up = fnuz_value(high) - abs;
    const unsigned code = down < up || (down == up && low % 2 == 0) ? low : high;
    return (uint8_t)(x < 0 && code ? code | 0x80u : code);
}

#endif
