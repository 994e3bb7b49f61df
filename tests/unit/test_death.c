/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A rank that dies: its process is killed while the others work. They learn of it, go on without it in both modes, on
 * one node and on two, and nobody waits for it a second time. And one that is stopped until ranks of another node have
 * masked it, and then goes on; and one that stops while it leads a recovery. ctest: cost=34 labels=ranks,noclang sleeps
 */
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "group/abort.h"
#include "net/net.h"
#include "util/clock.h"
#include "tests/lib/child.h"
#include "tests/lib/fixture.h"
#include "tests/lib/slow.h"
#include "tests/lib/unit.h"

enum { RANKS = 4, LAST = RANKS - 1, BLOCK = 8192, DEADLINE_MS = 3000, LATE_MS = 1500, STOP_MS = 1000 };
/* Results that tell whether all are well, one to each other rank: that all have closed their networks, that all have
 * reset their state, and those of the last step, of which rank 1 is told first. */
enum { RESULT_BYTES = RANKS * 216, TOLD_CLOSED = RANKS - 1, TOLD_RESET = 2 * (RANKS - 1), TOLD_ONE = TOLD_RESET + 1 };

/* ---- Ranks as processes, which meet in shared memory ------------------------------------------------------------- */

struct table {
    atomic_int arrived, round, failed, survivors, masked;
    atomic_int stopped; /* the last rank's process, just before it stops */
    char data[2][RANKS][BLOCK];
};

static struct table *table;

struct table_rank {
    int rank;
};

static int gather(void *context, const void *send, void *recv, size_t bytes)
{
    const int rank = ((struct table_rank *)context)->rank, round = atomic_load(&table->round);
    const uint64_t deadline = clock_ns() + 300000000000u;

    if (bytes > BLOCK)
        return 1;
    memcpy(table->data[round & 1][rank], send, bytes);
    if (atomic_fetch_add(&table->arrived, 1) + 1 == RANKS) {
        atomic_store(&table->arrived, 0);
        atomic_store(&table->round, round + 1);
    }
    while (atomic_load(&table->round) == round) {
        if (clock_ns() > deadline || atomic_load(&table->failed))
            return 1;
        usleep(200);
    }
    for (int r = 0; r < RANKS; r++)
        memcpy((char *)recv + (size_t)r * bytes, table->data[round & 1][r], bytes);
    return 0;
}

/* Those that live, once. */
static int survivors_meet(void)
{
    const uint64_t deadline = clock_ns() + 300000000000u;

    atomic_fetch_add(&table->survivors, 1);
    while (atomic_load(&table->survivors) < RANKS - 1) {
        if (clock_ns() > deadline || atomic_load(&table->failed))
            return -1;
        usleep(200);
    }
    return 0;
}

struct story {
    fixture_fn run;
    int ranks_per_node;
    int lives; /* the last rank */
    int first; /* rank 0 dies, not the last one */
    int stops; /* rank 0 lives too: when it stops it goes on after so many percent of a deadline */
    int at;    /* ... behind so many results */
};

static int run_rank(struct fixture *s)
{
    const struct story *story = s->arg;
    const int rc = fixture_ll(s) || fixture_ht(s) || fixture_meet(s) || story->run(s);

    if (rc)
        atomic_store(&table->failed, 1);
    return rc;
}

static int be_rank(struct story *story, int rank)
{
    struct table_rank self = {rank};
    epx_bootstrap boot = EPX_BOOTSTRAP_INIT;
    epx_group_config config = fixture_config(slow_ms(story->stops ? STOP_MS : story->lives ? LATE_MS : DEADLINE_MS));
    int rc;

    boot.rank = rank;
    boot.nranks = RANKS;
    boot.allgather = gather;
    boot.context = &self;
    config.enable_mask = 1;
    config.ranks_per_node = story->ranks_per_node;
    rc = fixture_rank(rank, RANKS, &boot, &config, run_rank, story);
    if (rc)
        atomic_store(&table->failed, 1);
    return rc;
}

