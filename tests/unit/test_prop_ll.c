/* SPDX-License-Identifier: Apache-2.0 */
/* Low latency against the oracle, in random configurations. ctest: timeout=300 labels=ranks */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

#include "tests/lib/prop.h"

static void run(const char *name, int cases, int max_ranks, void (*change)(struct prop_case *, struct prop_rng *))
{
    assert_int_equal(prop_run("test_prop_ll", name, cases, EPX_LOW_LATENCY, max_ranks, change), 0);
}

static void anything_goes(void **state)
{
    (void)state;
    run("anything_goes", 180, 8, NULL);
}

static void force_plain(struct prop_case *c, struct prop_rng *rng)
{
    (void)rng;
    c->nhandles = c->ngroups = 1;
    c->handle[0].staged_dispatch = c->handle[0].staged_combine = 0;
    c->handle[0].async = 0;
    c->handle[0].streams = PROP_DEFAULT_STREAM;
    c->handle[0].logfmt = 0;
    c->handle[0].w.dtype = c->handle[0].out_dtype = c->handle[0].result_dtype = EPX_BF16;
    c->handle[0].w.hidden = (c->handle[0].w.hidden + 7) / 8 * 8;
}

static void plain_bf16(void **state)
{
    (void)state;
    run("plain_bf16", 60, 8, force_plain);
}

/* Casts need bf16 in and fp8 out; rows of 16 channels. */
static void force_cast(struct prop_case *c, struct prop_rng *rng)
{
    static const int dtypes[] = {EPX_BF16, EPX_BF16, EPX_FP16, EPX_FP32};

    for (int i = 0; i < c->nhandles; i++) {
        struct prop_handle *h = &c->handle[i];
        h->w.dtype = dtypes[prop_draw(rng, 4)];
        h->out_dtype = EPX_FP8_E4M3;
        h->w.hidden = (h->w.hidden + 15) / 16 * 16;
    }
}

static void fp8_cast(void **state)
{
    (void)state;
    run("fp8_cast", 72, 8, force_cast);
}

static void force_logfmt(struct prop_case *c, struct prop_rng *rng)
{
    for (int i = 0; i < c->nhandles; i++) {
        struct prop_handle *h = &c->handle[i];
        h->result_dtype = EPX_BF16;
        h->w.hidden = (h->w.hidden + 15) / 16 * 16;
        h->w.values = prop_chance(rng, 70) ? WORKLOAD_SMALL : WORKLOAD_WILD;
        h->logfmt = 1;
    }
}

static void logfmt(void **state)
{
    (void)state;
    run("logfmt", 48, 8, force_logfmt);
}

static void force_staged(struct prop_case *c, struct prop_rng *rng)
{
    c->pairs = 3;
    for (int i = 0; i < c->nhandles; i++) {
        c->handle[i].staged_dispatch = prop_chance(rng, 80);
        c->handle[i].staged_combine = prop_chance(rng, 80);
    }
}

static void staged(void **state)
{
    (void)state;
    run("staged", 90, 8, force_staged);
}

static void force_many_ranks(struct prop_case *c, struct prop_rng *rng)
{
    int ranks = prop_chance(rng, 30) ? 64 : 9 + prop_draw(rng, 56);

    c->nranks = ranks;
    c->nhandles = c->ngroups = 1;
    c->updates = 1;
    c->num_agents = 1 + prop_draw(rng, 2);
    for (int i = 0; i < c->nhandles; i++) {
        struct workload *w = &c->handle[i].w;
        w->nranks = ranks;
        w->experts = prop_chance(rng, 50) ? ranks : 1 + prop_draw(rng, 3 * ranks);
        w->max_tokens = 1 + prop_draw(rng, 4);
    }
}

static void many_ranks(void **state)
{
    (void)state;
    run("many_ranks", 8, 64, force_many_ranks);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plain_bf16), cmocka_unit_test(anything_goes), cmocka_unit_test(fp8_cast),
        cmocka_unit_test(logfmt),     cmocka_unit_test(staged),        cmocka_unit_test(many_ranks),
    };

    if (getenv("EPX_TEST_ONLY"))
        cmocka_set_test_filter(getenv("EPX_TEST_ONLY"));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
