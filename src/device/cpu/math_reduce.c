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
#include "device/cpu/math.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include "device/cpu/math_bf16.h"
#include "device/cpu/math_logfmt.h"
#include "device/cpu/math_vec.h"

/*
 * Measured on a Neoverse V1, rows of 14336 bytes out of memory: without prefetch 32 rows go at 9.6 GB/s (more streams
 * than the hardware follows), with it at 13; 8 rows are at 15.6 with it and at 16.2 without, bound by the additions.
 */
#define PREFETCH_AHEAD 512
#define STREAMS_FOLLOWED 8

struct reduce_args {
    const struct reduce_row *rows;
    int n;
    const void *bias[2];
};

/* Sums of this kind are kept by even and odd elements, as bf16_add_split8 does, rather than by halves. */
VEC_INLINE int reduce_splits(int dtype, int weighted)
{
    return HAS_BF16 && dtype == EPX_BF16 && !weighted;
}

/* Adds eight elements. */
VEC_INLINE void reduce_add8(struct f32x8 *acc, const void *from, int dtype, int weighted, float weight)
{
    struct f32x8 v = vec_load8(from, dtype);
    acc->a = weighted ? vec_fma(v.a, vec_f32(weight), acc->a) : acc->a + v.a;
    acc->b = weighted ? vec_fma(v.b, vec_f32(weight), acc->b) : acc->b + v.b;
}

VEC_INLINE void reduce_add32(struct f32x8 *acc0, struct f32x8 *acc1, struct f32x8 *acc2, struct f32x8 *acc3,
                             const char *x, int dtype, int split, int weighted, float weight)
{
    const size_t step = 8 * vec_element_bytes(dtype);

    if (split) {
        bf16_add_split8(acc0, x);
        bf16_add_split8(acc1, x + step);
        bf16_add_split8(acc2, x + 2 * step);
        bf16_add_split8(acc3, x + 3 * step);
        return;
    }
    reduce_add8(acc0, x, dtype, weighted, weight);
    reduce_add8(acc1, x + step, dtype, weighted, weight);
    reduce_add8(acc2, x + 2 * step, dtype, weighted, weight);
    reduce_add8(acc3, x + 3 * step, dtype, weighted, weight);
}

VEC_INLINE void reduce_store8(void *to, int dtype, int split, struct f32x8 acc)
{
    if (split)
        bf16_store_split8(to, acc);
    else if (HAS_BF16 && dtype == EPX_BF16)
        bf16_store8(to, acc);
    else
        vec_store8(to, dtype, acc);
}

/* Sums 32 elements at byte offset `at` of every row. No array and no loop over the accumulators: they must stay in
 * registers (gcc keeps an indexed array on the stack, at half the speed). */
VEC_INLINE void reduce_piece32(char *out, const struct reduce_args *args, int n, size_t at, int dtype, int weighted)
{
    const size_t step = 8 * vec_element_bytes(dtype);
    const int split = reduce_splits(dtype, weighted);
    struct f32x8 zero = {vec_f32(0.0f), vec_f32(0.0f)};
    struct f32x8 acc0 = zero, acc1 = zero, acc2 = zero, acc3 = zero;
    for (int i = 0; i < 2; i++) {
        const char *x = args->bias[i];
        if (x)
            reduce_add32(&acc0, &acc1, &acc2, &acc3, x + at, dtype, split, 0, 0.0f);
    }
    for (int r = 0; r < n; r++) {
        const char *x = (const char *)args->rows[r].data + at;
        if (n > STREAMS_FOLLOWED)
            vec_prefetch(x, PREFETCH_AHEAD);
        if (n > STREAMS_FOLLOWED && step > 16)
            vec_prefetch(x, PREFETCH_AHEAD + 64);
        reduce_add32(&acc0, &acc1, &acc2, &acc3, x, dtype, split, weighted, args->rows[r].weight);
    }
    reduce_store8(out + at, dtype, split, acc0);
    reduce_store8(out + at + step, dtype, split, acc1);
    reduce_store8(out + at + 2 * step, dtype, split, acc2);
    reduce_store8(out + at + 3 * step, dtype, split, acc3);
}

/* Eight or fewer elements: each source is copied to a padded buffer first. */
VEC_INLINE void reduce_tail(char *out, const struct reduce_args *args, size_t at, size_t bytes, int dtype, int weighted)
{
    struct f32x8 acc = {vec_f32(0.0f), vec_f32(0.0f)};
    char padded[32] = {0};
    for (int i = 0; i < 2; i++) {
        if (!args->bias[i])
            continue;
        memcpy(padded, (const char *)args->bias[i] + at, bytes);
        reduce_add8(&acc, padded, dtype, 0, 0.0f);
    }
    for (int r = 0; r < args->n; r++) {
        memcpy(padded, (const char *)args->rows[r].data + at, bytes);
        reduce_add8(&acc, padded, dtype, weighted, args->rows[r].weight);
    }
    vec_store8(padded, dtype, acc);
    memcpy(out + at, padded, bytes);
}

