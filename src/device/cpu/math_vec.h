/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Vector arithmetic for the math files, in the vector extensions of gcc and clang. The width is that of the level for
 * which the file is compiled (math_level.h): 16 bytes with NEON and SSE2, 32 with AVX2, 64 with AVX-512. What the
 * extensions do not have, or what compilers make poorly of them, is here once per kind of machine. Every conversion
 * gives the bits of its scalar twin in util/numeric.h, so that all levels agree.
 */
#ifndef EPX_DEVICE_CPU_MATH_VEC_H
#define EPX_DEVICE_CPU_MATH_VEC_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "epx/epx.h"
#include "util/numeric.h"

#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define VEC_BYTES 64
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define VEC_BYTES 32
#else
#define VEC_BYTES 16
#endif

#if defined(__aarch64__)
#include <arm_neon.h>
#elif VEC_BYTES > 16
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "EPX's formats are written for little-endian machines"
#endif

#define VEC_INLINE static inline __attribute__((always_inline))
#define VEC_LANES (VEC_BYTES / 4) /* floats of a vector */
#define VEC_WIDE (VEC_BYTES / 2)  /* elements of a struct wide: 16-bit ones fill one vector */

typedef float vf32 __attribute__((vector_size(VEC_BYTES)));
typedef uint32_t vu32 __attribute__((vector_size(VEC_BYTES)));
typedef int32_t vi32 __attribute__((vector_size(VEC_BYTES)));
typedef uint16_t vu16 __attribute__((vector_size(VEC_BYTES)));
typedef int16_t vi16 __attribute__((vector_size(VEC_BYTES)));
typedef uint8_t vu8 __attribute__((vector_size(VEC_BYTES)));

/* VEC_WIDE elements of a row: the first half and the second, or the even ones and the odd ones. */
struct wide {
    vf32 a, b;
};

VEC_INLINE vf32 vec_f32(float x)
{
    return x - (vf32){0}; /* not the sum, which has another sign for -0 */
}

/* x * y + z, rounded once. Without the instruction the C library does it, lane by lane: right, but slow. */
VEC_INLINE vf32 vec_fma(vf32 x, vf32 y, vf32 z)
{
#if defined(__aarch64__)
    return (vf32)vfmaq_f32((float32x4_t)z, (float32x4_t)x, (float32x4_t)y);
#elif VEC_BYTES == 64
    return (vf32)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
#elif VEC_BYTES == 32
    return (vf32)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
#else
    return (vf32){__builtin_fmaf(x[0], y[0], z[0]), __builtin_fmaf(x[1], y[1], z[1]), __builtin_fmaf(x[2], y[2], z[2]),
                  __builtin_fmaf(x[3], y[3], z[3])};
#endif
}

VEC_INLINE vu32 vec_u32(uint32_t x)
{
    return (vu32){0} + x;
}

/* May point past the end of an object, hence the integer. */
VEC_INLINE void vec_prefetch(const void *base, size_t ahead)
{
    __builtin_prefetch((const void *)((uintptr_t)base + ahead));
}

VEC_INLINE vu32 vec_load_u32(const void *from)
{
    vu32 v;
    memcpy(&v, from, sizeof(v));
    return v;
}

VEC_INLINE vf32 vec_load_f32(const void *from)
{
    return (vf32)vec_load_u32(from);
}

VEC_INLINE vu16 vec_load_u16(const void *from)
{
    return (vu16)vec_load_u32(from);
}

/* bf16 or fp16 patterns without their signs; as integers they order as the values do, NaN above all. */
VEC_INLINE vi16 vec_load_abs16(const void *from)
{
    return (vi16)(vec_load_u16(from) & 0x7fff);
}

VEC_INLINE void vec_store(void *to, vu32 v)
{
    memcpy(to, &v, sizeof(v));
}

/* Past the caches, where the machine has stores for that; `to` is a multiple of VEC_BYTES. Other stores do not wait for
 * them: vec_streamed() comes before anything that says that they are done. */
#if defined(__x86_64__)
#define VEC_STREAMS 1
VEC_INLINE void vec_stream(void *to, vu32 v)
{
#if VEC_BYTES == 64
    _mm512_stream_si512((__m512i *)to, (__m512i)v);
#elif VEC_BYTES == 32
    _mm256_stream_si256((__m256i *)to, (__m256i)v);
#else
    _mm_stream_si128((__m128i *)to, (__m128i)v);
#endif
}

VEC_INLINE void vec_streamed(void)
{
    _mm_sfence();
}
#else
#define VEC_STREAMS 0
VEC_INLINE void vec_stream(void *to, vu32 v)
{
    vec_store(to, v);
}

VEC_INLINE void vec_streamed(void)
{
}
#endif

