/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Others on this machine while a job works: four ranks on two nodes over TCP, and processes that know every port on
 * which they listen. One keeps 1500 connections open to each, one writes nothing with completion data through
 * libfabric, as ranks do for signals, one sends noise. Results stay right, and a recovery in the midst of it names
 * nobody.
 * ctest: cost=12 labels=processes
 */
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "util/clock.h"
#include "tests/lib/child.h"
#include "tests/lib/fixture.h"
#include "tests/lib/forge.h"
#include "tests/lib/unit.h"

#if EPX_HAVE_OFI

enum { RANKS = 4, PORTS = 8, CONNECTIONS = 1500, LIMIT_MS = 60000 };

struct table {
    atomic_int works[RANKS], round[RANKS], done[RANKS];
    atomic_int last; /* how many rounds */
    char why[RANKS][512];
};

/* ---- A rank ------------------------------------------------------------------------------------------------------ */

static int work(struct fixture *s, struct table *table)
{
    for (int i = 0; i < atomic_load(&table->last); i++) {
        atomic_store(&table->round[s->rank], i);
        if (fixture_ll(s) || fixture_ht(s))
            return -1;
        atomic_store(&table->works[s->rank], 1);
    }
    /* Through connections between all ranks, at ports that others have connected to. */
    if (fixture_sync(s, epx_mask_clean(s->group, NULL)) != EPX_OK)
        return fixture_fail(s, "epx_mask_clean");
    for (int i = 0; i < 5; i++)
        if (fixture_ll(s) || fixture_ht(s))
            return -1;
    return 0;
}

static int be_rank(int rank, void *arg)
{
    struct table *table = arg;
    epx_group_config config = fixture_config(15000);
    struct fixture *s = calloc(1, sizeof(*s));
    int rc;

    if (!s)
        return 1;
    config.enable_mask = 1;
    config.ranks_per_node = 2;
    snprintf(config.net, sizeof(config.net), "ofi:tcp");
    rc = fixture_open(s, rank, RANKS, NULL, &config) || work(s, table);
    if (rc)
        snprintf(table->why[rank], sizeof(table->why[rank]), "%.500s", s->why);
    atomic_store(&table->done[rank], 1);
    fixture_close(s);
    free(s);
    return rc;
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
    struct sockaddr_in at[PORTS];

    for (int i = 0; i < count; i++)
        at[i] = address_of(ports[i]);
    forge_signals(at, count, RANKS);
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

static void a_job_among_strangers_is_right(void **state)
{
    static void (*const strangers[])(const int *, int) = {stay_connected, send_noise, forge};
    enum { STRANGERS = (int)(sizeof(strangers) / sizeof(strangers[0])) };
    struct table *table = child_share(sizeof(*table));
    const uint64_t deadline = clock_ns() + LIMIT_MS * (uint64_t)1000000;
    pid_t pids[RANKS], others[STRANGERS];
    int ports[PORTS], count, failed = 0;

    (void)state;
    assert_non_null(table);
    atomic_store(&table->last, INT_MAX);
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
    for (int r = 0; r < RANKS; r++)
        if (!child_succeeded(pids[r])) {
            fprintf(stderr, "rank %d: %s\n", r, table->why[r]);
            failed++;
        }
    for (int i = 0; i < STRANGERS; i++) {
        kill(others[i], SIGKILL);
        waitpid(others[i], NULL, 0);
    }
    assert_int_equal(failed, 0);
    assert_int_equal(count, 2 * RANKS); /* a port for data and one for membership each */
    child_unshare(table, sizeof(*table));
}

UNIT_MAIN(cmocka_unit_test(a_job_among_strangers_is_right))

#else

static void a_job_among_strangers_is_right(void **state)
{
    (void)state;
    print_message("this build has no libfabric\n");
    skip();
}

UNIT_MAIN(cmocka_unit_test(a_job_among_strangers_is_right))

#endif
