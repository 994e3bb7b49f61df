/* SPDX-License-Identifier: Apache-2.0 */
/* ctest: cost=13 labels=leaks */
/* The bootstrap over TCP and by the caller's all-gather. */
#include "tests/unit/boot_fixture.h"
#include "tests/lib/slow.h"

/* ---- Tests: rendezvous --------------------------------------------------------------------------------------- */

static void every_rank_gets_the_data_of_all(void **state)
{
    (void)state;
    ranks_succeed(4, open_and_gather);
}

static void sixty_four_ranks_connect(void **state)
{
    (void)state;
    ranks_succeed(64, open_and_gather);
}

static void megabytes_are_gathered(void **state)
{
    struct world world = world_make(4, open_and_gather);

    (void)state;
    world.bytes = 5000003;
    world_succeeds(&world);
}

static void ranks_connect_over_ipv6(void **state)
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
    world_succeeds(&world);
}

static void ranks_connect_by_host_name(void **state)
{
    struct world world = world_make(3, open_and_gather);

    (void)state;
    world.host = "localhost";
    world_succeeds(&world);
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

static void ranks_connect_on_a_chosen_interface(void **state)
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
    world_succeeds_with(&world, "EPX_SOCKET_IFNAME", name);
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

static void the_interface_does_not_matter_on_loopback(void **state)
{
    struct world world = world_make(2, open_and_gather);

    (void)state;
    world_succeeds_with(&world, "EPX_SOCKET_IFNAME", "=nosuch0");
}

static void interfaces_are_selected_as_by_nccl(void **state)
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
    child_set_int("EPX_MASTER_PORT", some_port());
    world_run(&world);
    unsetenv("EPX_MASTER_PORT");
    stop_service(junk);
    expect_all_ok(&world);
    world_end(&world);
}

/* ---- Tests: several groups, one process ------------------------------------------------------------------------ */

static void one_rendezvous_serves_many_groups(void **state)
{
    (void)state;
    ranks_succeed(3, gather_twice_over);
}

static void ranks_connect_again_after_a_failure(void **state)
{
    (void)state;
    ranks_succeed(3, fail_then_connect_again);
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

static void threads_gather_by_callback(void **state)
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
    assert_false(slow_late(start, 5000));
}

UNIT_TESTS_WITHIN(name_this_run, NULL, every_rank_gets_the_data_of_all, sixty_four_ranks_connect,
                  megabytes_are_gathered, ranks_connect_over_ipv6, ranks_connect_by_host_name,
                  ranks_connect_on_a_chosen_interface, an_unknown_interface_is_refused,
                  the_interface_does_not_matter_on_loopback, interfaces_are_selected_as_by_nccl,
                  epx_master_port_overrides, one_rendezvous_serves_many_groups, ranks_connect_again_after_a_failure,
                  one_rank_needs_no_port, a_bad_environment_is_explained, a_bad_bootstrap_is_explained,
                  a_failing_callback_is_reported, threads_gather_by_callback, a_failing_thread_releases_the_others)
