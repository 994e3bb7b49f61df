/* SPDX-License-Identifier: Apache-2.0 */
/*
 * LogFMT-10 rows: bf16 values as sign and 9-bit logarithm, per block of 128 channels.
 *
 *     | bitmap: 1 bit per block | (amax, amin) per block | pad to 16 | blocks, coded 160 or raw 256 bytes |
 *
 * docs/formats.md has the exact bytes. log2 and 2^x are polynomials written here, good to about 1e-6, so that a machine
 * gives the same bits whatever its C library.
 */
#ifndef EPX_DEVICE_CPU_MATH_LOGFMT_H
#define EPX_DEVICE_CPU_MATH_LOGFMT_H

#include "device/cpu/math_vec.h"

#define LOGFMT_BLOCK 128
#define LOGFMT_RAW_BYTES 256   /* a full block as bf16 */
#define LOGFMT_CODED_BYTES 160 /* 128 low code bytes, 16 bytes of ninth bits, 16 bytes of signs */
#define LOGFMT_TOP_CODE 511
#define LOGFMT_RANGE 32.0f /* powers of two below amax that codes reach */
#define BF16_ONE 0x3f80
/* 1.5 * 2^23: adding it to a small float leaves the nearest integer in the lowest bits, and the other way round. */
#define MAGIC 12582912.0f
#define MAGIC_BITS 0x4b400000u

struct logfmt_range {
    float log_amin, step;
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

/*
 * log2 of x >= 0, x < 2^64, within 7e-7; 0 gives -191. Scaled first, because bf16 subnormals lack the leading bit. Sums
 * are paired (not Horner's) to shorten the chain, and small integers become floats by way of MAGIC.
 */
VEC_INLINE vf32 logfmt_log2(vf32 x)
{
    vu32 bits = (vu32)(x * 0x1p64f);
    vi32 exponent = (vi32)(bits - 0x3f3504f3u) >> 23; /* so that the mantissa lies in [sqrt(1/2), sqrt(2)) */
    vf32 t = (vf32)(bits - ((vu32)exponent << 23)) - 1.0f;
    vf32 t2 = t * t;
    vf32 p01 = 1.44269652f - t * 0.72136018f, p23 = 0.48061313f - t * 0.35952446f;
    vf32 p46 = (0.29611956f - t * 0.26796387f) + t2 * 0.16818659f;
    vf32 p = (p01 + p23 * t2) + p46 * (t2 * t2);
    vf32 whole = (vf32)((vu32)exponent + MAGIC_BITS) - (MAGIC + 64.0f);
    return whole + p * t;
}

/* 2^y for -180 < y < 1 within 3e-7, subnormal and zero results included. */
VEC_INLINE vf32 logfmt_exp2(vf32 y)
{
    vf32 shifted = y + MAGIC; /* the nearest integer, in the lowest bits */
    vf32 f = y - (shifted - MAGIC);
    vf32 f2 = f * f;
    vf32 p01 = 1.00000008f + f * 0.69314719f, p23 = 0.24022107f + f * 0.055503571f;
    vf32 p45 = 0.0096760319f + f * 0.0013390863f;
    vf32 p = (p01 + p23 * f2) + p45 * (f2 * f2);
    return p * (vf32)(((vu32)shifted + (127u + 64u)) << 23) * 0x1p-64f;
}

static struct logfmt_range logfmt_range_of(uint16_t amax, uint16_t amin)
{
    vf32 logs = logfmt_log2((vf32){bf16_to_float(amax), bf16_to_float(amin)});
    struct logfmt_range r = {logs[1], 0.0f};
    if (r.log_amin < logs[0] - LOGFMT_RANGE)
        r.log_amin = logs[0] - LOGFMT_RANGE;
    r.step = (logs[0] - r.log_amin) / (LOGFMT_TOP_CODE - 1);
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

struct logfmt_coder {
    float log_amin, per_step, offset;
};

static struct logfmt_coder logfmt_coder_of(uint16_t amax, uint16_t amin)
{
    struct logfmt_range r = logfmt_range_of(amax, amin);
    /* 2 - log2((1 + 2^step) / 2) / step by its series; the next term is below 5e-7 for every step that occurs. */
    struct logfmt_coder c = {r.log_amin, 1.0f / r.step, 1.5f - r.step * 0.08664340f};
    return c;
}

/* Codes of magnitudes, before they are limited to 0 and 511. They fit 16 bits: values below the range occur only
 * where the range is 32 powers of two, 16 codes each. */
VEC_INLINE vu32 logfmt_codes(vu32 x, struct logfmt_coder c)
{
    vf32 code = (logfmt_log2((vf32)x) - c.log_amin) * c.per_step + c.offset;
    return (vu32) __builtin_convertvector(code, vi32);
}

VEC_INLINE vu16 logfmt_codes_wide(const uint16_t *x, struct logfmt_coder c)
{
    vu16 abs = (vu16)vec_load_abs16(x);
    vi16 code = (vi16)vec_narrow_u32(logfmt_codes(vec_widen_lo(abs, 1), c), logfmt_codes(vec_widen_hi(abs, 1), c));
    vi16 zero = {0};
    return (vu16)vec_min16(vec_max16(code, zero), zero + LOGFMT_TOP_CODE);
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
    struct logfmt_coder c = logfmt_coder_of(amax, amin);
    vu16 ninth = {0}, sign = {0};
    for (int k = 0; k < 16; k += 2 * LOGFMT_GROUPS, x += 2 * VEC_WIDE) {
        vu16 low = logfmt_codes_wide(x, c), high = logfmt_codes_wide(x + VEC_WIDE, c);
        ninth |= (low >> 8) << k | (high >> 8) << (k + LOGFMT_GROUPS);
        sign |= (vec_load_u16(x) >> 15) << k | (vec_load_u16(x + VEC_WIDE) >> 15) << (k + LOGFMT_GROUPS);
        vec_store(to + 8 * k, (vu32)vec_narrow_u16(low & 0xff, high & 0xff));
    }
    logfmt_store_bits(to + 128, ninth);
    logfmt_store_bits(to + 144, sign);
}

VEC_INLINE vf32 logfmt_values(vu32 code, vu32 sign, struct logfmt_range r)
{
    vf32 y = ((vf32)(code | MAGIC_BITS) - (MAGIC + 1.0f)) * r.step + r.log_amin;
    vu32 some = (vu32)(code != 0);
    return (vf32)(((vu32)logfmt_exp2(y) & some) | sign);
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
