/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks as processes of this machine that connect over TCP, what they do then, and other services on their ports. */
#ifndef EPX_TESTS_UNIT_BOOT_FIXTURE_H
#define EPX_TESTS_UNIT_BOOT_FIXTURE_H

#include <arpa/inet.h>
#include <errno.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "boot/boot.h"
#include "boot/interface.h"
#include "boot/wire.h"
#include "util/clock.h"
#include "tests/lib/child.h"
#include "tests/lib/thread_boot.h"
#include "tests/lib/unit.h"
#include "tests/lib/slow.h"

enum { MAX_RANKS = 64, LIMIT_MS = 120000 };

/* ---- Ranks as processes -------------------------------------------------------------------------------------- */

enum { RUNNING = -2 };

struct outcome {
    volatile int status; /* epx_status; -1 = wrong data */
    double seconds;
    char text[512];
};

struct world {
    int nranks;
    int port;
    int timeout_ms;
    const char *host;
    int (*body)(const struct world *world, int rank);
    int absent[2]; /* ranks that are not started; 0 = none, as rank 0 always is */
    size_t bytes;
    int rank_as[MAX_RANKS];  /* RANK given to a process, where it is not 0 */
    int world_as[MAX_RANKS]; /* WORLD_SIZE likewise */
    struct outcome *outcomes;
    volatile int *last_may_come; /* shared with the ranks: last_comes_late waits for it */
    pid_t pids[MAX_RANKS];
};

/* So that a hanging process ends, on a busy machine too. */
static inline void limit_time(void)
{
    alarm((unsigned)slow_ms(LIMIT_MS) / 1000);
}

static inline int port_is_free(int port)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    int taken = bind(fd, (struct sockaddr *)&at, sizeof(at));

    close(fd);
    return !taken;
}

/* A port that is free with its next: below the range from which the system picks, and not where another run of this
 * test, which may go on at the same time, begins to look. */
static inline int some_port(void)
{
    static unsigned next;

    if (!next)
        next = (unsigned)getpid() * 7919u;
    do
        next += 20;
    while (!port_is_free((int)(12000 + next % 20000)) || !port_is_free((int)(12001 + next % 20000)));
    return (int)(12000 + next % 20000);
}

/* Keeps ranks of several runs of this test apart, should they find the same port. */
static inline void set_job_id(void)
{
    child_set_int("EPX_JOB_ID", (int)getpid());
}

/* Before the first case of a program. */
static inline int name_this_run(void **state)
{
    (void)state;
    set_job_id();
    return 0;
}

static int job_salt = 1;

static inline void be_rank(struct world *world, int rank)
{
    struct outcome *outcome = &world->outcomes[rank];
    uint64_t start = clock_ns();
    int status;

    limit_time();
    job_salt = world->port;
    child_set_int("RANK", world->rank_as[rank] ? world->rank_as[rank] : rank);
    child_set_int("WORLD_SIZE", world->world_as[rank] ? world->world_as[rank] : world->nranks);
    child_set_int("MASTER_PORT", world->port);
    setenv("MASTER_ADDR", world->host, 1);
    status = world->body(world, rank);
    snprintf(outcome->text, sizeof(outcome->text), "%s", epx_last_error());
    outcome->seconds = (double)(clock_ns() - start) * 1e-9;
    outcome->status = status;
    _exit(0);
}

static inline struct world world_make(int nranks, int (*body)(const struct world *world, int rank))
{
    struct world world = {.nranks = nranks,
                          .port = some_port(),
                          .timeout_ms = slow_ms(20000),
                          .host = "127.0.0.1",
                          .body = body,
                          .bytes = 64};

    world.outcomes = child_share((MAX_RANKS + 1) * sizeof(*world.outcomes));
    assert_non_null(world.outcomes);
    world.last_may_come = &world.outcomes[MAX_RANKS].status;
    return world;
}

static inline int is_absent(const struct world *world, int rank)
{
    return rank && (rank == world->absent[0] || rank == world->absent[1]);
}

static inline void world_start(struct world *world)
{
    *world->last_may_come = 0;
    for (int i = 0; i < world->nranks; i++)
        world->outcomes[i].status = RUNNING;
    for (int i = 0; i < world->nranks; i++) {
        world->pids[i] = -1;
        if (is_absent(world, i))
            continue;
        world->pids[i] = fork();
        assert_true(world->pids[i] >= 0);
        if (!world->pids[i])
            be_rank(world, i);
    }
}

