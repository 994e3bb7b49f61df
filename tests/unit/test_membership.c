/* SPDX-License-Identifier: Apache-2.0 */
/* Membership: ranks that ended or are excluded, what each rank reports, unknown clients.
 * ctest: cost=18 labels=leaks sleeps */
#include <errno.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "boot/auth.h"
#include "boot/membership.h"
#include "boot/socket.h"
#include "tests/lib/child.h"
#include "tests/lib/thread_boot.h"
#include "util/clock.h"
#include "util/runtime.h"
#include "tests/lib/unit.h"
#include "tests/lib/slow.h"

enum { N = 5, GATHERS = 20, LARGE = 300000 };

static const uint8_t key[32] = {7, 7, 7};

/* What one rank does, and the expected result. */
struct part {
    int stays_away;    /* it has a port, but does not take part */
    int closes;        /* its port is closed before the round begins */
    int leaves;        /* it agrees, and then takes part in no all-gather */
    int stops;         /* likewise after a first one, and its connections stay open */
    int purpose;       /* of membership_agree */
    uint8_t out[N];    /* ranks that it excludes */
    uint8_t agreed[N]; /* ranks that all exclude, if it succeeds */
    epx_status expected;
    epx_status gathers;   /* the result of an all-gather after that, where it is not EPX_OK */
    const char *words[3]; /* of the message */
};

struct scenario {
    struct part part[N];
    int timeout_ms;
    int one_round, one_stops;
    const pid_t *process;                                  /* of rank 3 */
    void (*before)(const struct conn_address *all);        /* rank 0 does this first */
    void (*after_closing)(const struct conn_address *all); /* rank 0 does this once ports are closed */
};

static int boot_gather(epx_bootstrap *boot, const void *mine, void *all, size_t bytes)
{
    return boot->allgather(boot->context, mine, all, bytes);
}

static int gather_often(struct membership *m, int rank, const uint8_t *out)
{
    char *mine = malloc(LARGE), *all = malloc((size_t)N * LARGE);
    int rc = mine && all ? 0 : -1;

    for (int i = 0; i < GATHERS && !rc; i++) {
        const size_t bytes = i == 7 ? LARGE : (size_t)i;

        memset(mine, 10 * rank + i % 10, bytes);
        if (membership_allgather(m, mine, all, bytes) != EPX_OK) {
            fprintf(stderr, "rank %d, gather %d: %s\n", rank, i, epx_last_error());
            rc = -1;
        }
        for (int r = 0; r < N && !rc; r++)
            for (size_t k = 0; k < bytes; k++)
                if (all[(size_t)r * bytes + k] != (out[r] ? 0 : 10 * r + i % 10)) {
                    fprintf(stderr, "rank %d, gather %d: byte %zu of rank %d is wrong\n", rank, i, k, r);
                    rc = -1;
                    break;
                }
    }
    free(all);
    free(mine);
    return rc;
}

static int has_words(const struct part *p, int rank)
{
    int rc = 0;

    for (int i = 0; i < 3 && p->words[i]; i++)
        if (!strstr(epx_last_error(), p->words[i])) {
            fprintf(stderr, "rank %d: no \"%s\" in: %s\n", rank, p->words[i], epx_last_error());
            rc = -1;
        }
    return rc;
}

/* The all-gather fails, and quickly. */
static int gather_in_vain(struct membership *m, const struct part *p, int rank)
{
    const uint64_t begin = clock_ns();
    char mine = 0, all[N];
    const epx_status status = membership_allgather(m, &mine, all, 1);

    if (status == p->gathers && !slow_late(begin, 10000))
        return has_words(p, rank);
    fprintf(stderr, "rank %d: expected %s, got %s\n", rank, epx_strerror(p->gathers), epx_strerror(status));
    return -1;
}

