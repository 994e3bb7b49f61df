/* SPDX-License-Identifier: Apache-2.0 */
/* The math for aarch64 with bf16 instructions. */
#include "device/cpu/math_levels.h"

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define MATH_TABLE math_bf16_table
#define MATH_NAME "bf16"
#include "device/cpu/math_level.h"
const struct math_ops *const math_level_bf16 = &math_bf16_table;
#else
const struct math_ops *const math_level_bf16 = NULL;
#endif
