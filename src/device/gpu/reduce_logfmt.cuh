/* SPDX-License-Identifier: Apache-2.0 */
/* Sums of LogFMT rows by a warp (logfmt.cuh), in the order and with the bits of device/cpu/math_reduce.h. */
#ifndef EPX_DEVICE_GPU_REDUCE_LOGFMT_CUH
#define EPX_DEVICE_GPU_REDUCE_LOGFMT_CUH

#ifndef LOGFMT_ROWS
#define LOGFMT_ROWS 4 /* whose loads are in flight, and whose ranges the lanes compute together; even */
#endif

/* Where a lane's row is: lane r follows row r from step to step. */
struct logfmt_place {
    const char *row;
    unsigned long long block; /* the address of the step's first block; lowest bits: which of its blocks are coded */
};

KFN uint32_t logfmt_coded_at(const char *row, int block)
{
    return ((const uint32_t *)row)[block / 32] >> block % 32 & ((1u << LOGFMT_GROUPS) - 1);
}

KFN struct logfmt_place logfmt_place_at(const char *row, int hidden, int block)
{
    const uint32_t *bitmap = (const uint32_t *)row;
    struct logfmt_place at = {row, 0};
    int coded = 0;

    if (!row)
        return at;
    for (int w = 0; w < block / 32; w++)
        coded += __popc(bitmap[w]);
    if (block % 32)
        coded += __popc(bitmap[block / 32] & ((1u << block % 32) - 1));
    at.block = (unsigned long long)(row + logfmt_payload(hidden) + coded * LOGFMT_CODED_BYTES +
                                    (block - coded) * LOGFMT_RAW_BYTES);
    at.block |= logfmt_coded_at(row, block);
    return at;
}

/* Lane r goes on to the step that begins with `block`, one of the row. */
KFN void logfmt_place_next(struct logfmt_place *at, int block)
{
    if (!at->row)
        return;
    const int coded = __popc((uint32_t)at->block & 15u);
    at->block = (at->block & ~15ull) + (unsigned long long)(LOGFMT_GROUPS * LOGFMT_RAW_BYTES -
                                                            coded * (LOGFMT_RAW_BYTES - LOGFMT_CODED_BYTES));
    at->block |= logfmt_coded_at(at->row, block);
}

/* The lane's block of row r. */
KFN const char *logfmt_block_of(const struct logfmt_place &at, int r, int *coded)
{
    const unsigned group = (unsigned)lane_id() / 16;
    const unsigned long long block = __shfl_sync(ALL_LANES, at.block, r);
    const uint32_t bits = (uint32_t)block & 15u, before = __popc(bits & ((1u << group) - 1));

    *coded = (int)(bits >> group & 1);
    return (const char *)((block & ~15ull) +
                          (group * LOGFMT_RAW_BYTES - before * (LOGFMT_RAW_BYTES - LOGFMT_CODED_BYTES)));
}

/* What is loaded of a step in LOGFMT_ROWS rows. Lane i has the extremes of row first + i / groups, block i % groups. */
struct logfmt_loaded {
    struct logfmt_raw raw[LOGFMT_ROWS];
    uint32_t extremes;
};

/* Of a whole step, without any condition: a load under one would be waited for at once. Instead of rows that are not
 * there the last one is loaded. */
KFN struct logfmt_loaded logfmt_load_rows(const struct logfmt_place &at, const struct sum_in &in, int first, int block)
{
    const int r = first + lane_id() / LOGFMT_GROUPS, b = block + lane_id() % LOGFMT_GROUPS;
    const char *row = (const char *)__shfl_sync(ALL_LANES, (unsigned long long)at.row, r < in.n ? r : in.n - 1);
    const unsigned place = (unsigned)lane_id() % 16,
                   word = LOGFMT_BLOCK + (unsigned)logfmt_decoded_word((int)place) * 2;
    struct logfmt_loaded loaded;

    loaded.extremes = *(const uint32_t *)(row + logfmt_table(in.hidden) + (unsigned)b * 4);
#pragma unroll
    for (int k = 0; k < LOGFMT_ROWS; k++) {
        int coded;
        const char *from = logfmt_block_of(at, first + k < in.n ? first + k : in.n - 1, &coded);
        loaded.raw[k].low = *(const uint2 *)(from + (place << (4 - coded)));
        loaded.raw[k].word = *(const uint16_t *)(from + word); /* of a raw block: not used */
    }
    return loaded;
}

/* A block that may be raw or have codes that need more care; `lane` has its extremes. n: channels from the lane's
 * first on. */
