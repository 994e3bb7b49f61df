/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Weighted sums of rows. Every output element is ((0 + bias0) + bias1), then fma(w0, x0, sum), fma(w1, x1, sum) ...,
 * each step rounded to float once, so that the result does not depend on how the channels are cut into pieces.
 *
 * Products were rounded by themselves at first. Two vector operations per cycle are what the machine below does, and
 * a weighted sum needs six per eight elements that way, four fused: 13 GB/s became 18 (8 rows of 14336 bytes).
 *
 * Of few rows it is the rounding that takes the time: fourteen operations per eight elements. The bf16 instructions of
 * aarch64 do it in three, and add a bf16 to a float in one, with the same bits (math_bf16.h). Out of memory, 2 rows
 * went from 9.2 to 13.6 GB/s, 4 from 14.0 to 20.3, 8 from 19.7 to 25.6; weighted, 4 from 12.7 to 16.2, 8 from 16.7
 * to 19.2.
 */
#ifndef EPX_DEVICE_CPU_MATH_REDUCE_H
#define EPX_DEVICE_CPU_MATH_REDUCE_H

#include "device/cpu/math.h"
#include "device/cpu/math_bf16.h"
#include "device/cpu/math_logfmt.h"
#include "device/cpu/math_nvfp4.h"
#include "device/cpu/math_vec.h"

/*
 * Measured on a Neoverse V1, rows of 14336 bytes out of memory: without prefetch 32 rows go at 9.6 GB/s (more streams
 * than the hardware follows), with it at 13; 8 rows are at 15.6 with it and at 16.2 without, bound by the additions.
 */
#define PREFETCH_AHEAD 512
#define STREAMS_FOLLOWED 8
#define REDUCE_PIECE (4 * VEC_WIDE) /* elements that are summed at a time */

struct reduce_args {
    const struct reduce_row *rows;
    int n;
    const void *bias[2];
};

/* Sums of this kind are kept by even and odd elements rather than by halves (math_bf16.h). */
VEC_INLINE int reduce_splits(int dtype, int weighted)
{
    return dtype == EPX_BF16 && (weighted ? BF16_SPLIT_WEIGHTED : BF16_SPLIT_SUMS);
}

/* Adds VEC_WIDE elements. */
VEC_INLINE void reduce_add(struct wide *acc, const void *from, int dtype, int weighted, float weight)
{
    struct wide v = vec_load_wide(from, dtype);
    acc->a = weighted ? vec_fma(v.a, vec_f32(weight), acc->a) : acc->a + v.a;
    acc->b = weighted ? vec_fma(v.b, vec_f32(weight), acc->b) : acc->b + v.b;
}

VEC_INLINE void reduce_add_kind(struct wide *acc, const void *from, int dtype, int split, int weighted, float weight)
{
    if (split && weighted)
        bf16_fma_split(acc, from, weight);
    else if (split)
        bf16_add_split(acc, from);
    else
        reduce_add(acc, from, dtype, weighted, weight);
}

VEC_INLINE void reduce_add4(struct wide *acc0, struct wide *acc1, struct wide *acc2, struct wide *acc3, const char *x,
                            int dtype, int split, int weighted, float weight)
{
    const size_t step = VEC_WIDE * vec_element_bytes(dtype);

    reduce_add_kind(acc0, x, dtype, split, weighted, weight);
    reduce_add_kind(acc1, x + step, dtype, split, weighted, weight);
    reduce_add_kind(acc2, x + 2 * step, dtype, split, weighted, weight);
    reduce_add_kind(acc3, x + 3 * step, dtype, split, weighted, weight);
}

VEC_INLINE void reduce_store(void *to, int dtype, int split, struct wide acc)
{
    if (split)
        bf16_store_split(to, acc);
    else if (dtype == EPX_BF16)
        bf16_store(to, acc);
    else
        vec_store_wide(to, dtype, acc);
}

/* Sums REDUCE_PIECE elements at byte offset `at` of every row. No array and no loop over the accumulators: they must
 * stay in registers (gcc keeps an indexed array on the stack, at half the speed). */
VEC_INLINE void reduce_piece(char *out, const struct reduce_args *args, int n, size_t at, int dtype, int weighted)
{
    const size_t step = VEC_WIDE * vec_element_bytes(dtype);
    const int split = reduce_splits(dtype, weighted);
    struct wide zero = {vec_f32(0.0f), vec_f32(0.0f)};
    struct wide acc0 = zero, acc1 = zero, acc2 = zero, acc3 = zero;
    for (int i = 0; i < 2; i++) {
        const char *x = args->bias[i];
        if (x)
            reduce_add4(&acc0, &acc1, &acc2, &acc3, x + at, dtype, split, 0, 0.0f);
    }
    for (int r = 0; r < n; r++) {
        const char *x = (const char *)args->rows[r].data + at;
        for (size_t line = 0; n > STREAMS_FOLLOWED && line < 4 * step; line += 64)
            vec_prefetch(x, PREFETCH_AHEAD + line);
        reduce_add4(&acc0, &acc1, &acc2, &acc3, x, dtype, split, weighted, args->rows[r].weight);
    }
    reduce_store(out + at, dtype, split, acc0);
    reduce_store(out + at + step, dtype, split, acc1);
    reduce_store(out + at + 2 * step, dtype, split, acc2);
    reduce_store(out + at + 3 * step, dtype, split, acc3);
}

