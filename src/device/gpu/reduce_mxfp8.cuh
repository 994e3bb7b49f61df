/* SPDX-License-Identifier: Apache-2.0 */
/* Sums of sums of bf16 rows, each rounded to MXFP8 (util/mxfp8.h): four lanes beside each other have a block. */
#ifndef EPX_DEVICE_GPU_REDUCE_MXFP8_CUH
#define EPX_DEVICE_GPU_REDUCE_MXFP8_CUH

#include "util/mxfp8.h"

/* Adds a finished sum, rounded, to the total, and begins the next. All lanes. */
KFN_STEP void mxfp8_close(struct float8 *total, struct float8 *sum)
{
    float most = 0.0f;
    uint32_t scale;

    for (int i = 0; i < 8; i++) {
        const float abs = float_from_bits(float_bits(sum->v[i]) & FLOAT_ABS_MASK);
        most = abs > most ? abs : most; /* not a NaN */
    }
    for (int d = 1; d < MXFP8_BLOCK / 8; d *= 2) {
        const float other = __shfl_xor_sync(ALL_LANES, most, d);
        most = other > most ? other : most;
    }
    scale = mxfp8_scale(most);
    for (int i = 0; i < 8; i++) {
        total->v[i] = __fadd_rn(total->v[i], mxfp8_round(sum->v[i], scale));
        sum->v[i] = 0.0f;
    }
}

/* Lanes behind the row have zeros. */
KFN void mxfp8_add(struct float8 *sum, const char *row, int mine, int n, int odd)
{
    if (n <= 0)
        return;
    const struct raw8<DTYPE_BF16> raw =
        odd ? sum_load<DTYPE_BF16, 1>(row, mine, n) : sum_load<DTYPE_BF16, 0>(row, mine, n);
    floats_add(sum, raw_floats<DTYPE_BF16>(raw), 0, 0.0f);
}

KFN_STEP void mxfp8_sums(const char *data, struct sum_in in, uint32_t ends, char *out, int odd)
{
    const struct sum_set set = {data, 0.0f, 0, 0};

    for (int at = 0; at < in.hidden; at += SUM_STEP) {
        const int mine = at + lane_id() * 8, n = in.hidden - mine;
        struct float8 total = {{0, 0, 0, 0, 0, 0, 0, 0}}, sum = {{0, 0, 0, 0, 0, 0, 0, 0}};
        for (int b = 0; b < 2; b++)
            if (in.bias[b])
                mxfp8_add(&total, in.bias[b], mine, n, odd);
        for (int r = 0; r < in.n; r++) {
            mxfp8_add(&sum, sum_row(set, r), mine, n, odd);
            if (ends >> r & 1)
                mxfp8_close(&total, &sum);
        }
        char *to = out + (size_t)mine * 2;
        if (n > 0 && odd)
            raw_store_odd<DTYPE_BF16>(to, floats_raw<DTYPE_BF16>(total), n);
        else if (n > 0)
            raw_store<DTYPE_BF16>(to, floats_raw<DTYPE_BF16>(total));
    }
}

KFN void ag_reduce_mxfp8(struct agent *ag, void *out, int hidden, const struct sum_set *set, int n, uint32_t ends,
                         const void *bias0, const void *bias1)
{
    const struct sum_in in = {{(const char *)bias0, (const char *)bias1}, n, 0, hidden};
    const int odd = __any_sync(ALL_LANES, (lane_id() < n && !aligned16(set->data)) || !aligned16(out) ||
                                              !aligned16(bias0) || !aligned16(bias1));

    (void)ag;
    mxfp8_sums(set->data, in, ends, (char *)out, odd);
}

#endif
