/* SPDX-License-Identifier: Apache-2.0 */
/* Dispatches: what a rank gives, and every byte that it shall receive. */
#include <stdlib.h>
#include <string.h>

#include "steps.h"

static int give_global_scale(struct rank *me, const struct step *s, struct dispatch *c)
{
    const float scale = model_global_scale(s, me->rank);
    struct tensor *t = packed(me, s, "global_scale", EPX_FP32, 1, 1, 0, 0);

    CHECK(t);
    tensor_give(t, 0, &scale);
    c->in.global_scale = scale > 0 ? of(t) : NULL;
    c->config.nvfp4 = s->f.nvfp4;
    return 0;
}

static int give_tokens(struct rank *me, const struct step *s, struct dispatch *c)
{
    const struct handle_plan *h = plan_of(me, s);
    const int B = me->h[s->handle].routing.tokens[me->rank], fp8 = s->f.dtype == EPX_FP8_E4M3;
    struct tensor *tokens = tensor_new(me, h->group, "inputs.tokens", s->f.dtype, ROWS, 2, B, s->f.H, 0);
    struct tensor *scales =
        fp8 ? tensor_new(me, h->group, "inputs.scales", s->f.scale_dtype, ANY, 2, B, s->f.scales, 0) : NULL;
    struct tensor *weights = s->weights ? packed(me, s, "inputs.topk_weights", EPX_FP32, 2, B, h->K, 0) : NULL;
    char *row = malloc((size_t)(s->f.H + s->f.scales) * 4 + EPX_MAX_TOPK * 4);

    CHECK(tokens && row && (!fp8 || scales) && (!s->weights || weights));
    for (int t = 0; t < B; t++) {
        model_token(s, me->rank, t, row);
        tensor_give(tokens, t, row);
        if (scales) {
            model_scales(s, me->rank, t, row);
            tensor_give(scales, t, row);
        }
        for (int k = 0; weights && k < h->K; k++)
            ((float *)(void *)row)[k] = model_weight(s, me->rank, t, k);
        if (weights)
            tensor_give(weights, t, row);
    }
    free(row);
    c->in = (epx_dispatch_inputs)EPX_DISPATCH_INPUTS_INIT;
    c->in.tokens = of(tokens);
    c->in.scales = of(scales);
    c->in.topk_weights = of(weights);
    return s->f.nvfp4 ? give_global_scale(me, s, c) : 0;
}

/* Of a row that is received. */
static int columns_of(const struct format *f)
{
    return f->nvfp4 ? f->H / 2 : f->H;
}

static int open_outputs(struct rank *me, const struct step *s, struct dispatch *c)
{
    const struct handle_plan *h = plan_of(me, s);
    const int64_t needed = draw_rows(me, s), expected = s->if_expected ? me->h[s->handle].expected : 0;
    const int64_t rows = c->rows = needed > expected ? needed : expected, K = is_major(h) ? 0 : h->K;

    c->out = (epx_dispatch_outputs)EPX_DISPATCH_OUTPUTS_INIT;
    const int scaled = s->f.out == EPX_FP8_E4M3 || s->f.nvfp4, tiles = s->f.nvfp4 == EPX_NVFP4_TILES;

    if (s->recv && chance(&me->d, 70) &&
        recv_buffer_tensor(me, s, EPX_RECV_TOKENS, s->f.out, rows, columns_of(&s->f), &c->wrapped[0]))
        return -1;
    if (s->recv && scaled && chance(&me->d, 70) &&
        recv_buffer_tensor(me, s, EPX_RECV_SCALES, s->f.scale_dtype, rows, s->f.scales, &c->wrapped[1]))
        return -1;
    c->tokens = c->wrapped[0] ? c->wrapped[0]
                              : received_tensor(me, s, "outputs.tokens", s->f.out, ROWS, rows, columns_of(&s->f));
    if (scaled)
        c->scales = c->wrapped[1] ? c->wrapped[1]
                                  : received_tensor(me, s, "outputs.scales", s->f.scale_dtype, tiles ? PACKED : ANY,
                                                    tiles ? (rows + 127) / 128 * 128 : rows, s->f.scales);
    if (s->weights)
        c->weights = received_tensor(me, s, "outputs.topk_weights", EPX_FP32, PACKED, rows, K);
    if (s->idx)
        c->idx = received_tensor(me, s, "outputs.topk_idx", draw_index(me), PACKED, rows, K);
    if (s->src & 1)
        c->src_rank = received_tensor(me, s, "src_rank", EPX_INT32, PACKED, rows, 0);
    if (s->src & 2)
        c->src_token = received_tensor(me, s, "src_token", EPX_INT32, PACKED, rows, 0);
    c->out.tokens = of(c->tokens);
    c->out.scales = of(c->scales);
    c->out.topk_weights = of(c->weights);
    c->out.topk_idx = of(c->idx);
    c->out.src_rank = of(c->src_rank);
    c->out.src_token = of(c->src_token);
    return 0;
}

