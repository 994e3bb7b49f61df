/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One rank gets no memory while the group recovers: the n-th allocation of epx_group_error_clear, epx_mask_clean or
 * epx_group_join fails, for n = 1, 2, ... until there is no such allocation. Nobody waits for a deadline: either all
 * ranks recover, or all learn at once which rank could not, and recover by another call once it has memory.
 *
 *   rank                                    victim
 *   creates a group, which fails, or whose rank 3 ends
 *   recovers, again and again               the same: the n-th allocation fails, or the n-th and the next two
 *   until all are there; then one round of low latency with the right results
 *
 * In one case the victim has no descriptors for a while instead. With masks every eighth allocation fails, from a
 * random one on; with EPX_TEST_SCALE of 8 or more every one.
 * ctest: cost=6 labels=ranks,noasan,notsan,noclang sleeps
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "group/abort.h"
#include "tests/lib/child.h"
#include "tests/lib/failing_malloc.h"
#include "tests/lib/fixture.h"
#include "tests/lib/prop.h"
#include "tests/lib/slow.h"
#include "tests/lib/unit_net.h"
#include "util/clock.h"

enum { RANKS = 4, PLACE = 3 /* of the rank that is replaced */, TURNS = 8, MAX_FAILED = 3, NEVER = 1 << 30 };
enum { DEADLINE_MS = 6000, SOON_MS = 2500, FEW = 8, NO_FILES_US = 300000 };

enum call { CLEAR, CLEAN, JOIN };

struct story {
    const char *net; /* NULL: one node */
    enum call call;
    int masks, victim, burst;
    int files; /* instead, the victim has no descriptors for a while */
};

/* What the processes share. */
struct shared {
    struct countdown countdown;
    char ticket[EPX_TICKET_BYTES];
    struct told {
        epx_status status;
        int there, ms;
        char message[300];
    } told[RANKS][TURNS];
    int turns[RANKS];
    atomic_int met, ready, joining, not_joined;
};

struct job {
    const struct story *story;
    struct shared *shared;
};

/* Until `count` is reached. */
static int await(const atomic_int *word, int count)
{
    const uint64_t deadline = clock_ns() + (uint64_t)slow_ms(2 * DEADLINE_MS) * 1000000;

    while (atomic_load(word) < count && clock_ns() < deadline)
        usleep(200);
    return atomic_load(word) < count ? -1 : 0;
}

/* The ranks that call: without the process that joins. */
static int callers(const struct story *story)
{
    return story->call == JOIN ? RANKS - 1 : RANKS;
}

static epx_group_config config_of(const struct story *story)
{
    epx_group_config config = fixture_config(slow_ms(DEADLINE_MS));

    config.enable_mask = story->masks;
    config.ranks_per_node = story->net ? RANKS / 2 : 0;
    snprintf(config.net, sizeof(config.net), "%s", story->net ? story->net : "");
    return config;
}

/* ---- A rank ------------------------------------------------------------------------------------------------------ */

/* How many ranks take part now. */
static int members(struct fixture *s, const struct story *story)
{
    int32_t mask[RANKS] = {1, 1, 1, 1};
    int count = 0;

    if (story->masks && (epx_mask_query(s->group, mask, NULL) != EPX_OK || epx_stream_sync(s->group, NULL) != EPX_OK))
        return -1;
    for (int r = 0; r < RANKS; r++) {
        fixture_set_active(s, r, mask[r]);
        count += mask[r];
    }
    return count;
}

/* Until there are descriptors again. */
static void *go_without_files(void *arg)
{
    const struct rlimit *files = arg;

    usleep(NO_FILES_US);
    setrlimit(RLIMIT_NOFILE, files);
    return NULL;
}

static void recover(struct fixture *s, const struct job *job, struct told *told)
{
    const uint64_t begin = clock_ns();
    const int without = s->rank == job->story->victim && job->story->files;
    struct rlimit files, none = {0, 0};
    pthread_t thread;

    getrlimit(RLIMIT_NOFILE, &files);
    none.rlim_max = files.rlim_max;
    if (s->rank == job->story->victim && !job->shared->countdown.when_ns)
        countdown = &job->shared->countdown;
    if (without)
        assert_true(!setrlimit(RLIMIT_NOFILE, &none) && !pthread_create(&thread, NULL, go_without_files, &files));
    told->status = job->story->call == CLEAR ? epx_group_error_clear(s->group) : epx_mask_clean(s->group, NULL);
    countdown = NULL;
    if (without)
        pthread_join(thread, NULL);
    told->ms = (int)((clock_ns() - begin) / 1000000);
    if (told->status != EPX_OK)
        snprintf(told->message, sizeof(told->message), "%.299s", epx_last_error());
    else
        told->there = members(s, job->story);
}

