/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who is named: one rank is killed (SIGKILL), or stopped (SIGSTOP), at a random moment of an exchange, and all others
 * are asked who it was (epx_group_error: peer and message). Ranks end as soon as they have been told, as a program does
 * that gives up: who hears of it late sees healthy ranks end. One node and two, low latency and high throughput.
 *
 *   victim            parent                              survivors
 *   works         ->  kill or stop at a random moment
 *                     waits until all have ended      <-  a call fails: write down peer and message; end
 *                     a stopped one goes on           ->  it must not name itself
 *
 * EPX_TEST_EVENTS: how many of each kind (4 networks and modes x killed, stopped); `make culprit` has 50: 200 kills and
 * 200 stops. An event is right if every survivor names the victim; the bar is 99 %, and no survivor says of a healthy
 * rank that it failed. ctest: cost=24 labels=ranks,slow,noasan,notsan sleeps
 */
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

enum { MOST_RANKS = 8, DEADLINE_MS = 2000, LIMIT_MS = 30000, MOST_ROUNDS = 100000 };

struct story {
    const char *net; /* NULL: one node */
    int mode;        /* epx_mode */
    int signal;
};

/* What one rank writes down for the parent. */
struct told {
    atomic_int round, over;
    int made; /* the group */
    int status, peer;
    char message[256];
};

static uint64_t random_state = 1;
static int nranks = 4;

static uint32_t draw(uint32_t below)
{
    return xorshift(&random_state) % below;
}

/* ---- A rank ------------------------------------------------------------------------------------------------------ */

/* Sometimes it does something else between two operations, for longer than these take. */
static void work_elsewhere(void)
{
    if (draw(4) == 0)
        usleep(draw(3000));
}

struct job {
    const struct story *story;
    struct told *told;
};

static int be_rank(int rank, void *arg)
{
    const struct story *story = ((struct job *)arg)->story;
    struct told *told = &((struct job *)arg)->told[rank];
    epx_group_config config = fixture_config(slow_ms(DEADLINE_MS));
    struct fixture *s = calloc(1, sizeof(*s));
    epx_error_info info = EPX_ERROR_INFO_INIT;

    if (!s)
        return 1;
    random_state += (uint64_t)rank; /* ranks differ in where they are late */
    config.modes = (uint32_t)story->mode;
    config.ranks_per_node = story->net ? nranks / 2 : 0;
    snprintf(config.net, sizeof(config.net), "%s", story->net ? story->net : "");
    told->made = fixture_open(s, rank, nranks, NULL, &config) == 0;
    if (told->made) {
        for (int i = 0; i < MOST_ROUNDS; i++) {
            atomic_store(&told->round, i);
            work_elsewhere();
            if (story->mode == EPX_LOW_LATENCY ? fixture_ll(s) : fixture_ht(s))
                break;
        }
        told->status = epx_group_error(s->group, &info);
        told->peer = info.peer;
        snprintf(told->message, sizeof(told->message), "%.255s", told->status ? info.message : s->why);
    } else {
        snprintf(told->message, sizeof(told->message), "the group was not created: %.200s", s->why);
    }
    atomic_store(&told->over, 1);
    exit(0); /* without a farewell, and while the fixture is in reach: a leak check has nothing to say */
}

/* ---- The parent -------------------------------------------------------------------------------------------------- */

static void start(const struct story *story, pid_t *pids, struct told *told)
{
    struct job job = {story, told};

    child_world(nranks);
    assert_int_equal(child_start_ranks(pids, nranks, be_rank, &job), 0);
}

static void strike(const struct story *story, pid_t pid, const struct told *victim)
{
    const uint64_t deadline = clock_ns() + (uint64_t)slow_ms(LIMIT_MS) * 1000000;
    const int at = 3 + (int)draw(40);

    while (atomic_load(&victim->round) < at && !atomic_load(&victim->over) && clock_ns() < deadline)
        usleep(100);
    usleep(draw(3000));
    kill(pid, story->signal);
}

/* 1: the rank has ended in time and by itself. */
static int await_end(pid_t pid, uint64_t deadline)
{
    int status = 0;
    pid_t ended;

    while ((ended = waitpid(pid, &status, WNOHANG)) == 0 && clock_ns() < deadline)
        usleep(2000);
    if (ended == pid)
        return WIFEXITED(status) && WEXITSTATUS(status) == 0;
    kill(pid, SIGKILL);
    waitpid(pid, &status, 0);
    return 0;
}

struct counts {
    int events, right, named, survivors, accused, selves, stuck;
};

/* Does a survivor name the victim, and in words? */
static int names(const struct told *told, int victim)
{
    char text[16];

    snprintf(text, sizeof(text), "rank %d", victim);
    return told->status != EPX_OK && told->peer == victim && strstr(told->message, text) != NULL;
}

