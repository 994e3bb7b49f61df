/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Four-lane arithmetic for the math files, in the vector extensions of gcc and clang: NEON and SSE2 come out of the
 * same source, at -O2 too. Every conversion gives the bits of its scalar twin in util/numeric.h.
 */
#ifndef EPX_DEVICE_CPU_MATH_VEC_H
#define EPX_DEVICE_CPU_MATH_VEC_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "epx/epx.h"
#include "util/numeric.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__FMA__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "EPX's formats are written for little-endian machines"
#endif

#define VEC_INLINE static inline __attribute__((always_inline))

typedef float f32x4 __attribute__((vector_size(16)));
typedef uint32_t u32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4 __attribute__((vector_size(16)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));
typedef int16_t i16x8 __attribute__((vector_size(16)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));

/* Eight elements of a row, in order. */
struct f32x8 {
    f32x4 a, b;
};

VEC_INLINE f32x4 vec_f32(float x)
{
    return (f32x4){x, x, x, x};
}

/* x * y + z, rounded once. Without the instruction the C library does it, lane by lane: right, but slow; on x86_64
 * math_reduce_more.c is compiled for machines that have it. */
VEC_INLINE f32x4 vec_fma(f32x4 x, f32x4 y, f32x4 z)
{
#if defined(__aarch64__)
    return (f32x4)vfmaq_f32((float32x4_t)z, (float32x4_t)x, (float32x4_t)y);
#elif defined(__FMA__)
    return (f32x4)_mm_fmadd_ps((__m128)x, (__m128)y, (__m128)z);
#else
    return (f32x4){__builtin_fmaf(x[0], y[0], z[0]), __builtin_fmaf(x[1], y[1], z[1]), __builtin_fmaf(x[2], y[2], z[2]),
                   __builtin_fmaf(x[3], y[3], z[3])};
#endif
}

VEC_INLINE u32x4 vec_u32(uint32_t x)
{
    return (u32x4){x, x, x, x};
}

/* May point past the end of an object, hence the integer. */
VEC_INLINE void vec_prefetch(const void *base, size_t ahead)
{
    __builtin_prefetch((const void *)((uintptr_t)base + ahead));
}

VEC_INLINE u32x4 vec_load_u32(const void *from)
{
    u32x4 v;
    memcpy(&v, from, sizeof(v));
    return v;
}

VEC_INLINE f32x4 vec_load_f32(const void *from)
{
    return (f32x4)vec_load_u32(from);
}

VEC_INLINE u16x8 vec_load_u16(const void *from)
{
    return (u16x8)vec_load_u32(from);
}

/* bf16 or fp16 patterns without their signs; as integers they order as the values do, NaN above all. */
VEC_INLINE i16x8 vec_load_abs16(const void *from)
{
    return (i16x8)(vec_load_u16(from) & 0x7fff);
}

VEC_INLINE void vec_store(void *to, u32x4 v)
{
    memcpy(to, &v, sizeof(v));
}

/* Lanes of `mask` are all ones or all zeros. */
VEC_INLINE u32x4 vec_select(u32x4 mask, u32x4 yes, u32x4 no)
{
    return (yes & mask) | (no & ~mask);
}

/* Comparison of values below 2^31, signed because SSE2 has no other. */
VEC_INLINE u32x4 vec_greater(u32x4 x, u32x4 y)
{
    return (u32x4)((i32x4)x > (i32x4)y);
}

/* The larger of two values below 2^31. */
VEC_INLINE u32x4 vec_max(u32x4 x, u32x4 y)
{
#if defined(__aarch64__)
    return (u32x4)vmaxq_u32((uint32x4_t)x, (uint32x4_t)y);
#else
    return vec_select(vec_greater(x, y), x, y);
#endif
}

VEC_INLINE i16x8 vec_max16(i16x8 x, i16x8 y)
{
#if defined(__aarch64__)
    return (i16x8)vmaxq_s16((int16x8_t)x, (int16x8_t)y);
#elif defined(__SSE2__)
    return (i16x8)_mm_max_epi16((__m128i)x, (__m128i)y);
#else
    i16x8 more = x > y;
    return (x & more) | (y & ~more);
#endif
}

VEC_INLINE i16x8 vec_min16(i16x8 x, i16x8 y)
{
#if defined(__aarch64__)
    return (i16x8)vminq_s16((int16x8_t)x, (int16x8_t)y);
#elif defined(__SSE2__)
    return (i16x8)_mm_min_epi16((__m128i)x, (__m128i)y);
#else
    i16x8 less = x < y;
    return (x & less) | (y & ~less);
#endif
}