/* How many of the ranks that live failed. */
static int run_story(struct story *story)
{
    pid_t pids[RANKS];
    int failures = 0;

    table = child_share(sizeof(*table));
    assert_non_null(table);
    for (int r = 0; r < RANKS; r++) {
        pids[r] = child_fork();
        assert_true(pids[r] >= 0);
        if (pids[r] == 0)
            _exit(be_rank(story, r) != 0);
    }
    for (int r = 0; r < RANKS; r++) {
        int status = 0;
        assert_int_equal(waitpid(pids[r], &status, r == 0 && story->stops ? WUNTRACED : 0), pids[r]);
        if (WIFSTOPPED(status)) {
            usleep((useconds_t)slow_ms(STOP_MS) * 10 * (useconds_t)story->stops);
            kill(pids[r], SIGCONT);
            assert_int_equal(waitpid(pids[r], &status, 0), pids[r]);
        } else if (r == 0 && story->stops) {
            failures++; /* it has not stopped */
        }
        if (r == (story->first ? 0 : LAST) && !story->lives)
            failures += !WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL;
        else
            failures += !WIFEXITED(status) || WEXITSTATUS(status) != 0;
    }
    child_unshare(table, sizeof(*table));
    return failures;
}

/* ---- Words ------------------------------------------------------------------------------------------------------- */

/* What all ranks do next, but for the last, which dies. */
static void refill_or_die(struct fixture *s)
{
    if (s->rank == LAST)
        raise(SIGKILL);
    fixture_refill(s);
}

static int expect_mask(struct fixture *s, int last)
{
    int32_t mask[RANKS] = {9, 9, 9, 9};

    if (fixture_sync(s, epx_mask_query(s->group, mask, NULL)) != EPX_OK)
        return fixture_fail(s, "epx_mask_query");
    for (int r = 0; r < RANKS; r++)
        if (mask[r] != (r == LAST ? last : 1))
            return fixture_fail(s, "the mask is wrong");
    return 0;
}

/* Meets the others, and faster than anybody's deadline, for the dead one is not waited for. */
static int start_over(struct fixture *s, epx_status (*call)(epx_group *group))
{
    const uint64_t begin = clock_ns();

    if (call(s->group) != EPX_OK)
        return fixture_fail(s, "going on without the dead rank");
    /* Others may come a deadline later: they were waiting for it. */
    if (slow_late(begin, 2 * DEADLINE_MS))
        return fixture_fail(s, "it was waited for");
    if (epx_group_error(s->group, NULL) != EPX_OK)
        return fixture_fail(s, "there is still an error");
    return expect_mask(s, 0);
}

/* Many rounds of both modes, none of which may take a deadline. */
static int go_on(struct fixture *s)
{
    const uint64_t begin = clock_ns();

    fixture_set_active(s, LAST, 0);
    s->w.round = 100;
    for (int i = 0; i < 5; i++)
        if (fixture_ll(s) || fixture_ht(s))
            return -1;
    return slow_late(begin, DEADLINE_MS) ? fixture_fail(s, "the dead rank is waited for") : 0;
}

static epx_status clean(epx_group *group)
{
    return epx_mask_clean(group, NULL);
}

/* ---- Stories ----------------------------------------------------------------------------------------------------- */

/* The last rank dies, and high throughput's update fails on the others. */
static int update_without_last(struct fixture *s)
{
    epx_status status;

    refill_or_die(s);
    status = fixture_sync(s, epx_handle_update(s->ht, &s->idx, NULL, NULL));
    if (status != EPX_ERR_TIMEOUT && status != EPX_ERR_PEER)
        return fixture_fail(s, "the update without the rank");
    return 0;
}

/* It is missed by high throughput, which fails; clearing the error goes on without it. */
static int missed_by_high_throughput(struct fixture *s)
{
    if (update_without_last(s))
        return -1;
    return start_over(s, epx_group_error_clear) || go_on(s);
}

/* Nothing, or who was masked: by its deadline, or because the network was quicker to say that it is lost. */
static int is_masked_story(epx_status status)
{
    return status == EPX_OK || status == EPX_ERR_TIMEOUT || status == EPX_ERR_PEER;
}