static int act(struct membership *m, const struct scenario *scenario, int rank)
{
    const struct part *p = &scenario->part[rank];
    uint8_t out[N];
    epx_status status;
    int rc = 0;

    memcpy(out, p->out, N);
    status = membership_agree(m, p->purpose, out, scenario->timeout_ms ? scenario->timeout_ms : 20000);
    if (status != p->expected) {
        fprintf(stderr, "rank %d: expected %s, got %s: %s\n", rank, epx_strerror(p->expected), epx_strerror(status),
                epx_last_error());
        rc = -1;
    }
    if (status != EPX_OK && has_words(p, rank))
        rc = -1;
    if (status == EPX_OK && memcmp(out, p->agreed, N) != 0) {
        fprintf(stderr, "rank %d: other ranks are excluded than expected\n", rank);
        rc = -1;
    }
    if (scenario->one_stops && membership_allgather(m, &(char){0}, (char[N]){0}, 1) != EPX_OK)
        rc = -1;
    if (p->stops)
        return rc;
    if (status == EPX_OK && !p->leaves && (p->gathers ? gather_in_vain(m, p, rank) : gather_often(m, rank, out)))
        rc = -1;
    membership_end(m);
    return rc;
}

static int run_rank(int rank, int n, epx_bootstrap *boot, void *arg)
{
    const struct scenario *scenario = arg;
    struct conn_address own, all[N];
    struct membership *m;
    char token = 0, tokens[N];
    int rc = 0;

    (void)n;
    if (membership_open(rank, N, 1, key, &own, &m) != EPX_OK || boot_gather(boot, &own, all, sizeof(own)))
        return -1;
    membership_set_peers(m, all, 0x5eed);
    if (scenario->process)
        membership_set_process(m, 3, *scenario->process);
    if (rank == 0 && scenario->before)
        scenario->before(all);
    if (scenario->part[rank].closes) {
        membership_close(m);
        m = NULL;
    }
    if (boot_gather(boot, &token, tokens, 1))
        return -1;
    if (rank == 0 && scenario->after_closing)
        scenario->after_closing(all);
    if (boot_gather(boot, &token, tokens, 1))
        return -1;
    if (m && !scenario->part[rank].stays_away) {
        rc = act(m, scenario, rank);
        if (!rc && scenario->part[rank].expected == EPX_OK && !scenario->one_round)
            rc = act(m, scenario, rank); /* nothing of the first round disturbs the next */
    }
    if (boot_gather(boot, &token, tokens, 1))
        rc = -1;
    membership_close(m);
    return rc;
}

static void run_scenario(struct scenario scenario)
{
    assert_int_equal(run_ranks(N, run_rank, &scenario), 0);
}

static void all_ranks_take_part(void **state)
{
    (void)state;
    run_scenario((struct scenario){.timeout_ms = 20000});
}

/* All others agree that rank 3 is excluded. */
static void run_without_3(struct scenario scenario)
{
    for (int r = 0; r < N; r++)
        scenario.part[r].agreed[3] = 1;
    run_scenario(scenario);
}

static void a_rank_that_ended_is_excluded(void **state)
{
    struct scenario scenario = {.part[3].closes = 1};

    (void)state;
    run_without_3(scenario);
}

static void ranks_excluded_by_one_are_excluded_by_all(void **state)
{
    struct scenario scenario = {.part = {[2].stays_away = 1, [4].stays_away = 1}};

    (void)state;
    scenario.part[0].out[2] = scenario.part[3].out[4] = 1;
    for (int r = 0; r < N; r++)
        scenario.part[r].agreed[2] = scenario.part[r].agreed[4] = 1;
    run_scenario(scenario);
}

static void one_alone_is_enough(void **state)
{
    struct scenario scenario = {.part = {[0].closes = 1, [1].closes = 1, [2].closes = 1, [3].closes = 1}};

    (void)state;
    memcpy(scenario.part[4].agreed, (uint8_t[N]){1, 1, 1, 1, 0}, N);
    run_scenario(scenario);
}

static void a_missing_rank_is_named(void **state)
{
    struct scenario scenario = {.timeout_ms = slow_ms(2000), .part[2].stays_away = 1};
    char within[16];

    (void)state;
    snprintf(within, sizeof(within), "%d ms", scenario.timeout_ms);
    for (int r = 0; r < N; r++) {
        scenario.part[r].expected = EPX_ERR_TIMEOUT;
        scenario.part[r].words[0] = "rank 2 did not join the recovery";
        scenario.part[r].words[1] = within;
    }
    run_scenario(scenario);
}

/* Rank 4 does not know that the others exclude it: they tell it, and it does not wait for its deadline. */
static void an_excluded_rank_is_told(void **state)
{
    struct scenario scenario = {.timeout_ms = slow_ms(3000)};

    (void)state;
    for (int r = 0; r < N; r++)
        scenario.part[r].out[4] = scenario.part[r].agreed[4] = r != 4;
    scenario.part[4].expected = EPX_ERR_PEER;
    scenario.part[4].words[0] = "without rank 4";
    run_scenario(scenario);
}

