/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One rank of four is killed (SIGKILL), or stopped for some seconds (SIGSTOP, SIGCONT), while its group is made, works,
 * or ends: with the bootstrap over TCP, on one node and on two, over sockets and over shared memory. Whatever the
 * others find, and the one that was stopped when it looks up again, they end by themselves, each call of theirs with a
 * status, and within a bound that follows from their deadlines; nobody crashes, and who goes on gets what is right.
 *
 * Over shm a process that is killed may hold a lock of libfabric's, for which the others then spin for ever inside the
 * library: that must end as any failure does. ctest: cost=93 timeout=2400 labels=ranks,slow sleeps
 */
#include <glob.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "util/clock.h"
#include "tests/lib/child.h"
#include "tests/lib/fixture.h"
#include "tests/lib/slow.h"
#include "tests/lib/unit_net.h"
#include "tests/lib/xorshift.h"

/* A rank that starts over may wait four times for a membership round of twice the deadline; closing has two seconds. */
enum { RANKS = 4, ROUNDS = 150, DEADLINE_MS = 1500, LIMIT_MS = 80000 };

enum phase { PHASE_BORN, PHASE_MAKES, PHASE_WORKS, PHASE_ENDS, PHASE_OVER };
enum outcome { UNKNOWN, DONE, WENT_ON, TOLD, STUCK, WRONG, OUTCOMES };

static const char *const phases[] = {"born", "makes its group", "works", "ends its group", "over"};
static const char *const outcomes[OUTCOMES] = {"nothing", "done", "went on", "told", "stuck", "given wrong results"};

struct story {
    const char *net; /* NULL: one node */
    int enable_mask;
    int signal;
    enum phase phase;
};

/* What the ranks of one story write for whoever watches. */
struct table {
    atomic_int phase[RANKS], round[RANKS], outcome[RANKS];
    atomic_int waits; /* this rank does not finish its rounds before it is struck; -1: none */
};

static uint64_t random_state = 1;

static uint32_t draw(uint32_t below)
{
    return xorshift(&random_state) % below;
}

/* ---- A rank ------------------------------------------------------------------------------------------------------ */

/* A dead rank is known to be dead, and sockets of its take nobody with them. */
static int must_go_on(const struct story *story)
{
    return story->enable_mask && story->signal == SIGKILL && story->phase == PHASE_WORKS &&
           (!story->net || !strcmp(story->net, "ofi:tcp"));
}

/* Where survivors must go on, none of them may take another for dead that merely has no core. */
static int deadline_of(const struct story *story)
{
    return slow_ms(must_go_on(story) ? 2 * DEADLINE_MS : DEADLINE_MS);
}

/* With enable_mask low latency masks whom it misses, each rank by itself; a consensus on who is left follows only a
 * failure of high throughput. */
static int rounds(struct fixture *s, const struct story *story, struct table *table)
{
    for (int i = 0; i < ROUNDS; i++) {
        atomic_store(&table->round[s->rank], i);
        while (i == ROUNDS - 1 && s->rank == atomic_load(&table->waits))
            usleep(100); /* the parent has had no core yet */
        if ((!story->enable_mask && fixture_ll(s)) || fixture_ht(s))
            return -1;
    }
    return 0;
}

/* A round has failed: told by a status, or found by the check of what came. */
static enum outcome how_it_failed(const struct fixture *s)
{
    return strncmp(s->why, "low latency: ", 13) && strncmp(s->why, "high throughput: ", 17) ? TOLD : WRONG;
}

/* After a failure: with those that are left, where that is possible. One that was stopped may be back among them. */
static enum outcome go_on(struct fixture *s, const struct story *story, struct table *table)
{
    int32_t mask[RANKS];

