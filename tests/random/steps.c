/* SPDX-License-Identifier: Apache-2.0 */
/* What the steps of a rank share. */
#include "steps.h"

#include <string.h>

const struct handle_plan *plan_of(const struct rank *me, const struct step *s)
{
    return &me->p->handle[s->handle];
}

epx_stream stream_of(const struct rank *me, const struct step *s)
{
    return me->stream[plan_of(me, s)->group][s->stream];
}

struct tensor *packed(struct rank *me, const struct step *s, const char *name, int dtype, int ndim, int64_t d0,
                      int64_t d1, int64_t d2)
{
    return tensor_new(me, plan_of(me, s)->group, name, dtype, PACKED, ndim, d0, d1, d2);
}

int draw_index(struct rank *me)
{
    return chance(&me->d, 50) ? EPX_INT32 : EPX_INT64;
}

epx_tensor *of(struct tensor *t)
{
    return t ? &t->t : NULL;
}

int sent_to(const struct routing *r, int from, int to)
{
    int n = 0;

    for (int t = 0; t < r->tokens[from]; t++)
        n += goes_to(r, from, t, to);
    return n;
}

struct tensor *received_tensor(struct rank *me, const struct step *s, const char *name, int dtype, enum strides strides,
                               int64_t rows, int64_t last)
{
    const struct handle_plan *h = plan_of(me, s);
    const int group = h->group;

    if (!is_low(h))
        return tensor_new(me, group, name, dtype, strides, last ? 2 : 1, rows, last, 0);
    return tensor_new(me, group, name, dtype, strides, last ? 3 : 2, is_major(h) ? me->p->L : me->p->R, rows, last);
}

/* Nothing that this rank has issued is under way: its content is valid from here to the next operation. */
int recv_buffer_tensor(struct rank *me, const struct step *s, int which, int dtype, int64_t rows, int64_t columns,
                       struct tensor **tensor)
{
    const struct plan *p = me->p;
    const int group = plan_of(me, s)->group, usual = which == EPX_RECV_TOKENS || columns <= (p->bytes + 63) / 64;
    epx_tensor t = EPX_TENSOR_INIT;
    epx_status status;

    for (int i = 0; i < 3; i++)
        TRY(epx_stream_sync(me->group[group], me->stream[group][i]));
    status = epx_handle_recv_tensor(me->h[s->handle].handle, (epx_recv_part)which, (epx_dtype)dtype, rows, columns, &t);
    *tensor = NULL;
    if ((status == EPX_ERR_OVERFLOW && (!p->bounded || rows > group_config(p).max_recv_tokens)) ||
        (status == EPX_ERR_ARGUMENT && !usual))
        return 0;
    TRY(status);
    *tensor = tensor_wrap(me, which == EPX_RECV_TOKENS ? "recv_tensor: tokens" : "recv_tensor: scales", &t);
    CHECK(*tensor);
    return 0;
}

int64_t draw_rows(struct rank *me, const struct step *s)
{
    const struct handle_plan *h = plan_of(me, s);
    const int64_t needed = !is_low(h)    ? me->h[s->handle].received.rows
                           : is_major(h) ? (int64_t)me->p->R * me->p->M
                                         : me->p->M;

    return needed + (chance(&me->d, 50) ? 0 : draw(&me->d, 9));
}

int64_t row_of(const struct rank *me, const struct handle_plan *h, const struct place *at, int64_t rows)
{
    const int64_t zone = is_major(h) ? (int64_t)me->p->R * me->p->M : me->p->M;

    return is_low(h) ? at->row / zone * rows + at->row % zone : at->row;
}

void expect_float(struct tensor *t, int64_t i, float value)
{
    memcpy((char *)t->image.data + 4 * i, &value, 4);
}

int expect_status(const struct rank *me, epx_status expected, epx_status got, const char *what)
{
    if (got == expected)
        return 0;
    return wrong(me, __FILE__, __LINE__, "%s: expected status %d, got %d: %s", what, (int)expected, (int)got,
                 got == EPX_OK ? "" : epx_last_error());
}
