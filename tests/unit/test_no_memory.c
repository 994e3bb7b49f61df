/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One rank gets no memory: the n-th allocation of a group's creation fails, for n = 1, 2, ... until there is no such
 * allocation. Nobody waits for a deadline: either all ranks have the group, or all learn at once which rank has none.
 *
 *   rank                        victim
 *   creates a group             the same: all are connected
 *   creates another             the n-th allocation fails
 *   writes down what it is told, and does not end before all have: the end of a process would tell the others
 *
 * Every second allocation fails, from a random one on; on two nodes, where a creation takes longer, every eighth; with
 * EPX_TEST_SCALE of 8 or more every one.
 * ctest: cost=6 labels=ranks,noasan,notsan,noclang sleeps
 */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "util/clock.h"
#include "tests/lib/child.h"
#include "tests/lib/failing_malloc.h"
#include "tests/lib/fixture.h"
#include "tests/lib/prop.h"
#include "tests/lib/slow.h"
#include "tests/lib/unit_net.h"

enum { RANKS = 4, DEADLINE_MS = 20000, SOON_MS = 5000, PART_BYTES = 4096, FEW = 8 };

/* ---- A rank ------------------------------------------------------------------------------------------------------ */

struct story {
    const char *net; /* NULL: one node */
    int masks, victim;
    int callers; /* the caller's all-gather */
};

/* What the processes share. */
struct shared {
    struct countdown countdown;
    struct told {
        int status, ended;
        uint64_t when_ns;
        char message[300];
    } told[RANKS];
    atomic_int over;    /* ranks that know how their creation has ended */
    atomic_int arrived; /* at all-gathers, over all of them */
    char parts[2][RANKS * PART_BYTES];
};

struct job {
    const struct story *story;
    struct shared *shared;
    int rank, gathers;
};

static int await(atomic_int *count, int least, const atomic_int *left)
{
    const uint64_t deadline = clock_ns() + (uint64_t)slow_ms(DEADLINE_MS) * 1000000;

    while (atomic_load(count) < least && clock_ns() < deadline && !(left && atomic_load(left)))
        usleep(200);
    return atomic_load(count) < least;
}

/* In turn through two buffers: nobody is in an all-gather while another is in the one after the next. It fails once a
 * rank has left. */
static int gather(void *context, const void *send, void *recv, size_t bytes)
{
    struct job *job = context;
    char *parts = job->shared->parts[job->gathers & 1];

    if (bytes > PART_BYTES)
        return -1;
    memcpy(parts + (size_t)job->rank * bytes, send, bytes);
    atomic_fetch_add(&job->shared->arrived, 1);
    job->gathers++;
    if (await(&job->shared->arrived, job->gathers * RANKS, &job->shared->over))
        return -1;
    memcpy(recv, parts, RANKS * bytes);
    return 0;
}

static void create(struct job *job, const epx_group_config *config, epx_group **group)
{
    const epx_bootstrap boot = {
        .size = sizeof(boot), .rank = job->rank, .nranks = RANKS, .allgather = gather, .context = job};
    struct told *told = &job->shared->told[job->rank];

    told->status = epx_group_create(group, job->story->callers ? &boot : NULL, config);
    countdown = NULL;
    told->when_ns = clock_ns();
    if (told->status)
        snprintf(told->message, sizeof(told->message), "%.299s", epx_last_error());
}

static int be_rank(int rank, void *arg)
{
    struct job job = *(struct job *)arg;
    const struct story *story = job.story;
    epx_group_config config = fixture_config(slow_ms(DEADLINE_MS));
    epx_group *first = NULL, *second = NULL;

    job.rank = rank;
    config.ranks_per_node = story->net ? RANKS / 2 : 0;
    config.enable_mask = story->masks;
    snprintf(config.net, sizeof(config.net), "%s", story->net ? story->net : "");
    if (!story->callers) {
        config.ranks_per_node = 0;
        config.enable_mask = 0;
        create(&job, &config, &first);
        config.ranks_per_node = story->net ? RANKS / 2 : 0;
        config.enable_mask = story->masks;
    }
    if (rank == story->victim)
        countdown = &job.shared->countdown;
    create(&job, &config, &second);
    atomic_fetch_add(&job.shared->over, 1);
    (void)await(&job.shared->over, RANKS, NULL);
    if (first)
        epx_group_destroy(first);
    if (second)
        epx_group_destroy(second);
    job.shared->told[rank].ended = 1;
    return 0;
}

