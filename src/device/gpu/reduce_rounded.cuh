/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sums of bf16 rows that count as if they had travelled as LogFMT (logfmt.cuh): rows that this rank reads where a peer
 * has them. Nothing is packed. A code stays a float behind the magic number, whose bits less a constant are the code:
 * the constant is taken off the base, and one multiply-add gives the logarithm. The bits are those of rows that were
 * encoded and decoded.
 */
#ifndef EPX_DEVICE_GPU_REDUCE_ROUNDED_CUH
#define EPX_DEVICE_GPU_REDUCE_ROUNDED_CUH

#ifndef ROUND_ROWS
#define ROUND_ROWS 4 /* rows whose blocks the lanes decide about together */
#endif
#ifndef ROUND_ROLLED
#define ROUND_ROLLED 2 /* of these, rows of a round of the loop: more code does not fit the cache of instructions */
#endif
#define ROUND_STEPS (ROUND_ROWS * 2)
#define ROUND_BLOCKS (ROUND_STEPS * LOGFMT_GROUPS)

/* Of one block of one row. */
struct logfmt_rounding {
    float per_step, offset; /* struct logfmt_coder */
    uint32_t bottom;
    float lowest;        /* behind the magic number; 0: each value by itself, logfmt_round8_exact() */
    uint32_t step, base; /* struct logfmt_range, for codes behind the magic number */
    float weight;        /* with the powers of two that logfmt_round8() leaves out */
    uint32_t extremes;   /* amax, and amin above it; 0: not coded */
};

static __shared__ struct logfmt_rounding logfmt_roundings[LAUNCH_WARPS * ROUND_BLOCKS];

/* Eight bf16 of a block that is not plain, each by itself. */
KFN_STEP struct float8 logfmt_round8_exact(uint4 words, uint32_t extremes)
{
    const struct logfmt_coder c = logfmt_coder_of(extremes & 0xffffu, extremes >> 16);
    const struct logfmt_range r = logfmt_range_of(extremes & 0xffffu, extremes >> 16);
    const struct logfmt_coded coded = logfmt_encode8<1>(words, c);
    const uint32_t w[4] = {words.x, words.y, words.z, words.w};
    uint32_t bits = 0;

    /* As logfmt_decoded_word() orders them. */
#pragma unroll
    for (int p = 0; p < 4; p++) {
        const uint32_t ninth = coded.bits << 2 * p; /* those of channels 2p and 2p + 1: bits 8 and 24 */
        bits |= (ninth >> 8 & 1u) << (2 * p + 1) | (ninth >> 24 & 1u) << (2 * p + 9);
        bits |= (w[p] >> 15 & 1u) << (2 * p + 8) | (w[p] >> 31) << 2 * p;
    }
    return logfmt_values<0>(coded.low, logfmt_bits_of(bits, 0), r, 0x007fffffu);
}

/* The lane's eight channels of a block, whatever it is; `extremes` as in struct logfmt_rounding. */
KFN void logfmt_add_rounded(struct float8 *sum, uint4 words, uint32_t extremes, int weighted, float weight)
{
    struct raw8<DTYPE_BF16> raw;

    raw.a = raw.b = words;
    if (extremes)
        floats_add(sum, logfmt_round8_exact(words, extremes), weighted, weight);
    else
        floats_add(sum, raw_floats<DTYPE_BF16>(raw), weighted, weight);
}

/* Extremes of a block whose largest and smallest magnitudes are in `both` as logfmt_extremes8() has them; 0 if such a
 * block is not coded. */
KFN uint32_t logfmt_coded_extremes(uint32_t both, int full)
{
    const uint32_t amax = both & 0xffffu, amin = 0x7fffu - (both >> 16);

    return full && amax < BF16_ONE && amin < amax ? amax | amin << 16 : 0;
}

/* Of a block of which this lane and the fifteen beside it have eight channels each. */
KFN uint32_t logfmt_extremes_here(uint4 words, int full)
{
    uint32_t both = logfmt_extremes8(words);

#pragma unroll
    for (int d = 8; d; d /= 2)
        both = max_u16x2(both, __shfl_xor_sync(ALL_LANES, both, d));
    return logfmt_coded_extremes(both, full);
}

/* Adds eight channels of a block whose magnitudes are their logarithms but for the bends. `zeros`: some may have code
 * 0. Four at a time: what one waits for, three others fill. */
