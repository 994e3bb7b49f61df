/* SPDX-License-Identifier: Apache-2.0 */
/* How CPU agents wait and wake each other: results, deadlines, no lost wake-up between threads and processes. */
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "device/cpu/cpu.h"
#include "device/cpu/prims.h"
#include "kernel/begin_end.h"
#include "util/clock.h"
#include "tests/lib/unit.h"

#define MS 1000000ull
#define LONG_NS (120000 * MS) /* never reached unless something is wrong */

static struct agent make_agent(struct doorbell *bell)
{
    return (struct agent){.count = 1, .env = &cpu_thread_env, .bell = bell};
}

/* Of the running case, fresh in each: a rank's bell, an agent of the rank, and a word that somebody waits for. */
static struct {
    struct doorbell bell;
    struct agent agent;
    uint64_t word;
} own;

static int set_up(void **state)
{
    (void)state;
    memset(&own, 0, sizeof(own));
    own.agent = make_agent(&own.bell);
    return 0;
}

static void advance(struct agent *agent, uint64_t *word, uint64_t value, struct doorbell *bell)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE); /* pairs with cpu_wait_ge */
    cpu_ring_bell(agent, bell);
}

/* Time that passes only where somebody sleeps. */
struct virtual_world {
    uint64_t now, sleeps, wakes;
    uint64_t *word; /* set once `at` is reached */
    uint64_t at;
};

static uint64_t virtual_now(void *self)
{
    return ((struct virtual_world *)self)->now;
}

static void virtual_sleep(void *self, struct agent *agent, struct doorbell *bell, uint32_t seen, uint64_t until_ns)
{
    struct virtual_world *world = self;

    (void)agent;
    (void)bell;
    (void)seen;
    world->sleeps++;
    world->now = until_ns;
    if (world->word && world->now >= world->at)
        *world->word = 1;
}

static void virtual_wake(void *self, struct doorbell *bell)
{
    (void)bell;
    ((struct virtual_world *)self)->wakes++;
}

/* ---- One waiter --------------------------------------------------------------------------------------------- */

static void ready_word_returns_without_sleeping(void **state)
{
    (void)state;
    own.word = 7;
    assert_int_equal(cpu_wait_ge(&own.agent, &own.word, 7, 0), WAIT_OK);
    assert_int_equal(cpu_wait_ge(&own.agent, &own.word, 6, 0), WAIT_OK);
    assert_int_equal(own.agent.waits, 0);
    assert_int_equal(own.agent.wait_ns, 0);
}

static void deadline_ends_the_wait_and_is_counted(void **state)
{
    uint64_t start = clock_ns(), took;

    (void)state;
    assert_int_equal(cpu_wait_ge(&own.agent, &own.word, 1, 50 * MS), WAIT_TIMEOUT);
    took = clock_ns() - start;
    assert_true(took >= 50 * MS);
    assert_true(took < 30000 * MS);
    assert_int_equal(own.agent.waits, 1);
    assert_in_range(own.agent.wait_ns, 50 * MS, took);
}

static void zero_timeout_is_a_query(void **state)
{
    (void)state;
    assert_int_equal(cpu_wait_ge(&own.agent, &own.word, 1, 0), WAIT_TIMEOUT);
}

static void abort_word_ends_the_wait_unless_the_word_is_there(void **state)
{
    uint64_t abort_word = ABORT_WORD(EPX_ERR_PEER, 3);

    (void)state;
    own.agent.abort_word = &abort_word;
    assert_int_equal(cpu_wait_ge(&own.agent, &own.word, 1, LONG_NS), WAIT_ABORTED);
    own.word = 1;
    assert_int_equal(cpu_wait_ge(&own.agent, &own.word, 1, LONG_NS), WAIT_OK);
}

