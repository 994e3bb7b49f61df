/* SPDX-License-Identifier: Apache-2.0 */
/*
 * LogFMT-10 rows: bf16 values as sign and 9-bit logarithm, per block of 128 channels.
 *
 *     | bitmap: 1 bit per block | (amax, amin) per block | pad to 16 | blocks, coded 160 or raw 256 bytes |
 *
 * docs/formats.md has the exact bytes, util/logfmt.h the numbers of log2 and 2^x: a machine gives the same bits
 * whatever its C library.
 */
#ifndef EPX_DEVICE_CPU_MATH_LOGFMT_H
#define EPX_DEVICE_CPU_MATH_LOGFMT_H

#include "device/cpu/math_vec.h"
#include "util/logfmt.h"

/* Logarithms of the codes, in units of 2^-25 from LOGFMT_BELOW below the exponent of amax. */
struct logfmt_range {
    uint32_t step, base; /* code c means base + c * step */
    int top;             /* the exponent of amax, biased; below 1 if it is subnormal */
    int bottom;          /* that of amin, or of the range's end */
    int lowest;          /* code of the smallest value: 0 if values may lie below the range */
};

static int logfmt_blocks(int hidden)
{
    return (hidden + LOGFMT_BLOCK - 1) / LOGFMT_BLOCK;
}

static size_t round_up16(size_t bytes)
{
    return (bytes + 15) & ~(size_t)15;
}

static size_t logfmt_bitmap_bytes(int hidden)
{
    return (size_t)(logfmt_blocks(hidden) + 31) / 32 * 4;
}

/* Offset of the first block. */
static size_t logfmt_payload(int hidden)
{
    return round_up16(logfmt_bitmap_bytes(hidden) + (size_t)logfmt_blocks(hidden) * 4);
}

static uint32_t logfmt_bitmap_word(const void *row, int word)
{
    uint32_t bits;
    memcpy(&bits, (const char *)row + (size_t)word * 4, sizeof(bits));
    return bits;
}

static void logfmt_load_range(uint16_t range[2], const void *row, int hidden, int block)
{
    memcpy(range, (const char *)row + logfmt_bitmap_bytes(hidden) + (size_t)block * 4, 4);
}

/* Coded blocks before `block`. */
static int logfmt_rank(const void *row, int block)
{
    int count = 0;
    for (int w = 0; w < block / 32; w++)
        count += __builtin_popcount(logfmt_bitmap_word(row, w));
    if (block % 32)
        count += __builtin_popcount(logfmt_bitmap_word(row, block / 32) & ((1u << block % 32) - 1));
    return count;
}

/* Biased exponent and mantissa of a bf16 magnitude, as if there were no subnormal numbers. */
struct logfmt_parts {
    int exponent, mantissa;
};

static struct logfmt_parts logfmt_parts_of(uint16_t x)
{
    struct logfmt_parts parts = {x >> 7, x & 127};

    if (x >= BF16_NORMAL)
        return parts;
    const int bit = x ? 31 - __builtin_clz((unsigned)x) : -LOGFMT_RANGE * 2; /* 0 is below every range */
    parts.exponent = bit - 6;
    parts.mantissa = x ? (x << (7 - bit)) & 127 : 0;
    return parts;
}

static int32_t logfmt_fraction(int mantissa)
{
    return (mantissa << (LOGFMT_FRACTION - 7)) + logfmt_bends[mantissa];
}

/* A step is odd: on GPUs, the sign of a value passes through its product with the code. */
static struct logfmt_range logfmt_range_of(uint16_t amax, uint16_t amin)
{
    const struct logfmt_parts high = logfmt_parts_of(amax), low = logfmt_parts_of(amin);
    const int apart = high.exponent - low.exponent, powers = apart < LOGFMT_BELOW ? apart : LOGFMT_BELOW;
    const int32_t all = powers * LOGFMT_ONE + logfmt_fraction(high.mantissa) - logfmt_fraction(low.mantissa);
    const int clipped = all > LOGFMT_RANGE * LOGFMT_ONE;
    const int32_t range = clipped ? LOGFMT_RANGE * LOGFMT_ONE : all;
    struct logfmt_range r;

    r.step = (uint32_t)(range / (LOGFMT_TOP_CODE - 1)) | 1;
    r.base = (uint32_t)(LOGFMT_BELOW * LOGFMT_ONE + logfmt_fraction(high.mantissa)) - LOGFMT_TOP_CODE * r.step;
    r.top = high.exponent;
    r.bottom = high.exponent - (apart < LOGFMT_RANGE ? apart : LOGFMT_RANGE);
    r.lowest = !clipped;
    return r;
}

