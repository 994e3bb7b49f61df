/* SPDX-License-Identifier: Apache-2.0 */
/* The steps of a rank: what it gives, what it calls, and what it expects. */
#include <stdlib.h>
#include <string.h>

#include "rank.h"

static const struct handle_plan *plan_of(const struct rank *me, const struct step *s)
{
    return &me->p->handle[s->handle];
}

static epx_stream stream_of(const struct rank *me, const struct step *s)
{
    return me->stream[plan_of(me, s)->group][s->stream];
}

static struct tensor *packed(struct rank *me, const struct step *s, const char *name, int dtype, int ndim, int64_t d0,
                             int64_t d1, int64_t d2)
{
    return tensor_new(me, plan_of(me, s)->group, name, dtype, PACKED, ndim, d0, d1, d2);
}

static int draw_index(struct rank *me)
{
    return chance(&me->d, 50) ? EPX_INT32 : EPX_INT64;
}

static epx_tensor *of(struct tensor *t)
{
    return t ? &t->t : NULL;
}

/* ---- Update ------------------------------------------------------------------------------------------------------ */

/* A tensor of numbers, half of the time; NULL the other. */
static epx_tensor *expect_ints(struct rank *me, const struct step *s, const char *name, int dtype,
                               const int64_t *values, int64_t n)
{
    struct tensor *t = chance(&me->d, 50) ? packed(me, s, name, dtype, 1, n, 0, 0) : NULL;

    for (int64_t i = 0; t && i < n; i++)
        tensor_expect_int(t, i, values[i]);
    return of(t);
}

static epx_tensor *expect_stats(struct rank *me, const struct step *s, const struct received *v)
{
    struct tensor *t = chance(&me->d, 50) ? packed(me, s, "expert_stats", EPX_INT32, 1, me->p->L, 0, 0) : NULL;

    for (int l = 0; t && l < me->p->L; l++) {
        const int before = draw(&me->d, 1000);
        tensor_give_int(t, l, before);
        tensor_expect_int(t, l, before + v->exact[l]);
    }
    return of(t);
}

static epx_tensor *expect_range(struct rank *me, const struct step *s, const struct received *v)
{
    struct tensor *t = chance(&me->d, 50) ? packed(me, s, "layout_range", EPX_INT64, 2, me->p->L, me->p->R, 0) : NULL;

    for (int i = 0; t && i < me->p->L * me->p->R; i++)
        tensor_expect_int(t, i, v->range[i]);
    return of(t);
}

static epx_tensor *expect_waits(struct rank *me, const struct step *s)
{
    struct tensor *t = chance(&me->d, 30) ? packed(me, s, "wait_ns", EPX_INT64, 1, me->p->R, 0, 0) : NULL;

    for (int r = 0; t && r < me->p->R; r++) {
        tensor_give_int(t, r, 5);
        tensor_ignore(t, r);
    }
    return of(t);
}

static int sent_to(const struct routing *r, int from, int to)
{
    int n = 0;

    for (int t = 0; t < r->tokens[from]; t++)
        n += goes_to(r, from, t, to);
    return n;
}

static epx_tensor *expect_matrix(struct rank *me, const struct step *s, const struct routing *r)
{
    const int R = me->p->R;
    struct tensor *t = chance(&me->d, 50) ? packed(me, s, "rank_matrix", draw_index(me), 2, R, R, 0) : NULL;

    for (int from = 0; t && from < R; from++)
        for (int to = 0; to < R; to++)
            tensor_expect_int(t, from * R + to,
                              node_of(me->p, to) == node_of(me->p, me->rank) ? sent_to(r, from, to) : -1);
    return of(t);
}

/* Tokens of `from`, a rank of another node, that reach this node: all through the rank with the same place in it. */
static int64_t relayed(const struct rank *me, const struct routing *r, int from)
{
    const struct plan *p = me->p;
    int n = 0;

    if (node_of(p, from) == node_of(p, me->rank))
        return 0;
    for (int t = 0; t < r->tokens[from]; t++) {
        int here = 0;
        for (int to = 0; to < p->R; to++)
            here |= node_of(p, to) == node_of(p, me->rank) && goes_to(r, from, t, to);
        n += here;
    }
    return n;
}

