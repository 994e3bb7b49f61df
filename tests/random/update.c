/* SPDX-License-Identifier: Apache-2.0 */
/* Updates, and the counts that ranks get. */
#include "steps.h"

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

    /* Where nodes have different sizes, and where a rank is masked, epx.h does not say which rank relays. */
    if (!p->per_node || p->R % p->per_node || has_masked(me, plan_of(me, s)->group))
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
    int64_t ends[MOST_LOCAL], tokens[MOST_RANKS], sum = 0, zone = 0;

    for (int l = 0; l < L; l++) {
        sum += (v->exact[l] + align - 1) / align * align;
        ends[l] = is_major(h) ? zone + v->exact[l] : sum;
        zone += (v->exact[l] + align - 1) / align * align;
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

void expect_info(struct rank *me, const struct step *s, epx_layout_info *info)
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
    CHECK(rows == run->received.rows);
    TRY(epx_handle_recv_count(run->handle, &rows, experts));
    for (int l = 0; l < me->p->L; l++)
        CHECK(experts[l] == run->received.exact[l]);
    for (int src = 0; src < me->p->R; src++)
        named += sent_to(&run->routing, src, me->rank);
    TRY(epx_handle_recv_tokens(run->handle, &tokens));
    CHECK(tokens == named);
    TRY(epx_handle_recv_poll(run->handle, 1000000));
    if (s->expect) {
        int fits = -1;
        TRY(epx_handle_recv_fits(run->handle, &fits));
        CHECK(fits == run->fits);
    }
    return 0;
}

/* What a rank expects: nothing, as many rows as come, more, or (with s->expect of 2) fewer. */
static int64_t expected_by(const struct step *s, int rank, int64_t rows)
{
    const int what = (int)(key(s->seed, 'e', rank, 0, 0, 0) % 20);
    const int64_t n = what < 3 ? 0 : what < 10 ? rows : rows + what;

    return n > 1 && s->expect == 2 && what >= 10 && what < 14 ? 1 + what % (rows > 0 ? rows : 1) : n;
}

static int give_expected(struct rank *me, const struct step *s, epx_layout_info *info)
{
    struct handle_run *run = &me->h[s->handle];

    run->fits = node_of(me->p, me->p->R - 1) == 0;
    for (int rank = 0; rank < me->p->R; rank++) {
        struct received v;
        int64_t n;

        CHECK(!received_make(&v, &run->routing, rank));
        n = expected_by(s, rank, v.rows);
        run->fits &= n == 0 || v.rows <= n;
        if (rank == me->rank)
            run->expected = n;
        received_free(&v);
    }
    info->expected_rows = (uint32_t)run->expected;
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
    CHECK(!routing_draw(&run->routing, me->p, h, s->seed, me->active[h->group]));
    CHECK(!received_make(&run->received, &run->routing, me->rank));
    run->idx = idx = packed(me, s, "topk_idx", draw_index(me), 2, run->routing.tokens[me->rank], h->K, 0);
    CHECK(idx);
    for (int t = 0; t < run->routing.tokens[me->rank]; t++)
        for (int k = 0; k < h->K; k++)
            tensor_give_int(idx, t * h->K + k, run->routing.asked[(me->rank * MOST_TOKENS + t) * h->K + k]);
    if (chance(&me->d, 20) && check_routes(me, s))
        return -1;
    run->fresh = is_low(h) && chance(&me->d, 50);
    if (is_low(h)) {
        if (!run->fresh)
            TRY(epx_handle_update(run->handle, of(idx), NULL, stream_of(me, s)));
        return 0;
    }
    expect_info(me, s, &info);
    info.drop_rows = (uint32_t)run->routing.given[me->rank];
    if (s->expect && give_expected(me, s, &info))
        return -1;
    TRY(epx_handle_update(run->handle, of(idx), &info, stream_of(me, s)));
    return s->counts ? check_counts(me, s) : 0;
}