template <int zeros>
KFN void logfmt_round8(struct float8 *sum, uint4 words, const struct logfmt_rounding &e, uint32_t mantissa)
{
    const uint32_t w[4] = {words.x, words.y, words.z, words.w}, lane = (uint32_t)lane_id() * 4;

#pragma unroll
    for (int first = 0; first < 4; first += 2) {
        float log[4], bend[4], kept[4], m[4], p[4];
        uint32_t t[4];
#pragma unroll
        for (int i = 0; i < 2; i++) { /* as in logfmt_codes() */
            const uint32_t logs = (w[first + i] | 0x80008000u) - e.bottom, mantissas = w[first + i] & 0x007f007fu;
            log[2 * i] = __fadd_rn(__uint_as_float(__byte_perm(logs, 0x43, 0x4105)), -256.0f);
            log[2 * i + 1] = __fadd_rn(__uint_as_float(__byte_perm(logs, 0x43, 0x4325)), -256.0f);
            bend[2 * i] = logfmt_bend(__byte_perm(mantissas, lane, 0x5504));
            bend[2 * i + 1] = logfmt_bend(__byte_perm(mantissas, lane, 0x5524));
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float code = __fmaf_rn(bend[i], e.per_step, __fmaf_rn(log[i], e.per_step, e.offset));
            kept[i] = fmaxf(add_magic_down(code, LOGFMT_MAGIC), e.lowest);
            const uint32_t word = w[first + i / 2], sign = i % 2 ? word : word << 16;
            /* The step is odd: the sign comes through the product. */
            t[i] = choose_bits(0x80000000u, sign, __float_as_uint(kept[i])) * e.step + e.base;
            t[i] = (uint32_t)((int32_t)t[i] >> 2);
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            m[i] = __uint_as_float(choose_bits(mantissa, t[i], 0x3f800000u));
        logfmt_exp2(p, m);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t value = choose_bits(0x9f800000u, t[i], __float_as_uint(p[i]));
            if (zeros)
                value = kept[i] > LOGFMT_MAGIC ? value : t[i] & 0x80000000u;
            sum->v[first * 2 + i] = __fmaf_rn(e.weight, __uint_as_float(value), sum->v[first * 2 + i]);
        }
    }
}

/* Of the steps of ROUND_ROWS rows: two lanes get the same, those of step lane % 16 / 2 in the lane's group. */
KFN uint32_t logfmt_extremes_of(const uint4 (*words)[2])
{
    uint32_t step[ROUND_STEPS];

#pragma unroll
    for (int j = 0; j < ROUND_STEPS; j++)
        step[j] = logfmt_extremes8(words[j / 2][j % 2]);
#pragma unroll
    for (int half = ROUND_STEPS / 2, d = 8; half; half /= 2, d /= 2)
#pragma unroll
        for (int j = 0; j < half; j++)
            step[j] = logfmt_fold(step[j], step[j + half], d);
#pragma unroll
    for (int d = 8 / ROUND_STEPS; d; d /= 2)
        step[0] = max_u16x2(step[0], __shfl_xor_sync(ALL_LANES, step[0], d));
    return step[0];
}

/* Each lane decides about one block: entry step * LOGFMT_GROUPS + group. Returns whether all are plain. `rows` of them
 * are there, weight is that of the lane's row. */
KFN int logfmt_decide(struct logfmt_rounding *entries, const uint4 (*words)[2], int rows, float weight)
{
    const int step = lane_id() % 16 * ROUND_STEPS / 16, here = step / 2 < rows;
    const uint32_t extremes = logfmt_coded_extremes(logfmt_extremes_of(words), here);
    const uint32_t amax = extremes ? extremes & 0xffffu : 1, amin = extremes >> 16;
    const struct logfmt_coder c = logfmt_coder_of(amax, amin);
    const struct logfmt_range r = logfmt_range_of(amax, amin);
    const int serves = logfmt_weight_serves(weight), straight = logfmt_straight(amax, amin);
    const int plain = extremes && r.lowest && amin >= BF16_NORMAL && serves;
    const float lowest = __fadd_rn(LOGFMT_MAGIC, r.lowest ? 1.0f : 0.0f);
    const struct logfmt_rounding e = {c.per_step,
                                      c.offset,
                                      c.bottom,
                                      straight && serves ? lowest : 0.0f,
                                      r.step,
                                      r.base - r.step * __float_as_uint(LOGFMT_MAGIC),
                                      logfmt_weight(weight, r.top),
                                      extremes};

    if (lane_id() % (16 / ROUND_STEPS) == 0) {
        uint4 *to = (uint4 *)&entries[step * LOGFMT_GROUPS + lane_id() / 16];
        to[0] = ((const uint4 *)&e)[0];
        to[1] = ((const uint4 *)&e)[1];
    }
    __syncwarp();
    return !__any_sync(ALL_LANES, here && !plain);
}

