/* SPDX-License-Identifier: Apache-2.0 */
/* The math for x86_64 with AVX-512 and its BF16 instructions. */
#include "device/cpu/math_levels.h"

#if defined(__AVX512BF16__)
#define MATH_TABLE math_avx512bf16_table
#define MATH_NAME "avx512bf16"
#include "device/cpu/math_level.h"
const struct math_ops *const math_level_avx512bf16 = &math_avx512bf16_table;
#else
const struct math_ops *const math_level_avx512bf16 = NULL;
#endif
