/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Others on this machine while a job works: four ranks on two nodes over TCP, and processes that know every port on
 * which they listen.
 *
 * Those who come when all ranks have connected find closed doors (net/ofi/door.c). One tries to keep 1500 connections
 * open to each port, one to write nothing with completion data through libfabric, as ranks do for signals, one sends
 * noise. Results stay right, and a recovery in the midst of it names nobody.
 *
 * One who comes earlier gets in: it learns of each port when a rank begins to listen there, and the rank goes on when
 * it has connected. Ranks connect to each other a while later, so that what it writes reaches endpoints, the first ones
 * and those that recoveries open. It is refused; and when all ranks have connected, the stranger is shut out.
 * ctest: cost=18 labels=processes,noclang
 */
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "util/clock.h"
#include "tests/lib/child.h"
#include "tests/lib/fixture.h"
#include "tests/lib/forge.h"
#include "tests/lib/slow.h"
#include "tests/lib/unit.h"

#if EPX_HAVE_OFI

enum {
    RANKS = 4,
    PORTS = 8,
    CONNECTIONS = 1500,
    RECOVERIES = 3,
    ROUNDS = 20,
    LIMIT_MS = 60000,
    ARRIVE_MS = 10000,
    LATE_MS = 50,
    QUIET_MS = 300
};

struct table {
    atomic_int works[RANKS], round[RANKS], done[RANKS];
    atomic_int last; /* how many rounds */
    int timeout_ms;
    struct forge_targets targets; /* of the one who comes early */
    atomic_int missed;            /* ranks that it has not reached */
    atomic_int met, met_early;    /* endpoints that have refused something, and those that did during their recovery */
    atomic_int written;           /* endpoints that have refused arrivals, not the connection alone */
    char why[RANKS][512];
};

/* ---- A rank ------------------------------------------------------------------------------------------------------ */

/* What this rank's endpoint has refused; -1: failed. */
static long long refused_by(struct fixture *s)
{
    epx_stats stats = EPX_STATS_INIT;

    if (epx_group_stats(s->group, &stats) != EPX_OK)
        return fixture_fail(s, "epx_group_stats");
    return (long long)stats.net_refused;
}

static int work(struct fixture *s, struct table *table)
{
    long long refused;

    for (int i = 0; i < atomic_load(&table->last); i++) {
        atomic_store(&table->round[s->rank], i);
        if (fixture_ll(s) || fixture_ht(s))
            return -1;
        atomic_store(&table->works[s->rank], 1);
    }
    refused = refused_by(s);
    if (refused > 0)
        snprintf(s->why, sizeof(s->why), "somebody came in through a closed door");
    if (refused)
        return -1;
    /* Through connections between all ranks, at ports that others have connected to. */
    if (fixture_sync(s, epx_mask_clean(s->group, NULL)) != EPX_OK)
        return fixture_fail(s, "epx_mask_clean");
    for (int i = 0; i < 5; i++)
        if (fixture_ll(s) || fixture_ht(s))
            return -1;
    return 0;
}

static int open_and(int (*fn)(struct fixture *s, struct table *table), int rank, struct table *table)
{
    epx_group_config config = fixture_config(table->timeout_ms);
    struct fixture *s = calloc(1, sizeof(*s));
    int rc;

    if (!s)
        return 1;
    config.enable_mask = 1;
    config.ranks_per_node = 2;
    snprintf(config.net, sizeof(config.net), "ofi:tcp");
    rc = fixture_open(s, rank, RANKS, NULL, &config) || fn(s, table);
    if (rc)
        snprintf(table->why[rank], sizeof(table->why[rank]), "%.500s", s->why);
    atomic_store(&table->done[rank], 1);
    fixture_close(s);
    free(s);
    return rc;
}

static int be_rank(int rank, void *arg)
{
    return open_and(work, rank, arg);
}

/* ---- A rank whose ports are known at once ------------------------------------------------------------------------ */

static struct forge_targets *told; /* NULL: nobody */

/* In place of libc's, for libfabric too: who is told has connected before the caller can close the door. */
__attribute__((visibility("default"))) int listen(int fd, int backlog)
{
    struct sockaddr_in at = {0};
    socklen_t bytes = sizeof(at);
    struct pollfd caller = {.fd = fd, .events = POLLIN};
    const int rc = (int)syscall(SYS_listen, fd, backlog);

    if (rc || !told || getsockname(fd, (struct sockaddr *)&at, &bytes) || at.sin_family != AF_INET)
        return rc;
    forge_add(told, ntohs(at.sin_port));
    (void)poll(&caller, 1, ARRIVE_MS);
    return 0;
}

/* The same: somebody who is in has time to write before the last rank comes. */
__attribute__((visibility("default"))) int connect(int fd, const struct sockaddr *to, socklen_t bytes)
{
    if (told && to->sa_family == AF_INET)
        usleep(LATE_MS * 1000);
    return (int)syscall(SYS_connect, fd, to, bytes);
}

