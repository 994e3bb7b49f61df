/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bf16 instructions of aarch64, for math_reduce.c: one rounds four floats to nearest even, two add eight bf16 to
 * floats as products with one, exactly and with one rounding, as a widening and an addition would. Between bf16_begin
 * and bf16_end every NaN that they give is the positive quiet one (bit DN of FPCR), which elsewhere has to be put in
 * its place.
 */
#ifndef EPX_DEVICE_CPU_MATH_BF16_H
#define EPX_DEVICE_CPU_MATH_BF16_H

#include "device/cpu/math_vec.h"

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HAS_BF16 1

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

/* Even elements to acc->a, odd ones to acc->b. */
VEC_INLINE void bf16_add_split8(struct f32x8 *acc, const void *from)
{
    bfloat16x8_t x = vreinterpretq_bf16_u16((uint16x8_t)vec_load_u16(from));
    uint16x8_t one = vdupq_n_u16(0x3f80);
    __asm__("" : "+w"(one)); /* gcc 12 takes the constant for an fp16 1.0 */
    acc->a = (f32x4)vbfmlalbq_f32((float32x4_t)acc->a, x, vreinterpretq_bf16_u16(one));
    acc->b = (f32x4)vbfmlaltq_f32((float32x4_t)acc->b, x, vreinterpretq_bf16_u16(one));
}

VEC_INLINE void bf16_store_split8(void *to, struct f32x8 v)
{
    uint16x8_t even = vreinterpretq_u16_bf16(vcvtq_low_bf16_f32((float32x4_t)v.a));
    uint16x8_t odd = vreinterpretq_u16_bf16(vcvtq_low_bf16_f32((float32x4_t)v.b));
    vec_store(to, (u32x4)vzip1q_u16(even, odd));
}

/* As vec_store8. */
VEC_INLINE void bf16_store8(void *to, struct f32x8 v)
{
    bfloat16x8_t low = vcvtq_low_bf16_f32((float32x4_t)v.a);
    vec_store(to, (u32x4)vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(low, (float32x4_t)v.b)));
}

#else
#define HAS_BF16 0

/* Never called but for begin and end, which have nothing to do. */
VEC_INLINE uint64_t bf16_begin(void)
{
    return 0;
}

VEC_INLINE void bf16_end(uint64_t before)
{
    (void)before;
}

VEC_INLINE void bf16_add_split8(struct f32x8 *acc, const void *from)
{
    (void)acc, (void)from;
}

VEC_INLINE void bf16_store_split8(void *to, struct f32x8 v)
{
    (void)to, (void)v;
}

VEC_INLINE void bf16_store8(void *to, struct f32x8 v)
{
    (void)to, (void)v;
}
#endif

#endif
