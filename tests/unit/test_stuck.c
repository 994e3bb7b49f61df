/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A network library that blocks in each of its calls, for ever or for a while. Group operations end by their deadlines
 * and name the call that blocks the rank's own proxy; epx_group_create and epx_group_destroy return within their
 * bounds; the process ends as it should; with enable_mask the other ranks go on.
 *
 * Each scenario is a process of its own with four ranks as threads, two to a node; the last rank's network is the bad
 * one. ctest: cost=45 labels=processes,noclang sleeps
 */
#include <pthread.h>
#include <sys/wait.h>

#include "group/abort.h"
#include "tests/unit/blocking_net.h"
#include "util/clock.h"
#include "util/runtime.h"

#include "tests/lib/child.h"
#include "tests/lib/fixture.h"
#include "tests/lib/slow.h"
#include "tests/lib/thread_boot.h"
#include "tests/lib/unit.h"

/* The bound of proxy_close is the greater of two seconds and half the deadline; of opening, three quarters. All of them
 * through slow_ms(), but for calls that block for ever. */
enum { RANKS = 4, LAST = RANKS - 1, DEADLINE_MS = 4000, END_MS = 2000, SLACK_MS = 3000 };

struct scenario {
    enum blocking_call call;
    int ms;      /* how long it blocks; -1 = for ever, or until rank() says so */
    int at_once; /* when the group is made; else when rank() says so */
    int enable_mask;
    int comes_back; /* from close, when that has been given up */
    int ends_after; /* what the process does at exit counts */
    int late; /* the last rank waits before this all-gather of a creation, of three, until libraries have been ended */
    int (*rank)(struct fixture *s, const struct scenario *scenario); /* NULL: the group cannot be made */
};

static int blocks_ms(const struct scenario *scenario)
{
    return scenario->ms < 0 ? scenario->ms : slow_ms(scenario->ms);
}

static int complain(struct fixture *s, const char *what)
{
    snprintf(s->why, sizeof(s->why), "%s (last error: %s)", what, epx_last_error());
    return -1;
}

static int64_t ms_since(uint64_t start)
{
    return (int64_t)((clock_ns() - start) / 1000000u);
}

/* It took longer than that, and some time for what is no waiting. */
static int is_late(uint64_t start, int ms)
{
    const char *sanitize = getenv("EPX_SANITIZE");

    return slow_late(start, ms + SLACK_MS * (sanitize && sanitize[0] ? 4 : 1));
}

/* The message names the rank and the network, and says that the proxy is blocked. */
static int names_cause(const char *text)
{
    return strstr(text, "rank 3") && strstr(text, "blocked in the network blocking_net");
}

/* ---- While a group works -------------------------------------------------------------------------------------- */

/* How messages name the call that blocks. */
static const char *state_of(enum blocking_call call)
{
    switch (call) {
    case BLOCKING_OPEN:
        return "opening";
    case BLOCKING_REGION:
        return "registering";
    case BLOCKING_CONNECT:
        return "connecting to rank";
    case BLOCKING_PUT:
        return "posting to rank";
    case BLOCKING_FLUSH:
        return "doorbell";
    case BLOCKING_POLL:
        return "polling";
    case BLOCKING_WAIT_FD:
    case BLOCKING_ARM:
        return "preparing to sleep";
    case BLOCKING_CLOSE:
        return "closing";
    default:
        return "";
    }
}

static epx_status destroy(struct fixture *s)
{
    const epx_status status = epx_group_destroy(s->group);

    s->group = NULL;
    return status;
}

/* What epx_group_destroy has returned since `start` for a group whose network is stuck: in time, and with the cause. */
static int end_says_why(struct fixture *s, const struct scenario *scenario, epx_status status, uint64_t start)
{
    if (status != EPX_ERR_TIMEOUT || !names_cause(epx_last_error()) ||
        !strstr(epx_last_error(), state_of(scenario->call)))
        return complain(s, "epx_group_destroy");
    if (is_late(start, END_MS))
        return complain(s, "epx_group_destroy took too long");
    return 0;
}

