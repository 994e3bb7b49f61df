/* SPDX-License-Identifier: Apache-2.0 */
/* ctest: labels=leaks */
/* What proxies do not believe, and what they do when a peer or the network fails: refuse, say so, live on. */
#include "proxy_fixture.h"

/* ---- What is not believed ----------------------------------------------------------------------------------- */

/* Refused and counted, reported once however often it comes, and the next good one goes through. */
static void expect_refused(struct proxy_fixture *s, struct command c, const char *text)
{
    struct rank *rank = &s->ranks[0];
    const uint64_t refused = stats_of(s, 0).refused, before = counter_at(s, 2, 0, 0);
    const int errors = rank->errors, puts = s->chaos.puts;

    push_raw(s, 0, 0, c);
    push_raw(s, 0, 0, c);
    steps(s, 5);
    assert_int_equal(stats_of(s, 0).refused, refused + 2);
    assert_int_equal(rank->errors, errors + 1);
    assert_int_equal(s->chaos.puts, puts);
    assert_non_null(strstr(rank->text, text));
    push(s, 0, 2, 0, 0, 0, 16);
    steps(s, 20);
    assert_int_equal(counter_at(s, 2, 0, 0), before + 1);
}

static void a_command_of_another_version_is_refused(void **state)
{
    struct command c = command_pack(2, 0, 0, 0, 16);

    c.a ^= (uint64_t)1 << 1;
    expect_refused(open_chaos(state), c, "version");
}

static void an_unknown_operation_is_refused(void **state)
{
    struct command c = command_pack(2, 0, 0, 0, 16);

    c.a ^= (uint64_t)8 << 3;
    expect_refused(open_chaos(state), c, "operation");
}

static void a_rank_beyond_the_last_is_refused(void **state)
{
    expect_refused(open_chaos(state), command_pack(RANKS, 0, 0, 0, 16), "rank");
}

static void a_rank_of_the_own_node_is_refused(void **state)
{
    expect_refused(open_chaos(state), command_pack(1, 0, 0, 0, 16), "rank");
}

static void the_own_rank_is_refused(void **state)
{
    expect_refused(open_chaos(state), command_pack(0, 0, 0, 0, 16), "rank");
}

static void a_rank_of_another_ring_is_refused(void **state)
{
    struct proxy_fixture *s = *state;

    s->options.threads = 2;
    proxy_fixture_open(s, RANKS, 1);
    expect_refused(s, command_pack(3, 0, 0, 0, 16), "does not belong to this ring"); /* 0 + 3 is for ring 1 */
}

/* Rank 2 is connected on both rings, but this counter has one writer there: the thread of ring 0. */
static void a_counter_of_another_ring_is_refused(void **state)
{
    struct proxy_fixture *s = *state;

    s->options.threads = 2;
    s->spread = 1;
    proxy_fixture_open(s, RANKS, 1);
    push_raw(s, 0, 1, command_pack(2, 0, 0, 0, 16));
    steps(s, 5);
    assert_int_equal(stats_of(s, 0).refused, 1);
    assert_non_null(strstr(s->ranks[0].text, "another ring"));
    assert_int_equal(counter_at(s, 2, 0, 0), 0);
    first_arrives(s, 16);
}

static void a_source_outside_the_heap_is_refused(void **state)
{
    struct proxy_fixture *s = open_chaos(state);

    expect_refused(s, command_pack(2, 0, HEAP - 16, 0, 32), "reads beyond");
    assert_int_equal(s->ranks[0].peer, 2);
    assert_int_equal(s->ranks[0].expected, HEAP / 16);
}

static void a_target_outside_the_peer_s_heap_is_refused(void **state)
{
    expect_refused(open_chaos(state), command_pack(2, 0, 0, HEAP - 16, 32), "writes beyond");
}

static void the_farthest_offsets_are_refused(void **state)
{
    expect_refused(open_chaos(state),
                   command_pack(2, 0, COMMAND_MAX_OFFSET - 16, COMMAND_MAX_OFFSET - 16, COMMAND_MAX_UNITS * 16),
                   "beyond");
}

