/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Block-scaled cast to e4m3 by a warp; docs/formats.md has the definition. Sixteen lanes hold a block of 128 channels,
 * eight each, so that a step of the warp casts two blocks, or four where it has 64 lanes.
 */
#ifndef EPX_DEVICE_CUDA_FP8_CUH
#define EPX_DEVICE_CUDA_FP8_CUH

#define FP8_BLOCK 128
#define FP8_STEP (WARP * 8) /* channels of a step */
#define FP8_FLIGHT 5   /* steps whose loads are in flight together */
#define FLOAT_MAX_BITS 0x7f7fffffu

struct fp8_scale {
    float mul, inv;
};

KFN struct fp8_scale fp8_scale_of(uint32_t amax_bits, int power_of_two)
{
    const float amax = fmaxf(__uint_as_float(amax_bits), 1e-4f);
    struct fp8_scale s;

    s.inv = __fmul_rn(amax, 1.0f / E4M3_MAX);
    s.mul = __fdiv_rn(E4M3_MAX, amax);
    if (power_of_two) {
        const uint32_t bits = __float_as_uint(s.inv);
        const uint32_t exponent = (bits >> 23) + ((bits & 0x7fffffu) != 0);
        s.inv = __uint_as_float(exponent << 23);
        s.mul = __uint_as_float((254u - exponent) << 23);
    }
    return s;
}

/* The largest |x| of the lane's eight as float bits: NaN does not count, infinity counts as the largest float. */
KFN uint32_t fp8_amax8(const struct float8 &f, int *odd)
{
    uint32_t max = 0, all = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint32_t a = __float_as_uint(f.v[i]) & FLOAT_ABS_MASK;
        all = umax(all, a);
        max = umax(max, a > FLOAT_INF_BITS ? 0 : umin(a, FLOAT_MAX_BITS));
    }
    *odd = all >= FLOAT_INF_BITS;
    return max;
}

KFN uint32_t fp8_pack4_soft(const float *x)
{
    return (uint32_t)float_to_e4m3(x[0]) | (uint32_t)float_to_e4m3(x[1]) << 8 | (uint32_t)float_to_e4m3(x[2]) << 16 |
           (uint32_t)float_to_e4m3(x[3]) << 24;
}

KFN uint32_t fp8_pack4(const float *x)
{
#ifdef FP8_PAIR
    return fp8_pair(x[0], x[1]) | fp8_pair(x[2], x[3]) << 16;
#else
    return fp8_pack4_soft(x);
#endif
}

/* One step: lanes 0..15 have one block, 16..31 the next, and so on. `block` is the lane's own. */
template <int dtype>
KFN void fp8_step(uint8_t *q, void *scales, int ue8m0, int power_of_two, struct raw8<dtype> raw, int at,
                  int hidden)
{
    struct float8 f = raw_floats<dtype>(raw);
    int odd;
    uint32_t max = fp8_amax8(f, &odd);
    const int block = at / FP8_BLOCK;

    for (int d = 8; d; d /= 2)
        max = umax(max, __shfl_xor_sync(ALL_LANES, max, d));
    const struct fp8_scale s = fp8_scale_of(max, power_of_two);
#pragma unroll
    for (int i = 0; i < 8; i++)
        f.v[i] = __fmul_rn(f.v[i], s.mul);
    if (at >= hidden)
        return;
    /* The hardware's cast drops the sign of a NaN. */
    uint2 bytes = odd ? make_uint2(fp8_pack4_soft(f.v), fp8_pack4_soft(f.v + 4))
                      : make_uint2(fp8_pack4(f.v), fp8_pack4(f.v + 4));
    *(uint2 *)(q + at) = bytes;
    if (lane_id() % 16)
        return;
    if (ue8m0)
        ((uint8_t *)scales)[block] = (uint8_t)(__float_as_uint(s.inv) >> 23);
    else
        ((float *)scales)[block] = s.inv;
}

template <int dtype>
KFN_STEP void fp8_row(uint8_t *q, void *scales, int ue8m0, int power_of_two, const char *x, int hidden)
{
    const int odd = !aligned16(x) || hidden % 8;

    for (int at = 0; at < hidden; at += FP8_STEP * FP8_FLIGHT) {
        struct raw8<dtype> raw[FP8_FLIGHT];
#pragma unroll
        for (int j = 0; j < FP8_FLIGHT; j++) {
            const int mine = at + j * FP8_STEP + lane_id() * 8;
            const char *from = x + (size_t)mine * element_bytes<dtype>();
            raw[j].a = raw[j].b = make_uint4(0, 0, 0, 0);
            if (mine < hidden)
                raw[j] = odd ? raw_load_odd<dtype>(from, hidden - mine) : raw_load<dtype>(from);
        }
#pragma unroll
        for (int j = 0; j < FP8_FLIGHT; j++)
            if (at + j * FP8_STEP < hidden)
                fp8_step<dtype>(q, scales, ue8m0, power_of_two, raw[j], at + j * FP8_STEP + lane_id() * 8, hidden);
    }
    const int blocks = (hidden + FP8_BLOCK - 1) / FP8_BLOCK;
    if (ue8m0 && lane_id() < (4 - blocks % 4) % 4)
        ((uint8_t *)scales)[blocks + lane_id()] = 0;
}

KFN void ag_cast_fp8(struct agent *ag, void *q, void *scales, int ue8m0, int round_scale, const void *x, int dtype,
                     int hidden)
{
    const int power_of_two = round_scale || ue8m0;

    (void)ag;
    if (dtype == DTYPE_BF16)
        fp8_row<DTYPE_BF16>((uint8_t *)q, scales, ue8m0, power_of_two, (const char *)x, hidden);
    else if (dtype == DTYPE_FP16)
        fp8_row<DTYPE_FP16>((uint8_t *)q, scales, ue8m0, power_of_two, (const char *)x, hidden);
    else
        fp8_row<DTYPE_FP32>((uint8_t *)q, scales, ue8m0, power_of_two, (const char *)x, hidden);
}

#endif