/* It is missed by low latency, which masks it and goes on at once; high throughput asks for a consensus first. */
static int missed_by_low_latency(struct fixture *s)
{
    static const char *const words[] = {"is masked", "epx_group_error_clear", NULL};
    int32_t mask[RANKS] = {1, 1, 1, 1};
    epx_status status;

    refill_or_die(s);
    if (epx_handle_update(s->ll, &s->idx, NULL, NULL) != EPX_OK)
        return fixture_fail(s, "epx_handle_update");
    status = fixture_sync(s, epx_dispatch(s->ll, &s->in, &s->ll_out, &s->ll_info, NULL, NULL));
    if (!is_masked_story(status))
        return fixture_fail(s, "the dispatch without the rank");
    fixture_set_active(s, LAST, 0);
    if (fixture_check_ll_dispatch(s))
        return -1;
    status = fixture_sync(s, epx_combine(s->ll, &s->ll_cin, &s->cout, NULL, NULL));
    if (!is_masked_story(status) || fixture_check_ll_combine(s))
        return fixture_fail(s, "the combine without the rank");
    if (epx_group_error_clear(s->group) != EPX_OK || fixture_ll(s) || expect_mask(s, 0) || survivors_meet())
        return fixture_fail(s, "low latency goes on by itself");
    if (fixture_expect(s, "epx_mask_update", epx_mask_update(s->group, mask, NULL), EPX_ERR_USAGE,
                       (const char *const[]){"mask[3]", "epx_mask_clean", NULL}))
        return -1;
    status = fixture_sync(s, epx_handle_update(s->ht, &s->idx, NULL, NULL));
    /* One rank says why, the others that it did. */
    if (status != EPX_ERR_PEER && fixture_expect(s, "epx_handle_update", status, EPX_ERR_USAGE, words))
        return -1;
    return start_over(s, epx_group_error_clear) || go_on(s);
}

/* Masked by hand by one rank alone: the others learn of it when they meet. */
static int masked_by_one(struct fixture *s)
{
    int32_t mask[RANKS] = {1, 1, 1, 0};

    if (update_without_last(s))
        return -1;
    if (s->rank == 1 && epx_mask_update(s->group, mask, NULL) != EPX_OK)
        return fixture_fail(s, "epx_mask_update");
    return start_over(s, epx_group_error_clear) || go_on(s);
}

/* epx_mask_clean brings back whoever is alive, and goes on without the dead. */
static int cleaned(struct fixture *s)
{
    if (missed_by_high_throughput(s))
        return -1;
    return start_over(s, clean) || go_on(s);
}

/* ---- A late rank, masked by another node ------------------------------------------------------------------------- */

/* Nobody masks a healthy rank. */
static int expect_healthy(struct fixture *s)
{
    int32_t mask[RANKS];

    if (epx_mask_query(s->group, mask, NULL) != EPX_OK)
        return fixture_fail(s, "epx_mask_query");
    (void)epx_stream_sync(s->group, NULL); /* the status of the operation before */
    for (int r = 0; r < LAST; r++)
        if (!mask[r])
            return fixture_fail(s, "a healthy rank is masked");
    return 0;
}

/* Wakes up when ranks 0 and 1 have masked it, and goes on with its operation. */
static int wake_up_late(struct fixture *s)
{
    uint64_t deadline;
    int told = 0;

    atomic_store(&table->stopped, (int)getpid());
    raise(SIGSTOP);
    deadline = clock_ns() + (uint64_t)slow_ms(LATE_MS) * 1000000u;
    if (!fixture_ll(s))
        return fixture_fail(s, "what others have gone on without is good");
    while (!told && clock_ns() < deadline && epx_mask_left_out(s->group, &told) == EPX_OK)
        usleep(1000);
    return told ? 0 : fixture_fail(s, "it was masked, and nobody told it");
}

/* Rank 2, of the same node, comes later: its own deadline has not expired when the last rank wakes up. */
static int go_on_without_late(struct fixture *s)
{
    epx_status status;

    if (s->rank == LAST - 1)
        usleep((useconds_t)slow_ms(LATE_MS) * 500);
    fixture_refill(s);
    if (epx_handle_update(s->ll, &s->idx, NULL, NULL) != EPX_OK)
        return fixture_fail(s, "epx_handle_update");
    status = fixture_sync(s, epx_dispatch(s->ll, &s->in, &s->ll_out, &s->ll_info, NULL, NULL));
    if (!is_masked_story(status))
        return fixture_fail(s, "the dispatch without the late rank");
    if (s->rank < LAST - 1 && atomic_fetch_add(&table->masked, 1) == 1)
        kill((pid_t)atomic_load(&table->stopped), SIGCONT);
    (void)fixture_sync(s, epx_combine(s->ll, &s->ll_cin, &s->cout, NULL, NULL));
    return 0;
}

