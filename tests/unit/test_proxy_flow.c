/* SPDX-License-Identifier: Apache-2.0 */
/* Windows and limits; threads that sleep and wake. */
#include "proxy_fixture.h"

#include <sys/eventfd.h>
#include <unistd.h>

/* ---- Windows ------------------------------------------------------------------------------------------------ */

static void a_peer_that_takes_nothing_does_not_hold_up_the_others(void **state)
{
    struct proxy_fixture *s = open_refusing(state);
    int i;

    for (i = 0; i < 500; i++) {
        push(s, 0, 2, 0, 0, (uint64_t)i * 32, 16);
        push(s, 0, 3, 0, 0, (uint64_t)i * 32, 16);
    }
    steps(s, 400);
    assert_int_equal(counter_at(s, 2, 0, 0), 0);
    assert_int_equal(counter_at(s, 3, 0, 0), 500);
    s->chaos.refuse[2] = 0;
    steps(s, 400);
    assert_int_equal(counter_at(s, 2, 0, 0), 500);
    expect_nothing_wrong(s);
}

static void when_a_peer_s_queue_is_full_the_ring_waits_and_nothing_is_lost(void **state)
{
    struct proxy_fixture *s = open_refusing(state);
    int i;

    for (i = 0; i < 3000; i++)
        push(s, 0, 2, 0, 0, (uint64_t)(i % 1000) * 32, 16);
    steps(s, 100);
    assert_int_equal(stats_of(s, 0).commands, 1024);
    s->chaos.refuse[2] = 0;
    steps(s, 2000);
    assert_int_equal(counter_at(s, 2, 0, 0), 3000);
}

static void messages_in_flight_keep_to_the_limit_of_their_kind(void **state)
{
    static const uint8_t flows[KINDS] = {PROXY_LOW_LATENCY, PROXY_NORMAL, PROXY_LOW_LATENCY, PROXY_LOW_LATENCY};
    struct proxy_fixture *s = *state;

    s->options.flows = flows;
    s->options.limits.max_messages[PROXY_LOW_LATENCY] = 7;
    s->options.limits.max_messages[PROXY_NORMAL] = 2;
    proxy_fixture_open(s, RANKS, 1);
    s->chaos.hold = 1;
    push_apart(s, 2, COUNTER(0, 0), 20, 16);
    push_apart(s, 3, COUNTER(1, 0), 20, 16);
    steps(s, 10);
    assert_int_equal(s->chaos.nflying, 7 + 2);
    s->chaos.hold = 0;
    steps(s, 100);
    assert_int_equal(counter_at(s, 2, COUNTER(0, 0), 0), 20);
    assert_int_equal(counter_at(s, 3, COUNTER(1, 0), 0), 20);
}

/* As UCCL counts: of one GPU and card, whoever the peers are. */
static void messages_in_flight_are_counted_over_all_peers(void **state)
{
    struct proxy_fixture *s = *state;
    int to;

    s->options.limits.max_messages[PROXY_LOW_LATENCY] = 5;
    proxy_fixture_open(s, RANKS, 1);
    s->chaos.hold = 1;
    for (to = 2; to < RANKS; to++)
        push_apart(s, to, COUNTER(0, 0), 20, 16);
    steps(s, 10);
    assert_int_equal(s->chaos.nflying, 5);
    s->chaos.hold = 0;
    steps(s, 300);
    for (to = 2; to < RANKS; to++)
        assert_int_equal(counter_at(s, to, COUNTER(0, 0), 0), 20);
}

static void limits_come_from_the_environment(void **state)
{
    struct proxy_fixture *s = *state;

    setenv("EPX_IB_MAX_INFLIGHT", "9", 1);
    setenv("UCCL_IB_MAX_INFLIGHT_NORMAL", "3", 1);
    setenv("UCCL_IB_MAX_INFLIGHT_BYTES", "2K", 1);
    proxy_fixture_open(s, RANKS, 1);
    unsetenv("EPX_IB_MAX_INFLIGHT");
    unsetenv("UCCL_IB_MAX_INFLIGHT_NORMAL");
    unsetenv("UCCL_IB_MAX_INFLIGHT_BYTES");
    assert_int_equal(s->ranks[0].proxies->limits.max_messages[PROXY_LOW_LATENCY], 9);
    assert_int_equal(s->ranks[0].proxies->limits.max_messages[PROXY_NORMAL], 3);
    assert_int_equal(s->ranks[0].proxies->limits.max_bytes, 2048);
}