VEC_INLINE void reduce_plain(char *out, const struct reduce_args *args, int dtype, int hidden, int weighted)
{
    size_t size = vec_element_bytes(dtype), end = (size_t)hidden * size, at = 0;
    /* Eight rows are what most models have: unrolled, they go 3 % faster. */
    for (; args->n == 8 && !(HAS_BF16 && weighted) && at + 32 * size <= end; at += 32 * size)
        reduce_piece32(out, args, 8, at, dtype, weighted);
    for (; at + 32 * size <= end; at += 32 * size)
        reduce_piece32(out, args, args->n, at, dtype, weighted);
    for (; at < end; at += 8 * size)
        reduce_tail(out, args, at, end - at < 8 * size ? end - at : 8 * size, dtype, weighted);
}

/* Adds one block of a bf16 source; the last may be short. */
static void reduce_add_block(struct f32x8 *acc, const struct reduce_row *row, int hidden, int at, int weighted)
{
    struct f32x8 value[LOGFMT_BLOCK / 8];
    int n = hidden - at < LOGFMT_BLOCK ? hidden - at : LOGFMT_BLOCK;
    if (row->format == ROW_NVFP4) {
        float sum[LOGFMT_BLOCK];
        memcpy(sum, acc, sizeof(sum));
        math_nvfp4_add(sum, row->data, hidden, at, n, row->weight);
        memcpy(acc, sum, sizeof(sum));
        return;
    }
    if (row->format == ROW_LOGFMT) {
        logfmt_decode_block(value, row->data, hidden, at / LOGFMT_BLOCK);
    } else {
        uint16_t padded[LOGFMT_BLOCK] = {0};
        memcpy(padded, (const char *)row->data + (size_t)at * 2, (size_t)n * 2);
        for (int g = 0; g < LOGFMT_BLOCK / 8; g++)
            value[g] = vec_load8(padded + 8 * g, EPX_BF16);
    }
    for (int g = 0; g < LOGFMT_BLOCK / 8; g++) {
        acc[g].a = weighted ? vec_fma(value[g].a, vec_f32(row->weight), acc[g].a) : acc[g].a + value[g].a;
        acc[g].b = weighted ? vec_fma(value[g].b, vec_f32(row->weight), acc[g].b) : acc[g].b + value[g].b;
    }
}

/* bf16 rows of which some are LogFMT or NVFP4: block after block, through floats in the L1 cache. */
static void reduce_coded(char *out, const struct reduce_args *args, int hidden, int weighted)
{
    for (int at = 0; at < hidden; at += LOGFMT_BLOCK) {
        struct f32x8 acc[LOGFMT_BLOCK / 8];
        uint16_t sum[LOGFMT_BLOCK];
        int n = hidden - at < LOGFMT_BLOCK ? hidden - at : LOGFMT_BLOCK;
        for (int g = 0; g < LOGFMT_BLOCK / 8; g++)
            acc[g].a = acc[g].b = vec_f32(0.0f);
        for (int i = 0; i < 2; i++) {
            struct reduce_row bias = {args->bias[i], 1.0f, ROW_PLAIN};
            if (bias.data)
                reduce_add_block(acc, &bias, hidden, at, 0);
        }
        for (int r = 0; r < args->n; r++)
            reduce_add_block(acc, &args->rows[r], hidden, at, weighted);
        for (int g = 0; g < LOGFMT_BLOCK / 8; g++)
            vec_store8(sum + 8 * g, EPX_BF16, acc[g]);
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

#ifndef REDUCE_NAME
#define REDUCE_NAME math_reduce

/* Does this machine have what math_reduce_more was compiled for? */
static int machine_has_more(void)
{
#if defined(__x86_64__) && !defined(__FMA__)
    return math_reduce_has_more && __builtin_cpu_supports("fma");
#elif defined(__aarch64__) && defined(__linux__) && !HAS_BF16
    return math_reduce_has_more && (getauxval(AT_HWCAP2) >> 14 & 1); /* HWCAP2_BF16 */
#else
    return 0;
#endif
}
#else
static int machine_has_more(void)
{
    return 0;
}
#endif

void REDUCE_NAME(void *out, int dtype, int hidden, const struct reduce_row *rows, int n, int weighted,
                 const void *bias0, const void *bias1)
{
    if (machine_has_more()) {
        math_reduce_more(out, dtype, hidden, rows, n, weighted, bias0, bias1);
        return;
    }
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
