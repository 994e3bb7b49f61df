/* SPDX-License-Identifier: Apache-2.0 */
/* High throughput against the oracle, in random configurations. ctest: timeout=300 labels=ranks */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

#include "tests/lib/prop.h"

static void run(const char *name, int cases, int max_ranks, void (*change)(struct prop_case *, struct prop_rng *))
{
    assert_int_equal(prop_run("test_prop_ht", name, cases, EPX_HIGH_THROUGHPUT, max_ranks, change), 0);
}

static void anything_goes(void **state)
{
    (void)state;
    run("anything_goes", 240, 8, NULL);
}

static void force_plain(struct prop_case *c, struct prop_rng *rng)
{
    (void)rng;
    c->nhandles = c->ngroups = 1;
    c->bounded = 0;
    c->handle[0].async = c->handle[0].backward = c->handle[0].recv_tensor = 0;
    c->handle[0].streams = PROP_DEFAULT_STREAM;
    c->handle[0].w.dtype = c->handle[0].out_dtype = c->handle[0].result_dtype = EPX_BF16;
    c->handle[0].w.hidden = (c->handle[0].w.hidden + 7) / 8 * 8;
}

static void plain_bf16(void **state)
{
    (void)state;
    run("plain_bf16", 72, 8, force_plain);
}

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
    run("fp8_cast", 90, 8, force_cast);
}

/* One routing, many uses of it, forth and back. */
static void force_cached(struct prop_case *c, struct prop_rng *rng)
{
    (void)rng;
    c->updates = 2;
    c->pairs = 4;
    for (int i = 0; i < c->nhandles; i++)
        c->handle[i].backward = 1;
}

static void cached_routing_and_backward(void **state)
{
    (void)state;
    run("cached_routing_and_backward", 90, 8, force_cached);
}

static void force_zero_copy(struct prop_case *c, struct prop_rng *rng)
{
    c->nhandles = c->ngroups = 1;
    c->handle[0].recv_tensor = prop_chance(rng, 50);
    c->handle[0].in_epx_alloc = c->handle[0].recv_tensor ? prop_draw(rng, 101) : 100;
}

static void zero_copy(void **state)
{
    (void)state;
    run("zero_copy", 90, 8, force_zero_copy);
}

static void force_many_ranks(struct prop_case *c, struct prop_rng *rng)
{
    int ranks = prop_chance(rng, 30) ? 64 : 9 + prop_draw(rng, 56);

    c->nranks = ranks;
    c->nhandles = c->ngroups = 1;
    c->updates = 1;
    c->num_agents = 1 + prop_draw(rng, 2);
    c->handle[0].w.nranks = ranks;
    c->handle[0].w.experts = prop_chance(rng, 50) ? ranks : 1 + prop_draw(rng, 3 * ranks);
    c->handle[0].w.max_tokens = 1 + prop_draw(rng, 8);
}

static void many_ranks(void **state)
{
    (void)state;
    run("many_ranks", 10, 64, force_many_ranks);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plain_bf16), cmocka_unit_test(anything_goes),
        cmocka_unit_test(fp8_cast),   cmocka_unit_test(cached_routing_and_backward),
        cmocka_unit_test(zero_copy),  cmocka_unit_test(many_ranks),
    };

    if (getenv("EPX_TEST_ONLY"))
        cmocka_set_test_filter(getenv("EPX_TEST_ONLY"));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
