/* SPDX-License-Identifier: Apache-2.0 */
#include "device/cpu/math.h"

#include "util/nvfp4.h"

size_t math_nvfp4_encode(void *to, const uint16_t *x, int hidden, float row_scale)
{
    uint8_t *codes = to, *scales = codes + hidden / 2;

    for (int b = 0; b < hidden / NVFP4_BLOCK; b++)
        scales[b] = nvfp4_block(codes + b * NVFP4_BLOCK / 2, x + b * NVFP4_BLOCK, row_scale);
    memcpy(scales + hidden / NVFP4_BLOCK, &row_scale, sizeof(row_scale));
    return nvfp4_row_bytes(hidden);
}

void math_nvfp4_add(float *sum, const void *row, int hidden, int at, int n, float weight)
{
    const uint8_t *codes = (const uint8_t *)row + at / 2;

    for (int b = 0; b < n / NVFP4_BLOCK; b++) {
        const float factor = nvfp4_factor(row, hidden, at / NVFP4_BLOCK + b, weight);
        for (int i = b * NVFP4_BLOCK; i < (b + 1) * NVFP4_BLOCK; i++)
            sum[i] = __builtin_fmaf(e2m1_to_float((uint8_t)(codes[i / 2] >> i % 2 * 4 & 15)), factor, sum[i]);
    }
}