static void judge(const struct told *told, int rank, int victim, struct counts *c)
{
    c->survivors++;
    if (names(told, victim)) {
        c->named++;
        return;
    }
    c->accused += told->peer >= 0 && !strstr(told->message, "may ");
    c->selves += told->peer == rank;
    fprintf(stderr, "rank %d of %d, victim %d: status %d, peer %d: %s\n", rank, nranks, victim, told->status,
            told->peer, told->message);
}

/* 0: the event did not take place, because the machine was too busy to make the group. */
static int play(const struct story *story, struct counts *c)
{
    const size_t bytes = sizeof(struct told) * MOST_RANKS;
    struct told *told = child_share(bytes);
    const int victim = (int)draw((uint32_t)nranks), before = c->named;
    int made = 1;
    uint64_t deadline;
    pid_t pids[MOST_RANKS];

    assert_non_null(told);
    for (int r = 0; r < nranks; r++)
        told[r].peer = -1;
    start(story, pids, told);
    strike(story, pids[victim], &told[victim]);
    deadline = clock_ns() + (uint64_t)slow_ms(LIMIT_MS) * 1000000;
    for (int r = 0; r < nranks; r++) {
        if (r == victim)
            continue;
        c->stuck += !await_end(pids[r], deadline);
        made &= told[r].made;
        if (told[r].made)
            judge(&told[r], r, victim, c);
    }
    kill(pids[victim], SIGCONT);
    c->stuck +=
        !await_end(pids[victim], clock_ns() + (uint64_t)slow_ms(LIMIT_MS) * 1000000) && story->signal == SIGSTOP;
    c->selves += told[victim].peer == victim;
    c->events += made;
    c->right += made && c->named - before == nranks - 1;
    child_unshare(told, bytes);
    return made;
}

static void survivors_name_the_victim(void **state)
{
    const struct story *story = *state;
    const int events = getenv("EPX_TEST_EVENTS") ? atoi(getenv("EPX_TEST_EVENTS")) : 1;
    struct counts c = {0};

    unit_need_net(story->net);
    for (int tries = 0; c.events < events && tries < 2 * events + 5; tries++) {
        nranks = 4 + 2 * (int)draw(3);
        if (!play(story, &c))
            print_message("the group could not be made: again\n");
    }
    assert_int_equal(c.events, events);
    fprintf(stderr,
            "%s, %s, %s: %d of %d events right; %d of %d survivors name the victim; %d name a healthy rank with "
            "certainty, %d themselves; %d did not end\n",
            story->signal == SIGKILL ? "killed" : "stopped", story->net ? story->net : "one node",
            story->mode == EPX_LOW_LATENCY ? "low latency" : "high throughput", c.right, c.events, c.named, c.survivors,
            c.accused, c.selves, c.stuck);
    assert_int_equal(c.stuck, 0);
    assert_int_equal(c.selves, 0);
    assert_int_equal(c.accused, 0);
    assert_true(c.right * 100 >= c.events * 99);
}

#define STORY(name, net, mode, signal) UNIT_CASE(name, survivors_name_the_victim, &((struct story){net, mode, signal}))

static int set_up(void **state)
{
    (void)state;
    random_state = getenv("EPX_TEST_SEED") ? strtoull(getenv("EPX_TEST_SEED"), NULL, 0) : clock_ns();
    child_forget_settings();
    setenv("EPX_BOOT_TIMEOUT_MS", "60000", 1); /* a busy machine */
    setenv("EPX_LOG", "error", 0);
    return 0;
}

UNIT_MAIN_WITHIN(set_up, NULL, STORY("killed_ll_on_one_node", NULL, EPX_LOW_LATENCY, SIGKILL),
                 STORY("killed_ht_on_one_node", NULL, EPX_HIGH_THROUGHPUT, SIGKILL),
                 STORY("killed_ll_on_two_nodes", "ofi:tcp", EPX_LOW_LATENCY, SIGKILL),
                 STORY("killed_ht_on_two_nodes", "ofi:tcp", EPX_HIGH_THROUGHPUT, SIGKILL),
                 STORY("stopped_ll_on_one_node", NULL, EPX_LOW_LATENCY, SIGSTOP),
                 STORY("stopped_ht_on_one_node", NULL, EPX_HIGH_THROUGHPUT, SIGSTOP),
                 STORY("stopped_ll_on_two_nodes", "ofi:tcp", EPX_LOW_LATENCY, SIGSTOP),
                 STORY("stopped_ht_on_two_nodes", "ofi:tcp", EPX_HIGH_THROUGHPUT, SIGSTOP))