static void bytes_in_flight_to_all_peers_keep_to_the_limit(void **state)
{
    struct proxy_fixture *s = *state;
    int to;

    s->options.limits.max_bytes = 1000;
    proxy_fixture_open(s, RANKS, 1);
    for (to = 2; to < RANKS; to++)
        push_apart(s, to, 0, 30, 64);
    push(s, 0, 2, 1, 0, 0, 8192); /* larger than the limit: goes alone */
    steps(s, 300);
    assert_int_equal(s->chaos.most_bytes, 8192);
    assert_true(s->chaos.most_flying <= 1000 / 64);
    assert_int_equal(counter_at(s, 4, 0, 0), 30);
    assert_int_equal(counter_at(s, 2, 1, 0), 1);
}

static struct window *window_of(struct proxy_fixture *s, int rank, int peer)
{
    struct proxy_thread *t = &s->ranks[rank].proxies->threads[0];

    return &t->peers[t->by_rank[peer]].window;
}

static void a_window_that_limits_grows_while_completions_come_in_time(void **state)
{
    struct proxy_fixture *s = open_chaos(state);
    const uint32_t before = window_of(s, 0, 2)->messages_limit;
    int i;

    for (i = 0; i < 20; i++) {
        push_apart(s, 2, 0, 900, 16);
        steps(s, 150);
    }
    assert_true(window_of(s, 0, 2)->messages_limit > before);
    assert_true(window_of(s, 0, 2)->messages_limit <= 1024);
    assert_int_equal(window_of(s, 0, 3)->messages_limit, before);
}

static void a_network_without_room_shrinks_the_window(void **state)
{
    struct proxy_fixture *s = open_chaos(state);
    const uint32_t before = window_of(s, 0, 2)->messages_limit;

    s->chaos.room = 20;
    push_apart(s, 2, 0, 500, 16);
    step(s, 0);
    assert_true(window_of(s, 0, 2)->messages_limit < before);
    assert_true(window_of(s, 0, 2)->messages_limit >= 15);
    steps(s, 1000);
    assert_int_equal(counter_at(s, 2, 0, 0), 500);
}

/* Completions after a microsecond first, then after 10 ms. */
static void late_completions_shrink_the_window(void **state)
{
    struct proxy_fixture *s = open_chaos(state);
    uint64_t before;
    int i;

    for (i = 0; i < 20; i++) {
        push_apart(s, 2, 0, 4, 64);
        steps(s, 4);
    }
    before = window_of(s, 0, 2)->bytes_limit;
    for (i = 0; i < 10; i++) {
        push_apart(s, 2, 0, 4, 64);
        step(s, 0);
        s->chaos.now_ns += 10 * MS;
        steps(s, 4);
    }
    assert_true(window_of(s, 0, 2)->bytes_limit < before);
    assert_int_equal(counter_at(s, 2, 0, 0), 120);
}

/* One completion may stand for several puts; the rest stays in flight. */
static void a_completion_may_stand_for_several_puts(void **state)
{
    struct proxy_fixture *s = open_chaos(state);

    s->chaos.hold = 1;
    push_apart(s, 2, 0, 5, 16);
    step(s, 0);
    assert_int_equal(window_of(s, 0, 2)->messages, 5);
    s->chaos.nflying = 0;
    tell(s->chaos.ends[0][0], (struct net_event){.kind = NET_SENT, .peer = 2, .count = 3, .cookie = (2ull << 48) + 2});
    step(s, 0);
    assert_int_equal(window_of(s, 0, 2)->messages, 2);
    assert_int_equal(window_of(s, 0, 2)->bytes, 32);
    tell(s->chaos.ends[0][0], (struct net_event){.kind = NET_SENT, .peer = 2, .count = 2, .cookie = (2ull << 48) + 4});
    step(s, 0);
    assert_int_equal(window_of(s, 0, 2)->messages, 0);
    assert_int_equal(window_of(s, 0, 2)->bytes, 0);
    expect_nothing_wrong(s);
}

/* ---- Threads ------------------------------------------------------------------------------------------------ */

/* Threads of their own, which may have no core for a while: their deadlines do not pass. */
static void use_threads(struct proxy_fixture *s)
{
    s->options.env = NULL;
    s->options.timeout_ms = 60000;
}

static struct proxy_fixture *open_null(void **state, int threads)
{
    struct proxy_fixture *s = *state;