/* The last rank's network is stuck from here on. Its group can only be destroyed, and is. */
static int end_stuck(struct fixture *s, const struct scenario *scenario)
{
    epx_stats stats = EPX_STATS_INIT;
    epx_error_info info = EPX_ERROR_INFO_INIT;
    uint64_t start;

    if (epx_group_error(s->group, &info) == EPX_OK || !names_cause(info.message) ||
        !strstr(info.message, state_of(scenario->call)) || strncmp(info.message, "proxy ", 6) != 0)
        return complain(s, "the error does not tell that the own proxy is stuck, and in what");
    if (epx_group_stats(s->group, &stats) != EPX_OK || stats.net_stuck != 1)
        return complain(s, "the statistics do not tell of one stuck proxy");
    start = clock_ns();
    if (epx_group_error_clear(s->group) != EPX_ERR_TIMEOUT || !names_cause(epx_last_error()))
        return complain(s, "epx_group_error_clear");
    if (is_late(start, 0))
        return complain(s, "epx_group_error_clear took too long");
    start = clock_ns();
    return end_says_why(s, scenario, destroy(s), start);
}

/* Updates need all ranks, but one that has what it needs may end well while others wait in vain. */
static epx_status until_it_fails(struct fixture *s)
{
    epx_status status = EPX_OK;

    fixture_refill(s);
    for (int i = 0; i < 10 && status == EPX_OK; i++) {
        status = epx_handle_update(s->ht, &s->idx, NULL, NULL);
        if (status == EPX_OK)
            status = epx_stream_sync(s->group, NULL);
    }
    return status;
}

/* Since when the last rank's network blocks, or will; 0: the ranks did not come so far. */
static uint64_t block_last(struct fixture *s, const struct scenario *scenario)
{
    if (fixture_ll(s) || fixture_ht(s) || fixture_meet(s))
        return 0;
    if (s->rank == LAST && !scenario->at_once) {
        const int idle =
            scenario->call == BLOCKING_POLL || scenario->call == BLOCKING_WAIT_FD || scenario->call == BLOCKING_ARM;

        blocking_set_trap(scenario->call, LAST, blocks_ms(scenario));
        while (idle && !atomic_load(&blocking_trap.blocked))
            usleep(1000); /* a thread without work comes there by itself */
    }
    return fixture_meet(s) ? 0 : clock_ns();
}

/* Updates fail on all ranks, and in time: the rank that is stuck waits for half a timeout more, until the network reads
 * no memory of it any more. */
static int block_and_fail(struct fixture *s, const struct scenario *scenario)
{
    const uint64_t start = block_last(s, scenario);
    const epx_status status = start ? until_it_fails(s) : EPX_OK;

    if (status != EPX_ERR_TIMEOUT && status != EPX_ERR_PEER)
        return complain(s, "updates with a stuck network, or that miss a rank");
    if (is_late(start, DEADLINE_MS + DEADLINE_MS / 2))
        return complain(s, "the updates took too long");
    return 0;
}

static int stuck_at_work(struct fixture *s, const struct scenario *scenario)
{
    if (block_and_fail(s, scenario))
        return -1;
    return s->rank == LAST ? end_stuck(s, scenario) : 0;
}

static int rounds_without_last(struct fixture *s)
{
    fixture_set_active(s, LAST, 0);
    s->w.round = 100; /* that of all survivors */
    for (int i = 0; i < 3; i++)
        if (fixture_ll(s) || fixture_ht(s))
            return -1;
    return 0;
}

/* With enable_mask: the others find the last rank gone, and go on. */
static int survivors_go_on(struct fixture *s, const struct scenario *scenario)
{
    if (block_and_fail(s, scenario))
        return -1;
    if (s->rank == LAST)
        return end_stuck(s, scenario);
    if (epx_group_error_clear(s->group) != EPX_OK)
        return complain(s, "epx_group_error_clear of a survivor");
    return rounds_without_last(s);
}

