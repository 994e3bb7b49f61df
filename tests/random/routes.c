/* SPDX-License-Identifier: Apache-2.0 */
/* Where tokens would go: epx_dispatch_layout(). */
#include "steps.h"

static struct tensor *counts_tensor(struct rank *me, const struct step *s, const char *name, int n)
{
    struct tensor *t = chance(&me->d, 70) ? packed(me, s, name, EPX_INT32, 1, n, 0, 0) : NULL;

    for (int i = 0; t && i < n; i++)
        tensor_expect_int(t, i, 0);
    return t;
}

static void count(struct tensor *t, int64_t i)
{
    if (t)
        tensor_expect_int(t, i, ((const int32_t *)t->image.data)[i] + 1);
}

/* Ranks, or nodes, that the entries of a token name: each counts once. */
static void count_places(struct rank *me, const int32_t *asked, int K, int nodes, struct tensor *t, unsigned char *in)
{
    for (int place = 0; place < (nodes ? node_of(me->p, me->p->R - 1) + 1 : me->p->R); place++) {
        int named = 0;

        for (int k = 0; k < K; k++) {
            const int owner = asked[k] / me->p->L;
            named |= asked[k] >= 0 && (nodes ? node_of(me->p, owner) : owner) == place;
        }
        if (named)
            count(t, place);
        if (in)
            in[place] = (unsigned char)named;
    }
}

int check_routes(struct rank *me, const struct step *s)
{
    const struct handle_plan *h = plan_of(me, s);
    const struct handle_run *run = &me->h[s->handle];
    const int B = run->routing.tokens[me->rank];
    struct tensor *ranks = counts_tensor(me, s, "tokens_per_rank", me->p->R);
    struct tensor *nodes = counts_tensor(me, s, "tokens_per_node", node_of(me->p, me->p->R - 1) + 1);
    struct tensor *experts = counts_tensor(me, s, "tokens_per_expert", me->p->E);
    struct tensor *in = chance(&me->d, 70) ? packed(me, s, "token_in_rank", EPX_UINT8, 2, B, me->p->R, 0) : NULL;
    epx_dispatch_layout_outputs out = EPX_DISPATCH_LAYOUT_OUTPUTS_INIT;

    for (int t = 0; t < B; t++) {
        const int32_t *asked = run->routing.asked + (me->rank * MOST_TOKENS + t) * h->K;
        unsigned char row[MOST_RANKS];

        count_places(me, asked, h->K, 0, ranks, row);
        count_places(me, asked, h->K, 1, nodes, NULL);
        for (int k = 0; k < h->K; k++)
            if (asked[k] >= 0)
                count(experts, asked[k]);
        if (in)
            tensor_expect(in, t, row);
    }
    out.tokens_per_rank = of(ranks);
    out.tokens_per_node = of(nodes);
    out.tokens_per_expert = of(experts);
    out.token_in_rank = of(in);
    TRY(epx_dispatch_layout(me->group[h->group], of(run->idx), &out, stream_of(me, s)));
    return 0;
}
