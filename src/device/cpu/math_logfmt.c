/* SPDX-License-Identifier: Apache-2.0 */
/*
 * LogFMT-10 rows: bf16 values as sign and 9-bit logarithm, per block of 128 channels.
 *
 *     | bitmap: 1 bit per block | (amax, amin) per block | pad to 16 | blocks, coded 160 or raw 256 bytes |
 *
 * docs/formats.md has the exact bytes. log2 and 2^x are polynomials written here, good to about 1e-6, so that a machine
 * gives the same bits whatever its C library.
 */
#include "device/cpu/math_logfmt.h"

#include "device/cpu/math.h"
#include "device/cpu/math_vec.h"

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
VEC_INLINE f32x4 logfmt_log2(f32x4 x)
{
    u32x4 bits = (u32x4)(x * 0x1p64f);
    i32x4 exponent = (i32x4)(bits - 0x3f3504f3u) >> 23; /* so that the mantissa lies in [sqrt(1/2), sqrt(2)) */
    f32x4 t = (f32x4)(bits - ((u32x4)exponent << 23)) - 1.0f;
    f32x4 t2 = t * t;
    f32x4 p01 = 1.44269652f - t * 0.72136018f, p23 = 0.48061313f - t * 0.35952446f;
    f32x4 p46 = (0.29611956f - t * 0.26796387f) + t2 * 0.16818659f;
    f32x4 p = (p01 + p23 * t2) + p46 * (t2 * t2);
    f32x4 whole = (f32x4)((u32x4)exponent + MAGIC_BITS) - (MAGIC + 64.0f);
    return whole + p * t;
}

/* 2^y for -180 < y < 1 within 3e-7, subnormal and zero results included. */
VEC_INLINE f32x4 logfmt_exp2(f32x4 y)
{
    f32x4 shifted = y + MAGIC; /* the nearest integer, in the lowest bits */
    f32x4 f = y - (shifted - MAGIC);
    f32x4 f2 = f * f;
    f32x4 p01 = 1.00000008f + f * 0.69314719f, p23 = 0.24022107f + f * 0.055503571f;
    f32x4 p45 = 0.0096760319f + f * 0.0013390863f;
    f32x4 p = (p01 + p23 * f2) + p45 * (f2 * f2);
    return p * (f32x4)(((u32x4)shifted + (127u + 64u)) << 23) * 0x1p-64f;
}

static struct logfmt_range logfmt_range_of(uint16_t amax, uint16_t amin)
{
    f32x4 logs = logfmt_log2((f32x4){bf16_to_float(amax), bf16_to_float(amin), 0.0f, 0.0f});
    struct logfmt_range r = {logs[1], 0.0f};
    if (r.log_amin < logs[0] - LOGFMT_RANGE)
        r.log_amin = logs[0] - LOGFMT_RANGE;
    r.step = (logs[0] - r.log_amin) / (LOGFMT_TOP_CODE - 1);
    return r;
}

