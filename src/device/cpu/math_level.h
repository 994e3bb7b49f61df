/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The body of a level: math_base.c, math_avx2.c ... include it, and CMake compiles each for the instructions that its
 * level has (CMakeLists.txt). The source of the arithmetic is one; all levels give the same bits.
 *
 *     #define MATH_TABLE math_avx2_table      the table that is defined
 *     #define MATH_NAME "avx2"                what EPX_CPU_LEVEL calls it
 */
#include "device/cpu/math_copy.h"
#include "device/cpu/math_fp8.h"
#include "device/cpu/math_levels.h"
#include "device/cpu/math_logfmt.h"
#include "device/cpu/math_nvfp4.h"
#include "device/cpu/math_reduce.h"

static const struct math_ops MATH_TABLE = {
    .name = MATH_NAME,
    .copy_many = copy_many,
    .copy_many_past = copy_many_past,
    .cast_fp8 = cast_fp8,
    .logfmt_bound = logfmt_bound,
    .logfmt_encode = logfmt_encode,
    .logfmt_decode = logfmt_decode,
    .nvfp4_encode = nvfp4_encode,
    .nvfp4_add = nvfp4_add,
    .reduce = reduce,
};