static epx_tensor *expect_relays(struct rank *me, const struct step *s, const struct routing *r)
{
    const struct plan *p = me->p;
    int64_t counts[MOST_RANKS] = {0};

    /* Where nodes have different sizes, epx.h does not say which rank relays. */
    if (!p->per_node || p->R % p->per_node)
        return NULL;
    for (int from = 0; from < p->R; from++)
        if (from % p->per_node == me->rank % p->per_node)
            counts[from] = relayed(me, r, from);
    return expect_ints(me, s, "relay_counts", draw_index(me), counts, p->R);
}

static epx_tensor *expect_source_ends(struct rank *me, const struct step *s, const struct routing *r)
{
    const int R = me->p->R;
    int64_t ends[MOST_RANKS] = {0};
    int n = 1 + draw(&me->d, R);

    while (R % n)
        n--;
    for (int src = 0; src < R; src++)
        for (int i = src % n; i < n; i++)
            ends[i] += sent_to(r, src, me->rank);
    return expect_ints(me, s, "source_ends", draw_index(me), ends, n);
}

static void expect_high(struct rank *me, const struct step *s, epx_layout_info *info)
{
    const struct handle_plan *h = plan_of(me, s);
    const struct handle_run *run = &me->h[s->handle];
    const struct received *v = &run->received;
    const int align = h->alignment ? h->alignment : 1, L = me->p->L;
    int64_t ends[MOST_LOCAL], tokens[MOST_RANKS], sum = 0;

    for (int l = 0; l < L; l++) {
        sum += (v->exact[l] + align - 1) / align * align;
        ends[l] = is_major(h) ? v->offsets[l] + v->exact[l] : sum;
    }
    for (int r = 0; r < me->p->R; r++)
        tokens[r] = run->routing.tokens[r];
    if (is_major(h))
        info->expert_offsets = expect_ints(me, s, "expert_offsets", draw_index(me), v->offsets, L);
    info->rank_matrix = expect_matrix(me, s, &run->routing);
    info->rank_tokens = expect_ints(me, s, "rank_tokens", draw_index(me), tokens, me->p->R);
    info->relay_counts = expect_relays(me, s, &run->routing);
    info->expert_rows = expect_ints(me, s, "expert_rows", draw_index(me), v->exact, L);
    info->expert_ends = expect_ints(me, s, "expert_ends", draw_index(me), ends, L);
    info->source_ends = expect_source_ends(me, s, &run->routing);
}

static void expect_info(struct rank *me, const struct step *s, epx_layout_info *info)
{
    const struct handle_plan *h = plan_of(me, s);
    const struct received *v = &me->h[s->handle].received;

    *info = (epx_layout_info)EPX_LAYOUT_INFO_INIT;
    if (!is_low(h) || is_major(h)) {
        info->expert_counts = expect_ints(me, s, "expert_counts", draw_index(me), v->counts, me->p->L);
        info->expert_stats = expect_stats(me, s, v);
    }
    info->rank_counts = expect_ints(me, s, "rank_counts", draw_index(me), v->from, me->p->R);
    info->total = expect_ints(me, s, "total", draw_index(me), &v->total, 1);
    if (is_low(h) && is_major(h))
        info->layout_range = expect_range(me, s, v);
    if (is_low(h))
        info->wait_ns = expect_waits(me, s);
    else
        expect_high(me, s, info);
}

static int check_counts(struct rank *me, const struct step *s)
{
    const struct handle_run *run = &me->h[s->handle];
    int64_t rows = -1, experts[MOST_LOCAL], tokens = -1, named = 0;

    TRY(epx_handle_recv_count(run->handle, &rows, chance(&me->d, 50) ? experts : NULL));
    CHECK(rows == run->received.total);
    TRY(epx_handle_recv_count(run->handle, &rows, experts));
    for (int l = 0; l < me->p->L; l++)
        CHECK(experts[l] == run->received.exact[l]);
    for (int src = 0; src < me->p->R; src++)
        named += sent_to(&run->routing, src, me->rank);
    TRY(epx_handle_recv_tokens(run->handle, &tokens));
    CHECK(tokens == named);
    TRY(epx_handle_recv_poll(run->handle, 1000000));
    return 0;
}

