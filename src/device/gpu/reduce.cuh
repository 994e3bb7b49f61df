/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sums of rows by a warp. Each lane has eight channels of a step; the order of the additions is that of
 * device/cpu/math_reduce.h, so that the bits are the same.
 */
#ifndef EPX_DEVICE_GPU_REDUCE_CUH
#define EPX_DEVICE_GPU_REDUCE_CUH

#define SUM_STEP (WARP * 8)
#ifndef SUM_ROWS /* rows whose loads are in flight together: as many as there are registers for */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
#define SUM_ROWS 3
#else
#define SUM_ROWS 4
#endif
#endif
#ifndef SUM_WIDE
#define SUM_WIDE 2 /* steps likewise */
#endif

/* Lane i holds row i; before it is settled, what lane i offers and for which place. */
struct sum_set {
    const char *data;
    float weight;
    int format, place; /* ROWS_* */
};

KFN void sum_set_begin(struct sum_set *set)
{
    set->data = NULL;
    set->weight = 0.0f;
    set->format = 0;
    set->place = -1;
}

KFN void sum_set_offer(struct sum_set *set, int place, const void *data, float weight, int format)
{
    set->data = (const char *)data;
    set->weight = weight;
    set->format = format;
    set->place = place;
}

KFN void sum_set_settle(struct agent *ag, struct sum_set *set)
{
    const int from = offers_lane(set->place);

    (void)ag;
    set->data = (const char *)__shfl_sync(ALL_LANES, (unsigned long long)set->data, from);
    set->weight = __shfl_sync(ALL_LANES, set->weight, from);
    set->format = __shfl_sync(ALL_LANES, set->format, from);
}

KFN void sum_set_put(struct agent *ag, struct sum_set *set, int i, const void *data, float weight, int format)
{
    (void)ag;
    if (lane_id() != i)
        return;
    set->data = (const char *)data;
    set->weight = weight;
    set->format = format;
}

KFN const char *sum_row(const struct sum_set &set, int i)
{
    return (const char *)__shfl_sync(ALL_LANES, (unsigned long long)set.data, i);
}

struct sum_in {
    const char *bias[2];
    int n, weighted, hidden;
};

/*
 * All rows 16-byte aligned and of whole vectors. `mine` is the lane's first channel. `raw` begins as zeros: what no
 * load fills would otherwise be kept from round to round, and the compiler would keep all of it in local memory,
 * where the store behind each load waits for it. Loads of different rows would no longer be in flight together.
 */
template <int dtype, int wide, int rows>
KFN void sum_piece(const struct sum_set &set, const struct sum_in &in, char *out, int mine)
{
    const int bytes = element_bytes<dtype>();
    struct float8 sum[wide];

#pragma unroll
    for (int j = 0; j < wide; j++)
#pragma unroll
        for (int i = 0; i < 8; i++)
            sum[j].v[i] = 0.0f;
    for (int b = 0; b < 2; b++) {
        if (!in.bias[b])
            continue;
#pragma unroll
        for (int j = 0; j < wide; j++)
            if (mine + j * SUM_STEP < in.hidden)
                floats_add(&sum[j],
                           raw_floats<dtype>(raw_load<dtype>(in.bias[b] + (size_t)(mine + j * SUM_STEP) * bytes)), 0,
                           0.0f);
    }
    for (int r = 0; r < in.n; r += rows) {
        struct raw8<dtype> raw[rows][wide] = {};
#pragma unroll
        for (int k = 0; k < rows; k++) {
            if (r + k >= in.n)
                continue;
            const char *row = sum_row(set, r + k) + (size_t)mine * bytes;
#pragma unroll
            for (int j = 0; j < wide; j++)
                if (mine + j * SUM_STEP < in.hidden)
                    raw[k][j] = raw_load<dtype>(row + j * SUM_STEP * bytes);
        }
#pragma unroll
        for (int k = 0; k < rows; k++) {
            if (r + k >= in.n)
                continue;
            const float weight = __shfl_sync(ALL_LANES, set.weight, r + k);
#pragma unroll
            for (int j = 0; j < wide; j++)
                floats_add(&sum[j], raw_floats<dtype>(raw[k][j]), in.weighted, weight);
        }
    }
#pragma unroll
    for (int j = 0; j < wide; j++)
        if (mine + j * SUM_STEP < in.hidden)
            raw_store<dtype>(out + (size_t)(mine + j * SUM_STEP) * bytes, floats_raw<dtype>(sum[j]));
}

