/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors with images. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "rank.h"
#include "tests/lib/compare.h"

enum { GUARD = 64 };

/* Strides of dimensions in `order`, the innermost first; gaps by chance. Returns the elements that it spans. */
static int64_t set_strides(struct draw *d, epx_tensor *t, const int *order, enum strides strides)
{
    int64_t step = 1, span = 1;

    for (int i = 0; i < t->ndim; i++) {
        const int dim = order[i];

        if (strides == ANY || (strides == ROWS && i > 0))
            step += chance(d, 30) ? draw(d, 40) : 0;
        t->stride[dim] = step;
        span += (t->shape[dim] > 0 ? t->shape[dim] - 1 : 0) * step;
        step *= t->shape[dim] > 0 ? t->shape[dim] : 1;
    }
    return span;
}

static int64_t lay_out(struct draw *d, epx_tensor *t, enum strides strides)
{
    int order[3] = {2, 1, 0};

    for (int i = 0; i < t->ndim; i++)
        order[i] = t->ndim - 1 - i;
    if (strides == ANY)
        for (int i = t->ndim - 1; i > 0; i--) {
            const int j = draw(d, i + 1), swap = order[i];
            order[i] = order[j];
            order[j] = swap;
        }
    return set_strides(d, t, order, strides);
}

static int find_memory(struct rank *me, struct tensor *t)
{
    if (t->in_heap && epx_alloc(t->group, t->bytes, (void **)&t->base) != EPX_OK)
        return -1;
    if (!t->in_heap && posix_memalign((void **)&t->base, 64, t->bytes))
        return -1;
    t->expected = malloc(t->bytes);
    if (!t->expected)
        return -1;
    /* What was there before looks like numbers of any kind, NaN too. */
    for (size_t i = 0; i < t->bytes; i++)
        t->base[i] = (unsigned char)(me->d.state >> (i % 8 * 8)) | (unsigned char)(i % 3 ? 0 : 0x41);
    memcpy(t->expected, t->base, t->bytes);
    return 0;
}

struct tensor *tensor_new(struct rank *me, int group, const char *name, int dtype, enum strides strides, int ndim,
                          int64_t d0, int64_t d1, int64_t d2)
{
    const size_t size = dtype_bytes(dtype);
    struct tensor *t = calloc(1, sizeof(*t));
    size_t front;

    if (!t)
        return NULL;
    t->name = name;
    t->step = me->at;
    t->group = me->group[group];
    t->in_heap = chance(&me->d, 40);
    t->t = epx_tensor_make(NULL, (epx_dtype)dtype, ndim, d0, ndim > 1 ? d1 : 0, ndim > 2 ? d2 : 0, 0);
    front = (GUARD + (size_t)draw(&me->d, chance(&me->d, 50) ? 1 : 64)) / size * size;
    t->bytes = front + (size_t)lay_out(&me->d, &t->t, strides) * size + GUARD;
    if (find_memory(me, t)) {
        free(t);
        return NULL;
    }
    t->t.data = t->base + front;
    t->image = t->t;
    t->image.data = t->expected + front;
    if (strides == PACKED && chance(&me->d, 50))
        memset(t->t.stride, 0, sizeof(t->t.stride));
    t->next = me->tensors;
    me->tensors = t;
    return t;
}

static void copy_row(const epx_tensor *to, int64_t row, const void *values)
{
    const int last = to->ndim - 1;
    const size_t size = dtype_bytes(to->dtype);
    char *at = tensor_row(to, row);

    for (int64_t i = 0; i < to->shape[last]; i++)
        memcpy(at + (size_t)(i * to->stride[last]) * size, (const char *)values + (size_t)i * size, size);
}

void tensor_expect(struct tensor *t, int64_t row, const void *values)
{
    copy_row(&t->image, row, values);
}

static void let_any(struct tensor *t, const void *at, size_t bytes)
{
    if (!t->any)
        t->any = calloc(1, t->bytes);
    if (t->any)
        memset(t->any + ((const unsigned char *)at - t->expected), 1, bytes);
}

void tensor_expect_within(struct tensor *t, int64_t row, const void *values, const float *bound)
{
    const int64_t n = t->image.shape[1];
    const size_t size = dtype_bytes(t->image.dtype);

    copy_row(&t->image, row, values);
    if (!t->bound)
        t->bound = calloc((size_t)(t->image.shape[0] * n) + 1, sizeof(*t->bound));
    for (int64_t i = 0; t->bound && i < n; i++) {
        t->bound[row * n + i] = bound[i];
        if (bound[i] > 0)
            let_any(t, (const char *)tensor_row(&t->image, row) + (size_t)(i * t->image.stride[1]) * size, size);
    }
}

void tensor_give(struct tensor *t, int64_t row, const void *values)
{
    epx_tensor here = t->image;

    here.data = t->t.data;
    copy_row(&t->image, row, values);
    copy_row(&here, row, values);
}

void tensor_expect_int(struct tensor *t, int64_t i, int64_t value)
{
    tensor_set_int(&t->image, i, value);
}

void tensor_give_int(struct tensor *t, int64_t i, int64_t value)
{
    tensor_set_int(&t->image, i, value);
    tensor_set_int(&t->t, i, value);
}

void tensor_zero(struct tensor *t, int64_t row)
{
    const int last = t->image.ndim - 1;
    void *zeros = calloc((size_t)t->image.shape[last] + 1, 8);

    if (zeros)
        copy_row(&t->image, row, zeros);
    free(zeros);
}