/* Back before the deadline: nobody notices. */
static int only_slow(struct fixture *s, const struct scenario *scenario)
{
    epx_stats stats = EPX_STATS_INIT;

    if (!block_last(s, scenario))
        return -1;
    for (int i = 0; i < 3; i++)
        if (fixture_ll(s) || fixture_ht(s))
            return -1;
    if (epx_group_stats(s->group, &stats) != EPX_OK || stats.net_stuck != 0)
        return complain(s, "statistics");
    return 0;
}

static struct epx_group *late_group;

static int late_group_has_failed(void)
{
    return abort_word(late_group) != 0;
}

/* Back after the deadline: the group has failed, and starts over. */
static int back_late(struct fixture *s, const struct scenario *scenario)
{
    epx_status status;

    if (s->rank == LAST) {
        late_group = s->group;
        blocking_trap.until = late_group_has_failed;
    }
    if (!block_last(s, scenario))
        return -1;
    status = until_it_fails(s);
    if (status != EPX_ERR_TIMEOUT && status != EPX_ERR_PEER)
        return complain(s, "updates with a slow network");
    while (atomic_load(&blocking_trap.back) == 0)
        usleep(1000);
    if (fixture_meet(s))
        return -1;
    if (epx_group_error_clear(s->group) != EPX_OK)
        return complain(s, "epx_group_error_clear once the network is back");
    s->w.round = 100; /* that of all ranks */
    return fixture_ll(s) || fixture_ht(s) || fixture_ll(s) ? -1 : 0;
}

/* A group that has failed starts over: its network closes, and opens anew. The last rank gets no further; the others do
 * so without it, or are told. */
static int stuck_starting_over(struct fixture *s, const struct scenario *scenario)
{
    uint64_t start;
    epx_status status;

    if (fixture_ll(s) || fixture_ht(s) || fixture_meet(s))
        return -1;
    if (s->rank != LAST && until_it_fails(s) == EPX_OK)
        return complain(s, "updates without the last rank");
    if (fixture_meet(s))
        return -1;
    if (s->rank == LAST)
        blocking_set_trap(scenario->call, LAST, blocks_ms(scenario));
    if (fixture_meet(s))
        return -1;
    start = clock_ns();
    status = epx_group_error_clear(s->group);
    if (s->rank == LAST) {
        if (status != EPX_ERR_TIMEOUT || !names_cause(epx_last_error()) ||
            !strstr(epx_last_error(), state_of(scenario->call)))
            return complain(s, "epx_group_error_clear of the stuck rank");
        status = epx_group_destroy(s->group);
        s->group = NULL;
        if (status != EPX_ERR_TIMEOUT || !names_cause(epx_last_error()))
            return complain(s, "epx_group_destroy");
        return is_late(start, DEADLINE_MS + END_MS) ? complain(s, "it took too long") : 0;
    }
    if (is_late(start, 2 * DEADLINE_MS + END_MS))
        return complain(s, "epx_group_error_clear took too long");
    if (!scenario->enable_mask)
        return status == EPX_ERR_PEER || status == EPX_ERR_TIMEOUT ? 0 : complain(s, "epx_group_error_clear");
    if (status != EPX_OK)
        return complain(s, "epx_group_error_clear of a survivor");
    return rounds_without_last(s);
}

/* ---- At the end of a group ------------------------------------------------------------------------------------- */

static atomic_int gave_up;

static int close_was_given_up(void)
{
    return atomic_load(&gave_up);
}

static int stuck_in_close(struct fixture *s, const struct scenario *scenario)
{
    uint64_t start;
    epx_status status;

    if (s->rank == LAST && scenario->comes_back)
        blocking_trap.until = close_was_given_up;
    start = block_last(s, scenario);
    if (!start)
        return -1;
    status = destroy(s);
    if (s->rank != LAST)
        return status == EPX_OK ? 0 : complain(s, "epx_group_destroy of a good rank");
    if (end_says_why(s, scenario, status, start))
        return -1;
    atomic_store(&gave_up, 1);
    while (scenario->comes_back && atomic_load(&blocking_trap.back) == 0)
        usleep(1000);
    usleep(50000); /* the thread ends */
    return 0;
}