/* VEC_WIDE or fewer elements: each source is copied to a padded buffer first. */
VEC_INLINE void reduce_tail(char *out, const struct reduce_args *args, size_t at, size_t bytes, int dtype, int weighted)
{
    struct wide acc = {vec_f32(0.0f), vec_f32(0.0f)};
    char padded[VEC_WIDE * 4] = {0};
    for (int i = 0; i < 2; i++) {
        if (!args->bias[i])
            continue;
        memcpy(padded, (const char *)args->bias[i] + at, bytes);
        reduce_add(&acc, padded, dtype, 0, 0.0f);
    }
    for (int r = 0; r < args->n; r++) {
        memcpy(padded, (const char *)args->rows[r].data + at, bytes);
        reduce_add(&acc, padded, dtype, weighted, args->rows[r].weight);
    }
    vec_store_wide(padded, dtype, acc);
    memcpy(out + at, padded, bytes);
}

VEC_INLINE void reduce_plain(char *out, const struct reduce_args *args, int dtype, int hidden, int weighted)
{
    const size_t size = vec_element_bytes(dtype), end = (size_t)hidden * size;
    const size_t piece = REDUCE_PIECE * size, wide = VEC_WIDE * size;
    size_t at = 0;
    /* Eight rows are what most models have: unrolled, they go 3 % faster. */
    for (; args->n == 8 && !(BF16_ADDS && weighted) && at + piece <= end; at += piece)
        reduce_piece(out, args, 8, at, dtype, weighted);
    for (; at + piece <= end; at += piece)
        reduce_piece(out, args, args->n, at, dtype, weighted);
    for (; at < end; at += wide)
        reduce_tail(out, args, at, end - at < wide ? end - at : wide, dtype, weighted);
}

/* Adds one block of a bf16 source; the last may be short. */
static void reduce_add_block(struct wide *acc, const struct reduce_row *row, int hidden, int at, int weighted)
{
    struct wide value[LOGFMT_BLOCK / VEC_WIDE];
    int n = hidden - at < LOGFMT_BLOCK ? hidden - at : LOGFMT_BLOCK;
    if (row->format == ROW_NVFP4) {
        float sum[LOGFMT_BLOCK];
        memcpy(sum, acc, sizeof(sum));
        nvfp4_add(sum, row->data, hidden, at, n, row->weight);
        memcpy(acc, sum, sizeof(sum));
        return;
    }
    if (row->format == ROW_LOGFMT) {
        logfmt_decode_block(value, row->data, hidden, at / LOGFMT_BLOCK);
    } else if (row->format == ROW_ROUNDED && n == LOGFMT_BLOCK) {
        logfmt_round_block(value, (const uint16_t *)row->data + at);
    } else {
        uint16_t padded[LOGFMT_BLOCK] = {0};
        memcpy(padded, (const char *)row->data + (size_t)at * 2, (size_t)n * 2);
        for (int g = 0; g < LOGFMT_BLOCK / VEC_WIDE; g++)
            value[g] = vec_load_wide(padded + VEC_WIDE * g, EPX_BF16);
    }
    for (int g = 0; g < LOGFMT_BLOCK / VEC_WIDE; g++) {
        acc[g].a = weighted ? vec_fma(value[g].a, vec_f32(row->weight), acc[g].a) : acc[g].a + value[g].a;
        acc[g].b = weighted ? vec_fma(value[g].b, vec_f32(row->weight), acc[g].b) : acc[g].b + value[g].b;
    }
}

/* bf16 rows of which some are LogFMT, rounded or NVFP4: block after block, through floats in the L1 cache. */
static void reduce_coded(char *out, const struct reduce_args *args, int hidden, int weighted)
{
    for (int at = 0; at < hidden; at += LOGFMT_BLOCK) {
        struct wide acc[LOGFMT_BLOCK / VEC_WIDE];
        uint16_t sum[LOGFMT_BLOCK];
        int n = hidden - at < LOGFMT_BLOCK ? hidden - at : LOGFMT_BLOCK;
        for (int g = 0; g < LOGFMT_BLOCK / VEC_WIDE; g++)
            acc[g].a = acc[g].b = vec_f32(0.0f);
        for (int i = 0; i < 2; i++) {
            struct reduce_row bias = {args->bias[i], 1.0f, ROW_PLAIN};
            if (bias.data)
                reduce_add_block(acc, &bias, hidden, at, 0);
        }
        for (int r = 0; r < args->n; r++)
            reduce_add_block(acc, &args->rows[r], hidden, at, weighted);
        for (int g = 0; g < LOGFMT_BLOCK / VEC_WIDE; g++)
            vec_store_wide(sum + VEC_WIDE * g, EPX_BF16, acc[g]);
        memcpy(out + (size_t)at * 2, sum, (size_t)n * 2);
    }
}

static int reduce_has_coded(const struct reduce_row *rows, int n)
{
    for (int r = 0; r < n; r++)
        if (rows[r].format != ROW_PLAIN)
            return 1;
    return 0;
}

VEC_INLINE void reduce_dtype(void *out, const struct reduce_args *args, int dtype, int hidden, int weighted)
{
    if (weighted)
        reduce_plain(out, args, dtype, hidden, 1);
    else
        reduce_plain(out, args, dtype, hidden, 0);
}

static void reduce(void *out, int dtype, int hidden, const struct reduce_row *rows, int n, int weighted,
                   const void *bias0, const void *bias1)
{
    struct reduce_args args = {rows, n, {bias0, bias1}};
    const uint64_t before = bf16_begin();
    if (reduce_has_coded(rows, n))
        reduce_coded(out, &args, hidden, weighted);
    else if (dtype == EPX_BF16)
        reduce_dtype(out, &args, EPX_BF16, hidden, weighted);
    else if (dtype == EPX_FP16)
        reduce_dtype(out, &args, EPX_FP16, hidden, weighted);
    else
        reduce_dtype(out, &args, EPX_FP32, hidden, weighted);
    bf16_end(before);
}

#endif