/* [outer][rows / 128][H / 64][32][4] words, row r of a tile at [r % 32][r / 32]. */
static void expect_tile(const struct step *s, struct dispatch *c, int64_t row, const char *scales)
{
    const int64_t tiles = (c->rows + 127) / 128, r = row % c->rows,
                  first = (row / c->rows * tiles + r / 128) * s->f.scales;

    for (int i = 0; i < s->f.scales; i++)
        memcpy((char *)c->scales->image.data + 4 * ((first + i) * 128 + r % 32 * 4 + r % 128 / 32), scales + 4 * i, 4);
}

static void expect_payload(const struct step *s, struct dispatch *c, const struct place *at, int64_t row)
{
    char *in = malloc((size_t)s->f.H * 4), *scales = malloc((size_t)s->f.scales * 4 + 1);
    uint8_t *codes = malloc((size_t)s->f.H);

    model_token(s, at->src, at->token, in);
    if (s->f.nvfp4) {
        const float scale = model_global_scale(s, at->src);
        model_nvfp4((const uint16_t *)(const void *)in, s->f.H, scale > 0 ? scale : 1, codes, (uint8_t *)scales);
        tensor_expect(c->tokens, row, codes);
    } else if (s->f.out == s->f.dtype) {
        tensor_expect(c->tokens, row, in);
        model_scales(s, at->src, at->token, scales);
    } else {
        model_cast(&s->f, in, codes, scales);
        tensor_expect(c->tokens, row, codes);
    }
    if (s->f.nvfp4 == EPX_NVFP4_TILES)
        expect_tile(s, c, row, scales);
    else if (c->scales)
        tensor_expect(c->scales, row, scales);
    free(in);
    free(scales);
    free(codes);
}
static void expect_entries(struct rank *me, const struct step *s, struct dispatch *c, const struct place *at,
                           int64_t row)
{
    const struct handle_plan *h = plan_of(me, s);
    int32_t ids[EPX_MAX_TOPK];
    float weights[EPX_MAX_TOPK];

    model_topk(&me->h[s->handle].routing, s, me->rank, at, ids, weights);
    for (int k = 0; c->idx && k < h->K; k++)
        tensor_expect_int(c->idx, row * h->K + k, ids[k]);
    if (c->weights && is_major(h))
        expect_float(c->weights, row, model_weight(s, at->src, at->token, at->k));
    for (int k = 0; c->weights && !is_major(h) && k < h->K; k++)
        expect_float(c->weights, row * h->K + k, weights[k]);
    if (c->src_rank)
        tensor_expect_int(c->src_rank, row, at->src);
    if (c->src_token)
        tensor_expect_int(c->src_token, row, at->token);
}

/* Rows that no token has. */
static void expect_rest(struct rank *me, const struct step *s, struct dispatch *c, int64_t row)
{
    const struct handle_plan *h = plan_of(me, s);
    const struct handle_run *run = &me->h[s->handle];
    const int64_t zones = is_major(h) && run->routing.drop[me->rank] ? c->rows : run->received.rows;
    const int padding = !is_low(h) && row < zones;

    for (int k = 0; c->idx && k < h->K; k++)
        tensor_expect_int(c->idx, row * h->K + k, -1);
    for (int k = 0; c->weights && !is_low(h) && k < (is_major(h) ? 1 : h->K); k++)
        expect_float(c->weights, row * (is_major(h) ? 1 : h->K) + k, 0);
    if (!padding)
        return;
    tensor_zero(c->tokens, row);
    if (c->scales)
        tensor_zero(c->scales, row);
    for (int i = 0; i < 2; i++) {
        struct tensor *src = i ? c->src_token : c->src_rank;
        if (src && run->routing.drop[me->rank])
            tensor_ignore(src, row);
        else if (src)
            tensor_expect_int(src, row, -1);
    }
}

static int expect_rows(struct rank *me, const struct step *s, struct dispatch *c)
{
    const struct handle_plan *h = plan_of(me, s);
    const struct received *v = &me->h[s->handle].received;
    const int64_t all = is_low(h) ? c->rows * (is_major(h) ? me->p->L : me->p->R) : c->rows;
    char *taken = calloc((size_t)all + 1, 1);

    CHECK(taken);
    for (int i = 0; i < v->n; i++) {
        const int64_t row = row_of(me, h, &v->place[i], c->rows);

        taken[row] = 1;
        expect_payload(s, c, &v->place[i], row);
        expect_entries(me, s, c, &v->place[i], row);
    }
    for (int64_t row = 0; row < all; row++)
        if (!taken[row])
            expect_rest(me, s, c, row);
    free(taken);
    return 0;
}

