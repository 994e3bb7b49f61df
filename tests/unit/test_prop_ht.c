/* SPDX-License-Identifier: Apache-2.0 */
/* High throughput against the oracle, in random configurations. ctest: cost=35 labels=ranks */
#include "tests/unit/prop_cmocka.h"

static void plain_bf16(struct prop_case *c, struct prop_rng *rng)
{
    prop_force_plain(c, rng);
    c->bounded = 0;
    c->handle[0].backward = c->handle[0].recv_tensor = 0;
}

/* One routing, many uses of it, forth and back. */
static void cached_routing_and_backward(struct prop_case *c, struct prop_rng *rng)
{
    (void)rng;
    c->updates = 2;
    c->pairs = 4;
    for (int i = 0; i < c->nhandles; i++)
        c->handle[i].backward = 1;
}

static void zero_copy(struct prop_case *c, struct prop_rng *rng)
{
    c->nhandles = c->ngroups = 1;
    c->handle[0].recv_tensor = prop_chance(rng, 50);
    c->handle[0].in_epx_alloc = c->handle[0].recv_tensor ? prop_draw(rng, 101) : 100;
}

static void rows_taken_where_they_are(struct prop_case *c, struct prop_rng *rng)
{
    c->enable_mask &= prop_chance(rng, 20);
    if (prop_chance(rng, 30))
        prop_force_own_fp8(c, rng);
    prop_force_in_reach(c, rng);
}

static void many_ranks(struct prop_case *c, struct prop_rng *rng)
{
    prop_force_many_ranks(c, rng, 8);
}

PROP_MAIN("test_prop_ht", EPX_HIGH_THROUGHPUT, {"plain_bf16", 72, 8, plain_bf16}, {"anything_goes", 240, 8, NULL},
          {"fp8_cast", 90, 8, prop_force_cast}, {"own_fp8", 24, 8, prop_force_own_fp8},
          {"cached_routing_and_backward", 90, 8, cached_routing_and_backward}, {"zero_copy", 90, 8, zero_copy},
          {"rows_taken_where_they_are", 90, 8, rows_taken_where_they_are}, {"many_ranks", 10, 64, many_ranks})