/* Largest and smallest magnitude of a full block, as bf16 bits. */
static void logfmt_extremes(const uint16_t *x, uint16_t *amax, uint16_t *amin)
{
    vi16 max = {0}, min = max + 0x7fff;
    int16_t top = 0, low = 0x7fff;
    for (int i = 0; i < LOGFMT_BLOCK; i += VEC_WIDE) {
        vi16 v = vec_load_abs16(x + i);
        max = vec_max16(max, v);
        min = vec_min16(min, v);
    }
    for (int i = 0; i < VEC_WIDE; i++) {
        top = max[i] > top ? max[i] : top;
        low = min[i] < low ? min[i] : low;
    }
    *amax = (uint16_t)top;
    *amin = (uint16_t)low;
}

/* The code of a value: (logarithm - bottom) * per_step + offset, rounded down; bottom is an exponent. */
struct logfmt_coder {
    float per_step, offset;
    int bottom, lowest;
};

/* The offset rounds to the nearer neighbour in the linear domain: 1/2 - log2((1 + 2^step) / 2) / step + 1/2 by its
 * series; the next term is below 5e-7 for every step that occurs. */
static struct logfmt_coder logfmt_coder_of(uint16_t amax, uint16_t amin)
{
    const struct logfmt_range r = logfmt_range_of(amax, amin);
    const struct logfmt_parts high = logfmt_parts_of(amax);
    const float step = (float)(int32_t)r.step, bend = (float)logfmt_bends[high.mantissa] * LOGFMT_UNIT;
    struct logfmt_coder c;

    c.bottom = r.bottom - 1;
    c.lowest = r.lowest;
    c.per_step = 1.0f / step * LOGFMT_ONE;
    c.offset = LOGFMT_TOP - step * LOGFMT_UNIT * LOGFMT_MIDDLE;
    c.offset =
        __builtin_fmaf((float)((high.exponent - c.bottom) * 128 + high.mantissa) / -128.0f, c.per_step, c.offset);
    c.offset = __builtin_fmaf(-bend, c.per_step, c.offset);
    return c;
}

/* Are the magnitudes of a block their logarithms but for the bends? Its subnormals and zeros get code 0 if they are
 * below the range. */
static int logfmt_straight(uint16_t amax, uint16_t amin)
{
    return amin >= BF16_NORMAL || amax >= 67u << 7; /* 2^-60 */
}

/* Codes of logarithms, before they are limited. They fit 16 bits: values below the range occur only where the range is
 * 32 powers of two, 16 codes each. `x`: exponent * 128 + mantissa. */
VEC_INLINE vu32 logfmt_codes(vi32 x, const int32_t *bends, struct logfmt_coder c)
{
    const vf32 bend = __builtin_convertvector((vi32)vec_load_u32(bends), vf32) * LOGFMT_UNIT;
    const vf32 log = __builtin_convertvector(x - c.bottom * 128, vf32) * (1.0f / 128.0f);
    const vf32 code = vec_fma(bend, vec_f32(c.per_step), vec_fma(log, vec_f32(c.per_step), vec_f32(c.offset)));
    return (vu32) __builtin_convertvector(code, vi32);
}

/* Of VEC_WIDE elements: exponents * 128 + mantissas, signed, and their bends. */
VEC_INLINE vu16 logfmt_codes_wide(const int16_t *x, const int32_t *bends, struct logfmt_coder c)
{
    const vu16 all = vec_load_u16(x), zero = {0};
    const vi32 low = (vi32)vec_widen_lo(all, 1) >> 16, high = (vi32)vec_widen_hi(all, 1) >> 16;
    const vi16 code = (vi16)vec_narrow_u32(logfmt_codes(low, bends, c), logfmt_codes(high, bends + VEC_LANES, c));

    return (vu16)vec_min16(vec_max16(code, (vi16)zero + (int16_t)c.lowest), (vi16)zero + LOGFMT_TOP_CODE);
}

/* A block's magnitudes as such numbers, and their bends. */
static void logfmt_logs(int16_t *logs, int32_t *bends, const uint16_t *x, int straight)
{
    for (int i = 0; i < LOGFMT_BLOCK; i++) {
        logs[i] = (int16_t)(x[i] & 0x7fff);
        bends[i] = logfmt_bends[x[i] & 127];
    }
    for (int i = 0; i < LOGFMT_BLOCK && !straight; i++) {
        const struct logfmt_parts parts = logfmt_parts_of(x[i] & 0x7fff);
        logs[i] = (int16_t)(parts.exponent * 128 + parts.mantissa);
        bends[i] = logfmt_bends[parts.mantissa];
    }
}