/* The two steps of `rows` rows. */
KFN void logfmt_add_rows_rounded(struct float8 *sum, uint4 (*words)[2], const struct logfmt_rounding *entries, int rows,
                                 uint32_t mantissa)
{
    const struct logfmt_rounding *mine = entries + lane_id() / 16;

    ROLLED
    for (int k = 0; k < rows; k += ROUND_ROLLED, mine += ROUND_ROLLED * 2 * LOGFMT_GROUPS) {
#pragma unroll
        for (int i = 0; i < ROUND_ROLLED; i++)
            if (k + i < rows) {
                logfmt_round8<0>(&sum[0], words[i][0], mine[i * 2 * LOGFMT_GROUPS], mantissa);
                logfmt_round8<0>(&sum[1], words[i][1], mine[(i * 2 + 1) * LOGFMT_GROUPS], mantissa);
            }
#pragma unroll
        for (int i = 0; i + ROUND_ROLLED < ROUND_ROWS; i++) {
            words[i][0] = words[i + ROUND_ROLLED][0];
            words[i][1] = words[i + ROUND_ROLLED][1];
        }
    }
}

/* Rare, and not in the way of the others. */
KFN_STEP struct float8 logfmt_add_exact(struct float8 sum, uint4 words, uint32_t extremes, float weight)
{
    floats_add(&sum, logfmt_round8_exact(words, extremes), 1, weight);
    return sum;
}

/* A block of any kind; `weight` is that of its row. */
KFN void logfmt_add_any(struct float8 *sum, uint4 words, const struct logfmt_rounding &e, float weight,
                        uint32_t mantissa)
{
    struct raw8<DTYPE_BF16> raw;

    raw.a = raw.b = words;
    if (!e.extremes)
        floats_add(sum, raw_floats<DTYPE_BF16>(raw), 1, weight);
    else if (e.lowest != 0.0f)
        logfmt_round8<1>(sum, words, e, mantissa);
    else
        *sum = logfmt_add_exact(*sum, words, e.extremes, weight);
}

/* As logfmt_add_rows_rounded() where some blocks are not plain. Lane r of `weights` has that of row r. */
KFN void logfmt_add_rows_any(struct float8 *sum, uint4 (*words)[2], const struct logfmt_rounding *entries, int rows,
                             float weights, int weighted, int first, uint32_t mantissa)
{
    const struct logfmt_rounding *mine = entries + lane_id() / 16;

    ROLLED
    for (int k = 0; k < rows; k++, mine += 2 * LOGFMT_GROUPS) {
        const float weight = weighted ? __shfl_sync(ALL_LANES, weights, first + k) : 1.0f;
        logfmt_add_any(&sum[0], words[0][0], mine[0], weight, mantissa);
        logfmt_add_any(&sum[1], words[0][1], mine[LOGFMT_GROUPS], weight, mantissa);
#pragma unroll
        for (int i = 0; i + 1 < ROUND_ROWS; i++) {
            words[i][0] = words[i + 1][0];
            words[i][1] = words[i + 1][1];
        }
    }
}

#if RING
KFN void round_begin(const struct sum_set &set, const struct sum_in &in, struct sum_ahead *next, char *ring)
{
    ring_fence();
    __syncwarp();
    for (int i = 0; i < RING_SLOTS; i++)
        sum_fetch(set, in, next, ring);
}

/* A row's two steps. */
KFN void round_take(uint4 *words, const struct sum_set &set, const struct sum_in &in, struct sum_ahead *next,
                    char *ring, unsigned batch, int both)
{
    const ring_address slot = ring_at(ring) + batch % RING_SLOTS * RING_SLOT_BYTES + (uint32_t)lane_id() * 16;

    ring_wait(ring, batch);
    words[0] = ring_u128(slot);
    words[1] = ring_u128(slot + (both ? WARP * 16 : 0));
    __syncwarp(); /* all lanes have read the slot: it may be filled again */
    sum_fetch(set, in, next, ring);
}
#else
struct sum_ahead {
    int step, row;
    unsigned batch;
};

KFN void round_begin(const struct sum_set &, const struct sum_in &, struct sum_ahead *, char *)
{
}
#endif

