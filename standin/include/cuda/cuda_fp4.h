/* SPDX-License-Identifier: Apache-2.0 */
/* A stand-in for CUDA's cuda_fp4.h: e2m1, alone and in pairs, and its conversions on the host, to nearest. */
#ifndef EPX_STANDIN_CUDA_FP4_H
#define EPX_STANDIN_CUDA_FP4_H

#include <cuda_fp8.h>
#include <cuda_runtime.h>

typedef unsigned char __nv_fp4_storage_t;
typedef unsigned char __nv_fp4x2_storage_t;
typedef enum __nv_fp4_interpretation_t { __NV_E2M1 = 0 } __nv_fp4_interpretation_t;

/* Nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6, ties to the even code; larger ones, and NaN, become 6. */
static inline __nv_fp4_storage_t __nv_cvt_float_to_fp4(const float x, const __nv_fp4_interpretation_t kind,
                                                       const enum cudaRoundMode mode)
{
    static const float halfway[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
    const unsigned char sign = x < 0 || (x == 0 && 1 / x < 0) ? 8 : 0;
    const float abs = sign ? -x : x;
    unsigned char code = 0;

    (void)kind;
    (void)mode;
    if (abs != abs)
        return 7;
    while (code < 7 && (abs > halfway[code] || (abs == halfway[code] && code % 2)))
        code++;
    return (__nv_fp4_storage_t)(sign | code);
}

static inline __half_raw __nv_cvt_fp4_to_halfraw(const __nv_fp4_storage_t x, const __nv_fp4_interpretation_t kind)
{
    static const float values[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    const float value = values[x & 7];
    __half_raw raw;

    (void)kind;
    raw.x = (unsigned short)(epx_small_encode(&epx_small_fp16, value, 0) | (x & 8 ? 0x8000u : 0u));
    return raw;
}

/* x in the low half of the byte. */
static inline __nv_fp4x2_storage_t __nv_cvt_float2_to_fp4x2(const float2 x, const __nv_fp4_interpretation_t kind,
                                                            const enum cudaRoundMode mode)
{
    return (__nv_fp4x2_storage_t)(__nv_cvt_float_to_fp4(x.x, kind, mode) | __nv_cvt_float_to_fp4(x.y, kind, mode) << 4);
}

typedef struct __nv_fp4_e2m1 {
    __nv_fp4_storage_t __x;
#ifdef __cplusplus
    __nv_fp4_e2m1() = default;
    explicit __nv_fp4_e2m1(float value) : __x(__nv_cvt_float_to_fp4(value, __NV_E2M1, cudaRoundNearest))
    {
    }
    explicit operator float() const
    {
        return epx_small_decode(&epx_small_fp16, __nv_cvt_fp4_to_halfraw(__x, __NV_E2M1).x);
    }
#endif
} __nv_fp4_e2m1;

typedef struct __nv_fp4x2_e2m1 {
    __nv_fp4x2_storage_t __x;
} __nv_fp4x2_e2m1;

#endif