/* Any alignment, any number of channels, NVFP4 rows. */
template <int dtype> KFN_STEP void sum_odd(struct sum_set set, struct sum_in in, char *out)
{
    const int bytes = element_bytes<dtype>();

    for (int at = 0; at < in.hidden; at += SUM_STEP) {
        const int mine = at + lane_id() * 8, n = in.hidden - mine;
        struct float8 sum = {{0, 0, 0, 0, 0, 0, 0, 0}};
        for (int b = 0; b < 2; b++)
            if (in.bias[b] && n > 0)
                floats_add(&sum, raw_floats<dtype>(raw_load_odd<dtype>(in.bias[b] + (size_t)mine * bytes, n)), 0, 0.0f);
        for (int r = 0; r < in.n; r++) {
            const char *row = sum_row(set, r);
            const float weight = __shfl_sync(ALL_LANES, set.weight, r);
            const int format = __shfl_sync(ALL_LANES, set.format, r);
            if (dtype == DTYPE_BF16 && format == ROWS_NVFP4)
                nvfp4_add8(&sum, row, in.hidden, mine, weight);
            else if (n > 0)
                floats_add(&sum, raw_floats<dtype>(raw_load_odd<dtype>(row + (size_t)mine * bytes, n)), in.weighted,
                           weight);
        }
        if (n > 0)
            raw_store_odd<dtype>(out + (size_t)mine * bytes, floats_raw<dtype>(sum), n);
    }
}

/* By value: what has an address would have to lie in memory. */
template <int dtype> KFN_STEP void sum_fast(const char *data, float weight, struct sum_in in, char *out)
{
    const int wide = dtype == DTYPE_FP32 ? 1 : SUM_WIDE, rows = dtype == DTYPE_FP32 ? 4 : SUM_ROWS;
    const struct sum_set set = {data, weight, 0, 0};

    for (int at = 0; at < in.hidden; at += SUM_STEP * wide)
        sum_piece<dtype, wide, rows>(set, in, out, at + lane_id() * 8);
}

#if RING
/* What is fetched next: the two steps from `step` on, of row `row`, as batch `batch`. */
struct sum_ahead {
    int step, row;
    unsigned batch;
};

KFN void sum_fetch(const struct sum_set &set, const struct sum_in &in, struct sum_ahead *next, char *ring)
{
    if (next->step >= in.hidden)
        return;
    const int left = in.hidden - next->step, channels = left < 2 * SUM_STEP ? left : 2 * SUM_STEP;
    /* Lane `row` has that row's address. */
    if (lane_id() == next->row)
        ring_fetch(ring, next->batch, set.data + (size_t)next->step * 2, (unsigned)channels * 2);
    next->batch++;
    next->row++;
    if (next->row == in.n) {
        next->row = 0;
        next->step += 2 * SUM_STEP;
    }
}

/* As sum_fast, for elements of two bytes: RING_SLOTS batches are in flight, whatever the number of rows, and take
 * neither registers nor instructions of the lanes. */
