/* SPDX-License-Identifier: Apache-2.0 */
/* The CPU's bulk primitives: copies, casts, LogFMT-10, weighted sums. Plain functions of memory; no EPX state. */
#ifndef EPX_DEVICE_CPU_MATH_H
#define EPX_DEVICE_CPU_MATH_H

#include <stddef.h>
#include <stdint.h>

enum scale_kind { SCALE_FLOAT = 0, SCALE_UE8M0 = 1 };
enum row_format { ROW_PLAIN = 0, ROW_LOGFMT = 1, ROW_NVFP4 = 2, ROW_ROUNDED = 3 };

/* dtype arguments are epx_dtype values. Pointers may have any alignment that their element type has. */

void math_copy(void *to, const void *from, size_t bytes);
/* Reads once, writes n copies. */
void math_copy_many(void *const *to, int n, const void *from, size_t bytes);
/* The same with stores past the cache, for data that does not fit it: math_past_cache() of all bytes that are written
 * and read together. */
void math_copy_many_past(void *const *to, int n, const void *from, size_t bytes);
int math_past_cache(uint64_t bytes);
void math_fill_zero(void *to, size_t bytes);

/*
 * Casts a row of `hidden` bf16, fp16 or fp32 values to e4m3 with one scale per 128 channels (the last block may be
 * short). scales: SCALE_FLOAT writes ceil(hidden/128) floats, SCALE_UE8M0 packs 4 bytes to an int32 (unused bytes 0).
 * Both written contiguously. round_scale: powers of two (implied by UE8M0).
 */
void math_cast_fp8(uint8_t *q, void *scales, enum scale_kind kind, int round_scale, const void *x, int dtype,
                   int hidden);

/* Largest encoded size of a row of `hidden` bf16 values, a multiple of 16. */
size_t math_logfmt_bound(int hidden);
/* Encodes; returns the bytes used (<= bound). `to` is 16-byte aligned. */
size_t math_logfmt_encode(void *to, const uint16_t *x, int hidden);
void math_logfmt_decode(float *to, const void *from, int hidden);

/* NVFP4 (util/nvfp4.h): encodes a row of bf16, and returns its bytes. */
size_t math_nvfp4_encode(void *to, const uint16_t *x, int hidden, float row_scale);

struct reduce_row {
    const void *data;
    float weight;
    int format; /* enum row_format, as ROWS_* of kernel/params.h; ROW_NVFP4 is always weighted, the others may be */
};

/*
 * out[i] = round(bias0[i] + bias1[i] + sum over rows, in order, of weight * row[i]), in fp32: weighted rows by fused
 * multiply-add (one rounding per row), so that every device gives the same bits. weighted = 0 ignores the weights.
 * Biases may be NULL; without rows and biases the result is zero. dtype of rows, biases and out: bf16, fp16 or fp32.
 */
void math_reduce(void *out, int dtype, int hidden, const struct reduce_row *rows, int n, int weighted,
                 const void *bias0, const void *bias1);

/* The same of sums of rows, each rounded by itself: bit i of `ends` says that row i is the last of such a sum. At most
 * 32 rows, without weights and LogFMT. `out` may be one of the rows. */
void math_reduce_groups(void *out, int dtype, int hidden, const struct reduce_row *rows, int n, uint32_t ends,
                        const void *bias0, const void *bias1);

/* The same of bf16 rows, each sum rounded to MXFP8 (util/mxfp8.h); hidden is a multiple of 32. */
void math_reduce_mxfp8(void *out, int hidden, const struct reduce_row *rows, int n, uint32_t ends, const void *bias0,
                       const void *bias1);

#endif
