/* SPDX-License-Identifier: Apache-2.0 */
/* Both modes in one group, several handles and groups at a time, against the oracle. ctest: timeout=300 labels=ranks */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

#include "tests/lib/prop.h"

enum { BOTH = EPX_LOW_LATENCY | EPX_HIGH_THROUGHPUT };

static void run(const char *name, int cases, int max_ranks, void (*change)(struct prop_case *, struct prop_rng *))
{
    assert_int_equal(prop_run("test_prop_mixed", name, cases, BOTH, max_ranks, change), 0);
}

static void anything_goes(void **state)
{
    (void)state;
    run("anything_goes", 150, 8, NULL);
}

/* The drawn handle once more in each place, with other seeds. */
static void force_handles(struct prop_case *c, struct prop_rng *rng)
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

static void interleaved_handles(void **state)
{
    (void)state;
    run("interleaved_handles", 90, 8, force_handles);
}

static void force_two_groups(struct prop_case *c, struct prop_rng *rng)
{
    force_handles(c, rng);
    c->ngroups = 2;
}

static void two_groups(void **state)
{
    (void)state;
    run("two_groups", 72, 8, force_two_groups);
}

/* Everything in stream order: no host waits between dispatch and combine. */
static void force_async(struct prop_case *c, struct prop_rng *rng)
{
    for (int i = 0; i < c->nhandles; i++) {
        c->handle[i].async = 1;
        c->handle[i].streams = prop_chance(rng, 50) ? PROP_TWO_STREAMS : PROP_OWN_STREAM;
    }
}

static void streams_and_events(void **state)
{
    (void)state;
    run("streams_and_events", 72, 8, force_async);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(anything_goes),
        cmocka_unit_test(interleaved_handles),
        cmocka_unit_test(two_groups),
        cmocka_unit_test(streams_and_events),
    };

    if (getenv("EPX_TEST_ONLY"))
        cmocka_set_test_filter(getenv("EPX_TEST_ONLY"));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
