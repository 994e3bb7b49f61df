/* SPDX-License-Identifier: Apache-2.0 */
/* Comparing tensors: where they differ first, and by how much in all. */
#ifndef EPX_TESTS_LIB_COMPARE_H
#define EPX_TESTS_LIB_COMPARE_H

#include <stddef.h>
#include <stdint.h>

#include "epx/epx.h"

/* The first difference of a check, as a sentence. */
struct mismatch {
    char text[512];
};

/* Formats `m`; returns -1, so that a check can end with it. m may be NULL. */
int mismatch_set(struct mismatch *m, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Bytes of one element: the comparison's own opinion, not the library's. */
size_t tensor_element_size(int dtype);
/* Address of an element; idx has t->ndim entries. Zero strides mean contiguous. */
void *tensor_at(const epx_tensor *t, const int64_t *idx);
/* The address of element 0 of row `row`, counting the dimensions before the last as one. */
void *tensor_row(const epx_tensor *t, int64_t row);
/* Stride, in elements, of the last dimension. */
int64_t tensor_last_stride(const epx_tensor *t);
/* Product of all dimensions but the last. */
int64_t tensor_rows(const epx_tensor *t);
/* Reads element i of a flat row-major count over all dimensions: any integer dtype. */
int64_t tensor_int(const epx_tensor *t, int64_t i);
void tensor_set_int(const epx_tensor *t, int64_t i, int64_t value);

/* Bit-exact comparison of n contiguous elements; 0 or -1. `what` and `row` only name the place. */
int compare_bits(const char *what, int64_t row, int dtype, const void *expected, const void *got, int64_t n,
                 struct mismatch *m);
/* The same with one tolerance per element. */
int compare_within(const char *what, int64_t row, int dtype, const float *expected, const float *bound, const void *got,
                   int64_t n, struct mismatch *m);
/* All n bytes equal `fill`? */
int compare_fill(const char *what, int64_t row, const void *got, size_t n, int fill, struct mismatch *m);

/* 1 - 2 * sum((x+1)(y+1)) / sum((x+1)^2 + (y+1)^2): 0 for equal tensors. */
double calc_diff(int dtype, const void *x, const void *y, size_t n);

#endif