int run_update(struct rank *me, const struct step *s)
{
    const struct handle_plan *h = plan_of(me, s);
    struct handle_run *run = &me->h[s->handle];
    struct tensor *idx;
    epx_layout_info info;

    routing_free(&run->routing);
    received_free(&run->received);
    CHECK(!routing_draw(&run->routing, me->p, h, s->seed));
    CHECK(!received_make(&run->received, &run->routing, me->rank));
    run->idx = idx = packed(me, s, "topk_idx", draw_index(me), 2, run->routing.tokens[me->rank], h->K, 0);
    CHECK(idx);
    for (int t = 0; t < run->routing.tokens[me->rank]; t++)
        for (int k = 0; k < h->K; k++)
            tensor_give_int(idx, t * h->K + k, routing_idx(&run->routing, me->rank, t)[k]);
    run->fresh = is_low(h) && chance(&me->d, 50);
    if (is_low(h)) {
        if (!run->fresh)
            TRY(epx_handle_update(run->handle, of(idx), NULL, stream_of(me, s)));
        return 0;
    }
    expect_info(me, s, &info);
    TRY(epx_handle_update(run->handle, of(idx), chance(&me->d, 20) && !me->tensors->next ? NULL : &info,
                          stream_of(me, s)));
    return s->counts ? check_counts(me, s) : 0;
}

/* ---- Dispatch ---------------------------------------------------------------------------------------------------- */

/* A tensor of what is received, `last` elements a row (0: one number). */
static struct tensor *received_tensor(struct rank *me, const struct step *s, const char *name, int dtype,
                                      enum strides strides, int64_t rows, int64_t last)
{
    const struct handle_plan *h = plan_of(me, s);
    const int group = h->group;

    if (!is_low(h))
        return tensor_new(me, group, name, dtype, strides, last ? 2 : 1, rows, last, 0);
    return tensor_new(me, group, name, dtype, strides, last ? 3 : 2, is_major(h) ? me->p->L : me->p->R, rows, last);
}

/* Rows of each zone of a receive tensor: what is needed, and some more. */
static int64_t draw_rows(struct rank *me, const struct step *s)
{
    const struct handle_plan *h = plan_of(me, s);
    const int64_t needed = !is_low(h)    ? me->h[s->handle].received.total
                           : is_major(h) ? (int64_t)me->p->R * me->p->M
                                         : me->p->M;

    return needed + (chance(&me->d, 50) ? 0 : draw(&me->d, 9));
}

/* The row of a place, in a tensor whose zones have `rows` rows. */
static int64_t row_of(const struct rank *me, const struct handle_plan *h, const struct place *at, int64_t rows)
{
    const int64_t zone = is_major(h) ? (int64_t)me->p->R * me->p->M : me->p->M;

    return is_low(h) ? at->row / zone * rows + at->row % zone : at->row;
}

struct dispatch {
    epx_dispatch_inputs in;
    epx_dispatch_outputs out;
    epx_dispatch_config config;
    epx_layout_info info;
    struct tensor *tokens, *scales, *weights, *idx, *src_rank, *src_token, *map;
    int64_t rows;
};

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
    return 0;
}

