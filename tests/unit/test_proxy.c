/* SPDX-License-Identifier: Apache-2.0 */
/* Proxies deliver and count every command once, whatever the order, and merge what touches. */
#include "proxy_fixture.h"

/* ---- Delivery ----------------------------------------------------------------------------------------------- */

/* All ranks send to all others at random; bytes and counts must be what was asked, whatever the order. */
static void deliver_everything(struct proxy_fixture *s, int commands)
{
    static uint8_t wanted[RANKS][HEAP];
    static uint64_t counts[RANKS][KINDS * SLOTS * RANKS];
    uint32_t used[RANKS] = {0}; /* of the target heap: its upper half, in units, never written twice */
    int i, r;

    memset(wanted, 0, sizeof(wanted));
    memset(counts, 0, sizeof(counts));
    for (r = 0; r < RANKS; r++)
        for (i = 0; i < HEAP / 2; i++)
            wanted[r][i] = (uint8_t)(s->ranks[r].heap[i] = (char)draw(&s->chaos, 256));
    for (i = 0; i < commands; i++) {
        const int from = (int)draw(&s->chaos, RANKS), to = (int)draw(&s->chaos, RANKS);
        const uint32_t kind = draw(&s->chaos, KINDS), slot = draw(&s->chaos, SLOTS);
        uint32_t units = draw(&s->chaos, 4), source, target;

        if (!is_remote(from, to))
            continue;
        if (used[to] + units > HEAP / 32)
            units = 0;
        source = draw(&s->chaos, HEAP / 32 - 4) * 16;
        target = HEAP / 2 + used[to] * 16;
        used[to] += units;
        push(s, from, to, COUNTER(kind, slot), source, target, units * 16);
        memcpy(&wanted[to][target], &wanted[from][source], units * 16);
        counts[to][(kind * SLOTS + slot) * RANKS + (uint32_t)from]++;
        if (draw(&s->chaos, 4) == 0)
            step(s, (int)draw(&s->chaos, RANKS));
    }
    steps(s, 2000);
    for (r = 0; r < RANKS; r++) {
        uint64_t sent = 0;

        for (i = 0; i < RANKS; i++)
            sent += s->ranks[r].sent[i];
        assert_int_equal(sent, stats_of(s, r).commands);
        assert_memory_equal(s->ranks[r].heap, wanted[r], HEAP);
        assert_memory_equal(s->ranks[r].counters, counts[r], sizeof(counts[r]));
        assert_int_equal(proxy_quiet(s->ranks[r].proxies), EPX_OK);
    }
    assert_int_equal(s->chaos.nflying, 0);
    expect_nothing_wrong(s);
}

static void every_command_lands_and_is_counted_in_any_order(void **state)
{
    deliver_everything(open_chaos(state), 6000);
}

static void with_two_threads_a_pair_keeps_to_one(void **state)
{
    ((struct proxy_fixture *)*state)->options.threads = 2;
    deliver_everything(open_chaos(state), 6000);
}

static void through_the_wrap_of_the_ring_s_counters(void **state)
{
    ((struct proxy_fixture *)*state)->options.ring_start = UINT64_MAX - 500;
    deliver_everything(open_chaos(state), 6000);
}

static void with_a_network_that_often_has_no_room(void **state)
{
    ((struct proxy_fixture *)*state)->chaos.room = 3;
    deliver_everything(open_chaos(state), 6000);
}

/* ---- Merging ------------------------------------------------------------------------------------------------ */

static void contiguous_neighbours_become_one_put(void **state)
{
    struct proxy_fixture *s = open_chaos(state);
    int i;

    for (i = 0; i < 10; i++)
        push(s, 0, 2, COUNTER(1, 1), (uint64_t)i * 64, 4096 + (uint64_t)i * 64, 64);
    steps(s, 50);
    assert_int_equal(s->chaos.puts, 1);
    assert_int_equal(s->chaos.last.bytes, 640);
    assert_int_equal(immediate_count(s->chaos.last.immediate), 10);
    assert_int_equal(counter_at(s, 2, COUNTER(1, 1), 0), 10);
    assert_int_equal(stats_of(s, 0).commands, 10);
    assert_int_equal(stats_of(s, 0).puts, 1);
    assert_int_equal(stats_of(s, 0).bytes, 640);
    assert_int_equal(stats_of(s, 2).arrivals, 1);
}

