/* SPDX-License-Identifier: Apache-2.0 */
/* The tables that are generated from kernel/signals.h, against their definitions counted one by one. */
#include <string.h>

#include "group/signals.h"
#include "tests/lib/unit.h"

static void every_phase_has_a_text_of_its_own(void **state)
{
    (void)state;
    for (int p = 0; p < PHASE_COUNT; p++) {
        assert_non_null(phase_name(p));
        for (int q = 0; q < p; q++)
            assert_string_not_equal(phase_name(p), phase_name(q));
    }
    assert_string_equal(phase_name(PHASE_LL_DATA), "ll dispatch: wait for data"); /* as epx.h says */
    assert_string_equal(phase_name(-1), "unknown");
    assert_string_equal(phase_name(PHASE_COUNT), "unknown");
}

static void waits_of_low_latency_alone_may_mask(void **state)
{
    (void)state;
    for (int p = 0; p < PHASE_COUNT; p++)
        if (p != PHASE_LC_SIGNAL) /* comes from the caller's own computation, not from a rank */
            assert_int_equal(MASKABLE_PHASES >> p & 1, strncmp(phase_name(p), "ll ", 3) == 0);
}

static void high_throughput_rows_alone_are_bulk(void **state)
{
    (void)state;
    for (int k = 0; k < SIG_COUNT; k++)
        assert_int_equal(signal_flows[k], k == SIG_HD_ROWS || k == SIG_HC_ROWS ? PROXY_NORMAL : PROXY_LOW_LATENCY);
}

static void readers_and_the_own_relay_owe_signals(void **state)
{
    static const int node_of[] = {0, 0, 1, 1};
    struct epx_group group = {.rank = 1, .nranks = 4};

    (void)state;
    assert_int_equal(node_map_make(&group.map, 4, node_of), EPX_OK);
    for (int k = 0; k < SIG_COUNT; k++) {
        const int all = k == SIG_LL_DONE || k == SIG_LC_DONE;

        assert_int_equal(signal_is_owed(&group, k, 2), all);
        assert_int_equal(signal_is_owed(&group, k, 3), all || k == SIG_HD_FREE); /* rank 3 relays for rank 1 */
    }
    node_map_free(&group.map);
}

/* How many of the epochs 1..epoch belong to a slot. */
static uint64_t count_laps(uint64_t epoch, int slots, int slot)
{
    uint64_t n = 0;

    for (uint64_t e = 1; e <= epoch; e++)
        n += (e - 1) % (uint64_t)slots == (uint64_t)slot;
    return n;
}

static uint64_t count_parity(uint64_t epoch, int slot)
{
    uint64_t n = 0;

    for (uint64_t e = 1; e <= epoch; e++)
        n += e % 2 == (uint64_t)slot;
    return n;
}

static void values_after_recovery_are_those_of_completed_operations(void **state)
{
    struct epx_group group = {.nranks = 2};

    (void)state;
    for (int W = 1; W <= 4; W++)
        for (uint64_t n = 0; n < 12; n++)
            for (int slot = 0; slot < 8; slot++) {
                const uint64_t epochs[OP_COUNT] = {n, n + 1, n + 2, n + 3, n + 4}, first = slot == 0;

                group.set.inflight = W;
                assert_int_equal(signal_after(&group, epochs, SIG_LL_DONE, slot), count_laps(n, W, slot));
                assert_int_equal(counter_after(&group, epochs, SIG_LC_DATA, slot), count_laps(n + 1, W, slot));
                assert_int_equal(signal_after(&group, epochs, SIG_HN_DATA, slot), first * (n + 2));
                assert_int_equal(counter_after(&group, epochs, SIG_HN_DATA, slot), count_parity(n + 2, slot));
                assert_int_equal(signal_after(&group, epochs, SIG_HN_TABLE, slot), first * (n + 2));
                assert_int_equal(counter_after(&group, epochs, SIG_HN_DONE, slot), first * (n + 2));
                assert_int_equal(counter_after(&group, epochs, SIG_HD_FREE, slot), 0);
                assert_int_equal(signal_after(&group, epochs, SIG_HC_DONE, slot), first * (n + 4));
                assert_int_equal(signal_after(&group, epochs, SIG_LL_ROWS, slot), 0);
                assert_int_equal(counter_after(&group, epochs, SIG_HD_ROWS, slot), 0);
                assert_int_equal(counter_after(&group, epochs, SIG_ABORT, slot), 0);
            }
}

UNIT_TESTS(every_phase_has_a_text_of_its_own, waits_of_low_latency_alone_may_mask, high_throughput_rows_alone_are_bulk,
           readers_and_the_own_relay_owe_signals, values_after_recovery_are_those_of_completed_operations)
