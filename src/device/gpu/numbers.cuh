/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Eight channels of a row in one lane, as floats. Conversions give the bits of util/numeric.h, sums those of
 * device/cpu/math_reduce.h: weighted by fused multiply-add, otherwise by addition.
 */
#ifndef EPX_DEVICE_GPU_NUMBERS_CUH
#define EPX_DEVICE_GPU_NUMBERS_CUH

struct float8 {
    float v[8];
};

template <int dtype> KFN int element_bytes(void)
{
    return dtype == DTYPE_FP32 ? 4 : 2;
}

/* Eight elements as they lie in memory: one vector, two for fp32. */
template <int dtype> struct raw8 {
    uint4 a, b;
};

template <int dtype> KFN raw8<dtype> raw_load(const char *from)
{
    struct raw8<dtype> r;
    r.a = vec_load(from);
    if (dtype == DTYPE_FP32)
        r.b = vec_load(from + 16);
    return r;
}

/* Elements [0, n) at any alignment, zeros behind them. */
template <int dtype> KFN_STEP raw8<dtype> raw_load_odd(const char *from, int n)
{
    uint32_t w[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    struct raw8<dtype> r;

#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (i >= n)
            continue;
        if (dtype == DTYPE_FP32)
            w[i] = ((const volatile uint32_t *)from)[i];
        else
            w[i / 2] |= (uint32_t)((const volatile uint16_t *)from)[i] << i % 2 * 16;
    }
    r.a = make_uint4(w[0], w[1], w[2], w[3]);
    r.b = make_uint4(w[4], w[5], w[6], w[7]);
    return r;
}

KFN float fp16_low(uint32_t w)
{
    return __half2float(__ushort_as_half((unsigned short)(w & 0xffffu)));
}

KFN float fp16_high(uint32_t w)
{
    return __half2float(__ushort_as_half((unsigned short)(w >> 16)));
}

template <int dtype> KFN struct float8 raw_floats(struct raw8<dtype> r)
{
    const uint32_t w[8] = {r.a.x, r.a.y, r.a.z, r.a.w, r.b.x, r.b.y, r.b.z, r.b.w};
    struct float8 f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (dtype == DTYPE_FP32)
            f.v[i] = __uint_as_float(w[i]);
        else if (dtype == DTYPE_BF16)
            f.v[i] = __uint_as_float(i % 2 ? w[i / 2] & 0xffff0000u : w[i / 2] << 16);
        else
            f.v[i] = i % 2 ? fp16_high(w[i / 2]) : fp16_low(w[i / 2]);
    }
    return f;
}

KFN uint32_t canonical_fp32(float x)
{
    return x == x ? __float_as_uint(x) : 0x7fc00000u;
}

template <int dtype> KFN raw8<dtype> floats_raw(const struct float8 &f)
{
    struct raw8<dtype> r;
    if (dtype == DTYPE_FP32) {
        r.a =
            make_uint4(canonical_fp32(f.v[0]), canonical_fp32(f.v[1]), canonical_fp32(f.v[2]), canonical_fp32(f.v[3]));
        r.b =
            make_uint4(canonical_fp32(f.v[4]), canonical_fp32(f.v[5]), canonical_fp32(f.v[6]), canonical_fp32(f.v[7]));
    } else if (dtype == DTYPE_BF16) {
        r.a = make_uint4(pack_bf16(f.v[0], f.v[1]), pack_bf16(f.v[2], f.v[3]), pack_bf16(f.v[4], f.v[5]),
                         pack_bf16(f.v[6], f.v[7]));
    } else {
        r.a = make_uint4(pack_fp16(f.v[0], f.v[1]), pack_fp16(f.v[2], f.v[3]), pack_fp16(f.v[4], f.v[5]),
                         pack_fp16(f.v[6], f.v[7]));
    }
    return r;
}

template <int dtype> KFN void raw_store(char *to, struct raw8<dtype> r)
{
    vec_store(to, r.a);
    if (dtype == DTYPE_FP32)
        vec_store(to + 16, r.b);
}

template <int dtype> KFN_STEP void raw_store_odd(char *to, struct raw8<dtype> r, int n)
{
    const uint32_t w[8] = {r.a.x, r.a.y, r.a.z, r.a.w, r.b.x, r.b.y, r.b.z, r.b.w};

#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (i >= n)
            continue;
        if (dtype == DTYPE_FP32)
            ((uint32_t *)to)[i] = w[i];
        else
            ((uint16_t *)to)[i] = (uint16_t)(w[i / 2] >> i % 2 * 16);
    }
}

KFN void floats_add(struct float8 *sum, const struct float8 &x, int weighted, float weight)
{
#pragma unroll
    for (int i = 0; i < 8; i++)
        sum->v[i] = weighted ? __fmaf_rn(weight, x.v[i], sum->v[i]) : __fadd_rn(sum->v[i], x.v[i]);
}

#endif
