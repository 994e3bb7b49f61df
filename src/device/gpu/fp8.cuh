/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Block-scaled cast to e4m3 by a warp; docs/formats.md has the definition. Sixteen lanes hold a block of 128 channels,
 * eight each, so that a step of the warp casts two blocks, or four where it has 64 lanes.
 */
#ifndef EPX_DEVICE_GPU_FP8_CUH
#define EPX_DEVICE_GPU_FP8_CUH

#define FP8_BLOCK 128
#define FP8_STEP (WARP * 8) /* channels of a step */
#define FP8_FLIGHT 5        /* steps whose loads are in flight together */
#define FLOAT_MAX_BITS 0x7f7fffffu

struct fp8_scale {
    float mul, inv;
};

KFN_STEP struct fp8_scale fp8_scale_of(uint32_t amax_bits, int power_of_two)
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

KFN_STEP uint32_t fp8_pack4_soft(float x0, float x1, float x2, float x3)
{
    const float x[4] = {x0, x1, x2, x3};
    uint32_t w = 0;
#pragma unroll 1
    for (int i = 0; i < 4; i++)
        w |= (uint32_t)float_to_e4m3(i == 0 ? x[0] : i == 1 ? x[1] : i == 2 ? x[2] : x[3]) << 8 * i;
    return w;
}

KFN uint32_t fp8_pack4(const float *x)
{
#ifdef FP8_PAIR
    return fp8_pair(x[0], x[1]) | fp8_pair(x[2], x[3]) << 16;
#else
    return fp8_pack4_soft(x[0], x[1], x[2], x[3]);
#endif
}

/* One step: lanes 0..15 have one block, 16..31 the next, and so on. `block` is the lane's own. */
template <int dtype>
KFN void fp8_step(uint8_t *q, void *scales, int ue8m0, int power_of_two, struct raw8<dtype> raw, int at, int hidden)
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
    uint2 bytes =
        odd ? make_uint2(fp8_pack4_soft(f.v[0], f.v[1], f.v[2], f.v[3]), fp8_pack4_soft(f.v[4], f.v[5], f.v[6], f.v[7]))
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

/* ---- To many destinations, without a detour through memory ------------------------------------------------------ */

/* Eight lanes hold a block, sixteen channels each: a lane's result is one vector. */
#define FP8_WIDE_STEP (WARP * 16)
#ifndef FP8_WIDE_FLIGHT
#define FP8_WIDE_FLIGHT 2 /* steps whose loads are in flight together */
#endif
#define FP8_HELD (WARP * FP8_BLOCK) /* channels whose scales the lanes hold, one each */

template <int dtype> struct raw16 {
    struct raw8<dtype> low, high;
};

/* The largest |x| of a lane's sixteen, as fp8_amax8. bf16: as 16-bit numbers, two at a time. */
template <int dtype>
KFN uint32_t fp8_amax16(const struct raw16<dtype> &raw, const struct float8 &f, const struct float8 &h, int *odd)
{
    int low, high;

    if (dtype == DTYPE_BF16) {
        const uint32_t w[8] = {raw.low.a.x,  raw.low.a.y,  raw.low.a.z,  raw.low.a.w,
                               raw.high.a.x, raw.high.a.y, raw.high.a.z, raw.high.a.w};
        uint32_t pair = 0;
#pragma unroll
        for (int i = 0; i < 8; i++)
            pair = max_u16x2(pair, w[i] & 0x7fff7fffu);
        const uint32_t max = umax(pair & 0xffff0000u, pair << 16);
        *odd = max >= FLOAT_INF_BITS;
        if (!*odd)
            return max;
    }
    const uint32_t max = umax(fp8_amax8(f, &low), fp8_amax8(h, &high));
    *odd = low | high;
    return max;
}

