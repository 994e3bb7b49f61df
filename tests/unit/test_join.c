/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Replacements: one rank of four is killed (SIGKILL), and another process takes its place; the group goes on with right
 * results in both modes. On one node and on two, rank 0 too, several times in a row; the replacement is killed too; it
 * comes before the others have noticed, or long after; processes that must be refused come with it.
 * ctest: cost=70 timeout=2400 labels=ranks,slow sleeps
 */
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "boot/membership.h"
#include "boot/secret.h"
#include "boot/ticket.h"
#include "group/objects.h"
#include "tests/lib/child.h"
#include "tests/lib/fixture.h"
#include "tests/lib/slow.h"
#include "tests/lib/unit_net.h"
#include "util/clock.h"
#include "util/watch.h"

enum { RANKS = 4, LAST_ROUNDS = 6, DEADLINE_MS = 3000, JOIN_MS = 30000, LIMIT_MS = 60000, MAX_KILLS = 8 };

enum when { EARLY /* before the others notice */, LATE /* after they have gone on without */ };

struct story {
    const char *net; /* NULL: one node */
    int low_latency; /* only low latency runs when a rank is killed: epx_mask_clean; else epx_group_error_clear */
    enum when when;
    int kills;
    int victim[MAX_KILLS];
    int doomed; /* so many replacements are killed while they join */
    void (*strangers)(const struct story *story, int victim, const char *ticket, pid_t *pids, int *count);
};

/* What the ranks write for the parent, and the other way round. */
struct table {
    char ticket[EPX_TICKET_BYTES];
    atomic_int kills; /* so far */
    atomic_int final; /* nobody is killed any more */
    atomic_int round[RANKS], since[RANKS] /* of which kill */, degraded[RANKS];
    atomic_ullong number[RANKS]; /* by which epx top knows the group */
};

static struct table *table;

static epx_group_config config_of(const struct story *story)
{
    epx_group_config config = fixture_config(slow_ms(DEADLINE_MS));

    config.enable_mask = 1;
    config.ranks_per_node = story->net ? 2 : 0;
    snprintf(config.net, sizeof(config.net), "%s", story->net ? story->net : "");
    return config;
}

/* ---- A rank ------------------------------------------------------------------------------------------------------ */

static int give_up(const struct fixture *s, const char *what)
{
    fprintf(stderr, "rank %d, %s: %s (%s)\n", s->rank, what, s->why, epx_last_error());
    return 1;
}

/* Until one fails, or `most` have been done: 0. */
static int rounds(struct fixture *s, int ll, int ht, int most)
{
    for (int i = 0; i < most; i++) {
        if ((ll && fixture_ll(s)) || (ht && fixture_ht(s)))
            return -1;
        atomic_fetch_add(&table->round[s->rank], 1);
    }
    return 0;
}

/* How many members there are, after which all do the same rounds. */
static int members(struct fixture *s, int kills)
{
    int32_t mask[RANKS];
    int count = 0;

    if (epx_mask_query(s->group, mask, NULL) != EPX_OK || epx_stream_sync(s->group, NULL) != EPX_OK)
        return -1;
    for (int r = 0; r < RANKS; r++) {
        fixture_set_active(s, r, mask[r]);
        count += mask[r];
    }
    s->w.round = 1000 * kills;
    atomic_store(&table->number[s->rank], s->group->watch ? s->group->watch->group : 0);
    atomic_store(&table->round[s->rank], 0);
    atomic_store(&table->degraded[s->rank], count < RANKS);
    atomic_store(&table->since[s->rank], kills);
    return count;
}

/* After a failure: until all places are taken again. */
static int until_all_there(struct fixture *s, const struct story *story)
{
    const uint64_t limit = clock_ns() + (uint64_t)slow_ms(JOIN_MS) * 1000000u;
    const int kills = atomic_load(&table->kills);
    /* Ranks must call the same: one that dies while it joins may be missed by low latency here, and there by the
     * other mode. */
    const int clean = story->low_latency || story->doomed;
    epx_status status = clean ? epx_mask_clean(s->group, NULL) : epx_group_error_clear(s->group);

    while (status == EPX_OK && members(s, kills) < RANKS) {
        if (rounds(s, 1, 1, 3) || clock_ns() > limit)
            return -1;
        usleep(20000);
        status = epx_mask_clean(s->group, NULL);
    }
    return status == EPX_OK ? 0 : fixture_fail(s, "recovery");
}

