/* SPDX-License-Identifier: Apache-2.0 */
/* math_reduce for x86_64 machines with fused multiply-add: CMake compiles this file with -mfma. Empty elsewhere. */
#include "device/cpu/math.h"

#if defined(__x86_64__) && defined(__FMA__)
#define REDUCE_NAME math_reduce_fma
#include "device/cpu/math_reduce.c"
const int math_reduce_has_fma = 1;
#else
const int math_reduce_has_fma = 0;
#if defined(__x86_64__)
void math_reduce_fma(void *out, int dtype, int hidden, const struct reduce_row *rows, int n, int weighted,
                     const void *bias0, const void *bias1)
{
    /* Never called: has_fma is 0. */
    (void)out, (void)dtype, (void)hidden, (void)rows, (void)n, (void)weighted, (void)bias0, (void)bias1;
}
#endif
#endif
