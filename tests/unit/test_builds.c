/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A rank of another build among those of one: all are refused at once, long before their deadline, with both numbers:
 * with a secret and without, over the rendezvous, over a caller's all-gather, and by the ticket of a group. Each rank's
 * number is what this program says, in the place of the library's own. ctest: labels=ranks
 */
#include "tests/unit/boot_fixture.h"

#include "boot/ticket.h"
#include "tests/lib/fixture.h"
#include "util/build.h"

enum { RANKS = 4, ODD = 2, AT_ONCE_S = 10 };

#define OURS ((uint64_t)10203 << 32 | 0x11111111u)
#define THEIRS ((uint64_t)10203 << 32 | 0x22222222u)

static _Thread_local uint64_t number = OURS;

uint64_t build_number(void)
{
    return number;
}

static int odd_one(const struct world *world, int rank)
{
    number = rank == ODD ? THEIRS : OURS;
    return open_and_gather(world, rank);
}

static void expect_numbers(const struct world *world)
{
    const char *words = "rank 2 has build 1.2.3-22222222 of EPX, rank 0 has 1.2.3-11111111";

    for (int r = 0; r < RANKS; r++) {
        expect_failure(world, r, EPX_ERR_MISMATCH, words);
        assert_true(world->outcomes[r].seconds < slow_ms(AT_ONCE_S * 1000) * 1e-3);
    }
}

static void over_the_rendezvous(void **state)
{
    struct world world = world_make(RANKS, odd_one);

    world.timeout_ms = slow_ms(100000);
    setenv("EPX_SECRET", *state, 1);
    world_run(&world);
    unsetenv("EPX_SECRET");
    expect_numbers(&world);
    world_end(&world);
}

static int odd_one_with_another_secret(const struct world *world, int rank)
{
    if (rank == ODD)
        setenv("EPX_SECRET", "another text, of some length", 1);
    return odd_one(world, rank);
}

/* Then nobody can prove whose number it is: a stranger's must not end a job. The messages have it all the same. */
static void with_another_secret(void **state)
{
    struct world world = world_make(RANKS, odd_one_with_another_secret);

    (void)state;
    world.timeout_ms = slow_ms(2000);
    setenv("EPX_SECRET", "one text, of some length", 1);
    world_run(&world);
    unsetenv("EPX_SECRET");
    expect_failure(&world, 0, EPX_ERR_TIMEOUT, "one was build 1.2.3-22222222 of EPX, rank 0 is 1.2.3-11111111");
    expect_failure(&world, ODD, EPX_ERR_TIMEOUT, "EPX of another build (1.2.3-11111111, this rank has 1.2.3-22222222)");
    world_end(&world);
}

static int refused(int rank, int nranks, epx_bootstrap *boot, void *arg)
{
    static const char *const words[] = {"rank 2 has build 1.2.3-22222222", "rank 0 has 1.2.3-11111111", NULL};
    const epx_group_config config = fixture_config(slow_ms(100000));

    (void)arg;
    number = rank == ODD ? THEIRS : OURS;
    return fixture_refused(rank, nranks, boot, &config, EPX_ERR_MISMATCH, words);
}

static void over_the_callers_all_gather(void **state)
{
    (void)state;
    assert_int_equal(run_ranks(RANKS, refused, NULL), 0);
}

static void by_a_ticket(void **state)
{
    struct ticket ticket = {.build = THEIRS, .nranks = 2, .ndoors = 1};
    char text[EPX_TICKET_BYTES];

    (void)state;
    assert_int_equal(ticket_write(&ticket, text, sizeof(text)), EPX_OK);
    assert_int_equal(ticket_read(text, &ticket), EPX_ERR_MISMATCH);
    assert_non_null(strstr(epx_last_error(), "1.2.3-22222222"));
    assert_non_null(strstr(epx_last_error(), "1.2.3-11111111"));
}

UNIT_MAIN_WITHIN(name_this_run, NULL, UNIT_CASE("with_a_secret", over_the_rendezvous, "a text, of some length"),
                 UNIT_CASE("without_a_secret", over_the_rendezvous, "none"), cmocka_unit_test(with_another_secret),
                 cmocka_unit_test(over_the_callers_all_gather), cmocka_unit_test(by_a_ticket))