/* Half of the deadline for all rings, not for each. The next stage of the operation does not wait again. */
static void proxies_that_do_not_stop_are_waited_for_together(void **state)
{
    enum { RINGS = 4 };
    struct virtual_world world = {.now = 1000};
    struct cpu_env env = {.now_ns = virtual_now, .sleep = virtual_sleep, .wake = virtual_wake, .self = &world};
    struct doorbell bells[RINGS] = {{0}};
    uint64_t stop[RINGS] = {0}, stopped[RINGS] = {0};
    struct ring_dev rings[RINGS];
    const struct group_dev g = {.rings = rings, .nrings = RINGS, .timeout_ns = 200 * MS};

    (void)state;
    own.agent.env = &env;
    memset(rings, 0, sizeof(rings));
    for (int i = 0; i < RINGS; i++) {
        rings[i].stop = &stop[i];
        rings[i].stopped = &stopped[i];
        rings[i].bell = &bells[i];
    }
    network_stop(&own.agent, &g);
    assert_int_equal(world.now, 1000 + 100 * MS); /* one after the other took 400 */
    for (int i = 0; i < RINGS; i++) {
        assert_int_equal(stop[i], 1);
        assert_int_equal(stopped[i], 2);
    }
    network_stop(&own.agent, &g);
    assert_int_equal(world.now, 1000 + 100 * MS);
}

/* Two rings of rank 0 to ranks 1 and 2 of other nodes; the proxy of each waits for the rank that it serves. */
struct two_rings {
    struct control control;
    struct command slots[2][4];
    struct doorbell bells[2];
    uint64_t words[2][9];
    struct ring_dev rings[2];
    uint64_t counters[SIG_COUNT * 3], pushed[3], pushed_all[2];
    struct group_state state;
    struct error_record error;
    struct device_stats stats;
};

static void make_two_rings(struct two_rings *two)
{
    memset(two, 0, sizeof(*two));
    for (int i = 0; i < 2; i++) {
        uint64_t *w = two->words[i];

        two->rings[i] = (struct ring_dev){two->slots[i], 3,     &w[0], &w[1], &w[2], &two->bells[i],
                                          &w[3],         &w[4], &w[5], &w[6], &w[7], &w[8]};
        *two->rings[i].asked = WAITS_WORD(1 << 20, 1 + i); /* questions are taken, and never answered */
        *two->rings[i].blocked = 1 + 1 + (uint64_t)i;
    }
}

/* Not the one that another ring waits for, perhaps for a moment only. */
static void a_full_ring_names_the_rank_that_it_waits_for(void **state)
{
    static const int32_t routes[] = {0, 0, 1}, node_of[] = {0, 1, 2}, own_rank = 0;
    static struct two_rings two;
    char *heap[3] = {(char *)&two.control, NULL, NULL};
    const struct group_dev g = {.nranks = 3,
                                .nnodes = 3,
                                .node_size = 1,
                                .sig_slots = 1,
                                .nrings = 2,
                                .timeout_ns = 100 * MS,
                                .heap = heap,
                                .node_ranks = &own_rank,
                                .node_of = node_of,
                                .routes = routes,
                                .rings = two.rings,
                                .counters = two.counters,
                                .pushed = two.pushed,
                                .pushed_all = two.pushed_all,
                                .state = &two.state,
                                .error = &two.error,
                                .stats = &two.stats};

    (void)state;
    own.agent.timeout_ns = 10 * MS;
    for (int full = 0; full < 2; full++) {
        struct put_batch batch;

        make_two_rings(&two);
        *two.rings[full].head = 4;
        put_begin(&batch);
        put(&own.agent, &g, &batch, 1 + full, 0, 0, 0, 0);
        put(&own.agent, &g, &batch, 2 - full, 0, 0, 0, 0); /* another ring, which takes it */
        assert_int_not_equal(put_flush(&own.agent, &g, &batch), 0);
        assert_int_equal(push_failed(&own.agent, &g, batch.failed), 1);
        assert_int_equal(two.error.status, KSTATUS_TIMEOUT);
        assert_int_equal(two.error.phase, PHASE_RING);
        assert_int_equal(two.error.peer, 1 + full);
        assert_int_equal(ABORT_CULPRIT(two.control.abort_word), 1 + full);
        /* What comes behind takes no places, each of which would be waited for. */
        const uint64_t head = *two.rings[full].head;
        for (int i = 0; i < 200; i++)
            put(&own.agent, &g, &batch, 1 + full, 0, 0, 0, 0);
        assert_int_not_equal(put_flush(&own.agent, &g, &batch), 0);
        assert_int_equal(*two.rings[full].head, head);
    }
}

