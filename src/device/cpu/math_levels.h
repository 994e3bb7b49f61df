/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Levels: the functions of math.h, compiled once for each set of instructions that machines have.
 *
 *     x86_64    base (SSE2)    avx2 (with FMA and F16C)    avx512 (F, BW, DQ, VL)    avx512bf16
 *     aarch64   base (NEON)    bf16
 *
 * The first use takes the highest that the machine has, or what EPX_CPU_LEVEL says, and stays with it. All levels give
 * the same bits (test_math.c).
 */
#ifndef EPX_DEVICE_CPU_MATH_LEVELS_H
#define EPX_DEVICE_CPU_MATH_LEVELS_H

#include "device/cpu/math.h"

struct math_ops {
    const char *name;
    void (*copy_many)(void *const *to, int n, const void *from, size_t bytes);
    void (*copy_many_past)(void *const *to, int n, const void *from, size_t bytes);
    void (*cast_fp8)(uint8_t *q, void *scales, enum scale_kind kind, int round_scale, const void *x, int dtype,
                     int hidden);
    size_t (*logfmt_bound)(int hidden);
    size_t (*logfmt_encode)(void *to, const uint16_t *x, int hidden);
    void (*logfmt_decode)(float *to, const void *from, int hidden);
    size_t (*nvfp4_encode)(void *to, const uint16_t *x, int hidden, float row_scale);
    void (*nvfp4_add)(float *sum, const void *row, int hidden, int at, int n, float weight);
    void (*reduce)(void *out, int dtype, int hidden, const struct reduce_row *rows, int n, int weighted,
                   const void *bias0, const void *bias1);
};

/* NULL: the compiler, or the architecture, does not have it. */
extern const struct math_ops *const math_level_base,
    *const math_level_avx2, *const math_level_avx512, *const math_level_avx512bf16, *const math_level_bf16;

/* The i-th level of this machine, from the lowest on; NULL: there are no more. */
const struct math_ops *math_level(int i);
/* The level that is used; and its change, for tests. NULL: chosen again at the next use. */
const struct math_ops *math_level_used(void);
void math_level_use(const struct math_ops *level);

#endif