static void an_unknown_counter_is_refused(void **state)
{
    expect_refused(open_chaos(state), command_pack(2, COUNTER(KINDS, 0), 0, 0, 16), "counter");
}

static void an_unknown_slot_is_refused(void **state)
{
    expect_refused(open_chaos(state), command_pack(2, COUNTER(0, SLOTS), 0, 0, 16), "counter");
}

static void the_last_bytes_of_the_heaps_can_be_used(void **state)
{
    struct proxy_fixture *s = open_chaos(state);

    push(s, 0, 2, 0, HEAP - 16, HEAP - 16, 16);
    push(s, 0, 2, 0, HEAP, HEAP, 0);
    steps(s, 50);
    assert_int_equal(counter_at(s, 2, 0, 0), 2);
    expect_nothing_wrong(s);
}

static void expect_immediate_refused(struct proxy_fixture *s, int peer, uint32_t immediate)
{
    static const uint64_t zeros[KINDS * SLOTS * RANKS];
    struct chaos_net *end = s->chaos.ends[0][0];

    tell(end, (struct net_event){.kind = NET_ARRIVED, .peer = peer, .immediate = immediate});
    tell(end, (struct net_event){.kind = NET_ARRIVED, .peer = peer, .immediate = immediate});
    step(s, 0);
    assert_int_equal(stats_of(s, 0).refused, 2);
    assert_int_equal(s->ranks[0].errors, 1);
    assert_int_equal(s->ranks[0].status, EPX_ERR_MISMATCH);
    assert_memory_equal(s->ranks[0].counters, zeros, sizeof(zeros));
    push(s, 2, 0, 0, 0, 0, 16);
    steps(s, 20);
    assert_int_equal(counter_at(s, 0, 0, 2), 1);
}

static void an_immediate_of_another_version_is_refused(void **state)
{
    expect_immediate_refused(open_chaos(state), -1, immediate_pack(2, 0, 1) ^ (uint32_t)1 << 31);
}

static void an_immediate_from_no_rank_is_refused(void **state)
{
    expect_immediate_refused(open_chaos(state), -1, immediate_pack(RANKS, 0, 1));
}

static void an_immediate_from_the_own_node_is_refused(void **state)
{
    expect_immediate_refused(open_chaos(state), -1, immediate_pack(1, 0, 1));
}

static void an_immediate_for_no_counter_is_refused(void **state)
{
    expect_immediate_refused(open_chaos(state), -1, immediate_pack(2, COUNTER(KINDS, 0), 1));
}

static void an_immediate_in_another_s_name_is_refused(void **state)
{
    struct proxy_fixture *s = open_chaos(state);

    expect_immediate_refused(s, 3, immediate_pack(2, 0, 1));
    assert_int_equal(s->ranks[0].peer, 3);
}

static void a_completion_of_nothing_is_reported_and_changes_nothing(void **state)
{
    struct proxy_fixture *s = open_chaos(state);
    struct chaos_net *end = s->chaos.ends[0][0];

    tell(end, (struct net_event){.kind = NET_SENT, .peer = 2, .count = 1, .cookie = (uint64_t)2 << 48});
    tell(end, (struct net_event){.kind = NET_SENT, .peer = 1, .count = 1, .cookie = (uint64_t)1 << 48 | 7});
    step(s, 0);
    assert_int_equal(s->ranks[0].errors, 1);
    first_arrives(s, 16);
    assert_int_equal(proxy_quiet(s->ranks[0].proxies), EPX_OK);
}

/* ---- What fails --------------------------------------------------------------------------------------------- */

static void expect_lost(struct proxy_fixture *s, int peer)
{
    push(s, 0, peer, 0, 0, 0, 16);
    push(s, 0, 4, 0, 0, 0, 16);
    steps(s, 20);
    assert_int_equal(s->ranks[0].errors, 1);
    assert_int_equal(s->ranks[0].status, EPX_ERR_PEER);
    assert_int_equal(s->ranks[0].peer, peer);
    assert_true(stats_of(s, 0).dropped > 0);
    assert_int_equal(counter_at(s, 4, 0, 0), 1);
    assert_int_equal(proxy_quiet(s->ranks[0].proxies), EPX_OK); /* what a lost peer owes is not waited for */
}

