/* SPDX-License-Identifier: Apache-2.0 */
/* The command ring, producers and consumer as they are: order, wrap of every counter, a full ring, many producers. */
#include <pthread.h>
#include <string.h>
#include <time.h>

#include "device/cpu/prims.h"
#include "kernel/ring.h"
#include "proxy/ring.h"
#include "util/clock.h"
#include "tests/lib/unit.h"

#define MS 1000000ull

static struct agent make_agent(struct doorbell *bell, uint64_t timeout_ns)
{
    return (struct agent){.count = 1, .env = &cpu_thread_env, .bell = bell, .timeout_ns = timeout_ns};
}

/* The two words of a command are bound to each other, so that a torn one shows. Parity is left to the ring. */
static struct command make_command(uint64_t producer, uint64_t number)
{
    const uint64_t a = (producer << 48 | number) << 1;

    return (struct command){.a = a, .b = a * 0x9e3779b97f4a7c15u};
}

static int is_whole(struct command c)
{
    return (c.b & ~RING_PARITY) == (c.a & ~RING_PARITY) * 0x9e3779b97f4a7c15u;
}

static uint64_t number_of(struct command c)
{
    return c.a >> 1 & 0xffffffffffffu;
}

static int producer_of(struct command c)
{
    return (int)(c.a >> 49);
}

static void push_numbers(struct agent *agent, const struct ring *ring, uint64_t first, int n)
{
    struct command cmds[RING_MAX_PUSH];
    int i;

    for (i = 0; i < n; i++)
        cmds[i] = make_command(0, first + (uint64_t)i);
    assert_int_equal(ag_push(agent, &ring->dev, cmds, n), WAIT_OK);
}

static void take_numbers(struct ring *ring, uint64_t first, int n)
{
    struct command c = {0, 0};
    int i;

    for (i = 0; i < n; i++) {
        assert_true(ring_peek(ring, &c));
        assert_true(is_whole(c));
        assert_int_equal(number_of(c), first + (uint64_t)i);
        ring_take(ring);
    }
}

/* ---- One thread --------------------------------------------------------------------------------------------- */

/* Of 64 commands, from number `start` on. */
static struct ring new_ring(uint64_t start)
{
    struct ring ring;

    assert_int_equal(ring_create(&ring, NULL, 64, start), EPX_OK);
    return ring;
}

static void an_empty_ring_has_no_command(void **state)
{
    static const uint64_t starts[] = {0, 1, 63, 64, 65, 127, 128, UINT64_MAX, UINT64_MAX - 63, UINT64_MAX - 64};

    (void)state;
    for (size_t i = 0; i < UNIT_COUNT(starts); i++) {
        struct ring ring = new_ring(starts[i]);
        struct command c;

        assert_false(ring_peek(&ring, &c));
        ring_destroy(&ring);
    }
}

static void bad_sizes_are_refused(void **state)
{
    static const int sizes[] = {0, -64, 1, 16, 33, 96};
    struct ring ring;

    (void)state;
    for (size_t i = 0; i < UNIT_COUNT(sizes); i++)
        assert_int_equal(ring_create(&ring, NULL, sizes[i], 0), EPX_ERR_ARGUMENT);
}

/* Pushes of every size in turn, through many laps, from starts at which head, tail and lap are about to wrap. */
static void commands_come_in_order_through_every_wrap(void **state)
{
    static const uint64_t starts[] = {0, 60, 64, 127, UINT64_MAX - 1000, UINT64_MAX - 64, UINT64_MAX - 31, UINT64_MAX};
    struct doorbell bell = {0};
    struct agent agent = make_agent(&bell, 1000 * MS);
    struct command c;
    uint64_t pushed;
    int n;

    (void)state;
    for (size_t i = 0; i < UNIT_COUNT(starts); i++) {
        struct ring ring = new_ring(starts[i]);

        for (pushed = 0, n = 1; pushed < 4000; pushed += (uint64_t)n, n = n % RING_MAX_PUSH + 1) {
            push_numbers(&agent, &ring, pushed, n);
            take_numbers(&ring, pushed, n);
            assert_false(ring_peek(&ring, &c));
            ring_return(&ring);
        }
        assert_int_equal(*ring.dev.head, starts[i] + pushed);
        assert_int_equal(*ring.dev.tail, starts[i] + pushed);
        assert_int_equal(agent.waits, 0);
        ring_destroy(&ring);
    }
}

/* The same, without room. */
static void create_full(struct agent *agent, struct ring *ring, uint64_t start)
{
    *ring = new_ring(start);
    push_numbers(agent, ring, 0, 32);
    push_numbers(agent, ring, 32, 32);
}

static void a_full_ring_makes_a_push_wait_until_its_deadline(void **state)
{
    struct doorbell bell = {0};
    struct agent agent = make_agent(&bell, 30 * MS);
    struct command c = make_command(0, 64);
    struct ring ring;
    uint64_t start = clock_ns();

    (void)state;
    create_full(&agent, &ring, UINT64_MAX - 20);
    assert_int_equal(ag_push(&agent, &ring.dev, &c, 1), WAIT_TIMEOUT);
    assert_true(clock_ns() - start >= 30 * MS);
    take_numbers(&ring, 0, 64); /* nothing was overwritten */
    ring_destroy(&ring);
}

static void the_abort_word_ends_the_wait_for_room(void **state)
{
    struct doorbell bell = {0};
    struct agent agent = make_agent(&bell, 20000 * MS);
    struct command c = make_command(0, 64);
    uint64_t abort_word = ABORT_WORD(EPX_ERR_PEER, 1);
    struct ring ring;

    (void)state;
    agent.abort_word = &abort_word;
    create_full(&agent, &ring, 0);
    assert_int_equal(ag_push(&agent, &ring.dev, &c, 1), WAIT_ABORTED);
    ring_destroy(&ring);
}

