/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two kinds of e4m3. EPX speaks OCP's on every device (docs/formats.md): bias 7, largest 448, NaN 0x7f and 0xff, two
 * zeros. The cast of gfx940 to gfx942 speaks "FNUZ": bias 8, largest 240, NaN 0x80, one zero; gfx950 speaks OCP's
 * again.
 *
 *   value of a code     OCP                           FNUZ
 *   0x00..0x7e          v                             v / 2
 *   0x7f                NaN                           240
 *   0x80                -0                            NaN
 *   0x81..0xfe          -v                            -v / 2
 *   0xff                NaN                           -240
 *
 * So the FNUZ cast of x / 2 gives the OCP code of x, but for the sign of zero. Halving is exact as far as a code can
 * tell.
 */
#ifndef EPX_DEVICE_GPU_HIP_FNUZ_H
#define EPX_DEVICE_GPU_HIP_FNUZ_H

#include "util/numeric.h"

/* x within what e4m3 has; not for NaN. */
NUMERIC_FN float e4m3_clip(float x)
{
    return x > E4M3_MAX ? E4M3_MAX : x < -E4M3_MAX ? -E4M3_MAX : x;
}

/* What to cast to FNUZ in order to have x in OCP. */
NUMERIC_FN float fnuz_question(float x)
{
    return e4m3_clip(x) * 0.5f;
}

/* OCP's code of x from the FNUZ cast's answer: that has no negative zero. */
NUMERIC_FN uint8_t fnuz_result(uint8_t answer, float x)
{
    return (uint8_t)(answer | (float_bits(x) >> 24 & 0x80u));
}

/* The FNUZ code of half an OCP code's value: for matrix units that read FNUZ, with twice the scale. */
NUMERIC_FN uint8_t e4m3_to_fnuz_half(uint8_t q)
{
    return (q & 0x7fu) == 0x7fu ? 0x80u : q == 0x80u ? 0x00u : q;
}

#endif