/*
 * Ninth bits and signs: 16 words of which word j has the bits of elements j, j + 8, j + 16 ..., the first one lowest. A
 * vector of 16-bit lanes is GROUPS such lists of 8 words: group g holds them for the elements that are 8 * g further.
 */
typedef uint16_t logfmt_words __attribute__((vector_size(16)));
#define LOGFMT_GROUPS (VEC_BYTES / 16)

static void logfmt_store_bits(uint8_t *to, vu16 bits)
{
    logfmt_words group[LOGFMT_GROUPS], all = {0};
    memcpy(group, &bits, sizeof(bits));
    for (int g = 0; g < LOGFMT_GROUPS; g++)
        all |= group[g] << g;
    memcpy(to, &all, sizeof(all));
}

static vu16 logfmt_load_bits(const uint8_t *from)
{
    logfmt_words group[LOGFMT_GROUPS], all;
    vu16 bits;
    memcpy(&all, from, sizeof(all));
    for (int g = 0; g < LOGFMT_GROUPS; g++)
        group[g] = all >> g;
    memcpy(&bits, group, sizeof(bits));
    return bits;
}

static void logfmt_encode_block(uint8_t *to, const uint16_t *x, uint16_t amax, uint16_t amin)
{
    const struct logfmt_coder c = logfmt_coder_of(amax, amin);
    int16_t all_logs[LOGFMT_BLOCK], *logs = all_logs;
    int32_t all_bends[LOGFMT_BLOCK], *bends = all_bends;
    vu16 ninth = {0}, sign = {0};

    logfmt_logs(logs, bends, x, logfmt_straight(amax, amin));
    for (int k = 0; k < 16; k += 2 * LOGFMT_GROUPS, x += 2 * VEC_WIDE, logs += 2 * VEC_WIDE, bends += 2 * VEC_WIDE) {
        vu16 low = logfmt_codes_wide(logs, bends, c);
        vu16 high = logfmt_codes_wide(logs + VEC_WIDE, bends + VEC_WIDE, c);
        ninth |= (low >> 8) << k | (high >> 8) << (k + LOGFMT_GROUPS);
        sign |= (vec_load_u16(x) >> 15) << k | (vec_load_u16(x + VEC_WIDE) >> 15) << (k + LOGFMT_GROUPS);
        vec_store(to + 8 * k, (vu32)vec_narrow_u16(low & 0xff, high & 0xff));
    }
    logfmt_store_bits(to + 128, ninth);
    logfmt_store_bits(to + 144, sign);
}

/* Subnormal results come by the last product: exponents are larger by 64 before it. */
VEC_INLINE vf32 logfmt_values(vu32 code, vu32 sign, struct logfmt_range r)
{
    const vu32 log = code * r.step + r.base, some = (vu32)(code != 0);
    const vf32 m = (vf32)((log >> 2 & 0x7fffffu) | 0x3f800000u);
    vf32 p = vec_fma(vec_f32(LOGFMT_EXP5), m, vec_f32(LOGFMT_EXP4));

    p = vec_fma(p, m, vec_f32(LOGFMT_EXP3));
    p = vec_fma(p, m, vec_f32(LOGFMT_EXP2));
    p = vec_fma(p, m, vec_f32(LOGFMT_EXP1));
    p = vec_fma(p, m, vec_f32(LOGFMT_EXP0));
    const vu32 exponent = (log >> LOGFMT_FRACTION) + (uint32_t)(r.top - LOGFMT_BELOW + 64);
    const vf32 value = (vf32)(((vu32)p & 0x7fffffu) | exponent << 23) * 0x1p-64f;
    return (vf32)(((vu32)value & some) | sign);
}

VEC_INLINE struct wide logfmt_values_wide(vu16 code, vu16 sign, struct logfmt_range r)
{
    struct wide v = {logfmt_values(vec_widen_lo(code, 0), vec_widen_lo(sign, 1), r),
                     logfmt_values(vec_widen_hi(code, 0), vec_widen_hi(sign, 1), r)};
    return v;
}

static void logfmt_decode_coded(struct wide *to, const uint8_t *from, struct logfmt_range r)
{
    vu16 ninth = logfmt_load_bits(from + 128), sign = logfmt_load_bits(from + 144);
    for (int k = 0; k < 16; k += 2 * LOGFMT_GROUPS, to += 2) {
        vu16 low = vec_load_bytes(from + 8 * k), high = vec_load_bytes(from + 8 * k + VEC_WIDE);
        low |= (ninth >> k & 1) << 8;
        high |= (ninth >> (k + LOGFMT_GROUPS) & 1) << 8;
        to[0] = logfmt_values_wide(low, sign >> k << 15, r);
        to[1] = logfmt_values_wide(high, sign >> (k + LOGFMT_GROUPS) << 15, r);
    }
}