template <int dtype>
KFN_STEP void sum_ring(const char *data, float weight, struct sum_in in, char *out, char *ring, unsigned batch)
{
    const struct sum_set set = {data, weight, 0, 0};
    struct sum_ahead next = {0, 0, batch};
    const char *mine = ring + lane_id() * 16;

    ring_fence();
    __syncwarp();
    for (int i = 0; i < RING_SLOTS; i++)
        sum_fetch(set, in, &next, ring);
    for (int at = lane_id() * 8; at - lane_id() * 8 < in.hidden; at += 2 * SUM_STEP) {
        struct float8 sum[2] = {{{0, 0, 0, 0, 0, 0, 0, 0}}, {{0, 0, 0, 0, 0, 0, 0, 0}}};
        for (int b = 0; b < 2; b++)
            for (int j = 0; in.bias[b] && j < 2; j++)
                if (at + j * SUM_STEP < in.hidden)
                    floats_add(&sum[j],
                               raw_floats<dtype>(raw_load<dtype>(in.bias[b] + (size_t)(at + j * SUM_STEP) * 2)), 0,
                               0.0f);
        ROLLED
        for (int r = 0; r < in.n; r++, batch++) {
            const float scale = in.weighted ? __shfl_sync(ALL_LANES, set.weight, r) : 1.0f;
            const char *slot = mine + batch % RING_SLOTS * RING_SLOT_BYTES;
            struct raw8<dtype> raw[2];
            ring_wait(ring, batch);
#pragma unroll
            for (int j = 0; j < 2; j++)
                raw[j].a = raw[j].b = *(const uint4 *)(slot + j * WARP * 16);
            __syncwarp(); /* all lanes have read the slot: it may be filled again */
            sum_fetch(set, in, &next, ring);
#pragma unroll
            for (int j = 0; j < 2; j++)
                floats_add(&sum[j], raw_floats<dtype>(raw[j]), in.weighted, scale);
        }
#pragma unroll
        for (int j = 0; j < 2; j++)
            if (at + j * SUM_STEP < in.hidden)
                raw_store<dtype>(out + (size_t)(at + j * SUM_STEP) * 2, floats_raw<dtype>(sum[j]));
    }
}

template <int dtype>
KFN int sum_by_ring(struct agent *ag, const struct sum_set &set, const struct sum_in &in, char *out)
{
    const unsigned steps = (unsigned)(in.hidden + 2 * SUM_STEP - 1) / (2 * SUM_STEP), batch = ag->ring_next;

    if (dtype == DTYPE_FP32 || !ag->ring || in.n == 0)
        return 0;
    sum_ring<dtype>(set.data, set.weight, in, out, ag->ring, batch);
    __syncwarp();
    if (lane_id() == 0)
        ag->ring_next = batch + steps * (unsigned)in.n;
    __syncwarp();
    return 1;
}
#else
template <int dtype> KFN int sum_by_ring(struct agent *, const struct sum_set &, const struct sum_in &, char *)
{
    return 0;
}
#endif

template <int dtype>
KFN void sum_rows(struct agent *ag, const struct sum_set &set, const struct sum_in &in, char *out, int odd)
{
    if (odd)
        sum_odd<dtype>(set, in, out);
    else if (!sum_by_ring<dtype>(ag, set, in, out))
        sum_fast<dtype>(set.data, set.weight, in, out);
}

KFN void ag_reduce(struct agent *ag, void *out, int dtype, int hidden, const struct sum_set *set, int n, int weighted,
                   const void *bias0, const void *bias1)
{
    const struct sum_in in = {{(const char *)bias0, (const char *)bias1}, n, weighted, hidden};
    const int odd = (lane_id() < n && (!aligned16(set->data) || set->format)) || !aligned16(out) || !aligned16(bias0) ||
                    !aligned16(bias1) || hidden % 8;
    const int any = __any_sync(ALL_LANES, odd);

    if (dtype == DTYPE_BF16)
        sum_rows<DTYPE_BF16>(ag, *set, in, (char *)out, any);
    else if (dtype == DTYPE_FP16)
        sum_rows<DTYPE_FP16>(ag, *set, in, (char *)out, any);
    else
        sum_rows<DTYPE_FP32>(ag, *set, in, (char *)out, any);
}

/* ---- Sums of sums: functions of their own, for those above would lose registers to them -------------------------- */

