/* SPDX-License-Identifier: Apache-2.0 */
/* Block-scaled cast to e4m3; docs/formats.md has the definition. */
#ifndef EPX_DEVICE_CPU_MATH_FP8_H
#define EPX_DEVICE_CPU_MATH_FP8_H

#include <float.h>

#include "device/cpu/math.h"
#include "device/cpu/math_vec.h"

#define FP8_BLOCK 128
#define FP8_GROUP 8
#define FP8_AMAX_MIN 1e-4f

struct fp8_scale {
    float mul;  /* x * mul is rounded to e4m3 */
    float inv;  /* stored for the reader: x = q * inv */
    int finite; /* the block has no NaN and no infinity */
};

static struct fp8_scale fp8_scale_of(float amax, int power_of_two)
{
    struct fp8_scale s;
    if (amax < FP8_AMAX_MIN)
        amax = FP8_AMAX_MIN;
    s.finite = 1;
    s.inv = amax * (1.0f / E4M3_MAX);
    s.mul = E4M3_MAX / amax;
    if (power_of_two) {
        uint32_t bits = float_bits(s.inv);
        uint32_t exponent = (bits >> 23) + ((bits & 0x7fffffu) != 0);
        s.inv = float_from_bits(exponent << 23);
        s.mul = float_from_bits((254u - exponent) << 23);
    }
    return s;
}

/* Largest |x| of a block as float bits. NaN and infinity show as values from FLOAT_INF_BITS on. */
VEC_INLINE uint32_t fp8_block_max(const char *x, int dtype)
{
    vu32 max = vec_u32(0);
    if (dtype == EPX_BF16) {
        vi16 max16 = {0};
        for (int i = 0; i < FP8_BLOCK; i += VEC_WIDE)
            max16 = vec_max16(max16, vec_load_abs16(x + (size_t)i * 2));
        max = vec_max(vec_widen_lo((vu16)max16, 1), vec_widen_hi((vu16)max16, 1));
    } else {
        for (int i = 0; i < FP8_BLOCK; i += VEC_WIDE) {
            struct wide v = vec_load_wide(x + (size_t)i * vec_element_bytes(dtype), dtype);
            max = vec_max(max, (vu32)v.a & FLOAT_ABS_MASK);
            max = vec_max(max, (vu32)v.b & FLOAT_ABS_MASK);
        }
    }
    return vec_max_lane(max);
}

/* The rare block with NaN or infinity: NaN does not count, infinity counts as the largest float. */
static float fp8_finite_amax(const char *x, int dtype)
{
    float amax = 0.0f;
    for (int i = 0; i < FP8_BLOCK; i += VEC_WIDE) {
        struct wide v = vec_load_wide(x + (size_t)i * vec_element_bytes(dtype), dtype);
        for (int j = 0; j < VEC_LANES; j++) {
            float a = float_from_bits(float_bits(v.a[j]) & FLOAT_ABS_MASK);
            float b = float_from_bits(float_bits(v.b[j]) & FLOAT_ABS_MASK);
            amax = a > amax ? a : amax; /* false for NaN */
            amax = b > amax ? b : amax;
        }
    }
    return amax < FLT_MAX ? amax : FLT_MAX;
}

VEC_INLINE vu16 fp8_cast_wide(const char *x, int dtype, float mul, int finite)
{
    struct wide v = vec_load_wide(x, dtype);
    if (finite)
        return vec_narrow_u32(vec_to_e4m3_finite(v.a * mul), vec_to_e4m3_finite(v.b * mul));
    return vec_narrow_u32(vec_to_e4m3(v.a * mul), vec_to_e4m3(v.b * mul));
}

VEC_INLINE void fp8_cast_values(uint8_t *q, const char *x, int dtype, float mul, int finite)
{
    size_t half = VEC_WIDE * vec_element_bytes(dtype);
    for (int i = 0; i < FP8_BLOCK; i += 2 * VEC_WIDE, x += 2 * half) {
        vu16 low = fp8_cast_wide(x, dtype, mul, finite), high = fp8_cast_wide(x + half, dtype, mul, finite);
        vec_store(q + i, (vu32)vec_narrow_u16(low, high));
    }
}

