/* SPDX-License-Identifier: Apache-2.0 */
/* NVFP4 rows; the definition of a block is in util/nvfp4.h. */
#ifndef EPX_DEVICE_CPU_MATH_NVFP4_H
#define EPX_DEVICE_CPU_MATH_NVFP4_H

#include "util/nvfp4.h"

static size_t nvfp4_encode(void *to, const uint16_t *x, int hidden, float row_scale)
{
    uint8_t *codes = to, *scales = codes + hidden / 2;

    for (int b = 0; b < hidden / NVFP4_BLOCK; b++)
        scales[b] = nvfp4_block(codes + b * NVFP4_BLOCK / 2, x + b * NVFP4_BLOCK, row_scale);
    memcpy(scales + hidden / NVFP4_BLOCK, &row_scale, sizeof(row_scale));
    return nvfp4_row_bytes(hidden);
}

static void nvfp4_add(float *sum, const void *row, int hidden, int at, int n, float weight)
{
    const uint8_t *codes = (const uint8_t *)row + at / 2;

    for (int b = 0; b < n / NVFP4_BLOCK; b++) {
        const float factor = nvfp4_factor(row, hidden, at / NVFP4_BLOCK + b, weight);
        for (int i = b * NVFP4_BLOCK; i < (b + 1) * NVFP4_BLOCK; i++)
            sum[i] = __builtin_fmaf(e2m1_to_float((uint8_t)(codes[i / 2] >> i % 2 * 4 & 15)), factor, sum[i]);
    }
}

#endif