struct waiter {
    struct agent agent;
    const uint64_t *word;
    uint64_t target, timeout_ns, cpu_ns;
    enum wait_result result;
    pthread_t thread;
};

static void *waiter_main(void *arg)
{
    struct waiter *waiter = arg;
    struct timespec ts;

    waiter->result = cpu_wait_ge(&waiter->agent, waiter->word, waiter->target, waiter->timeout_ns);
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ts);
    waiter->cpu_ns = (uint64_t)ts.tv_sec * 1000 * MS + (uint64_t)ts.tv_nsec;
    return NULL;
}

static void start_waiter(struct waiter *waiter, uint64_t timeout_ns)
{
    *waiter = (struct waiter){.agent = make_agent(&own.bell), .word = &own.word, .target = 1, .timeout_ns = timeout_ns};
    assert_int_equal(pthread_create(&waiter->thread, NULL, waiter_main, waiter), 0);
}

static void sleeping_waiter_is_woken_by_an_abort(void **state)
{
    uint64_t abort_word = 0;
    struct waiter waiter = {.agent = make_agent(&own.bell), .word = &own.word, .target = 1, .timeout_ns = LONG_NS};

    (void)state;
    waiter.agent.abort_word = &abort_word;
    assert_int_equal(pthread_create(&waiter.thread, NULL, waiter_main, &waiter), 0);
    usleep(30000);
    advance(&own.agent, &abort_word, ABORT_WORD(EPX_ERR_TIMEOUT, 1), &own.bell);
    pthread_join(waiter.thread, NULL);
    assert_int_equal(waiter.result, WAIT_ABORTED);
}

static void word_without_bell_is_seen_all_the_same(void **state)
{
    struct waiter waiter;

    (void)state;
    start_waiter(&waiter, LONG_NS);
    usleep(30000);
    __atomic_store_n(&own.word, 1, __ATOMIC_RELEASE);
    pthread_join(waiter.thread, NULL);
    assert_int_equal(waiter.result, WAIT_OK);
    assert_true(waiter.agent.wait_ns < LONG_NS / 2);
}

static void waiter_gives_up_the_core(void **state)
{
    struct waiter waiter;

    (void)state;
    start_waiter(&waiter, 300 * MS);
    pthread_join(waiter.thread, NULL);
    assert_int_equal(waiter.result, WAIT_TIMEOUT);
    assert_true(waiter.cpu_ns < 60 * MS);
}

static void one_ring_wakes_every_agent_of_the_rank(void **state)
{
    enum { N = 8 };
    struct waiter waiters[N];
    int i;

    (void)state;
    for (i = 0; i < N; i++)
        start_waiter(&waiters[i], LONG_NS);
    usleep(30000);
    advance(&own.agent, &own.word, 1, &own.bell);
    for (i = 0; i < N; i++) {
        pthread_join(waiters[i].thread, NULL);
        assert_int_equal(waiters[i].result, WAIT_OK);
    }
}

static void endless_timeout_does_not_wrap(void **state)
{
    struct waiter waiter;

    (void)state;
    start_waiter(&waiter, UINT64_MAX);
    usleep(30000);
    advance(&own.agent, &own.word, 1, &own.bell);
    pthread_join(waiter.thread, NULL);
    assert_int_equal(waiter.result, WAIT_OK);
}

