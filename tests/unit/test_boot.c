/* SPDX-License-Identifier: Apache-2.0 */
/* The bootstrap over TCP: ranks as processes of this machine, and every way in which the rendezvous can fail. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <arpa/inet.h>
#include <errno.h>
#include <net/if.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "boot/boot.h"
#include "boot/interface.h"
#include "boot/wire.h"
#include "tests/lib/thread_boot.h"
#include "util/clock.h"

enum { MAX_RANKS = 64, LIMIT_S = 60 };

/* ---- Ranks as processes -------------------------------------------------------------------------------------- */

struct outcome {
    int status; /* epx_status; -1 = wrong data */
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
    pid_t pids[MAX_RANKS];
};

static int port_is_free(int port)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    int taken = bind(fd, (struct sockaddr *)&at, sizeof(at));

    close(fd);
    return !taken;
}

/* A port that is free with its next: below the range from which the system picks, and not where another run of this
 * test, which may go on at the same time, begins to look. */
static int some_port(void)
{
    static unsigned next;

    if (!next)
        next = (unsigned)getpid() * 7919u;
    do
        next += 20;
    while (!port_is_free((int)(12000 + next % 20000)) || !port_is_free((int)(12001 + next % 20000)));
    return (int)(12000 + next % 20000);
}

static void set_int(const char *name, int value)
{
    char text[16];

    snprintf(text, sizeof(text), "%d", value);
    setenv(name, text, 1);
}

/* Keeps ranks of several runs of this test apart, should they find the same port. */
static void name_this_run(void)
{
    set_int("EPX_JOB_ID", (int)getpid());
}

static int job_salt = 1;

static void be_rank(struct world *world, int rank)
{
    struct outcome *outcome = &world->outcomes[rank];
    uint64_t start = clock_ns();

    alarm(LIMIT_S);
    job_salt = world->port;
    set_int("RANK", world->rank_as[rank] ? world->rank_as[rank] : rank);
    set_int("WORLD_SIZE", world->world_as[rank] ? world->world_as[rank] : world->nranks);
    set_int("MASTER_PORT", world->port);
    setenv("MASTER_ADDR", world->host, 1);
    outcome->status = world->body(world, rank);
    snprintf(outcome->text, sizeof(outcome->text), "%s", epx_last_error());
    outcome->seconds = (double)(clock_ns() - start) * 1e-9;
    _exit(0);
}

static struct world world_make(int nranks, int (*body)(const struct world *world, int rank))
{
    struct world world = {
        .nranks = nranks, .port = some_port(), .timeout_ms = 20000, .host = "127.0.0.1", .body = body, .bytes = 64};