KFN void logfmt_add_row(struct float8 *sum, const char *from, int coded, int n, uint2 low, uint32_t bits,
                        uint32_t range, float weight, uint32_t mantissa)
{
    if (coded)
        floats_add(sum, logfmt_values<0>(low, bits, logfmt_range_of(range & 0xffffu, range >> 16), mantissa), 1,
                   weight);
    else
        floats_add(sum, logfmt_uncoded(from, low, n), 1, weight);
}

/* Lane i's row and block, as in struct logfmt_loaded. */
struct logfmt_scale {
    struct logfmt_range range;
    float weight; /* with the powers of two that logfmt_values<1>() leaves out */
};

KFN struct logfmt_scale logfmt_scale_from(const struct logfmt_scale &own, int lane)
{
    struct logfmt_scale s = own;

    s.range.step = __shfl_sync(ALL_LANES, own.range.step, lane);
    s.range.base = __shfl_sync(ALL_LANES, own.range.base, lane);
    s.weight = __shfl_sync(ALL_LANES, own.weight, lane);
    return s;
}

/* Adds rows first to first + LOGFMT_ROWS - 1 of a whole step to the lane's eight channels. The loop is not unrolled:
 * the code of two rows fits the cache of instructions. */
KFN void logfmt_add_rows(struct float8 *sum, const struct logfmt_place &at, float weights, const struct sum_in &in,
                         int first, struct logfmt_loaded loaded, const struct logfmt_turns &turns)
{
    const int end = in.n < first + LOGFMT_ROWS ? in.n : first + LOGFMT_ROWS, mine = first + lane_id() / LOGFMT_GROUPS;
    const lanes_t two = ((lanes_t)1 << 2 * LOGFMT_GROUPS) - 1; /* rows' ranges */
    const float weight = __shfl_sync(ALL_LANES, weights, mine % WARP);
    const uint32_t amax = loaded.extremes & 0xffffu, amin = loaded.extremes >> 16, mantissa = opaque(0x007fffffu);
    struct logfmt_scale scale;

    /* A product by 1 is exact: rows without weights take no other way. */
    scale.range = logfmt_range_of(amax, amin);
    scale.weight = logfmt_weight(in.weighted ? weight : 1.0f, scale.range.top);
    const int serves = scale.range.lowest && amin >= BF16_NORMAL && (!in.weighted || logfmt_weight_serves(weight));
    const lanes_t plain = __ballot_sync(ALL_LANES, serves || lane_id() >= (end - first) * LOGFMT_GROUPS);
    ROLLED
    for (int r = first; r < end; r += 2) {
        const int even = (r - first) * LOGFMT_GROUPS + lane_id() / 16, odd = even + LOGFMT_GROUPS;
        const uint32_t bits = logfmt_transpose(__byte_perm(loaded.raw[0].word, loaded.raw[1].word, 0x5410), turns);
        const uint32_t even_bits = logfmt_bits_of(bits, 0), odd_bits = logfmt_bits_of(bits, 1);
        if ((plain >> (r - first) * LOGFMT_GROUPS & two) == two) {
            const struct logfmt_scale one = logfmt_scale_from(scale, even), other = logfmt_scale_from(scale, odd);
            floats_add(sum, logfmt_values<1>(loaded.raw[0].low, even_bits, one.range, mantissa), 1, one.weight);
            if (r + 1 < end)
                floats_add(sum, logfmt_values<1>(loaded.raw[1].low, odd_bits, other.range, mantissa), 1, other.weight);
        } else {
            ROLLED
            for (int k = 0; k < 2; k++) {
                const float own = in.weighted ? __shfl_sync(ALL_LANES, weights, (r + k) % WARP) : 1.0f;
                const uint32_t range = __shfl_sync(ALL_LANES, loaded.extremes, k ? odd : even);
                int coded;
                const char *from = logfmt_block_of(at, (r + k) % WARP, &coded);
                if (r + k < end)
                    logfmt_add_row(sum, from, coded, 8, k ? loaded.raw[1].low : loaded.raw[0].low,
                                   k ? odd_bits : even_bits, range, own, mantissa);
            }
        }
#pragma unroll
        for (int k = 0; k + 2 < LOGFMT_ROWS; k++)
            loaded.raw[k] = loaded.raw[k + 2];
    }
}