/* Lanes of `mask` are all ones or all zeros. */
VEC_INLINE vu32 vec_select(vu32 mask, vu32 yes, vu32 no)
{
    return (yes & mask) | (no & ~mask);
}

/* Comparison of values below 2^31, signed because SSE2 has no other. */
VEC_INLINE vu32 vec_greater(vu32 x, vu32 y)
{
    return (vu32)((vi32)x > (vi32)y);
}

/* The larger of two values below 2^31. */
VEC_INLINE vu32 vec_max(vu32 x, vu32 y)
{
#if defined(__aarch64__)
    return (vu32)vmaxq_u32((uint32x4_t)x, (uint32x4_t)y);
#elif VEC_BYTES == 64
    return (vu32)_mm512_max_epu32((__m512i)x, (__m512i)y);
#elif VEC_BYTES == 32
    return (vu32)_mm256_max_epu32((__m256i)x, (__m256i)y);
#else
    return vec_select(vec_greater(x, y), x, y);
#endif
}

/* The largest lane. */
VEC_INLINE uint32_t vec_max_lane(vu32 x)
{
#if VEC_BYTES == 64
    return _mm512_reduce_max_epu32((__m512i)x);
#else
    uint32_t max = 0;
    for (int i = 0; i < VEC_LANES; i++)
        max = x[i] > max ? x[i] : max;
    return max;
#endif
}

VEC_INLINE vi16 vec_max16(vi16 x, vi16 y)
{
#if defined(__aarch64__)
    return (vi16)vmaxq_s16((int16x8_t)x, (int16x8_t)y);
#elif VEC_BYTES == 64
    return (vi16)_mm512_max_epi16((__m512i)x, (__m512i)y);
#elif VEC_BYTES == 32
    return (vi16)_mm256_max_epi16((__m256i)x, (__m256i)y);
#elif defined(__SSE2__)
    return (vi16)_mm_max_epi16((__m128i)x, (__m128i)y);
#else
    vi16 more = x > y;
    return (x & more) | (y & ~more);
#endif
}

VEC_INLINE vi16 vec_min16(vi16 x, vi16 y)
{
#if defined(__aarch64__)
    return (vi16)vminq_s16((int16x8_t)x, (int16x8_t)y);
#elif VEC_BYTES == 64
    return (vi16)_mm512_min_epi16((__m512i)x, (__m512i)y);
#elif VEC_BYTES == 32
    return (vi16)_mm256_min_epi16((__m256i)x, (__m256i)y);
#elif defined(__SSE2__)
    return (vi16)_mm_min_epi16((__m128i)x, (__m128i)y);
#else
    vi16 less = x < y;
    return (x & less) | (y & ~less);
#endif
}

/* Lanes of x, then of y, all within the range of int16_t. */
VEC_INLINE vu16 vec_narrow_u32(vu32 x, vu32 y)
{
#if VEC_BYTES == 64
    return (vu16)_mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16((__m512i)x)),
                                    _mm512_cvtepi32_epi16((__m512i)y), 1);
#elif VEC_BYTES == 32
    return (vu16)_mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)x, (__m256i)y), 0xd8);
#elif defined(__SSE2__)
    return (vu16)_mm_packs_epi32((__m128i)x, (__m128i)y);
#else
    return __builtin_shufflevector((vu16)x, (vu16)y, 0, 2, 4, 6, 8, 10, 12, 14);
#endif
}

/* Upper halves of the lanes of x, then of y. */
VEC_INLINE vu16 vec_narrow_high(vu32 x, vu32 y)
{
#if defined(__SSE2__)
    return vec_narrow_u32((vu32)((vi32)x >> 16), (vu32)((vi32)y >> 16));
#else
    return __builtin_shufflevector((vu16)x, (vu16)y, 1, 3, 5, 7, 9, 11, 13, 15);
#endif
}

/* Lanes of x, then of y, of which none exceeds 255. */
VEC_INLINE vu8 vec_narrow_u16(vu16 x, vu16 y)
{
#if VEC_BYTES == 64
    return (vu8)_mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8((__m512i)x)),
                                   _mm512_cvtepi16_epi8((__m512i)y), 1);
#elif VEC_BYTES == 32
    return (vu8)_mm256_permute4x64_epi64(_mm256_packus_epi16((__m256i)x, (__m256i)y), 0xd8);
#elif defined(__SSE2__)
    return (vu8)_mm_packus_epi16((__m128i)x, (__m128i)y);
#else
    return __builtin_shufflevector((vu8)x, (vu8)y, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
#endif
}