/* Without a job id, so that others can say which job it is. */
static inline void world_start_unnamed(struct world *world)
{
    unsetenv("EPX_JOB_ID");
    world_start(world);
    set_job_id();
}

/* All ranks end; one that comes late has come by then. */
static inline void world_wait(struct world *world)
{
    *world->last_may_come = 1;
    for (int i = 0; i < world->nranks; i++)
        if (world->pids[i] > 0)
            waitpid(world->pids[i], NULL, 0);
}

static inline void world_run(struct world *world)
{
    world_start(world);
    world_wait(world);
}

static inline void world_end(struct world *world)
{
    child_unshare(world->outcomes, (MAX_RANKS + 1) * sizeof(*world->outcomes));
}

static inline void expect_all_ok(const struct world *world)
{
    for (int i = 0; i < world->nranks; i++) {
        if (world->outcomes[i].status)
            print_error("rank %d: status %d: %s\n", i, world->outcomes[i].status, world->outcomes[i].text);
        assert_int_equal(world->outcomes[i].status, EPX_OK);
    }
}

/* All of the world's ranks end well; it is gone then. */
static inline void world_succeeds(struct world *world)
{
    world_run(world);
    expect_all_ok(world);
    world_end(world);
}

/* The same with a variable set. */
static inline void world_succeeds_with(struct world *world, const char *name, const char *value)
{
    setenv(name, value, 1);
    world_run(world);
    unsetenv(name);
    expect_all_ok(world);
    world_end(world);
}

static inline void ranks_succeed(int nranks, int (*body)(const struct world *world, int rank))
{
    struct world world = world_make(nranks, body);

    world_succeeds(&world);
}

static inline void expect_failure(const struct world *world, int rank, epx_status status, const char *words)
{
    const struct outcome *outcome = &world->outcomes[rank];

    if (outcome->status != (int)status || !strstr(outcome->text, words))
        print_error("rank %d: status %d, \"%s\"; expected %d and \"%s\"\n", rank, outcome->status, outcome->text,
                    (int)status, words);
    assert_int_equal(outcome->status, status);
    assert_non_null(strstr(outcome->text, words));
}

/* Rank 0 says the words; ranks 1 and 3 repeat its message. */
static inline void expect_told(const struct world *world, epx_status status, const char *words)
{
    expect_failure(world, 0, status, words);
    expect_failure(world, 1, status, world->outcomes[0].text);
    expect_failure(world, 3, status, world->outcomes[0].text);
}

/* ---- Bodies of ranks ----------------------------------------------------------------------------------------- */

enum { PERIOD = 251 };

/* Differs between jobs, so that ranks of another one are noticed by what they give. */
static inline unsigned char pattern(int rank, size_t at, int round)
{
    return (unsigned char)(rank * 31 + (int)(at % PERIOD) + round * 7 + job_salt);
}

/* By memcpy and memcmp behind the first period: under sanitizers a loop over megabytes takes seconds. */
static inline void pattern_fill(unsigned char *to, size_t bytes, int rank, int round)
{
    for (size_t i = 0; i < bytes && i < PERIOD; i++)
        to[i] = pattern(rank, i, round);
    for (size_t done = PERIOD; done < bytes; done *= 2)
        memcpy(to + done, to, done < bytes - done ? done : bytes - done);
}

static inline int pattern_is(const unsigned char *data, size_t bytes, int rank, int round)
{
    for (size_t i = 0; i < bytes && i < PERIOD; i++)
        if (data[i] != pattern(rank, i, round))
            return 0;
    return bytes <= PERIOD || memcmp(data + PERIOD, data, bytes - PERIOD) == 0;
}

static inline int gather_checked(struct boot *boot, size_t bytes, int round)
{
    int nranks = boot_nranks(boot), rank = boot_rank(boot);
    unsigned char *send = malloc(bytes + 1), *recv = malloc(bytes * (size_t)nranks + 1);
    int status = EPX_ERR_MEMORY;

    if (!send || !recv)
        goto done;
    pattern_fill(send, bytes, rank, round);
    status = boot_allgather(boot, send, recv, bytes);
    for (int r = 0; !status && r < nranks; r++)
        if (!pattern_is(recv + (size_t)r * bytes, bytes, r, round))
            status = -1;
done:
    free(recv);
    free(send);
    return status;
}

static inline int open_and_gather(const struct world *world, int rank)
{
    struct boot *boot;
    int status = boot_open(NULL, world->timeout_ms, &boot);

    (void)rank;
    if (status)
        return status;
    for (int round = 0; !status && round < 3; round++)
        status = gather_checked(boot, world->bytes, round);
    boot_close(boot);
    return status;
}