static void a_put_that_fails_loses_the_peer_and_no_other(void **state)
{
    struct proxy_fixture *s = open_chaos(state);

    s->chaos.refuse[2] = ECONNRESET;
    push(s, 0, 2, 0, 0, 0, 16);
    step(s, 0);
    expect_lost(s, 2);
}

static void a_peer_that_the_network_loses_is_named(void **state)
{
    struct proxy_fixture *s = open_chaos(state);

    s->chaos.hold = 1;
    push(s, 0, 3, 0, 0, 0, 16);
    step(s, 0);
    assert_int_equal(proxy_quiet(s->ranks[0].proxies), EPX_ERR_NOT_READY);
    tell(s->chaos.ends[0][0], (struct net_event){.kind = NET_FAILED, .peer = 3, .error = ETIMEDOUT});
    step(s, 0);
    s->chaos.hold = 0;
    expect_lost(s, 3);
    assert_non_null(strstr(s->ranks[0].text, "rank 3"));
}

/* Who waits to use the memory again must not wait for a peer that is no more. */
static void what_a_lost_peer_never_completes_counts_as_sent(void **state)
{
    struct proxy_fixture *s = open_chaos(state);

    s->chaos.hold = 1;
    push_apart(s, 3, 0, 5, 16); /* posted */
    step(s, 0);
    s->chaos.refuse[3] = EAGAIN;
    push_apart(s, 3, 0, 6, 16); /* pending */
    step(s, 0);
    assert_int_equal(s->ranks[0].sent[3], 0);
    tell(s->chaos.ends[0][0], (struct net_event){.kind = NET_FAILED, .peer = 3, .error = ETIMEDOUT});
    step(s, 0);
    assert_int_equal(s->ranks[0].sent[3], 11);
    push_apart(s, 3, 0, 7, 16); /* too late */
    step(s, 0);
    assert_int_equal(s->ranks[0].sent[3], 18);
}

static int without_none(void *context, int rank)
{
    (void)context;
    (void)rank;
    return 0;
}

/* The network may still read what was posted: who waits to use the memory again waits for the end of the endpoint. */
static void expect_not_sent(struct proxy_fixture *s)
{
    const struct ring_dev *ring = proxy_ring(s->ranks[0].proxies, 0);

    s->chaos.hold = 1;
    push_apart(s, 3, 0, 5, 16);
    step(s, 0);
    tell(s->chaos.ends[0][0], (struct net_event){.kind = NET_FAILED, .peer = 3, .error = ETIMEDOUT, .reads = 1});
    step(s, 0);
    assert_int_equal(s->ranks[0].errors, 1);
    assert_int_equal(s->ranks[0].peer, 3);
    assert_int_equal(s->ranks[0].sent[3], 0);
    *ring->stop = 1;
    step(s, 0);
    assert_int_equal(*ring->stopped, 0);
    s->chaos.now_ns += (uint64_t)s->options.timeout_ms * MS / 4;
    step(s, 0);
    assert_int_equal(*ring->stopped, 1);
    assert_null(s->chaos.ends[0][0]);
    assert_int_equal(s->ranks[0].sent[3], 5);
}

static void what_may_still_be_read_does_not_count_as_sent(void **state)
{
    expect_not_sent(open_chaos(state));
}

static void nor_does_it_where_others_go_on(void **state)
{
    struct proxy_fixture *s = *state;

    s->options.goes_on_without = without_none;
    expect_not_sent(open_chaos(state));
}

/* The limits are those of what moves. */
static void what_may_still_be_read_keeps_nobody_waiting(void **state)
{
    struct proxy_fixture *s = *state;

    s->options.limits.max_bytes = 64;
    open_chaos(state);
    s->chaos.hold = 1;
    push_apart(s, 3, 0, 4, 16);
    step(s, 0);
    push(s, 0, 2, 0, 0, 0, 16);
    step(s, 0);
    assert_int_equal(s->chaos.puts, 4);
    tell(s->chaos.ends[0][0], (struct net_event){.kind = NET_FAILED, .peer = 3, .error = ETIMEDOUT, .reads = 1});
    step(s, 0);
    assert_int_equal(s->chaos.puts, 5);
}

