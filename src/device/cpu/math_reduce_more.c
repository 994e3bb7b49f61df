/* SPDX-License-Identifier: Apache-2.0 */
/*
 * math_reduce for machines with more instructions than their kind must have: fused multiply-add on x86_64, bf16 on
 * aarch64. CMake compiles this file for them; without such flags it is empty.
 */
#include "device/cpu/math.h"

#if defined(__FMA__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define REDUCE_NAME math_reduce_more
#include "device/cpu/math_reduce.c"
const int math_reduce_has_more = 1;
#else
const int math_reduce_has_more = 0;
void math_reduce_more(void *out, int dtype, int hidden, const struct reduce_row *rows, int n, int weighted,
                      const void *bias0, const void *bias1)
{
    math_reduce(out, dtype, hidden, rows, n, weighted, bias0, bias1);
}
#endif