/* ---- Who was left out stays out -------------------------------------------------------------------------------- */

static int expect_agree(struct membership *m, int rank, int purpose, uint8_t *out, epx_status expected)
{
    const epx_status status = membership_agree(m, purpose, out, slow_ms(3000));

    if (status == expected)
        return 0;
    fprintf(stderr, "rank %d: expected %s, got %s: %s\n", rank, epx_strerror(expected), epx_strerror(status),
            epx_last_error());
    return -1;
}

static int open_all(int rank, epx_bootstrap *boot, struct membership **m)
{
    struct conn_address own, all[N];

    if (membership_open(rank, N, 1, key, &own, m) != EPX_OK || boot_gather(boot, &own, all, sizeof(own)))
        return -1;
    membership_set_peers(*m, all, 0x5eed);
    return 0;
}

static int meet(epx_bootstrap *boot)
{
    char here = 0, all[N];

    return boot_gather(boot, &here, all, 1);
}

/* In touch until ranks 3 and 4 have been told. */
static int gather_until_told(struct membership *m, int rank, const int *told)
{
    char all_told = 0, all[N] = {0};
    int rc = 0;

    while (!rc && !all[0]) {
        all_told = __atomic_load_n(told, __ATOMIC_ACQUIRE) == 2;
        rc = membership_allgather(m, &all_told, all, 1) == EPX_OK ? 0 : -1;
    }
    if (rc)
        fprintf(stderr, "rank %d: %s\n", rank, epx_last_error());
    membership_end(m);
    return rc;
}

/* Ranks 0 to 2 go on without ranks 3 and 4, and end. Those were told so: they do not make a set of their own then,
 * unless all restore it. */
static int second_set_rank(int rank, int n, epx_bootstrap *boot, void *arg)
{
    uint8_t out[N] = {0}, none[N] = {0}, again[N] = {0};
    struct membership *m;
    int *told = arg, rc = open_all(rank, boot, &m);

    (void)n;
    if (rc)
        return rc;
    if (rank < 3) {
        out[3] = out[4] = 1;
        rc = expect_agree(m, rank, 0, out, EPX_OK) || gather_until_told(m, rank, told);
        membership_close(m);
        return meet(boot) || meet(boot) || rc;
    }
    rc = expect_agree(m, rank, 0, out, EPX_ERR_PEER);
    __atomic_fetch_add(told, 1, __ATOMIC_RELEASE);
    membership_end(m);
    rc |= meet(boot);
    for (int i = 0; i < 2 && !rc; i++) {
        memset(none, 0, sizeof(none));
        rc = expect_agree(m, rank, 0, none, EPX_ERR_PEER) || !strstr(epx_last_error(), "was left out") ||
             !membership_left_out(m);
        membership_end(m);
    }
    rc |= meet(boot); /* else one restores while the other still clears */
    rc = rc || expect_agree(m, rank, MEMBERSHIP_RESTORES, again, EPX_OK) ||
         membership_allgather(m, &(char){0}, (char[N]){0}, 1) != EPX_OK;
    membership_close(m);
    return rc;
}

static void ranks_that_were_left_out_make_no_second_set(void **state)
{
    int told = 0;

    (void)state;
    assert_int_equal(run_ranks(N, second_set_rank, &told), 0);
}

/* `by` excludes `whom`, tells it so, and waits for the others in vain. */
static int leave_out_in_vain(struct membership *m, int rank, int by, int whom)
{
    uint8_t out[N] = {0};
    epx_status status = EPX_OK;

    for (int r = 0; r < by; r++)
        out[r] = rank == whom; /* so that it turns to `by` */
    out[whom] = rank == by;
    if (rank == by || rank == whom)
        status = membership_agree(m, 0, out, slow_ms(700));
    membership_end(m);
    return rank == by ? status != EPX_ERR_TIMEOUT : rank == whom ? status != EPX_ERR_PEER : 0;
}

/* Rank 3 was told by rank 0, when rank 4 still was to go on without it; rank 4 was told by rank 1, when rank 3 was to,
 * or by nobody (`*late`). Ranks 0 to 2 go on without either, and end. Neither rank takes the other for one that went
 * on, nor for one that speaks for those that did. */
