/* SPDX-License-Identifier: Apache-2.0 */
#include "api/check.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "util/structs.h"
#include "util/status.h"

static const char *const dtype_names[] = {
    [EPX_BF16] = "bf16",   [EPX_FP16] = "fp16",   [EPX_FP32] = "fp32",  [EPX_FP8_E4M3] = "fp8_e4m3",
    [EPX_INT32] = "int32", [EPX_INT64] = "int64", [EPX_UINT8] = "uint8"};

const char *dtype_name(int dtype)
{
    return dtype >= EPX_BF16 && dtype <= EPX_UINT8 ? dtype_names[dtype] : "unknown";
}

static void list_dtypes(unsigned bits, char *text, size_t bytes)
{
    size_t at = 0;

    text[0] = 0;
    for (int d = 1; d <= EPX_UINT8; d++)
        if (bits & DTYPE_BIT(d))
            at += (size_t)snprintf(text + at, bytes - at, "%s%s", at ? " or " : "", dtype_name(d));
}

static void list_shape(const int64_t *shape, int ndim, char *text, size_t bytes)
{
    size_t at = (size_t)snprintf(text, bytes, "[");

    for (int i = 0; i < ndim && at < bytes; i++) {
        if (shape[i] < 0)
            at += (size_t)snprintf(text + at, bytes - at, "%s*", i ? ", " : "");
        else
            at += (size_t)snprintf(text + at, bytes - at, "%s%" PRId64, i ? ", " : "", shape[i]);
    }
    if (at < bytes)
        snprintf(text + at, bytes - at, "]");
}

static epx_status wrong_shape(const epx_tensor *t, const struct want *want)
{
    char expected[128], given[128];

    list_shape(want->shape, want->ndim, expected, sizeof(expected));
    list_shape(t->shape, t->ndim > EPX_MAX_NDIM ? EPX_MAX_NDIM : t->ndim, given, sizeof(given));
    return fail(EPX_ERR_ARGUMENT, "%s: %s: expected shape %s, got %s", want->call, want->name, expected, given);
}

static epx_status check_shape(const epx_tensor *t, const struct want *want)
{
    if (t->ndim != want->ndim)
        return t->ndim >= 1 && t->ndim <= EPX_MAX_NDIM
                   ? wrong_shape(t, want)
                   : fail(EPX_ERR_ARGUMENT, "%s: %s: expected %d dimensions, got %d", want->call, want->name,
                          want->ndim, t->ndim);
    for (int i = 0; i < want->ndim; i++)
        if (t->shape[i] < 0 || t->shape[i] > INT32_MAX || (want->shape[i] >= 0 && t->shape[i] != want->shape[i]))
            return wrong_shape(t, want);
    return EPX_OK;
}

#define STRIDE_MOST (INT64_MAX / 16)

/* Saturates where strides in bytes would not fit in 63 bits. */
static int64_t stride_product(int64_t stride, int64_t extent)
{
    int64_t product;

    return __builtin_mul_overflow(stride, extent, &product) || product > STRIDE_MOST ? STRIDE_MOST : product;
}

/* Fills in strides where none were given, and where an extent of at most one element makes a stride meaningless: there
 * that of a block around what is inside it. True if the given ones are contiguous. */
static int fill_strides(epx_tensor *t)
{
    int64_t expected[EPX_MAX_NDIM], step = 1;
    int given = 0, empty = 0, contiguous = 1;

    for (int i = t->ndim - 1; i >= 0; i--) {
        expected[i] = step;
        step = stride_product(step, t->shape[i]);
        given |= t->stride[i] != 0;
        empty |= t->shape[i] == 0;
    }
    for (int i = t->ndim - 1; i >= 0; i--) {
        if (given && !empty && t->shape[i] > 1 && t->stride[i] != expected[i])
            contiguous = 0;
        if (!given || empty)
            t->stride[i] = expected[i];
        else if (t->shape[i] <= 1)
            t->stride[i] = i == t->ndim - 1 ? 1 : stride_product(t->stride[i + 1], t->shape[i + 1]);
    }
    return contiguous;
}

/* Bytes from the first to past the last element fit in 63 bits: later products of extents and strides cannot
 * overflow. A saturated stride is less than the true one: elements would overlap. */