/* ---- No lost wake-up ---------------------------------------------------------------------------------------- */

/* Sleeps as the thread environment does, but far longer than a wait asks for: a lost wake-up then shows as time over
 * rather than being healed by the next look. */
static int lost_wakeups;

static uint64_t strict_now(void *self)
{
    (void)self;
    return clock_ns();
}

static void strict_sleep(void *self, struct agent *agent, struct doorbell *bell, uint32_t seen, uint64_t until_ns)
{
    struct timespec limit = {.tv_sec = LONG_NS / 2 / (1000 * MS)};

    (void)self;
    (void)agent;
    (void)until_ns;
    if (syscall(SYS_futex, &bell->seq, FUTEX_WAIT, seen, &limit, NULL, 0) != 0 && errno == ETIMEDOUT)
        __atomic_fetch_add(&lost_wakeups, 1, __ATOMIC_RELAXED);
}

static void strict_wake(void *self, struct doorbell *bell)
{
    (void)self;
    syscall(SYS_futex, &bell->seq, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static const struct cpu_env strict_env = {.now_ns = strict_now, .sleep = strict_sleep, .wake = strict_wake};

/*
 * Ranks in a circle: in each round, agent a of every rank sends to agent a of the next rank and waits for the one
 * before. Words so arrive just when their readers go to sleep, which is where wake-ups get lost.
 */
enum { MAX_RANKS = 4, AGENTS = 2, SLOTS = 2 * MAX_RANKS, LEAST_ROUNDS = 10 };

struct rank_area {
    struct doorbell bell;
    uint64_t word[AGENTS];
    uint64_t data[AGENTS][SLOTS]; /* plain memory, ordered by the words alone; ranks are less than SLOTS rounds apart */
};

struct circle {
    uint64_t last[AGENTS]; /* round after which to stop: rank 0 sets it, far enough ahead that none has passed it */
    struct rank_area rank[MAX_RANKS];
};

struct circle_agent {
    struct circle *circle;
    int ranks, rank, index;
    uint64_t until_ns, rounds;
    int failures;
    pthread_t thread;
};

static void run_circle(struct circle_agent *self)
{
    struct rank_area *own = &self->circle->rank[self->rank];
    struct rank_area *next = &self->circle->rank[(self->rank + 1) % self->ranks];
    struct agent agent = {.index = self->index, .count = AGENTS, .env = &strict_env, .bell = &own->bell};
    uint64_t *last = &self->circle->last[self->index];
    uint64_t round;

    for (round = 1; round <= __atomic_load_n(last, __ATOMIC_ACQUIRE); round++) {
        if (self->rank == 0 && round > LEAST_ROUNDS && clock_ns() > self->until_ns &&
            __atomic_load_n(last, __ATOMIC_RELAXED) == UINT64_MAX)
            __atomic_store_n(last, round + SLOTS, __ATOMIC_RELEASE);
        next->data[self->index][round % SLOTS] = round;
        advance(&agent, &next->word[self->index], round, &next->bell);
        if (cpu_wait_ge(&agent, &own->word[self->index], round, LONG_NS) != WAIT_OK) {
            self->failures++;
            break;
        }
        self->failures += own->data[self->index][round % SLOTS] != round;
    }
    self->rounds = round;
}

static void *circle_main(void *arg)
{
    run_circle(arg);
    return NULL;
}

static void circle_of_threads(int ranks)
{
    struct circle *circle = calloc(1, sizeof(*circle));
    struct circle_agent agents[MAX_RANKS * AGENTS];
    uint64_t until = clock_ns() + 700 * MS;
    int i;

    assert_non_null(circle);
    for (i = 0; i < AGENTS; i++)
        circle->last[i] = UINT64_MAX;
    lost_wakeups = 0;
    for (i = 0; i < ranks * AGENTS; i++) {
        agents[i] = (struct circle_agent){
            .circle = circle, .ranks = ranks, .rank = i / AGENTS, .index = i % AGENTS, .until_ns = until};
        assert_int_equal(pthread_create(&agents[i].thread, NULL, circle_main, &agents[i]), 0);
    }
    for (i = 0; i < ranks * AGENTS; i++) {
        pthread_join(agents[i].thread, NULL);
        assert_int_equal(agents[i].failures, 0);
        assert_true(agents[i].rounds > LEAST_ROUNDS);
    }
    assert_int_equal(lost_wakeups, 0);
    free(circle);
}

static void no_wakeup_is_lost_between_two_ranks(void **state)
{
    (void)state;
    circle_of_threads(2);
}

static void no_wakeup_is_lost_between_more_ranks_than_cores(void **state)
{
    (void)state;
    circle_of_threads(MAX_RANKS);
}

/* A rank of its own, with one agent, in a process of its own. */
static void circle_child(const struct heap_export *export, int rank, uint64_t until_ns)
{
    struct circle_agent self = {.ranks = MAX_RANKS, .rank = rank, .until_ns = until_ns};
    void *base;

    if (cpu_heap_open(NULL, export, &base) != EPX_OK)
        _exit(2);
    self.circle = base;
    lost_wakeups = 0;
    run_circle(&self);
    _exit(self.failures ? 3 : lost_wakeups ? 4 : self.rounds > LEAST_ROUNDS ? 0 : 5);
}

static void no_wakeup_is_lost_between_processes(void **state)
{
    uint64_t until = clock_ns() + 700 * MS;
    struct heap heap;
    pid_t children[MAX_RANKS];
    int i, status;

    (void)state;
    assert_int_equal(cpu_heap_create(NULL, sizeof(struct circle), &heap), EPX_OK);
    ((struct circle *)heap.base)->last[0] = UINT64_MAX;
    for (i = 0; i < MAX_RANKS; i++) {
        children[i] = fork();
        assert_true(children[i] >= 0);
        if (children[i] == 0)
            circle_child(&heap.export, i, until);
    }
    for (i = 0; i < MAX_RANKS; i++) {
        assert_int_equal(waitpid(children[i], &status, 0), children[i]);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), 0);
    }
    cpu_heap_destroy(NULL, &heap);
}