/* ---- At the end of the process --------------------------------------------------------------------------------- */

static struct fixture *left_open[RANKS];
static _Atomic uint64_t exit_began;

/* The group is not destroyed. */
static int leave_open(struct fixture *s, const struct scenario *scenario)
{
    (void)scenario;
    return fixture_ll(s) || fixture_ht(s) || fixture_meet(s) ? -1 : 0;
}

static void begin_exit(void)
{
    atomic_store(&exit_began, clock_ns());
}

static int exit_is_under_way(void)
{
    const uint64_t began = atomic_load(&exit_began);

    return began && ms_since(began) > 300;
}

/* A proxy that sleeps comes back within SLEEP_IDLE_NS of proxy/thread.c. Behind the destructors of EPX, which have no
 * number, as those of a network's library are. */
__attribute__((destructor(101))) static void end_the_library(void)
{
    const uint64_t began = atomic_load(&exit_began);

    if (!began)
        return;
    if (is_late(began, END_MS))
        _exit(4);
    atomic_store(&blocking_ended, 1);
    usleep(500000);
}

/* Its proxy is given up in a call, which returns when the process has begun to end. */
static int stuck_until_the_exit(struct fixture *s, const struct scenario *scenario)
{
    if (s->rank == LAST)
        blocking_trap.until = exit_is_under_way;
    return stuck_at_work(s, scenario);
}

static atomic_int late_waits;

struct late_boot {
    epx_bootstrap inner;
    int left;
};

static int late_allgather(void *context, const void *mine, void *all, size_t bytes)
{
    struct late_boot *boot = context;

    if (--boot->left == 0) {
        atomic_store(&late_waits, 1);
        while (!atomic_load(&blocking_ended))
            usleep(1000);
    }
    return boot->inner.allgather(boot->inner.context, mine, all, bytes);
}

/* The process ends meanwhile. */
static int create_late(int rank, epx_bootstrap *boot, const epx_group_config *config, int late)
{
    struct late_boot wrapped = {.inner = *boot, .left = late};
    epx_bootstrap given = *boot;
    epx_group *group = NULL;

    given.allgather = late_allgather;
    given.context = &wrapped;
    (void)epx_group_create(&group, rank == LAST ? &given : boot, config);
    pause(); /* this process has ended, or should have */
    return -1;
}

/* ---- Processes --------------------------------------------------------------------------------------------------- */

static int run_rank(int rank, int n, epx_bootstrap *boot, void *arg)
{
    const struct scenario *scenario = arg;
    epx_group_config config = fixture_config(slow_ms(DEADLINE_MS));
    const uint64_t start = clock_ns();
    struct fixture *s = calloc(1, sizeof(*s));
    int rc = 0;

    if (!s)
        return -1;
    config.ranks_per_node = 2;
    config.enable_mask = scenario->enable_mask;
    snprintf(config.net, sizeof(config.net), "%s", scenario->call == BLOCKING_PROBE ? "auto" : "blocking_net");
    if (scenario->late)
        return create_late(rank, boot, &config, scenario->late);
    if (scenario->rank) {
        rc = fixture_open(s, rank, n, boot, &config) || scenario->rank(s, scenario);
    } else {
        /* Creation fails on all ranks, and is over in time. */
        epx_status status = epx_group_create(&s->group, boot, &config);

        if (status != EPX_ERR_TIMEOUT && status != EPX_ERR_PEER)
            rc = complain(s, "epx_group_create with a stuck network");
        else if (!strstr(epx_last_error(), "has not returned") ||
                 (scenario->call != BLOCKING_PROBE && !strstr(epx_last_error(), "rank 3")))
            rc = complain(s, "epx_group_create does not say why");
        else if (is_late(start, DEADLINE_MS + END_MS))
            rc = complain(s, "epx_group_create took too long");
        else if (rank == LAST && scenario->call != BLOCKING_PROBE && status != EPX_ERR_TIMEOUT)
            rc = complain(s, "epx_group_create of the stuck rank");
    }
    if (rc)
        fprintf(stderr, "rank %d, %s: %s\n", rank, blocking_calls[scenario->call], s->why);
    if (scenario->rank == leave_open) {
        left_open[rank] = s;
        return rc;
    }
    fixture_close(s);
    free(s);
    return rc;
}