/* A member works until the next rank is killed, and after the last one for some rounds more. */
static int work(struct fixture *s, const struct story *story, int joined)
{
    int fresh = joined;

    for (;;) {
        const int last = fresh && atomic_load(&table->final);

        const int died = fresh && rounds(s, 1, 1, LAST_ROUNDS);

        if (died && !story->doomed)
            return give_up(s, "all ranks were there");
        if (last && !died)
            return 0;
        if (!died && !rounds(s, story->low_latency, !story->low_latency, 1000000))
            return give_up(s, "nothing has failed");
        if (until_all_there(s, story))
            return give_up(s, "nobody has joined");
        fresh = 1;
    }
}

/* A process that was given the place and killed right after holds it until the members notice: whoever starts the next
 * one is told so, and starts it again. */
static int join(struct fixture *s, const struct story *story, int rank, const epx_group_config *config)
{
    const uint64_t limit = clock_ns() + (uint64_t)slow_ms(JOIN_MS) * 1000000u;
    int rc;

    while ((rc = fixture_join(s, table->ticket, rank, RANKS, config, slow_ms(JOIN_MS))) && story->doomed &&
           strstr(s->why, "another process has taken the place") && clock_ns() < limit) {
        fixture_close(s);
        usleep(20000);
    }
    return rc;
}

static int be_rank(const struct story *story, int rank, int joins)
{
    const epx_group_config config = config_of(story);
    struct fixture *s = calloc(1, sizeof(*s));
    int rc = 1;

    if (!s)
        return 1;
    rc = joins ? join(s, story, rank, &config) : fixture_open(s, rank, RANKS, NULL, &config);
    if (rc)
        rc = give_up(s, joins ? "joining" : "creation");
    else if (!joins && rank == RANKS - 1 && epx_group_ticket(s->group, table->ticket, sizeof(table->ticket)) != EPX_OK)
        rc = give_up(s, "ticket");
    else if (joins && members(s, atomic_load(&table->kills)) != RANKS)
        rc = give_up(s, "a joiner does not see all ranks");
    if (!rc)
        rc = work(s, story, joins);
    fixture_close(s);
    free(s);
    return rc;
}

static pid_t start(const struct story *story, int rank, int joins)
{
    const pid_t pid = child_fork();

    assert_true(pid >= 0);
    if (pid > 0)
        return pid;
    child_set_int("RANK", rank);
    exit(be_rank(story, rank, joins));
}

static void start_all(const struct story *story, pid_t pids[RANKS])
{
    memset(table, 0, sizeof(*table));
    child_world(RANKS);
    for (int r = 0; r < RANKS; r++)
        pids[r] = start(story, r, 0);
}

/* ---- Processes that must be refused -------------------------------------------------------------------------- */

/* 0: the call was refused as expected. Who waits for ever may find that the group has ended first. */
static int expect(const struct story *story, const char *ticket, int rank, const epx_group_config *config, int ms,
                  epx_status status, const char *words)
{
    epx_group *group = NULL;
    const epx_status got = epx_group_join(&group, ticket, rank, config, ms);

    (void)story;
    if ((got == status || (status == EPX_ERR_TIMEOUT && got == EPX_ERR_PEER)) && strstr(epx_last_error(), words))
        return 0;
    fprintf(stderr, "expected status %d with \"%s\", got %d: %s\n", status, words, got, epx_last_error());
    return 1;
}

/* As an older library would: the members must see it, for a ticket of theirs says nothing about the process. */
static int knock_with_build(const char *text, int rank, uint64_t build)
{
    struct ticket ticket;
    struct secret secret;
    struct conn_address own, doors[RANKS];
    struct membership *m;
    uint8_t key[CRYPTO_KEY];
    uint64_t request[32] = {build};
    void *welcome;
    size_t bytes;
    epx_status status;

    memset(doors, 0, sizeof(doors));
    if (ticket_read(text, &ticket) != EPX_OK || secret_read(1, &secret) != EPX_OK ||
        crypto()->hmac(secret.key, ticket.seed, sizeof(ticket.seed), key) ||
        membership_open(rank, RANKS, 1, key, &own, &m) != EPX_OK)
        return 1;
    membership_set_peers(m, doors, ticket.token);
    membership_replace(m, rank, 4711, &own);
    for (int d = 0; d < ticket.ndoors; d++)
        doors[ticket.door[d].rank] = ticket.door[d].address;
    status = membership_knock(m, doors, request, sizeof(request), clock_ns() + 60000000000u, &welcome, &bytes);
    membership_close(m);
    if (status == EPX_ERR_MISMATCH && strstr(epx_last_error(), "it has build 0.0.0-00000007 of EPX"))
        return 0;
    fprintf(stderr, "another build: status %d: %s\n", status, epx_last_error());
    return 1;
}

