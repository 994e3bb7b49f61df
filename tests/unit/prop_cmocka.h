/* SPDX-License-Identifier: Apache-2.0 */
/* A program of property tests: a table of what each case draws. */
#ifndef EPX_TESTS_UNIT_PROP_CMOCKA_H
#define EPX_TESTS_UNIT_PROP_CMOCKA_H

#include "tests/lib/prop.h"
#include "tests/lib/unit.h"

struct prop_test {
    const char *name;
    int cases, max_ranks; /* see prop_run() */
    prop_change_fn change;
};

static const char *prop_program;
static int prop_modes;

static inline void prop_test_run(void **state)
{
    const struct prop_test *t = *state;

    assert_int_equal(prop_run(prop_program, t->name, t->cases, prop_modes, t->max_ranks, t->change), 0);
}

static inline int prop_main(const char *program, int modes, const struct prop_test *table, size_t count)
{
    struct CMUnitTest tests[16] = {{0}};

    prop_program = program;
    prop_modes = modes;
    if (count > UNIT_COUNT(tests))
        return 1;
    for (size_t i = 0; i < count; i++)
        tests[i] = (struct CMUnitTest)UNIT_CASE(table[i].name, prop_test_run, &table[i]);
    return unit_run(program, tests, count);
}

#define PROP_MAIN(program, modes, ...)                              \
    int main(void)                                                  \
    {                                                               \
        const struct prop_test tests[] = {__VA_ARGS__};             \
                                                                    \
        return prop_main(program, modes, tests, UNIT_COUNT(tests)); \
    }

#endif