/* Adds a finished sum, rounded, to the total, and begins the next. */
template <int dtype> KFN void sum_close(struct float8 *total, struct float8 *sum)
{
    floats_add(total, raw_floats<dtype>(floats_raw<dtype>(*sum)), 0, 0.0f);
#pragma unroll
    for (int i = 0; i < 8; i++)
        sum->v[i] = 0.0f;
}

/* The lane's eight channels of a row from `mine` on; `odd`: any alignment, and n of them. */
template <int dtype, int odd> KFN struct raw8<dtype> sum_load(const char *row, int mine, int n) {
    const char *from = row + (size_t)mine * element_bytes<dtype>();

    return odd ? raw_load_odd<dtype>(from, n) : raw_load<dtype>(from);
}

/* Bit i of `ends`: row i is the last of a sum that is rounded by itself. */
template <int dtype, int odd>
KFN_STEP void sum_grouped(const char *data, struct sum_in in, uint32_t ends, char *out)
{
    const struct sum_set set = {data, 0.0f, 0, 0};
    const int rows = odd ? 1 : SUM_ROWS;

    for (int at = 0; at < in.hidden; at += SUM_STEP) {
        const int mine = at + lane_id() * 8, n = in.hidden - mine;
        struct float8 total = {{0, 0, 0, 0, 0, 0, 0, 0}}, sum = {{0, 0, 0, 0, 0, 0, 0, 0}};
        for (int b = 0; b < 2; b++)
            if (in.bias[b] && n > 0)
                floats_add(&total, raw_floats<dtype>(sum_load<dtype, odd>(in.bias[b], mine, n)), 0, 0.0f);
        for (int r = 0; r < in.n; r += rows) {
            struct raw8<dtype> raw[rows] = {
            }; /* as in sum_piece() */
#pragma unroll
            for (int k = 0; k < rows; k++) {
                const char *from = sum_row(set, r + k < in.n ? r + k : 0);
                if (r + k < in.n && n > 0)
                    raw[k] = sum_load<dtype, odd>(from, mine, n);
            }
#pragma unroll
            for (int k = 0; k < rows; k++) {
                if (r + k >= in.n || n <= 0)
                    continue;
                floats_add(&sum, raw_floats<dtype>(raw[k]), 0, 0.0f);
                if (ends >> (r + k) & 1)
                    sum_close<dtype>(&total, &sum);
            }
        }
        char *to = out + (size_t)mine * element_bytes<dtype>();
        if (n > 0 && odd)
            raw_store_odd<dtype>(to, floats_raw<dtype>(total), n);
        else if (n > 0)
            raw_store<dtype>(to, floats_raw<dtype>(total));
    }
}

template <int dtype> KFN void sum_groups(const char *data, const struct sum_in &in, uint32_t ends, char *out, int odd)
{
    if (odd)
        sum_grouped<dtype, 1>(data, in, ends, out);
    else
        sum_grouped<dtype, 0>(data, in, ends, out);
}

KFN void ag_reduce_groups(struct agent *ag, void *out, int dtype, int hidden, const struct sum_set *set, int n,
                          uint32_t ends, const void *bias0, const void *bias1)
{
    const struct sum_in in = {{(const char *)bias0, (const char *)bias1}, n, 0, hidden};
    const int odd = __any_sync(ALL_LANES, (lane_id() < n && !aligned16(set->data)) || !aligned16(out) ||
                                              !aligned16(bias0) || !aligned16(bias1) || hidden % 8);

    (void)ag;
    if (dtype == DTYPE_BF16)
        sum_groups<DTYPE_BF16>(set->data, in, ends, (char *)out, odd);
    else if (dtype == DTYPE_FP16)
        sum_groups<DTYPE_FP16>(set->data, in, ends, (char *)out, odd);
    else
        sum_groups<DTYPE_FP32>(set->data, in, ends, (char *)out, odd);
}

#endif
