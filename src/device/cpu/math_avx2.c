/* SPDX-License-Identifier: Apache-2.0 */
/* The math for x86_64 with AVX2, FMA and F16C. */
#include "device/cpu/math_levels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define MATH_TABLE math_avx2_table
#define MATH_NAME "avx2"
#include "device/cpu/math_level.h"
const struct math_ops *const math_level_avx2 = &math_avx2_table;
#else
const struct math_ops *const math_level_avx2 = NULL;
#endif