static void an_endpoint_that_breaks_is_reported_and_the_rings_go_on_being_emptied(void **state)
{
    struct proxy_fixture *s = open_chaos(state);
    int i;

    s->chaos.poll_error = ENODEV;
    step(s, 0);
    assert_int_equal(s->ranks[0].errors, 1 + 3); /* the endpoint, then each peer */
    for (i = 0; i < 5000; i++) {
        push(s, 0, 2, 0, 0, 0, 16);
        step(s, 0);
    }
    assert_int_equal(stats_of(s, 0).dropped, 5000);
    assert_int_equal(s->chaos.puts, 0);
}

/* The port of a card is down: the card sends what was posted when it is up again, until the endpoint is closed. */
static void what_an_endpoint_that_breaks_has_posted_is_read_until_it_is_closed(void **state)
{
    struct proxy_fixture *s = open_chaos(state);
    const struct ring_dev *ring = proxy_ring(s->ranks[0].proxies, 0);

    s->chaos.hold = 1;
    push_apart(s, 3, 0, 5, 16);
    step(s, 0);
    s->chaos.poll_error = ENETDOWN;
    step(s, 0);
    assert_int_equal(s->ranks[0].errors, 1 + 3);
    assert_int_equal(s->ranks[0].sent[3], 0);
    *ring->stop = 1;
    step(s, 0);
    assert_int_equal(*ring->stopped, 1);
    assert_null(s->chaos.ends[0][0]);
    assert_int_equal(s->ranks[0].sent[3], 5);
}

static void an_endpoint_says_why_it_breaks(void **state)
{
    struct proxy_fixture *s = open_chaos(state);

    s->chaos.poll_error = EPROTO;
    s->chaos.ends[0][0]->base.why = "somebody else writes here";
    step(s, 0);
    assert_non_null(strstr(s->ranks[0].first, "failed: somebody else writes here"));
}

static void a_doorbell_that_must_wait_is_rung_later(void **state)
{
    struct proxy_fixture *s = open_chaos(state);

    s->chaos.flush_error = EAGAIN;
    push(s, 0, 2, 0, 0, 0, 16);
    step(s, 0);
    assert_int_equal(s->chaos.flushes, 1);
    step(s, 0);
    assert_int_equal(s->chaos.flushes, 2);
    step(s, 0);
    assert_int_equal(s->chaos.flushes, 2);
    assert_int_equal(s->ranks[0].errors, 0);
}

/* ---- What cannot be missed ----------------------------------------------------------------------------------- */

static int given_up; /* by rank 0: how often */

static void on_given_up(void *context, int peer, int error, const char *text)
{
    assert_int_equal(peer, 2);
    assert_int_equal(error, ETIMEDOUT);
    assert_non_null(strstr(text, "lost rank 2"));
    given_up += ((struct rank *)context)->proxies != NULL;
}

/* Rank 0 has a put to rank 2 in flight, and one that is pending, of these kinds; then it loses rank 2. */
static struct proxy_fixture *lose_with(void **state, uint32_t posted, uint32_t pending, int error, int grace_ms)
{
    static const uint8_t missable[KINDS] = {0, 1};
    struct proxy_fixture *s = *state;

    given_up = 0;
    s->options.on_given_up = on_given_up;
    s->options.missable = missable;
    s->options.grace_ms = grace_ms;
    s->chaos.hold = 1;
    proxy_fixture_open(s, RANKS, 1);
    push(s, 0, 2, COUNTER(posted, 0), 0, 0, 16);
    step(s, 0);
    s->chaos.refuse[2] = EAGAIN;
    push(s, 0, 2, COUNTER(pending, 0), 64, 64, 16);
    step(s, 0);
    tell(s->chaos.ends[0][0], (struct net_event){.kind = NET_FAILED, .peer = 2, .error = error});
    step(s, 0);
    return s;
}

