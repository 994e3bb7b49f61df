/* SPDX-License-Identifier: Apache-2.0 */
/*
 * LogFMT-10 rows by a warp; docs/formats.md has the bytes, util/logfmt.h the numbers. As in fp8.cuh sixteen lanes hold
 * a block of 128 channels, eight each. The bits are those of device/cpu/math_logfmt.h.
 *
 * Whole-number arithmetic runs at half the rate of multiply-adds: what can be done by a choice of bytes, or by one
 * operation on two 16-bit halves, is.
 */
#ifndef EPX_DEVICE_GPU_LOGFMT_CUH
#define EPX_DEVICE_GPU_LOGFMT_CUH

#include "util/logfmt.h"

#define LOGFMT_MAGIC 12582912.0f  /* 1.5 * 2^23 */
#define LOGFMT_GROUPS (WARP / 16) /* blocks of a step */
#define LOGFMT_BATCH 4            /* steps whose loads are in flight together */
#define LOGFMT_BATCH_BLOCKS (LOGFMT_BATCH * LOGFMT_GROUPS)

/* The bends as floats, a column for each lane: no two lanes of a warp want the same bank. Byte 1 of an entry's offset
 * is the mantissa, byte 0 is the lane's. */
static __shared__ float logfmt_columns[128 * 64];

/* All agents of the block, before ag_logfmt_encode(). */
KFN void ag_logfmt_begin(struct agent *ag)
{
    AG_EACH_BLOCK(ag, int, i, 128 * WARP)
    {
        logfmt_columns[i / WARP * 64 + i % WARP] = __fmul_rn((float)logfmt_bends[i / WARP], LOGFMT_UNIT);
    }
    ag_block_any(ag, 0);
}

/* Biased exponent and mantissa of a bf16 magnitude, as if there were no subnormal numbers. */
struct logfmt_parts {
    int exponent, mantissa;
};

KFN struct logfmt_parts logfmt_parts_of(uint32_t x)
{
    struct logfmt_parts parts = {(int)(x >> 7), (int)(x & 127u)};

    if (x < BF16_NORMAL) {
        const int bit = x ? 31 - __clz((int)x) : -LOGFMT_RANGE * 2; /* 0 is below every range */
        parts.exponent = bit - 6;
        parts.mantissa = x ? (int)(x << (7 - bit) & 127u) : 0;
    }
    return parts;
}

KFN int32_t logfmt_fraction(int mantissa)
{
    return (mantissa << (LOGFMT_FRACTION - 7)) + logfmt_bends[mantissa];
}

/* Logarithms of the codes, in units of 2^-25 from LOGFMT_BELOW below the exponent of amax. */
struct logfmt_range {
    uint32_t step, base; /* code c means base + c * step; the step is odd */
    int top, bottom;     /* exponents of amax, and of amin or the range's end */
    int lowest;          /* code of the smallest value: 0 if values may lie below the range */
};

/* amax and amin as bf16 bits. */
KFN struct logfmt_range logfmt_range_of(uint32_t amax, uint32_t amin)
{
    const struct logfmt_parts high = logfmt_parts_of(amax), low = logfmt_parts_of(amin);
    const int apart = high.exponent - low.exponent, powers = apart < LOGFMT_BELOW ? apart : LOGFMT_BELOW;
    const int32_t top = logfmt_fraction(high.mantissa);
    const int32_t all = powers * LOGFMT_ONE + top - logfmt_fraction(low.mantissa);
    const int clipped = all > LOGFMT_RANGE * LOGFMT_ONE;
    struct logfmt_range r;

    r.step = (uint32_t)(clipped ? LOGFMT_RANGE * LOGFMT_ONE : all) / (LOGFMT_TOP_CODE - 1) | 1;
    r.base = (uint32_t)(LOGFMT_BELOW * LOGFMT_ONE + top) - LOGFMT_TOP_CODE * r.step;
    r.top = high.exponent;
    r.bottom = high.exponent - (apart < LOGFMT_RANGE ? apart : LOGFMT_RANGE);
    r.lowest = !clipped;
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

/* What a lane keeps of its own in each step of a transposition, and by how much it turns what it gets. */
struct logfmt_turns {
    uint32_t own[4];
    int by[4];
};

KFN struct logfmt_turns logfmt_turns_of_lane(void)
{
    const uint32_t keep[4] = {0x55555555u, 0x33333333u, 0x0f0f0f0fu, 0x00ff00ffu};
    struct logfmt_turns t;

#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int d = 1 << i, upper = lane_id() & d;
        t.own[i] = opaque(upper ? ~keep[i] : keep[i]);
        t.by[i] = upper ? 32 - d : d;
    }
    return t;
}