    use_threads(s);
    s->options.net = &net_null_ops;
    s->options.threads = threads;
    proxy_fixture_open(s, 1, 0);
    return s;
}

static int wait_for(const struct proxy_fixture *s, uint64_t commands)
{
    const uint64_t deadline = clock_ns() + 60000 * MS;

    while (stats_of(s, 0).commands < commands && clock_ns() < deadline)
        usleep(1000);
    return stats_of(s, 0).commands == commands;
}

static int wait_for_sleeps(const struct proxy_fixture *s, uint64_t sleeps)
{
    const uint64_t deadline = clock_ns() + 60000 * MS;

    while (stats_of(s, 0).sleeps < sleeps && clock_ns() < deadline)
        usleep(1000);
    return stats_of(s, 0).sleeps >= sleeps;
}

static void threads_take_what_is_pushed_and_are_quiet_afterwards(void **state)
{
    struct proxy_fixture *s = open_null(state, 2);
    int i;

    for (i = 0; i < 20000; i++)
        push(s, 0, 2 + i % 3, 0, (uint64_t)i % 512 * 64, 0, 32);
    assert_int_equal(proxy_quiet(s->ranks[0].proxies), EPX_OK);
    assert_int_equal(stats_of(s, 0).commands, 20000);
    expect_nothing_wrong(s);
}

/* The most that there can be. The peers use some of them; the others open, sleep and close. */
static void sixty_four_threads_take_what_is_pushed(void **state)
{
    struct proxy_fixture *s = open_null(state, 64);

    for (int i = 0; i < 300; i++)
        push(s, 0, 2 + i % 3, 0, (uint64_t)i * 64, 0, 32);
    assert_int_equal(proxy_quiet(s->ranks[0].proxies), EPX_OK);
    assert_int_equal(stats_of(s, 0).commands, 300);
    expect_nothing_wrong(s);
}

/* The same small launch again and again, each when the proxy has fallen asleep: it wakes for each. */
static void a_sleeping_thread_wakes_for_every_replay(void **state)
{
    struct proxy_fixture *s = open_null(state, 1);
    struct proxy_stats stats;
    int i;

    for (i = 1; i <= 20; i++) {
        assert_true(wait_for_sleeps(s, (uint64_t)i));
        push(s, 0, 2, 0, 0, 0, 16);
        assert_true(wait_for(s, (uint64_t)i));
    }
    stats = stats_of(s, 0);
    assert_true(stats.wakes > 0);
    assert_true(stats.wakes <= stats.sleeps);
}

static uint64_t cpu_ns_of(pthread_t thread)
{
    struct timespec ts;
    clockid_t clock;

    assert_int_equal(pthread_getcpuclockid(thread, &clock), 0);
    clock_gettime(clock, &ts);
    return (uint64_t)ts.tv_sec * 1000 * MS + (uint64_t)ts.tv_nsec;
}

static void expect_idle_costs_nothing(struct proxy_fixture *s, uint64_t most_ns)
{
    const pthread_t thread = s->ranks[0].proxies->threads[0].pthread;
    uint64_t before;

    assert_true(wait_for_sleeps(s, 1));
    before = cpu_ns_of(thread);
    usleep(300000);
    assert_true(cpu_ns_of(thread) - before < most_ns);
}

static void an_idle_thread_uses_no_core(void **state)
{
    expect_idle_costs_nothing(open_null(state, 1), 3 * MS);
}

/* Producers that cannot ring: naps, and the commands are seen all the same. */
static void a_device_that_cannot_ring_is_served_by_short_sleeps(void **state)
{
    struct proxy_fixture *s = *state;
    struct ring_dev deaf;
    struct doorbell nobody = {0};
    struct command c = command_pack(2, 0, 0, 0, 16);

    setenv("EPX_PROXY_SLEEP_US", "100", 1);
    s->options.device_kind = EPX_DEVICE_CUDA;
    s = open_null(state, 1);
    unsetenv("EPX_PROXY_SLEEP_US");
    assert_true(wait_for_sleeps(s, 3));
    deaf = *proxy_ring(s->ranks[0].proxies, 0);
    deaf.bell = &nobody;
    assert_int_equal(ag_push(&s->ranks[0].agent, &deaf, &c, 1), WAIT_OK);
    assert_true(wait_for(s, 1));
    expect_idle_costs_nothing(s, 60 * MS);
}

static void is_idle_and_then_works(struct proxy_fixture *s)
{
    expect_idle_costs_nothing(s, 60 * MS);
    push(s, 0, 2, 0, 0, 0, 16);
    assert_true(wait_for(s, 1));
}