static int span_fits(const epx_tensor *t)
{
    int64_t last = 0, step;

    for (int i = 0; i < t->ndim; i++)
        if ((t->shape[i] > 1 && t->stride[i] >= STRIDE_MOST) ||
            __builtin_mul_overflow(t->shape[i], t->stride[i], &step) || __builtin_add_overflow(last, step, &last))
            return 0;
    return last <= INT64_MAX / (int64_t)epx_dtype_size((epx_dtype)t->dtype);
}

static epx_status check_rows(const epx_tensor *t, const struct want *want)
{
    const int last = t->ndim - 1;

    if (t->shape[last] > 1 && t->stride[last] != 1)
        return fail(EPX_ERR_ARGUMENT, "%s: %s: expected contiguous rows, got stride[%d] = %" PRId64, want->call,
                    want->name, last, t->stride[last]);
    for (int i = last - 1; i >= 0; i--)
        if (t->shape[i] > 1 && t->stride[i] < t->shape[i + 1] * t->stride[i + 1])
            return fail(EPX_ERR_ARGUMENT, "%s: %s: rows overlap: stride[%d] = %" PRId64, want->call, want->name, i,
                        t->stride[i]);
    return EPX_OK;
}

static epx_status check_strides(epx_tensor *t, const struct want *want)
{
    const int contiguous = fill_strides(t);

    if (!contiguous && want->strides == STRIDES_NONE)
        return fail(EPX_ERR_ARGUMENT, "%s: %s: expected a contiguous tensor, got other strides", want->call,
                    want->name);
    for (int i = 0; i < t->ndim && !contiguous; i++)
        if (t->stride[i] < 0 || (t->shape[i] > 1 && t->stride[i] == 0))
            return fail(EPX_ERR_ARGUMENT, "%s: %s: expected positive strides, got stride[%d] = %" PRId64, want->call,
                        want->name, i, t->stride[i]);
    if (!span_fits(t))
        return fail(EPX_ERR_ARGUMENT, "%s: %s: shape and strides span more bytes than 63 bits can count", want->call,
                    want->name);
    return !contiguous && want->strides == STRIDES_ROWS ? check_rows(t, want) : EPX_OK;
}

static epx_status copy_in(const epx_tensor *given, const struct want *want, epx_tensor *out)
{
    char name[160];

    if (given->size == sizeof(*out)) { /* nearly always: no message to prepare */
        *out = *given;
        return EPX_OK;
    }
    snprintf(name, sizeof(name), "%s: %s", want->call, want->name);
    return struct_in(out, sizeof(*out), given, name);
}

epx_status check_tensor(const epx_tensor *given, const struct want *want, epx_tensor *out)
{
    char text[160];
    epx_status status;

    if (!given)
        return fail(EPX_ERR_ARGUMENT, "%s: %s: expected a tensor, got NULL", want->call, want->name);
    status = copy_in(given, want, out);
    if (status != EPX_OK)
        return status;
    if (out->dtype < 1 || out->dtype > EPX_UINT8 || !(want->dtypes & DTYPE_BIT(out->dtype))) {
        list_dtypes(want->dtypes, text, sizeof(text));
        return fail(EPX_ERR_ARGUMENT, "%s: %s: expected dtype %s, got %s (%d)", want->call, want->name, text,
                    dtype_name(out->dtype), out->dtype);
    }
    status = check_shape(out, want);
    if (status == EPX_OK)
        status = check_strides(out, want);
    if (status != EPX_OK)
        return status;
    int64_t elements = 1;
    for (int i = 0; i < out->ndim; i++)
        elements *= out->shape[i] ? 1 : 0;
    if (elements && !out->data)
        return fail(EPX_ERR_ARGUMENT, "%s: %s.data: expected a pointer, got NULL", want->call, want->name);
    if ((uintptr_t)out->data % epx_dtype_size((epx_dtype)out->dtype))
        return fail(EPX_ERR_ARGUMENT, "%s: %s.data: expected an address aligned to %zu bytes, got %p", want->call,
                    want->name, epx_dtype_size((epx_dtype)out->dtype), out->data);
    return EPX_OK;
}

epx_status check_optional(const epx_tensor *given, const struct want *want, epx_tensor *out)
{
    if (given)
        return check_tensor(given, want, out);
    memset(out, 0, sizeof(*out));
    return EPX_OK;
}