/* Lane p of sixteen has row p of two matrices of 16 x 16 bits, one in each half of v; it gets column p of both. What
 * a shift takes across the middle is masked. */
KFN uint32_t logfmt_transpose(uint32_t v, const struct logfmt_turns &t)
{
#pragma unroll
    for (int i = 0; i < 4; i++)
        v = choose_bits(t.own[i], v, rotate_left(__shfl_xor_sync(ALL_LANES, v, 1 << i), t.by[i]));
    return v;
}

/* ---- Encode ----------------------------------------------------------------------------------------------------- */

struct logfmt_coder {
    float per_step, offset;
    uint32_t bottom, lowest; /* twice: one less than the least exponent, times 128; the lowest code */
};

KFN struct logfmt_coder logfmt_coder_of(uint32_t amax, uint32_t amin)
{
    const struct logfmt_range r = logfmt_range_of(amax, amin);
    const struct logfmt_parts high = logfmt_parts_of(amax);
    const int bottom = r.bottom - 1;
    const float step = (float)(int)r.step, bend = __fmul_rn((float)logfmt_bends[high.mantissa], LOGFMT_UNIT);
    const float top = __fmul_rn((float)((high.exponent - bottom) * 128 + high.mantissa), -1.0f / 128.0f);
    struct logfmt_coder c;

    c.per_step = __fmul_rn(__frcp_rn(step), (float)LOGFMT_ONE);
    c.offset = __fsub_rn(LOGFMT_TOP, __fmul_rn(__fmul_rn(step, LOGFMT_UNIT), LOGFMT_MIDDLE));
    c.offset = __fmaf_rn(-bend, c.per_step, __fmaf_rn(top, c.per_step, c.offset));
    c.bottom = (uint32_t)bottom << 7 & 0xffffu;
    c.bottom |= c.bottom << 16;
    c.lowest = r.lowest ? 0x00010001u : 0;
    return c;
}

/* Are the magnitudes of a block their logarithms but for the bends? Its subnormals and zeros get code 0 if they are
 * below the range. */
KFN int logfmt_straight(uint32_t amax, uint32_t amin)
{
    return amin >= BF16_NORMAL || amax >= 67u << 7; /* 2^-60 */
}

/* The code of a logarithm in the lower 16 bits, not larger than 511, negative below the range; the rest is not zero.
 * `log` without its bend. Adding the magic number, rounded down, is what the conversion to int does for numbers that
 * are not negative. */
KFN uint32_t logfmt_code(const struct logfmt_coder &c, float log, float bend)
{
    const float code = __fmaf_rn(bend, c.per_step, __fmaf_rn(log, c.per_step, c.offset));
    return __float_as_uint(add_magic_down(code, LOGFMT_MAGIC));
}

KFN float logfmt_bend(uint32_t offset)
{
    return *(const float *)((const char *)logfmt_columns + offset);
}

/* Codes of two bf16. With bit 15 of each half set, the difference does not carry into the other half, and its bits are
 * those of a float from 256 on; what is below the least exponent stays below it. */
KFN uint32_t logfmt_codes(const struct logfmt_coder &c, uint32_t w)
{
    const uint32_t logs = (w | 0x80008000u) - c.bottom, mantissas = w & 0x007f007fu, lane = (uint32_t)lane_id() * 4;
    const float low = __fadd_rn(__uint_as_float(__byte_perm(logs, 0x43, 0x4105)), -256.0f);
    const float high = __fadd_rn(__uint_as_float(__byte_perm(logs, 0x43, 0x4325)), -256.0f);
    const uint32_t first = logfmt_code(c, low, logfmt_bend(__byte_perm(mantissas, lane, 0x5504)));
    const uint32_t second = logfmt_code(c, high, logfmt_bend(__byte_perm(mantissas, lane, 0x5524)));

    return __byte_perm(first, second, 0x5410);
}

