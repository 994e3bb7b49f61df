/* SPDX-License-Identifier: Apache-2.0 */
/* RLIMIT_NOFILE: raised before it is met; where that is not allowed, rank 0 says so at once. */
#include <sys/resource.h>

#include "tests/lib/child.h"
#include "tests/unit/boot_fixture.h"
#include "util/files.h"

enum { RANKS = 40 };

/* Runs fn in a child with these limits. */
static void with_limits(rlim_t soft, rlim_t hard, int (*fn)(void))
{
    const pid_t pid = child_fork();

    if (!pid) {
        const struct rlimit limit = {.rlim_cur = soft, .rlim_max = hard};
        _exit(setrlimit(RLIMIT_NOFILE, &limit) ? 2 : fn());
    }
    assert_true(child_succeeded(pid));
}

static int need_500(void)
{
    struct rlimit limit;

    return files_need("rank 7", 500) != EPX_OK || getrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_cur < 500 ||
           limit.rlim_max != 2048;
}

static int need_500_in_vain(void)
{
    return files_need("rank 7", 500) != EPX_ERR_SYSTEM || !strstr(epx_last_error(), "rank 7 needs 500 file") ||
           !strstr(epx_last_error(), "hard limit 200") || !strstr(epx_last_error(), "ulimit -Hn");
}

static void a_limit_is_raised_as_far_as_needed(void **state)
{
    (void)state;
    with_limits(100, 2048, need_500);
}

static void a_hard_limit_is_named(void **state)
{
    (void)state;
    with_limits(100, 200, need_500_in_vain);
}

static void ranks_meet_above_the_soft_limit(void **state)
{
    struct world world = world_make(RANKS, open_and_gather);
    struct rlimit before, low;

    (void)state;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    low = before;
    low.rlim_cur = 48;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &low), 0);
    world_start(&world);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    world_wait(&world);
    expect_all_ok(&world);
    world_end(&world);
}

static int meet_in_vain(void)
{
    const uint64_t begin = clock_ns();
    struct boot *boot;

    setenv("RANK", "0", 1);
    setenv("WORLD_SIZE", "500", 1);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    child_set_int("MASTER_PORT", child_free_port());
    return boot_open(NULL, 120000, &boot) != EPX_ERR_SYSTEM || clock_ns() - begin > 60000000000u ||
           !strstr(epx_last_error(), "rank 0 of 500 ranks needs") || !strstr(epx_last_error(), "RLIMIT_NOFILE");
}

static void rank_0_says_at_once_what_is_missing(void **state)
{
    (void)state;
    with_limits(256, 256, meet_in_vain);
}

UNIT_TESTS(a_limit_is_raised_as_far_as_needed, a_hard_limit_is_named, ranks_meet_above_the_soft_limit,
           rank_0_says_at_once_what_is_missing)
