/* SPDX-License-Identifier: Apache-2.0 */
/*
 * LogFMT-10 rows by a warp; docs/formats.md has the bytes. As in fp8.cuh sixteen lanes hold a block of 128 channels,
 * eight each. The arithmetic is that of device/cpu/math_logfmt.c, operation by operation.
 */
#ifndef EPX_DEVICE_GPU_LOGFMT_CUH
#define EPX_DEVICE_GPU_LOGFMT_CUH

#define LOGFMT_BLOCK 128
#define LOGFMT_RAW_BYTES 256
#define LOGFMT_CODED_BYTES 160
#define LOGFMT_TOP_CODE 511
#define LOGFMT_RANGE 32.0f
#define LOGFMT_MAGIC 12582912.0f /* 1.5 * 2^23 */
#define LOGFMT_MAGIC_BITS 0x4b400000u
#define BF16_ONE 0x3f80u
#define LOGFMT_GROUPS (WARP / 16) /* blocks of a step */

KFN float logfmt_log2(float x)
{
    const uint32_t bits = __float_as_uint(__fmul_rn(x, 18446744073709551616.0f));
    const int32_t exponent = (int32_t)(bits - 0x3f3504f3u) >> 23;
    const float t = __fadd_rn(__uint_as_float(bits - ((uint32_t)exponent << 23)), -1.0f);
    const float t2 = __fmul_rn(t, t);
    const float p01 = __fsub_rn(1.44269652f, __fmul_rn(t, 0.72136018f));
    const float p23 = __fsub_rn(0.48061313f, __fmul_rn(t, 0.35952446f));
    const float p46 = __fadd_rn(__fsub_rn(0.29611956f, __fmul_rn(t, 0.26796387f)), __fmul_rn(t2, 0.16818659f));
    const float p = __fadd_rn(__fadd_rn(p01, __fmul_rn(p23, t2)), __fmul_rn(p46, __fmul_rn(t2, t2)));
    const float whole = __fsub_rn(__uint_as_float((uint32_t)exponent + LOGFMT_MAGIC_BITS), LOGFMT_MAGIC + 64.0f);
    return __fadd_rn(whole, __fmul_rn(p, t));
}

KFN float logfmt_exp2(float y)
{
    const float shifted = __fadd_rn(y, LOGFMT_MAGIC);
    const float f = __fsub_rn(y, __fsub_rn(shifted, LOGFMT_MAGIC));
    const float f2 = __fmul_rn(f, f);
    const float p01 = __fadd_rn(1.00000008f, __fmul_rn(f, 0.69314719f));
    const float p23 = __fadd_rn(0.24022107f, __fmul_rn(f, 0.055503571f));
    const float p45 = __fadd_rn(0.0096760319f, __fmul_rn(f, 0.0013390863f));
    const float p = __fadd_rn(__fadd_rn(p01, __fmul_rn(p23, f2)), __fmul_rn(p45, __fmul_rn(f2, f2)));
    const float power = __uint_as_float((__float_as_uint(shifted) + (127u + 64u)) << 23);
    return __fmul_rn(__fmul_rn(p, power), 1.0f / 18446744073709551616.0f);
}

struct logfmt_range {
    float log_amin, step;
};

/* amax and amin as bf16 bits. */
KFN struct logfmt_range logfmt_range_of(uint32_t amax, uint32_t amin)
{
    const float top = logfmt_log2(__uint_as_float(amax << 16)), low = logfmt_log2(__uint_as_float(amin << 16));
    struct logfmt_range r;

    r.log_amin = fmaxf(low, __fsub_rn(top, LOGFMT_RANGE));
    r.step = __fdiv_rn(__fsub_rn(top, r.log_amin), (float)(LOGFMT_TOP_CODE - 1));
    return r;
}

KFN int logfmt_blocks(int hidden)
{
    return (hidden + LOGFMT_BLOCK - 1) / LOGFMT_BLOCK;
}

KFN size_t logfmt_table(int hidden)
{
    return (size_t)(logfmt_blocks(hidden) + 31) / 32 * 4;
}

KFN size_t logfmt_payload(int hidden)
{
    return (logfmt_table(hidden) + (size_t)logfmt_blocks(hidden) * 4 + 15) & ~(size_t)15;
}