static int masked_while_stopped(struct fixture *s)
{
    if (s->rank == LAST ? wake_up_late(s) : go_on_without_late(s))
        return -1;
    if (expect_healthy(s) || fixture_meet(s))
        return -1;
    if (epx_mask_clean(s->group, NULL) != EPX_OK)
        return fixture_fail(s, "epx_mask_clean");
    s->w.round = 100;
    return fixture_ll(s) || fixture_ht(s) ? -1 : 0;
}

static void a_rank_that_another_node_has_masked_is_told(void **state)
{
    char text[256];

    (void)state;
    if (net_ofi_ops.probe("tcp", text, sizeof(text)) != EPX_OK) {
        print_message("skipped: %s\n", text);
        skip();
    }
    assert_int_equal(run_story(&(struct story){.run = masked_while_stopped, .ranks_per_node = 2, .lives = 1}), 0);
}

/* ---- Tests ------------------------------------------------------------------------------------------------------- */

/* libc's. The results of three steps of a recovery, which tell whether all ranks are well, have a size of their own.
 * The coordinator tells them to ranks 1, 2 and 3. */
static int results_left, results_signal; /* of these until the signal is raised; 0: never */

ssize_t send(int fd, const void *data, size_t bytes, int flags)
{
    const ssize_t sent = sendto(fd, data, bytes, flags, NULL, 0);

    if (results_left && bytes >= RESULT_BYTES && bytes < RESULT_BYTES + 100 && --results_left == 0)
        raise(results_signal);
    return sent;
}

/* Rank 1 has recovered, ranks 2 and 3 have not: it hears of that in its next operation, and all of them go on. It calls
 * epx_group_error_clear then, and they may still be in epx_mask_clean. */
static int tell_one(struct fixture *s, int cleans)
{
    const uint64_t begin = clock_ns();
    int good = 0;

    if (s->rank == 0) {
        if (!cleans)
            group_abort(s->group, EPX_ERR_TIMEOUT, 2);
        results_left = TOLD_ONE;
        results_signal = SIGKILL;
    }
    while (!cleans && !abort_word(s->group))
        usleep(200);
    for (int turn = 0; turn < 4 && !good; turn++) {
        const epx_status status =
            cleans && turn == 0 ? epx_mask_clean(s->group, NULL) : epx_group_error_clear(s->group);
        int32_t mask[RANKS];

        if (status == EPX_ERR_MISMATCH)
            return fixture_fail(s, epx_last_error());
        if (status != EPX_OK || fixture_sync(s, epx_mask_query(s->group, mask, NULL)) != EPX_OK)
            continue;
        for (int r = 0; r < RANKS; r++)
            fixture_set_active(s, r, mask[r]);
        s->w.round = 50;
        good = fixture_ll(s) == 0 && mask[1] && mask[2] && mask[3];
    }
    if (!good || slow_late(begin, DEADLINE_MS))
        return fixture_fail(s, "the ranks that live do not go on together at once");
    return survivors_meet();
}

static int coordinator_tells_one(struct fixture *s)
{
    return tell_one(s, 0);
}

static int coordinator_tells_one_that_cleans(struct fixture *s)
{
    return tell_one(s, 1);
}

static void a_recovery_that_one_rank_heard_of_is_repeated(void **state)
{
    char text[256];

    (void)state;
    assert_int_equal(run_story(&(struct story){.run = coordinator_tells_one, .first = 1}), 0);
    assert_int_equal(run_story(&(struct story){.run = coordinator_tells_one_that_cleans, .first = 1}), 0);
    if (net_ofi_ops.probe("tcp", text, sizeof(text)) == EPX_OK)
        assert_int_equal(
            run_story(&(struct story){.run = coordinator_tells_one_that_cleans, .ranks_per_node = 2, .first = 1}), 0);
}