/* Largest and smallest magnitude of a full block, as bf16 bits. */
static void logfmt_extremes(const uint16_t *x, uint16_t *amax, uint16_t *amin)
{
    i16x8 max = {0}, min = max + 0x7fff;
    int16_t top = 0, low = 0x7fff;
    for (int i = 0; i < LOGFMT_BLOCK; i += 8) {
        i16x8 v = vec_load_abs16(x + i);
        max = vec_max16(max, v);
        min = vec_min16(min, v);
    }
    for (int i = 0; i < 8; i++) {
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

/* Codes of four magnitudes, before they are limited to 0 and 511. They fit 16 bits: values below the range occur only
 * where the range is 32 powers of two, 16 codes each. */
VEC_INLINE u32x4 logfmt_codes4(u32x4 x, struct logfmt_coder c)
{
    f32x4 code = (logfmt_log2((f32x4)x) - c.log_amin) * c.per_step + c.offset;
    return (u32x4) __builtin_convertvector(code, i32x4);
}

VEC_INLINE u16x8 logfmt_codes8(const uint16_t *x, struct logfmt_coder c)
{
    u16x8 abs = (u16x8)vec_load_abs16(x);
    i16x8 code = (i16x8)vec_narrow_u32(logfmt_codes4(vec_widen_lo(abs, 1), c), logfmt_codes4(vec_widen_hi(abs, 1), c));
    i16x8 zero = {0};
    return (u16x8)vec_min16(vec_max16(code, zero), zero + LOGFMT_TOP_CODE);
}

static void logfmt_encode_block(uint8_t *to, const uint16_t *x, uint16_t amax, uint16_t amin)
{
    struct logfmt_coder c = logfmt_coder_of(amax, amin);
    u16x8 ninth = {0}, sign = {0};
    for (int k = 0; k < 16; k += 2) {
        u16x8 low = logfmt_codes8(x + 8 * k, c), high = logfmt_codes8(x + 8 * k + 8, c);
        ninth |= (low >> 8) << k | (high >> 8) << (k + 1);
        sign |= (vec_load_u16(x + 8 * k) >> 15) << k | (vec_load_u16(x + 8 * k + 8) >> 15) << (k + 1);
        vec_store(to + 8 * k, (u32x4)vec_narrow_u16(low & 0xff, high & 0xff));
    }
    vec_store(to + 128, (u32x4)ninth);
    vec_store(to + 144, (u32x4)sign);
}

VEC_INLINE f32x4 logfmt_values4(u32x4 code, u32x4 sign, struct logfmt_range r)
{
    f32x4 y = ((f32x4)(code | MAGIC_BITS) - (MAGIC + 1.0f)) * r.step + r.log_amin;
    u32x4 some = (u32x4)(code != 0);
    return (f32x4)(((u32x4)logfmt_exp2(y) & some) | sign);
}

VEC_INLINE struct f32x8 logfmt_values8(u16x8 code, u16x8 sign, struct logfmt_range r)
{
    struct f32x8 v = {logfmt_values4(vec_widen_lo(code, 0), vec_widen_lo(sign, 1), r),
                      logfmt_values4(vec_widen_hi(code, 0), vec_widen_hi(sign, 1), r)};
    return v;
}

static void logfmt_decode_coded(struct f32x8 *to, const uint8_t *from, struct logfmt_range r)
{
    u16x8 ninth = vec_load_u16(from + 128), sign = vec_load_u16(from + 144);
    for (int k = 0; k < 16; k += 2) {
        u8x16 bytes = (u8x16)vec_load_u32(from + 8 * k), zero = {0};
        u16x8 low = (u16x8)__builtin_shufflevector(bytes, zero, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        u16x8 high =
            (u16x8)__builtin_shufflevector(bytes, zero, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        low |= (ninth >> k & 1) << 8;
        high |= (ninth >> (k + 1) & 1) << 8;
        to[k] = logfmt_values8(low, sign >> k << 15, r);
        to[k + 1] = logfmt_values8(high, sign >> (k + 1) << 15, r);
    }
}

static void logfmt_decode_raw(struct f32x8 *to, const uint8_t *from, int n)
{
    uint16_t padded[LOGFMT_BLOCK] = {0};
    memcpy(padded, from, (size_t)n * sizeof(padded[0]));
    for (int k = 0; k < LOGFMT_BLOCK / 8; k++)
        to[k] = vec_load8(padded + 8 * k, EPX_BF16);
}

size_t math_logfmt_bound(int hidden)
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

size_t math_logfmt_encode(void *to, const uint16_t *x, int hidden)
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

void logfmt_decode_block(struct f32x8 *to, const void *row, int hidden, int block)
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

void math_logfmt_decode(float *to, const void *from, int hidden)
{
    struct f32x8 block[LOGFMT_BLOCK / 8];
    for (int b = 0; b < logfmt_blocks(hidden); b++, to += LOGFMT_BLOCK) {
        int n = hidden - b * LOGFMT_BLOCK;
        logfmt_decode_block(block, from, hidden, b);
        memcpy(to, block, (size_t)(n < LOGFMT_BLOCK ? n : LOGFMT_BLOCK) * sizeof(float));
    }
}