    world.outcomes =
        mmap(NULL, MAX_RANKS * sizeof(*world.outcomes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(world.outcomes != MAP_FAILED);
    return world;
}

static void world_start(struct world *world)
{
    for (int i = 0; i < world->nranks; i++) {
        world->outcomes[i].status = -2;
        world->pids[i] = -1;
        if (i && (i == world->absent[0] || i == world->absent[1]))
            continue;
        world->pids[i] = fork();
        assert_true(world->pids[i] >= 0);
        if (!world->pids[i])
            be_rank(world, i);
    }
}

static void world_wait(struct world *world)
{
    for (int i = 0; i < world->nranks; i++)
        if (world->pids[i] > 0)
            waitpid(world->pids[i], NULL, 0);
}

static void world_run(struct world *world)
{
    world_start(world);
    world_wait(world);
}

static void world_end(struct world *world)
{
    munmap(world->outcomes, MAX_RANKS * sizeof(*world->outcomes));
}

static void expect_all_ok(const struct world *world)
{
    for (int i = 0; i < world->nranks; i++) {
        if (world->outcomes[i].status)
            print_error("rank %d: status %d: %s\n", i, world->outcomes[i].status, world->outcomes[i].text);
        assert_int_equal(world->outcomes[i].status, EPX_OK);
    }
}

static void expect_failure(const struct world *world, int rank, epx_status status, const char *words)
{
    const struct outcome *outcome = &world->outcomes[rank];

    if (outcome->status != (int)status || !strstr(outcome->text, words))
        print_error("rank %d: status %d, \"%s\"; expected %d and \"%s\"\n", rank, outcome->status, outcome->text,
                    (int)status, words);
    assert_int_equal(outcome->status, status);
    assert_non_null(strstr(outcome->text, words));
}

/* ---- Bodies of ranks ----------------------------------------------------------------------------------------- */

/* Differs between jobs, so that ranks of another one are noticed by what they give. */
static unsigned char pattern(int rank, size_t at, int round)
{
    return (unsigned char)(rank * 31 + (int)(at % 251) + round * 7 + job_salt);
}

static int gather_checked(struct boot *boot, size_t bytes, int round)
{
    int nranks = boot_nranks(boot), rank = boot_rank(boot);
    unsigned char *send = malloc(bytes + 1), *recv = malloc(bytes * (size_t)nranks + 1);
    int status = EPX_ERR_MEMORY;

    if (!send || !recv)
        goto done;
    for (size_t i = 0; i < bytes; i++)
        send[i] = pattern(rank, i, round);
    status = boot_allgather(boot, send, recv, bytes);
    for (int r = 0; !status && r < nranks; r++)
        for (size_t i = 0; i < bytes; i++)
            if (recv[(size_t)r * bytes + i] != pattern(r, i, round))
                status = -1;
done:
    free(recv);
    free(send);
    return status;
}

static int open_and_gather(const struct world *world, int rank)
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

static int die_before_gather(const struct world *world, int rank)
{
    struct boot *boot;
    int status = boot_open(NULL, world->timeout_ms, &boot);

    if (status)
        return status;
    status = gather_checked(boot, 8, 0);
    if (rank == 2) {
        usleep(100000);
        raise(SIGKILL);
    }
    return status ? status : gather_checked(boot, world->bytes, 1);
}

static int sleep_before_gather(const struct world *world, int rank)
{
    struct boot *boot;
    int status = boot_open(NULL, world->timeout_ms, &boot);

    if (status)
        return status;
    if (rank == 2)
        sleep(3);
    return gather_checked(boot, world->bytes, 0);
}

static int gather_other_size(const struct world *world, int rank)
{
    struct boot *boot;
    int status = boot_open(NULL, world->timeout_ms, &boot);

    return status ? status : gather_checked(boot, rank == 2 ? 64 : 128, 0);
}

static int gather_twice_over(const struct world *world, int rank)
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

static int fail_then_meet_again(const struct world *world, int rank)
{
    struct boot *boot;
    int status = boot_open(NULL, world->timeout_ms, &boot);

    if (status)
        return status;
    status = gather_checked(boot, rank == 1 ? 8 : 16, 0);
    if (status != EPX_ERR_MISMATCH)
        return status ? status : -1;
    if (gather_checked(boot, 16, 0) != EPX_ERR_MISMATCH)
        return -1;
    boot_close(boot);
    return open_and_gather(world, rank);
}

static int gather_in_other_order(const struct world *world, int rank)
{
    struct boot *first, *second;
    int status = boot_open(NULL, world->timeout_ms, &first);

    status = status ? status : (int)boot_open(NULL, world->timeout_ms, &second);
    return status ? status : gather_checked(rank == 1 ? first : second, 8, 0);
}

static int last_comes_late(const struct world *world, int rank)
{
    if (rank == world->nranks - 1)
        usleep(500000);
    return open_and_gather(world, rank);
}

/* ---- Other services on the ports ------------------------------------------------------------------------------ */

static int listen_at(int port)
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

/* Answers everybody with `text` ("" = closes at once). */
static pid_t start_service(int port, const char *text)
{
    int listener = listen_at(port);
    pid_t pid = fork();

    if (pid == 0) {
        signal(SIGPIPE, SIG_IGN);
        alarm(LIMIT_S);
        for (;;) {
            int fd = accept(listener, NULL, NULL);
            if (fd < 0 || (text[0] && write(fd, text, strlen(text)) < 0) || close(fd))
                continue;
        }
    }
    close(listener);
    return pid;
}

static void stop_service(pid_t pid)
{
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
}

/* ---- Tests: rendezvous --------------------------------------------------------------------------------------- */

static void every_rank_gets_the_data_of_all(void **state)
{
    struct world world = world_make(4, open_and_gather);

    (void)state;
    world_run(&world);
    expect_all_ok(&world);
    world_end(&world);
}

static void sixty_four_ranks_meet(void **state)
{
    struct world world = world_make(64, open_and_gather);

    (void)state;
    world_run(&world);
    expect_all_ok(&world);
    world_end(&world);
}

static void megabytes_are_gathered(void **state)
{
    struct world world = world_make(4, open_and_gather);

    (void)state;
    world.bytes = 5000003;
    world_run(&world);
    expect_all_ok(&world);
    world_end(&world);
}

static void ranks_meet_over_ipv6(void **state)
{
    struct sockaddr_in6 at = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    struct world world = world_make(3, open_and_gather);
    int fd = socket(AF_INET6, SOCK_STREAM, 0);
    int usable = fd >= 0 && !bind(fd, (struct sockaddr *)&at, sizeof(at));

    (void)state;
    if (fd >= 0)
        close(fd);
    if (!usable) {
        world_end(&world);
        print_message("no IPv6 on this machine\n");
        skip();
    }
    world.host = "::1";
    world_run(&world);
    expect_all_ok(&world);
    world_end(&world);
}

static void ranks_meet_by_host_name(void **state)
{
    struct world world = world_make(3, open_and_gather);

    (void)state;
    world.host = "localhost";
    world_run(&world);
    expect_all_ok(&world);
    world_end(&world);
}

/* The address and name of an interface that is not the loopback, if there is one. */
static int find_interface(char name[IF_NAMESIZE], char host[INET_ADDRSTRLEN])
{
    struct endpoint all[16];
    struct if_nameindex *list = if_nameindex();
    int found = 0, count;

    for (struct if_nameindex *at = list; at && at->if_index && !found; at++) {
        char spec[IF_NAMESIZE + 1];
        snprintf(spec, sizeof(spec), "=%s", at->if_name);
        if (interface_addresses(spec, all, 16, &count))
            continue;
        for (int i = 0; i < count && !found; i++)
            if (all[i].address.ss_family == AF_INET && !endpoint_is_loopback(&all[i])) {
                snprintf(name, IF_NAMESIZE, "%s", at->if_name);
                inet_ntop(AF_INET, &((struct sockaddr_in *)&all[i].address)->sin_addr, host, INET_ADDRSTRLEN);
                found = 1;
            }
    }
    if_freenameindex(list);
    return found;
}

static void ranks_meet_on_a_chosen_interface(void **state)
{
    char name[IF_NAMESIZE], host[INET_ADDRSTRLEN];
    struct world world;

    (void)state;
    if (!find_interface(name, host)) {
        print_message("no interface but the loopback\n");
        skip();
    }
    world = world_make(3, open_and_gather);
    world.host = host;
    setenv("EPX_SOCKET_IFNAME", name, 1);
    world_run(&world);
    unsetenv("EPX_SOCKET_IFNAME");
    expect_all_ok(&world);
    world_end(&world);
}

static void an_unknown_interface_is_refused(void **state)
{
    struct world world = world_make(2, open_and_gather);

    (void)state;
    world.host = "192.0.2.1";
    setenv("EPX_SOCKET_IFNAME", "=nosuch0", 1);
    world_run(&world);
    unsetenv("EPX_SOCKET_IFNAME");
    for (int i = 0; i < 2; i++)
        expect_failure(&world, i, EPX_ERR_ARGUMENT,
                       "\"=nosuch0\", which selects no interface that is up; interfaces: lo");
    world_end(&world);
}

static void the_interface_has_no_say_on_loopback(void **state)
{
    struct world world = world_make(2, open_and_gather);

    (void)state;
    setenv("EPX_SOCKET_IFNAME", "=nosuch0", 1);
    world_run(&world);
    unsetenv("EPX_SOCKET_IFNAME");
    expect_all_ok(&world);
    world_end(&world);
}

static void interfaces_are_picked_as_by_nccl(void **state)
{
    (void)state;
    assert_true(interface_match("eth", "eth0"));
    assert_true(interface_match("ib,eth", "eth1"));
    assert_false(interface_match("ib,eth", "lo"));
    assert_true(interface_match("=eth0", "eth0"));
    assert_false(interface_match("=eth0", "eth01"));
    assert_true(interface_match("^docker,lo", "eth0"));
    assert_false(interface_match("^docker,lo", "docker0"));
    assert_true(interface_match("^=lo", "lo1"));
    assert_false(interface_match("^=lo", "lo"));
    assert_false(interface_match(",", "eth0"));
}

static void epx_master_port_overrides(void **state)
{
    struct world world = world_make(2, open_and_gather);
    pid_t junk = start_service(world.port, "");

    (void)state;
    set_int("EPX_MASTER_PORT", some_port());
    world_run(&world);
    unsetenv("EPX_MASTER_PORT");
    stop_service(junk);
    expect_all_ok(&world);
    world_end(&world);
}

/* ---- Tests: other services ------------------------------------------------------------------------------------- */

static void a_silent_service_on_the_port_is_passed_over(void **state)
{
    struct world world = world_make(4, open_and_gather);
    int listener = listen_at(world.port);

    (void)state;
    world_run(&world);
    close(listener);
    expect_all_ok(&world);
    assert_true(world.outcomes[1].seconds < 4);
    world_end(&world);
}

static void services_that_answer_nonsense_are_passed_over(void **state)
{
    struct world world = world_make(4, open_and_gather);
    pid_t http = start_service(world.port, "HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n");
    pid_t rude = start_service(world.port + 1, "");

    (void)state;
    world_run(&world);
    stop_service(http);
    stop_service(rude);
    expect_all_ok(&world);
    world_end(&world);
}

static int connect_to(int port)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    uint64_t deadline = clock_ns() + 5000000000u;

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

static void unknown_clients_of_rank_0_do_no_harm(void **state)
{
    static const char junk[] = "GET / HTTP/1.1\r\nHost: nobody\r\nAccept: nothing at all\r\n\r\n";
    struct world world = world_make(2, last_comes_late);
    int silent, loud;

    (void)state;
    world_start(&world);
    silent = connect_to(world.port);
    loud = connect_to(world.port);
    assert_true(silent >= 0 && loud >= 0);
    assert_true(write(loud, junk, sizeof(junk)) > 0);
    world_wait(&world);
    close(silent);
    close(loud);
    expect_all_ok(&world);
    world_end(&world);
}

static void neighbouring_jobs_do_not_mix(void **state)
{
    struct world first = world_make(3, last_comes_late), second = world_make(3, open_and_gather);
    int listener = listen_at(first.port);

    (void)state;
    second.port = first.port + 1; /* which the first takes, as its own is occupied */
    world_start(&first);
    usleep(100000);
    world_run(&second);
    world_wait(&first);
    close(listener);
    expect_all_ok(&first);
    expect_all_ok(&second);
    world_end(&first);
    world_end(&second);
}

static void jobs_on_one_port_are_told_apart_by_id(void **state)
{
    struct world first = world_make(3, last_comes_late), second = world_make(2, open_and_gather);

    (void)state;
    second.port = first.port;
    setenv("EPX_JOB_ID", "first", 1);
    world_start(&first);
    usleep(100000);
    setenv("EPX_JOB_ID", "second", 1);
    world_run(&second);
    name_this_run();
    world_wait(&first);
    expect_all_ok(&first);
    expect_all_ok(&second);
    world_end(&first);
    world_end(&second);
}

/* ---- Tests: failures ----------------------------------------------------------------------------------------- */

static void missing_ranks_are_named_on_all(void **state)
{
    struct world world = world_make(5, open_and_gather);

    (void)state;
    world.timeout_ms = 600;
    world.absent[0] = 2;
    world.absent[1] = 4;
    world_run(&world);
    expect_failure(&world, 0, EPX_ERR_TIMEOUT, "ranks 2 and 4 did not connect within 600 ms");
    expect_failure(&world, 1, EPX_ERR_TIMEOUT, world.outcomes[0].text);
    expect_failure(&world, 3, EPX_ERR_TIMEOUT, world.outcomes[0].text);
    world_end(&world);
}

static void a_missing_rank_0_is_named(void **state)
{
    struct world world = world_make(3, open_and_gather);

    (void)state;
    world.timeout_ms = 400;
    world.rank_as[0] = 1; /* the first process is a rank 1 too, so that there is no rank 0 */
    world_run(&world);
    expect_failure(&world, 1, EPX_ERR_TIMEOUT, "rank 0 did not reply at 127.0.0.1");
    expect_failure(&world, 2, EPX_ERR_TIMEOUT, "within 400 ms");
    world_end(&world);
}

static void an_unknown_host_ends_at_the_deadline(void **state)
{
    struct world world = world_make(2, open_and_gather);

    (void)state;
    world.timeout_ms = 400;
    world.host = "no-such-host.invalid";
    world_run(&world);
    expect_failure(&world, 1, EPX_ERR_TIMEOUT, "no-such-host.invalid");
    assert_true(world.outcomes[1].seconds < 3);
    world_end(&world);
}

static void a_death_is_named_at_once(void **state)
{
    struct world world = world_make(4, die_before_gather);

    (void)state;
    world_run(&world);
    expect_failure(&world, 0, EPX_ERR_PEER, "rank 2 ended during all-gather 2");
    expect_failure(&world, 1, EPX_ERR_PEER, world.outcomes[0].text);
    expect_failure(&world, 3, EPX_ERR_PEER, world.outcomes[0].text);
    assert_true(world.outcomes[0].seconds < 5);
    world_end(&world);
}

static void a_late_rank_is_named_at_the_deadline(void **state)
{
    struct world world = world_make(4, sleep_before_gather);

    (void)state;
    world.timeout_ms = 500;
    world_run(&world);
    expect_failure(&world, 0, EPX_ERR_TIMEOUT, "rank 2 did not send data within 500 ms (all-gather 1");
    expect_failure(&world, 1, EPX_ERR_TIMEOUT, world.outcomes[0].text);
    expect_failure(&world, 3, EPX_ERR_TIMEOUT, world.outcomes[0].text);
    world_end(&world);
}

static void different_sizes_are_named(void **state)
{
    struct world world = world_make(4, gather_other_size);

    (void)state;
    world_run(&world);
    for (int i = 0; i < 4; i++)
        expect_failure(&world, i, EPX_ERR_MISMATCH, "rank 2 sends 64 bytes, rank 0 128");
    world_end(&world);
}

static void a_wrong_world_size_is_named_on_both_sides(void **state)
{
    struct world world = world_make(3, open_and_gather);

    (void)state;
    world.timeout_ms = 3000; /* rank 1 may come when it is all over */
    world.world_as[2] = 4;
    world_run(&world);
    expect_failure(&world, 0, EPX_ERR_MISMATCH, "rank 2 has WORLD_SIZE 4, rank 0 has 3");
    expect_failure(&world, 2, EPX_ERR_MISMATCH, "rank 2 has WORLD_SIZE 4, rank 0 has 3");
    world_end(&world);
}

static void a_rank_given_twice_is_named(void **state)
{
    struct world world = world_make(4, open_and_gather);
    int told = 0;

    (void)state;
    world.timeout_ms = 3000;
    world.rank_as[3] = 1;
    world_run(&world);
    expect_failure(&world, 0, EPX_ERR_MISMATCH, "two processes have RANK 1");
    for (int i = 1; i < 4; i++)
        told += !!strstr(world.outcomes[i].text, "two processes have RANK 1");
    assert_true(told >= 2);
    world_end(&world);
}

static void another_version_is_refused(void **state)
{
    struct world world = world_make(3, open_and_gather);
    struct wire_hello hello = {.magic = WIRE_HELLO_MAGIC, .version = WIRE_VERSION + 1, .rank = 1, .nranks = 3};
    struct {
        struct wire_frame frame;
        struct wire_error error;
    } answer;
    int fd;

    (void)state;
    world.absent[0] = 1;
    world.absent[1] = 2;
    unsetenv("EPX_JOB_ID");
    world_start(&world);
    name_this_run();
    fd = connect_to(world.port);
    assert_true(fd >= 0);
    /* The job's number: what settings.c makes of the port alone. */
    hello.job = (0xcbf29ce484222325u ^ (uint64_t)world.port) * 0x100000001b3u;
    assert_int_equal(write(fd, &hello, sizeof(hello)), sizeof(hello));
    assert_int_equal(recv(fd, &answer, sizeof(answer), MSG_WAITALL), sizeof(answer));
    close(fd);
    world_wait(&world);
    assert_int_equal(answer.frame.op, WIRE_ERROR);
    assert_non_null(strstr(answer.error.text, "version"));
    expect_failure(&world, 0, EPX_ERR_MISMATCH, "a rank uses version 2 of the bootstrap protocol, rank 0 version 1");
    world_end(&world);
}

static void groups_in_another_order_are_named(void **state)
{
    struct world world = world_make(2, gather_in_other_order);

    (void)state;
    world_run(&world);
    for (int i = 0; i < 2; i++)
        expect_failure(&world, i, EPX_ERR_MISMATCH,
                       "rank 1 is in an all-gather of its group number 1, rank 0 of number 2");
    world_end(&world);
}

/* ---- Tests: several groups, one process ------------------------------------------------------------------------ */

static void one_rendezvous_serves_many_groups(void **state)
{
    struct world world = world_make(3, gather_twice_over);

    (void)state;
    world_run(&world);
    expect_all_ok(&world);
    world_end(&world);
}

static void ranks_meet_anew_after_a_failure(void **state)
{
    struct world world = world_make(3, fail_then_meet_again);

    (void)state;
    world_run(&world);
    expect_all_ok(&world);
    world_end(&world);
}

static void one_rank_needs_no_port(void **state)
{
    struct boot *boot;

    (void)state;
    setenv("RANK", "0", 1);
    setenv("WORLD_SIZE", "1", 1);
    unsetenv("MASTER_ADDR");
    unsetenv("MASTER_PORT");
    assert_int_equal(boot_open(NULL, 1000, &boot), EPX_OK);
    assert_int_equal(boot_nranks(boot), 1);
    assert_int_equal(gather_checked(boot, 100, 0), EPX_OK);
    boot_close(boot);
}

static void expect_environment(const char *rank, const char *size, epx_status status, const char *words)
{
    struct boot *boot;

    unsetenv("RANK");
    unsetenv("WORLD_SIZE");
    if (rank)
        setenv("RANK", rank, 1);
    if (size)
        setenv("WORLD_SIZE", size, 1);
    assert_int_equal(boot_open(NULL, 1000, &boot), status);
    assert_null(boot);
    assert_non_null(strstr(epx_last_error(), words));
}

static void a_bad_environment_is_explained(void **state)
{
    (void)state;
    unsetenv("MASTER_ADDR");
    expect_environment(NULL, NULL, EPX_ERR_USAGE, "WORLD_SIZE is not set");
    expect_environment(NULL, "2", EPX_ERR_USAGE, "RANK is not set");
    expect_environment("2", "2", EPX_ERR_ARGUMENT, "RANK is \"2\", expected an integer from 0 to 1");
    expect_environment("0", "x", EPX_ERR_ARGUMENT, "WORLD_SIZE is \"x\"");
    expect_environment("0", "2", EPX_ERR_USAGE, "MASTER_ADDR is not set");
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    setenv("MASTER_PORT", "70000", 1);
    expect_environment("0", "2", EPX_ERR_ARGUMENT, "MASTER_PORT is \"70000\", expected an integer from 1 to 65535");
}

/* ---- Tests: the caller's all-gather ------------------------------------------------------------------------------ */

static int failing_allgather(void *context, const void *send, void *recv, size_t bytes)
{
    (void)context, (void)send, (void)recv, (void)bytes;
    return 7;
}

static void a_bad_bootstrap_is_explained(void **state)
{
    epx_bootstrap user = EPX_BOOTSTRAP_INIT;
    struct boot *boot;

    (void)state;
    user.nranks = 2;
    assert_int_equal(boot_open(&user, 1000, &boot), EPX_ERR_ARGUMENT);
    assert_non_null(strstr(epx_last_error(), "allgather is NULL"));
    user.allgather = failing_allgather;
    user.rank = 2;
    assert_int_equal(boot_open(&user, 1000, &boot), EPX_ERR_ARGUMENT);
    assert_non_null(strstr(epx_last_error(), "rank is 2, expected 0 to 1"));
    user.rank = 0;
    user.nranks = 0;
    assert_int_equal(boot_open(&user, 1000, &boot), EPX_ERR_ARGUMENT);
    user.nranks = 2;
    user.size = 8;
    assert_int_equal(boot_open(&user, 1000, &boot), EPX_ERR_ARGUMENT);
    assert_non_null(strstr(epx_last_error(), "size is 8"));
}

static void a_failing_callback_is_reported(void **state)
{
    epx_bootstrap user = EPX_BOOTSTRAP_INIT;
    struct boot *boot;
    char send[4] = {0}, recv[8];

    (void)state;
    user.nranks = 2;
    user.allgather = failing_allgather;
    assert_int_equal(boot_open(&user, 1000, &boot), EPX_OK);
    assert_int_equal(boot_allgather(boot, send, recv, 4), EPX_ERR_PEER);
    assert_non_null(strstr(epx_last_error(), "returned 7"));
    boot_close(boot);
}

static int thread_rank(int rank, int n, epx_bootstrap *user, void *arg)
{
    struct boot *boot;
    int status = boot_open(user, 10000, &boot);

    (void)arg;
    if (status || boot_rank(boot) != rank || boot_nranks(boot) != n)
        return 1;
    for (int round = 0; !status && round < 50; round++)
        status = gather_checked(boot, (size_t)round * 11, round);
    boot_close(boot);
    return status;
}

static void threads_meet_by_callback(void **state)
{
    (void)state;
    assert_int_equal(run_ranks(8, thread_rank, NULL), 0);
    assert_int_equal(run_ranks(1, thread_rank, NULL), 0);
}

static int one_rank_fails(int rank, int n, epx_bootstrap *user, void *arg)
{
    (void)arg;
    return rank == n - 1 ? 1 : thread_rank(rank, n, user, NULL);
}

static void a_failing_thread_releases_the_others(void **state)
{
    uint64_t start = clock_ns();

    (void)state;
    assert_int_equal(run_ranks(4, one_rank_fails, NULL), 4);
    assert_true(clock_ns() - start < 5000000000u);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_rank_gets_the_data_of_all),
        cmocka_unit_test(sixty_four_ranks_meet),
        cmocka_unit_test(megabytes_are_gathered),
        cmocka_unit_test(ranks_meet_over_ipv6),
        cmocka_unit_test(ranks_meet_by_host_name),
        cmocka_unit_test(ranks_meet_on_a_chosen_interface),
        cmocka_unit_test(an_unknown_interface_is_refused),
        cmocka_unit_test(the_interface_has_no_say_on_loopback),
        cmocka_unit_test(interfaces_are_picked_as_by_nccl),
        cmocka_unit_test(epx_master_port_overrides),
        cmocka_unit_test(a_silent_service_on_the_port_is_passed_over),
        cmocka_unit_test(services_that_answer_nonsense_are_passed_over),
        cmocka_unit_test(unknown_clients_of_rank_0_do_no_harm),
        cmocka_unit_test(neighbouring_jobs_do_not_mix),
        cmocka_unit_test(jobs_on_one_port_are_told_apart_by_id),
        cmocka_unit_test(missing_ranks_are_named_on_all),
        cmocka_unit_test(a_missing_rank_0_is_named),
        cmocka_unit_test(an_unknown_host_ends_at_the_deadline),
        cmocka_unit_test(a_death_is_named_at_once),
        cmocka_unit_test(a_late_rank_is_named_at_the_deadline),
        cmocka_unit_test(different_sizes_are_named),
        cmocka_unit_test(a_wrong_world_size_is_named_on_both_sides),
        cmocka_unit_test(a_rank_given_twice_is_named),
        cmocka_unit_test(another_version_is_refused),
        cmocka_unit_test(groups_in_another_order_are_named),
        cmocka_unit_test(one_rendezvous_serves_many_groups),
        cmocka_unit_test(ranks_meet_anew_after_a_failure),
        cmocka_unit_test(one_rank_needs_no_port),
        cmocka_unit_test(a_bad_environment_is_explained),
        cmocka_unit_test(a_bad_bootstrap_is_explained),
        cmocka_unit_test(a_failing_callback_is_reported),
        cmocka_unit_test(threads_meet_by_callback),
        cmocka_unit_test(a_failing_thread_releases_the_others),
    };

    name_this_run();
    return cmocka_run_group_tests_name("boot", tests, NULL, NULL);
}
