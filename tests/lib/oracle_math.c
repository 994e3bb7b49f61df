/* SPDX-License-Identifier: Apache-2.0 */
/* The oracle's own arithmetic: number formats, the fp8 cast and LogFMT-10, one value at a time. */
#include <math.h>
#include <string.h>

#include "oracle.h"

static uint32_t bits_of(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static float float_of(uint32_t bits)
{
    float value;

    memcpy(&value, &bits, sizeof(value));
    return value;
}

/* ---- bf16 and fp16 ----------------------------------------------------------------------------------------------- */

static uint16_t float_to_bf16(float value)
{
    uint32_t bits = bits_of(value);

    if (isnan(value))
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float fp16_to_float(uint16_t code)
{
    int exponent = code >> 10 & 31, mantissa = code & 0x3ff;
    float magnitude;

    if (exponent == 31)
        magnitude = mantissa ? NAN : INFINITY;
    else if (exponent == 0)
        magnitude = ldexpf((float)mantissa, -24);
    else
        magnitude = ldexpf((float)(1024 + mantissa), exponent - 25);
    return code & 0x8000 ? -magnitude : magnitude;
}

/* Scales so that one unit of the last place is 1, rounds to even there, and puts the parts together. */
static uint16_t float_to_fp16(float value)
{
    uint16_t sign = signbit(value) ? 0x8000 : 0;
    float magnitude = fabsf(value);
    int exponent;
    uint32_t units;

    if (isnan(value))
        return sign | 0x7e00;
    if (magnitude >= 65520)
        return sign | 0x7c00;
    if (magnitude < 0x1p-14f)
        return sign | (uint16_t)rintf(magnitude * 0x1p24f);
    frexpf(magnitude, &exponent); /* magnitude = 0.5 .. 1 * 2^exponent */
    units = (uint32_t)rintf(ldexpf(magnitude, 11 - exponent));
    /* 1024 .. 2048 units; 2048 carries into the exponent by itself. */
    return (uint16_t)(sign + (uint32_t)(exponent + 13) * 1024 + units);
}

float oracle_to_float(int dtype, const void *element)
{
    uint16_t half;
    float value;
    int32_t integer;
    int64_t wide;

    switch (dtype) {
    case EPX_BF16:
        memcpy(&half, element, sizeof(half));
        return float_of((uint32_t)half << 16);
    case EPX_FP16:
        memcpy(&half, element, sizeof(half));
        return fp16_to_float(half);
    case EPX_FP32:
        memcpy(&value, element, sizeof(value));
        return value;
    case EPX_FP8_E4M3:
        return oracle_e4m3_to_float(*(const uint8_t *)element);
    case EPX_INT32:
        memcpy(&integer, element, sizeof(integer));
        return (float)integer;
    case EPX_INT64:
        memcpy(&wide, element, sizeof(wide));
        return (float)wide;
    default:
        return (float)*(const uint8_t *)element;
    }
}

void oracle_from_float(int dtype, float value, void *element)
{
    uint16_t half;

    switch (dtype) {
    case EPX_BF16:
        half = float_to_bf16(value);
        memcpy(element, &half, sizeof(half));
        break;
    case EPX_FP16:
        half = float_to_fp16(value);
        memcpy(element, &half, sizeof(half));
        break;
    case EPX_FP8_E4M3:
        *(uint8_t *)element = oracle_float_to_e4m3(value);
        break;
    default:
        memcpy(element, &value, sizeof(value));
        break;
    }
}

/* ---- fp8 --------------------------------------------------------------------------------------------------------- */

float oracle_e4m3_to_float(uint8_t code)
{
    int exponent = code >> 3 & 15, mantissa = code & 7;
    float magnitude;

    if ((code & 0x7f) == 0x7f)
        return NAN;
    magnitude = exponent ? ldexpf((float)(8 + mantissa), exponent - 10) : ldexpf((float)mantissa, -9);
    return code & 0x80 ? -magnitude : magnitude;
}

uint8_t oracle_float_to_e4m3(float value)
{
    uint32_t bits = bits_of(value) & 0x7fffffff;
    uint8_t sign = (uint8_t)(bits_of(value) >> 31 << 7);

    if (isnan(value))
        return sign | 0x7f;
    if (fabsf(value) >= 448)
        return sign | 0x7e;
    if (fabsf(value) < 0x1p-6f) /* subnormal: units of 2^-9; 8 units are the first normal number */
        return sign | (uint8_t)rintf(fabsf(value) * 512);
    /* Keep 3 of 23 mantissa bits, nearest even (a carry moves into the exponent), and rebias it from 127 to 7. */
    bits = (bits + 0x7ffff + (bits >> 20 & 1)) >> 20;
    return sign | (uint8_t)(bits - (120 << 3));
}

static float block_amax(const void *row, int dtype, int from, int to)
{
    size_t size = tensor_element_size(dtype);
    float amax = 0;

    for (int i = from; i < to; i++)
        amax = fmaxf(amax, fabsf(oracle_to_float(dtype, (const char *)row + (size_t)i * size)));
    return amax;
}

/* The smallest power of two that is not below `value` (positive, normal). */
static float power_of_two_above(float value)
{
    int exponent;
    float fraction = frexpf(value, &exponent);

    return ldexpf(1.0f, fraction == 0.5f ? exponent - 1 : exponent);
}

void oracle_cast_fp8(uint8_t *q, void *scales, int ue8m0, int round_scale, const void *row, int dtype, int hidden)
{
    size_t size = tensor_element_size(dtype);

    if (ue8m0)
        memset(scales, 0, (size_t)(hidden + 511) / 512 * 4);
    for (int from = 0; from < hidden; from += 128) {
        int to = from + 128 < hidden ? from + 128 : hidden;
        float amax = fmaxf(block_amax(row, dtype, from, to), 1e-4f);
        float scale_inv = amax * (1.0f / 448.0f);
        float scale = 448.0f / amax;

        if (round_scale || ue8m0) {
            scale_inv = power_of_two_above(scale_inv);
            scale = 1.0f / scale_inv;
        }
        if (ue8m0)
            ((uint8_t *)scales)[from / 128] = (uint8_t)(bits_of(scale_inv) >> 23);
        else
            memcpy((float *)scales + from / 128, &scale_inv, sizeof(float));
        for (int i = from; i < to; i++)
            q[i] = oracle_float_to_e4m3(oracle_to_float(dtype, (const char *)row + (size_t)i * size) * scale);
    }
}

/* ---- LogFMT-10 --------------------------------------------------------------------------------------------------- */

/*
 * A block is worth encoding only with amin < amax < 1; otherwise it travels as it is and nothing may be off. An encoded
 * value is off by at most half the distance to its neighbour, v * (2^step - 1) / 2, plus one rounding to bf16 and the
 * few ulps that two implementations of log2 and exp2 differ by. What lies below the smallest code may become zero.
 */
static void logfmt_block(float *decoded, float *bound, const uint16_t *row, int n)
{
    float amax = 0, amin = INFINITY, log_amax, log_amin, step;

    for (int i = 0; i < n; i++) {
        decoded[i] = oracle_to_float(EPX_BF16, &row[i]);
        bound[i] = 0;
        if (fabsf(decoded[i]) > amax)
            amax = fabsf(decoded[i]);
        if (fabsf(decoded[i]) < amin)
            amin = fabsf(decoded[i]);
    }
    if (!(amax < 1 && amin < amax))
        return;
    log_amax = log2f(amax);
    log_amin = fmaxf(log2f(amin), log_amax - 32);
    step = (log_amax - log_amin) / 510;
    for (int i = 0; i < n; i++) {
        float x = fabsf(decoded[i]);
        float code = floorf(fmaxf(log2f(x) / step - log_amin / step + 2 - log2f((1 + exp2f(step)) / 2) / step, 0));
        float value = code > 0 ? exp2f((code - 1) * step + log_amin) : 0;

        bound[i] = x * ((exp2f(step) - 1) * 0.51f + 0x1p-8f) + (x < exp2f(log_amin) ? x : 0);
        decoded[i] = copysignf(value, decoded[i]);
    }
}

void oracle_logfmt(float *decoded, float *bound, const uint16_t *row, int hidden)
{
    for (int from = 0; from < hidden; from += 128)
        logfmt_block(decoded + from, bound + from, row + from, hidden - from < 128 ? hidden - from : 128);
}
