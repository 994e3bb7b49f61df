/* SPDX-License-Identifier: Apache-2.0 */
/* NVFP4 rows (util/nvfp4.h): a lane encodes 16 channels at a time, and decodes 8. */
#ifndef EPX_DEVICE_GPU_NVFP4_CUH
#define EPX_DEVICE_GPU_NVFP4_CUH

#include "util/nvfp4.h"

KFN_STEP size_t ag_nvfp4_encode(struct agent *ag, void *to, const void *x, int hidden, float row_scale)
{
    uint8_t *codes = (uint8_t *)to, *scales = codes + hidden / 2;

    AG_EACH(ag, int, b, hidden / NVFP4_BLOCK)
    {
        uint16_t values[NVFP4_BLOCK];
        for (int i = 0; i < NVFP4_BLOCK; i++)
            values[i] = ((const uint16_t *)x)[b * NVFP4_BLOCK + i];
        scales[b] = nvfp4_block(codes + b * NVFP4_BLOCK / 2, values, row_scale);
    }
    if (ag_leader(ag))
        memcpy(scales + hidden / NVFP4_BLOCK, &row_scale, sizeof(row_scale));
    return nvfp4_row_bytes(hidden);
}

/* Adds channels mine to mine + 7 of a row. */
KFN_STEP void nvfp4_add8(struct float8 *sum, const char *row, int hidden, int mine, float weight)
{
    const uint8_t *codes = (const uint8_t *)row + mine / 2;
    const float factor = mine < hidden ? nvfp4_factor((const uint8_t *)row, hidden, mine / NVFP4_BLOCK, weight) : 0.0f;

#pragma unroll
    for (int i = 0; i < 8; i++)
        if (mine < hidden)
            sum->v[i] = __fmaf_rn(e2m1_to_float((uint8_t)(codes[i / 2] >> i % 2 * 4 & 15)), factor, sum->v[i]);
}

#endif