static int await_refused(struct fixture *s, struct table *table)
{
    const uint64_t deadline = clock_ns() + ARRIVE_MS * (uint64_t)1000000;
    long long refused;

    while (!(refused = refused_by(s)) && clock_ns() < deadline)
        usleep(1000);
    if (!refused) {
        atomic_fetch_add(&table->missed, 1);
        snprintf(s->why, sizeof(s->why), "nothing that was forged has arrived");
    }
    return refused > 0 ? 0 : -1;
}

/* The stranger goes on to write, and nothing of it arrives any more. */
static int expect_quiet(struct fixture *s, struct table *table)
{
    const long long before = refused_by(s);
    long long after;

    usleep(QUIET_MS * 1000);
    after = refused_by(s);
    if (before < 0 || after < 0)
        return -1;
    if (after > 2) /* more than the connection itself */
        atomic_fetch_add(&table->written, 1);
    if (after != before)
        snprintf(s->why, sizeof(s->why), "%lld arrivals were refused, and %lld more while all were connected", before,
                 after - before);
    return after != before ? -1 : 0;
}

/* Recoveries open endpoints anew: each is seen alone. */
static int work_beside_forger(struct fixture *s, struct table *table)
{
    for (int i = 0; i <= RECOVERIES; i++) {
        if (i &&
            (epx_group_stats_reset(s->group) != EPX_OK || fixture_sync(s, epx_mask_clean(s->group, NULL)) != EPX_OK))
            return fixture_fail(s, "epx_mask_clean");
        if (i)
            atomic_fetch_add(&table->met_early, refused_by(s) > 0);
        if (await_refused(s, table)) /* before the first operation */
            return -1;
        atomic_fetch_add(&table->met, 1);
        for (int k = 0; k < ROUNDS; k++)
            if (fixture_ll(s) || fixture_ht(s))
                return -1;
        if (expect_quiet(s, table))
            return -1;
    }
    return 0;
}

static int be_known_rank(int rank, void *arg)
{
    struct table *table = arg;

    told = &table->targets;
    return open_and(work_beside_forger, rank, table);
}

/* ---- Where ranks listen ------------------------------------------------------------------------------------------ */

static int has_socket(pid_t pid, unsigned long inode)
{
    char path[64], link[64], want[64];
    const struct dirent *entry;
    DIR *folder;
    int found = 0;

    snprintf(path, sizeof(path), "/proc/%d/fd", (int)pid);
    snprintf(want, sizeof(want), "socket:[%lu]", inode);
    folder = opendir(path);
    while (folder && !found && (entry = readdir(folder))) {
        const ssize_t n = readlinkat(dirfd(folder), entry->d_name, link, sizeof(link) - 1);
        link[n > 0 ? n : 0] = 0;
        found = !strcmp(link, want);
    }
    if (folder)
        closedir(folder);
    return found;
}

/* The ports of 127.0.0.1 on which the processes listen. */
static int find_ports(const pid_t *pids, int *ports)
{
    FILE *file = fopen("/proc/net/tcp", "r");
    char line[256];
    int count = 0;

    assert_non_null(file);
    while (count < PORTS && fgets(line, sizeof(line), file)) {
        unsigned port, state;
        unsigned long inode;
        if (sscanf(line, " %*d: %*8x:%x %*8x:%*x %x %*x:%*x %*x:%*x %*x %*d %*d %lu", &port, &state, &inode) != 3 ||
            state != 10)
            continue;
        for (int r = 0; r < RANKS; r++)
            if (has_socket(pids[r], inode)) {
                ports[count++] = (int)port;
                break;
            }
    }
    fclose(file);
    return count;
}

static struct sockaddr_in address_of(int port)
{
    return (struct sockaddr_in){
        .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons((uint16_t)port)};
}

/* ---- Strangers --------------------------------------------------------------------------------------------------- */

static void stay_connected(const int *ports, int count)
{
    const struct rlimit limit = {.rlim_cur = 16384, .rlim_max = 16384};

    setrlimit(RLIMIT_NOFILE, &limit);
    for (int i = 0; i < count * CONNECTIONS; i++) {
        const struct sockaddr_in at = address_of(ports[i % count]);
        const int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);

        if (fd >= 0)
            (void)connect(fd, (const struct sockaddr *)&at, sizeof(at));
    }
    for (;;)
        pause();
}

static void send_noise(const int *ports, int count)
{
    unsigned char noise[4096];

    for (unsigned round = 0;; round++) {
        const struct sockaddr_in at = address_of(ports[round % (unsigned)count]);
        const int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);

        for (size_t i = 0; i < sizeof(noise); i++)
            noise[i] = (unsigned char)(i * 31 + round * 7);
        if (fd >= 0) {
            (void)connect(fd, (const struct sockaddr *)&at, sizeof(at));
            usleep(2000);
            (void)!send(fd, noise, sizeof(noise), MSG_NOSIGNAL);
            close(fd);
        }
    }
}

