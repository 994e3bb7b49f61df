/* SPDX-License-Identifier: Apache-2.0 */
/* Combines: rows and weights that a rank gives back, and the sums that it expects. */
#include <stdlib.h>
#include <string.h>

#include "steps.h"

static int give_results(struct rank *me, const struct step *s, struct combine *c)
{
    const struct handle_plan *h = plan_of(me, s);
    const struct received *v = &me->h[s->handle].received;
    const int64_t rows = draw_rows(me, s);
    struct tensor *tokens = received_tensor(me, s, "results", s->f.dtype, ROWS, rows, s->f.H);
    char *row = malloc((size_t)s->f.H * 4);

    CHECK(tokens && row);
    for (int i = 0; i < v->n; i++) {
        const struct place *at = &v->place[i];

        model_result(s, me->rank, is_major(h) ? me->rank * me->p->L + at->l : -1, at->src, at->token, at->k, row);
        tensor_give(tokens, row_of(me, h, at, rows), row);
    }
    free(row);
    c->in.tokens = of(tokens);
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
        for (int k = 0; k < K; k++) {
            memcpy((char *)in->t.data + 4 * (at->row * K + k), &weights[k], 4);
            memcpy((char *)in->image.data + 4 * (at->row * K + k), &weights[k], 4);
        }
    }
    for (int t = 0; t < B; t++)
        for (int k = 0; k < h->K; k++)
            expect_float(out, t * h->K + k,
                         routing_idx(&run->routing, me->rank, t)[k] < 0 ? 0 : model_back_weight(s, me->rank, t, k));
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

    CHECK(out && row);
    for (int t = 0; t < B && !s->busy; t++) {
        model_combine(r, s, me->rank, t, row, NULL);
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
    c->out.tokens = of(out);
    return 0;
}

int run_combine(struct rank *me, const struct step *s)
{
    const struct handle_plan *h = plan_of(me, s);
    struct combine c = {EPX_COMBINE_INPUTS_INIT, EPX_COMBINE_OUTPUTS_INIT, EPX_COMBINE_CONFIG_INIT};

    if (give_results(me, s, &c) || expect_sums(me, s, &c))
        return -1;
    if (is_low(h) && is_major(h) && give_weights(me, s, &c))
        return -1;
    if (s->weights && give_back_weights(me, s, &c))
        return -1;
    c.config.send_only = s->staged;
    c.config.direction = s->backward ? EPX_BACKWARD : EPX_FORWARD;
    c.config.sum = s->sum;
    if (chance(&me->d, 25) && refuse_combine(me, s, &c))
        return -1;
    return expect_status(me, s->busy ? EPX_ERR_BUSY : EPX_OK,
                         epx_combine(me->h[s->handle].handle, &c.in, &c.out, &c.config, stream_of(me, s)),
                         "epx_combine");
}