static void an_idle_thread_over_a_network_without_descriptor_sleeps_briefly(void **state)
{
    struct proxy_fixture *s = *state;

    use_threads(s);
    proxy_fixture_open(s, 1, 0);
    assert_true(wait_for_sleeps(s, 3));
    is_idle_and_then_works(s);
}

/* Always readable, and nothing to report. */
static void a_descriptor_with_spurious_wakes_is_left_out(void **state)
{
    struct proxy_fixture *s = *state;
    const int fd = eventfd(1, EFD_CLOEXEC);

    assert_true(fd >= 0);
    s->chaos.descriptor = fd + 1;
    use_threads(s);
    proxy_fixture_open(s, 1, 0);
    assert_true(wait_for_sleeps(s, 20));
    is_idle_and_then_works(s);
    proxy_close(s->ranks[0].proxies);
    s->ranks[0].proxies = NULL;
    close(fd);
}

static void quiet_ends_at_its_deadline_and_names_the_peer(void **state)
{
    const uint64_t limit = clock_ns() + 60000 * MS;
    struct proxy_fixture *s = *state;
    struct proxy_group *proxies;

    s->options.env = NULL;
    s->options.open_ms = 60000;
    s->chaos.hold = 1;
    proxy_fixture_open(s, 1, 0);
    proxies = s->ranks[0].proxies;
    push(s, 0, 3, 0, 0, 0, 16);
    assert_int_equal(proxy_quiet(proxies), EPX_ERR_TIMEOUT);
    /* The thread may have had no core until then: once it has seen that it was asked, it knows the peer. */
    while (__atomic_load_n(&proxies->threads[0].waiting_for, __ATOMIC_RELAXED) != 3 && clock_ns() < limit)
        usleep(1000);
    assert_int_equal(proxy_quiet(proxies), EPX_ERR_TIMEOUT);
    assert_non_null(strstr(epx_last_error(), "rank 3"));
}

static void bad_options_are_refused(void **state)
{
    struct proxy_fixture *s = *state;
    uint8_t remote[RANKS] = {0};
    struct proxy_options good = s->options, o;
    struct proxy_group *proxies;

    good.remote = remote;
    good.counters = s->ranks[0].counters;
    o = good;
    o.rank = RANKS;
    assert_int_equal(proxy_open(&o, &proxies), EPX_ERR_ARGUMENT);
    o = good;
    o.nranks = IMMEDIATE_MAX_RANKS + 1;
    assert_int_equal(proxy_open(&o, &proxies), EPX_ERR_ARGUMENT);
    o = good;
    o.ring_slots = 100;
    o.threads = 2; /* the first one fails, and both are closed */
    assert_int_equal(proxy_open(&o, &proxies), EPX_ERR_ARGUMENT);
    o = good;
    o.threads = 65;
    assert_int_equal(proxy_open(&o, &proxies), EPX_ERR_ARGUMENT);
    o = good;
    o.kinds = 33;
    assert_int_equal(proxy_open(&o, &proxies), EPX_ERR_ARGUMENT);
    o = good;
    o.heap_bytes = COMMAND_MAX_OFFSET + 1;
    assert_int_equal(proxy_open(&o, &proxies), EPX_ERR_UNSUPPORTED);
}

UNIT_TESTS_EACH(setup, teardown, a_peer_that_takes_nothing_does_not_hold_up_the_others,
                when_a_peer_s_queue_is_full_the_ring_waits_and_nothing_is_lost,
                messages_in_flight_keep_to_the_limit_of_their_kind, messages_in_flight_are_counted_over_all_peers,
                limits_come_from_the_environment, bytes_in_flight_to_all_peers_keep_to_the_limit,
                a_window_that_limits_grows_while_completions_come_in_time, a_network_without_room_shrinks_the_window,
                late_completions_shrink_the_window, a_completion_may_stand_for_several_puts,
                threads_take_what_is_pushed_and_are_quiet_afterwards, sixty_four_threads_take_what_is_pushed,
                a_sleeping_thread_wakes_for_every_replay, an_idle_thread_uses_no_core,
                a_device_that_cannot_ring_is_served_by_short_sleeps,
                an_idle_thread_over_a_network_without_descriptor_sleeps_briefly,
                a_descriptor_with_spurious_wakes_is_left_out, quiet_ends_at_its_deadline_and_names_the_peer,
                bad_options_are_refused)
