/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bf16 in pairs, for math_reduce.h: a struct wide holds the even elements of a row and the odd ones, which takes no
 * shuffle, as each pair of them is one 32-bit lane.
 *
 * aarch64 has instructions for it: one rounds four floats to nearest even, two add eight bf16 to floats as products
 * with one, exactly and with one rounding, as a widening and an addition would. Between bf16_begin and bf16_end every
 * NaN that they give is the positive quiet one (bit DN of FPCR), which elsewhere has to be put in its place.
 *
 * x86_64's instruction (AVX-512 BF16) rounds to nearest even too, but takes denormal numbers for zero and keeps the
 * payload of a NaN: it is used for vectors without either. Its products of pairs round otherwise, and are not used.
 */
#ifndef EPX_DEVICE_CPU_MATH_BF16_H
#define EPX_DEVICE_CPU_MATH_BF16_H

#include "device/cpu/math_vec.h"

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define BF16_ADDS 1
#define BF16_SPLIT_SUMS 1
#define BF16_SPLIT_WEIGHTED 0

/* The memory clobbers keep loads behind it and stores before the end, and what is computed between them. */
VEC_INLINE uint64_t bf16_begin(void)
{
    uint64_t before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" : : "r"(before | 1u << 25) : "memory");
    return before;
}

VEC_INLINE void bf16_end(uint64_t before)
{
    __asm__ volatile("msr fpcr, %0" : : "r"(before) : "memory");
}

VEC_INLINE void bf16_add_split(struct wide *acc, const void *from)
{
    bfloat16x8_t x = vreinterpretq_bf16_u16((uint16x8_t)vec_load_u16(from));
    uint16x8_t one = vdupq_n_u16(0x3f80);
    __asm__("" : "+w"(one)); /* gcc 12 takes the constant for an fp16 1.0 */
    acc->a = (vf32)vbfmlalbq_f32((float32x4_t)acc->a, x, vreinterpretq_bf16_u16(one));
    acc->b = (vf32)vbfmlaltq_f32((float32x4_t)acc->b, x, vreinterpretq_bf16_u16(one));
}

VEC_INLINE void bf16_store_split(void *to, struct wide v)
{
    uint16x8_t even = vreinterpretq_u16_bf16(vcvtq_low_bf16_f32((float32x4_t)v.a));
    uint16x8_t odd = vreinterpretq_u16_bf16(vcvtq_low_bf16_f32((float32x4_t)v.b));
    vec_store(to, (vu32)vzip1q_u16(even, odd));
}

/* As vec_store_wide. */
VEC_INLINE void bf16_store(void *to, struct wide v)
{
    bfloat16x8_t low = vcvtq_low_bf16_f32((float32x4_t)v.a);
    vec_store(to, (vu32)vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(low, (float32x4_t)v.b)));
}

#else
#define BF16_ADDS 0
#if defined(__x86_64__)
#define BF16_SPLIT_SUMS 1
#define BF16_SPLIT_WEIGHTED 1
#else
#define BF16_SPLIT_SUMS 0
#define BF16_SPLIT_WEIGHTED 0
#endif

VEC_INLINE uint64_t bf16_begin(void)
{
    return 0;
}

VEC_INLINE void bf16_end(uint64_t before)
{
    (void)before;
}

VEC_INLINE void bf16_add_split(struct wide *acc, const void *from)
{
    const vu32 pairs = vec_load_u32(from);
    acc->a += (vf32)(pairs << 16);
    acc->b += (vf32)(pairs & 0xffff0000u);
}

#if defined(__AVX512BF16__) && VEC_BYTES == 64
enum { BF16_NOT_EXACT = 0x01 | 0x20 | 0x80 }; /* quiet NaN, denormal, signalling NaN */

VEC_INLINE int bf16_has_instruction(struct wide v)
{
    return _mm512_kortestz(_mm512_fpclass_ps_mask((__m512)v.a, BF16_NOT_EXACT),
                           _mm512_fpclass_ps_mask((__m512)v.b, BF16_NOT_EXACT));
}

VEC_INLINE void bf16_store_rounded(void *to, struct wide v)
{
    const __m512i turn = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                          21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)v.b, (__m512)v.a); /* v.a in the lower half */
    vec_store(to, (vu32)_mm512_permutexvar_epi16(turn, both));
}
#else
VEC_INLINE int bf16_has_instruction(struct wide v)
{
    (void)v;
    return 0;
}

VEC_INLINE void bf16_store_rounded(void *to, struct wide v)
{
    (void)to, (void)v;
}
#endif

VEC_INLINE void bf16_store_split(void *to, struct wide v)
{
    if (bf16_has_instruction(v))
        bf16_store_rounded(to, v);
    else
        vec_store(to, vec_round_bf16(v.a) >> 16 | (vec_round_bf16(v.b) & 0xffff0000u));
}

VEC_INLINE void bf16_store(void *to, struct wide v)
{
    vec_store_wide(to, EPX_BF16, v);
}
#endif

/* Even elements to acc->a, odd ones to acc->b, each times a weight. */
VEC_INLINE void bf16_fma_split(struct wide *acc, const void *from, float weight)
{
    const vu32 pairs = vec_load_u32(from);
    acc->a = vec_fma((vf32)(pairs << 16), vec_f32(weight), acc->a);
    acc->b = vec_fma((vf32)(pairs & 0xffff0000u), vec_f32(weight), acc->b);
}

#endif