/* VEC_WIDE bytes, widened with zeros. */
VEC_INLINE vu16 vec_load_bytes(const void *from)
{
#if VEC_BYTES == 64
    return (vu16)_mm512_cvtepu8_epi16(_mm256_loadu_si256(from));
#elif VEC_BYTES == 32
    return (vu16)_mm256_cvtepu8_epi16(_mm_loadu_si128(from));
#elif defined(__aarch64__)
    return (vu16)vmovl_u8(vld1_u8(from));
#else
    vu8 bytes = {0}, zero = {0};
    memcpy(&bytes, from, VEC_WIDE);
    return (vu16)__builtin_shufflevector(bytes, zero, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#endif
}

/* The lower and the upper half of h, widened with zeros below (`high`) or above them. */
VEC_INLINE vu32 vec_widen_lo(vu16 h, int high)
{
#if VEC_BYTES == 64
    vu32 wide = (vu32)_mm512_cvtepu16_epi32(_mm512_castsi512_si256((__m512i)h));
    return high ? wide << 16 : wide;
#elif VEC_BYTES == 32
    vu32 wide = (vu32)_mm256_cvtepu16_epi32(_mm256_castsi256_si128((__m256i)h));
    return high ? wide << 16 : wide;
#else
    vu16 zero = {0};
    return high ? (vu32)__builtin_shufflevector(zero, h, 0, 8, 1, 9, 2, 10, 3, 11)
                : (vu32)__builtin_shufflevector(h, zero, 0, 8, 1, 9, 2, 10, 3, 11);
#endif
}

VEC_INLINE vu32 vec_widen_hi(vu16 h, int high)
{
#if VEC_BYTES == 64
    vu32 wide = (vu32)_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64((__m512i)h, 1));
    return high ? wide << 16 : wide;
#elif VEC_BYTES == 32
    vu32 wide = (vu32)_mm256_cvtepu16_epi32(_mm256_extracti128_si256((__m256i)h, 1));
    return high ? wide << 16 : wide;
#else
    vu16 zero = {0};
    return high ? (vu32)__builtin_shufflevector(zero, h, 4, 12, 5, 13, 6, 14, 7, 15)
                : (vu32)__builtin_shufflevector(h, zero, 4, 12, 5, 13, 6, 14, 7, 15);
#endif
}

/* Every NaN replaced by the one positive quiet NaN, so that devices agree on the bits. */
VEC_INLINE vu32 vec_canonical(vf32 x)
{
    /* NOLINTNEXTLINE(misc-redundant-expression): false for a NaN */
    return vec_select((vu32)(x == x), (vu32)x, vec_u32(0x7fc00000u));
}

/* bf16 in the upper halves of the lanes; the lower ones are noise. */
VEC_INLINE vu32 vec_round_bf16(vf32 x)
{
    vu32 bits = (vu32)x;
    /* NOLINTNEXTLINE(misc-redundant-expression): false for a NaN */
    return vec_select((vu32)(x == x), bits + 0x7fffu + (bits >> 16 & 1u), vec_u32(0x7fc00000u));
}

VEC_INLINE vf32 vec_from_fp16(vu32 h)
{
    vu32 sign = (h & 0x8000u) << 16;
    vu32 abs = h & 0x7fffu;
    vu32 special = vec_greater(abs, vec_u32(0x7bffu));
    vu32 nan = vec_greater(abs, vec_u32(0x7c00u));
    vu32 small = vec_greater(vec_u32(0x400u), abs);
    vu32 normal = (abs << 13) + (112u << 23);
    vf32 tiny = __builtin_convertvector((vi32)abs, vf32) * 0x1p-24f;
    normal += special & (112u << 23);
    normal |= nan & 0x400000u;
    return (vf32)(sign | vec_select(small, (vu32)tiny, normal));
}

/* fp16 in the upper halves of the lanes; NaN becomes the canonical 0x7e00. */
VEC_INLINE vu32 vec_to_fp16(vf32 x)
{
    vu32 bits = (vu32)x;
    vu32 abs = bits & FLOAT_ABS_MASK;
    vu32 sign = bits & 0x80000000u;
    vu32 nan = vec_greater(abs, vec_u32(FLOAT_INF_BITS));
    vu32 large = vec_greater(abs, vec_u32(0x477fffffu));
    vu32 small = vec_greater(vec_u32(0x38800000u), abs);
    vu32 normal = (abs - (112u << 23) + 0xfffu + (abs >> 13 & 1u)) >> 13;
    vu32 tiny = (vu32)((vf32)abs + 0.5f) - 0x3f000000u;
    normal = vec_select(small, tiny, vec_select(large, vec_u32(0x7c00u), normal));
    return vec_select(nan, vec_u32(0x7e000000u), sign | normal << 16);
}

