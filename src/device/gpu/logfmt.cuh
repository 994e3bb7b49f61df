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
#define LOGFMT_LOGS 256           /* entries of the table for logfmt_log2_bf16x2() */
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
 * The same of two bf16 magnitudes in one word: `logs` has logfmt_log2_near_one() of the 128 mantissas, twice, in shared
 * memory: a byte of the word is the index. A subnormal or 0 gives about -127 instead of its logarithm: see
 * logfmt_table_serves(). With bit 15 of each half set, the difference does not borrow from the other half, and the
 * exponents are larger by 256.
 */
struct logfmt_logs {
    float low, high;
};

KFN struct logfmt_logs logfmt_log2_bf16x2(const float *logs, uint32_t w)
{
    const uint32_t exponents = (w | 0x80008000u) - 0x3f363f36u;
    const float low = __uint_as_float((exponents >> 7 & 0x1ffu) | LOGFMT_MAGIC_BITS);
    const float high = __uint_as_float((exponents >> 23) + LOGFMT_MAGIC_BITS);
    struct logfmt_logs l;

    l.low = __fadd_rn(__fsub_rn(low, LOGFMT_MAGIC + 256.0f), logs[w & 0xffu]);
    l.high = __fadd_rn(__fsub_rn(high, LOGFMT_MAGIC + 256.0f), logs[__byte_perm(w, 0, 0x4442)]);
    return l;
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
    AG_EACH_BLOCK(ag, int, i, LOGFMT_LOGS)
    {
        const uint32_t one = 0x3f800000u | ((uint32_t)i & 127u) << 16;
        ((float *)ag->counts)[i] = logfmt_log2_near_one(__uint_as_float(one >= 0x3fb60000u ? one - (1u << 23) : one));
    }
    ag_block_any(ag, 0);
}

/* 2^f for -1/2 <= f <= 1/2. */
KFN float logfmt_exp2_near_zero(float f)
{
    const float f2 = __fmul_rn(f, f);
    const float p01 = __fadd_rn(1.00000008f, __fmul_rn(f, 0.69314719f));
    const float p23 = __fadd_rn(0.24022107f, __fmul_rn(f, 0.055503571f));
    const float p45 = __fadd_rn(0.0096760319f, __fmul_rn(f, 0.0013390863f));
    return __fadd_rn(__fadd_rn(p01, __fmul_rn(p23, f2)), __fmul_rn(p45, __fmul_rn(f2, f2)));
}

KFN float logfmt_exp2(float y)
{
    const float shifted = __fadd_rn(y, LOGFMT_MAGIC); /* the nearest integer, in the lowest bits */
    const float p = logfmt_exp2_near_zero(__fsub_rn(y, __fsub_rn(shifted, LOGFMT_MAGIC)));
    const float power = __uint_as_float((__float_as_uint(shifted) + (127u + 64u)) << 23);
    return __fmul_rn(__fmul_rn(p, power), 1.0f / 18446744073709551616.0f);
}

/* The same where the result is not subnormal: the integer goes straight to the exponent. */
KFN float logfmt_exp2_normal(float y)
{
    const float shifted = __fadd_rn(y, LOGFMT_MAGIC);
    const float p = logfmt_exp2_near_zero(__fsub_rn(y, __fsub_rn(shifted, LOGFMT_MAGIC)));
    return __uint_as_float(__float_as_uint(p) + (__float_as_uint(shifted) << 23));
}

struct logfmt_range {
    float log_amin, step;
    int plain; /* a block with this range is coded, none of its codes is 0, and no decoded value subnormal */
};

/* x / 510, rounded once: the quotient by the reciprocal, and what it lacks. For 2^-20 < x < 2^20. */
KFN float logfmt_step(float x)
{
    const float reciprocal = 1.0f / (LOGFMT_TOP_CODE - 1), q = __fmul_rn(x, reciprocal);
    return __fmaf_rn(__fmaf_rn(q, -(float)(LOGFMT_TOP_CODE - 1), x), reciprocal, q);
}

/* amax and amin as bf16 bits. Codes are 0 only below the range, which ends at amin or above it. */
KFN struct logfmt_range logfmt_range_of(uint32_t amax, uint32_t amin)
{
    const float top = logfmt_log2(__uint_as_float(amax << 16)), low = logfmt_log2(__uint_as_float(amin << 16));
    const float least = __fsub_rn(top, LOGFMT_RANGE);
    struct logfmt_range r;

    r.log_amin = fmaxf(low, least);
    r.step = logfmt_step(__fsub_rn(top, r.log_amin));
    r.plain = low >= least && low > -120.0f;
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
    c.per_step = __frcp_rn(r.step);
    c.offset = __fsub_rn(1.5f, __fmul_rn(r.step, 0.08664340f));
    return c;
}

/* The code of a logarithm in the lower 16 bits, not larger than 511, negative below the range; the rest is not zero.
 * Adding the magic number, rounded down, is what the conversion to int does for numbers that are not negative. */