/* ---- Encode ----------------------------------------------------------------------------------------------------- */

/* One coded block, by sixteen lanes; words are the lane's eight bf16. */
KFN void logfmt_encode_block(char *to, uint4 words, uint32_t amax, uint32_t amin, int coded)
{
    const uint32_t w[4] = {words.x, words.y, words.z, words.w};
    const struct logfmt_range r = logfmt_range_of(amax, amin);
    const float per_step = __fdiv_rn(1.0f, r.step);
    const float offset = __fsub_rn(1.5f, __fmul_rn(r.step, 0.08664340f));
    const int shift = lane_id() & ~15, place = lane_id() % 16;
    uint32_t low[2] = {0, 0}, mine = 0;

#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint32_t h = i % 2 ? w[i / 2] >> 16 : w[i / 2] & 0xffffu;
        const float log = logfmt_log2(__uint_as_float((h & 0x7fffu) << 16));
        int code = (int)__fadd_rn(__fmul_rn(__fsub_rn(log, r.log_amin), per_step), offset);
        code = code < 0 ? 0 : code > LOGFMT_TOP_CODE ? LOGFMT_TOP_CODE : code;
        low[i / 4] |= (uint32_t)(code & 0xff) << i % 4 * 8;
        /* Lane i of sixteen keeps word i of the ninth bits, lane 8 + i that of the signs. */
        const uint32_t ninth = (uint32_t)(__ballot_sync(ALL_LANES, code >> 8) >> shift) & 0xffffu;
        const uint32_t sign = (uint32_t)(__ballot_sync(ALL_LANES, h >> 15) >> shift) & 0xffffu;
        if (place == i)
            mine = ninth;
        if (place == i + 8)
            mine = sign;
    }
    if (!coded)
        return;
    *(uint2 *)(to + place * 8) = make_uint2(low[0], low[1]);
    ((uint16_t *)(to + LOGFMT_BLOCK))[place] = (uint16_t)mine;
}

/* Largest and smallest magnitude of the lane's block. */
KFN void logfmt_extremes(uint4 words, uint32_t *amax, uint32_t *amin)
{
    const uint32_t w[4] = {words.x & 0x7fff7fffu, words.y & 0x7fff7fffu, words.z & 0x7fff7fffu, words.w & 0x7fff7fffu};
    uint32_t max = 0, min = 0x7fffu;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        max = umax(max, umax(w[i] & 0xffffu, w[i] >> 16));
        min = umin(min, umin(w[i] & 0xffffu, w[i] >> 16));
    }
    for (int d = 8; d; d /= 2) {
        max = umax(max, __shfl_xor_sync(ALL_LANES, max, d));
        min = umin(min, __shfl_xor_sync(ALL_LANES, min, d));
    }
    *amax = max;
    *amin = min;
}

