/* SPDX-License-Identifier: Apache-2.0 */
/* A stand-in for CUDA's cuda_bf16.h: the type, and its conversions from and to float on the host. */
#ifndef EPX_STANDIN_CUDA_BF16_H
#define EPX_STANDIN_CUDA_BF16_H

#include <cuda_runtime.h>

#include "epx_small_float.h"

typedef struct __attribute__((aligned(2))) {
    unsigned short x;
} __nv_bfloat16_raw;

typedef struct __attribute__((aligned(2))) __nv_bfloat16 {
    unsigned short __x;
#ifdef __cplusplus
    __nv_bfloat16() = default;
    __nv_bfloat16(float value) : __x((unsigned short)epx_small_encode(&epx_small_bf16, value, 0))
    {
    }
    __nv_bfloat16(const __nv_bfloat16_raw &raw) : __x(raw.x)
    {
    }
    operator float() const
    {
        return epx_small_decode(&epx_small_bf16, __x);
    }
    operator __nv_bfloat16_raw() const
    {
        __nv_bfloat16_raw raw;
        raw.x = __x;
        return raw;
    }
#endif
} __nv_bfloat16;
typedef __nv_bfloat16 nv_bfloat16;

static inline __nv_bfloat16 __float2bfloat16_rn(const float value)
{
    __nv_bfloat16 result;

    result.__x = (unsigned short)epx_small_encode(&epx_small_bf16, value, 0);
    return result;
}

static inline __nv_bfloat16 __float2bfloat16(const float value)
{
    return __float2bfloat16_rn(value);
}

static inline float __bfloat162float(const __nv_bfloat16 value)
{
    return epx_small_decode(&epx_small_bf16, value.__x);
}

static inline unsigned short __bfloat16_as_ushort(const __nv_bfloat16 value)
{
    return value.__x;
}

static inline __nv_bfloat16 __ushort_as_bfloat16(const unsigned short bits)
{
    __nv_bfloat16 result;

    result.__x = bits;
    return result;
}

#endif
