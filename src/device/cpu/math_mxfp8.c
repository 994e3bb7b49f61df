/* SPDX-License-Identifier: Apache-2.0 */
/* Sums of sums of bf16 rows, each rounded to MXFP8, a block at a time. */
#include "device/cpu/math.h"
#include "util/mxfp8.h"

static void add_row(float *sum, const void *row, int at)
{
    uint16_t x[MXFP8_BLOCK];

    memcpy(x, (const uint16_t *)row + at, sizeof(x));
    for (int i = 0; i < MXFP8_BLOCK; i++)
        sum[i] += bf16_to_float(x[i]);
}

/* Adds a finished sum, rounded, to the total, and begins the next. */
static void close_sum(float *total, float *sum)
{
    float most = 0;
    uint32_t scale;

    for (int i = 0; i < MXFP8_BLOCK; i++) {
        const float abs = float_from_bits(float_bits(sum[i]) & FLOAT_ABS_MASK);
        most = abs > most ? abs : most; /* not a NaN */
    }
    scale = mxfp8_scale(most);
    for (int i = 0; i < MXFP8_BLOCK; i++) {
        total[i] += mxfp8_round(sum[i], scale);
        sum[i] = 0;
    }
}

void math_reduce_mxfp8(void *out, int hidden, const struct reduce_row *rows, int n, uint32_t ends, const void *bias0,
                       const void *bias1)
{
    for (int at = 0; at < hidden; at += MXFP8_BLOCK) {
        float total[MXFP8_BLOCK] = {0}, sum[MXFP8_BLOCK] = {0};
        uint16_t result[MXFP8_BLOCK];

        if (bias0)
            add_row(total, bias0, at);
        if (bias1)
            add_row(total, bias1, at);
        for (int r = 0; r < n; r++) {
            add_row(sum, rows[r].data, at);
            if (ends >> r & 1)
                close_sum(total, sum);
        }
        for (int i = 0; i < MXFP8_BLOCK; i++)
            result[i] = total[i] == total[i] ? float_to_bf16(total[i]) : 0x7fc0;
        memcpy((uint16_t *)out + at, result, sizeof(result));
    }
}
