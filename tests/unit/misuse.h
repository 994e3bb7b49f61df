/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Bad input: every refused call says what was expected and what was given, sends nothing, and leaves the group as it
 * was: each test ends with good operations on the same group.
 */
#ifndef EPX_TESTS_UNIT_MISUSE_H
#define EPX_TESTS_UNIT_MISUSE_H

#include <stdio.h>
#include <string.h>

#include "tests/lib/fixture.h"
#include "tests/lib/thread_boot.h"
#include "tests/lib/unit.h"
#include "tests/lib/slow.h"

#define WORDS(...) ((const char *const[]){__VA_ARGS__, NULL})
/* In a function with a `struct fixture *s`: the call must fail with `status` and say all the words. */
#define REFUSED(call, status, ...)                                          \
    do {                                                                    \
        if (fixture_expect(s, #call, (call), (status), WORDS(__VA_ARGS__))) \
            return -1;                                                      \
    } while (0)
#define ACCEPTED(call) REFUSED(call, EPX_OK, "")

/* Only an overflow makes anyone wait; see small_tensor(). */
enum { DEADLINE_MS = 3000 };

struct misuse {
    int nranks;
    fixture_fn run;
};

/* On every rank: good rounds of both modes, the misuse, good rounds again. */
static inline int misuse_rank(struct fixture *s)
{
    const struct misuse *misuse = s->arg;

    if (fixture_ll(s) || fixture_ht(s) || misuse->run(s))
        return -1;
    if (fixture_ll(s) == 0 && fixture_ht(s) == 0)
        return 0;
    fprintf(stderr, "after the misuse, ");
    return -1;
}

static inline void misuse_test(void **state)
{
    const epx_group_config config = fixture_config(slow_ms(DEADLINE_MS));

    assert_int_equal(fixture_run(((struct misuse *)*state)->nranks, &config, misuse_rank, *state), 0);
}

/* A case of a test program: on so many ranks. */
#define MISUSE(name, nranks, function) UNIT_CASE(name, misuse_test, &((struct misuse){nranks, function}))

#endif
