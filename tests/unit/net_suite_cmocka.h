/* SPDX-License-Identifier: Apache-2.0 */
/* The cases of tests/lib/net_suite.h as tests of cmocka, named LABEL_CASE. */
#ifndef EPX_TESTS_UNIT_NET_SUITE_CMOCKA_H
#define EPX_TESTS_UNIT_NET_SUITE_CMOCKA_H

#include <stdio.h>

#include "tests/lib/net_suite_rank.h"
#include "tests/unit/net_suite_tell.h"

enum { NET_SUITE_TESTS = 128 };

struct net_suite_test {
    const struct net_suite *suite;
    const struct suite_case *what;
    char name[96];
};

static struct net_suite_test net_suite_tests[NET_SUITE_TESTS];

static void net_suite_test_run(void **state)
{
    const struct net_suite_test *test = *state;
    char text[600];
    const enum net_suite_outcome outcome = suite_run_case(test->suite, test->what, text, sizeof(text));

    net_suite_tell(outcome, text);
}

/* Adds `ncases` cases over `suite` to tests[count...]; the new count. */
static int net_suite_add(const struct net_suite *suite, const struct suite_case *cases, int ncases,
                         struct CMUnitTest *tests, int count)
{
    for (int i = 0; i < ncases && count < NET_SUITE_TESTS; i++, count++) {
        struct net_suite_test *test = &net_suite_tests[count];
        test->suite = suite;
        test->what = &cases[i];
        snprintf(test->name, sizeof(test->name), "%s_%s", suite->label, cases[i].name);
        tests[count] = (struct CMUnitTest){test->name, net_suite_test_run, NULL, NULL, test};
    }
    return count;
}

#endif