static void interleaved_destinations_merge_all_the_same(void **state)
{
    struct proxy_fixture *s = open_chaos(state);
    int i, to;

    for (i = 0; i < 10; i++)
        for (to = 2; to < 5; to++)
            push(s, 0, to, 0, (uint64_t)i * 16, (uint64_t)i * 16, 16);
    step(s, 0);
    assert_int_equal(s->chaos.puts, 3);
    assert_int_equal(s->chaos.flushes, 1); /* one doorbell for all */
}

static void neighbours_in_any_order_merge_and_close_gaps(void **state)
{
    static const int order[] = {3, 1, 5, 4, 0, 2};
    struct proxy_fixture *s = open_chaos(state);
    size_t i;

    for (i = 0; i < 6; i++)
        push(s, 0, 2, 0, (uint64_t)order[i] * 16, 1024 + (uint64_t)order[i] * 16, 16);
    step(s, 0);
    assert_int_equal(s->chaos.puts, 1);
    assert_int_equal(s->chaos.last.source, 0);
    assert_int_equal(s->chaos.last.target, 1024);
    assert_int_equal(s->chaos.last.bytes, 96);
}

static void what_does_not_touch_on_both_sides_is_not_merged(void **state)
{
    struct proxy_fixture *s = open_chaos(state);

    push(s, 0, 2, 0, 0, 0, 16);
    push(s, 0, 2, 0, 16, 32, 16);  /* contiguous at the source alone */
    push(s, 0, 2, 0, 64, 48, 16);  /* at the target alone */
    push(s, 0, 2, 1, 80, 64, 16);  /* on both sides, but another counter */
    push(s, 0, 2, 0, 128, 80, 16); /* nowhere */
    step(s, 0);
    assert_int_equal(s->chaos.puts, 5);
}

static void a_put_carries_no_more_than_its_immediate_can_count(void **state)
{
    struct proxy_fixture *s = open_chaos(state);
    int i;

    for (i = 0; i < IMMEDIATE_MAX_COUNT; i++)
        push(s, 0, 2, 0, (uint64_t)i * 16, (uint64_t)i * 16, 16);
    step(s, 0);
    assert_int_equal(s->chaos.puts, 1);
    assert_int_equal(immediate_count(s->chaos.last.immediate), 128);
    for (i = 0; i <= IMMEDIATE_MAX_COUNT; i++)
        push(s, 0, 2, 0, (uint64_t)i * 16, (uint64_t)i * 16, 16);
    steps(s, 50);
    assert_int_equal(s->chaos.puts, 3);
    assert_int_equal(s->chaos.last.bytes, 16);
    assert_int_equal(counter_at(s, 2, 0, 0), 257);
}

/* Nothing lands: the heap is not as large as the proxies believe. */
static void the_largest_heap_has_the_largest_command_at_its_end(void **state)
{
    const uint32_t bytes = COMMAND_MAX_UNITS * COMMAND_UNIT;
    const uint64_t last = COMMAND_MAX_OFFSET - bytes, far = (uint64_t)16 << 32;
    struct proxy_fixture *s = *state;

    s->options.heap_bytes = COMMAND_MAX_OFFSET;
    s->chaos.hold = 1;
    open_chaos(state);
    push(s, 0, 2, 0, last, last, bytes);
    step(s, 0);
    assert_int_equal(s->chaos.puts, 1);
    assert_int_equal(s->chaos.last.source, last);
    assert_int_equal(s->chaos.last.target, last);
    assert_int_equal(s->chaos.last.bytes, bytes);
    push(s, 0, 3, 0, 0, 0, 16);
    push(s, 0, 3, 0, far + 16, far + 16, 16); /* the same numbers of units in their lower 32 bits */
    step(s, 0);
    assert_int_equal(s->chaos.puts, 3);
    expect_nothing_wrong(s);
    push(s, 0, 2, 0, last + 16, 0, bytes);
    step(s, 0);
    assert_int_equal(s->ranks[0].errors, 1);
    assert_int_equal(s->chaos.puts, 3);
    s->chaos.nflying = 0;
}

