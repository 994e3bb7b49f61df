/* SPDX-License-Identifier: Apache-2.0 */
/*
 * NVFP4: the definition that every device matches bit by bit. A row of H bf16 values, H a multiple of 16, with a scale
 * G of the caller's (2688 / max|row|; 0 for a row of zeros) becomes
 *
 *      codes[H / 2]      two e2m1 a byte, the even element in the low half
 *      scales[H / 16]    e4m3, one for each 16 values
 *      G                 float
 *
 * padded to a multiple of 16 bytes. Of 16 values with v = max|x|:
 *      t = G * (v / 6); s = e4m3(t); inverse = 1 / (s / G), or 0 where t is 0; code = e2m1(x * inverse)
 * Scales that no block can be encoded with: G is 0 or subnormal and v is not 0; G is beyond 2^126 and v 2^-114 or more;
 * G or an x is NaN. Such a block is NaN as a whole. With G beyond 2^126 all smaller x are 0. An infinite x is code 6.
 * Reciprocals are IEEE's, subnormal arguments and results are 0. Back: code * ((s * (1 / G)) * weight), where 1 / G is
 * 1 if it is infinite, added by fused multiply-add. C11 and C++, as util/numeric.h.
 */
#ifndef EPX_UTIL_NVFP4_H
#define EPX_UTIL_NVFP4_H

#include "util/numeric.h"

#define NVFP4_BLOCK 16
#define NVFP4_NAN 0x7fu /* the scale of a block that cannot be encoded; its codes are 7 */

NUMERIC_FN size_t nvfp4_row_bytes(int hidden)
{
    const size_t h = (size_t)hidden;

    return (h / 2 + h / NVFP4_BLOCK + sizeof(float) + 15) & ~(size_t)15;
}

/* Nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6, ties to the even code; larger ones become 6. NaN becomes 6. */
NUMERIC_FN uint8_t float_to_e2m1(float x)
{
    const uint32_t bits = float_bits(x), abs = bits & FLOAT_ABS_MASK, sign = bits >> 28 & 8u;

    if (abs > FLOAT_INF_BITS)
        return 7;
    if (abs >= 0x40a00000u) /* 5: halfway between 4 and 6, and 4 has the even code */
        return (uint8_t)(sign | (abs == 0x40a00000u ? 6u : 7u));
    if (abs < 0x3f800000u) /* below 1: adding 2^22, whose last bit is worth 0.5, rounds to multiples of that */
        return (uint8_t)(sign | (float_bits(float_from_bits(abs) + 4194304.0f) - 0x4a800000u));
    return (uint8_t)(sign | (abs - (126u << 23) + 0x1fffffu + (abs >> 22 & 1u)) >> 22);
}

NUMERIC_FN float e2m1_to_float(uint8_t code)
{
    const uint32_t sign = (uint32_t)(code & 8u) << 28, abs = code & 7u;

    if (abs < 2u)
        return float_from_bits(sign | (abs ? 0x3f000000u : 0u));
    return float_from_bits(sign | ((abs << 22) + (126u << 23)));
}

NUMERIC_FN float nvfp4_flush(float x)
{
    return float_bits(x) & FLOAT_INF_BITS ? x : float_from_bits(float_bits(x) & ~FLOAT_ABS_MASK);
}

NUMERIC_FN float nvfp4_reciprocal(float x)
{
    return nvfp4_flush(1.0f / nvfp4_flush(x));
}

/* most: max|x|. */
NUMERIC_FN int nvfp4_is_lost(uint32_t most, uint32_t row_scale)
{
    return most > FLOAT_INF_BITS || row_scale > FLOAT_INF_BITS || (most && row_scale < 0x00800000u) ||
           (row_scale > 0x7e800000u && most >= 0x06800000u);
}

/* One block: 16 bf16 values to 8 bytes of codes and the byte of their scale. */
NUMERIC_FN uint8_t nvfp4_block(uint8_t *codes, const uint16_t *x, float row_scale)
{
    uint32_t most = 0;
    float t, inverse;
    uint8_t s;

    for (int i = 0; i < NVFP4_BLOCK; i++) {
        const uint32_t abs = (uint32_t)(x[i] & 0x7fffu) << 16;
        most = abs > most ? abs : most;
    }
    if (nvfp4_is_lost(most, float_bits(row_scale) & FLOAT_ABS_MASK)) {
        memset(codes, 0x77, NVFP4_BLOCK / 2);
        return NVFP4_NAN;
    }
    if ((float_bits(row_scale) & FLOAT_ABS_MASK) > 0x7e800000u) {
        memset(codes, 0, NVFP4_BLOCK / 2);
        return 0;
    }
    t = nvfp4_flush(row_scale * nvfp4_flush(float_from_bits(most) * (1.0f / 6.0f)));
    s = float_to_e4m3(t);
    inverse = float_bits(t) & FLOAT_ABS_MASK
                  ? nvfp4_reciprocal(nvfp4_flush(e4m3_to_float(s) * nvfp4_reciprocal(row_scale)))
                  : 0.0f;
    for (int i = 0; i < NVFP4_BLOCK; i += 2)
        codes[i / 2] = (uint8_t)(float_to_e2m1(bf16_to_float(x[i]) * inverse) |
                                 float_to_e2m1(bf16_to_float(x[i + 1]) * inverse) << 4);
    return s;
}

/* What the codes of block `block` of a row are multiplied with. */
NUMERIC_FN float nvfp4_factor(const uint8_t *row, int hidden, int block, float weight)
{
    const uint8_t *scales = row + hidden / 2;
    float row_scale, back;

    memcpy(&row_scale, scales + hidden / NVFP4_BLOCK, sizeof(row_scale));
    back = 1.0f / row_scale;
    if ((float_bits(back) & FLOAT_ABS_MASK) == FLOAT_INF_BITS)
        back = 1.0f;
    return (e4m3_to_float(scales[block]) * back) * weight;
}

#endif
