/* SPDX-License-Identifier: Apache-2.0 */
/* The math for x86_64 with AVX-512: F, BW, DQ and VL. */
#include "device/cpu/math_levels.h"

#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define MATH_TABLE math_avx512_table
#define MATH_NAME "avx512"
#include "device/cpu/math_level.h"
const struct math_ops *const math_level_avx512 = &math_avx512_table;
#else
const struct math_ops *const math_level_avx512 = NULL;
#endif
