/* SPDX-License-Identifier: Apache-2.0 */
/* Both modes in one group, several handles and groups at a time, against the oracle. ctest: cost=45 labels=ranks */
#include "tests/unit/prop_cmocka.h"

/* The drawn handle once more in each place, with other seeds. */
static void interleaved_handles(struct prop_case *c, struct prop_rng *rng)
{
    int had = c->nhandles;

    c->nhandles = PROP_MAX_HANDLES;
    for (int i = had; i < c->nhandles; i++) {
        c->handle[i] = c->handle[prop_draw(rng, had)];
        c->handle[i].w.seed += (uint64_t)i;
    }
    for (int i = 0; i < c->nhandles; i++)
        c->handle[i].recv_tensor = 0;
}

static void two_groups(struct prop_case *c, struct prop_rng *rng)
{
    interleaved_handles(c, rng);
    c->ngroups = 2;
}

/* Everything in stream order: no host waits between dispatch and combine. */
static void streams_and_events(struct prop_case *c, struct prop_rng *rng)
{
    for (int i = 0; i < c->nhandles; i++) {
        c->handle[i].async = 1;
        c->handle[i].streams = prop_chance(rng, 50) ? PROP_TWO_STREAMS : PROP_OWN_STREAM;
    }
}

PROP_MAIN("test_prop_mixed", EPX_LOW_LATENCY | EPX_HIGH_THROUGHPUT, {"anything_goes", 150, 8, NULL},
          {"interleaved_handles", 90, 8, interleaved_handles}, {"two_groups", 72, 8, two_groups},
          {"streams_and_events", 72, 8, streams_and_events})
