/* SPDX-License-Identifier: Apache-2.0 */
#include "compare.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "oracle.h"

int mismatch_set(struct mismatch *m, const char *format, ...)
{
    va_list args;

    if (m) {
        va_start(args, format);
        vsnprintf(m->text, sizeof(m->text), format, args);
        va_end(args);
    }
    return -1;
}

/* ---- Tensors ----------------------------------------------------------------------------------------------------- */

size_t tensor_element_size(int dtype)
{
    switch (dtype) {
    case EPX_BF16:
    case EPX_FP16:
        return 2;
    case EPX_FP32:
    case EPX_INT32:
        return 4;
    case EPX_INT64:
        return 8;
    default:
        return 1;
    }
}

/* Elements between neighbours of dimension `dim`. */
static int64_t stride_of(const epx_tensor *t, int dim)
{
    int64_t stride = 1;

    for (int i = 0; i < t->ndim; i++)
        if (t->stride[i])
            return t->stride[dim];
    for (int i = dim + 1; i < t->ndim; i++)
        stride *= t->shape[i];
    return stride;
}

void *tensor_at(const epx_tensor *t, const int64_t *idx)
{
    int64_t at = 0;

    for (int i = 0; i < t->ndim; i++)
        at += idx[i] * stride_of(t, i);
    return (char *)t->data + at * (int64_t)tensor_element_size(t->dtype);
}

void *tensor_row(const epx_tensor *t, int64_t row)
{
    int64_t idx[EPX_MAX_NDIM] = {0};

    for (int i = t->ndim - 2; i >= 0; i--) {
        idx[i] = row % t->shape[i];
        row /= t->shape[i];
    }
    return tensor_at(t, idx);
}

int64_t tensor_last_stride(const epx_tensor *t)
{
    return stride_of(t, t->ndim - 1);
}

int64_t tensor_rows(const epx_tensor *t)
{
    int64_t rows = 1;

    for (int i = 0; i < t->ndim - 1; i++)
        rows *= t->shape[i];
    return rows;
}

static void *element_at(const epx_tensor *t, int64_t i)
{
    int64_t idx[EPX_MAX_NDIM] = {0};

    for (int d = t->ndim - 1; d >= 0; d--) {
        idx[d] = i % t->shape[d];
        i /= t->shape[d];
    }
    return tensor_at(t, idx);
}

int64_t tensor_int(const epx_tensor *t, int64_t i)
{
    const void *p = element_at(t, i);
    int64_t wide;
    int32_t narrow;

    if (t->dtype == EPX_INT64) {
        memcpy(&wide, p, sizeof(wide));
        return wide;
    }
    if (t->dtype == EPX_UINT8)
        return *(const uint8_t *)p;
    memcpy(&narrow, p, sizeof(narrow));
    return narrow;
}

void tensor_set_int(const epx_tensor *t, int64_t i, int64_t value)
{
    void *p = element_at(t, i);
    int32_t narrow = (int32_t)value;

    if (t->dtype == EPX_INT64)
        memcpy(p, &value, sizeof(value));
    else if (t->dtype == EPX_UINT8)
        *(uint8_t *)p = (uint8_t)value;
    else
        memcpy(p, &narrow, sizeof(narrow));
}

/* ---- Comparisons ------------------------------------------------------------------------------------------------- */

static void print_element(char *buf, size_t bytes, int dtype, const unsigned char *p)
{
    int size = (int)tensor_element_size(dtype);
    char hex[20] = "";
    int at = 0;

    for (int i = size - 1; i >= 0; i--)
        at += snprintf(hex + at, sizeof(hex) - (size_t)at, "%02x", p[i]);
    if (dtype == EPX_INT32 || dtype == EPX_INT64 || dtype == EPX_UINT8) {
        epx_tensor t = epx_tensor_make((void *)(uintptr_t)p, (epx_dtype)dtype, 1, 1, 0, 0, 0);
        snprintf(buf, bytes, "%lld (0x%s)", (long long)tensor_int(&t, 0), hex);
    } else {
        snprintf(buf, bytes, "%.9g (0x%s)", (double)oracle_to_float(dtype, p), hex);
    }
}

int compare_bits(const char *what, int64_t row, int dtype, const void *expected, const void *got, int64_t n,
                 struct mismatch *m)
{
    size_t size = tensor_element_size(dtype);
    const unsigned char *e = expected, *g = got;
    int64_t first = 0, wrong = 0;
    char etext[48], gtext[48];

    if (!memcmp(e, g, (size_t)n * size))
        return 0;
    for (int64_t i = n - 1; i >= 0; i--) {
        if (memcmp(e + (size_t)i * size, g + (size_t)i * size, size)) {
            first = i;
            wrong++;
        }
    }
    print_element(etext, sizeof(etext), dtype, e + (size_t)first * size);
    print_element(gtext, sizeof(gtext), dtype, g + (size_t)first * size);
    return mismatch_set(m, "%s: row %lld element %lld: expected %s, got %s; %lld of %lld differ, calc_diff %.3g", what,
                        (long long)row, (long long)first, etext, gtext, (long long)wrong, (long long)n,
                        calc_diff(dtype, expected, got, (size_t)n));
}

int compare_within(const char *what, int64_t row, int dtype, const float *expected, const float *bound, const void *got,
                   int64_t n, struct mismatch *m)
{
    size_t size = tensor_element_size(dtype);

    for (int64_t i = 0; i < n; i++) {
        float value = oracle_to_float(dtype, (const char *)got + (size_t)i * size);
        if (!(fabsf(value - expected[i]) <= bound[i]))
            return mismatch_set(m, "%s: row %lld element %lld: expected %.9g within %.3g, got %.9g", what,
                                (long long)row, (long long)i, (double)expected[i], (double)bound[i], (double)value);
    }
    return 0;
}

int compare_fill(const char *what, int64_t row, const void *got, size_t n, int fill, struct mismatch *m)
{
    const unsigned char *g = got;

    /* Each byte is its neighbour: under sanitizers the loop takes a third of the time of whole tests. */
    if (n == 0 || (g[0] == (unsigned char)fill && memcmp(g, g + 1, n - 1) == 0))
        return 0;
    for (size_t i = 0; i < n; i++)
        if (g[i] != (unsigned char)fill)
            return mismatch_set(m, "%s: row %lld byte %zu of %zu: expected the fill 0x%02x, got 0x%02x", what,
                                (long long)row, i, n, (unsigned)fill & 0xff, (unsigned)g[i]);
    return 0;
}

double calc_diff(int dtype, const void *x, const void *y, size_t n)
{
    size_t size = tensor_element_size(dtype);
    double cross = 0, squares = 0;

    for (size_t i = 0; i < n; i++) {
        double a = 1 + (double)oracle_to_float(dtype, (const char *)x + i * size);
        double b = 1 + (double)oracle_to_float(dtype, (const char *)y + i * size);
        cross += a * b;
        squares += a * a + b * b;
    }
    return squares > 0 ? 1 - 2 * cross / squares : 0;
}