static int be_stranger(const struct story *story, int kind, int victim, const char *ticket)
{
    epx_group_config config = config_of(story);
    char cut[EPX_TICKET_BYTES];

    switch (kind) {
    case 0: /* another configuration */
        config.max_tokens_per_rank++;
        return expect(story, ticket, victim, &config, slow_ms(JOIN_MS), EPX_ERR_MISMATCH,
                      "it has max_tokens_per_rank = 7 where the group has 6");
    case 1: /* another secret */
        setenv("EPX_SECRET", "something else, sixteen or more", 1);
        return expect(story, ticket, victim, &config, slow_ms(JOIN_MS), EPX_ERR_PEER, "another secret");
    case 2: /* another build */
        return knock_with_build(ticket, victim, 7);
    case 3: /* half of a ticket */
        snprintf(cut, sizeof(cut), "%.*s", (int)strlen(ticket) / 2, ticket);
        return expect(story, cut, victim, &config, slow_ms(JOIN_MS), EPX_ERR_ARGUMENT, "cut or changed");
    case 4: /* the place of a rank that is there: it waits until the group has ended */
        return expect(story, ticket, (victim + 1) % RANKS, &config, slow_ms(JOIN_MS), EPX_ERR_TIMEOUT, "is a member");
    default: /* no such rank */
        return expect(story, ticket, RANKS, &config, slow_ms(JOIN_MS), EPX_ERR_ARGUMENT, "expected 0 to 3, got 4");
    }
}

/* Strangers that are refused have ended before the one that is welcome comes. The one that waits (4) is there before
 * them, and is told in the same recoveries. */
