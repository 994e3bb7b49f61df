/* SPDX-License-Identifier: Apache-2.0 */
/* Sums of LogFMT rows by a warp (logfmt.cuh), in the order and with the bits of device/cpu/math_reduce.h. */
#ifndef EPX_DEVICE_GPU_REDUCE_LOGFMT_CUH
#define EPX_DEVICE_GPU_REDUCE_LOGFMT_CUH

#ifndef LOGFMT_ROWS
#define LOGFMT_ROWS 4 /* whose loads are in flight, and whose ranges the lanes compute together; even */
#endif

/* Where a lane's row is: lane r follows row r from block to block. */
struct logfmt_place {
    const char *row, *block; /* the block that a step begins with */
    uint32_t word;           /* of the bitmap, with that block's bit */
};

KFN struct logfmt_place logfmt_place_at(const char *row, int hidden, int block)
{
    const uint32_t *bitmap = (const uint32_t *)row;
    struct logfmt_place at = {row, NULL, 0};
    int coded = 0;

    if (!row)
        return at;
    for (int w = 0; w < block / 32; w++)
        coded += __popc(bitmap[w]);
    at.word = bitmap[block / 32];
    coded += __popc(at.word & ((1u << block % 32) - 1));
    at.block = row + logfmt_payload(hidden) + coded * LOGFMT_CODED_BYTES + (block - coded) * LOGFMT_RAW_BYTES;
    return at;
}

/* Bytes of the first `n` blocks of a step; bits: which are coded. */
KFN int logfmt_bytes(uint32_t bits, int n)
{
    const int coded = __popc(bits & ((1u << n) - 1));
    return coded * LOGFMT_CODED_BYTES + (n - coded) * LOGFMT_RAW_BYTES;
}

/* The ranges of a step's blocks in rows `first` and after: row first + i / groups, block i % groups, by lane i. */
KFN struct logfmt_range logfmt_ranges(const struct logfmt_place &at, const struct sum_in &in, int first, int block)
{
    const int r = first + lane_id() / LOGFMT_GROUPS, b = block + lane_id() % LOGFMT_GROUPS;
    const char *row = (const char *)__shfl_sync(ALL_LANES, (unsigned long long)at.row, r < WARP ? r : 0);
    uint32_t range = 0;

    if (r < in.n && b < logfmt_blocks(in.hidden))
        range = *(const uint32_t *)(row + logfmt_table(in.hidden) + (size_t)b * 4);
    return logfmt_range_of(range & 0xffffu, range >> 16);
}

KFN struct logfmt_range logfmt_range_from(const struct logfmt_range &own, int lane)
{
    struct logfmt_range r;

    r.log_amin = __shfl_sync(ALL_LANES, own.log_amin, lane);
    r.step = __shfl_sync(ALL_LANES, own.step, lane);
    return r;
}

/* The lane's block of row r, if there is one. */
KFN const char *logfmt_block_of(const struct logfmt_place &at, int r, int block, int *coded)
{
    const int group = lane_id() / 16;
    const uint32_t bits = __shfl_sync(ALL_LANES, at.word, r % WARP) >> block % 32;
    const char *from = (const char *)__shfl_sync(ALL_LANES, (unsigned long long)at.block, r % WARP);

    *coded = (int)(bits >> group & 1);
    return from + logfmt_bytes(bits, group);
}

/* One of two rows, whose block may be raw or have codes that need more care. */
KFN void logfmt_add_row(struct float8 *sum, const struct logfmt_place &at, const struct sum_in &in, int r, int block,
                        int n, uint2 low, uint32_t bits, const struct logfmt_range &range, float weight)
{
    int coded;
    const char *from = logfmt_block_of(at, r, block, &coded);

    if (r < in.n)
        floats_add(sum, coded ? logfmt_values<0>(low, bits, range) : logfmt_uncoded(from, low, n), 1, weight);
}

/* Adds rows first to first + LOGFMT_ROWS - 1 of a step to the lane's eight channels; n of these are in the row. The
 * loop is not unrolled: the code of two rows fits the cache of instructions. */