static void a_put_grows_to_the_set_size_at_most(void **state)
{
    struct proxy_fixture *s = *state;
    int i;

    setenv("EPX_PROXY_MERGE_BYTES", "256", 1);
    proxy_fixture_open(s, RANKS, 1);
    unsetenv("EPX_PROXY_MERGE_BYTES");
    for (i = 0; i < 8; i++)
        push(s, 0, 2, 0, (uint64_t)i * 64, (uint64_t)i * 64, 64);
    push(s, 0, 2, 0, 8192, 8192, 1024); /* larger as it is: goes as it is */
    step(s, 0);
    assert_int_equal(s->chaos.puts, 3);
    assert_int_equal(s->chaos.last.bytes, 1024);
}

static void signals_ride_on_what_is_there(void **state)
{
    struct proxy_fixture *s = open_chaos(state);
    int i;

    for (i = 0; i < 5; i++)
        push(s, 0, 2, COUNTER(2, 0), 0, 0, 0);
    push(s, 0, 2, COUNTER(3, 0), 64, 64, 32);
    push(s, 0, 2, COUNTER(3, 0), 0, 0, 0);
    steps(s, 50);
    assert_int_equal(s->chaos.puts, 2);
    assert_int_equal(stats_of(s, 0).signals, 1);
    assert_int_equal(counter_at(s, 2, COUNTER(2, 0), 0), 5);
    assert_int_equal(counter_at(s, 2, COUNTER(3, 0), 0), 2);
    expect_nothing_wrong(s);
}

static void what_waits_goes_on_merging(void **state)
{
    struct proxy_fixture *s = open_refusing(state);
    int i;

    for (i = 0; i < 20; i++) {
        push(s, 0, 2, 0, (uint64_t)i * 16, (uint64_t)i * 16, 16);
        step(s, 0);
    }
    s->chaos.refuse[2] = 0;
    steps(s, 50);
    assert_int_equal(s->chaos.puts, 1);
    assert_int_equal(counter_at(s, 2, 0, 0), 20);
    assert_int_equal(stats_of(s, 0).window_waits, 1);
}

static struct {
    int times, rank;
    uint32_t alarm;
    const void *context;
} alarm_received;

static void on_alarm(void *context, int rank, uint32_t alarm)
{
    alarm_received.times++;
    alarm_received.rank = rank;
    alarm_received.alarm = alarm;
    alarm_received.context = context;
}

static uint32_t on_ask(void *context, int rank)
{
    (void)context;
    return ALARM(rank - 1, ALARM_REPLY + 5);
}

/* As put_abort() of kernel/put.h. */
static void sound(struct proxy_fixture *s, int from, uint64_t alarm)
{
    for (int i = 0; i < proxy_ring_count(s->ranks[from].proxies); i++)
        *proxy_ring(s->ranks[from].proxies, i)->alarm = alarm;
}

static void open_with_alarms(struct proxy_fixture *s, int threads)
{
    memset(&alarm_received, 0, sizeof(alarm_received));
    s->options.alarm_kind = KINDS;
    s->options.on_alarm = on_alarm;
    s->options.on_ask = on_ask;
    proxy_fixture_open(s, RANKS, threads);
}

static int peers_of(int rank)
{
    int n = 0;

    for (int r = 0; r < RANKS; r++)
        n += r != rank && is_remote(rank, r);
    return n;
}

