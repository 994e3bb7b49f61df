/* SPDX-License-Identifier: Apache-2.0 */
/* Low latency against the oracle, in random configurations. ctest: cost=30 labels=ranks */
#include "tests/unit/prop_cmocka.h"

static void plain_bf16(struct prop_case *c, struct prop_rng *rng)
{
    prop_force_plain(c, rng);
    c->handle[0].staged_dispatch = c->handle[0].staged_combine = 0;
    c->handle[0].logfmt = 0;
}

static void logfmt(struct prop_case *c, struct prop_rng *rng)
{
    for (int i = 0; i < c->nhandles; i++) {
        struct prop_handle *h = &c->handle[i];
        h->result_dtype = EPX_BF16;
        h->w.hidden = (h->w.hidden + 15) / 16 * 16;
        h->w.values = prop_chance(rng, 70) ? WORKLOAD_SMALL : WORKLOAD_EXTREME;
        h->logfmt = 1;
    }
}

static void staged(struct prop_case *c, struct prop_rng *rng)
{
    c->pairs = 3;
    for (int i = 0; i < c->nhandles; i++) {
        c->handle[i].staged_dispatch = prop_chance(rng, 80);
        c->handle[i].staged_combine = prop_chance(rng, 80);
    }
}

static void many_ranks(struct prop_case *c, struct prop_rng *rng)
{
    prop_force_many_ranks(c, rng, 4);
}

PROP_MAIN("test_prop_ll", EPX_LOW_LATENCY, {"plain_bf16", 60, 8, plain_bf16}, {"anything_goes", 180, 8, NULL},
          {"fp8_cast", 72, 8, prop_force_cast}, {"own_fp8", 24, 8, prop_force_own_fp8}, {"logfmt", 48, 8, logfmt},
          {"staged", 90, 8, staged}, {"many_ranks", 8, 64, many_ranks})