KFN_STEP size_t logfmt_encode_row(void *to, const void *x, int hidden)
{
    char *row = (char *)to;
    const int blocks = logfmt_blocks(hidden), group = lane_id() / 16;
    size_t at = logfmt_payload(hidden);
    uint32_t bitmap = 0;

    for (int b = 0; b < blocks; b += LOGFMT_GROUPS) {
        const int mine = b + group, channel = b * LOGFMT_BLOCK + lane_id() * 8, n = hidden - channel;
        const char *from = (const char *)x + (size_t)channel * 2;
        uint32_t amax, amin;
        uint4 words = make_uint4(0, 0, 0, 0);
        if (n > 0)
            words = aligned16(x) && n >= 8 ? vec_load(from) : raw_load_odd<DTYPE_BF16>(from, n).a;
        logfmt_extremes(words, &amax, &amin);
        const int full = (mine + 1) * LOGFMT_BLOCK <= hidden;
        const int coded = full && amax < BF16_ONE && amin < amax;
        const lanes_t votes = __ballot_sync(ALL_LANES, coded);
        size_t begin = at;
#pragma unroll
        for (int i = 0; i < LOGFMT_GROUPS; i++) {
            const uint32_t bit = (uint32_t)(votes >> i * 16) & 1;
            if (i == group)
                begin = at;
            bitmap |= bit << (b + i) % 32;
            if (b + i < blocks)
                at += bit ? LOGFMT_CODED_BYTES : LOGFMT_RAW_BYTES;
        }
        logfmt_encode_block(row + begin, words, amax, amin, coded);
        if (!coded && n > 0)
            vec_store(row + begin + lane_id() % 16 * 16, words); /* zeros behind the last element: the row's padding */
        if (lane_id() % 16 == 0 && mine < blocks)
            *(uint32_t *)(row + logfmt_table(hidden) + (size_t)mine * 4) = coded ? amax | amin << 16 : 0;
        if (b % 32 == 32 - LOGFMT_GROUPS || b + LOGFMT_GROUPS >= blocks) {
            if (lane_id() == 0)
                *(uint32_t *)(row + b / 32 * 4) = bitmap;
            bitmap = 0;
        }
    }
    /* The short last block is raw and counted as a full one. */
    if (hidden % LOGFMT_BLOCK)
        at -= (size_t)(LOGFMT_BLOCK - hidden % LOGFMT_BLOCK) * 2;
    const size_t end = (at + 15) & ~(size_t)15, table_end = logfmt_table(hidden) + (size_t)blocks * 4;
    for (size_t i = table_end + (size_t)lane_id() * 4; i < logfmt_payload(hidden); i += WARP * 4)
        *(uint32_t *)(row + i) = 0;
    return end;
}

KFN size_t ag_logfmt_encode(struct agent *ag, void *to, const void *x, int hidden)
{
    (void)ag;
    return logfmt_encode_row(to, x, hidden);
}

/* ---- Decode ----------------------------------------------------------------------------------------------------- */

/* The lane's eight channels from `channel` on; zeros past the row's end. */
KFN struct float8 logfmt_decode8(const char *row, int hidden, int channel)
{
    const int block = channel / LOGFMT_BLOCK, place = lane_id() % 16;
    const uint32_t *bitmap = (const uint32_t *)row;
    struct float8 f;
    int before = 0;

#pragma unroll
    for (int i = 0; i < 8; i++)
        f.v[i] = 0.0f;
    if (channel >= hidden)
        return f;
    for (int w = 0; w < block / 32; w++)
        before += __popc(bitmap[w]);
    const uint32_t word = bitmap[block / 32];
    before += __popc(word & ((1u << block % 32) - 1));
    const char *from = row + logfmt_payload(hidden) + (size_t)before * LOGFMT_CODED_BYTES +
                       (size_t)(block - before) * LOGFMT_RAW_BYTES;
    if (!(word >> block % 32 & 1)) {
        struct raw8<DTYPE_BF16> raw = hidden - channel >= 8
                                          ? raw_load<DTYPE_BF16>(from + place * 16)
                                          : raw_load_odd<DTYPE_BF16>(from + place * 16, hidden - channel);
        return raw_floats<DTYPE_BF16>(raw);
    }
    const uint32_t range = *(const uint32_t *)(row + logfmt_table(hidden) + (size_t)block * 4);
    const struct logfmt_range r = logfmt_range_of(range & 0xffffu, range >> 16);
    const uint2 low = *(const uint2 *)(from + place * 8);
    const uint4 ninth = *(const uint4 *)(from + LOGFMT_BLOCK), sign = *(const uint4 *)(from + LOGFMT_BLOCK + 16);
    const uint32_t n4[4] = {ninth.x, ninth.y, ninth.z, ninth.w}, s4[4] = {sign.x, sign.y, sign.z, sign.w};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint32_t byte = (i < 4 ? low.x : low.y) >> i % 4 * 8 & 0xffu;
        const uint32_t code = byte | (n4[i / 2] >> (i % 2 * 16 + place) & 1) << 8;
        const uint32_t negative = s4[i / 2] >> (i % 2 * 16 + place) & 1;
        const float count = __fsub_rn(__uint_as_float(code | LOGFMT_MAGIC_BITS), LOGFMT_MAGIC + 1.0f);
        const float value = logfmt_exp2(__fadd_rn(__fmul_rn(count, r.step), r.log_amin));
        f.v[i] = __uint_as_float((code ? __float_as_uint(value) : 0) | negative << 31);
    }
    return f;
}

#endif