/* 8-bit results in 32-bit lanes, exactly float_to_e4m3. */
VEC_INLINE vu32 vec_to_e4m3(vf32 x)
{
    vu32 bits = (vu32)x;
    vu32 abs = bits & FLOAT_ABS_MASK;
    vu32 sign = bits >> 24 & 0x80u;
    vu32 nan = vec_greater(abs, vec_u32(FLOAT_INF_BITS));
    vu32 small = vec_greater(vec_u32(0x3c800000u), abs);
    vu32 large = vec_greater(abs, vec_u32(0x43e00000u));
    vu32 capped = vec_select(large, vec_u32(0x43e00000u), abs);
    vu32 normal = (capped - (120u << 23) + 0x7ffffu + (capped >> 20 & 1u)) >> 20;
    vu32 tiny = (vu32)((vf32)abs + 0x1p14f) - 0x46800000u;
    return sign | (nan & 0x7fu) | vec_select(small, tiny, normal);
}

/*
 * The same for |x| < 464, finite, in a third of the operations. Adding 2^20 times x's power of two (2^-6 at least)
 * leaves x, rounded to the distance of e4m3's neighbours there, as an integer n in the lowest bits of the sum; the code
 * is n + 8 * (exponent field - 1). The 56 makes the constants vanish modulo 256.
 */
VEC_INLINE vu32 vec_to_e4m3_finite(vf32 x)
{
    vu32 bits = (vu32)x;
    vu32 abs = bits & FLOAT_ABS_MASK;
    vu32 power = vec_max(bits & FLOAT_INF_BITS, vec_u32(121u << 23));
    vu32 sum = (vu32)((vf32)abs + (vf32)(power + ((20u << 23) + 56u)));
    return vec_select(vec_u32(0x7fu), sum + (power >> 20), bits >> 24);
}

VEC_INLINE size_t vec_element_bytes(int dtype)
{
    return dtype == EPX_FP32 ? 4 : 2;
}

VEC_INLINE struct wide vec_load_wide(const void *from, int dtype)
{
    struct wide v;
    if (dtype == EPX_FP32) {
        v.a = vec_load_f32(from);
        v.b = vec_load_f32((const char *)from + VEC_BYTES);
        return v;
    }
    vu16 h = vec_load_u16(from);
    if (dtype == EPX_BF16) {
        v.a = (vf32)vec_widen_lo(h, 1);
        v.b = (vf32)vec_widen_hi(h, 1);
    } else {
#if defined(__aarch64__)
        v.a = (vf32)vcvt_f32_f16(vget_low_f16(vreinterpretq_f16_u16((uint16x8_t)h)));
        v.b = (vf32)vcvt_high_f32_f16(vreinterpretq_f16_u16((uint16x8_t)h));
#elif VEC_BYTES == 64
        v.a = (vf32)_mm512_cvtph_ps(_mm512_castsi512_si256((__m512i)h));
        v.b = (vf32)_mm512_cvtph_ps(_mm512_extracti64x4_epi64((__m512i)h, 1));
#elif VEC_BYTES == 32
        v.a = (vf32)_mm256_cvtph_ps(_mm256_castsi256_si128((__m256i)h));
        v.b = (vf32)_mm256_cvtph_ps(_mm256_extracti128_si256((__m256i)h, 1));
#else
        v.a = vec_from_fp16(vec_widen_lo(h, 0));
        v.b = vec_from_fp16(vec_widen_hi(h, 0));
#endif
    }
    return v;
}

VEC_INLINE void vec_store_fp16(void *to, struct wide v)
{
#if defined(__aarch64__)
    float16x4_t low = vcvt_f16_f32((float32x4_t)vec_canonical(v.a));
    vec_store(to, (vu32)vcvt_high_f16_f32(low, (float32x4_t)vec_canonical(v.b)));
#elif VEC_BYTES == 64
    __m256i low = _mm512_cvtps_ph((__m512)vec_canonical(v.a), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256i high = _mm512_cvtps_ph((__m512)vec_canonical(v.b), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    vec_store(to, (vu32)_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
#elif VEC_BYTES == 32
    __m128i low = _mm256_cvtps_ph((__m256)vec_canonical(v.a), _MM_FROUND_TO_NEAREST_INT);
    __m128i high = _mm256_cvtps_ph((__m256)vec_canonical(v.b), _MM_FROUND_TO_NEAREST_INT);
    vec_store(to, (vu32)_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1));
#else
    vec_store(to, (vu32)vec_narrow_high(vec_to_fp16(v.a), vec_to_fp16(v.b)));
#endif
}

/* Rounds to dtype, NaN to the canonical one. */
VEC_INLINE void vec_store_wide(void *to, int dtype, struct wide v)
{
    if (dtype == EPX_FP32) {
        vec_store(to, vec_canonical(v.a));
        vec_store((char *)to + VEC_BYTES, vec_canonical(v.b));
    } else if (dtype == EPX_BF16) {
        vec_store(to, (vu32)vec_narrow_high(vec_round_bf16(v.a), vec_round_bf16(v.b)));
    } else {
        vec_store_fp16(to, v);
    }
}

#endif
