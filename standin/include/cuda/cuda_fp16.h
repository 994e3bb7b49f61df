/* SPDX-License-Identifier: Apache-2.0 */
/* A stand-in for CUDA's cuda_fp16.h: the type, and its conversions from and to float on the host. */
#ifndef EPX_STANDIN_CUDA_FP16_H
#define EPX_STANDIN_CUDA_FP16_H

#include <cuda_runtime.h>

#include "epx_small_float.h"

typedef struct __attribute__((aligned(2))) {
    unsigned short x;
} __half_raw;

typedef struct __attribute__((aligned(2))) __half {
    unsigned short __x;
#ifdef __cplusplus
    __half() = default;
    __half(float value) : __x((unsigned short)epx_small_encode(&epx_small_fp16, value, 0))
    {
    }
    __half(const __half_raw &raw) : __x(raw.x)
    {
    }
    operator float() const
    {
        return epx_small_decode(&epx_small_fp16, __x);
    }
    operator __half_raw() const
    {
        __half_raw raw;
        raw.x = __x;
        return raw;
    }
#endif
} __half;
typedef __half half;

static inline __half __float2half_rn(const float value)
{
    __half result;

    result.__x = (unsigned short)epx_small_encode(&epx_small_fp16, value, 0);
    return result;
}

static inline __half __float2half(const float value)
{
    return __float2half_rn(value);
}

static inline float __half2float(const __half value)
{
    return epx_small_decode(&epx_small_fp16, value.__x);
}

static inline unsigned short __half_as_ushort(const __half value)
{
    return value.__x;
}

static inline __half __ushort_as_half(const unsigned short bits)
{
    __half result;

    result.__x = bits;
    return result;
}

#endif