static int told_early_rank(int rank, int n, epx_bootstrap *boot, void *arg)
{
    uint8_t out[N] = {[3] = rank < 3, [4] = rank < 3};
    struct membership *m;
    const int *late = arg;
    int rc = open_all(rank, boot, &m);

    (void)n;
    if (rc)
        return rc;
    if (!*late)
        rc = leave_out_in_vain(m, rank, 1, 4);
    rc |= meet(boot);
    rc |= leave_out_in_vain(m, rank, 0, 3);
    rc |= meet(boot);
    if (rank < 3) {
        rc = rc || expect_agree(m, rank, 0, out, EPX_OK) ||
             membership_allgather(m, &(char){0}, (char[N]){0}, 1) != EPX_OK;
        membership_close(m);
        return meet(boot) || rc;
    }
    rc |= meet(boot);
    if (rank == 4 && *late) /* nobody has told it: it may go on alone when rank 3 has ended, too */
        rc = rc || (membership_agree(m, 0, out, slow_ms(3000)) == EPX_OK && !out[3]);
    else
        rc = rc || expect_agree(m, rank, 0, out, EPX_ERR_PEER) || !strstr(epx_last_error(), "was left out") ||
             !membership_left_out(m);
    membership_close(m);
    return rc;
}

static void ranks_that_were_told_early_make_no_second_set(void **state)
{
    (void)state;
    assert_int_equal(run_ranks(N, told_early_rank, &(int){0}), 0);
}

static void a_rank_that_was_told_makes_no_second_set_with_one_that_was_late(void **state)
{
    (void)state;
    assert_int_equal(run_ranks(N, told_early_rank, &(int){1}), 0);
}

/* Rank 0 excludes rank 3, tells it so, and ends before any other has heard of that: the others take rank 3 along. */
static int taken_along_rank(int rank, int n, epx_bootstrap *boot, void *arg)
{
    uint8_t out[N] = {[3] = rank == 0}, none[N] = {0};
    struct membership *m;
    int rc = open_all(rank, boot, &m);

    (void)n;
    (void)arg;
    if (rc)
        return rc;
    if (rank == 0 || rank == 3)
        rc = expect_agree(m, rank, 0, out, rank ? EPX_ERR_PEER : EPX_ERR_TIMEOUT);
    membership_end(m);
    if (rank == 0) {
        membership_close(m);
        return meet(boot) || rc;
    }
    rc |= meet(boot);
    rc = rc || expect_agree(m, rank, 0, none, EPX_OK) || !none[0] || none[3] ||
         membership_allgather(m, &(char){0}, (char[N]){0}, 1) != EPX_OK;
    membership_close(m);
    return rc;
}

static void a_rank_that_one_has_left_out_in_vain_is_taken_along(void **state)
{
    (void)state;
    assert_int_equal(run_ranks(N, taken_along_rank, NULL), 0);
}

/* Rank 4 has not been told in any round that ranks 0 to 3 go on without it. But it knows that rank 1 gave up because of
 * it: it does not go on alone when they have ended, unless it restores, nor if rank 0 alone was out before. */
static int knows_it_was_late_rank(int rank, int n, epx_bootstrap *boot, void *arg)
{
    uint8_t out[N] = {[4] = rank < 4}, before[N] = {[0] = 1}, none[N] = {0}, again[N] = {0};
    struct membership *m;
    int rc = open_all(rank, boot, &m);

    (void)n;
    (void)arg;
    if (!rc && rank < 4)
        rc = expect_agree(m, rank, 0, out, EPX_OK) || membership_allgather(m, &(char){0}, (char[N]){0}, 1) != EPX_OK;
    if (rank < 4) {
        membership_close(m);
        return meet(boot) || rc;
    }
    rc |= meet(boot);
    membership_was_late(m, 1, before);
    rc = rc || expect_agree(m, rank, 0, none, EPX_ERR_PEER) || !membership_left_out(m) ||
         !strstr(epx_last_error(), "rank 4 was too late") || !strstr(epx_last_error(), "rank 1 among them");
    membership_end(m);
    rc = rc || expect_agree(m, rank, MEMBERSHIP_RESTORES, again, EPX_OK);
    membership_close(m);
    return rc;
}

