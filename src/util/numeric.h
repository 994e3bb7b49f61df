/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Scalar conversions between float and bf16, fp16, e4m3: the definition that every device's fast code must match bit by
 * bit. C11 and C++; a device compiler may set NUMERIC_FN to give the functions its own qualifiers. All round to
 * nearest, ties to even, and use integer operations wherever flush-to-zero modes could change a result. (No hexadecimal
 * floats: C++ before 17 lacks them.)
 */
#ifndef EPX_UTIL_NUMERIC_H
#define EPX_UTIL_NUMERIC_H

#include <stdint.h>
#include <string.h>

#ifndef NUMERIC_FN
#define NUMERIC_FN static inline
#endif

#define FLOAT_ABS_MASK 0x7fffffffu
#define FLOAT_INF_BITS 0x7f800000u
#define E4M3_MAX 448.0f

NUMERIC_FN uint32_t float_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

NUMERIC_FN float float_from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

NUMERIC_FN float bf16_to_float(uint16_t h)
{
    return float_from_bits((uint32_t)h << 16);
}

/* NaN stays NaN (made quiet; sign and upper payload kept). Too large becomes infinity. */
NUMERIC_FN uint16_t float_to_bf16(float x)
{
    uint32_t bits = float_bits(x);
    if ((bits & FLOAT_ABS_MASK) > FLOAT_INF_BITS)
        return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

NUMERIC_FN float fp16_to_float(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t abs = h & 0x7fffu;
    if (abs >= 0x7c00u) /* infinity, NaN (made quiet, as the hardware does) */
        return float_from_bits(sign | FLOAT_INF_BITS | (abs & 0x3ffu) << 13 | (abs > 0x7c00u ? 0x400000u : 0u));
    if (abs < 0x400u) /* subnormal: a multiple of 2^-24, exact in float */
        return float_from_bits(sign | float_bits((float)(int32_t)abs * (1.0f / 16777216.0f)));
    return float_from_bits(sign | ((abs << 13) + (112u << 23)));
}

/* NaN stays NaN (made quiet; sign and upper payload kept). From 65520 on: infinity. */
NUMERIC_FN uint16_t float_to_fp16(float x)
{
    uint32_t bits = float_bits(x);
    uint32_t abs = bits & FLOAT_ABS_MASK;
    uint32_t sign = bits >> 16 & 0x8000u;
    if (abs > FLOAT_INF_BITS)
        return (uint16_t)(sign | 0x7e00u | (abs >> 13 & 0x3ffu));
    if (abs >= 0x47800000u) /* 65536 and more */
        return (uint16_t)(sign | 0x7c00u);
    if (abs < 0x38800000u) /* below 2^-14: adding 0.5, whose last bit is worth 2^-24, rounds to fp16's subnormals */
        return (uint16_t)(sign | (float_bits(float_from_bits(abs) + 0.5f) - 0x3f000000u));
    return (uint16_t)(sign | (abs - (112u << 23) + 0xfffu + (abs >> 13 & 1u)) >> 13);
}

/* OCP e4m3 "fn": bias 7, no infinity, 0x7f and 0xff are NaN. */
NUMERIC_FN float e4m3_to_float(uint8_t q)
{
    uint32_t sign = (uint32_t)(q & 0x80u) << 24;
    uint32_t abs = q & 0x7fu;
    if (abs == 0x7fu)
        return float_from_bits(sign | 0x7fc00000u);
    if (abs < 8u) /* subnormal: a multiple of 2^-9 */
        return float_from_bits(sign | float_bits((float)(int32_t)abs * (1.0f / 512.0f)));
    return float_from_bits(sign | ((abs << 20) + (120u << 23)));
}

/* "satfinite": everything beyond 448, infinity too, becomes +-448. NaN becomes 0x7f with the sign. */
NUMERIC_FN uint8_t float_to_e4m3(float x)
{
    uint32_t bits = float_bits(x);
    uint32_t abs = bits & FLOAT_ABS_MASK;
    uint32_t sign = bits >> 24 & 0x80u;
    if (abs > FLOAT_INF_BITS)
        return (uint8_t)(sign | 0x7fu);
    if (abs >= 0x43e00000u) /* 448 */
        return (uint8_t)(sign | 0x7eu);
    if (abs < 0x3c800000u) /* below 2^-6: adding 2^14, whose last bit is worth 2^-9, rounds to e4m3's subnormals */
        return (uint8_t)(sign | (float_bits(float_from_bits(abs) + 16384.0f) - 0x46800000u));
    return (uint8_t)(sign | (abs - (120u << 23) + 0x7ffffu + (abs >> 20 & 1u)) >> 20);
}

#endif