/* ---- The parent -------------------------------------------------------------------------------------------------- */

/* Whether a survivor knows who it was. A victim without the memory to receive what others send, its first three
 * allocations, has no way to tell them over a caller's all-gather. */
static int is_told(const struct story *story, const struct shared *shared, const struct told *told)
{
    char name[32];

    snprintf(name, sizeof(name), "rank %d", story->victim);
    return strstr(told->message, name) ||
           (story->callers && strstr(told->message, "the caller's all-gather") &&
            (shared->countdown.target < 3 || strstr(shared->told[story->victim].message, "no memory to receive from")));
}

/* Whether all went well when an allocation failed. */
static int judge(const struct story *story, const struct shared *shared)
{
    const struct countdown *c = &shared->countdown;
    int failed = 0, wrong = 0;

    for (int r = 0; r < RANKS; r++)
        failed += shared->told[r].status != EPX_OK;
    for (int r = 0; r < RANKS; r++) {
        const struct told *t = &shared->told[r];
        const int ms = c->when_ns ? (int)((int64_t)(t->when_ns - c->when_ns) / 1000000) : 0;

        if (t->ended && ms < slow_ms(SOON_MS) && !failed == !t->status && (!failed || c->when_ns) &&
            (!failed || r == story->victim || is_told(story, shared, t)))
            continue;
        wrong++;
        fprintf(stderr, "allocation %d (0x%lx) of rank %d: rank %d %s, status %d after %d ms: %s\n", c->target,
                (unsigned long)c->caller, story->victim, r, t->ended ? "ended" : "did not end", t->status, ms,
                t->message);
    }
    return !wrong;
}

/* 1: well; 0: not; -1: there is no such allocation. */
static int fail_one(const struct story *story, int n)
{
    struct shared *shared = child_share(sizeof(*shared));
    struct job job = {story, shared, 0, 0};
    pid_t pids[RANKS];
    int well;

    assert_non_null(shared);
    shared->countdown.target = n;
    child_world(RANKS);
    assert_int_equal(child_start_ranks(pids, RANKS, be_rank, &job), 0);
    well = !child_failures(pids, RANKS) && judge(story, shared);
    if (!shared->countdown.when_ns)
        well = well ? -1 : 0;
    child_unshare(shared, sizeof(*shared));
    return well;
}

static void all_learn_who_has_no_memory(void **state)
{
    const struct story *story = *state;
    const int step = prop_scale() >= FEW ? 1 : story->net ? FEW : 2;
    int tried = 0, wrong = 0, well = 1;

    unit_need_net(story->net);
    for (int n = 1 + (int)(clock_ns() / 1000 % (uint64_t)step); well >= 0; n += step, tried++) {
        well = fail_one(story, n);
        wrong += well == 0;
        if (wrong > 5)
            break;
    }
    print_message("%d allocations failed, %d not as they should\n", tried - 1, wrong);
    assert_int_equal(wrong, 0);
    assert_in_range(tried, 3, 1000);
}

#define STORY(name, net, masks, victim, callers) \
    UNIT_CASE(name, all_learn_who_has_no_memory, &((struct story){net, masks, victim, callers}))

static int set_up(void **state)
{
    (void)state;
    child_forget_settings();
    setenv("EPX_LOG", "none", 0);
    return 0;
}

UNIT_MAIN_WITHIN(set_up, NULL, STORY("rank_0_of_one_node", NULL, 0, 0, 0), STORY("rank_2_of_one_node", NULL, 0, 2, 0),
                 STORY("rank_1_by_the_callers_allgather", NULL, 1, 1, 1),
                 STORY("rank_0_of_two_nodes_with_masks", "ofi:tcp", 1, 0, 0),
                 STORY("rank_3_of_two_nodes_with_masks", "ofi:tcp", 1, 3, 0))