template <int dtype> KFN uint4 fp8_wide(const struct raw16<dtype> &raw, int power_of_two, float *scale)
{
    struct float8 f = raw_floats<dtype>(raw.low), h = raw_floats<dtype>(raw.high);
    int odd;
    uint32_t max = fp8_amax16<dtype>(raw, f, h, &odd);

    for (int d = 4; d; d /= 2)
        max = umax(max, __shfl_xor_sync(ALL_LANES, max, d));
    const struct fp8_scale s = fp8_scale_of(max, power_of_two);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        f.v[i] = __fmul_rn(f.v[i], s.mul);
        h.v[i] = __fmul_rn(h.v[i], s.mul);
    }
    *scale = s.inv;
    if (odd)
        return make_uint4(
            fp8_pack4_soft(f.v[0], f.v[1], f.v[2], f.v[3]), fp8_pack4_soft(f.v[4], f.v[5], f.v[6], f.v[7]),
            fp8_pack4_soft(h.v[0], h.v[1], h.v[2], h.v[3]), fp8_pack4_soft(h.v[4], h.v[5], h.v[6], h.v[7]));
    return make_uint4(fp8_pack4(f.v), fp8_pack4(f.v + 4), fp8_pack4(h.v), fp8_pack4(h.v + 4));
}

/* Lane i: the scale of block i, of `blocks`, to all destinations, `first` words from their beginning. */
KFN_STEP void fp8_put_scales(const struct word_set &own, int count, int ue8m0, float scale, int first, int blocks)
{
    uint32_t word = __float_as_uint(scale);
    int words = blocks, at = lane_id();

    if (ue8m0) {
        word = lane_id() < blocks ? word >> 23 & 0xffu : 0;
        word |= __shfl_down_sync(ALL_LANES, word, 1) << 8;
        word |= __shfl_down_sync(ALL_LANES, word, 2) << 16;
        words = (blocks + 3) / 4;
        at = lane_id() % 4 ? words : lane_id() / 4;
    }
    ROLLED
    for (int i = 0; i < count; i++) {
        char *to = (char *)__shfl_sync(ALL_LANES, (unsigned long long)own.to, i);
        const int64_t stride = __shfl_sync(ALL_LANES, own.stride, i);
        if (at < words)
            *(uint32_t *)(to + (first + at) * stride) = word;
    }
}

#define FP8_TARGETS 8 /* destinations whose addresses every lane holds, where there may be several */

/* One step of a row: `block` is its first block among those whose scales are held. */
template <int dtype, int targets>
KFN void fp8_wide_step(char *own, char *const *to, int count, const struct raw16<dtype> &raw, int power_of_two,
                       int step, int end, int block, float *held)
{
    const int mine = step + lane_id() * 16, nth = lane_id() - block;
    float scale;
    const uint4 q = fp8_wide<dtype>(raw, power_of_two, &scale);

#pragma unroll
    for (int i = 0; i < targets; i++)
        if (i < count && mine < end)
            vec_store(to[i] + mine, q);
    ROLLED
    for (int i = targets; targets > 1 && i < count; i++) {
        char *more = (char *)__shfl_sync(ALL_LANES, (unsigned long long)own, i);
        if (mine < end)
            vec_store(more + mine, q);
    }
    const float theirs = __shfl_sync(ALL_LANES, scale, nth * 8 & (WARP - 1));
    *held = nth >= 0 && nth < WARP / 8 ? theirs : *held;
}