/* The same where the least exponent may be that of a subnormal number. */
KFN uint32_t logfmt_code_exact(const struct logfmt_coder &c, uint32_t x)
{
    const struct logfmt_parts parts = logfmt_parts_of(x);
    const int log = parts.exponent * 128 + parts.mantissa - (int)(int16_t)(c.bottom & 0xffffu);

    return logfmt_code(c, __fmul_rn((float)log, 1.0f / 128.0f),
                       logfmt_bend((uint32_t)parts.mantissa * 256 + (uint32_t)lane_id() * 4)) &
           0xffffu;
}

/*
 * The bits of a lane's eight channels that do not go to its bytes, in the order in which they are cheapest: ninth bits
 * at even places, signs at odd ones. The word of sixteen lanes' bits that is number i in this order is number
 * logfmt_coded_word(i) of the block.
 */
KFN int logfmt_coded_word(int i)
{
    if (i % 2)
        return 8 + (i > 8 ? 15 - i : 8 - i);
    return i > 0 && i <= 8 ? 8 - i : (16 - i) % 16 + 1;
}

struct logfmt_coded {
    uint2 low;     /* eight bytes */
    uint32_t bits; /* of channels 0, 2, 4, 6 in the lower half, of 1, 3, 5, 7 in the upper */
};

/* A lane's eight bf16 of a block. */
template <int exact> KFN struct logfmt_coded logfmt_encode8(uint4 words, const struct logfmt_coder &c)
{
    const uint32_t w[4] = {words.x, words.y, words.z, words.w};
    uint32_t pair[4], bits = 0;
    struct logfmt_coded coded;

#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t codes = exact ? logfmt_code_exact(c, w[i] & 0x7fffu) | logfmt_code_exact(c, w[i] >> 16 & 0x7fffu)
                                                                                  << 16
                                     : logfmt_codes(c, w[i]);
        pair[i] = max_s16x2(codes, c.lowest);
        bits |= ((pair[i] & 0x01000100u) | (w[i] & 0x80008000u)) >> 2 * i;
    }
    coded.low = make_uint2(__byte_perm(pair[0], pair[1], 0x6420), __byte_perm(pair[2], pair[3], 0x6420));
    coded.bits = bits;
    return coded;
}

/* Rare, and not in the way of the other. */
KFN_STEP struct logfmt_coded logfmt_encode8_exact(uint4 words, struct logfmt_coder c)
{
    return logfmt_encode8<1>(words, c);
}

/* The bits of two blocks in the order of logfmt_coded_word(): the upper halves with their bytes exchanged fill the
 * gaps of the lower ones. */
KFN uint32_t logfmt_merge(uint32_t first, uint32_t second)
{
    return __byte_perm(first, second, 0x5410) | __byte_perm(first, second, 0x6723);
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
        ((uint16_t *)(to + LOGFMT_BLOCK))[logfmt_coded_word(lane_id() % 16)] = (uint16_t)word;
}

/* Largest magnitude of the lane's eight in the lower half, 0x7fff less the smallest in the upper half. */
KFN uint32_t logfmt_extremes8(uint4 words)
{
    const uint32_t w[4] = {words.x & 0x7fff7fffu, words.y & 0x7fff7fffu, words.z & 0x7fff7fffu, words.w & 0x7fff7fffu};
    const uint32_t max = max_u16x2(max_u16x2(w[0], w[1]), max_u16x2(w[2], w[3]));
    const uint32_t less = 0x7fff7fffu - min_u16x2(min_u16x2(w[0], w[1]), min_u16x2(w[2], w[3]));

    return max_u16x2(__byte_perm(max, less, 0x5410), __byte_perm(max, less, 0x7632));
}

/* The lanes on one side keep `a`, those on the other side `b`, each with what the lane `d` away has of it. */
KFN uint32_t logfmt_fold(uint32_t a, uint32_t b, int d)
{
    const int upper = lane_id() & d;
    return max_u16x2(upper ? b : a, __shfl_xor_sync(ALL_LANES, upper ? a : b, d));
}

/* Of the blocks of a batch: four lanes get the same, those of step lane / 4 % 4 in the lane's group. */
KFN uint32_t logfmt_extremes(const uint4 *words)
{
    uint32_t step[LOGFMT_BATCH];

#pragma unroll
    for (int j = 0; j < LOGFMT_BATCH; j++)
        step[j] = logfmt_extremes8(words[j]);
    uint32_t both = logfmt_fold(logfmt_fold(step[0], step[2], 8), logfmt_fold(step[1], step[3], 8), 4);
    both = max_u16x2(both, __shfl_xor_sync(ALL_LANES, both, 2));
    return max_u16x2(both, __shfl_xor_sync(ALL_LANES, both, 1));
}