static void logfmt_decode_raw(struct wide *to, const uint8_t *from, int n)
{
    uint16_t padded[LOGFMT_BLOCK] = {0};
    memcpy(padded, from, (size_t)n * sizeof(padded[0]));
    for (int k = 0; k < LOGFMT_BLOCK / VEC_WIDE; k++)
        to[k] = vec_load_wide(padded + VEC_WIDE * k, EPX_BF16);
}

static size_t logfmt_bound(int hidden)
{
    return round_up16(logfmt_payload(hidden) + (size_t)hidden * 2);
}

/* Finds which blocks are coded; fills bitmap and table. */
static void logfmt_encode_head(uint8_t *to, const uint16_t *x, int hidden)
{
    uint8_t *table = to + logfmt_bitmap_bytes(hidden);
    memset(to, 0, logfmt_payload(hidden));
    for (int b = 0; b < hidden / LOGFMT_BLOCK; b++) {
        uint16_t range[2];
        logfmt_extremes(x + (size_t)b * LOGFMT_BLOCK, &range[0], &range[1]);
        if (range[0] >= BF16_ONE || range[1] >= range[0])
            continue;
        to[b / 8] = (uint8_t)(to[b / 8] | 1u << b % 8);
        memcpy(table + (size_t)b * 4, range, sizeof(range));
    }
}

static size_t logfmt_encode(void *to, const uint16_t *x, int hidden)
{
    uint8_t *row = to;
    size_t at = logfmt_payload(hidden), end;
    logfmt_encode_head(row, x, hidden);
    for (int b = 0; b < logfmt_blocks(hidden); b++, x += LOGFMT_BLOCK) {
        int n = hidden - b * LOGFMT_BLOCK;
        if (row[b / 8] >> b % 8 & 1) {
            uint16_t range[2];
            logfmt_load_range(range, row, hidden, b);
            logfmt_encode_block(row + at, x, range[0], range[1]);
            at += LOGFMT_CODED_BYTES;
        } else {
            size_t bytes = n < LOGFMT_BLOCK ? (size_t)n * 2 : LOGFMT_RAW_BYTES;
            memcpy(row + at, x, bytes);
            at += bytes;
        }
    }
    end = round_up16(at);
    memset(row + at, 0, end - at);
    return end;
}

/* A full block as LogFMT would carry it: 128 floats. */
static void logfmt_round_block(struct wide *to, const uint16_t *x)
{
    uint8_t coded[LOGFMT_CODED_BYTES];
    uint16_t amax, amin;
    logfmt_extremes(x, &amax, &amin);
    if (amax >= BF16_ONE || amin >= amax) {
        logfmt_decode_raw(to, (const uint8_t *)x, LOGFMT_BLOCK);
        return;
    }
    logfmt_encode_block(coded, x, amax, amin);
    logfmt_decode_coded(to, coded, logfmt_range_of(amax, amin));
}

/* Decodes one block into 128 floats; what a short last block lacks is 0. */
static void logfmt_decode_block(struct wide *to, const void *row, int hidden, int block)
{
    int before = logfmt_rank(row, block), n = hidden - block * LOGFMT_BLOCK;
    const uint8_t *from = (const uint8_t *)row + logfmt_payload(hidden) + (size_t)before * LOGFMT_CODED_BYTES +
                          (size_t)(block - before) * LOGFMT_RAW_BYTES;
    if (logfmt_bitmap_word(row, block / 32) >> block % 32 & 1) {
        uint16_t range[2];
        logfmt_load_range(range, row, hidden, block);
        logfmt_decode_coded(to, from, logfmt_range_of(range[0], range[1]));
    } else {
        logfmt_decode_raw(to, from, n < LOGFMT_BLOCK ? n : LOGFMT_BLOCK);
    }
}

static void logfmt_decode(float *to, const void *from, int hidden)
{
    struct wide block[LOGFMT_BLOCK / VEC_WIDE];
    for (int b = 0; b < logfmt_blocks(hidden); b++, to += LOGFMT_BLOCK) {
        int n = hidden - b * LOGFMT_BLOCK;
        logfmt_decode_block(block, from, hidden, b);
        memcpy(to, block, (size_t)(n < LOGFMT_BLOCK ? n : LOGFMT_BLOCK) * sizeof(float));
    }
}

#endif