static void a_put_in_flight_that_cannot_be_missed_is_reported(void **state)
{
    struct proxy_fixture *s = lose_with(state, 0, 1, ETIMEDOUT, 0);

    assert_int_equal(given_up, 1);
    push(s, 0, 2, COUNTER(0, 0), 0, 0, 16);
    step(s, 0);
    assert_int_equal(given_up, 1); /* once */
    assert_int_equal(s->ranks[0].errors, 0);
    assert_int_equal(s->ranks[0].sent[2], 3);
}

static void so_is_a_pending_one(void **state)
{
    struct proxy_fixture *s = lose_with(state, 1, 0, ETIMEDOUT, 0);

    assert_int_equal(given_up, 1);
    assert_int_equal(s->ranks[0].errors, 0);
}

static void so_is_one_that_comes_later(void **state)
{
    struct proxy_fixture *s = lose_with(state, 1, 1, ETIMEDOUT, 0);

    assert_int_equal(given_up, 0);
    assert_int_equal(s->ranks[0].errors, 1);
    push(s, 0, 2, COUNTER(1, 0), 0, 0, 16);
    step(s, 0);
    assert_int_equal(given_up, 0);
    push(s, 0, 2, COUNTER(0, 0), 0, 0, 16);
    step(s, 0);
    assert_int_equal(given_up, 1);
    assert_int_equal(s->ranks[0].errors, 1);
}

/* Who has failed itself, or was told so meanwhile, says nothing else. */
static void all_of_that_waits_for_the_grace_period(void **state)
{
    struct proxy_fixture *s = lose_with(state, 1, 1, ETIMEDOUT, 100);

    push(s, 0, 2, COUNTER(0, 0), 0, 0, 16);
    step(s, 0);
    assert_int_equal(given_up + s->ranks[0].errors, 0);
    s->chaos.now_ns += 100 * MS;
    step(s, 0);
    assert_int_equal(given_up, 1);
    assert_int_equal(s->ranks[0].errors, 0);
}

/* One that finds its connections reset may have slept: it must not end the operations of those that gave it up. */
static void a_peer_that_was_not_given_up_is_only_lost(void **state)
{
    struct proxy_fixture *s = lose_with(state, 0, 0, ECONNRESET, 0);

    push(s, 0, 2, COUNTER(0, 0), 0, 0, 16);
    step(s, 0);
    assert_int_equal(given_up, 0);
    assert_int_equal(s->ranks[0].errors, 1);
}

/* ---- Who leaves --------------------------------------------------------------------------------------------- */

static int goodbyes;

static void on_goodbye(void *context, int rank, uint32_t alarm)
{
    (void)context;
    if (ALARM_CAUSE(alarm) != ALARM_GOODBYE)
        fail_msg("rank %d sends alarm %u", rank, alarm);
    goodbyes++;
}

static struct proxy_fixture *open_polite(void **state, int grace_ms)
{
    struct proxy_fixture *s = *state;

    s->options.on_alarm = on_goodbye;
    goodbyes = 0;
    s->options.alarm_kind = KINDS;
    s->options.grace_ms = grace_ms;
    proxy_fixture_open(s, RANKS, 1);
    return s;
}

/* Whom it has sent nothing gets no goodbye. */
static void leave(struct proxy_fixture *s, int rank)
{
    for (int peer = 0; peer < RANKS; peer++)
        if (is_remote(rank, peer))
            push(s, rank, peer, 0, 0, 0, 16);
    steps(s, 5);
    for (int i = 0; i < 20 && proxy_leave(s->ranks[rank].proxies) != EPX_OK; i++)
        steps(s, 1);
    assert_int_equal(proxy_quiet(s->ranks[rank].proxies), EPX_OK);
    steps(s, 5);
}

static int has_left(const struct proxy_fixture *s, int rank, int peer)
{
    const struct proxy_thread *t = &s->ranks[rank].proxies->threads[0];

    return t->peers[t->by_rank[peer]].left;
}

static void lose(struct proxy_fixture *s, int peer)
{
    tell(s->chaos.ends[0][0], (struct net_event){.kind = NET_FAILED, .peer = peer, .error = ECONNRESET});
    step(s, 0);
    s->chaos.now_ns += 1000 * MS;
    step(s, 0);
}