static int64_t find_row(const struct received *v, int src, int token, int k)
{
    for (int i = 0; i < v->n; i++)
        if (v->place[i].src == src && v->place[i].token == token && v->place[i].k == k)
            return v->place[i].row;
    return -1;
}

static int expect_map(struct rank *me, const struct step *s, struct dispatch *c)
{
    const struct handle_plan *h = plan_of(me, s);
    const struct routing *r = &me->h[s->handle].routing;
    const int stride = chance(&me->d, 50) ? 0 : 1 + draw(&me->d, 1000), columns = h->K + 2;
    int64_t lines = 0, line = 0;

    for (int src = 0; src < me->p->R; src++)
        lines += sent_to(r, src, me->rank);
    c->map = packed(me, s, "source_map", EPX_INT32, 2, lines + draw(&me->d, 3), columns, 0);
    CHECK(c->map);
    for (int src = 0; src < me->p->R; src++)
        for (int t = 0; t < r->tokens[src]; t++) {
            if (!goes_to(r, src, t, me->rank))
                continue;
            tensor_expect_int(c->map, line * columns, src * (stride ? stride : me->p->M) + t);
            tensor_expect_int(c->map, line * columns + 1, src);
            for (int k = 0; is_major(h) && k < h->K; k++)
                tensor_expect_int(c->map, line * columns + 2 + k, find_row(&me->h[s->handle].received, src, t, k));
            line++;
        }
    c->config.source_stride = stride;
    c->out.source_map = of(c->map);
    return 0;
}

static int check_wrapped(struct rank *me, const struct step *s, struct dispatch *c)
{
    if (!c->wrapped[0] && !c->wrapped[1])
        return 0;
    TRY(epx_stream_sync(me->group[plan_of(me, s)->group], stream_of(me, s)));
    for (int i = 0; i < 2; i++)
        if (c->wrapped[i] && tensor_unwrap(me, c->wrapped[i]))
            return -1;
    return 0;
}

/* How this rank takes part in a dispatch that runs if all ranks get the rows that they expect. */
enum part { ALWAYS, IF_EXPECTED };

static int issue_dispatch(struct rank *me, const struct step *s, enum part part)
{
    const struct handle_plan *h = plan_of(me, s);
    struct handle_run *run = &me->h[s->handle];
    const int nothing = s->busy || (part == IF_EXPECTED && !run->fits);
    struct dispatch c;

    memset(&c, 0, sizeof(c));
    c.config = (epx_dispatch_config)EPX_DISPATCH_CONFIG_INIT;
    if (give_tokens(me, s, &c) || open_outputs(me, s, &c))
        return -1;
    c.in.topk_idx = run->fresh ? of(run->idx) : NULL;
    if (!s->busy)
        run->fresh = 0;
    if (!nothing && (expect_rows(me, s, &c) || (s->map && expect_map(me, s, &c))))
        return -1;
    c.config.send_only = s->staged;
    c.config.round_scale = s->f.round_scale;
    c.config.direction = s->backward ? EPX_BACKWARD : EPX_FORWARD;
    c.config.global_ids = s->global_ids;
    c.config.if_expected = part == IF_EXPECTED;
    if (is_low(h) && !s->busy)
        expect_info(me, s, &c.info);
    if (chance(&me->d, 25) && refuse_dispatch(me, s, &c))
        return -1;
    if (expect_status(me, s->busy ? EPX_ERR_BUSY : EPX_OK,
                      epx_dispatch(run->handle, &c.in, &c.out, is_low(h) && !s->busy ? &c.info : NULL, &c.config,
                                   stream_of(me, s)),
                      "epx_dispatch"))
        return -1;
    return check_wrapped(me, s, &c);
}

/* A rank that expects nothing takes part in the one that runs. */
int run_dispatch(struct rank *me, const struct step *s)
{
    const struct handle_run *run = &me->h[s->handle];

    if (!s->if_expected && move_handle(me, s->handle))
        return -1;
    if (!s->if_expected || !run->expected)
        return issue_dispatch(me, s, ALWAYS);
    if (issue_dispatch(me, s, IF_EXPECTED))
        return -1;
    return run->fits ? 0 : issue_dispatch(me, s, ALWAYS);
}