static void ring_without_sleepers_leaves_seq_alone(void **state)
{
    (void)state;
    advance(&own.agent, &own.word, 1, &own.bell);
    assert_int_equal(own.bell.seq, 0);
}

/* ---- The simulation's seam ---------------------------------------------------------------------------------- */

static void time_and_sleep_go_through_the_environment(void **state)
{
    struct virtual_world world = {.now = 1000};
    struct cpu_env env = {.now_ns = virtual_now, .sleep = virtual_sleep, .wake = virtual_wake, .self = &world};
    struct doorbell bell = {0};
    struct agent agent = {.count = 1, .env = &env, .bell = &bell};
    uint64_t word = 0, start = clock_ns();

    (void)state;
    assert_int_equal(cpu_wait_ge(&agent, &word, 1, 100000 * MS), WAIT_TIMEOUT);
    assert_int_equal(world.now, 1000 + 100000 * MS);
    assert_int_equal(agent.wait_ns, 100000 * MS);
    assert_true(clock_ns() - start < 50000 * MS); /* half of the time that was played */

    world.word = &word;
    world.at = world.now + 500 * MS;
    assert_int_equal(cpu_wait_ge(&agent, &word, 1, 100000 * MS), WAIT_OK);
    assert_in_range(world.now, world.at, world.at + 100 * MS);

    word = 0; /* a sleeper's flag makes the ring go through wake */
    world.word = NULL;
    bell.waiters = 1;
    advance(&agent, &word, 1, &bell);
    assert_int_equal(world.wakes, 1);
    assert_int_equal(bell.waiters, 0);
}

/* A peer that acts at one point of the wait: when it first reads the clock, or when it goes to sleep. */
struct interleaving {
    int at_clock, at_sleep;
    uint64_t *word;
    struct agent *agent;
    int sleeps, slept_on_stale_seq;
};