    if (!story->enable_mask || epx_group_error_clear(s->group) != EPX_OK ||
        epx_mask_query(s->group, mask, NULL) != EPX_OK || epx_stream_sync(s->group, NULL) != EPX_OK)
        return TOLD;
    for (int r = 0; r < RANKS; r++)
        fixture_set_active(s, r, mask[r]);
    s->w.round = 1000; /* that of all who are left */
    return rounds(s, story, table) == 0 ? WENT_ON : how_it_failed(s);
}

struct job {
    const struct story *story;
    struct table *table;
};

static int be_rank(int rank, void *arg)
{
    const struct story *story = ((struct job *)arg)->story;
    struct table *table = ((struct job *)arg)->table;
    epx_group_config config = fixture_config(deadline_of(story));
    struct fixture *s = calloc(1, sizeof(*s));
    enum outcome outcome = TOLD;

    if (!s)
        return 1;
    config.enable_mask = story->enable_mask;
    config.ranks_per_node = story->net ? 2 : 0;
    snprintf(config.net, sizeof(config.net), "%s", story->net ? story->net : "");
    atomic_store(&table->phase[rank], PHASE_MAKES);
    if (fixture_open(s, rank, RANKS, NULL, &config) == 0) {
        atomic_store(&table->phase[rank], PHASE_WORKS);
        if (rounds(s, story, table) == 0)
            outcome = DONE;
        else if (how_it_failed(s) == TOLD)
            outcome = go_on(s, story, table);
        else
            outcome = WRONG;
    }
    atomic_store(&table->phase[rank], PHASE_ENDS);
    if (s->group && epx_group_destroy(s->group) == EPX_ERR_TIMEOUT)
        outcome = STUCK;
    s->group = NULL;
    fixture_close(s);
    free(s);
    atomic_store(&table->outcome[rank], outcome);
    atomic_store(&table->phase[rank], PHASE_OVER);
    return 0;
}

/* ---- The parent -------------------------------------------------------------------------------------------------- */

/* At a random moment of the phase. */
static void strike(const struct story *story, pid_t pid, int victim, struct table *table)
{
    const uint64_t deadline = clock_ns() + (uint64_t)slow_ms(LIMIT_MS) * 1000000;
    const atomic_int *phase = &table->phase[victim], *round = &table->round[victim];
    const int at = (int)draw(ROUNDS - 20);

    while (atomic_load(phase) < (int)story->phase || (story->phase == PHASE_WORKS && atomic_load(round) < at)) {
        if (clock_ns() > deadline || atomic_load(phase) > (int)story->phase)
            break;
        usleep(50);
    }
    usleep(draw(story->phase == PHASE_MAKES ? 60000 : 2000));
    kill(pid, story->signal);
    if (story->signal == SIGKILL)
        return;
    atomic_store(&table->waits, -1);
    usleep((useconds_t)draw(slow_ms(4 * DEADLINE_MS)) * 1000);
    kill(pid, SIGCONT);
}

/* libfabric's shm names files by process, and leaves those of one that was killed. */
static void sweep(pid_t pid)
{
    char pattern[64];
    glob_t found;

    snprintf(pattern, sizeof(pattern), "/dev/shm/%d:*", (int)pid);
    if (glob(pattern, 0, NULL, &found) != 0)
        return;
    for (size_t i = 0; i < found.gl_pathc; i++)
        unlink(found.gl_pathv[i]);
    globfree(&found);
}

