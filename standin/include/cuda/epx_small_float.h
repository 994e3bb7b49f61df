/* SPDX-License-Identifier: Apache-2.0 */
/* Conversions between float and floats of 16 or 8 bits for the stand-ins' cuda_bf16.h, cuda_fp16.h and cuda_fp8.h. All
 * round to nearest, ties to even, in integers. */
#ifndef EPX_STANDIN_SMALL_FLOAT_H
#define EPX_STANDIN_SMALL_FLOAT_H

#include <stdint.h>
#include <string.h>

/* exponent and mantissa: their bits. infinity: the largest exponent is infinity and NaN; else it has values too, and
 * only all ones is NaN. */
struct epx_small_float {
    int exponent, mantissa, infinity;
};

static const struct epx_small_float epx_small_bf16 = {8, 7, 1};
static const struct epx_small_float epx_small_fp16 = {5, 10, 1};
static const struct epx_small_float epx_small_e4m3 = {4, 3, 0};
static const struct epx_small_float epx_small_e5m2 = {5, 2, 1};

/* Codes without the sign: NaN as CUDA writes it, and the first that is no finite number. */
static inline uint32_t epx_small_nan(const struct epx_small_float *f)
{
    return (1u << (f->exponent + f->mantissa)) - 1;
}

static inline uint32_t epx_small_end(const struct epx_small_float *f)
{
    const uint32_t ones = (1u << (f->exponent + f->mantissa)) - 1;

    return f->infinity ? ones >> f->mantissa << f->mantissa : ones;
}

/* The upper `24 - shift` bits of a significand, rounded. */
static inline uint32_t epx_small_round(uint32_t significand, int shift)
{
    const uint32_t kept = shift > 31 ? 0 : significand >> shift;
    const uint32_t half = shift > 31 ? 0 : 1u << (shift - 1);
    const uint32_t rest = shift > 31 ? 0 : significand & (2 * half - 1);

    return kept + (rest > half || (rest == half && half && (kept & 1)));
}

/* saturate: what is too large becomes the largest finite number, instead of infinity (NaN where there is none). */
static inline uint32_t epx_small_encode(const struct epx_small_float *f, float x, int saturate)
{
    const int bias = (1 << (f->exponent - 1)) - 1, width = f->exponent + f->mantissa;
    const uint32_t end = epx_small_end(f);
    uint32_t bits, abs, sign, code;
    int exponent, lowest = 1 - bias;

    memcpy(&bits, &x, sizeof(bits));
    abs = bits & 0x7fffffffu;
    sign = bits >> 31 << width;
    if (abs > 0x7f800000u)
        return sign | epx_small_nan(f);
    exponent = (int)(abs >> 23) - 127;
    if (abs < 0x800000u)
        exponent = -126;
    else
        abs = (abs & 0x7fffffu) | 0x800000u;
    if (exponent > bias + 1)
        code = end;
    else if (exponent >= lowest)
        code = ((uint32_t)(exponent - lowest) << f->mantissa) + epx_small_round(abs, 23 - f->mantissa);
    else
        code = epx_small_round(abs, 23 - f->mantissa + lowest - exponent);
    if (code >= end)
        code = saturate ? end - 1 : end;
    return sign | code;
}

static inline float epx_small_decode(const struct epx_small_float *f, uint32_t code)
{
    const int bias = (1 << (f->exponent - 1)) - 1, width = f->exponent + f->mantissa;
    const uint32_t abs = code & ((1u << width) - 1), sign = code >> width << 31;
    uint32_t bits;
    float x, unit;

    if (abs >= epx_small_end(f)) {
        bits = sign | 0x7f800000u | (abs > epx_small_end(f) || !f->infinity ? 0x400000u : 0);
    } else if (abs >> f->mantissa || bias == 127) {
        bits = sign | ((abs << (23 - f->mantissa)) + ((uint32_t)(127 - bias) << 23));
    } else { /* subnormal: a multiple of a power of two that float has */
        bits = (uint32_t)(127 + 1 - bias - f->mantissa) << 23;
        memcpy(&unit, &bits, sizeof(unit));
        x = (float)(int32_t)abs * unit;
        memcpy(&bits, &x, sizeof(bits));
        bits |= sign;
    }
    memcpy(&x, &bits, sizeof(x));
    return x;
}

#endif
