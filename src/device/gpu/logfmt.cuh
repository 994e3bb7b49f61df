/* SPDX-License-Identifier: Apache-2.0 */
/*
 * LogFMT-10 rows by a warp; docs/formats.md has the bytes. As in fp8.cuh sixteen lanes hold a block of 128 channels,
 * eight each. The arithmetic is that of device/cpu/math_logfmt.h, operation by operation.
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
#define LOGFMT_BATCH 4            /* steps whose loads are in flight together */
#define LOGFMT_BATCH_BLOCKS (LOGFMT_BATCH * LOGFMT_GROUPS)

/* log2 of a number in [sqrt(1/2), sqrt(2)). */
KFN float logfmt_log2_near_one(float x)
{
    const float t = __fadd_rn(x, -1.0f);
    const float t2 = __fmul_rn(t, t);
    const float p01 = __fsub_rn(1.44269652f, __fmul_rn(t, 0.72136018f));
    const float p23 = __fsub_rn(0.48061313f, __fmul_rn(t, 0.35952446f));
    const float p46 = __fadd_rn(__fsub_rn(0.29611956f, __fmul_rn(t, 0.26796387f)), __fmul_rn(t2, 0.16818659f));
    const float p = __fadd_rn(__fadd_rn(p01, __fmul_rn(p23, t2)), __fmul_rn(p46, __fmul_rn(t2, t2)));
    return __fmul_rn(p, t);
}

KFN float logfmt_log2(float x)
{
    const uint32_t bits = __float_as_uint(__fmul_rn(x, 18446744073709551616.0f));
    const int32_t exponent = (int32_t)(bits - 0x3f3504f3u) >> 23;
    const float whole = __fsub_rn(__uint_as_float((uint32_t)exponent + LOGFMT_MAGIC_BITS), LOGFMT_MAGIC + 64.0f);
    return __fadd_rn(whole, logfmt_log2_near_one(__uint_as_float(bits - ((uint32_t)exponent << 23))));
}

/*
 * The same of a bf16 magnitude, which has 128 mantissas: `logs` has logfmt_log2_near_one() of each, in shared memory. A
 * subnormal or 0 gives about -127 instead of its logarithm: see logfmt_table_serves(). `bits` has the magnitude in its
 * upper half, and anything in its lower half: no mantissa lies between 0x3f350000 and 0x3f360000.
 */
KFN float logfmt_log2_bf16(const float *logs, uint32_t bits)
{
    const int32_t exponent = (int32_t)(bits - 0x3f360000u) >> 23;
    const float whole = __fsub_rn(__uint_as_float((uint32_t)exponent + LOGFMT_MAGIC_BITS), LOGFMT_MAGIC);
    return __fadd_rn(whole, logs[bits >> 16 & 127]);
}

/* Does a block with these extremes get the same codes from the table? Its subnormals get code 0 either way if they are
 * below the range, which ends 32 powers of two below amax where amin is subnormal. */
KFN int logfmt_table_serves(uint32_t amax, uint32_t amin)
{
    return amin >= 0x0080u || amax >= 67u << 7; /* 2^-60 */
}