static void bring_strangers(const struct story *story, int victim, const char *ticket, pid_t *pids, int *count)
{
    static const int kinds[] = {4, 0, 1, 2, 3, 5};
    const uint64_t deadline = clock_ns() + (uint64_t)slow_ms(LIMIT_MS) * 1000000u;
    const int first = *count;

    for (size_t i = 0; i < sizeof(kinds) / sizeof(*kinds); i++) {
        const pid_t pid = child_fork();

        assert_true(pid >= 0);
        if (pid == 0)
            exit(be_stranger(story, kinds[i], victim, ticket));
        pids[(*count)++] = pid;
    }
    for (int i = first + 1; i < *count; i++) {
        siginfo_t info = {.si_pid = 0};

        /* WNOWAIT: reap() looks at how they have ended. */
        while (waitid(P_PID, (id_t)pids[i], &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == 0 &&
               clock_ns() < deadline)
            usleep(1000);
    }
}

/* ---- The parent -------------------------------------------------------------------------------------------------- */

static int all_reach(const atomic_int *words, int least, const struct story *story)
{
    const uint64_t deadline = clock_ns() + (uint64_t)slow_ms(LIMIT_MS) * 1000000u;

    (void)story;
    for (int r = 0; r < RANKS; r++)
        while (atomic_load(&words[r]) < least) {
            if (clock_ns() > deadline)
                return -1;
            usleep(1000);
        }
    return 0;
}

/* All ranks have worked since the last kill. */
static int all_work(const struct story *story, int kills)
{
    return all_reach(table->since, kills, story) || all_reach(table->round, LAST_ROUNDS + 2, story);
}

static int wait_degraded(int victim)
{
    const uint64_t deadline = clock_ns() + (uint64_t)slow_ms(LIMIT_MS) * 1000000u;

    for (int r = 0; r < RANKS; r++)
        while (r != victim && !atomic_load(&table->degraded[r])) {
            if (clock_ns() > deadline)
                return -1;
            usleep(1000);
        }
    return 0;
}

static int reap(pid_t pid, const char *who, int rank)
{
    const uint64_t deadline = clock_ns() + (uint64_t)slow_ms(LIMIT_MS) * 1000000u;
    int status = 0;
    pid_t ended = 0;

    while ((ended = waitpid(pid, &status, WNOHANG)) == 0 && clock_ns() < deadline)
        usleep(1000);
    if (ended == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0)
        return 0;
    fprintf(stderr, "%s %d %s %#x\n", who, rank, ended ? "ended with status" : "has not ended", (unsigned)status);
    if (!ended && kill(pid, SIGKILL) == 0)
        waitpid(pid, &status, 0);
    return 1;
}

static void end_now(pid_t pid)
{
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
}

/* Kills one rank and starts those that come for its place. */
static int replace(const struct story *story, int victim, pid_t *pids, pid_t *strangers, int *count)
{
    for (int r = 0; r < RANKS; r++)
        atomic_store(&table->degraded[r], 0);
    atomic_fetch_add(&table->kills, 1);
    end_now(pids[victim]);
    if (story->when == LATE && wait_degraded(victim))
        return -1;
    if (story->strangers)
        story->strangers(story, victim, table->ticket, strangers, count);
    for (int i = 0; i < story->doomed; i++) {
        const pid_t doomed = start(story, victim, 1);

        usleep((useconds_t)(clock_ns() % 250) * 1000);
        end_now(doomed);
    }
    /* What those that are dead now have written does not count. */
    atomic_store(&table->since[victim], -1);
    atomic_store(&table->round[victim], 0);
    atomic_store(&table->final, atomic_load(&table->kills) == story->kills);
    pids[victim] = start(story, victim, 1);
    return 0;
}

static int play(const struct story *story)
{
    pid_t pids[RANKS], strangers[16];
    int failures = 0, count = 0;

    start_all(story, pids);
    for (int k = 0; k < story->kills && !failures; k++) {
        failures += all_work(story, k) || replace(story, story->victim[k], pids, strangers, &count);
        if (failures)
            fprintf(stderr, "kill %d of rank %d: the ranks did not come so far\n", k, story->victim[k]);
    }
    for (int r = 0; r < RANKS; r++)
        failures += reap(pids[r], "rank", r);
    for (int r = 0; r < RANKS && !failures; r++) { /* one group, also for epx top */
        assert_true(table->number[r] != 0);
        assert_true(table->number[r] == table->number[0]);
    }
    for (int i = 0; i < count; i++)
        failures += reap(strangers[i], "stranger", i);
    return failures;
}

static void plays(void **state)
{
    const struct story *story = *state;

    unit_need_net(story->net);
    assert_int_equal(play(story), 0);
}

/* Of two that come for one place, one works with the others, and one is told. */
static void one_of_two(void **state)
{
    const struct story story = {.kills = 1, .victim = {2}};
    pid_t pids[RANKS], second;
    int status[2] = {0}, good;

    (void)state;
    start_all(&story, pids);
    assert_int_equal(all_work(&story, 0), 0);
    atomic_fetch_add(&table->kills, 1);
    end_now(pids[2]);
    atomic_store(&table->final, 1);
    pids[2] = start(&story, 2, 1);
    second = start(&story, 2, 1);
    for (int r = 0; r < RANKS; r++)
        if (r != 2)
            assert_int_equal(reap(pids[r], "rank", r), 0);
    waitpid(pids[2], &status[0], 0);
    waitpid(second, &status[1], 0);
    good = (WIFEXITED(status[0]) && !WEXITSTATUS(status[0])) + (WIFEXITED(status[1]) && !WEXITSTATUS(status[1]));
    assert_int_equal(good, 1);
}

static const struct story stories[] = {
    {.when = EARLY, .kills = 1, .victim = {2}},
    {.when = LATE, .kills = 1, .victim = {1}},
    {.when = EARLY, .kills = 4, .victim = {3, 0, 0, 1}},
    {.when = EARLY, .low_latency = 1, .kills = 2, .victim = {1, 1}},
    {.when = LATE, .kills = 2, .victim = {0, 3}, .doomed = 3},
    {.when = EARLY, .kills = 1, .victim = {2}, .strangers = bring_strangers},
    {.net = "ofi:tcp", .when = EARLY, .kills = 3, .victim = {3, 0, 0}},
    {.net = "ofi:tcp", .when = LATE, .low_latency = 1, .kills = 2, .victim = {2, 1}, .doomed = 1},
};

#define PLAY(name, i) UNIT_CASE(name, plays, (void *)(uintptr_t)&stories[i])

static int set_up(void **state)
{
    (void)state;
    table = child_share(sizeof(*table));
    if (!table)
        return 1;
    child_forget_settings();
    return 0;
}

UNIT_MAIN_WITHIN(set_up, NULL, PLAY("joins_before_the_others_notice", 0), PLAY("joins_a_group_that_has_gone_on", 1),
                 PLAY("several_in_a_row_with_rank_0", 2), PLAY("joins_in_low_latency", 3),
                 PLAY("replacements_that_die_while_they_join", 4), PLAY("strangers_are_refused", 5),
                 UNIT_CASE("one_of_two_for_one_place", one_of_two, NULL), PLAY("joins_over_sockets", 6),
                 PLAY("joins_over_sockets_in_low_latency", 7))