/* The lane's n channels of a step that is not whole, or where `out` is not aligned. */
KFN_STEP void sum_logfmt_odd(struct logfmt_place at, float weights, struct sum_in in, char *out, int block, int mine,
                             int n)
{
    const struct logfmt_turns turns = logfmt_turns_of_lane();
    const int place = lane_id() % 16, group = lane_id() / 16;
    struct float8 sum = {{0, 0, 0, 0, 0, 0, 0, 0}};

    for (int b = 0; b < 2; b++)
        if (in.bias[b] && n > 0)
            floats_add(&sum, raw_floats<DTYPE_BF16>(raw_load_odd<DTYPE_BF16>(in.bias[b] + (size_t)mine * 2, n)), 0,
                       0.0f);
    for (int r = 0; r < in.n; r++) {
        const char *row = (const char *)__shfl_sync(ALL_LANES, (unsigned long long)at.row, r);
        const float weight = in.weighted ? __shfl_sync(ALL_LANES, weights, r) : 1.0f;
        uint32_t range = 0, word = 0;
        uint2 low = make_uint2(0, 0);
        int coded;
        const char *from = logfmt_block_of(at, r, &coded);
        if (n > 0)
            range = *(const uint32_t *)(row + logfmt_table(in.hidden) + (size_t)(block + group) * 4);
        if (n >= 8)
            low = *(const uint2 *)(from + place * (coded ? 8 : 16));
        if (n > 0 && coded)
            word = *(const uint16_t *)(from + LOGFMT_BLOCK + logfmt_decoded_word(place) * 2);
        const uint32_t bits = logfmt_bits_of(logfmt_transpose(word, turns), 0);
        logfmt_add_row(&sum, from, coded, n, low, bits, range, weight, 0x007fffffu);
    }
    if (n > 0)
        raw_store_odd<DTYPE_BF16>(out + (size_t)mine * 2, floats_raw<DTYPE_BF16>(sum), n);
}

/* By value, as sum_fast. Channels begin to end, of which `out` and the biases have the first. The rows that come next
 * are loaded before those that are there are added. */
KFN_STEP void sum_logfmt(const char *data, float weights, struct sum_in in, char *out, int begin, int end)
{
    struct logfmt_place ahead = logfmt_place_at(lane_id() < in.n ? data : NULL, in.hidden, begin / LOGFMT_BLOCK);
    const struct logfmt_turns turns = logfmt_turns_of_lane();
    const int odd = __any_sync(ALL_LANES, !aligned16(out) || !aligned16(in.bias[0]) || !aligned16(in.bias[1]));
    const int whole = odd || in.n == 0 ? begin : begin + (end - begin) / SUM_STEP * SUM_STEP;
    struct logfmt_loaded next;

    if (begin < whole)
        next = logfmt_load_rows(ahead, in, 0, begin / LOGFMT_BLOCK);
    for (int channel = begin; channel < whole; channel += SUM_STEP) {
        const int block = channel / LOGFMT_BLOCK, mine = channel - begin + lane_id() * 8;
        const struct logfmt_place at = ahead;
        struct float8 sum = {{0, 0, 0, 0, 0, 0, 0, 0}};
        for (int b = 0; b < 2; b++)
            if (in.bias[b])
                floats_add(&sum, raw_floats<DTYPE_BF16>(raw_load<DTYPE_BF16>(in.bias[b] + (size_t)mine * 2)), 0, 0.0f);
        if (channel + SUM_STEP < end)
            logfmt_place_next(&ahead, block + LOGFMT_GROUPS);
        for (int first = 0; first < in.n; first += LOGFMT_ROWS) {
            const struct logfmt_loaded loaded = next;
            const int stays = first + LOGFMT_ROWS < in.n || channel + SUM_STEP >= whole;
            struct logfmt_place from = at;
            from.block = stays ? at.block : ahead.block;
            /* At the end once more what was there: without a condition, as said above. */
            next = logfmt_load_rows(from, in, first + LOGFMT_ROWS < in.n ? first + LOGFMT_ROWS : 0,
                                    stays ? block : block + LOGFMT_GROUPS);
            logfmt_add_rows(&sum, at, weights, in, first, loaded, turns);
        }
        raw_store<DTYPE_BF16>(out + (size_t)mine * 2, floats_raw<DTYPE_BF16>(sum));
    }
    for (int channel = whole; channel < end; channel += SUM_STEP) {
        const int mine = channel - begin + lane_id() * 8;
        sum_logfmt_odd(ahead, weights, in, out, channel / LOGFMT_BLOCK, mine, end - begin - mine);
        if (channel + SUM_STEP < end)
            logfmt_place_next(&ahead, channel / LOGFMT_BLOCK + LOGFMT_GROUPS);
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