/* Ranks 1 to 3 are well: nobody says of them with certainty that they are at fault. Rank 0 may be named. */
static int expect_no_accusation(struct fixture *s, int recovers)
{
    epx_error_info info = EPX_ERROR_INFO_INIT;

    if (recovers && !strstr(epx_last_error(), "may "))
        return fixture_fail(s, "a recovery is sure of who is at fault");
    (void)epx_group_error(s->group, &info);
    return info.peer <= 0 || strstr(info.message, "may ") ? 0 : fixture_fail(s, info.message);
}

/* The leader stops in the midst of a recovery, and goes on some time later. Whoever was told goes on, and hears of the
 * others; those that were not told give up, and meet it again. The leader finds, when it goes on, that all had come to
 * the next step, and must not go on by itself: they have given up since, and nothing that says so may be lost when it
 * resets its state. In the end all are there. */
static int leader_stops(struct fixture *s)
{
    const struct story *story = s->arg;
    int good = 0;

    if (s->rank == 0) {
        results_left = story->at;
        results_signal = SIGSTOP;
    }
    for (int turn = 0; turn < 8 && !good; turn++) {
        const epx_status status = turn ? epx_group_error_clear(s->group) : epx_mask_clean(s->group, NULL);

        if (status != EPX_OK && expect_no_accusation(s, 1))
            return -1;
        s->w.round = 50;
        if (status == EPX_OK) {
            good = fixture_ll(s) == 0;
            if (!good && (!strncmp(s->why, "low latency: ", 13) || expect_no_accusation(s, 0)))
                return -1;
        }
    }
    if (!good || expect_mask(s, 1))
        return fixture_fail(s, "not all ranks go on together");
    return fixture_meet(s) || fixture_ht(s) ? -1 : 0;
}

/* Before anybody gives up, and when all have: the steps of a recovery have two deadlines each. */
static void a_leader_that_stops_leaves_nobody_behind(void **state)
{
    static const struct story stories[] = {
        {.run = leader_stops, .lives = 1, .stops = 75, .at = TOLD_ONE},
        {.run = leader_stops, .lives = 1, .stops = 250, .at = TOLD_CLOSED},
        {.run = leader_stops, .lives = 1, .stops = 250, .at = TOLD_RESET},
        {.run = leader_stops, .lives = 1, .stops = 250, .at = TOLD_ONE, .ranks_per_node = 2}};
    char text[256];

    (void)state;
    for (size_t i = 0; i < sizeof(stories) / sizeof(*stories); i++) {
        struct story story = stories[i];

        if (story.ranks_per_node && net_ofi_ops.probe("tcp", text, sizeof(text)) != EPX_OK)
            continue;
        assert_int_equal(run_story(&story), 0);
    }
}

static void both_ways(void **state)
{
    const fixture_fn run = (fixture_fn)(uintptr_t)*state;
    char text[256];

    assert_int_equal(run_story(&(struct story){.run = run}), 0);
    if (net_ofi_ops.probe("tcp", text, sizeof(text)) != EPX_OK)
        fprintf(stderr, "not across nodes: %s\n", text);
    else
        assert_int_equal(run_story(&(struct story){.run = run, .ranks_per_node = 2}), 0);
}

static int set_up(void **state)
{
    (void)state;
    setenv("EPX_NET", "ofi:tcp", 1);
    setenv("MASTER_ADDR", "127.0.0.1", 0);
    return 0;
}

UNIT_MAIN_WITHIN(set_up, NULL,
                 UNIT_CASE("high_throughput_goes_on_without_a_dead_rank", both_ways, missed_by_high_throughput),
                 UNIT_CASE("low_latency_goes_on_at_once_and_high_throughput_after_a_membership_round", both_ways,
                           missed_by_low_latency),
                 UNIT_CASE("what_one_rank_masks_all_leave_out", both_ways, masked_by_one),
                 UNIT_CASE("cleaning_the_mask_does_not_wait_for_the_dead", both_ways, cleaned),
                 cmocka_unit_test(a_rank_that_another_node_has_masked_is_told),
                 cmocka_unit_test(a_recovery_that_one_rank_heard_of_is_repeated),
                 cmocka_unit_test(a_leader_that_stops_leaves_nobody_behind))