static uint64_t interleaved_now(void *self)
{
    struct interleaving *now = self;

    if (now->at_clock) {
        now->at_clock = 0;
        advance(now->agent, now->word, 1, now->agent->bell);
    }
    return clock_ns();
}

static void interleaved_sleep(void *self, struct agent *agent, struct doorbell *bell, uint32_t seen, uint64_t until_ns)
{
    struct interleaving *now = self;

    (void)until_ns;
    if (now->at_sleep) {
        now->at_sleep = 0;
        advance(agent, now->word, 1, bell);
    }
    now->sleeps++;
    now->slept_on_stale_seq += bell->seq == seen; /* the futex would sleep */
}

static void interleaved_wake(void *self, struct doorbell *bell)
{
    (void)self;
    (void)bell;
}

static struct interleaving run_interleaving(int at_clock, int at_sleep)
{
    struct doorbell bell = {0};
    uint64_t word = 0;
    struct interleaving now = {.at_clock = at_clock, .at_sleep = at_sleep, .word = &word};
    struct cpu_env env = {
        .now_ns = interleaved_now, .sleep = interleaved_sleep, .wake = interleaved_wake, .self = &now};
    struct agent agent = {.count = 1, .env = &env, .bell = &bell};

    now.agent = &agent;
    assert_int_equal(cpu_wait_ge(&agent, &word, 1, LONG_NS), WAIT_OK);
    return now;
}

static void ring_before_the_waiter_is_announced_prevents_its_sleep(void **state)
{
    (void)state;
    assert_int_equal(run_interleaving(1, 0).sleeps, 0);
}

static void ring_between_last_look_and_sleep_ends_the_sleep(void **state)
{
    struct interleaving result = run_interleaving(0, 1);

    (void)state;
    assert_int_equal(result.sleeps, 1);
    assert_int_equal(result.slept_on_stale_seq, 0);
}

/* ---- Scratch ------------------------------------------------------------------------------------------------ */

static void scratch_is_aligned_kept_and_grows(void **state)
{
    struct agent agent = {.count = 1};
    char *small = agent_scratch(&agent, 100), *big;

    (void)state;
    assert_non_null(small);
    assert_int_equal((uintptr_t)small % 64, 0);
    assert_ptr_equal(agent_scratch(&agent, 50), small);
    big = agent_scratch(&agent, 1000000);
    assert_non_null(big);
    assert_int_equal((uintptr_t)big % 64, 0);
    memset(big, 1, 1000000);
    assert_ptr_equal(agent_scratch(&agent, 1000000), big);
    assert_null(agent_scratch(&agent, SIZE_MAX - 100));
    assert_ptr_equal(agent_scratch(&agent, 10), big);
    agent_scratch_free(&agent);
    assert_null(agent.scratch);
}

UNIT_TESTS_EACH(set_up, NULL, ready_word_returns_without_sleeping, deadline_ends_the_wait_and_is_counted,
                zero_timeout_is_a_query, abort_word_ends_the_wait_unless_the_word_is_there,
                proxies_that_do_not_stop_are_waited_for_together, a_full_ring_names_the_rank_that_it_waits_for,
                sleeping_waiter_is_woken_by_an_abort, word_without_bell_is_seen_all_the_same, waiter_gives_up_the_core,
                one_ring_wakes_every_agent_of_the_rank, endless_timeout_does_not_wrap,
                no_wakeup_is_lost_between_two_ranks, no_wakeup_is_lost_between_more_ranks_than_cores,
                no_wakeup_is_lost_between_processes, ring_without_sleepers_leaves_seq_alone,
                time_and_sleep_go_through_the_environment, ring_before_the_waiter_is_announced_prevents_its_sleep,
                ring_between_last_look_and_sleep_ends_the_sleep, scratch_is_aligned_kept_and_grows)
