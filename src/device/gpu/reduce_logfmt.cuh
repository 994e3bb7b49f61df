/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sums of LogFMT rows by a warp (logfmt.cuh), in the order and with the bits of device/cpu/math_reduce.h. Where there
 * is a ring the rows come through it (sum_logfmt_ring), elsewhere lanes load them (sum_logfmt).
 */
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

/* The lane's n channels of a step that is not whole, where `out` is not aligned, or of rows of which some are read as
 * they are: bit r of `rounded`, lane r has such a row's address. */
KFN_STEP void sum_logfmt_odd(struct logfmt_place at, const char *data, lanes_t rounded, float weights, struct sum_in in,
                             char *out, int block, int mine, int n)
{
    const struct logfmt_turns turns = logfmt_turns_of_lane();
    const int place = lane_id() % 16, group = lane_id() / 16;
    struct float8 sum = {{0, 0, 0, 0, 0, 0, 0, 0}};

    for (int b = 0; b < 2; b++)
        if (in.bias[b] && n > 0)
            floats_add(&sum, raw_floats<DTYPE_BF16>(raw_load_odd<DTYPE_BF16>(in.bias[b] + (size_t)mine * 2, n)), 0,
                       0.0f);
    for (int r = 0; r < in.n; r++) {
        const char *row = (const char *)__shfl_sync(ALL_LANES, (unsigned long long)data, r);
        const float weight = in.weighted ? __shfl_sync(ALL_LANES, weights, r) : 1.0f;
        uint32_t range = 0, word = 0;
        uint2 low = make_uint2(0, 0);
        int coded;
        const char *from = logfmt_block_of(at, r, &coded);
        if (rounded >> r & 1) {
            const int first = block * LOGFMT_BLOCK + lane_id() * 8;
            const uint4 words = logfmt_load8(row, n > 0 ? in.hidden : 0, first);
            const uint32_t extremes =
                logfmt_extremes_here(words, (first / LOGFMT_BLOCK + 1) * LOGFMT_BLOCK <= in.hidden);
            logfmt_add_rounded(&sum, words, extremes, 1, weight);
            continue;
        }
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
KFN_STEP void sum_logfmt(const char *data, lanes_t rounded, float weights, struct sum_in in, char *out, int begin,
                         int end)
{
    const int coded = lane_id() < in.n && !(rounded >> lane_id() & 1);
    struct logfmt_place ahead = logfmt_place_at(coded ? data : NULL, in.hidden, begin / LOGFMT_BLOCK);
    const struct logfmt_turns turns = logfmt_turns_of_lane();
    const int odd = __any_sync(ALL_LANES, !aligned16(out) || !aligned16(in.bias[0]) || !aligned16(in.bias[1]));
    const int whole = odd || rounded || in.n == 0 ? begin : begin + (end - begin) / SUM_STEP * SUM_STEP;
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
        sum_logfmt_odd(ahead, data, rounded, weights, in, out, channel / LOGFMT_BLOCK, mine, end - begin - mine);
        if (channel + SUM_STEP < end)
            logfmt_place_next(&ahead, channel / LOGFMT_BLOCK + LOGFMT_GROUPS);
    }
}

#if RING
/*
 * The same by way of the ring (WARP is 32: two blocks a step). A batch is a row's next two steps: at most four blocks,
 * which follow each other. The steps and weights of a chunk's blocks are computed by all lanes at once and kept behind
 * the ring.
 */
#define LOGFMT_UNIT_BLOCKS 4

/* Of one block of one row. */
struct logfmt_entry {
    uint32_t step, base;
    float weight;
    uint32_t care; /* 0: plain; the extremes of a coded block that is not, all ones of a raw one */
};

/* What a lane knows of its row. Bit i of a set: block i from here on is coded. */
struct logfmt_ahead {
    const char *from; /* what is fetched next */
    uint32_t fetched;
    int blocks;     /* that are still to be fetched */
    int row;        /* of all: whose turn it is to be fetched */
    unsigned batch; /* its number */
};

KFN void logfmt_fetch(struct logfmt_ahead *next, int rows, char *ring)
{
    if (lane_id() == next->row && next->blocks > 0) {
        const int n = next->blocks < LOGFMT_UNIT_BLOCKS ? next->blocks : LOGFMT_UNIT_BLOCKS;
        const unsigned bytes = (unsigned)(n * LOGFMT_RAW_BYTES) -
                               __popc(next->fetched & ((1u << n) - 1)) * (LOGFMT_RAW_BYTES - LOGFMT_CODED_BYTES);
        ring_fetch(ring, next->batch, next->from, bytes);
        next->from += bytes;
        next->fetched >>= LOGFMT_UNIT_BLOCKS;
        next->blocks -= n;
    }
    next->batch++;
    next->row = next->row + 1 < rows ? next->row + 1 : 0;
}

/* Bits of `n` blocks from `block` on, n <= 32. */
KFN uint32_t logfmt_coded_bits(const char *row, int block, int n)
{
    const uint32_t *bitmap = (const uint32_t *)row;
    const int shift = block % 32;
    uint32_t bits = bitmap[block / 32] >> shift;

    if (shift + n > 32)
        bits |= bitmap[block / 32 + 1] << (32 - shift);
    return n < 32 ? bits & ((1u << n) - 1) : bits;
}

/* Entry r * blocks + q is that of block q of row r. */
KFN void logfmt_fill(struct logfmt_entry *entries, const char *data, uint32_t coded, float weights,
                     const struct sum_in &in, int block, int blocks)
{
    for (int i = lane_id(); i - lane_id() < in.n * blocks; i += WARP) {
        const int r = i / blocks < in.n ? i / blocks : in.n - 1, q = i % blocks;
        const char *row = (const char *)__shfl_sync(ALL_LANES, (unsigned long long)data, r);
        const uint32_t bits = __shfl_sync(ALL_LANES, coded, r);
        const float weight = in.weighted ? __shfl_sync(ALL_LANES, weights, r) : 1.0f;
        const uint32_t extremes = *(const uint32_t *)(row + logfmt_table(in.hidden) + (unsigned)(block + q) * 4);
        const struct logfmt_range range = logfmt_range_of(extremes & 0xffffu, extremes >> 16);
        const int plain = range.lowest && extremes >> 16 >= BF16_NORMAL && logfmt_weight_serves(weight);
        const uint32_t care = !(bits >> q & 1) ? ~0u : plain ? 0 : extremes;
        const struct logfmt_entry entry = {range.step, range.base, logfmt_weight(weight, range.top), care};
        if (i < in.n * blocks)
            *(uint4 *)&entries[i] = *(const uint4 *)&entry;
    }
    __syncwarp();
}

KFN struct logfmt_entry logfmt_entry_at(ring_address at)
{
    const uint4 v = ring_u128(at);
    const struct logfmt_entry entry = {v.x, v.y, __uint_as_float(v.z), v.w};
    return entry;
}

/* A lane's part of a block in the slot. */
KFN struct logfmt_raw logfmt_raw_at(ring_address block, uint32_t coded)
{
    const uint32_t place = (uint32_t)lane_id() % 16;
    struct logfmt_raw raw;

    raw.low = ring_u64(block + (place << (4 - coded)));
    raw.word = ring_u16(block + LOGFMT_BLOCK + (uint32_t)logfmt_decoded_word((int)place) * 2);
    return raw;
}

KFN void logfmt_add_entry(struct float8 *sum, const struct logfmt_entry &entry, struct logfmt_raw raw, uint32_t bits,
                          ring_address block, float weight)
{
    const struct logfmt_range own = {entry.step, entry.base, 0, 0, 0};

    if (entry.care == 0) {
        floats_add(sum, logfmt_values<1>(raw.low, bits, own, 0x007fffffu), 1, entry.weight);
    } else if (entry.care == ~0u) {
        const uint2 high = ring_u64(block + (uint32_t)lane_id() % 16 * 16 + 8);
        struct raw8<DTYPE_BF16> values;
        values.a = make_uint4(raw.low.x, raw.low.y, high.x, high.y);
        floats_add(sum, raw_floats<DTYPE_BF16>(values), 1, weight);
    } else {
        const struct logfmt_range range = logfmt_range_of(entry.care & 0xffffu, entry.care >> 16);
        floats_add(sum, logfmt_values<0>(raw.low, bits, range, 0x007fffffu), 1, weight);
    }
}

#define LOGFMT_ENTRIES ((int)(RING_SCALES_BYTES / sizeof(struct logfmt_entry)))
#define LOGFMT_SPAN_BLOCKS 32

/* Whole steps, at most LOGFMT_SPAN_BLOCKS blocks; `out` and the biases have the first. */
KFN_STEP void sum_logfmt_ring(const char *data, float weights, struct sum_in in, char *out, int begin, int end,
                              char *ring, unsigned batch)
{
    const struct logfmt_turns turns = logfmt_turns_of_lane();
    const int first = begin / LOGFMT_BLOCK, blocks = (end - begin) / LOGFMT_BLOCK;
    const uint32_t group = (uint32_t)lane_id() / 16;
    const int chunk = LOGFMT_ENTRIES / (in.n <= 8 ? 8 : in.n <= 16 ? 16 : 32); /* blocks with entries */
    const struct logfmt_place at = logfmt_place_at(lane_id() < in.n ? data : NULL, in.hidden, first);
    const uint32_t mantissa = opaque(0x007fffffu);
    uint32_t coded = lane_id() < in.n ? logfmt_coded_bits(data, first, blocks) : 0;
    struct logfmt_entry *entries = (struct logfmt_entry *)(ring + RING_SCALES);
    struct logfmt_ahead next = {(const char *)(at.block & ~15ull), coded, blocks, 0, batch};

    ring_fence();
    __syncwarp();
    for (int i = 0; i < RING_SLOTS; i++)
        logfmt_fetch(&next, in.n, ring);
    for (int b = 0; b < blocks; b += LOGFMT_UNIT_BLOCKS, coded >>= LOGFMT_UNIT_BLOCKS) {
        const int left = blocks - b / chunk * chunk, width = left < chunk ? left : chunk;
        const int mine = b * LOGFMT_BLOCK + lane_id() * 8, both = blocks - b > LOGFMT_GROUPS;
        struct float8 sum[2] = {{{0, 0, 0, 0, 0, 0, 0, 0}}, {{0, 0, 0, 0, 0, 0, 0, 0}}};
        if (b % chunk == 0)
            logfmt_fill(entries, data, coded, weights, in, first + b, width);
        sum_biases(sum, in, mine, both);
        ROLLED
        for (int r = 0; r < in.n; r++, batch++) {
            const ring_address slot = ring_at(ring) + batch % RING_SLOTS * RING_SLOT_BYTES;
            const uint32_t bits = __shfl_sync(ALL_LANES, coded, r), later = bits >> LOGFMT_GROUPS, saved = 96;
            const ring_address block = slot + group * LOGFMT_RAW_BYTES - (bits & group) * saved;
            const ring_address second =
                slot + (group + LOGFMT_GROUPS) * LOGFMT_RAW_BYTES - (__popc(bits & 3u) + (later & group)) * saved;
            const ring_address entry = ring_at((char *)entries) + (uint32_t)(r * width + b % chunk + (int)group) * 16;
            const struct logfmt_entry one = logfmt_entry_at(entry), other = logfmt_entry_at(entry + (both ? 32 : 0));
            ring_wait(ring, batch);
            const struct logfmt_raw low = logfmt_raw_at(block, bits >> group & 1);
            const struct logfmt_raw high = logfmt_raw_at(second, later >> group & 1);
            const uint32_t words = logfmt_transpose(__byte_perm(low.word, high.word, 0x5410), turns);
            if (!__any_sync(ALL_LANES, (one.care | other.care) != 0)) {
                const struct logfmt_range even = {one.step, one.base, 0, 0, 0}, odd = {other.step, other.base, 0, 0, 0};
                floats_add(&sum[0], logfmt_values<1>(low.low, logfmt_bits_of(words, 0), even, mantissa), 1, one.weight);
                floats_add(&sum[1], logfmt_values<1>(high.low, logfmt_bits_of(words, 1), odd, mantissa), 1,
                           other.weight);
            } else {
                const float weight = in.weighted ? __shfl_sync(ALL_LANES, weights, r) : 1.0f;
                logfmt_add_entry(&sum[0], one, low, logfmt_bits_of(words, 0), block, weight);
                if (both)
                    logfmt_add_entry(&sum[1], other, high, logfmt_bits_of(words, 1), second, weight);
            }
            __syncwarp(); /* all lanes have read the slot: it may be filled again */
            logfmt_fetch(&next, in.n, ring);
        }
#pragma unroll
        for (int j = 0; j < 2; j++)
            if (j == 0 || both)
                raw_store<DTYPE_BF16>(out + (size_t)(mine + j * SUM_STEP) * 2, floats_raw<DTYPE_BF16>(sum[j]));
    }
}

/* Returns the first channel that is left to sum_logfmt(). */
KFN int sum_logfmt_by_ring(struct agent *ag, const struct sum_set &set, struct sum_in in, char *out, int begin, int end)
{
    const int odd = !aligned16(out) || !aligned16(in.bias[0]) || !aligned16(in.bias[1]);
    const int span = LOGFMT_SPAN_BLOCKS * LOGFMT_BLOCK, whole = (end - begin) / SUM_STEP * SUM_STEP;
    unsigned batch = ag->ring_next;

    if (!ag->ring || in.n == 0 || odd)
        return begin;
    for (int at = 0; at < whole; at += span) {
        const int n = whole - at < span ? whole - at : span;
        struct sum_in here = in;
        for (int i = 0; i < 2; i++)
            here.bias[i] = in.bias[i] ? in.bias[i] + (size_t)at * 2 : NULL;
        sum_logfmt_ring(set.data, set.weight, here, out + (size_t)at * 2, begin + at, begin + at + n, ag->ring, batch);
        batch += (unsigned)((n / LOGFMT_BLOCK + LOGFMT_UNIT_BLOCKS - 1) / LOGFMT_UNIT_BLOCKS * in.n);
        __syncwarp();
    }
    if (lane_id() == 0)
        ag->ring_next = batch;
    __syncwarp();
    return begin + whole;
}
#else
KFN int sum_logfmt_by_ring(struct agent *, const struct sum_set &, struct sum_in, char *, int begin, int)
{
    return begin;
}
#endif

/* Rows of ROWS_LOGFMT, of ROWS_ROUNDED, or of both. */
KFN void ag_reduce_logfmt(struct agent *ag, void *out, int hidden, int begin, int end, const struct sum_set *set, int n,
                          int weighted, const void *bias0, const void *bias1)
{
    struct sum_in in = {{(const char *)bias0, (const char *)bias1}, n, weighted, hidden};
    const lanes_t rounded = __ballot_sync(ALL_LANES, lane_id() < n && set->format == ROWS_ROUNDED);
    const int rest = rounded ? sum_all_rounded(ag, *set, in, (char *)out, begin, end)
                             : sum_logfmt_by_ring(ag, *set, in, (char *)out, begin, end);

    for (int i = 0; i < 2; i++)
        in.bias[i] = in.bias[i] ? in.bias[i] + (size_t)(rest - begin) * 2 : NULL;
    if (rest < end)
        sum_logfmt(set->data, rounded, set->weight, in, (char *)out + (size_t)(rest - begin) * 2, rest, end);
}

#endif