static void an_alarm_reaches_all_and_counts_nothing(void **state)
{
    struct proxy_fixture *s = *state;
    int i, r;

    open_with_alarms(s, 1);
    sound(s, 2, ALARM_SET | ALARM_ALL | ALARM(3, 47)); /* of an abort, the last cause */
    steps(s, 50);
    assert_int_equal(alarm_received.times, peers_of(2));
    assert_int_equal(alarm_received.rank, 2);
    assert_int_equal(alarm_received.alarm, ALARM(3, 47));
    for (r = 0; r < RANKS; r++) {
        assert_int_equal(s->ranks[2].sent[r], 0); /* no kernel has pushed it */
        for (i = 0; i < KINDS * SLOTS * RANKS; i++)
            assert_int_equal(s->ranks[r].counters[i], 0);
    }
    expect_nothing_wrong(s);
    push(s, 2, 4, COUNTER(KINDS, 0), 0, 0, 0); /* not through the ring */
    steps(s, 50);
    assert_int_equal(stats_of(s, 2).refused, 1);
}

/* What a rank has heard from another goes to the relays alone, also when the ring is blocked. */
static void an_alarm_that_is_passed_on_goes_to_the_relays(void **state)
{
    static const uint8_t relays[RANKS] = {[4] = 1};
    struct proxy_fixture *s = *state;

    s->options.relays = relays;
    open_with_alarms(s, 2);
    sound(s, 2, ALARM_SET | ALARM(0, 1));
    steps(s, 50);
    assert_int_equal(alarm_received.times, 1);
    assert_ptr_equal(alarm_received.context, &s->ranks[4]);
    expect_nothing_wrong(s);
}

static void an_alarm_about_no_rank_is_refused(void **state)
{
    struct proxy_fixture *s = *state;

    open_with_alarms(s, 1);
    sound(s, 2, ALARM_SET | ALARM_ALL | ALARM(RANKS, 0));
    steps(s, 50);
    assert_int_equal(alarm_received.times, 0);
    assert_int_equal(stats_of(s, 4).refused, 1);
}

static void a_question_is_answered_by_the_proxy(void **state)
{
    struct proxy_fixture *s = *state;

    open_with_alarms(s, 1);
    *proxy_ring(s->ranks[2].proxies, 0)->ask = WAITS_WORD(1, 4);
    steps(s, 50);
    assert_int_equal(alarm_received.times, 1);
    assert_int_equal(alarm_received.rank, 4);
    assert_int_equal(alarm_received.alarm, ALARM(1, ALARM_REPLY + 5));
    assert_ptr_equal(alarm_received.context, &s->ranks[2]);
    assert_int_equal(s->ranks[2].sent[4], 0);
    assert_int_equal(s->ranks[4].sent[2], 0);
    *proxy_ring(s->ranks[2].proxies, 0)->ask = WAITS_WORD(2, RANKS); /* nobody */
    steps(s, 50);
    assert_int_equal(alarm_received.times, 1);
    expect_nothing_wrong(s);
}

static void a_host_s_alarm_reaches_every_peer_once(void **state)
{
    struct proxy_fixture *s = *state;

    open_with_alarms(s, 2);
    proxy_alarm(s->ranks[2].proxies, ALARM(1, 3), 1);
    proxy_alarm(s->ranks[2].proxies, ALARM(0, 4), 1); /* the first one counts */
    steps(s, 50);
    assert_int_equal(alarm_received.times, peers_of(2));
    assert_int_equal(alarm_received.alarm, ALARM(1, 3));
    expect_nothing_wrong(s);
}

UNIT_TESTS_EACH(setup, teardown, every_command_lands_and_is_counted_in_any_order, with_two_threads_a_pair_keeps_to_one,
                through_the_wrap_of_the_ring_s_counters, with_a_network_that_often_has_no_room,
                contiguous_neighbours_become_one_put, interleaved_destinations_merge_all_the_same,
                neighbours_in_any_order_merge_and_close_gaps, what_does_not_touch_on_both_sides_is_not_merged,
                a_put_carries_no_more_than_its_immediate_can_count, the_largest_heap_has_the_largest_command_at_its_end,
                a_put_grows_to_the_set_size_at_most, signals_ride_on_what_is_there, what_waits_goes_on_merging,
                an_alarm_reaches_all_and_counts_nothing, an_alarm_that_is_passed_on_goes_to_the_relays,
                an_alarm_about_no_rank_is_refused, a_question_is_answered_by_the_proxy,
                a_host_s_alarm_reaches_every_peer_once)