VEC_INLINE struct fp8_scale fp8_block_scale(const char *x, int dtype, int power_of_two)
{
    uint32_t max = fp8_block_max(x, dtype);
    struct fp8_scale s;
    if (max < FLOAT_INF_BITS)
        return fp8_scale_of(float_from_bits(max), power_of_two);
    s = fp8_scale_of(fp8_finite_amax(x, dtype), power_of_two);
    s.finite = 0;
    return s;
}

VEC_INLINE void fp8_cast_block(uint8_t *q, const char *x, int dtype, struct fp8_scale s)
{
    if (s.finite)
        fp8_cast_values(q, x, dtype, s.mul, 1);
    else
        fp8_cast_values(q, x, dtype, s.mul, 0);
}

static void fp8_store_scale(void *scales, enum scale_kind kind, int block, float inv)
{
    if (kind == SCALE_UE8M0)
        ((uint8_t *)scales)[block] = (uint8_t)(float_bits(inv) >> 23);
    else
        memcpy((char *)scales + (size_t)block * sizeof(inv), &inv, sizeof(inv));
}

/* `blocks` (at most FP8_GROUP) full blocks. All scales come first: their long chains (maximum, division) overlap. */
VEC_INLINE void fp8_cast_group(uint8_t *q, struct fp8_scale *s, const char *x, int dtype, int blocks, int power_of_two)
{
    size_t bytes = FP8_BLOCK * vec_element_bytes(dtype);
    for (int b = 0; b < blocks; b++)
        s[b] = fp8_block_scale(x + (size_t)b * bytes, dtype, power_of_two);
    for (int b = 0; b < blocks; b++)
        fp8_cast_block(q + (size_t)b * FP8_BLOCK, x + (size_t)b * bytes, dtype, s[b]);
}

/* A short last block: zeros fill it up, which change no maximum. */
VEC_INLINE void fp8_cast_short(uint8_t *q, struct fp8_scale *s, const char *x, int dtype, int n, int power_of_two)
{
    char padded[FP8_BLOCK * 4] = {0};
    uint8_t cast[FP8_BLOCK];
    memcpy(padded, x, (size_t)n * vec_element_bytes(dtype));
    fp8_cast_group(cast, s, padded, dtype, 1, power_of_two);
    memcpy(q, cast, (size_t)n);
}

VEC_INLINE void fp8_cast_row(uint8_t *q, void *scales, enum scale_kind kind, int power_of_two, const char *x, int dtype,
                             int hidden)
{
    int blocks = (hidden + FP8_BLOCK - 1) / FP8_BLOCK, full = hidden / FP8_BLOCK, n;
    for (int b = 0; b < blocks; b += n) {
        struct fp8_scale s[FP8_GROUP];
        size_t at = (size_t)b * FP8_BLOCK;
        const char *from = x + at * vec_element_bytes(dtype);
        n = full - b < FP8_GROUP ? full - b : FP8_GROUP;
        if (n > 0) {
            fp8_cast_group(q + at, s, from, dtype, n, power_of_two);
        } else {
            n = 1;
            fp8_cast_short(q + at, s, from, dtype, hidden - (int)at, power_of_two);
        }
        for (int i = 0; i < n; i++)
            fp8_store_scale(scales, kind, b + i, s[i].inv);
    }
    if (kind == SCALE_UE8M0)
        for (int b = blocks; b % 4; b++)
            ((uint8_t *)scales)[b] = 0;
}

static void cast_fp8(uint8_t *q, void *scales, enum scale_kind kind, int round_scale, const void *x, int dtype,
                     int hidden)
{
    int power_of_two = round_scale || kind == SCALE_UE8M0;
    if (dtype == EPX_BF16)
        fp8_cast_row(q, scales, kind, power_of_two, x, EPX_BF16, hidden);
    else if (dtype == EPX_FP16)
        fp8_cast_row(q, scales, kind, power_of_two, x, EPX_FP16, hidden);
    else
        fp8_cast_row(q, scales, kind, power_of_two, x, EPX_FP32, hidden);
}

#endif
