/* SPDX-License-Identifier: Apache-2.0 */
/*
 * MXFP8 (OCP's microscaling format): the definition that every device matches bit by bit. 32 values share a power of
 * two, an e8m0 byte E that stands for 2^(E - 127); each is an e4m3 times that. With v = max|x| of the block:
 *      E = the exponent of v * (1/448), rounded up to a power of two; at most 254; 0 where that product is 0
 *      code = e4m3(x / 2^(E - 127)), nearest even, saturating at 448
 * No value of a finite block saturates. E = 0 stands for 0 here, not for 2^-127. A NaN is a NaN, and
 * its block has the E of the other values; an infinity has E = 254 and comes back as infinity. C11 and C++, as
 * util/numeric.h.
 */
#ifndef EPX_UTIL_MXFP8_H
#define EPX_UTIL_MXFP8_H

#include "util/numeric.h"

#define MXFP8_BLOCK 32

/* E of a block; `most` is not NaN. */
NUMERIC_FN uint32_t mxfp8_scale(float most)
{
    const uint32_t bits = float_bits(most * (1.0f / E4M3_MAX)), scale = (bits + 0x7fffffu) >> 23;

    return scale < 254u ? scale : 254u;
}

/* The value that x has as a code of such a block. 2^(127 - E) is no normal float where E is 254. */
NUMERIC_FN float mxfp8_round(float x, uint32_t scale)
{
    const float inverse = float_from_bits((scale < 254u ? 254u - scale : 1u) << 23), half = scale < 254u ? 1.0f : 0.5f;

    return e4m3_to_float(float_to_e4m3(x * inverse * half)) * float_from_bits(scale << 23);
}

#endif