static void a_rank_that_knows_it_was_late_does_not_go_on_alone(void **state)
{
    (void)state;
    assert_int_equal(run_ranks(N, knows_it_was_late_rank, NULL), 0);
}

/* Also where the coordinator is a process that joins, which wants what the others want. */
static void ranks_that_want_different_things_are_told(void **state)
{
    struct scenario scenario = {.timeout_ms = slow_ms(3000)};

    (void)state;
    for (int r = 0; r < N; r++) {
        scenario.part[r].expected = EPX_ERR_MISMATCH;
        scenario.part[r].words[0] = "different functions";
    }
    for (int r = 0; r < N; r++)
        scenario.part[r].purpose = r % 2;
    run_scenario(scenario);
    scenario.part[0].purpose = MEMBERSHIP_ANY_PURPOSE;
    run_scenario(scenario);
}

static void run_leaving(int who, const char *name)
{
    struct scenario scenario = {.one_round = 1};

    scenario.part[who].leaves = 1;
    for (int r = 0; r < N; r++)
        if (r != who) {
            scenario.part[r].gathers = EPX_ERR_PEER;
            scenario.part[r].words[0] = name;
        }
    run_scenario(scenario);
}

/* The coordinator sees it, and the others learn the name from there. */
static void a_rank_that_leaves_is_named_by_all(void **state)
{
    (void)state;
    run_leaving(3, "rank 3 ended or gave up during the recovery, or its connection was cut");
}

static void the_coordinator_that_leaves_is_named_by_all(void **state)
{
    (void)state;
    run_leaving(0, "rank 0 ended or gave up during the recovery, or its connection was cut");
}

/* Nobody but the stopped rank is named as the culprit: the coordinator knows, and the others only suspect. */
static void run_stopping(int who, int purpose, const char *name, const char *suspicion)
{
    struct scenario scenario = {.one_round = 1, .one_stops = 1, .timeout_ms = slow_ms(600)};

    scenario.part[who].stops = 1;
    for (int r = 0; r < N; r++)
        scenario.part[r].purpose = purpose;
    for (int r = 0; r < N; r++)
        if (r != who) {
            scenario.part[r].gathers = EPX_ERR_TIMEOUT;
            scenario.part[r].words[0] = name;
            scenario.part[r].words[1] = suspicion;
        }
    run_scenario(scenario);
}

static void a_rank_that_stops_is_named_by_all(void **state)
{
    (void)state;
    run_stopping(3, 0, "rank 3 did not join the recovery", NULL);
    run_stopping(3, MEMBERSHIP_CREATION, "rank 3 did not join the creation of the group", NULL);
    run_stopping(0, 0, "no result from rank 0, which leads the recovery", "may have stopped");
}

/* The coordinator has connected to all and told who was there, and then stops: what it said is old. */
static struct conn_ops stopping;
static _Thread_local int waits_left;
static int stop_ms;

static epx_status stopping_open(int rank, int one_host, const uint8_t *secret, struct conn_address *own,
                                struct conn_port **port)
{
    waits_left = rank ? -1 : 40;
    return conn_socket_ops.port_open(rank, one_host, secret, own, port);
}

static void stopping_wait(struct conn_port *port, uint64_t ns)
{
    if (waits_left > 0 && --waits_left == 0)
        usleep((useconds_t)stop_ms * 1000);
    conn_socket_ops.wait(port, ns);
}

static void a_coordinator_that_stops_is_suspected(void **state)
{
    struct scenario scenario = {.timeout_ms = slow_ms(1500), .part[3].stays_away = 1};
    struct runtime own = {.conns = &stopping};

    (void)state;
    stop_ms = 2 * scenario.timeout_ms;
    for (int r = 0; r < N; r++) {
        scenario.part[r].expected = EPX_ERR_TIMEOUT;
        scenario.part[r].words[0] = r ? "no word from rank 0, which leads the recovery" : "rank 3 did not join";
        scenario.part[r].words[1] = r ? "may have stopped" : NULL;
    }
    stopping = conn_socket_ops;
    stopping.port_open = stopping_open;
    stopping.wait = stopping_wait;
    runtime_swap(&own);
    run_scenario(scenario);
    runtime_swap(NULL);
}