/* Until all other ranks have ended: it is late, however long they wait. */
static inline void await_others(const struct world *world, int rank)
{
    for (int r = 0; r < world->nranks; r++)
        while (r != rank && !is_absent(world, r) && world->outcomes[r].status == RUNNING)
            poll(NULL, 0, 1); /* also in a signal handler */
}

/* A child of it, as a data loader, lives on. */
static inline int die_before_gather(const struct world *world, int rank)
{
    struct boot *boot;
    int status = boot_open(NULL, world->timeout_ms, &boot);

    status = status ? status : gather_checked(boot, 8, 0);
    if (!status && rank == 2) {
        usleep(100000);
        if (fork() == 0) {
            await_others(world, rank);
            _exit(0);
        }
        raise(SIGKILL);
    }
    return status ? status : gather_checked(boot, world->bytes, 1);
}

static inline int miss_gather(const struct world *world, int rank)
{
    struct boot *boot;
    int status = boot_open(NULL, world->timeout_ms, &boot);

    if (!status && rank == 2)
        await_others(world, rank);
    return status ? status : gather_checked(boot, world->bytes, 0);
}

static inline int gather_other_size(const struct world *world, int rank)
{
    struct boot *boot;
    int status = boot_open(NULL, world->timeout_ms, &boot);

    return status ? status : gather_checked(boot, rank == 2 ? 64 : 128, 0);
}

static inline int gather_twice_over(const struct world *world, int rank)
{
    struct boot *first, *second, *third;
    int status = boot_open(NULL, world->timeout_ms, &first);

    (void)rank;
    status = status ? status : gather_checked(first, 16, 0);
    status = status ? status : (int)boot_open(NULL, world->timeout_ms, &second);
    status = status ? status : gather_checked(second, 1000, 1);
    status = status ? status : gather_checked(first, 0, 2);
    if (status)
        return status;
    boot_close(first);
    boot_close(second);
    status = boot_open(NULL, world->timeout_ms, &third);
    status = status ? status : gather_checked(third, 5, 3);
    if (!status)
        boot_close(third);
    return status;
}

static inline int fail_then_connect_again(const struct world *world, int rank)
{
    struct boot *boot;
    int status = boot_open(NULL, world->timeout_ms, &boot);

    status = status ? status : gather_checked(boot, rank == 1 ? 8 : 16, 0);
    if (status != EPX_ERR_MISMATCH)
        return status ? status : -1;
    if (gather_checked(boot, 16, 0) != EPX_ERR_MISMATCH)
        return -1;
    boot_close(boot);
    return open_and_gather(world, rank);
}

static inline int gather_in_other_order(const struct world *world, int rank)
{
    struct boot *first, *second;
    int status = boot_open(NULL, world->timeout_ms, &first);

    status = status ? status : (int)boot_open(NULL, world->timeout_ms, &second);
    return status ? status : gather_checked(rank == 1 ? first : second, 8, 0);
}

/* The last rank comes when the test waits for the ranks, and not before. */
static inline int last_comes_late(const struct world *world, int rank)
{
    while (rank == world->nranks - 1 && !*world->last_may_come)
        usleep(1000);
    return open_and_gather(world, rank);
}

/* ---- Clients and services on the ports ---------------------------------------------------------------------- */

static inline int listen_at(int port)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;

    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    assert_true(fd >= 0);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    assert_int_equal(bind(fd, (struct sockaddr *)&at, sizeof(at)), 0);
    assert_int_equal(listen(fd, 64), 0);
    return fd;
}

static inline int connect_to(int port)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    uint64_t deadline = clock_ns() + 60000000000u;

    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    while (clock_ns() < deadline) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        if (!connect(fd, (struct sockaddr *)&at, sizeof(at)))
            return fd;
        close(fd);
        usleep(5000);
    }
    return -1;
}

/* Answers everybody with `text` ("" = closes at once). */
static inline pid_t start_service(int port, const char *text)
{
    int listener = listen_at(port);
    pid_t pid = fork();

    if (pid == 0) {
        signal(SIGPIPE, SIG_IGN);
        limit_time();
        for (;;) {
            int fd = accept(listener, NULL, NULL);
            if (fd < 0 || (text[0] && write(fd, text, strlen(text)) < 0) || close(fd))
                continue;
        }
    }
    close(listener);
    return pid;
}

static inline void stop_service(pid_t pid)
{
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
}

#endif