void tensor_ignore(struct tensor *t, int64_t row)
{
    const size_t size = dtype_bytes(t->image.dtype);

    let_any(t, (const unsigned char *)t->image.data + (size_t)row * size, size);
}

/* Which element holds byte `at`? */
static void name_place(const struct tensor *t, size_t at, char *text, size_t bytes)
{
    const size_t size = dtype_bytes(t->image.dtype);
    const int64_t data = (const unsigned char *)t->image.data - t->expected;
    int64_t off = ((int64_t)at - data) / (int64_t)size, index[3] = {0};
    int outside = (int64_t)at < data;

    for (int64_t i = 0, d1 = t->image.ndim > 1 ? t->image.shape[1] : 1; !outside && i < t->image.shape[0]; i++)
        for (int64_t j = 0; j < d1; j++)
            for (int64_t k = 0, d2 = t->image.ndim > 2 ? t->image.shape[2] : 1; k < d2; k++)
                if (i * t->image.stride[0] + j * t->image.stride[1] + k * t->image.stride[2] == off) {
                    index[0] = i, index[1] = j, index[2] = k;
                    snprintf(text, bytes, "[%lld][%lld][%lld]", (long long)index[0], (long long)index[1],
                             (long long)index[2]);
                    return;
                }
    snprintf(text, bytes, "between or around rows");
}

/* Elements that may be off, of a tensor of two dimensions: both sums are rounded to its dtype. */
static int check_bounds(struct rank *me, const struct tensor *t)
{
    const int64_t n = t->image.shape[1];

    for (int64_t i = 0; t->bound && i < t->image.shape[0] * n; i++) {
        const int64_t off = i / n * t->image.stride[0] + i % n * t->image.stride[1];
        const size_t at = (size_t)off * dtype_bytes(t->image.dtype);
        const float got = load_value(t->image.dtype, (const char *)t->t.data + at);
        const float expected = load_value(t->image.dtype, (const char *)t->image.data + at);
        const float bound = t->bound[i] * 1.001f + (fabsf(expected) + t->bound[i]) * 0x1p-7f + 0x1p-126f;

        if (t->bound[i] > 0 && !(fabsf(got - expected) <= bound) && !(isnan(got) && isnan(expected)) && got != expected)
            return wrong(me, __FILE__, __LINE__, "step %d: %s [%lld][%lld]: expected %.9g within %g, got %.9g", t->step,
                         t->name, (long long)(i / n), (long long)(i % n), (double)expected, (double)bound, (double)got);
    }
    return 0;
}

static int check_tensor(struct rank *me, const struct tensor *t)
{
    char place[100];

    if (check_bounds(me, t))
        return -1;
    if (memcmp(t->base, t->expected, t->bytes) == 0)
        return 0;
    for (size_t i = 0; i < t->bytes; i++) {
        if (t->base[i] == t->expected[i] || (t->any && t->any[i]))
            continue;
        name_place(t, i, place, sizeof(place));
        return wrong(me, __FILE__, __LINE__,
                     "step %d: %s (dtype %d, [%lld, %lld, %lld], strides %lld %lld %lld, %s): byte %zu, %s: expected "
                     "0x%02x, got 0x%02x",
                     t->step, t->name, t->image.dtype, (long long)t->image.shape[0], (long long)t->image.shape[1],
                     (long long)t->image.shape[2], (long long)t->image.stride[0], (long long)t->image.stride[1],
                     (long long)t->image.stride[2],
                     t->in_heap   ? "epx_alloc"
                     : t->wrapped ? "recv_tensor"
                                  : "malloc",
                     i, place, t->expected[i], t->base[i]);
    }
    return 0;
}

int tensors_check(struct rank *me)
{
    for (struct tensor *t = me->tensors; t; t = t->next)
        if (check_tensor(me, t))
            return -1;
    return 0;
}

static void tensor_free(struct tensor *t)
{
    if (t->in_heap)
        epx_free(t->group, t->base);
    else if (!t->wrapped)
        free(t->base);
    free(t->expected);
    free(t->any);
    free(t->bound);
    free(t);
}

void tensors_free(struct rank *me)
{
    struct tensor *keep = NULL;

    while (me->tensors) {
        struct tensor *t = me->tensors;
        int routes = 0;

        me->tensors = t->next;
        for (int h = 0; h < me->p->nhandles; h++)
            routes |= me->h[h].idx == t;
        if (routes) {
            t->next = keep;
            keep = t;
            continue;
        }
        tensor_free(t);
    }
    me->tensors = keep;
}

struct tensor *tensor_wrap(struct rank *me, const char *name, const epx_tensor *given)
{
    struct tensor *t = calloc(1, sizeof(*t));

    if (!t)
        return NULL;
    t->name = name;
    t->step = me->at;
    t->wrapped = 1;
    t->t = t->image = *given;
    t->image.stride[1] = 1;
    t->image.stride[0] = given->stride[0] ? given->stride[0] : given->shape[1];
    t->base = given->data;
    t->bytes = (size_t)(given->shape[0] * t->image.stride[0]) * dtype_bytes(given->dtype);
    t->expected = malloc(t->bytes + 1);
    if (!t->expected) {
        free(t);
        return NULL;
    }
    memcpy(t->expected, t->base, t->bytes);
    t->image.data = t->expected;
    t->next = me->tensors;
    me->tensors = t;
    return t;
}

int tensor_unwrap(struct rank *me, struct tensor *t)
{
    struct tensor **at = &me->tensors;
    const int rc = check_tensor(me, t);

    while (*at != t)
        at = &(*at)->next;
    *at = t->next;
    tensor_free(t);
    return rc;
}
