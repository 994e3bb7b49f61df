/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cmocka with the headers that it needs, and the main() of a test program. EPX_TEST_ONLY=PATTERN runs the cases whose
 * names match. Headers of EPX that declare fail() come before this one: cmocka.h has a macro of that name.
 */
#ifndef EPX_TESTS_LIB_UNIT_H
#define EPX_TESTS_LIB_UNIT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* "address" or "thread"; NULL where none watches the program. */
static inline const char *unit_sanitizer(void)
{
    const char *name = getenv("EPX_SANITIZE");

    return name && name[0] && strcmp(name, "none") != 0 ? name : NULL;
}

#define UNIT_COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* A case with a name of its own: `function` gets `data` as *state. For functions that many cases share. */
#define UNIT_CASE(case_name, function, data)                                                      \
    {                                                                                             \
        .name = (case_name), .test_func = (function), .initial_state = (void *)(uintptr_t)(data), \
    }

/* `set_up` and `tear_down` run once, before the first case and after the last; NULL: nothing. */
static inline int unit_run_within(const char *name, const struct CMUnitTest *tests, size_t count,
                                  CMFixtureFunction set_up, CMFixtureFunction tear_down)
{
    if (getenv("EPX_TEST_ONLY"))
        cmocka_set_test_filter(getenv("EPX_TEST_ONLY"));
    return _cmocka_run_group_tests(name, tests, count, set_up, tear_down);
}

static inline int unit_run(const char *name, const struct CMUnitTest *tests, size_t count)
{
    return unit_run_within(name, tests, count, NULL, NULL);
}

#define UNIT_MAIN_WITHIN(set_up, tear_down, ...)                                      \
    int main(void)                                                                    \
    {                                                                                 \
        const struct CMUnitTest tests[] = {__VA_ARGS__};                              \
                                                                                      \
        return unit_run_within("tests", tests, UNIT_COUNT(tests), set_up, tear_down); \
    }
#define UNIT_MAIN(...) UNIT_MAIN_WITHIN(NULL, NULL, __VA_ARGS__)

/* Runs `functions` as cases; `list` is the text that names them, "a, b, c". `before` and `after` run around each case,
 * `set_up` and `tear_down` once. */
static inline int unit_run_functions(const CMUnitTestFunction *functions, size_t count, const char *list,
                                     CMFixtureFunction before, CMFixtureFunction after, CMFixtureFunction set_up,
                                     CMFixtureFunction tear_down)
{
    struct CMUnitTest *tests = calloc(count, sizeof(*tests));
    char *names = strdup(list), *rest = NULL;
    int failed = -1;

    if (tests && names) {
        for (size_t i = 0; i < count; i++)
            tests[i] = (struct CMUnitTest){.name = strtok_r(i ? NULL : names, ", ", &rest),
                                           .test_func = functions[i],
                                           .setup_func = before,
                                           .teardown_func = after};
        failed = unit_run_within("tests", tests, count, set_up, tear_down);
    }
    free(names);
    free(tests);
    return failed;
}

/* The main() of a program whose cases are all functions: UNIT_TESTS(a, b, c). */
#define UNIT_TESTS_AROUND(before, after, set_up, tear_down, ...)                                             \
    int main(void)                                                                                           \
    {                                                                                                        \
        const CMUnitTestFunction tests[] = {__VA_ARGS__};                                                    \
                                                                                                             \
        return unit_run_functions(tests, UNIT_COUNT(tests), #__VA_ARGS__, before, after, set_up, tear_down); \
    }
#define UNIT_TESTS(...) UNIT_TESTS_AROUND(NULL, NULL, NULL, NULL, __VA_ARGS__)
#define UNIT_TESTS_WITHIN(set_up, tear_down, ...) UNIT_TESTS_AROUND(NULL, NULL, set_up, tear_down, __VA_ARGS__)
#define UNIT_TESTS_EACH(before, after, ...) UNIT_TESTS_AROUND(before, after, NULL, NULL, __VA_ARGS__)

#endif