static void a_peer_that_has_said_goodbye_is_not_lost(void **state)
{
    struct proxy_fixture *s = open_polite(state, 0);

    s->chaos.refuse[2] = EAGAIN;
    push(s, 0, 2, 0, 0, 0, 16); /* pending */
    step(s, 0);
    leave(s, 2);
    push_apart(s, 2, 0, 5, 16);
    step(s, 0);
    assert_int_equal(s->ranks[0].sent[2], 6); /* nobody waits for what it does not need */
    assert_int_equal(stats_of(s, 0).dropped, 6);
    lose(s, 2);
    push(s, 0, 2, 0, 0, 0, 16);
    push(s, 0, 4, 0, 0, 0, 16);
    steps(s, 20);
    assert_int_equal(counter_at(s, 4, 0, 0), 1); /* others are reached as ever */
    for (int r = 0; r < RANKS; r++)
        assert_int_equal(s->ranks[r].errors, 0);
    lose(s, 3); /* it has not */
    assert_int_equal(s->ranks[0].errors, 1);
    assert_int_equal(s->ranks[0].peer, 3);
}

/* Where nodes have different sizes, a relay sends nothing to some whose rows it takes. */
static void who_only_receives_says_goodbye_too(void **state)
{
    struct proxy_fixture *s = open_polite(state, 0);

    push(s, 2, 0, 0, 0, 0, 16);
    steps(s, 5);
    for (int i = 0; i < 20 && proxy_leave(s->ranks[0].proxies) != EPX_OK; i++)
        steps(s, 1);
    steps(s, 5);
    assert_true(has_left(s, 2, 0));
    assert_false(has_left(s, 3, 0)); /* it would have to be connected first */
}

/* It says goodbye to those that it has met. Who needs it after all is told at once. */
static void one_that_was_only_asked_is_not_lost(void **state)
{
    struct proxy_fixture *s = open_polite(state, 0);

    *proxy_ring(s->ranks[0].proxies, 0)->ask = WAITS_WORD(1, 3);
    s->chaos.refuse[3] = EAGAIN;
    step(s, 0);
    lose(s, 3);
    assert_int_equal(s->ranks[0].errors, 0);
    assert_int_equal(goodbyes, 1); /* whoever follows the words of others hears that it has gone */
    push(s, 0, 3, 0, 0, 0, 16);
    step(s, 0);
    assert_int_equal(s->ranks[0].errors, 1);
    assert_int_equal(s->ranks[0].peer, 3);
    push(s, 0, 3, 0, 0, 0, 16);
    step(s, 0);
    assert_int_equal(s->ranks[0].errors, 1);
}

static void a_loss_may_overtake_a_goodbye(void **state)
{
    struct proxy_fixture *s = open_polite(state, 100);

    tell(s->chaos.ends[0][0], (struct net_event){.kind = NET_FAILED, .peer = 2, .error = ECONNRESET});
    step(s, 0);
    leave(s, 2);
    s->chaos.now_ns += 1000 * MS;
    step(s, 0);
    assert_int_equal(s->ranks[0].errors, 0);
}

static void a_peer_that_takes_nothing_keeps_no_goodbye_from_others(void **state)
{
    struct proxy_fixture *s = open_polite(state, 0);

    for (int peer = 2; peer < RANKS; peer++)
        push(s, 0, peer, 0, 0, 0, 16);
    steps(s, 5);
    s->chaos.refuse[2] = EAGAIN;
    push_apart(s, 2, 0, HEAP / 64, 16); /* as many as its queue holds */
    for (int i = 0; i < 8; i++)
        step(s, 0);
    (void)proxy_leave(s->ranks[0].proxies);
    steps(s, 20);
    assert_true(has_left(s, 3, 0) && has_left(s, 4, 0));
    assert_false(has_left(s, 2, 0));
}