/* All ranks have recovered in this turn. */
static int all_there(const struct job *job, int turn)
{
    const int expected = atomic_load(&job->shared->not_joined) ? RANKS - 1 : RANKS;

    for (int r = 0; r < callers(job->story); r++)
        if (job->shared->told[r][turn].status != EPX_OK || job->shared->told[r][turn].there != expected)
            return 0;
    return 1;
}

/* All take the same number of turns: they decide between two meetings, when nobody writes. */
static int take_turns(struct fixture *s, const struct job *job)
{
    struct shared *shared = job->shared;
    const int n = callers(job->story);

    for (int turn = 0, over = 0; turn < TURNS && !over; turn++) {
        if (job->story->call == JOIN && turn)
            usleep(20000);
        recover(s, job, &shared->told[s->rank][turn]);
        shared->turns[s->rank] = turn + 1;
        atomic_fetch_add(&shared->met, 1);
        if (await(&shared->met, (2 * turn + 1) * n))
            return -1;
        over = all_there(job, turn) || !job->story->masks;
        atomic_fetch_add(&shared->met, 1);
        if (await(&shared->met, (2 * turn + 2) * n))
            return -1;
    }
    return 0;
}

static int works(struct fixture *s, const struct job *job)
{
    if (!all_there(job, job->shared->turns[s->rank] - 1) || (job->story->call == JOIN && job->story->victim == PLACE))
        return 0;
    s->w.round = 100;
    return fixture_ll(s);
}

static int be_member(struct fixture *s, const struct job *job)
{
    struct shared *shared = job->shared;
    const struct story *story = job->story;

    if (story->call == JOIN && s->rank == 0 &&
        epx_group_ticket(s->group, shared->ticket, sizeof(shared->ticket)) != EPX_OK)
        return fixture_fail(s, "ticket");
    atomic_fetch_add(&shared->ready, 1);
    if (await(&shared->ready, RANKS))
        return fixture_fail(s, "the ranks are not ready");
    if (story->call == JOIN && s->rank == PLACE)
        _exit(0); /* as a rank that is killed */
    if (story->call == CLEAR && s->rank == 1)
        group_abort(s->group, EPX_ERR_TIMEOUT, 2);
    while (story->call == CLEAR && !abort_word(s->group))
        usleep(200);
    if (story->call == JOIN && await(&shared->joining, 1))
        return fixture_fail(s, "nobody joins");
    usleep(story->call == JOIN ? 20000 : 0);
    return take_turns(s, job) ? fixture_fail(s, "turns") : works(s, job);
}

static int be_rank(int rank, void *arg)
{
    const struct job *job = arg;
    const epx_group_config config = config_of(job->story);
    struct fixture *s = calloc(1, sizeof(*s));
    int rc = !s || fixture_open(s, rank, RANKS, NULL, &config) || be_member(s, job);

    if (rc)
        fprintf(stderr, "rank %d: %s\n", rank, s ? s->why : "no memory");
    if (s)
        fixture_close(s);
    free(s);
    return rc;
}

/* The process that joins with its n-th allocation failing; the fixture's own must not. */
static int be_poor_joiner(struct shared *shared, const epx_group_config *config)
{
    struct told *told = &shared->told[PLACE][0];
    epx_group *group;

    countdown = &shared->countdown;
    told->status = epx_group_join(&group, shared->ticket, PLACE, config, slow_ms(DEADLINE_MS));
    countdown = NULL;
    if (told->status == EPX_OK)
        return epx_group_destroy(group) != EPX_OK;
    snprintf(told->message, sizeof(told->message), "%.299s", epx_last_error());
    atomic_store(&shared->not_joined, 1);
    return 0;
}

static int be_joiner(const struct job *job)
{
    const epx_group_config config = config_of(job->story);
    struct shared *shared = job->shared;
    struct fixture *s = calloc(1, sizeof(*s));
    int rc;

    if (!s || await(&shared->ready, RANKS))
        return 1;
    atomic_store(&shared->joining, 1);
    if (job->story->victim == PLACE)
        return be_poor_joiner(shared, &config);
    rc =
        fixture_join(s, shared->ticket, PLACE, RANKS, &config, slow_ms(DEADLINE_MS)) || members(s, job->story) != RANKS;
    s->w.round = 100;
    rc = rc || fixture_ll(s);
    if (rc)
        fprintf(stderr, "the process that joins: %s\n", s->why);
    fixture_close(s);
    free(s);
    return rc;
}

