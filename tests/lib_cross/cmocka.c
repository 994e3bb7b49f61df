/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The part of cmocka that EPX's tests use, for builds that compile for another architecture: its header is the same for
 * all and comes with libcmocka-dev, its library is not there. Prints what cmocka prints, so that the results are
 * counted alike.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum { CASE_PASSED, CASE_FAILED, CASE_SKIPPED };

static jmp_buf end_of_case;
static const char *filter;

void _fail(const char *const file, const int line)
{
    fprintf(stderr, "%s:%d: error: Failure!\n", file, line);
    longjmp(end_of_case, CASE_FAILED);
}

void _skip(const char *const file, const int line)
{
    (void)file;
    (void)line;
    longjmp(end_of_case, CASE_SKIPPED);
}

static void require(int holds, const char *what, const char *file, int line)
{
    if (holds)
        return;
    fprintf(stderr, "[  ERROR   ] --- %s\n", what);
    _fail(file, line);
}

void _assert_true(const LargestIntegralType result, const char *const expression, const char *const file,
                  const int line)
{
    require(result != 0, expression, file, line);
}

static void require_integers(int hold, uintmax_t a, const char *relation, uintmax_t b, const char *file, int line)
{
    char text[80];

    snprintf(text, sizeof(text), "%#jx %s %#jx", a, relation, b);
    require(hold, text, file, line);
}

void _assert_int_equal(const LargestIntegralType a, const LargestIntegralType b, const char *const file, const int line)
{
    require_integers(a == b, a, "!=", b, file, line);
}

void _assert_int_not_equal(const LargestIntegralType a, const LargestIntegralType b, const char *const file,
                           const int line)
{
    require_integers(a != b, a, "==", b, file, line);
}

void _assert_in_range(const LargestIntegralType value, const LargestIntegralType minimum,
                      const LargestIntegralType maximum, const char *const file, const int line)
{
    require_integers(value >= minimum, value, "<", minimum, file, line);
    require_integers(value <= maximum, value, ">", maximum, file, line);
}

void _assert_string_equal(const char *const a, const char *const b, const char *const file, const int line)
{
    if (strcmp(a, b) != 0)
        fprintf(stderr, "\"%s\" != \"%s\"\n", a, b);
    require(strcmp(a, b) == 0, "strings differ", file, line);
}

void _assert_string_not_equal(const char *const a, const char *const b, const char *file, const int line)
{
    require(strcmp(a, b) != 0, "strings are equal", file, line);
}

void _assert_memory_equal(const void *const a, const void *const b, const size_t size, const char *const file,
                          const int line)
{
    require(memcmp(a, b, size) == 0, "memory differs", file, line);
}

void _assert_memory_not_equal(const void *const a, const void *const b, const size_t size, const char *const file,
                              const int line)
{
    require(memcmp(a, b, size) != 0, "memory is equal", file, line);
}

void print_message(const char *const format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
}

void print_error(const char *const format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
}

/* What fail_msg() of cmocka 1.1.7 calls, and older headers do not declare. */
void cm_print_error(const char *const format, ...) __attribute__((format(printf, 1, 2)));

void cm_print_error(const char *const format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
}

void cmocka_set_test_filter(const char *pattern)
{
    filter = pattern;
}

static int run_case(const struct CMUnitTest *test)
{
    void *state = test->initial_state;
    int outcome = setjmp(end_of_case);

    if (outcome == CASE_PASSED) {
        if (test->setup_func && test->setup_func(&state) != 0)
            return CASE_FAILED;
        test->test_func(&state);
        if (test->teardown_func && test->teardown_func(&state) != 0)
            return CASE_FAILED;
    }
    return outcome;
}

int _cmocka_run_group_tests(const char *group_name, const struct CMUnitTest *const tests, const size_t num_tests,
                            CMFixtureFunction group_setup, CMFixtureFunction group_teardown)
{
    static const char *const words[] = {"       OK", "  FAILED ", "  SKIPPED"};
    void *state = NULL;
    size_t i;
    int failed = 0;

    if (group_setup && group_setup(&state) != 0)
        return 1;
    printf("[==========] %s: Running %zu test(s).\n", group_name, num_tests);
    for (i = 0; i < num_tests; i++) {
        int outcome;

        if (filter && strcmp(filter, tests[i].name) != 0)
            continue;
        printf("[ RUN      ] %s\n", tests[i].name);
        fflush(stdout);
        outcome = run_case(&tests[i]);
        printf("[%s ] %s\n", words[outcome], tests[i].name);
        fflush(stdout);
        failed += outcome == CASE_FAILED;
    }
    if (group_teardown && group_teardown(&state) != 0)
        failed++;
    return failed;
}