/* Upper halves of the lanes of x, then of y. */
VEC_INLINE u16x8 vec_narrow_high(u32x4 x, u32x4 y)
{
#if defined(__SSE2__)
    return (u16x8)_mm_packs_epi32(_mm_srai_epi32((__m128i)x, 16), _mm_srai_epi32((__m128i)y, 16));
#else
    return __builtin_shufflevector((u16x8)x, (u16x8)y, 1, 3, 5, 7, 9, 11, 13, 15);
#endif
}

/* Lanes of x, then of y, all within the range of int16_t. */
VEC_INLINE u16x8 vec_narrow_u32(u32x4 x, u32x4 y)
{
#if defined(__SSE2__)
    return (u16x8)_mm_packs_epi32((__m128i)x, (__m128i)y);
#else
    return __builtin_shufflevector((u16x8)x, (u16x8)y, 0, 2, 4, 6, 8, 10, 12, 14);
#endif
}

/* Lanes of x, then of y, of which none exceeds 255. */
VEC_INLINE u8x16 vec_narrow_u16(u16x8 x, u16x8 y)
{
#if defined(__SSE2__)
    return (u8x16)_mm_packus_epi16((__m128i)x, (__m128i)y);
#else
    return __builtin_shufflevector((u8x16)x, (u8x16)y, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
#endif
}

/* Lower four and upper four lanes of h, widened with zeros below (`high`) or above them. */
VEC_INLINE u32x4 vec_widen_lo(u16x8 h, int high)
{
    u16x8 zero = {0};
    return high ? (u32x4)__builtin_shufflevector(zero, h, 0, 8, 1, 9, 2, 10, 3, 11)
                : (u32x4)__builtin_shufflevector(h, zero, 0, 8, 1, 9, 2, 10, 3, 11);
}

VEC_INLINE u32x4 vec_widen_hi(u16x8 h, int high)
{
    u16x8 zero = {0};
    return high ? (u32x4)__builtin_shufflevector(zero, h, 4, 12, 5, 13, 6, 14, 7, 15)
                : (u32x4)__builtin_shufflevector(h, zero, 4, 12, 5, 13, 6, 14, 7, 15);
}

/* Every NaN replaced by the one positive quiet NaN, so that devices agree on the bits. */
VEC_INLINE u32x4 vec_canonical(f32x4 x)
{
    /* NOLINTNEXTLINE(misc-redundant-expression): false for a NaN */
    return vec_select((u32x4)(x == x), (u32x4)x, vec_u32(0x7fc00000u));
}

/* bf16 in the upper halves of the lanes; the lower ones are noise. */
VEC_INLINE u32x4 vec_round_bf16(f32x4 x)
{
    u32x4 bits = (u32x4)x;
    /* NOLINTNEXTLINE(misc-redundant-expression): false for a NaN */
    return vec_select((u32x4)(x == x), bits + 0x7fffu + (bits >> 16 & 1u), vec_u32(0x7fc00000u));
}

VEC_INLINE f32x4 vec_from_fp16(u32x4 h)
{
    u32x4 sign = (h & 0x8000u) << 16;
    u32x4 abs = h & 0x7fffu;
    u32x4 special = vec_greater(abs, vec_u32(0x7bffu));
    u32x4 nan = vec_greater(abs, vec_u32(0x7c00u));
    u32x4 small = vec_greater(vec_u32(0x400u), abs);
    u32x4 normal = (abs << 13) + (112u << 23);
    f32x4 tiny = __builtin_convertvector((i32x4)abs, f32x4) * 0x1p-24f;
    normal += special & (112u << 23);
    normal |= nan & 0x400000u;
    return (f32x4)(sign | vec_select(small, (u32x4)tiny, normal));
}

/* fp16 in the upper halves of the lanes; NaN becomes the canonical 0x7e00. */
VEC_INLINE u32x4 vec_to_fp16(f32x4 x)
{
    u32x4 bits = (u32x4)x;
    u32x4 abs = bits & FLOAT_ABS_MASK;
    u32x4 sign = bits & 0x80000000u;
    u32x4 nan = vec_greater(abs, vec_u32(FLOAT_INF_BITS));
    u32x4 large = vec_greater(abs, vec_u32(0x477fffffu));
    u32x4 small = vec_greater(vec_u32(0x38800000u), abs);
    u32x4 normal = (abs - (112u << 23) + 0xfffu + (abs >> 13 & 1u)) >> 13;
    u32x4 tiny = (u32x4)((f32x4)abs + 0.5f) - 0x3f000000u;
    normal = vec_select(small, tiny, vec_select(large, vec_u32(0x7c00u), normal));
    return vec_select(nan, vec_u32(0x7e000000u), sign | normal << 16);
}

/* 8-bit results in 32-bit lanes, exactly float_to_e4m3. */
VEC_INLINE u32x4 vec_to_e4m3(f32x4 x)
{
    u32x4 bits = (u32x4)x;
    u32x4 abs = bits & FLOAT_ABS_MASK;
    u32x4 sign = bits >> 24 & 0x80u;
    u32x4 nan = vec_greater(abs, vec_u32(FLOAT_INF_BITS));
    u32x4 small = vec_greater(vec_u32(0x3c800000u), abs);
    u32x4 large = vec_greater(abs, vec_u32(0x43e00000u));
    u32x4 capped = vec_select(large, vec_u32(0x43e00000u), abs);
    u32x4 normal = (capped - (120u << 23) + 0x7ffffu + (capped >> 20 & 1u)) >> 20;
    u32x4 tiny = (u32x4)((f32x4)abs + 0x1p14f) - 0x46800000u;
    return sign | (nan & 0x7fu) | vec_select(small, tiny, normal);
}

/*
 * The same for |x| < 464, finite, in a third of the operations. Adding 2^20 times x's power of two (2^-6 at least)
 * leaves x, rounded to the distance of e4m3's neighbours there, as an integer n in the lowest bits of the sum; the code
 * is n + 8 * (exponent field - 1). The 56 makes the constants vanish modulo 256.
 */
VEC_INLINE u32x4 vec_to_e4m3_finite(f32x4 x)
{
    u32x4 bits = (u32x4)x;
    u32x4 abs = bits & FLOAT_ABS_MASK;
    u32x4 power = vec_max(bits & FLOAT_INF_BITS, vec_u32(121u << 23));
    u32x4 sum = (u32x4)((f32x4)abs + (f32x4)(power + ((20u << 23) + 56u)));
    return vec_select(vec_u32(0x7fu), sum + (power >> 20), bits >> 24);
}

VEC_INLINE size_t vec_element_bytes(int dtype)
{
    return dtype == EPX_FP32 ? 4 : 2;
}

VEC_INLINE struct f32x8 vec_load8(const void *from, int dtype)
{
    struct f32x8 v;
    if (dtype == EPX_FP32) {
        v.a = vec_load_f32(from);
        v.b = vec_load_f32((const char *)from + 16);
        return v;
    }
    u16x8 h = vec_load_u16(from);
    if (dtype == EPX_BF16) {
        v.a = (f32x4)vec_widen_lo(h, 1);
        v.b = (f32x4)vec_widen_hi(h, 1);
    } else {
#if defined(__aarch64__)
        v.a = (f32x4)vcvt_f32_f16(vget_low_f16(vreinterpretq_f16_u16((uint16x8_t)h)));
        v.b = (f32x4)vcvt_high_f32_f16(vreinterpretq_f16_u16((uint16x8_t)h));
#else
        v.a = vec_from_fp16(vec_widen_lo(h, 0));
        v.b = vec_from_fp16(vec_widen_hi(h, 0));
#endif
    }
    return v;
}

/* Rounds to dtype, NaN to the canonical one. */
VEC_INLINE void vec_store8(void *to, int dtype, struct f32x8 v)
{
    if (dtype == EPX_FP32) {
        vec_store(to, vec_canonical(v.a));
        vec_store((char *)to + 16, vec_canonical(v.b));
    } else if (dtype == EPX_BF16) {
        vec_store(to, (u32x4)vec_narrow_high(vec_round_bf16(v.a), vec_round_bf16(v.b)));
    } else {
#if defined(__aarch64__)
        float16x4_t low = vcvt_f16_f32((float32x4_t)vec_canonical(v.a));
        vec_store(to, (u32x4)vcvt_high_f16_f32(low, (float32x4_t)vec_canonical(v.b)));
#else
        vec_store(to, (u32x4)vec_narrow_high(vec_to_fp16(v.a), vec_to_fp16(v.b)));
#endif
    }
}

#endif
