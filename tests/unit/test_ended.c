/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The end of a process is news to ranks that have no call in flight, on one node and between nodes, long before the
 * deadline of a minute; that of one which has left its group is not, nor is a stop; and children of a rank, by fork and
 * by exec, do not hide its end. ctest: cost=12 labels=ranks,noasan sleeps
 * noasan: each process takes a second to look for leaks at its end.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "util/clock.h"
#include "util/cloexec.h"
#include "tests/lib/child.h"
#include "tests/lib/fixture.h"
#include "tests/lib/slow.h"
#include "tests/lib/unit_net.h"

enum {
    RANKS = 4,
    VICTIM = 2,
    DEADLINE_MS = 60000,
    NODE_MS = 100,
    NODES_MS = 1000,
    EXIT_MS = 3000,
    QUIET_MS = 700,
    START_MS = 60000
};

enum act { IS_KILLED, EXITS, STOPS, LEAVES, IS_KILLED_WITH_CHILDREN };

struct story {
    const char *net; /* NULL: one node */
    enum act act;
    int mode, masks;
    int no_pidfd; /* the kernel has none */
};

struct table {
    atomic_int ready, done, inherited;
    atomic_llong struck_ns;
    pid_t children[2];
};

struct job {
    const struct story *story;
    struct table *table;
};

/* ---- Ranks ------------------------------------------------------------------------------------------------------- */

static int round_of(struct fixture *s, const struct story *story)
{
    return story->mode == EPX_LOW_LATENCY ? fixture_ll(s) : fixture_ht(s);
}

static int await(atomic_int *count, int all)
{
    const uint64_t until = clock_ns() + (uint64_t)slow_ms(START_MS) * 1000000u;

    while (atomic_load(count) < all && clock_ns() < until)
        usleep(200);
    return atomic_load(count) >= all;
}

static void start_children(struct table *table)
{
    char *const argv[] = {"sleep", "30", NULL}, *const none[] = {NULL};

    table->children[0] = fork();
    if (!table->children[0]) {
        sleep(30);
        _exit(0);
    }
    if (posix_spawn(&table->children[1], "/bin/sleep", NULL, NULL, argv, none) != 0)
        table->children[1] = 0;
}

/* What the victim does; it returns if it lives on. */
static int strike(struct fixture *s, const struct story *story, struct table *table)
{
    if (story->act == IS_KILLED_WITH_CHILDREN)
        start_children(table);
    atomic_store(&table->struck_ns, (long long)clock_ns());
    switch (story->act) {
    case EXITS:
        exit(0);
    case STOPS:
        raise(SIGSTOP);
        return 0;
    case LEAVES:
        if (epx_group_destroy(s->group) != EPX_OK)
            return fixture_fail(s, "epx_group_destroy");
        s->group = NULL;
        _exit(0);
    default:
        raise(SIGKILL);
        return -1;
    }
}

static int expect_quiet(struct fixture *s, int fd)
{
    struct pollfd news = {.fd = fd, .events = POLLIN};

    if (poll(&news, 1, QUIET_MS) != 0 || epx_group_error(s->group, NULL) != EPX_OK)
        return fixture_fail(s, "news of a rank that has not ended");
    return 0;
}

static int expect_news(struct fixture *s, int fd, const struct story *story, const struct table *table)
{
    /* A sanitizer's own exit takes a second. */
    const int bar = slow_ms(story->net || story->no_pidfd ? NODES_MS : NODE_MS) + (story->act == EXITS ? EXIT_MS : 0);
    struct pollfd news = {.fd = fd, .events = POLLIN};
    epx_error_info info = EPX_ERROR_INFO_INIT;
    const int came = poll(&news, 1, DEADLINE_MS / 2);
    const double ms = (double)((long long)clock_ns() - atomic_load(&table->struck_ns)) / 1e6;

    if (came != 1 || epx_group_error(s->group, &info) != EPX_ERR_PEER)
        return fixture_fail(s, "no news of a rank that has ended");
    if (info.peer != VICTIM || strcmp(info.phase, "ended") != 0 || !strstr(info.message, "rank 2 has ended"))
        return fixture_fail(s, info.message);
    if (ms > bar)
        fprintf(stderr, "rank %d: told after %.0f ms, expected at most %d ms\n", s->rank, ms, bar);
    return ms > bar ? fixture_fail(s, "told too late") : 0;
}

/* With masks the others recover, and the descriptor is quiet again. Without, a recovery fails at once. */
static int go_on(struct fixture *s, int fd, const struct story *story)
{
    const uint64_t before = clock_ns();
    const epx_status status = epx_group_error_clear(s->group);

    if (!story->masks)
        return status == EPX_ERR_PEER && clock_ns() - before < (uint64_t)DEADLINE_MS * 500000u
                   ? 0
                   : fixture_fail(s, "epx_group_error_clear without masks");
    if (status != EPX_OK)
        return fixture_fail(s, "epx_group_error_clear");
    fixture_set_active(s, VICTIM, 0);
    if (story->mode == EPX_LOW_LATENCY) /* the first operation masks it, and reports that */
        return 0;
    return expect_quiet(s, fd) || round_of(s, story);
}

static void count_inherited(int fd, void *arg)
{
    *(int *)arg += fd > 2 && !(fcntl(fd, F_GETFD) & FD_CLOEXEC);
}

static int inherited(void)
{
    int count = 0;

    cloexec_each(count_inherited, &count);
    return count;
}