KFN uint32_t logfmt_code(const struct logfmt_coder &c, float log)
{
    const float code = __fadd_rn(__fmul_rn(__fsub_rn(log, c.log_amin), c.per_step), c.offset);
    return __float_as_uint(add_magic_down(code, LOGFMT_MAGIC));
}

/* Lane p of sixteen has row p of two matrices of 16 x 16 bits, one in each half of v; it gets column p of both. What
 * a shift takes across the middle is masked. */
KFN uint32_t logfmt_transpose(uint32_t v)
{
    const uint32_t keep[4] = {0x55555555u, 0x33333333u, 0x0f0f0f0fu, 0x00ff00ffu};

#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int d = 1 << i, upper = lane_id() & d;
        const uint32_t own = upper ? ~keep[i] : keep[i], other = __shfl_xor_sync(ALL_LANES, v, d);
        v = (v & own) | (rotate_left(other, upper ? 32 - d : d) & ~own);
    }
    return v;
}

/*
 * The bits of a lane's eight channels that do not go to its bytes, in the order in which they are cheapest: those of
 * channels 0, 2, 4, 6 and then 1, 3, 5, 7, ninth bits first, then signs. The word of sixteen lanes' bits that is number
 * i in this order is number logfmt_word(i) of the block.
 */
KFN int logfmt_word(int i)
{
    return (i & 8) | (i << 1 & 6) | (i >> 2 & 1);
}

struct logfmt_coded {
    uint2 low;     /* eight bytes */
    uint32_t bits; /* sixteen */
};

/* A lane's eight bf16 of a block. By the polynomial instead of the table: exact. */
template <int exact>
KFN struct logfmt_coded logfmt_encode8(uint4 words, const struct logfmt_coder &c, const float *logs)
{
    const uint32_t w[4] = {words.x, words.y, words.z, words.w};
    uint32_t pair[4], bits = 0;
    struct logfmt_coded coded;

#pragma unroll
    for (int i = 0; i < 4; i++) {
        struct logfmt_logs l;
        if (exact) {
            l.low = logfmt_log2(__uint_as_float(w[i] << 16 & 0x7fff0000u));
            l.high = logfmt_log2(__uint_as_float(w[i] & 0x7fff0000u));
        } else {
            l = logfmt_log2_bf16x2(logs, w[i]);
        }
        pair[i] = max_s16x2(__byte_perm(logfmt_code(c, l.low), logfmt_code(c, l.high), 0x5410), 0);
        bits |= (pair[i] >> (8 - i) & 0x00010001u << i) | (w[i] >> (7 - i) & 0x01000100u << i);
    }
    coded.low = make_uint2(__byte_perm(pair[0], pair[1], 0x6420), __byte_perm(pair[2], pair[3], 0x6420));
    coded.bits = bits | bits >> 12;
    return coded;
}

/* Rare, and not in the way of the other. */
KFN_STEP struct logfmt_coded logfmt_encode8_exact(uint4 words, struct logfmt_coder c)
{
    return logfmt_encode8<1>(words, c, NULL);
}

/* A block by sixteen lanes, but for its ninth bits and signs: they are `word`s of logfmt_store_word(). */
KFN void logfmt_store_low(char *to, uint2 low, uint4 words, int coded, int inside)
{
    if (coded)
        *(uint2 *)(to + lane_id() % 16 * 8) = low;
    else if (inside)
        vec_store(to + lane_id() % 16 * 16, words); /* zeros behind the last element: the row's padding */
}

KFN void logfmt_store_word(char *to, uint32_t word, int coded)
{
    if (coded)
        ((uint16_t *)(to + LOGFMT_BLOCK))[logfmt_word(lane_id() % 16)] = (uint16_t)word;
}

