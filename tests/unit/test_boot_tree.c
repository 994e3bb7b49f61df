/* SPDX-License-Identifier: Apache-2.0 */
/* ctest: cost=5 labels=leaks */
/* Results through relays (boot/tree.h): 8 ranks in blocks of 3, so that ranks 3 and 6 pass on to 4, 5 and 7. */
#include <sys/resource.h>
#include <sys/time.h>

#include "boot/tree.h"
#include "tests/unit/boot_fixture.h"
#include "util/crypto.h"

enum { RANKS = 8, RELAY = 3, LARGE = 1 << 20 };

/* A descriptor is there for the connection to rank 0 and none for the relay. */
static int gather_without_relay(const struct world *world, int rank)
{
    const int next = crypto() ? dup(0) : -1; /* crypto() opens a library */
    struct rlimit files;

    close(next);
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = (rlim_t)next + 1;
    if (rank == RELAY + 1)
        setrlimit(RLIMIT_NOFILE, &files);
    return open_and_gather(world, rank);
}

static int hang; /* milliseconds; 0 = the process ends */

static void stop_here(int signal)
{
    (void)signal;
    if (!hang)
        raise(SIGKILL);
    poll(NULL, 0, hang);
    _exit(0);
}

/* The relay ends, or hangs, after world->absent[1] microseconds of all-gathers; the others go on until they fail. */
static int gather_until_failure(const struct world *world, int rank)
{
    const struct itimerval when = {.it_value.tv_usec = world->absent[1]};
    struct boot *boot;
    int status = boot_open(NULL, world->timeout_ms, &boot);

    if (!status && rank == RELAY) {
        signal(SIGALRM, stop_here);
        setitimer(ITIMER_REAL, &when, NULL);
    }
    for (int round = 0; !status; round++)
        status = gather_checked(boot, world->bytes, round);
    return status;
}

static void expect_culprit(const struct world *world, epx_status status, const char *words)
{
    for (int r = 0; r < RANKS; r++)
        if (r != RELAY)
            expect_failure(world, r, status, words);
}

/* ---- Tests ---------------------------------------------------------------------------------------------------- */

static void blocks_are_the_root_of_many_ranks(void **state)
{
    (void)state;
    unsetenv("EPX_BOOT_BLOCK");
    assert_int_equal(tree_block(63), 0);
    assert_int_equal(tree_block(64), 8);
    assert_int_equal(tree_block(1024), 32);
    assert_int_equal(tree_block(1025), 33);
    setenv("EPX_BOOT_BLOCK", "3", 1);
    assert_int_equal(tree_block(RANKS), 3);
    assert_int_equal(tree_block(3), 0);
    assert_int_equal(tree_parent(3, 2), 0);
    assert_int_equal(tree_parent(3, 3), 0);
    assert_int_equal(tree_parent(3, 5), 3);
}

static void results_come_through_relays(void **state)
{
    static const size_t sizes[] = {0, 1, LARGE};
    struct world world = world_make(RANKS, open_and_gather);

    (void)state;
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        world.bytes = sizes[i];
        world.port = some_port();
        if (i == 1)
            setenv("EPX_SECRET", "none", 1);
        world_run(&world);
        unsetenv("EPX_SECRET");
        expect_all_ok(&world);
    }
    world_end(&world);
}

static void a_child_without_its_relay_asks_rank_0(void **state)
{
    struct world world = world_make(RANKS, gather_without_relay);

    (void)state;
    world_run(&world);
    expect_all_ok(&world);
    world_end(&world);
}

static void a_relay_that_ends_is_named_by_all(void **state)
{
    static const int after_us[] = {100, 9000, 70000};

    (void)state;
    hang = 0;
    for (size_t i = 0; i < sizeof(after_us) / sizeof(after_us[0]); i++) {
        struct world world = world_make(RANKS, gather_until_failure);

        world.bytes = LARGE;
        world.absent[1] = after_us[i];
        world_run(&world);
        expect_culprit(&world, EPX_ERR_PEER, "rank 3 ended during all-gather");
        world_end(&world);
    }
}

static void a_relay_that_hangs_is_named_by_all(void **state)
{
    struct world world = world_make(RANKS, gather_until_failure);

    (void)state;
    hang = 3500;
    world.bytes = LARGE;
    world.timeout_ms = 1500;
    world.absent[1] = 30000;
    world_run(&world);
    expect_culprit(&world, EPX_ERR_TIMEOUT, "rank 3 did not");
    world_end(&world);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_are_the_root_of_many_ranks),     cmocka_unit_test(results_come_through_relays),
        cmocka_unit_test(a_child_without_its_relay_asks_rank_0), cmocka_unit_test(a_relay_that_ends_is_named_by_all),
        cmocka_unit_test(a_relay_that_hangs_is_named_by_all),
    };

    name_this_run();
    return unit_run("boot_tree", tests, UNIT_COUNT(tests));
}