/* How many ranks did not end, or not well. */
static int reap(const struct story *story, const pid_t *pids, int victim, struct table *table)
{
    const uint64_t deadline = clock_ns() + (uint64_t)slow_ms(LIMIT_MS) * 1000000;
    int failures = 0;

    for (int r = 0; r < RANKS; r++) {
        int status = 0;
        pid_t ended = 0;

        while ((ended = waitpid(pids[r], &status, WNOHANG)) == 0 && clock_ns() < deadline)
            usleep(1000);
        if (r == victim && story->signal == SIGKILL)
            continue;
        if (ended == pids[r] && WIFEXITED(status) && WEXITSTATUS(status) == 0) {
            const int outcome = atomic_load(&table->outcome[r]);

            if (outcome == WENT_ON || (outcome != WRONG && !must_go_on(story)))
                continue;
            fprintf(stderr, "rank %d was %s and did not go on\n", r, outcomes[outcome]);
            failures++;
            continue;
        }
        failures++;
        fprintf(stderr, "rank %d, %s, round %d: ", r, phases[atomic_load(&table->phase[r])],
                atomic_load(&table->round[r]));
        if (ended == 0)
            fprintf(stderr, "has not ended after %d ms\n", slow_ms(LIMIT_MS));
        else
            fprintf(stderr, "ended with status %#x\n", (unsigned)status);
        if (ended == 0 && kill(pids[r], SIGKILL) == 0)
            waitpid(pids[r], &status, 0);
    }
    if (failures)
        fprintf(stderr, "rank %d was %s while it %s; %s, mask %d\n", victim,
                story->signal == SIGKILL ? "killed" : "stopped", phases[story->phase],
                story->net ? story->net : "one node", story->enable_mask);
    return failures;
}

static int play(const struct story *story, int *counts)
{
    struct table *table = child_share(sizeof(*table));
    struct job job = {story, table};
    const int victim = (int)draw(RANKS);
    pid_t pids[RANKS];
    int failures;

    assert_non_null(table);
    atomic_store(&table->waits, story->phase == PHASE_WORKS ? victim : -1);
    child_world(RANKS);
    assert_int_equal(child_start_ranks(pids, RANKS, be_rank, &job), 0);
    strike(story, pids[victim], victim, table);
    failures = reap(story, pids, victim, table);
    for (int r = 0; r < RANKS; r++)
        sweep(pids[r]);
    for (int r = 0; r < RANKS; r++)
        counts[r == victim && story->signal == SIGKILL ? UNKNOWN : atomic_load(&table->outcome[r])]++;
    child_unshare(table, sizeof(*table));
    return failures;
}

struct strike {
    const char *net; /* NULL: one node */
    int signal;
};

/* EPX_TEST_KILLS: how often each. */
static void in_every_phase(void **state)
{
    const char *net = ((const struct strike *)*state)->net;
    const int sig = ((const struct strike *)*state)->signal;
    const int times = getenv("EPX_TEST_KILLS") ? atoi(getenv("EPX_TEST_KILLS")) : 1;
    int failures = 0, counts[OUTCOMES] = {0};

    unit_need_net(net);
    for (int i = 0; i < times; i++)
        for (int phase = PHASE_MAKES; phase <= PHASE_ENDS; phase++)
            for (int mask = 0; mask <= 1; mask++)
                failures += play(&(struct story){net, mask, sig, (enum phase)phase}, counts);
    for (int i = DONE; i < OUTCOMES; i++)
        fprintf(stderr, "%s %d %s", i == DONE ? "ranks that were left:" : ",", counts[i], outcomes[i]);
    fprintf(stderr, "\n");
    assert_int_equal(failures, 0);
}

static int set_up(void **state)
{
    (void)state;
    random_state = clock_ns();
    child_forget_settings();
    return 0;
}

UNIT_MAIN_WITHIN(set_up, NULL, UNIT_CASE("killed_on_one_node", in_every_phase, &((struct strike){NULL, SIGKILL})),
                 UNIT_CASE("killed_over_sockets", in_every_phase, &((struct strike){"ofi:tcp", SIGKILL})),
                 UNIT_CASE("killed_over_shared_memory", in_every_phase, &((struct strike){"ofi:shm", SIGKILL})),
                 UNIT_CASE("stopped_on_one_node", in_every_phase, &((struct strike){NULL, SIGSTOP})),
                 UNIT_CASE("stopped_over_sockets", in_every_phase, &((struct strike){"ofi:tcp", SIGSTOP})),
                 UNIT_CASE("stopped_over_shared_memory", in_every_phase, &((struct strike){"ofi:shm", SIGSTOP})))