/* All agents of the block, before ag_logfmt_encode(). */
KFN void ag_logfmt_begin(struct agent *ag)
{
    AG_EACH_BLOCK(ag, int, i, 128)
    {
        const uint32_t one = 0x3f800000u | (uint32_t)i << 16;
        ((float *)ag->counts)[i] = logfmt_log2_near_one(__uint_as_float(one >= 0x3fb60000u ? one - (1u << 23) : one));
    }
    ag_block_any(ag, 0);
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

struct logfmt_coder {
    float log_amin, per_step, offset;
};

KFN struct logfmt_coder logfmt_coder_of(uint32_t amax, uint32_t amin)
{
    const struct logfmt_range r = logfmt_range_of(amax, amin);
    struct logfmt_coder c;

    c.log_amin = r.log_amin;
    c.per_step = __fdiv_rn(1.0f, r.step);
    c.offset = __fsub_rn(1.5f, __fmul_rn(r.step, 0.08664340f));
    return c;
}

/* The code of a logarithm, 0 to 511, in the lower bits; the rest is not zero. Adding the magic number, rounded down,
 * is what the conversion to int does for numbers that are not negative. */
KFN uint32_t logfmt_code(const struct logfmt_coder &c, float log)
{
    const float code = __fadd_rn(__fmul_rn(__fsub_rn(log, c.log_amin), c.per_step), c.offset);
    return __float_as_uint(add_magic_down(fminf(fmaxf(code, 0.0f), (float)LOGFMT_TOP_CODE), LOGFMT_MAGIC));
}

/* Lane p of sixteen has row p of a matrix of 16 x 16 bits; it gets column p. */
KFN uint32_t logfmt_transpose(uint32_t v)
{
    const uint32_t keep[4] = {0x5555u, 0x3333u, 0x0f0fu, 0x00ffu};

#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int d = 1 << i;
        const uint32_t other = __shfl_xor_sync(ALL_LANES, v, d);
        v = lane_id() & d ? (v & ~keep[i]) | (other >> d & keep[i]) : (v & keep[i]) | (other << d & ~keep[i]);
    }
    return v & 0xffffu;
}

/* A word with bits at 0 and 16: next to each other at `place`. */
KFN uint32_t logfmt_pair_bits(uint32_t w, int place)
{
    return ((w | w >> 15) & 3u) << place;
}

/* One coded block, by sixteen lanes; words are the lane's eight bf16. By the polynomial instead of the table: exact. */
template <int exact>
KFN void logfmt_encode_block(char *to, uint4 words, const struct logfmt_coder &c, const float *logs, int coded)
{
    const uint32_t w[4] = {words.x, words.y, words.z, words.w};
    const int place = lane_id() % 16;
    uint32_t pair[4], bits = 0;

#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t magnitudes = w[i] & 0x7fff7fffu, low = magnitudes << 16;
        const uint32_t a = logfmt_code(c, exact ? logfmt_log2(__uint_as_float(low)) : logfmt_log2_bf16(logs, low));
        const uint32_t b = logfmt_code(c, exact ? logfmt_log2(__uint_as_float(magnitudes & 0xffff0000u))
                                                : logfmt_log2_bf16(logs, magnitudes));
        pair[i] = (a & 0x1ffu) | b << 16;
        bits |= logfmt_pair_bits(pair[i] >> 8 & 0x10001u, 2 * i) | logfmt_pair_bits(w[i] >> 15 & 0x10001u, 2 * i) << 8;
    }
    bits = logfmt_transpose(bits); /* lane i of sixteen has word i of the ninth bits, lane 8 + i that of the signs */
    if (!coded)
        return;
    *(uint2 *)(to + place * 8) =
        make_uint2(__byte_perm(pair[0], pair[1], 0x6420), __byte_perm(pair[2], pair[3], 0x6420));
    ((uint16_t *)(to + LOGFMT_BLOCK))[place] = (uint16_t)bits;
}

/* Rare, and not in the way of the other. */
KFN_STEP void logfmt_encode_exact(char *to, uint4 words, struct logfmt_coder c, int coded)
{
    logfmt_encode_block<1>(to, words, c, NULL, coded);
}

/* Largest magnitude of the lane's block in the lower half, 0x7fff less the smallest in the upper half. */
KFN uint32_t logfmt_extremes(uint4 words)
{
    const uint32_t w[4] = {words.x & 0x7fff7fffu, words.y & 0x7fff7fffu, words.z & 0x7fff7fffu, words.w & 0x7fff7fffu};
    uint32_t max = 0, less = 0;

#pragma unroll
    for (int i = 0; i < 4; i++) {
        max = max_u16x2(max, w[i]);
        less = max_u16x2(less, 0x7fff7fffu - w[i]);
    }
    uint32_t both = max_u16x2((max & 0xffffu) | less << 16, max >> 16 | (less & 0xffff0000u));
    for (int d = 8; d; d /= 2)
        both = max_u16x2(both, __shfl_xor_sync(ALL_LANES, both, d));
    return both;
}

