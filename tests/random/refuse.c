/* SPDX-License-Identifier: Apache-2.0 */
/* Calls with one mistake: they are refused, and nothing has happened. */
#include "steps.h"

/* Something that is wrong with any tensor. Zero: this one cannot have it. */
static int spoil(struct rank *me, epx_tensor *t)
{
    const int last = t->ndim - 1;

    switch (draw(&me->d, 7)) {
    case 0:
        t->dtype = chance(&me->d, 50) ? EPX_INT64 : 8;
        return 1;
    case 1:
        t->shape[last]--;
        return 1;
    case 2:
        t->ndim += chance(&me->d, 50) ? 1 : -1;
        return 1;
    case 3:
        t->data = (char *)t->data + 1;
        return dtype_bytes(t->dtype) > 1;
    case 4:
        t->data = NULL;
        return t->shape[0] > 0 && (t->ndim < 3 || t->shape[1] > 0);
    case 5:
        t->size = (uint32_t)draw(&me->d, 2) * 4 + 4;
        return 1;
    default:
        t->stride[0] = -1;
        t->stride[last] = 1;
        return last > 0 && t->shape[0] > 1 && t->shape[last] > 0;
    }
}

/* A mistake that calls of both kinds can have, number 0 to 2: the status that it is refused with, or EPX_OK if this
 * tensor cannot have it. */
enum { COMMON_MISTAKES = 3 };
static epx_status mistake(struct rank *me, int number, int low, epx_tensor *in, epx_tensor *out, int32_t *direction)
{
    if (number < 2)
        return spoil(me, number == 0 ? in : out) ? EPX_ERR_ARGUMENT : EPX_OK;
    *direction = low ? EPX_BACKWARD : 2;
    return low ? EPX_ERR_USAGE : EPX_ERR_ARGUMENT;
}

/* A mistake that a dispatch alone can have, number 0 to 4. `out` is what c->out.tokens points to. */
static epx_status dispatch_mistake(const struct rank *me, const struct step *s, int number, struct dispatch *c,
                                   epx_tensor *out, const epx_layout_info **given)
{
    static const epx_layout_info nothing = EPX_LAYOUT_INFO_INIT, room = {.size = sizeof(room), .expected_rows = 1};
    const int low = is_low(plan_of(me, s));

    switch (number) {
    case 0:
        if (low)
            out->shape[1] = (is_major(plan_of(me, s)) ? (int64_t)me->p->R * me->p->M : me->p->M) - 1;
        else
            *given = is_major(plan_of(me, s)) ? &room : &nothing; /* EXPERT_MAJOR may be given some of it */
        return low ? EPX_ERR_OVERFLOW : EPX_ERR_ARGUMENT;
    case 1:
        c->in.size = 12;
        break;
    case 2:
        c->in.topk_idx = c->in.tokens; /* another routing, which cannot be */
        break;
    case 3:
        c->config.max_sms = -1;
        break;
    default:
        c->out.scales = c->out.scales ? NULL : out;
        break;
    }
    return EPX_ERR_ARGUMENT;
}

int refuse_dispatch(struct rank *me, const struct step *s, const struct dispatch *right)
{
    struct dispatch c = *right;
    epx_tensor in = *c.in.tokens, out = *c.out.tokens;
    const int low = is_low(plan_of(me, s)), number = draw(&me->d, COMMON_MISTAKES + 5);
    const epx_layout_info *given = low && !s->busy ? &right->info : NULL;
    epx_status expected;

    c.in.tokens = &in;
    c.out.tokens = &out;
    expected = number < COMMON_MISTAKES ? mistake(me, number, low, &in, &out, &c.config.direction)
                                        : dispatch_mistake(me, s, number - COMMON_MISTAKES, &c, &out, &given);
    if (expected == EPX_OK)
        return 0;
    return expect_status(me, expected,
                         epx_dispatch(me->h[s->handle].handle, &c.in, &c.out, given, &c.config, stream_of(me, s)),
                         "a wrong epx_dispatch");
}

/* A mistake that a combine alone can have, number 0 to 2. */
static epx_status combine_mistake(int number, int low, struct combine *c)
{
    switch (number) {
    case 0:
        c->config.sum = low ? EPX_SUM_ROUND_RANKS : EPX_SUM_ROUND_NODES;
        return low ? EPX_ERR_USAGE : EPX_ERR_ARGUMENT;
    case 1:
        c->out.topk_weights = c->out.topk_weights ? NULL : c->out.tokens;
        return EPX_ERR_ARGUMENT;
    default:
        c->config.logfmt = c->config.nvfp4 = 1;
        return EPX_ERR_USAGE;
    }
}

int refuse_combine(struct rank *me, const struct step *s, const struct combine *right)
{
    struct combine c = *right;
    epx_tensor in = *c.in.tokens, out = *c.out.tokens;
    const int low = is_low(plan_of(me, s)), number = draw(&me->d, COMMON_MISTAKES + 3);
    epx_status expected;

    c.in.tokens = &in;
    c.out.tokens = &out;
    expected = number < COMMON_MISTAKES ? mistake(me, number, low, &in, &out, &c.config.direction)
                                        : combine_mistake(number - COMMON_MISTAKES, low, &c);
    if (expected == EPX_OK)
        return 0;
    return expect_status(me, expected, epx_combine(me->h[s->handle].handle, &c.in, &c.out, &c.config, stream_of(me, s)),
                         "a wrong epx_combine");
}