static int play_rank(struct fixture *s, const struct story *story, struct table *table, int before)
{
    int fd = -1;

    if (round_of(s, story) || epx_group_error_fd(s->group, &fd) != EPX_OK)
        return fixture_fail(s, "the start");
    atomic_fetch_add(&table->inherited, inherited() - before);
    atomic_fetch_add(&table->ready, 1);
    if (!await(&table->ready, RANKS))
        return fixture_fail(s, "the others are not ready");
    if (s->rank == VICTIM && strike(s, story, table))
        return -1;
    if (s->rank != VICTIM && (story->act == STOPS || story->act == LEAVES) && expect_quiet(s, fd))
        return -1;
    if (story->act == LEAVES)
        return 0;
    if (story->act != STOPS)
        return expect_news(s, fd, story, table) || go_on(s, fd, story);
    atomic_fetch_add(&table->done, 1); /* the parent wakes the victim when all others are here */
    return await(&table->done, RANKS) ? round_of(s, story) : -1;
}

/* As a kernel before 5.3. */
static int forbid_pidfd(void)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_pidfd_open, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const struct sock_fprog program = {.len = sizeof(code) / sizeof(code[0]), .filter = code};

    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
}

static int be_rank(int rank, void *arg)
{
    const struct story *story = ((struct job *)arg)->story;
    epx_group_config config = fixture_config(DEADLINE_MS);
    struct fixture *s = calloc(1, sizeof(*s));
    const int before = inherited();
    int rc = -1;

    if (!s || (story->no_pidfd && forbid_pidfd()))
        return 1;
    config.modes = (uint32_t)story->mode;
    config.enable_mask = story->masks;
    config.ranks_per_node = story->net ? RANKS / 2 : 0;
    snprintf(config.net, sizeof(config.net), "%s", story->net ? story->net : "");
    if (fixture_open(s, rank, RANKS, NULL, &config) == 0)
        rc = play_rank(s, story, ((struct job *)arg)->table, before);
    if (rc)
        fprintf(stderr, "rank %d: %s\n", rank, s->why);
    fixture_close(s);
    free(s);
    return rc != 0;
}

/* ---- The parent -------------------------------------------------------------------------------------------------- */

static void end_children(const struct table *table)
{
    for (int i = 0; i < 2; i++)
        if (table->children[i] > 0)
            kill(table->children[i], SIGKILL);
}

static void play(void **state)
{
    const struct story *story = *state;
    struct table *table = child_share(sizeof(*table));
    struct job job = {story, table};
    int failures = 0, status;
    pid_t pids[RANKS];

    unit_need_net(story->net);
    assert_non_null(table);
    child_world(RANKS);
    assert_int_equal(child_start_ranks(pids, RANKS, be_rank, &job), 0);
    if (story->act == STOPS) {
        assert_true(await(&table->done, RANKS - 1));
        kill(pids[VICTIM], SIGCONT);
    }
    for (int r = 0; r < RANKS; r++) {
        assert_int_equal(waitpid(pids[r], &status, 0), pids[r]);
        failures += !(WIFEXITED(status) && WEXITSTATUS(status) == 0) && (r != VICTIM || WIFEXITED(status));
    }
    end_children(table);
    if (story->act == IS_KILLED_WITH_CHILDREN)
        assert_int_equal(atomic_load(&table->inherited), 0);
    child_unshare(table, sizeof(*table));
    assert_int_equal(failures, 0);
}

#define STORY(name, ...) UNIT_CASE(name, play, &((struct story){__VA_ARGS__}))

static int set_up(void **state)
{
    (void)state;
    child_forget_settings();
    setenv("EPX_BOOT_TIMEOUT_MS", "60000", 1); /* a busy machine */
    setenv("EPX_LOG", "error", 0);
    return 0;
}

UNIT_MAIN_WITHIN(set_up, NULL, STORY("killed_on_one_node", NULL, IS_KILLED, EPX_LOW_LATENCY, 0, 0),
                 STORY("killed_on_two_nodes", "ofi:tcp", IS_KILLED, EPX_LOW_LATENCY, 0, 0),
                 STORY("killed_with_masks_ll", NULL, IS_KILLED, EPX_LOW_LATENCY, 1, 0),
                 STORY("killed_with_masks_ht", NULL, IS_KILLED, EPX_HIGH_THROUGHPUT, 1, 0),
                 STORY("killed_with_masks_on_two_nodes", "ofi:tcp", IS_KILLED, EPX_HIGH_THROUGHPUT, 1, 0),
                 STORY("exits_without_destroy", NULL, EXITS, EPX_HIGH_THROUGHPUT, 0, 0),
                 STORY("exits_on_two_nodes", "ofi:tcp", EXITS, EPX_HIGH_THROUGHPUT, 0, 0),
                 STORY("stops_on_one_node", NULL, STOPS, EPX_LOW_LATENCY, 1, 0),
                 STORY("stops_on_two_nodes", "ofi:tcp", STOPS, EPX_HIGH_THROUGHPUT, 0, 0),
                 STORY("leaves_on_one_node", NULL, LEAVES, EPX_LOW_LATENCY, 1, 0),
                 STORY("leaves_on_two_nodes", "ofi:tcp", LEAVES, EPX_LOW_LATENCY, 0, 0),
                 STORY("children_do_not_hide_it_on_one_node", NULL, IS_KILLED_WITH_CHILDREN, EPX_LOW_LATENCY, 0, 0),
                 STORY("children_do_not_hide_it_on_two_nodes", "ofi:tcp", IS_KILLED_WITH_CHILDREN, EPX_HIGH_THROUGHPUT,
                       0, 0),
                 STORY("without_pidfd", NULL, IS_KILLED, EPX_LOW_LATENCY, 0, 1))