/* The lane's eight channels of step j, zeros past the row's end. */
KFN uint4 logfmt_load8(const void *x, int hidden, int channel)
{
    const char *from = (const char *)x + (size_t)channel * 2;
    const int n = hidden - channel;

    if (n <= 0)
        return make_uint4(0, 0, 0, 0);
    return aligned16(x) && n >= 8 ? vec_load(from) : raw_load_odd<DTYPE_BF16>(from, n).a;
}

/* Where the blocks of a batch begin, and which are coded: bit q of `votes` for its block q. */
struct logfmt_batch {
    char *at;
    lanes_t votes;
};

KFN char *logfmt_block_at(const struct logfmt_batch &batch, int q)
{
    const int coded = lanes_count(batch.votes & (((lanes_t)1 << q) - 1));
    return batch.at + coded * LOGFMT_CODED_BYTES + (q - coded) * LOGFMT_RAW_BYTES;
}

KFN_STEP size_t logfmt_encode_row(void *to, const void *x, int hidden, const float *logs)
{
    char *row = (char *)to;
    const int blocks = logfmt_blocks(hidden), group = lane_id() / 16;
    struct logfmt_batch batch = {row + logfmt_payload(hidden), 0};
    uint32_t bitmap = 0;

    for (int b = 0; b < blocks; b += LOGFMT_BATCH_BLOCKS) {
        uint4 words[LOGFMT_BATCH];
        uint32_t extremes = 0; /* of the batch's block `lane` */
#pragma unroll
        for (int j = 0; j < LOGFMT_BATCH; j++)
            words[j] = logfmt_load8(x, hidden, (b + j * LOGFMT_GROUPS) * LOGFMT_BLOCK + lane_id() * 8);
#pragma unroll
        for (int j = 0; j < LOGFMT_BATCH; j++) {
            const uint32_t both = __shfl_sync(ALL_LANES, logfmt_extremes(words[j]), lane_id() % LOGFMT_GROUPS * 16);
            if (lane_id() / LOGFMT_GROUPS == j)
                extremes = both;
        }
        /* The first lanes decide about one block each. */
        const int mine = b + lane_id(), here = lane_id() < LOGFMT_BATCH_BLOCKS && mine < blocks;
        const uint32_t amax = extremes & 0xffffu, amin = 0x7fffu - (extremes >> 16);
        const int full = (mine + 1) * LOGFMT_BLOCK <= hidden;
        const int coded = here && full && amax < BF16_ONE && amin < amax;
        const struct logfmt_coder coder = logfmt_coder_of(amax, amin);
        const int exact = __any_sync(ALL_LANES, coded && !logfmt_table_serves(amax, amin));
        batch.votes = __ballot_sync(ALL_LANES, coded);
        if (here)
            *(uint32_t *)(row + logfmt_table(hidden) + (size_t)mine * 4) = coded ? amax | amin << 16 : 0;
        /* Not unrolled: the code of a step fits the cache of instructions. The words move up by one step. */
        ROLLED
        for (int j = 0; j < LOGFMT_BATCH; j++) {
            const int q = j * LOGFMT_GROUPS + group, is_coded = (int)(batch.votes >> q & 1);
            char *at = logfmt_block_at(batch, q);
            struct logfmt_coder c;
            c.log_amin = __shfl_sync(ALL_LANES, coder.log_amin, q);
            c.per_step = __shfl_sync(ALL_LANES, coder.per_step, q);
            c.offset = __shfl_sync(ALL_LANES, coder.offset, q);
            if (exact)
                logfmt_encode_exact(at, words[0], c, is_coded);
            else
                logfmt_encode_block<0>(at, words[0], c, logs, is_coded);
            if (!is_coded && (b + j * LOGFMT_GROUPS) * LOGFMT_BLOCK + lane_id() * 8 < hidden)
                vec_store(at + lane_id() % 16 * 16, words[0]); /* zeros behind the last element: the row's padding */
#pragma unroll
            for (int i = 0; i + 1 < LOGFMT_BATCH; i++)
                words[i] = words[i + 1];
        }
        bitmap |= (uint32_t)batch.votes << b % 32;
        if ((b + LOGFMT_BATCH_BLOCKS) % 32 == 0 || b + LOGFMT_BATCH_BLOCKS >= blocks) {
            if (lane_id() == 0)
                *(uint32_t *)(row + b / 32 * 4) = bitmap;
            bitmap = 0;
        }
        const int rest = blocks - b;
        batch.at = logfmt_block_at(batch, rest < LOGFMT_BATCH_BLOCKS ? rest : LOGFMT_BATCH_BLOCKS);
    }
    /* The short last block is raw and counted as a full one. */
    size_t at = (size_t)(batch.at - row);
    if (hidden % LOGFMT_BLOCK)
        at -= (size_t)(LOGFMT_BLOCK - hidden % LOGFMT_BLOCK) * 2;
    const size_t end = (at + 15) & ~(size_t)15, table_end = logfmt_table(hidden) + (size_t)blocks * 4;
    for (size_t i = table_end + (size_t)lane_id() * 4; i < logfmt_payload(hidden); i += WARP * 4)
        *(uint32_t *)(row + i) = 0;
    return end;
}