/* One vote for each block of a batch: bit 4 * step + group. */
KFN uint32_t logfmt_votes(int coded)
{
    const lanes_t lanes = __ballot_sync(ALL_LANES, coded) & (lanes_t)0x1111111111111111ull;
    uint32_t votes = 0;

#pragma unroll
    for (int g = 0; g < LOGFMT_GROUPS; g++)
        votes |= (uint32_t)(lanes >> 16 * g & 0xffffu) << g;
    return votes;
}

/* The same without gaps: bit q for block q. */
KFN uint32_t logfmt_bitmap(uint32_t votes)
{
    if (LOGFMT_GROUPS == 4)
        return votes;
    const uint32_t pairs = (votes | votes >> 2) & 0x0f0fu;
    return (pairs | pairs >> 4) & 0xffu;
}

/* The lane's eight channels of step j, zeros past the row's end. */
KFN uint4 logfmt_load8(const void *x, int hidden, int channel)
{
    const char *from = (const char *)x + (size_t)channel * 2;
    const int n = hidden - channel;

    return n > 0 ? raw_load_odd<DTYPE_BF16>(from, n).a : make_uint4(0, 0, 0, 0);
}

/* Where the blocks of a batch begin, and which are coded: logfmt_votes(). */
struct logfmt_batch {
    char *at;
    uint32_t votes;
};

/* `q` blocks of the batch, whose votes are the first `places` bits, come before. */
KFN char *logfmt_block_at(const struct logfmt_batch &batch, int q, int places)
{
    const int coded = __popc(batch.votes & ((1u << places) - 1));
    return batch.at + q * LOGFMT_RAW_BYTES - coded * (LOGFMT_RAW_BYTES - LOGFMT_CODED_BYTES);
}

/* That of the lane's block of step j. */
KFN struct logfmt_coder logfmt_coder_from(const struct logfmt_coder &own, int j)
{
    const int from = (lane_id() & ~15) + j * 4;
    struct logfmt_coder c;

    c.per_step = __shfl_sync(ALL_LANES, own.per_step, from);
    c.offset = __shfl_sync(ALL_LANES, own.offset, from);
    c.bottom = __shfl_sync(ALL_LANES, own.bottom, from);
    c.lowest = __shfl_sync(ALL_LANES, own.lowest, from);
    return c;
}

/* Channels of the batch that begins with block b. `whole`: the row is of aligned vectors; lanes past its end load what
 * nobody uses, for a load under a condition would be waited for at once. */
template <int whole> KFN void logfmt_load_batch(uint4 *words, const void *x, int hidden, int b)
{
    const int channel = b * LOGFMT_BLOCK + lane_id() * 8;

#pragma unroll
    for (int j = 0; j < LOGFMT_BATCH; j++) {
        const int at = channel + j * WARP * 8;
        words[j] =
            whole ? vec_load((const char *)x + (at < hidden ? (uint32_t)at * 2 : 0)) : logfmt_load8(x, hidden, at);
    }
}

/* Ends a row whose last block ends at `block_end`: zeros between table and payload. Returns its bytes. The short last
 * block is raw and was counted as a full one. */
KFN size_t logfmt_end_row(char *row, const char *block_end, int hidden, int blocks)
{
    const size_t table_end = logfmt_table(hidden) + (size_t)blocks * 4;
    size_t at = (size_t)(block_end - row);

    if (hidden % LOGFMT_BLOCK)
        at -= (size_t)(LOGFMT_BLOCK - hidden % LOGFMT_BLOCK) * 2;
    for (size_t i = table_end + (size_t)lane_id() * 4; i < logfmt_payload(hidden); i += WARP * 4)
        *(uint32_t *)(row + i) = 0;
    return (at + 15) & ~(size_t)15;
}