/* Lanes load the row's two steps; `at` is the first one's first channel. */
KFN void round_load(uint4 *words, const struct sum_set &set, int r, int at, int both)
{
    const char *from = sum_row(set, r) + (size_t)(at + lane_id() * 8) * 2;

    words[0] = vec_load(from);
    words[1] = vec_load(from + (both ? WARP * 16 : 0));
}

/* Adds the biases of one step or of two to what a lane sums: from channel `mine` on, and a step later. */
KFN void sum_biases(struct float8 (&sum)[2], const struct sum_in &in, int mine, int both)
{
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 2; j++)
            if (in.bias[i] && j < 1 + both)
                floats_add(&sum[j],
                           raw_floats<DTYPE_BF16>(raw_load<DTYPE_BF16>(in.bias[i] + (size_t)(mine + j * SUM_STEP) * 2)),
                           0, 0.0f);
}

/* By value, as sum_fast; data, out and the biases begin with the first of in.hidden channels, which are whole steps. */
template <int by_ring>
KFN_STEP void sum_rounded(const char *data, float weights, struct sum_in in, char *out, char *ring, unsigned batch)
{
    const struct sum_set set = {data, weights, 0, 0};
    const uint32_t mantissa = opaque(0x007fffffu);
    struct logfmt_rounding *entries = logfmt_roundings + threadIdx.x / WARP * ROUND_BLOCKS;
    struct sum_ahead next = {0, 0, batch};

    if (by_ring)
        round_begin(set, in, &next, ring);
    for (int at = 0; at < in.hidden; at += 2 * SUM_STEP) {
        const int mine = at + lane_id() * 8, both = in.hidden - at > SUM_STEP;
        struct float8 sum[2] = {{{0, 0, 0, 0, 0, 0, 0, 0}}, {{0, 0, 0, 0, 0, 0, 0, 0}}};
        sum_biases(sum, in, mine, both);
        ROLLED
        for (int first = 0; first < in.n; first += ROUND_ROWS) {
            const int rows = in.n - first < ROUND_ROWS ? in.n - first : ROUND_ROWS;
            const int own =
                (first + lane_id() % 16 * ROUND_STEPS / 32) % WARP; /* the row that this lane decides about */
            const float weight = in.weighted ? __shfl_sync(ALL_LANES, weights, own) : 1.0f;
            uint4 words[ROUND_ROWS][2] = {};
#pragma unroll
            for (int k = 0; k < ROUND_ROWS; k++) {
                if (k >= rows)
                    continue;
#if RING
                if (by_ring) {
                    round_take(words[k], set, in, &next, ring, batch++, both);
                    continue;
                }
#endif
                round_load(words[k], set, first + k, at, both);
            }
            if (logfmt_decide(entries, words, rows, weight))
                logfmt_add_rows_rounded(sum, words, entries, rows, mantissa);
            else
                logfmt_add_rows_any(sum, words, entries, rows, weights, in.weighted, first, mantissa);
            __syncwarp(); /* the entries are read: they may be written again */
        }
#pragma unroll
        for (int j = 0; j < 2; j++)
            if (j == 0 || both)
                raw_store<DTYPE_BF16>(out + (size_t)(mine + j * SUM_STEP) * 2, floats_raw<DTYPE_BF16>(sum[j]));
    }
}

/* Returns the first channel that is left to sum_logfmt(). */
KFN int sum_all_rounded(struct agent *ag, const struct sum_set &set, struct sum_in in, char *out, int begin, int end)
{
    const int lacks = (lane_id() < in.n && (set.format != ROWS_ROUNDED || !aligned16(set.data))) || !aligned16(out) ||
                      !aligned16(in.bias[0]) || !aligned16(in.bias[1]);
    const unsigned batch = ag->ring_next;
    const char *data = set.data + (size_t)begin * 2;

    in.hidden = (end - begin) / SUM_STEP * SUM_STEP;
    if (__any_sync(ALL_LANES, lacks) || in.n == 0 || in.hidden == 0)
        return begin;
    if (!RING || !ag->ring) {
        sum_rounded<0>(data, set.weight, in, out, NULL, 0);
        return begin + in.hidden;
    }
    sum_rounded<RING>(data, set.weight, in, out, ag->ring, batch);
    __syncwarp();
    if (lane_id() == 0)
        ag->ring_next = batch + (unsigned)((in.hidden + 2 * SUM_STEP - 1) / (2 * SUM_STEP) * in.n);
    __syncwarp();
    return begin + in.hidden;
}

#endif