static void *run_scenario(void *scenario)
{
    (void)run_ranks(RANKS, run_rank, scenario);
    return NULL;
}

/* Returns while the ranks make their group. */
static void begin_creation(const struct scenario *scenario)
{
    pthread_t thread;

    if (pthread_create(&thread, NULL, run_scenario, (void *)(uintptr_t)scenario) != 0)
        _exit(1);
    for (int ms = 0; !atomic_load(&late_waits); ms++) {
        if (ms > slow_ms(DEADLINE_MS)) {
            fprintf(stderr, "a creation has fewer all-gathers than %d\n", scenario->late);
            _exit(1);
        }
        usleep(1000);
    }
    usleep(100000); /* the others come as far */
}

/* As programs do: with what runs at exit, leak checks among it; where these take seconds, one scenario of a test is
 * enough, if it is not the exit that is tested. */
static void leave(int status, int needed)
{
    const char *sanitize = getenv("EPX_SANITIZE");

    if (!needed && sanitize && !strcmp(sanitize, "address"))
        _exit(status);
    exit(status);
}

static pid_t begin(const struct scenario *scenario, int first)
{
    const pid_t pid = child_fork();

    assert_true(pid >= 0);
    if (pid > 0)
        return pid;
    alarm(600); /* waits for events have no other end */
    unsetenv("EPX_NET");
    runtime_swap(&(const struct runtime){.net_guest = &blocking_ops});
    if (scenario->at_once)
        blocking_set_trap(scenario->call, LAST, blocks_ms(scenario));
    if (scenario->late)
        begin_creation(scenario);
    else if (run_ranks(RANKS, run_rank, (void *)(uintptr_t)scenario) != 0)
        leave(1, first);
    if (scenario->ends_after)
        atexit(begin_exit);
    if (atomic_load(&blocking_trap.blocked) != (scenario->call != BLOCKING_NONE)) {
        fprintf(stderr, "%s: nothing blocked\n", blocking_calls[scenario->call]);
        leave(1, first);
    }
    leave(0, first || scenario->ends_after);
    return -1;
}

static void all_pass(const struct scenario *scenarios, int n)
{
    pid_t pids[BLOCKING_CALLS];
    int failures = 0;

    for (int i = 0; i < n; i++)
        pids[i] = begin(&scenarios[i], i == 0);
    for (int i = 0; i < n; i++) {
        int status = 0;

        assert_int_equal(waitpid(pids[i], &status, 0), pids[i]);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
            fprintf(stderr, "%s: wait status %#x\n", blocking_calls[scenarios[i].call], (unsigned)status);
            failures++;
        }
    }
    assert_int_equal(failures, 0);
}

#define ALL_PASS(scenarios) all_pass(scenarios, (int)(sizeof(scenarios) / sizeof(*(scenarios))))

static void stuck_while_a_group_is_made(void **state)
{
    static const struct scenario scenarios[] = {{.call = BLOCKING_PROBE, .ms = -1, .at_once = 1},
                                                {.call = BLOCKING_OPEN, .ms = -1, .at_once = 1},
                                                {.call = BLOCKING_REGION, .ms = -1, .at_once = 1},
                                                {.call = BLOCKING_ADDRESS, .ms = -1, .at_once = 1},
                                                {.call = BLOCKING_CONNECT, .ms = -1, .at_once = 1}};

    (void)state;
    ALL_PASS(scenarios);
}

static void stuck_while_a_group_works(void **state)
{
    static const struct scenario scenarios[] = {{.call = BLOCKING_PUT, .ms = -1, .rank = stuck_at_work},
                                                {.call = BLOCKING_FLUSH, .ms = -1, .rank = stuck_at_work},
                                                {.call = BLOCKING_POLL, .ms = -1, .rank = stuck_at_work},
                                                {.call = BLOCKING_WAIT_FD, .ms = -1, .rank = stuck_at_work},
                                                {.call = BLOCKING_ARM, .ms = -1, .rank = stuck_at_work}};

    (void)state;
    ALL_PASS(scenarios);
}