/* ---- The parent -------------------------------------------------------------------------------------------------- */

static int turn_is_right(const struct story *story, const struct shared *shared, int turn, int rank)
{
    const struct told *t = &shared->told[rank][turn];
    char name[32];
    int failed = 0;

    for (int r = 0; r < callers(story); r++)
        failed += shared->told[r][turn].status != EPX_OK;
    snprintf(name, sizeof(name), "rank %d", story->victim);
    return t->ms < slow_ms(SOON_MS) && !failed == !t->status && !strstr(t->message, "epx_group_create") &&
           (!failed || rank == story->victim || strstr(t->message, name));
}

static int judge(const struct story *story, const struct shared *shared)
{
    const struct countdown *c = &shared->countdown;
    int wrong = 0;

    for (int r = 0; r < callers(story); r++) {
        const int turns = shared->turns[r];

        if (!turns || (story->masks && shared->told[r][turns - 1].status != EPX_OK) || turns == TURNS)
            wrong++;
        for (int turn = 0; turn < turns; turn++)
            wrong += !turn_is_right(story, shared, turn, r);
    }
    for (int r = 0; wrong && r < RANKS; r++)
        for (int turn = 0; turn < shared->turns[r] || (r == PLACE && !turn); turn++)
            fprintf(stderr, "allocation %d (0x%lx) of rank %d: rank %d, turn %d, status %d after %d ms: %s\n",
                    c->target, (unsigned long)c->caller, story->victim, r, turn, (int)shared->told[r][turn].status,
                    shared->told[r][turn].ms, shared->told[r][turn].message);
    return !wrong;
}

/* 1: well; 0: not; -1: there is no such allocation. */
static int fail_one(const struct story *story, int n)
{
    struct shared *shared = child_share(sizeof(*shared));
    struct job job = {story, shared};
    pid_t pids[RANKS + 1];
    int count = RANKS, well;

    assert_non_null(shared);
    shared->countdown.target = n;
    shared->countdown.last = n + story->burst;
    child_world(RANKS);
    assert_int_equal(child_start_ranks(pids, RANKS, be_rank, &job), 0);
    if (story->call == JOIN) {
        pids[count] = child_fork();
        assert_true(pids[count] >= 0);
        if (pids[count++] == 0)
            exit(be_joiner(&job));
    }
    well = child_failures(pids, count) == 0;
    well &= judge(story, shared);
    if (!shared->countdown.when_ns)
        well = well ? -1 : 0;
    child_unshare(shared, sizeof(*shared));
    return well;
}

static void all_recover_or_learn_who_cannot(void **state)
{
    const struct story *story = *state;
    const int step = !story->masks || prop_scale() >= FEW ? 1 : FEW;
    int tried = 0, wrong = 0, well = 1;

    unit_need_net(story->net);
    for (int n = story->files ? NEVER : 1 + (int)(clock_ns() / 1000 % (uint64_t)step); well >= 0 && wrong < MAX_FAILED;
         n += step, tried++) {
        well = fail_one(story, n);
        wrong += well == 0;
    }
    print_message("%d allocations failed, %d not as they should\n", tried - 1, wrong);
    assert_int_equal(wrong, 0);
    assert_in_range(tried, 1, 1000);
}

#define STORY(name, ...) UNIT_CASE(name, all_recover_or_learn_who_cannot, &((struct story){__VA_ARGS__}))

static int set_up(void **state)
{
    (void)state;
    child_forget_settings();
    setenv("EPX_LOG", "none", 0);
    return 0;
}

UNIT_MAIN_WITHIN(set_up, NULL, STORY("error_clear_rank_0", NULL, CLEAR, 0, 0, 0, 0),
                 STORY("error_clear_rank_2", NULL, CLEAR, 0, 2, 0, 0),
                 STORY("mask_clean_rank_0", NULL, CLEAN, 1, 0, 0, 0),
                 STORY("error_clear_with_masks_rank_1_three_times", NULL, CLEAR, 1, 1, 2, 0),
                 STORY("error_clear_rank_2_without_descriptors", NULL, CLEAR, 1, 2, 0, 1),
                 STORY("join_rank_0", NULL, JOIN, 1, 0, 0, 0),
                 STORY("join_the_process_that_joins", NULL, JOIN, 1, PLACE, 0, 0),
                 STORY("error_clear_on_two_nodes_rank_0", "ofi:tcp", CLEAR, 1, 0, 0, 0),
                 STORY("mask_clean_on_two_nodes_rank_3", "ofi:tcp", CLEAN, 1, 3, 0, 0))