template <int dtype, int flight, int targets>
KFN_STEP void fp8_row_many(char *own, const struct word_set &scales, int count, int ue8m0, int power_of_two,
                           const char *x, int channels)
{
    char *to[targets];

#pragma unroll
    for (int i = 0; i < targets; i++)
        to[i] = (char *)__shfl_sync(ALL_LANES, (unsigned long long)own, i);
    ROLLED
    for (int part = 0; part < channels; part += FP8_HELD) {
        const int end = channels - part < FP8_HELD ? channels : part + FP8_HELD;
        float held = 0.0f;
        for (int at = part; at < end; at += FP8_WIDE_STEP * flight) {
            struct raw16<dtype> raw[flight];
#pragma unroll
            for (int j = 0; j < flight; j++) {
                const int mine = at + j * FP8_WIDE_STEP + lane_id() * 16;
                const char *from = x + (size_t)mine * element_bytes<dtype>();
                raw[j].low.a = raw[j].low.b = raw[j].high.a = raw[j].high.b = make_uint4(0, 0, 0, 0);
                if (mine < end) {
                    raw[j].low = raw_load<dtype>(from);
                    raw[j].high = raw_load<dtype>(from + 8 * element_bytes<dtype>());
                }
            }
#pragma unroll
            for (int j = 0; j < flight; j++) {
                const int step = at + j * FP8_WIDE_STEP;
                if (step < end)
                    fp8_wide_step<dtype, targets>(own, to, count, raw[j], power_of_two, step, end,
                                                  (step - part) / FP8_BLOCK, &held);
            }
        }
        fp8_put_scales(scales, count, ue8m0, held, part / FP8_BLOCK / (ue8m0 ? 4 : 1),
                       (end - part + FP8_BLOCK - 1) / FP8_BLOCK);
    }
}

/* ---- To one ----------------------------------------------------------------------------------------------------- */

template <int dtype, int flight>
KFN void fp8_row_one(void *q, void *scales, int ue8m0, int power_of_two, const void *x, int hidden)
{
    struct word_set words;

    if (!aligned16(q) || !aligned16(x) || hidden % 16) {
        fp8_row<dtype>((uint8_t *)q, scales, ue8m0, power_of_two, (const char *)x, hidden);
        return;
    }
    words.to = (char *)scales;
    words.stride = 4;
    words.place = -1;
    fp8_row_many<dtype, flight, 1>((char *)q, words, 1, ue8m0, power_of_two, (const char *)x, hidden);
}

KFN void ag_cast_fp8(struct agent *ag, void *q, void *scales, int ue8m0, int round_scale, const void *x, int dtype,
                     int hidden)
{
    const int power_of_two = round_scale || ue8m0;

    (void)ag;
    if (dtype == DTYPE_BF16)
        fp8_row_one<DTYPE_BF16, FP8_WIDE_FLIGHT>(q, scales, ue8m0, power_of_two, x, hidden);
    else if (dtype == DTYPE_FP16)
        fp8_row_one<DTYPE_FP16, FP8_WIDE_FLIGHT>(q, scales, ue8m0, power_of_two, x, hidden);
    else
        fp8_row_one<DTYPE_FP32, 1>(q, scales, ue8m0, power_of_two, x, hidden);
}

KFN_STEP void ag_cast_fp8_many(struct agent *ag, const struct copy_set *set, const struct word_set *words, int n,
                               char *scratch, int ue8m0, int round_scale, const void *x, int dtype, int channels)
{
    const int power_of_two = round_scale || ue8m0;
    const int odd = (lane_id() < n && !aligned16(set->to)) || !aligned16(x) || channels % 16;

    if (__any_sync(ALL_LANES, odd)) {
        const int blocks = (channels + FP8_BLOCK - 1) / FP8_BLOCK;
        char *scales = scratch + (((size_t)channels + 15) & ~(size_t)15);
        ag_cast_fp8(ag, scratch, scales, ue8m0, round_scale, x, dtype, channels);
        __syncwarp();
        ag_copy_many(ag, set, n, scratch, (size_t)channels);
        ag_copy_words(ag, words, n, scales, 4, ue8m0 ? (blocks + 3) / 4 : blocks);
        __syncwarp();
    } else if (dtype == DTYPE_BF16) {
        fp8_row_many<DTYPE_BF16, FP8_WIDE_FLIGHT, FP8_TARGETS>(set->to, *words, n, ue8m0, power_of_two, (const char *)x,
                                                               channels);
    } else if (dtype == DTYPE_FP16) {
        fp8_row_many<DTYPE_FP16, FP8_WIDE_FLIGHT, FP8_TARGETS>(set->to, *words, n, ue8m0, power_of_two, (const char *)x,
                                                               channels);
    } else {
        fp8_row_many<DTYPE_FP32, 1, FP8_TARGETS>(set->to, *words, n, ue8m0, power_of_two, (const char *)x, channels);
    }
}

#endif