KFN size_t ag_logfmt_encode(struct agent *ag, void *to, const void *x, int hidden)
{
    return logfmt_encode_row(to, x, hidden, (const float *)ag->counts);
}

/* ---- Decode ----------------------------------------------------------------------------------------------------- */

/* What a lane loads of a block: coded, its eight low bytes and all ninth bits and signs; raw, its eight bf16. */
struct logfmt_raw {
    uint2 low;
    uint4 ninth, sign;
};

KFN struct logfmt_raw logfmt_load(const char *block, int coded, int n)
{
    const int place = lane_id() % 16;
    struct logfmt_raw raw;

    raw.low = make_uint2(0, 0);
    raw.ninth = raw.sign = make_uint4(0, 0, 0, 0);
    if (n <= 0)
        return raw;
    if (coded) {
        raw.low = *(const uint2 *)(block + place * 8);
        raw.ninth = *(const uint4 *)(block + LOGFMT_BLOCK);
        raw.sign = *(const uint4 *)(block + LOGFMT_BLOCK + 16);
    } else if (n >= 8) {
        raw.ninth = vec_load(block + place * 16);
    } else {
        raw.ninth = raw_load_odd<DTYPE_BF16>(block + place * 16, n).a;
    }
    return raw;
}

KFN struct float8 logfmt_values(const struct logfmt_raw &raw, struct logfmt_range r)
{
    const int place = lane_id() % 16;
    const uint32_t ninth[4] = {raw.ninth.x >> place, raw.ninth.y >> place, raw.ninth.z >> place, raw.ninth.w >> place};
    const uint32_t sign[4] = {raw.sign.x >> place, raw.sign.y >> place, raw.sign.z >> place, raw.sign.w >> place};
    struct float8 f;

#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint32_t byte = __byte_perm(i < 4 ? raw.low.x : raw.low.y, LOGFMT_MAGIC_BITS, 0x7640u + (uint32_t)i % 4);
        /* The bit of an even channel is at 0, that of an odd one at 16. */
        const uint32_t count = byte | ((i % 2 ? ninth[i / 2] >> 8 : ninth[i / 2] << 8) & 0x100u);
        const uint32_t negative = (i % 2 ? sign[i / 2] << 15 : sign[i / 2] << 31) & 0x80000000u;
        const float steps = __fsub_rn(__uint_as_float(count), LOGFMT_MAGIC + 1.0f);
        const float value = logfmt_exp2(__fadd_rn(__fmul_rn(steps, r.step), r.log_amin));
        f.v[i] = __uint_as_float((count != LOGFMT_MAGIC_BITS ? __float_as_uint(value) : 0) | negative);
    }
    return f;
}

KFN struct float8 logfmt_floats(const struct logfmt_raw &raw, struct logfmt_range r, int coded)
{
    const struct raw8<DTYPE_BF16> plain = {
        raw.ninth, raw.sign
    };

    return coded ? logfmt_values(raw, r) : raw_floats<DTYPE_BF16>(plain);
}

#endif
