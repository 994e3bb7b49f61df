/* SPDX-License-Identifier: Apache-2.0 */
/* Combines: rows and weights that a rank gives back, and the sums that it expects. */
#include <stdlib.h>
#include <string.h>

#include "steps.h"
#include "tests/lib/compare.h"

static void give_float(struct tensor *t, int64_t i, float value)
{
    memcpy((char *)t->t.data + 4 * i, &value, 4);
    memcpy((char *)t->image.data + 4 * i, &value, 4);
}

static int register_rows(struct rank *me, const struct step *s, const struct tensor *t)
{
    int in_place = -1;

    TRY(epx_register(me->group[plan_of(me, s)->group], t->base, t->bytes, stream_of(me, s), &in_place));
    CHECK(in_place == 0 || in_place == 1);
    return 0;
}

static int give_results(struct rank *me, const struct step *s, struct combine *c)
{
    const struct handle_plan *h = plan_of(me, s);
    const struct received *v = &me->h[s->handle].received;
    const int64_t rows = draw_rows(me, s);
    char *row = malloc((size_t)s->f.H * 4);
    struct tensor *tokens, *scales = NULL;

    if (s->recv && chance(&me->d, 70) &&
        recv_buffer_tensor(me, s, EPX_RECV_TOKENS, s->f.dtype, rows, s->f.H, &c->wrapped))
        return -1;
    tokens = c->wrapped ? c->wrapped : received_tensor(me, s, "results", s->f.dtype, ROWS, rows, s->f.H);
    if (s->f.nvfp4)
        scales = received_tensor(me, s, "row_scales", EPX_FP32, PACKED, rows, 0);
    CHECK(tokens && row && (scales || !s->f.nvfp4));
    for (int i = 0; i < v->n; i++) {
        const struct place *at = &v->place[i];

        model_result(s, me->rank, is_major(h) ? me->rank * me->p->L + at->l : -1, at->src, at->token, at->k, row);
        if (s->signals)
            tensor_expect(tokens, row_of(me, h, at, rows), row);
        else
            tensor_give(tokens, row_of(me, h, at, rows), row);
        if (scales)
            give_float(scales, row_of(me, h, at, rows), model_row_scale((const uint16_t *)(const void *)row, s->f.H));
    }
    free(row);
    c->results = tokens;
    c->in.tokens = of(tokens);
    c->in.row_scales = of(scales);
    if (!is_low(h) && chance(&me->d, 30))
        return register_rows(me, s, tokens);
    return 0;
}

/* High throughput: weights go back as they have come. */
static int give_back_weights(struct rank *me, const struct step *s, struct combine *c)
{
    const struct handle_plan *h = plan_of(me, s);
    const struct handle_run *run = &me->h[s->handle];
    const int64_t rows = c->in.tokens->shape[0];
    const int K = is_major(h) ? 1 : h->K, B = run->routing.tokens[me->rank];
    struct tensor *in = received_tensor(me, s, "weights back", EPX_FP32, PACKED, rows, is_major(h) ? 0 : K);
    struct tensor *out = packed(me, s, "outputs.topk_weights", EPX_FP32, 2, B, h->K, 0);

    CHECK(in && out);
    for (int i = 0; i < run->received.n; i++) {
        const struct place *at = &run->received.place[i];
        const int32_t *idx = routing_idx(&run->routing, at->src, at->token);
        float weights[EPX_MAX_TOPK] = {0};
        int n = 0;

        if (is_major(h))
            weights[0] = model_back_weight(s, at->src, at->token, at->k);
        for (int l = 0; !is_major(h) && l < me->p->L; l++)
            for (int k = 0; k < h->K; k++)
                if (idx[k] == me->rank * me->p->L + l)
                    weights[h->flags & EPX_HANDLE_COMPACT_TOPK ? n++ : k] = model_back_weight(s, at->src, at->token, k);
        for (int k = 0; k < K; k++)
            give_float(in, at->row * K + k, weights[k]);
    }
    for (int t = 0; t < B; t++)
        for (int k = 0; k < h->K; k++)
            expect_float(out, t * h->K + k,
                         routing_left(&run->routing, me->rank, t)[k] < 0 ? 0 : model_back_weight(s, me->rank, t, k));
    c->in.topk_weights = of(in);
    c->out.topk_weights = of(out);
    return 0;
}

/* Low latency: what each entry counts, and which do not. */
static int give_weights(struct rank *me, const struct step *s, struct combine *c)
{
    const struct handle_plan *h = plan_of(me, s);
    const struct handle_run *run = &me->h[s->handle];
    const int B = run->routing.tokens[me->rank];
    struct tensor *weights = packed(me, s, "inputs.topk_weights", EPX_FP32, 2, B, h->K, 0);
    struct tensor *idx = s->skips ? packed(me, s, "inputs.topk_idx", draw_index(me), 2, B, h->K, 0) : NULL;

    CHECK(weights && (!s->skips || idx));
    for (int t = 0; t < B; t++) {
        float row[EPX_MAX_TOPK];
        for (int k = 0; k < h->K; k++) {
            row[k] = model_weight(s, me->rank, t, k);
            if (idx)
                tensor_give_int(idx, t * h->K + k,
                                model_skips(s, me->rank, t, k) ? -1 - draw(&me->d, 3) : draw(&me->d, 5));
        }
        tensor_give(weights, t, row);
    }
    c->in.topk_weights = of(weights);
    c->in.topk_idx = of(idx);
    return 0;
}

