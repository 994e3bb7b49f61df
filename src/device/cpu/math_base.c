/* SPDX-License-Identifier: Apache-2.0 */
/* The math with what every machine of its architecture has: SSE2 or NEON. */
#define MATH_TABLE math_base_table
#define MATH_NAME "base"
#include "device/cpu/math_level.h"

const struct math_ops *const math_level_base = &math_base_table;
