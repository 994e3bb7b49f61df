/* SPDX-License-Identifier: Apache-2.0 */
/*
 * perf_math [ROW_BYTES]: how fast the CPU's bulk primitives are next to memcpy in the same run, on one core, with rows
 * out of a pool larger than the caches. Not a test; EPX_CPU_LEVEL chooses the instructions.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "device/cpu/math.h"
#include "epx/epx.h"
#include "util/numeric.h"

#define POOL ((size_t)192 << 20)
#define SECONDS 0.25
#define MAX_ROWS 32

struct bench {
    char *from, *to;
    size_t row_bytes, rows, next_from, next_to;
    int fan; /* destinations of a copy, rows of a sum */
};

/* Processor time: a neighbour on the same core must not count. */
static double now(void)
{
    return (double)clock() / CLOCKS_PER_SEC;
}

/* Rows far apart, each once per round: the caches and the prefetchers see no order, as after routing. */
static char *next_row(struct bench *b, char *pool, size_t *next)
{
    *next = (*next + 7919) % b->rows;
    return pool + *next * b->row_bytes;
}

static size_t run_memcpy(struct bench *b)
{
    memcpy(next_row(b, b->to, &b->next_to), next_row(b, b->from, &b->next_from), b->row_bytes);
    return b->row_bytes * 2;
}

static size_t run_copy(struct bench *b)
{
    math_copy(next_row(b, b->to, &b->next_to), next_row(b, b->from, &b->next_from), b->row_bytes);
    return b->row_bytes * 2;
}

static size_t run_copy_many(struct bench *b)
{
    void *to[MAX_ROWS];
    for (int i = 0; i < b->fan; i++)
        to[i] = next_row(b, b->to, &b->next_to);
    math_copy_many(to, b->fan, next_row(b, b->from, &b->next_from), b->row_bytes);
    return b->row_bytes * (size_t)(b->fan + 1);
}

static size_t run_memcpy_many(struct bench *b)
{
    const char *from = next_row(b, b->from, &b->next_from);
    for (int i = 0; i < b->fan; i++)
        memcpy(next_row(b, b->to, &b->next_to), from, b->row_bytes);
    return b->row_bytes * (size_t)(b->fan + 1);
}

static size_t run_cast(struct bench *b)
{
    char *to = next_row(b, b->to, &b->next_to);
    int hidden = (int)(b->row_bytes / 2);
    math_cast_fp8((uint8_t *)to, to + hidden, SCALE_FLOAT, 0, next_row(b, b->from, &b->next_from), EPX_BF16, hidden);
    return b->row_bytes + (size_t)hidden;
}

static size_t run_reduce_dtype(struct bench *b, int dtype)
{
    struct reduce_row rows[MAX_ROWS];
    int hidden = (int)(b->row_bytes / (dtype == EPX_FP32 ? 4 : 2));
    for (int i = 0; i < b->fan; i++)
        rows[i] = (struct reduce_row){next_row(b, b->from, &b->next_from), 0.125f, ROW_PLAIN};
    math_reduce(next_row(b, b->to, &b->next_to), dtype, hidden, rows, b->fan, 1, NULL, NULL);
    return b->row_bytes * (size_t)(b->fan + 1);
}

static size_t run_reduce(struct bench *b)
{
    return run_reduce_dtype(b, EPX_BF16);
}

static size_t run_reduce_fp16(struct bench *b)
{
    return run_reduce_dtype(b, EPX_FP16);
}

static size_t run_reduce_fp32(struct bench *b)
{
    return run_reduce_dtype(b, EPX_FP32);
}

static size_t run_encode(struct bench *b)
{
    static _Alignas(16) char coded[1 << 18];
    math_logfmt_encode(coded, (const uint16_t *)next_row(b, b->from, &b->next_from), (int)(b->row_bytes / 2));
    return b->row_bytes;
}

static size_t run_decode(struct bench *b)
{
    static _Alignas(16) char coded[1 << 18];
    static float values[1 << 17];
    int hidden = (int)(b->row_bytes / 2);
    if (b->fan == 0)
        math_logfmt_encode(coded, (const uint16_t *)b->from, hidden);
    b->fan = 1;
    math_logfmt_decode(values, coded, hidden);
    return b->row_bytes;
}

static void measure(const char *name, struct bench *b, int fan, size_t (*run)(struct bench *))
{
    double start, seconds, best = 0.0;
    for (int repeat = 0; repeat < 3; repeat++) {
        size_t bytes = 0;
        b->fan = fan;
        run(b);
        start = now();
        do {
            for (int i = 0; i < 16; i++)
                bytes += run(b);
            seconds = now() - start;
        } while (seconds < SECONDS / 3);
        best = (double)bytes / seconds > best ? (double)bytes / seconds : best;
    }
    if (fan > 1)
        printf("%-22s %2d rows  %7.2f GB/s\n", name, fan, best * 1e-9);
    else
        printf("%-22s          %7.2f GB/s\n", name, best * 1e-9);
}

int main(int argc, char **argv)
{
    struct bench b = {.row_bytes = argc > 1 ? strtoul(argv[1], NULL, 10) : 14336};
    b.from = aligned_alloc(4096, POOL);
    b.to = aligned_alloc(4096, POOL);
    if (!b.from || !b.to || b.row_bytes < 64 || b.row_bytes > 131072 || b.row_bytes % 64) {
        fprintf(stderr, "usage: perf_math [row bytes: a multiple of 64 up to 131072], with 400 MB of memory\n");
        return 1;
    }
    b.rows = POOL / b.row_bytes;
    for (size_t i = 0; i < POOL / 2; i++)
        ((uint16_t *)b.from)[i] = float_to_bf16(((float)(i * 2654435761u % 65537) - 32768.0f) / 40000.0f);
    memset(b.to, 0, POOL);
    printf("rows of %zu bytes; GB/s counts bytes read and written\n", b.row_bytes);
    measure("memcpy", &b, 1, run_memcpy);
    measure("math_copy", &b, 1, run_copy);
    measure("memcpy to each", &b, 4, run_memcpy_many);
    measure("math_copy_many", &b, 4, run_copy_many);
    measure("memcpy to each", &b, 8, run_memcpy_many);
    measure("math_copy_many", &b, 8, run_copy_many);
    measure("math_cast_fp8", &b, 1, run_cast);
    measure("math_reduce bf16", &b, 2, run_reduce);
    measure("math_reduce bf16", &b, 8, run_reduce);
    measure("math_reduce bf16", &b, 32, run_reduce);
    measure("math_reduce fp16", &b, 8, run_reduce_fp16);
    measure("math_reduce fp32", &b, 8, run_reduce_fp32);
    measure("math_logfmt_encode", &b, 1, run_encode);
    measure("math_logfmt_decode", &b, 0, run_decode);
    free(b.from);
    free(b.to);
    return 0;
}