static int expect_sums(struct rank *me, const struct step *s, struct combine *c)
{
    const struct handle_plan *h = plan_of(me, s);
    const struct routing *r = &me->h[s->handle].routing;
    const int B = r->tokens[me->rank];
    struct tensor *out = tensor_new(me, h->group, "outputs.tokens", s->f.dtype, ROWS, 2, B, s->f.H, 0);
    char *row = malloc((size_t)s->f.H * 4);
    float *bound = malloc((size_t)s->f.H * sizeof(*bound));

    CHECK(out && row && bound);
    for (int t = 0; t < B && !s->busy; t++) {
        model_combine(r, s, me->rank, t, row, bound);
        if (s->f.logfmt)
            tensor_expect_within(out, t, row, bound);
        else
            tensor_expect(out, t, row);
    }
    for (int i = 0; i < s->biases; i++) {
        struct tensor *bias = tensor_new(me, h->group, "bias", s->f.dtype, ROWS, 2, B, s->f.H, 0);

        CHECK(bias);
        for (int t = 0; t < B; t++) {
            model_bias(s, i, me->rank, t, row);
            tensor_give(bias, t, row);
        }
        c->in.bias[i] = of(bias);
    }
    free(row);
    free(bound);
    c->out.tokens = of(out);
    return 0;
}

/* ---- Signals ----------------------------------------------------------------------------------------------------- */

static int give_signals(struct rank *me, struct combine *c, const struct step *s)
{
    const int64_t rows = c->in.tokens->shape[1];
    const int per = chance(&me->d, 30) ? 0 : 1 + draw(&me->d, (int)rows + 3), value = 1 + draw(&me->d, 9);
    const int64_t needed = per ? (rows + per - 1) / per : 1, n = needed + draw(&me->d, 3);
    struct tensor *t = packed(me, s, "signals", EPX_INT32, 2, me->p->L, n, 0);

    CHECK(t);
    for (int64_t i = 0; i < me->p->L * n; i++)
        tensor_give_int(t, i, draw(&me->d, value));
    c->signals = t;
    c->in.signals = of(t);
    c->config.signal_rows = per;
    c->config.signal_value = (uint32_t)value;
    return 0;
}

/* The rows of one signal, while the operation runs; then the signal. */
static void release_block(struct rank *me, struct combine *c, int64_t block)
{
    const int64_t columns = c->signals->image.shape[1], rows = c->results->image.shape[1], per = c->config.signal_rows;
    const int64_t first = block % columns * per, last = per && first + per < rows ? first + per : rows;
    const int value = (int)c->config.signal_value + draw(&me->d, 3);
    int32_t *signal = (int32_t *)(void *)c->signals->t.data + block;

    for (int64_t r = first; r < last; r++) {
        const int64_t row = block / columns * rows + r;
        memcpy(tensor_row(&c->results->t, row), tensor_row(&c->results->image, row),
               (size_t)c->results->image.shape[2] * dtype_bytes(c->results->image.dtype));
    }
    tensor_expect_int(c->signals, block, value);
    __atomic_store_n(signal, value, __ATOMIC_RELEASE);
}

static void release_rows(struct rank *me, struct combine *c)
{
    const int64_t n = c->signals->image.shape[0] * c->signals->image.shape[1], columns = c->signals->image.shape[1];
    const int64_t step = 1 + 2 * draw(&me->d, (int)n); /* any order: an odd step visits all of a power of two */
    int64_t size = 1;

    while (size < n)
        size *= 2;
    for (int64_t i = 0; i < size; i++) {
        const int64_t block = i * step % size;
        if (block < n && (c->config.signal_rows ? block % columns * c->config.signal_rows < c->results->image.shape[1]
                                                : block % columns == 0))
            release_block(me, c, block);
    }
}

int run_combine(struct rank *me, const struct step *s)
{
    const struct handle_plan *h = plan_of(me, s);
    struct combine c = {EPX_COMBINE_INPUTS_INIT, EPX_COMBINE_OUTPUTS_INIT, EPX_COMBINE_CONFIG_INIT, NULL, NULL, NULL};

    if (move_handle(me, s->handle) || give_results(me, s, &c) || expect_sums(me, s, &c))
        return -1;
    if (is_low(h) && is_major(h) && give_weights(me, s, &c))
        return -1;
    if (s->weights && give_back_weights(me, s, &c))
        return -1;
    c.config.send_only = s->staged;
    c.config.direction = s->backward ? EPX_BACKWARD : EPX_FORWARD;
    c.config.sum = s->sum;
    c.config.logfmt = s->f.logfmt;
    c.config.nvfp4 = s->f.nvfp4;
    if (s->signals && give_signals(me, &c, s))
        return -1;
    if (chance(&me->d, 25) && refuse_combine(me, s, &c))
        return -1;
    if (expect_status(me, s->busy ? EPX_ERR_BUSY : EPX_OK,
                      epx_combine(me->h[s->handle].handle, &c.in, &c.out, &c.config, stream_of(me, s)), "epx_combine"))
        return -1;
    if (s->signals)
        release_rows(me, &c);
    if (!c.wrapped)
        return 0;
    TRY(epx_stream_sync(me->group[h->group], stream_of(me, s)));
    return tensor_unwrap(me, c.wrapped);
}
