/* SPDX-License-Identifier: Apache-2.0 */
/* CUDA's __match_any_sync, made of votes. */
#ifndef EPX_DEVICE_HIP_MATCH_H
#define EPX_DEVICE_HIP_MATCH_H

/* The lanes that have the same value: those that agree in every bit. */
KFN lanes_t lanes_match(int value)
{
    lanes_t same = ALL_LANES;
    for (int i = 0; i < 32; i++) {
        const int bit = value >> i & 1;
        const lanes_t ones = __ballot_sync(ALL_LANES, bit);
        same &= bit ? ones : ~ones;
    }
    return same;
}

#endif