static void forge(const int *ports, int count)
{
    static struct forge_targets targets;

    targets.host.s_addr = htonl(INADDR_LOOPBACK);
    for (int i = 0; i < count; i++)
        forge_add(&targets, ports[i]);
    forge_signals(&targets, FORGE_PORTS, RANKS);
}

static pid_t start_stranger(void (*be)(const int *ports, int count), const int *ports, int count)
{
    const pid_t pid = child_fork();

    if (!pid) {
        be(ports, count);
        _exit(0);
    }
    return pid;
}

/* ---- The job ----------------------------------------------------------------------------------------------------- */

static int all_work(const struct table *table)
{
    int count = 0;

    for (int r = 0; r < RANKS; r++)
        count += atomic_load(&table->works[r]) || atomic_load(&table->done[r]);
    return count == RANKS;
}

static void set_last_round(struct table *table)
{
    int most = 0;

    for (int r = 0; r < RANKS; r++)
        most = atomic_load(&table->round[r]) > most ? atomic_load(&table->round[r]) : most;
    atomic_store(&table->last, most + 20); /* ranks are at most two rounds apart */
}

static int count_failed(const pid_t *pids, const struct table *table)
{
    int failed = 0;

    for (int r = 0; r < RANKS; r++)
        if (!child_succeeded(pids[r])) {
            print_message("rank %d: %s\n", r, table->why[r]);
            failed++;
        }
    return failed;
}

static void a_job_among_strangers_is_right(void **state)
{
    static void (*const strangers[])(const int *, int) = {stay_connected, send_noise, forge};
    enum { STRANGERS = (int)(sizeof(strangers) / sizeof(strangers[0])) };
    struct table *table = child_share(sizeof(*table));
    const uint64_t deadline = clock_ns() + LIMIT_MS * (uint64_t)1000000;
    pid_t pids[RANKS], others[STRANGERS];
    int ports[PORTS], count, failed;

    (void)state;
    assert_non_null(table);
    atomic_store(&table->last, INT_MAX);
    table->timeout_ms = 15000;
    setenv("EPX_MASTER_PORTS", "17", 1);
    child_world(RANKS);
    assert_int_equal(child_start_ranks(pids, RANKS, be_rank, table), 0);
    while (!all_work(table) && clock_ns() < deadline)
        usleep(10000);
    count = find_ports(pids, ports);
    for (int i = 0; i < STRANGERS; i++)
        others[i] = start_stranger(strangers[i], ports, count);
    usleep(3000000);
    set_last_round(table);
    failed = count_failed(pids, table);
    for (int i = 0; i < STRANGERS; i++) {
        kill(others[i], SIGKILL);
        waitpid(others[i], NULL, 0);
    }
    assert_int_equal(failed, 0);
    assert_int_equal(count, 2 * RANKS); /* a port for data and one for membership each */
    child_unshare(table, sizeof(*table));
}

/* How many ranks fail beside one who writes to their endpoints. */
static int run_beside_forger(struct table *table)
{
    pid_t pids[RANKS], forger;
    int failed;

    table->targets.host.s_addr = htonl(INADDR_LOOPBACK);
    setenv("EPX_LOG", "error", 0); /* each endpoint warns of strangers */
    setenv("EPX_MASTER_PORTS", "17", 1);
    child_world(RANKS);
    forger = child_fork();
    if (!forger) {
        forge_signals(&table->targets, PORTS, RANKS);
        _exit(0);
    }
    assert_int_equal(child_start_ranks(pids, RANKS, be_known_rank, table), 0);
    failed = count_failed(pids, table);
    kill(forger, SIGKILL);
    waitpid(forger, NULL, 0);
    return failed;
}

static void forged_arrivals_are_refused(void **state)
{
    struct table *table = child_share(sizeof(*table));

    (void)state;
    assert_non_null(table);
    table->timeout_ms = 15000;
    assert_int_equal(run_beside_forger(table), 0);
    print_message(
        "%d endpoints refused strangers, %d of them during the recovery that opened them, %d their arrivals\n",
        atomic_load(&table->met), atomic_load(&table->met_early), atomic_load(&table->written));
    assert_int_equal(atomic_load(&table->met), RANKS * (1 + RECOVERIES));
    assert_true(atomic_load(&table->written) > 0);
    child_unshare(table, sizeof(*table));
}

UNIT_MAIN(cmocka_unit_test(a_job_among_strangers_is_right), cmocka_unit_test(forged_arrivals_are_refused))

#else

static void a_job_among_strangers_is_right(void **state)
{
    (void)state;
    print_message("this build has no libfabric\n");
    skip();
}

UNIT_MAIN(cmocka_unit_test(a_job_among_strangers_is_right))

#endif