/* ---- Connections: few, whatever the number of ranks ---------------------------------------------------------- */

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { CROWD = 96 }; /* 256 threads take so long there that most connect again, several times */
#else
enum { CROWD = 256 };
#endif
static struct conn_ops counting;
static int connects;

static int counted_connect(struct conn_port *port, const struct conn_address *to)
{
    __atomic_add_fetch(&connects, 1, __ATOMIC_RELAXED);
    return conn_socket_ops.connect(port, to);
}

static int crowd_rank(int rank, int n, epx_bootstrap *boot, void *arg)
{
    struct conn_address own, all[CROWD];
    struct membership *m;
    uint8_t out[CROWD] = {0};
    int gathered[CROWD], rc = 0;

    (void)arg;
    if (membership_open(rank, n, 1, key, &own, &m) != EPX_OK || boot_gather(boot, &own, all, sizeof(own)))
        return -1;
    membership_set_peers(m, all, 0x5eed);
    if (membership_agree(m, 0, out, slow_ms(60000)) != EPX_OK ||
        membership_allgather(m, &rank, gathered, sizeof(rank)) != EPX_OK) {
        fprintf(stderr, "rank %d: %s\n", rank, epx_last_error());
        rc = -1;
    }
    for (int r = 0; r < n && !rc; r++)
        rc = out[r] || gathered[r] != r ? -1 : 0;
    membership_end(m);
    if (boot_gather(boot, &rank, gathered, sizeof(rank)))
        rc = -1;
    membership_close(m);
    return rc;
}

static void many_ranks_make_few_connections(void **state)
{
    struct runtime own = {.conns = &counting};

    (void)state;
    counting = conn_socket_ops;
    counting.connect = counted_connect;
    runtime_swap(&own);
    assert_int_equal(run_ranks(CROWD, crowd_rank, NULL), 0);
    runtime_swap(NULL);
    print_message("%d ranks: %d connections\n", CROWD, connects);
    /* Some have to try again, the more the slower the machine is; each with each would be CROWD * (CROWD - 1). */
    assert_in_range(connects, 2 * (CROWD - 1), slow_ms(8 * CROWD));
}

/* Rank 1 cannot keep the first connection to it, and closes it unread once the coordinator has committed. */
static struct conn_ops forgetful;
static _Atomic(struct conn_port *) forgetful_port;
static uint64_t forget_at_ns;

static epx_status forgetful_open(int rank, int one_host, const uint8_t *secret, struct conn_address *own,
                                 struct conn_port **out)
{
    const epx_status status = conn_socket_ops.port_open(rank, one_host, secret, own, out);

    if (rank == 1)
        forgetful_port = *out;
    return status;
}

static int forgetful_accept(struct conn_port *port)
{
    int conn;

    if (port != forgetful_port)
        return conn_socket_ops.accept(port);
    if (!forget_at_ns)
        forget_at_ns = clock_ns() + 100000000u;
    if (clock_ns() < forget_at_ns)
        return -EAGAIN;
    conn = conn_socket_ops.accept(port);
    if (conn < 0)
        return conn;
    conn_socket_ops.close(port, conn);
    forgetful_port = NULL;
    return -EAGAIN;
}

static void a_lost_result_is_sent_again(void **state)
{
    struct runtime own = {.conns = &forgetful};

    (void)state;
    forgetful = conn_socket_ops;
    forgetful.port_open = forgetful_open;
    forgetful.accept = forgetful_accept;
    runtime_swap(&own);
    run_scenario((struct scenario){.timeout_ms = slow_ms(5000)});
    runtime_swap(NULL);
    assert_null(forgetful_port);
}

/* The connection from rank 0 to rank 1 takes only a part of the first result for a while. Rank 4 ends meanwhile. */
enum { SLOW_PART = 1000, PART_BYTES = 3000 };
static struct conn_ops slow;
static struct conn_port *slow_port; /* of rank 0 */
static struct conn_address slow_to; /* of rank 1 */
static int slow_conn;
static size_t slow_sent;
static atomic_int slow_now;

static epx_status slow_open(int rank, int one_host, const uint8_t *secret, struct conn_address *own,
                            struct conn_port **out)
{
    const epx_status status = conn_socket_ops.port_open(rank, one_host, secret, own, out);

    if (rank == 0)
        slow_port = *out;
    if (rank == 1)
        slow_to = *own;
    return status;
}