static void two_that_leave_do_not_wait_for_each_other(void **state)
{
    struct proxy_fixture *s = open_polite(state, 0);

    push(s, 0, 3, 0, 0, 0, 16);
    steps(s, 5);
    s->chaos.hold = 1;
    assert_int_equal(proxy_leave(s->ranks[0].proxies), EPX_ERR_NOT_READY);
    assert_int_equal(s->chaos.puts, 2); /* ranks 2 and 4 have never heard of it */
    assert_int_equal(proxy_quiet(s->ranks[0].proxies), EPX_ERR_NOT_READY);
    tell(s->chaos.ends[0][0], (struct net_event){.kind = NET_ARRIVED,
                                                 .peer = 3,
                                                 .immediate = immediate_pack_alarm(3, ALARM(3, ALARM_GOODBYE))});
    step(s, 0);
    assert_int_equal(proxy_quiet(s->ranks[0].proxies), EPX_OK);
    s->chaos.hold = 0;
}

/* ---- What stops --------------------------------------------------------------------------------------------- */

static int alarms;

static void on_alarm(void *context, int rank, uint32_t alarm)
{
    (void)context;
    assert_int_equal(rank, 0);
    assert_int_equal(alarm, ALARM(1, 7));
    alarms++;
}

/* This rank has given up: its memory is read by no put that was not posted before, and others still hear of it. */
static void a_stop_drops_all_but_aborts_and_waits_for_what_is_posted(void **state)
{
    struct proxy_fixture *s = *state;
    const struct ring_dev *ring;

    alarms = 0;
    s->options.on_alarm = on_alarm;
    s->options.alarm_kind = KINDS;
    proxy_fixture_open(s, RANKS, 1);
    ring = proxy_ring(s->ranks[0].proxies, 0);
    s->chaos.hold = 1;
    push(s, 0, 2, 0, 0, 0, 16); /* posted */
    step(s, 0);
    s->chaos.refuse[3] = EAGAIN;
    push_apart(s, 3, 0, 5, 16); /* pending */
    *ring->alarm = ALARM_SET | ALARM_ALL | ALARM(1, 7);
    step(s, 0);
    *ring->stop = 1;
    push_apart(s, 3, 0, 6, 16); /* too late */
    step(s, 0);
    assert_int_equal(stats_of(s, 0).dropped, 11);
    assert_int_equal(*ring->stopped, 0);
    assert_int_equal(proxy_stop(s->ranks[0].proxies), 0);
    s->chaos.refuse[3] = 0;
    s->chaos.hold = 0;
    steps(s, 20);
    assert_int_equal(*ring->stopped, 1);
    assert_int_equal(proxy_stop(s->ranks[0].proxies), 1);
    assert_int_equal(alarms, 3);
    assert_int_equal(counter_at(s, 2, 0, 0), 1);
    assert_int_equal(counter_at(s, 3, 0, 0), 0);
    assert_int_equal(s->ranks[0].errors, 0);
}

/* The user's limit is one message, and a peer that is lost has it until the endpoint is closed: others hear of it. */
static void no_limit_keeps_an_abort_from_others(void **state)
{
    struct proxy_fixture *s = *state;

    alarms = 0;
    s->options.on_alarm = on_alarm;
    s->options.alarm_kind = KINDS;
    s->options.limits.max_messages[PROXY_LOW_LATENCY] = 1;
    proxy_fixture_open(s, RANKS, 1);
    s->chaos.hold = 1;
    push(s, 0, 3, 0, 0, 0, 16);
    step(s, 0);
    tell(s->chaos.ends[0][0], (struct net_event){.kind = NET_FAILED, .peer = 3, .error = ETIMEDOUT, .reads = 1});
    step(s, 0);
    s->chaos.nflying = 0; /* it never lands */
    s->chaos.hold = 0;
    proxy_alarm(s->ranks[0].proxies, ALARM(1, 7), 1);
    *proxy_ring(s->ranks[0].proxies, 0)->stop = 1;
    steps(s, 20);
    assert_int_equal(alarms, 2);
}

