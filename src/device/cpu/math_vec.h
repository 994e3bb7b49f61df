/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Four-lane arithmetic for the math files, in the vector extensions of gcc and clang: NEON and SSE2 come out of the same
 * source, at -O2 too. Every conversion gives the bits of its scalar twin in util/numeric.h.
 *
 * Rows are read eight elements at a time into a pair of float vectors (`struct f32x8`). For bf16 the pair is (even
 * elements, odd elements): widening is then a shift and a mask, without any shuffle. Code that works element by
 * element need not know; vec_load8 and vec_store8 of one dtype agree on the order.
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

struct f32x8 {
    f32x4 a, b;
};

VEC_INLINE f32x4 vec_f32(float x)
{
    return (f32x4){x, x, x, x};
}

VEC_INLINE u32x4 vec_u32(uint32_t x)
{
    return (u32x4){x, x, x, x};
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

/* Not narrowed: the result sits in the upper halves, the lower ones are noise. */
VEC_INLINE u32x4 vec_round_bf16(f32x4 x)
{
    u32x4 bits = (u32x4)x;
    u32x4 nan = vec_greater(bits & FLOAT_ABS_MASK, vec_u32(FLOAT_INF_BITS));
    return vec_select(nan, vec_u32(0x7fc00000u), bits + 0x7fffu + (bits >> 16 & 1u));
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

/* 16-bit results in 32-bit lanes; NaN becomes the canonical 0x7e00. */
VEC_INLINE u32x4 vec_to_fp16(f32x4 x)
{
    u32x4 bits = (u32x4)x;
    u32x4 abs = bits & FLOAT_ABS_MASK;
    u32x4 sign = bits >> 16 & 0x8000u;
    u32x4 nan = vec_greater(abs, vec_u32(FLOAT_INF_BITS));
    u32x4 large = vec_greater(abs, vec_u32(0x477fffffu));
    u32x4 small = vec_greater(vec_u32(0x38800000u), abs);
    u32x4 normal = (abs - (112u << 23) + 0xfffu + (abs >> 13 & 1u)) >> 13;
    u32x4 tiny = (u32x4)((f32x4)abs + 0.5f) - 0x3f000000u;
    normal = vec_select(small, tiny, vec_select(large, vec_u32(0x7c00u), normal));
    return vec_select(nan, vec_u32(0x7e00u), sign | normal);
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
    } else if (dtype == EPX_FP16) {
#if defined(__aarch64__)
        float16x8_t h = vreinterpretq_f16_u16((uint16x8_t)vec_load_u16(from));
        v.a = (f32x4)vcvt_f32_f16(vget_low_f16(h));
        v.b = (f32x4)vcvt_high_f32_f16(h);
#else
        u32x4 h = vec_load_u32(from);
        v.a = vec_from_fp16(h & 0xffffu);
        v.b = vec_from_fp16(h >> 16);
#endif
    } else {
        u32x4 h = vec_load_u32(from);
        v.a = (f32x4)(h << 16);
        v.b = (f32x4)(h & 0xffff0000u);
    }
    return v;
}

/* Rounds to dtype; every NaN becomes the one positive quiet NaN, so that devices agree on the bits. */
VEC_INLINE void vec_store8(void *to, int dtype, struct f32x8 v)
{
    if (dtype == EPX_FP32) {
        u32x4 quiet = vec_u32(0x7fc00000u);
        vec_store(to, vec_select((u32x4)(v.a == v.a), (u32x4)v.a, quiet));
        vec_store((char *)to + 16, vec_select((u32x4)(v.b == v.b), (u32x4)v.b, quiet));
    } else if (dtype == EPX_FP16) {
#if defined(__aarch64__)
        uint16x8_t h = vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32((float32x4_t)v.a), (float32x4_t)v.b));
        u16x8 nan = (u16x8)((i16x8)((u16x8)h & 0x7fff) > 0x7c00);
        vec_store(to, (u32x4)(((u16x8)h & ~nan) | (nan & 0x7e00)));
#else
        vec_store(to, vec_to_fp16(v.a) | vec_to_fp16(v.b) << 16);
#endif
    } else {
        vec_store(to, vec_round_bf16(v.a) >> 16 | (vec_round_bf16(v.b) & 0xffff0000u));
    }
}

/* The pair in element order. */
VEC_INLINE struct f32x8 vec_in_order(struct f32x8 v, int dtype)
{
#if defined(__aarch64__)
    int split = dtype == EPX_BF16;
#else
    int split = dtype != EPX_FP32;
#endif
    if (!split)
        return v;
    struct f32x8 o = {__builtin_shufflevector(v.a, v.b, 0, 4, 1, 5), __builtin_shufflevector(v.a, v.b, 2, 6, 3, 7)};
    return o;
}

/* Lower halves of the lanes of x, then of y. */
VEC_INLINE u16x8 vec_narrow_u32(u32x4 x, u32x4 y)
{
    return __builtin_shufflevector((u16x8)x, (u16x8)y, 0, 2, 4, 6, 8, 10, 12, 14);
}

/* Lower bytes of the lanes of x, then of y. */
VEC_INLINE u8x16 vec_narrow_u16(u16x8 x, u16x8 y)
{
    return __builtin_shufflevector((u8x16)x, (u8x16)y, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
}

#endif