static int slow_connect(struct conn_port *port, const struct conn_address *to)
{
    const int conn = conn_socket_ops.connect(port, to);

    if (port == slow_port && to->bytes == slow_to.bytes && !memcmp(to->data, slow_to.data, to->bytes))
        slow_conn = conn;
    return conn;
}

static int slow_send(struct conn_port *port, int conn, const void *data, size_t bytes)
{
    int n;

    if (port != slow_port || conn != slow_conn || !slow_now)
        return conn_socket_ops.send(port, conn, data, bytes);
    if (slow_sent == SLOW_PART)
        return -EAGAIN;
    n = conn_socket_ops.send(port, conn, data, bytes < SLOW_PART - slow_sent ? bytes : SLOW_PART - slow_sent);
    slow_sent += n > 0 ? (size_t)n : 0;
    return n;
}

/* A first result is right. The end of rank 4 is none of its business: only where rank 0 could not send all of it within
 * the time that it takes to end is it an error. */
static int gather_part_by_part(struct membership *m, int rank, char *mine, char *all)
{
    memset(mine, 'a' + rank, PART_BYTES);
    if (membership_allgather(m, mine, all, PART_BYTES) != EPX_OK) {
        fprintf(stderr, "rank %d: %s\n", rank, epx_last_error());
        return rank == 0 || rank == 4 || !strstr(epx_last_error(), "rank 0 ended");
    }
    for (size_t i = 0; i < (size_t)N * PART_BYTES; i++)
        if (all[i] != 'a' + (int)(i / PART_BYTES)) {
            fprintf(stderr, "rank %d: byte %zu of a result is wrong\n", rank, i);
            return -1;
        }
    return 0;
}

static int slow_rank(int rank, int n, epx_bootstrap *boot, void *arg)
{
    char *mine = malloc(PART_BYTES), *all = malloc((size_t)N * PART_BYTES);
    uint8_t out[N] = {0};
    struct membership *m = NULL;
    int rc = !mine || !all || open_all(rank, boot, &m);

    (void)n;
    (void)arg;
    rc = rc || expect_agree(m, rank, 0, out, EPX_OK);
    if (rank == 1)
        slow_now = 1; /* rank 0 has no result before rank 1's part */
    rc = rc || gather_part_by_part(m, rank, mine, all);
    if (rank != 4 && !rc)
        rc = membership_allgather(m, mine, all, 1) == EPX_OK ||
             !(strstr(epx_last_error(), "rank 4") || strstr(epx_last_error(), "rank 0 ended"));
    if (rank == 0)
        slow_now = 0;
    membership_close(m);
    free(mine);
    free(all);
    return rc;
}

static void a_failure_does_not_come_in_the_midst_of_a_result(void **state)
{
    struct runtime own = {.conns = &slow};

    (void)state;
    slow = conn_socket_ops;
    slow.port_open = slow_open;
    slow.connect = slow_connect;
    slow.send = slow_send;
    slow_sent = 0;
    runtime_swap(&own);
    assert_int_equal(run_ranks(N, slow_rank, NULL), 0);
    runtime_swap(NULL);
}

/* Connects to every port and sends nothing, noise, or a valid magic number followed by noise. */
static void connect_unknown_clients(const struct conn_address *all)
{
    for (int r = 0; r < N; r++)
        for (int kind = 0; kind < 3; kind++) {
            struct endpoint at = {.length = all[r].bytes};
            char noise[64];
            int fd;

            memcpy(&at.address, all[r].data, all[r].bytes);
            fd = socket_connect(&at, NULL, deadline_in(60000));
            assert_true(fd >= 0);
            memset(noise, 0x5a, sizeof(noise));
            memcpy(noise, "EPXM", kind == 2 ? 4 : 0);
            if (kind)
                assert_int_equal(send(fd, noise, sizeof(noise), 0), sizeof(noise));
            if (kind != 1)
                close(fd); /* the other connection stays open and idle */
        }
}

static void unknown_clients_do_no_harm(void **state)
{
    (void)state;
    run_scenario((struct scenario){.before = connect_unknown_clients});
}

enum { MANY = 500, IDLE_MS = 60000 };
static int idle[MANY];