static void a_stop_that_is_not_answered_closes_the_endpoint(void **state)
{
    struct proxy_fixture *s = open_chaos(state);
    const struct ring_dev *ring = proxy_ring(s->ranks[0].proxies, 0);

    s->chaos.hold = 1;
    push(s, 0, 2, 0, 0, 0, 16);
    step(s, 0);
    *ring->stop = 1;
    step(s, 0);
    assert_int_equal(*ring->stopped, 0);
    assert_non_null(s->chaos.ends[0][0]);
    s->chaos.now_ns += (uint64_t)s->options.timeout_ms * MS / 4;
    step(s, 0);
    assert_int_equal(*ring->stopped, 1);
    assert_null(s->chaos.ends[0][0]);
    push(s, 0, 2, 0, 0, 0, 16);
    step(s, 0);
    assert_int_equal(s->ranks[0].sent[2], 2); /* nobody waits for what will never be answered */
    assert_int_equal(s->ranks[0].errors, 0);  /* the group has failed already: no second reason */
}

/* A millisecond passes between two looks. */
static uint64_t passing_now(void *self)
{
    struct proxy_fixture *s = self;

    return s->chaos.now_ns += MS;
}

/* Half of the deadline for all of them, not for each. */
static void threads_that_do_not_come_back_are_waited_for_together(void **state)
{
    struct proxy_fixture *s = *state;
    struct proxy_group *g;
    uint64_t begin;

    s->options.threads = 4;
    s->options.timeout_ms = 1000;
    s->env.now_ns = passing_now;
    proxy_fixture_open(s, RANKS, 1);
    g = s->ranks[0].proxies;
    g->manual = 0; /* as if they had threads of their own, which are in the network's library */
    begin = s->chaos.now_ns;
    assert_int_equal(proxy_stop(g), 0);
    g->manual = 1;
    assert_in_range(s->chaos.now_ns - begin, 500 * MS, 600 * MS); /* one after the other took 2000 */
    assert_int_equal(proxy_stop(g), 1);
}

UNIT_TESTS_EACH(setup, teardown, a_command_of_another_version_is_refused, an_unknown_operation_is_refused,
                a_rank_beyond_the_last_is_refused, a_rank_of_the_own_node_is_refused, the_own_rank_is_refused,
                a_rank_of_another_ring_is_refused, a_counter_of_another_ring_is_refused,
                a_source_outside_the_heap_is_refused, a_target_outside_the_peer_s_heap_is_refused,
                the_farthest_offsets_are_refused, an_unknown_counter_is_refused, an_unknown_slot_is_refused,
                the_last_bytes_of_the_heaps_can_be_used, an_immediate_of_another_version_is_refused,
                an_immediate_from_no_rank_is_refused, an_immediate_from_the_own_node_is_refused,
                an_immediate_for_no_counter_is_refused, an_immediate_in_another_s_name_is_refused,
                a_completion_of_nothing_is_reported_and_changes_nothing, a_put_that_fails_loses_the_peer_and_no_other,
                a_peer_that_the_network_loses_is_named, what_a_lost_peer_never_completes_counts_as_sent,
                what_may_still_be_read_does_not_count_as_sent, nor_does_it_where_others_go_on,
                what_may_still_be_read_keeps_nobody_waiting, a_put_in_flight_that_cannot_be_missed_is_reported,
                so_is_a_pending_one, so_is_one_that_comes_later, all_of_that_waits_for_the_grace_period,
                a_peer_that_was_not_given_up_is_only_lost,
                an_endpoint_that_breaks_is_reported_and_the_rings_go_on_being_emptied,
                what_an_endpoint_that_breaks_has_posted_is_read_until_it_is_closed, an_endpoint_says_why_it_breaks,
                a_doorbell_that_must_wait_is_rung_later, a_peer_that_has_said_goodbye_is_not_lost,
                who_only_receives_says_goodbye_too, a_loss_may_overtake_a_goodbye, one_that_was_only_asked_is_not_lost,
                a_peer_that_takes_nothing_keeps_no_goodbye_from_others, two_that_leave_do_not_wait_for_each_other,
                a_stop_drops_all_but_aborts_and_waits_for_what_is_posted, no_limit_keeps_an_abort_from_others,
                a_stop_that_is_not_answered_closes_the_endpoint, threads_that_do_not_come_back_are_waited_for_together)