static void survivors_go_on_without_the_stuck(void **state)
{
    static const struct scenario scenarios[] = {
        {.call = BLOCKING_PUT, .ms = -1, .enable_mask = 1, .rank = survivors_go_on},
        {.call = BLOCKING_POLL, .ms = -1, .enable_mask = 1, .rank = survivors_go_on},
        {.call = BLOCKING_ARM, .ms = -1, .enable_mask = 1, .rank = survivors_go_on}};

    (void)state;
    ALL_PASS(scenarios);
}

static void stuck_while_a_group_starts_over(void **state)
{
    static const struct scenario scenarios[] = {
        {.call = BLOCKING_CLOSE, .ms = -1, .rank = stuck_starting_over},
        {.call = BLOCKING_OPEN, .ms = -1, .rank = stuck_starting_over},
        {.call = BLOCKING_CLOSE, .ms = -1, .enable_mask = 1, .rank = stuck_starting_over},
        {.call = BLOCKING_OPEN, .ms = -1, .enable_mask = 1, .rank = stuck_starting_over},
        {.call = BLOCKING_CONNECT, .ms = -1, .enable_mask = 1, .rank = stuck_starting_over}};

    (void)state;
    ALL_PASS(scenarios);
}

static void stuck_at_the_end_of_a_group(void **state)
{
    static const struct scenario scenarios[] = {
        {.call = BLOCKING_CLOSE, .ms = -1, .rank = stuck_in_close},
        {.call = BLOCKING_CLOSE, .ms = -1, .comes_back = 1, .rank = stuck_in_close}};

    (void)state;
    ALL_PASS(scenarios);
}

/* With a group that was not destroyed; with a thread that comes back in time; with one that does not; with a group that
 * is being made, of which one rank comes too late: to the first meeting, or when all have begun to open the network. */
static void nobody_is_in_the_network_when_libraries_end(void **state)
{
    static const struct scenario scenarios[] = {
        {.call = BLOCKING_NONE, .rank = leave_open, .ends_after = 1},
        {.call = BLOCKING_POLL, .ms = -1, .rank = stuck_until_the_exit, .ends_after = 1},
        {.call = BLOCKING_PUT, .ms = -1, .rank = stuck_at_work, .ends_after = 1},
        {.late = 1, .ends_after = 1},
        {.late = 2, .ends_after = 1},
        {.late = 3, .ends_after = 1}};

    (void)state;
    ALL_PASS(scenarios);
}

static void slow_is_not_stuck(void **state)
{
    static const struct scenario scenarios[] = {{.call = BLOCKING_PUT, .ms = 500, .rank = only_slow},
                                                {.call = BLOCKING_POLL, .ms = 500, .rank = only_slow},
                                                {.call = BLOCKING_ARM, .ms = 500, .rank = only_slow},
                                                {.call = BLOCKING_OPEN, .ms = 500, .rank = only_slow, .at_once = 1},
                                                {.call = BLOCKING_CONNECT, .ms = 500, .rank = only_slow, .at_once = 1}};

    (void)state;
    ALL_PASS(scenarios);
}

static void back_after_the_deadline(void **state)
{
    static const struct scenario scenarios[] = {{.call = BLOCKING_PUT, .ms = -1, .rank = back_late},
                                                {.call = BLOCKING_POLL, .ms = -1, .rank = back_late}};

    (void)state;
    ALL_PASS(scenarios);
}

UNIT_TESTS(stuck_while_a_group_is_made, stuck_while_a_group_works, survivors_go_on_without_the_stuck,
           stuck_while_a_group_starts_over, stuck_at_the_end_of_a_group, nobody_is_in_the_network_when_libraries_end,
           slow_is_not_stuck, back_after_the_deadline)