template <int whole> KFN_STEP size_t logfmt_encode_row(void *to, const void *x, int hidden)
{
    char *row = (char *)to;
    const int blocks = logfmt_blocks(hidden), group = lane_id() / 16;
    const struct logfmt_turns turns = logfmt_turns_of_lane();
    struct logfmt_batch batch = {row + logfmt_payload(hidden), 0};
    uint32_t bitmap = 0;
    uint4 next[LOGFMT_BATCH];

    logfmt_load_batch<whole>(next, x, hidden, 0);
    for (int b = 0; b < blocks; b += LOGFMT_BATCH_BLOCKS) {
        uint4 words[LOGFMT_BATCH];
#pragma unroll
        for (int j = 0; j < LOGFMT_BATCH; j++)
            words[j] = next[j];
        logfmt_load_batch<whole>(next, x, hidden, b + LOGFMT_BATCH_BLOCKS);
        /* Each lane decides about one block. */
        const uint32_t extremes = logfmt_extremes(words);
        const int mine = b + lane_id() / 4 % LOGFMT_BATCH * LOGFMT_GROUPS + group, here = mine < blocks;
        const uint32_t amax = extremes & 0xffffu, amin = 0x7fffu - (extremes >> 16);
        const int full = (mine + 1) * LOGFMT_BLOCK <= hidden;
        const int coded = here && full && amax < BF16_ONE && amin < amax;
        const struct logfmt_coder coder = logfmt_coder_of(coded ? amax : 1, coded ? amin : 0);
        const int exact = __any_sync(ALL_LANES, coded && !logfmt_straight(amax, amin));
        batch.votes = logfmt_votes(coded);
        if (here && lane_id() % 4 == 0)
            *(uint32_t *)(row + logfmt_table(hidden) + (size_t)mine * 4) = coded ? amax | amin << 16 : 0;
        /* Two steps at a time, not unrolled: the code fits the cache of instructions. The words move up. */
        ROLLED
        for (int j = 0; j < LOGFMT_BATCH; j += 2) {
            const int channel = b * LOGFMT_BLOCK + (j * WARP + lane_id()) * 8, place = j * 4 + group;
            const int first_coded = (int)(batch.votes >> place & 1),
                      second_coded = (int)(batch.votes >> place >> 4 & 1);
            char *first_at = logfmt_block_at(batch, j * LOGFMT_GROUPS + group, place);
            char *second_at = logfmt_block_at(batch, (j + 1) * LOGFMT_GROUPS + group, place + 4);
            const struct logfmt_coder first_coder = logfmt_coder_from(coder, j);
            const struct logfmt_coder second_coder = logfmt_coder_from(coder, j + 1);
            struct logfmt_coded first, second;
            if (exact) {
                first = logfmt_encode8_exact(words[0], first_coder);
                second = logfmt_encode8_exact(words[1], second_coder);
            } else {
                first = logfmt_encode8<0>(words[0], first_coder);
                second = logfmt_encode8<0>(words[1], second_coder);
            }
            const uint32_t bits = logfmt_transpose(logfmt_merge(first.bits, second.bits), turns);
            logfmt_store_low(first_at, first.low, words[0], first_coded, channel < hidden);
            logfmt_store_low(second_at, second.low, words[1], second_coded, channel + WARP * 8 < hidden);
            logfmt_store_word(first_at, bits, first_coded);
            logfmt_store_word(second_at, bits >> 16, second_coded);
#pragma unroll
            for (int i = 0; i + 2 < LOGFMT_BATCH; i++)
                words[i] = words[i + 2];
        }
        bitmap |= logfmt_bitmap(batch.votes) << b % 32;
        if ((b + LOGFMT_BATCH_BLOCKS) % 32 == 0 || b + LOGFMT_BATCH_BLOCKS >= blocks) {
            if (lane_id() == 0)
                *(uint32_t *)(row + b / 32 * 4) = bitmap;
            bitmap = 0;
        }
        const int rest = blocks - b;
        batch.at = logfmt_block_at(batch, rest < LOGFMT_BATCH_BLOCKS ? rest : LOGFMT_BATCH_BLOCKS, LOGFMT_BATCH * 4);
    }
    return logfmt_end_row(row, batch.at, hidden, blocks);
}

KFN size_t ag_logfmt_encode(struct agent *ag, void *to, const void *x, int hidden)
{
    (void)ag;
    if (aligned16(x) && hidden % 8 == 0)
        return logfmt_encode_row<1>(to, x, hidden);
    return logfmt_encode_row<0>(to, x, hidden);
}