/* tail is looked at only when the remembered one says that the ring may be full. */
static void producers_remember_the_tail(void **state)
{
    struct doorbell bell = {0};
    struct agent agent = make_agent(&bell, 1000 * MS);
    struct ring ring;

    (void)state;
    create_full(&agent, &ring, 0);
    take_numbers(&ring, 0, 40);
    ring_return(&ring);
    assert_int_equal(*ring.dev.tail_seen, 0);
    push_numbers(&agent, &ring, 64, 1);
    assert_int_equal(*ring.dev.tail_seen, 40);
    ring_destroy(&ring);
}

static void a_push_rings_a_sleeping_proxy(void **state)
{
    struct doorbell bell = {0};
    struct agent agent = make_agent(&bell, 1000 * MS);
    struct ring ring = new_ring(0);

    (void)state;
    push_numbers(&agent, &ring, 0, 1);
    assert_int_equal(ring.dev.bell->seq, 0); /* nobody sleeps: no system call */
    ring.dev.bell->waiters = 1;
    push_numbers(&agent, &ring, 1, 1);
    assert_int_equal(ring.dev.bell->seq, 1);
    assert_int_equal(ring.dev.bell->waiters, 0);
    ring_destroy(&ring);
}

/* ---- Many producers ----------------------------------------------------------------------------------------- */

#define PRODUCERS 4

struct producer {
    struct agent agent;
    const struct ring *ring;
    int index;
    uint64_t commands;
    uint32_t random;
    enum wait_result result;
    pthread_t thread;
};

static void *producer_main(void *arg)
{
    struct producer *p = arg;
    struct command cmds[RING_MAX_PUSH];
    uint64_t done = 0;

    while (done < p->commands && p->result == WAIT_OK) {
        int i, n;

        p->random = p->random * 1664525u + 1013904223u;
        n = 1 + (int)(p->random >> 20) % RING_MAX_PUSH;
        if ((uint64_t)n > p->commands - done)
            n = (int)(p->commands - done);
        for (i = 0; i < n; i++)
            cmds[i] = make_command((uint64_t)p->index, done + (uint64_t)i);
        p->result = ag_push(&p->agent, &p->ring->dev, cmds, n);
        done += (uint64_t)n;
    }
    return NULL;
}

/* Takes everything; each producer's commands must come whole and in its order. 0 or what was wrong. Lost is what does
 * not come for a long time: how long all of them take depends on the machine. */
static const char *consume(struct ring *ring, struct doorbell *bell, uint64_t total)
{
    uint64_t next[PRODUCERS] = {0}, taken = 0, deadline = clock_ns() + 600000 * MS;
    struct command c;

    while (taken < total) {
        if (!ring_peek(ring, &c)) {
            if (ring_return(ring))
                cpu_env_ring(&cpu_thread_env, bell);
            if (clock_ns() > deadline)
                return "commands were lost";
            /* Not sched_yield(), after which all others that want this core come first. */
            nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
            continue;
        }
        if (!is_whole(c))
            return "a command is torn";
        if (producer_of(c) >= PRODUCERS || number_of(c) != next[producer_of(c)]++)
            return "a command is lost, doubled or out of order";
        ring_take(ring);
        if (++taken % 17 == 0 && ring_return(ring)) {
            cpu_env_ring(&cpu_thread_env, bell);
            deadline = clock_ns() + 600000 * MS;
        }
    }
    return ring_peek(ring, &c) ? "there is one command too many" : NULL;
}

static void stress(uint64_t start, int slots, uint64_t each)
{
    struct producer producers[PRODUCERS];
    struct doorbell bell = {0};
    struct ring ring;
    const char *wrong;
    int i;

    assert_int_equal(ring_create(&ring, NULL, slots, start), EPX_OK);
    for (i = 0; i < PRODUCERS; i++) {
        producers[i] = (struct producer){.agent = make_agent(&bell, 600000 * MS),
                                         .ring = &ring,
                                         .index = i,
                                         .commands = each,
                                         .random = (uint32_t)(start + (uint64_t)i)};
        assert_int_equal(pthread_create(&producers[i].thread, NULL, producer_main, &producers[i]), 0);
    }
    wrong = consume(&ring, &bell, PRODUCERS * each);
    for (i = 0; i < PRODUCERS; i++)
        pthread_join(producers[i].thread, NULL);
    if (wrong)
        fail_msg("%s", wrong);
    for (i = 0; i < PRODUCERS; i++)
        assert_int_equal(producers[i].result, WAIT_OK);
    ring_destroy(&ring);
}

static void producers_share_a_ring_near_the_end_of_a_lap(void **state)
{
    (void)state;
    stress(32 - 3, 32, 20000);
    stress(64 - 1, 64, 20000);
}

static void producers_share_a_ring_across_the_wrap_of_64_bits(void **state)
{
    (void)state;
    stress(UINT64_MAX - 40000, 32, 20000);
    stress(UINT64_MAX - 40000, 1024, 20000);
}

UNIT_TESTS(an_empty_ring_has_no_command, bad_sizes_are_refused, commands_come_in_order_through_every_wrap,
           a_full_ring_makes_a_push_wait_until_its_deadline, the_abort_word_ends_the_wait_for_room,
           producers_remember_the_tail, a_push_rings_a_sleeping_proxy, producers_share_a_ring_near_the_end_of_a_lap,
           producers_share_a_ring_across_the_wrap_of_64_bits)