/* 500 to the port of rank 0 that say nothing and stay. */
static void connect_idle_clients(const struct conn_address *all)
{
    struct endpoint at = {.length = all[0].bytes};

    memcpy(&at.address, all[0].data, all[0].bytes);
    for (int i = 0; i < MANY; i++) {
        idle[i] = socket_connect(&at, NULL, deadline_in(IDLE_MS));
        assert_true(idle[i] >= 0);
    }
}

static void idle_connections_accuse_nobody(void **state)
{
    const uint64_t begin = clock_ns();

    (void)state;
    run_scenario((struct scenario){.before = connect_idle_clients, .timeout_ms = IDLE_MS});
    for (int i = 0; i < MANY; i++)
        close(idle[i]);
    assert_true((clock_ns() - begin) / 1000000u < IDLE_MS); /* nobody waits until the deadline */
}

/* The port of a rank that ended may belong to somebody else by now. */
static int squatter = -1;
static pthread_t squatter_thread;

static void *squat(void *arg)
{
    static const char nonsense[sizeof(struct auth_reply)] = "SSH-2.0-OpenSSH";

    (void)arg;
    for (int fd; (fd = accept(squatter, NULL, NULL)) >= 0; close(fd))
        (void)!send(fd, nonsense, sizeof(nonsense), MSG_NOSIGNAL);
    return NULL;
}

static void listen_at_port_of_rank_3(const struct conn_address *all)
{
    struct sockaddr_in at;
    int one = 1;

    memcpy(&at, all[3].data, sizeof(at));
    squatter = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(squatter, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    assert_int_equal(bind(squatter, (struct sockaddr *)&at, sizeof(at)), 0);
    assert_int_equal(listen(squatter, 64), 0);
}

static void hold_port_of_rank_3(const struct conn_address *all)
{
    listen_at_port_of_rank_3(all);
    assert_int_equal(pthread_create(&squatter_thread, NULL, squat, NULL), 0);
}

static void a_port_that_somebody_else_holds_is_closed(void **state)
{
    struct scenario scenario = {.part[3].closes = 1, .after_closing = hold_port_of_rank_3};

    (void)state;
    run_without_3(scenario);
    shutdown(squatter, SHUT_RDWR);
    pthread_join(squatter_thread, NULL);
    close(squatter);
}

/* Who listens there and says nothing is like a rank that is late, but for its process. */
static pid_t process_of_rank_3;

static void end_rank_3_and_hold_its_port(const struct conn_address *all)
{
    assert_int_equal(kill(process_of_rank_3, SIGKILL), 0);
    listen_at_port_of_rank_3(all);
}

static void a_silent_port_is_not_that_of_a_process_that_ended(void **state)
{
    const int timeout_ms = slow_ms(20000);
    const uint64_t begin = clock_ns();

    (void)state;
    process_of_rank_3 = child_fork();
    if (process_of_rank_3 == 0)
        for (;;)
            pause();
    run_without_3((struct scenario){.part[3].closes = 1,
                                    .process = &process_of_rank_3,
                                    .after_closing = end_rank_3_and_hold_its_port,
                                    .timeout_ms = timeout_ms});
    assert_true((clock_ns() - begin) / 1000000u < (unsigned)timeout_ms);
    assert_false(child_succeeded(process_of_rank_3));
    close(squatter);
}

UNIT_TESTS(all_ranks_take_part, a_rank_that_ended_is_excluded, ranks_excluded_by_one_are_excluded_by_all,
           one_alone_is_enough, a_missing_rank_is_named, an_excluded_rank_is_told,
           ranks_that_were_left_out_make_no_second_set, ranks_that_were_told_early_make_no_second_set,
           a_rank_that_was_told_makes_no_second_set_with_one_that_was_late,
           a_rank_that_one_has_left_out_in_vain_is_taken_along, a_rank_that_knows_it_was_late_does_not_go_on_alone,
           ranks_that_want_different_things_are_told, unknown_clients_do_no_harm, a_rank_that_leaves_is_named_by_all,
           the_coordinator_that_leaves_is_named_by_all, a_rank_that_stops_is_named_by_all,
           a_coordinator_that_stops_is_suspected, many_ranks_make_few_connections, a_lost_result_is_sent_again,
           a_failure_does_not_come_in_the_midst_of_a_result, idle_connections_accuse_nobody,
           a_port_that_somebody_else_holds_is_closed, a_silent_port_is_not_that_of_a_process_that_ended)