/* ---- Decode ----------------------------------------------------------------------------------------------------- */

/* What a lane loads of a block: coded, its eight low bytes and one of the words of ninth bits and signs; raw, the first
 * half of its eight bf16. */
struct logfmt_raw {
    uint2 low;
    uint32_t word;
};

/*
 * The order in which a lane's sixteen bits are cheapest to take apart: the word that is number i in it. Bits 2p + 1 and
 * 2p + 9 are the ninth bits of channels 2p and 2p + 1, bits 2p + 8 and 2p their signs.
 */
KFN int logfmt_decoded_word(int i)
{
    return (i % 2 ? 0 : 8) + (i < 8 ? i % 8 ^ 1 : i % 8);
}

/* The value of a weight from which the powers of two that logfmt_values<1>() leaves out are taken. */
KFN float logfmt_weight(float weight, int top)
{
    return __fmul_rn(weight, __uint_as_float((uint32_t)(top - LOGFMT_BELOW + 63) << 23));
}

/* Is the product above exact, and its product with a value? */
KFN int logfmt_weight_serves(float weight)
{
    const uint32_t bits = __float_as_uint(weight) & 0x7fffffffu;
    return bits == 0 || (bits >> 23) - 103u < 84u; /* 2^-24 to 2^60 */
}

/* The polynomial of util/logfmt.h for four at a time: what one waits for, three others fill. */
KFN void logfmt_exp2(float (&p)[4], const float (&m)[4])
{
    const float exp2[6] = {LOGFMT_EXP0, LOGFMT_EXP1, LOGFMT_EXP2, LOGFMT_EXP3, LOGFMT_EXP4, LOGFMT_EXP5};

#pragma unroll
    for (int i = 0; i < 4; i++)
        p[i] = exp2[5];
#pragma unroll
    for (int k = 4; k >= 0; k--)
#pragma unroll
        for (int i = 0; i < 4; i++)
            p[i] = __fmaf_rn(p[i], m[i], exp2[k]);
}

/*
 * `bits` has what logfmt_bits_of() gives. The sign is bit 31 of a code here, and of its product with an odd number. The
 * power of two of a plain value is less by 63 than that of its logarithm counted from LOGFMT_BELOW: the weight has the
 * rest. Plain values are not 0 and not subnormal. `mantissa` is 0x007fffff in a register: an operation takes one
 * constant.
 */
template <int plain>
KFN struct float8 logfmt_values(uint2 low, uint32_t bits, const struct logfmt_range &r, uint32_t mantissa)
{
    struct float8 f;

    /* Four at a time: what one waits for, three others fill. */
#pragma unroll
    for (int first = 0; first < 8; first += 4) {
        uint32_t code[4], log[4];
        float m[4], p[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t pair = rotate_left(bits, 31 - (first + i) / 2 * 2) & 0x80018001u;
            code[i] = bytes_with_gap(first ? low.y : low.x, pair, i, i % 2 ? 6 : 4, i % 2 ? 7 : 5);
            log[i] = code[i] * r.step + r.base;
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            m[i] = __uint_as_float(choose_bits(mantissa, (uint32_t)((int32_t)log[i] >> 2), 0x3f800000u));
        logfmt_exp2(p, m);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (plain) {
                f.v[first + i] =
                    __uint_as_float(choose_bits(0x9f800000u, (uint32_t)((int32_t)log[i] >> 2), __float_as_uint(p[i])));
                continue;
            }
            const uint32_t exponent = (log[i] >> LOGFMT_FRACTION & 0x3fu) + (uint32_t)(r.top - LOGFMT_BELOW + 64);
            const float value = __uint_as_float((__float_as_uint(p[i]) & 0x007fffffu) | exponent << 23);
            const uint32_t some = __float_as_uint(__fmul_rn(value, 1.0f / 18446744073709551616.0f));
            f.v[first + i] = __uint_as_float((code[i] & 0xffffu ? some : 0) | (log[i] & 0x80000000u));
        }
    }
    return f;
}

/* Row `half` of two whose transposed words are in `bits`: eight bits at the bottom, eight in the middle. */
KFN uint32_t logfmt_bits_of(uint32_t bits, int half)
{
    return half ? __byte_perm(bits, 0, 0x4342) : __byte_perm(bits, 0, 0x4140);
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
