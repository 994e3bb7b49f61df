/* SPDX-License-Identifier: Apache-2.0 */
/* A stand-in for CUDA's cuda_fp8.h: e4m3 and e5m2, and their conversions on the host. */
#ifndef EPX_STANDIN_CUDA_FP8_H
#define EPX_STANDIN_CUDA_FP8_H

#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef unsigned char __nv_fp8_storage_t;
typedef enum __nv_saturation_t { __NV_NOSAT = 0, __NV_SATFINITE = 1 } __nv_saturation_t;
typedef enum __nv_fp8_interpretation_t { __NV_E4M3 = 0, __NV_E5M2 = 1 } __nv_fp8_interpretation_t;

static inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(const float x, const __nv_saturation_t saturate,
                                                       const __nv_fp8_interpretation_t kind)
{
    const struct epx_small_float *format = kind == __NV_E4M3 ? &epx_small_e4m3 : &epx_small_e5m2;

    return (__nv_fp8_storage_t)epx_small_encode(format, x, saturate == __NV_SATFINITE);
}

/* Every FP8 number is an FP16 number too. */
static inline __half_raw __nv_cvt_fp8_to_halfraw(const __nv_fp8_storage_t x, const __nv_fp8_interpretation_t kind)
{
    const struct epx_small_float *format = kind == __NV_E4M3 ? &epx_small_e4m3 : &epx_small_e5m2;
    __half_raw raw;

    raw.x = (unsigned short)epx_small_encode(&epx_small_fp16, epx_small_decode(format, x), 0);
    return raw;
}

typedef struct __nv_fp8_e4m3 {
    __nv_fp8_storage_t __x;
#ifdef __cplusplus
    __nv_fp8_e4m3() = default;
    explicit __nv_fp8_e4m3(float value) : __x(__nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3))
    {
    }
    explicit operator float() const
    {
        return epx_small_decode(&epx_small_e4m3, __x);
    }
#endif
} __nv_fp8_e4m3;

typedef struct __nv_fp8_e5m2 {
    __nv_fp8_storage_t __x;
#ifdef __cplusplus
    __nv_fp8_e5m2() = default;
    explicit __nv_fp8_e5m2(float value) : __x(__nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E5M2))
    {
    }
    explicit operator float() const
    {
        return epx_small_decode(&epx_small_e5m2, __x);
    }
#endif
} __nv_fp8_e5m2;

#endif