static int open_outputs(struct rank *me, const struct step *s, struct dispatch *c)
{
    const struct handle_plan *h = plan_of(me, s);
    const int64_t rows = c->rows = draw_rows(me, s), K = is_major(h) ? 0 : h->K;

    c->out = (epx_dispatch_outputs)EPX_DISPATCH_OUTPUTS_INIT;
    c->tokens = received_tensor(me, s, "outputs.tokens", s->f.out, ROWS, rows, s->f.H);
    if (s->f.out == EPX_FP8_E4M3)
        c->scales = received_tensor(me, s, "outputs.scales", s->f.scale_dtype, ANY, rows, s->f.scales);
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

static void expect_payload(const struct step *s, struct dispatch *c, const struct place *at, int64_t row)
{
    char *in = malloc((size_t)s->f.H * 4), *scales = malloc((size_t)s->f.scales * 4 + 1);
    uint8_t *codes = malloc((size_t)s->f.H);

    model_token(s, at->src, at->token, in);
    if (s->f.out == s->f.dtype) {
        tensor_expect(c->tokens, row, in);
        model_scales(s, at->src, at->token, scales);
    } else {
        model_cast(&s->f, in, codes, scales);
        tensor_expect(c->tokens, row, codes);
    }
    if (c->scales)
        tensor_expect(c->scales, row, scales);
    free(in);
    free(scales);
    free(codes);
}

static void expect_float(struct tensor *t, int64_t i, float value)
{
    memcpy((char *)t->image.data + 4 * i, &value, 4);
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
    const int padding = !is_low(h) && row < me->h[s->handle].received.total;

    for (int k = 0; c->idx && k < h->K; k++)
        tensor_expect_int(c->idx, row * h->K + k, -1);
    for (int k = 0; c->weights && !is_low(h) && k < (is_major(h) ? 1 : h->K); k++)
        expect_float(c->weights, row * (is_major(h) ? 1 : h->K) + k, 0);
    if (!padding)
        return;
    tensor_zero(c->tokens, row);
    if (c->scales)
        tensor_zero(c->scales, row);
    if (c->src_rank)
        tensor_ignore(c->src_rank, row);
    if (c->src_token)
        tensor_ignore(c->src_token, row);
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

/* ---- Refusals ---------------------------------------------------------------------------------------------------- */

static int expect_status(const struct rank *me, epx_status expected, epx_status got, const char *what)
{
    if (got == expected)
        return 0;
    return wrong(me, __FILE__, __LINE__, "%s: expected status %d, got %d: %s", what, (int)expected, (int)got,
                 got == EPX_OK ? "" : epx_last_error());
}

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
    static const epx_layout_info nothing = EPX_LAYOUT_INFO_INIT;
    const int low = is_low(plan_of(me, s));

    switch (number) {
    case 0:
        if (low)
            out->shape[1] = (is_major(plan_of(me, s)) ? (int64_t)me->p->R * me->p->M : me->p->M) - 1;
        else
            *given = &nothing;
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

/* A call with one mistake, before the right one: it is refused, and nothing has happened. */
static int refuse_dispatch(struct rank *me, const struct step *s, const struct dispatch *right)
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

int run_dispatch(struct rank *me, const struct step *s)
{
    const struct handle_plan *h = plan_of(me, s);
    struct handle_run *run = &me->h[s->handle];
    struct dispatch c;

    memset(&c, 0, sizeof(c));
    c.config = (epx_dispatch_config)EPX_DISPATCH_CONFIG_INIT;
    if (give_tokens(me, s, &c) || open_outputs(me, s, &c))
        return -1;
    c.in.topk_idx = run->fresh ? of(run->idx) : NULL;
    if (!s->busy) {
        run->fresh = 0;
        if (expect_rows(me, s, &c) || (s->map && expect_map(me, s, &c)))
            return -1;
    }
    c.config.send_only = s->staged;
    c.config.round_scale = s->f.round_scale;
    c.config.direction = s->backward ? EPX_BACKWARD : EPX_FORWARD;
    c.config.global_ids = s->global_ids;
    if (is_low(h) && !s->busy)
        expect_info(me, s, &c.info);
    if (chance(&me->d, 25) && refuse_dispatch(me, s, &c))
        return -1;
    return expect_status(
        me, s->busy ? EPX_ERR_BUSY : EPX_OK,
        epx_dispatch(run->handle, &c.in, &c.out, is_low(h) && !s->busy ? &c.info : NULL, &c.config, stream_of(me, s)),
        "epx_dispatch");
}

/* ---- Combine ----------------------------------------------------------------------------------------------------- */

struct combine {
    epx_combine_inputs in;
    epx_combine_outputs out;
    epx_combine_config config;
};

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

static int refuse_combine(struct rank *me, const struct step *s, const struct combine *right)
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