/* Largest magnitude of the lane's block in the lower half, 0x7fff less the smallest in the upper half. */
KFN uint32_t logfmt_extremes(uint4 words)
{
    const uint32_t w[4] = {words.x, words.y, words.z, words.w};
    uint32_t max = w[0] & 0x7fff7fffu, less = ~w[0] & 0x7fff7fffu;

#pragma unroll
    for (int i = 1; i < 4; i++) {
        max = max_u16x2(max, w[i] & 0x7fff7fffu);
        less = max_u16x2(less, ~w[i] & 0x7fff7fffu);
    }
    uint32_t both = max_u16x2(__byte_perm(max, less, 0x5410), __byte_perm(max, less, 0x7632));
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

/* That of the batch's block q, which lane q has computed. */
KFN struct logfmt_coder logfmt_coder_from(const struct logfmt_coder &own, int q)
{
    struct logfmt_coder c;

    c.log_amin = __shfl_sync(ALL_LANES, own.log_amin, q);
    c.per_step = __shfl_sync(ALL_LANES, own.per_step, q);
    c.offset = __shfl_sync(ALL_LANES, own.offset, q);
    return c;
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
        /* Two steps at a time, not unrolled: the code fits the cache of instructions. The words move up. */
        ROLLED
        for (int j = 0; j < LOGFMT_BATCH; j += 2) {
            const int q = j * LOGFMT_GROUPS + group, channel = b * LOGFMT_BLOCK + (j * WARP + lane_id()) * 8;
            const int first_coded = (int)(batch.votes >> q & 1);
            const int second_coded = (int)(batch.votes >> (q + LOGFMT_GROUPS) & 1);
            char *first_at = logfmt_block_at(batch, q), *second_at = logfmt_block_at(batch, q + LOGFMT_GROUPS);
            const struct logfmt_coder first_coder = logfmt_coder_from(coder, q);
            const struct logfmt_coder second_coder = logfmt_coder_from(coder, q + LOGFMT_GROUPS);
            struct logfmt_coded first, second;
            if (exact) {
                first = logfmt_encode8_exact(words[0], first_coder);
                second = logfmt_encode8_exact(words[1], second_coder);
            } else {
                first = logfmt_encode8<0>(words[0], first_coder, logs);
                second = logfmt_encode8<0>(words[1], second_coder, logs);
            }
            const uint32_t bits = logfmt_transpose(__byte_perm(first.bits, second.bits, 0x5410));
            logfmt_store_low(first_at, first.low, words[0], first_coded, channel < hidden);
            logfmt_store_low(second_at, second.low, words[1], second_coded, channel + WARP * 8 < hidden);
            logfmt_store_word(first_at, bits, first_coded);
            logfmt_store_word(second_at, bits >> 16, second_coded);
#pragma unroll
            for (int i = 0; i + 2 < LOGFMT_BATCH; i++)
                words[i] = words[i + 2];
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

/* What a lane loads of a block: coded, its eight low bytes and one of the words of ninth bits and signs; raw, the first
 * half of its eight bf16. */
struct logfmt_raw {
    uint2 low;
    uint32_t word;
};

KFN struct logfmt_raw logfmt_load(const char *block, int coded, int n)
{
    const int place = lane_id() % 16;
    struct logfmt_raw raw = {{0, 0}, 0};

    if (n >= 8)
        raw.low = *(const uint2 *)(block + place * (coded ? 8 : 16));
    if (coded && n > 0)
        raw.word = ((const uint16_t *)(block + LOGFMT_BLOCK))[logfmt_word(place)];
    return raw;
}

/* `bits` has the bits of channels 0, 2, 4, 6 in its lower and those of 1, 3, 5, 7 in its upper half: ninth bits from
 * bit 0 on, signs from bit 8 on. */
template <int plain> KFN struct float8 logfmt_values(uint2 low, uint32_t bits, const struct logfmt_range &r)
{
    struct float8 f;

#pragma unroll
    for (int i = 0; i < 8; i++) {
        /* The bytes of the magic number, and between them the ninth bits of channels i and i + 1. */
        const uint32_t ninth = (bits << (8 - i / 2) & 0x01000100u) | 0x004b0040u;
        const uint32_t count = __byte_perm(i < 4 ? low.x : low.y, ninth, (i % 2 ? 0x6470u : 0x6450u) + (uint32_t)i % 4);
        const uint32_t negative = bits << (i % 2 ? 7 - i / 2 : 23 - i / 2) & 0x80000000u;
        const float steps = __fsub_rn(__uint_as_float(count), LOGFMT_MAGIC + 1.0f);
        const float y = __fadd_rn(__fmul_rn(steps, r.step), r.log_amin);
        const uint32_t value = __float_as_uint(plain ? logfmt_exp2_normal(y) : logfmt_exp2(y));
        f.v[i] = __uint_as_float((plain || count != LOGFMT_MAGIC_BITS ? value : 0) | negative);
    }
    return f;
}

/* Row `half` of two whose transposed words are in `bits`. */
KFN uint32_t logfmt_bits_of(uint32_t bits, int half)
{
    return half ? __byte_perm(bits, bits >> 4, 0x7632) : __byte_perm(bits, bits << 12, 0x7610);
}

/* A block that is not coded: n of the lane's channels. `low` is its first half if it has all eight. */
KFN struct float8 logfmt_uncoded(const char *block, uint2 low, int n)
{
    const char *mine = block + lane_id() % 16 * 16;
    struct raw8<DTYPE_BF16> raw = {
        {0, 0, 0, 0},
        {
            0, 0, 0, 0
        }
    };

    if (n >= 8) {
        const uint2 high = *(const uint2 *)(mine + 8);
        raw.a = make_uint4(low.x, low.y, high.x, high.y);
    } else if (n > 0) {
        raw = raw_load_odd<DTYPE_BF16>(mine, n);
    }
    return raw_floats<DTYPE_BF16>(raw);
}

#endif