KFN void logfmt_add_rows(struct float8 *sum, const struct logfmt_place &at, float weights, const struct sum_in &in,
                         int first, int block, int n)
{
    const int end = in.n < first + LOGFMT_ROWS ? in.n : first + LOGFMT_ROWS;
    const lanes_t two = ((lanes_t)1 << 2 * LOGFMT_GROUPS) - 1; /* rows' ranges */
    struct logfmt_raw raw[LOGFMT_ROWS];

#pragma unroll
    for (int k = 0; k < LOGFMT_ROWS; k++) {
        int coded;
        const char *from = logfmt_block_of(at, first + k, block, &coded);
        raw[k] = logfmt_load(from, coded, first + k < in.n ? n : 0);
    }
    const struct logfmt_range ranges = logfmt_ranges(at, in, first, block);
    const int short_step = __any_sync(ALL_LANES, n < 8);
    const lanes_t plain = __ballot_sync(ALL_LANES, ranges.plain || lane_id() >= (end - first) * LOGFMT_GROUPS);
    ROLLED
    for (int r = first; r < end; r += 2) {
        const int lane = (r - first) * LOGFMT_GROUPS + lane_id() / 16;
        const struct logfmt_range even = logfmt_range_from(ranges, lane);
        const struct logfmt_range odd = logfmt_range_from(ranges, lane + LOGFMT_GROUPS);
        /* A product by 1 is exact: rows without weights take no other way. */
        const float even_weight = in.weighted ? __shfl_sync(ALL_LANES, weights, r) : 1.0f;
        const float odd_weight = in.weighted ? __shfl_sync(ALL_LANES, weights, (r + 1) % WARP) : 1.0f;
        const uint32_t bits = logfmt_transpose(__byte_perm(raw[0].word, raw[1].word, 0x5410));
        const uint32_t even_bits = logfmt_bits_of(bits, 0), odd_bits = logfmt_bits_of(bits, 1);
        if (!short_step && (plain >> (r - first) * LOGFMT_GROUPS & two) == two) {
            floats_add(sum, logfmt_values<1>(raw[0].low, even_bits, even), 1, even_weight);
            if (r + 1 < end)
                floats_add(sum, logfmt_values<1>(raw[1].low, odd_bits, odd), 1, odd_weight);
        } else {
            logfmt_add_row(sum, at, in, r, block, n, raw[0].low, even_bits, even, even_weight);
            logfmt_add_row(sum, at, in, r + 1, block, n, raw[1].low, odd_bits, odd, odd_weight);
        }
#pragma unroll
        for (int k = 0; k + 2 < LOGFMT_ROWS; k++)
            raw[k] = raw[k + 2];
    }
}

/* By value, as sum_fast. Channels begin to end, of which `out` and the biases have the first. */
KFN_STEP void sum_logfmt(const char *data, float weights, struct sum_in in, char *out, int begin, int end)
{
    struct logfmt_place at = logfmt_place_at(lane_id() < in.n ? data : NULL, in.hidden, begin / LOGFMT_BLOCK);

    for (int channel = begin; channel < end; channel += SUM_STEP) {
        const int block = channel / LOGFMT_BLOCK, mine = channel - begin + lane_id() * 8, n = end - begin - mine;
        struct float8 sum = {{0, 0, 0, 0, 0, 0, 0, 0}};
        if (block % 32 == 0 && at.row)
            at.word = ((const uint32_t *)at.row)[block / 32];
        for (int b = 0; b < 2; b++)
            if (in.bias[b] && n > 0)
                floats_add(&sum, raw_floats<DTYPE_BF16>(raw_load_odd<DTYPE_BF16>(in.bias[b] + (size_t)mine * 2, n)), 0,
                           0.0f);
        for (int first = 0; first < in.n; first += LOGFMT_ROWS)
            logfmt_add_rows(&sum, at, weights, in, first, block, n);
        if (at.row)
            at.block += logfmt_bytes(at.word >> block % 32, LOGFMT_GROUPS);
        if (n >= 8 && aligned16(out))
            raw_store<DTYPE_BF16>(out + (size_t)mine * 2, floats_raw<DTYPE_BF16>(sum));
        else if (n > 0)
            raw_store_odd<DTYPE_BF16>(out + (size_t)mine * 2, floats_raw<DTYPE_BF16>(sum), n);
    }
}

KFN void ag_reduce_logfmt(struct agent *ag, void *out, int hidden, int begin, int end, const struct sum_set *set, int n,
                          int weighted, const void *bias0, const void *bias1)
{
    const struct sum_in in = {{(const char *)bias0, (const char *)bias1}, n, weighted, hidden};

    (void)ag;
    sum_logfmt(set->data, set->weight, in, (char *)out, begin, end);
}

#endif
