/* SPDX-License-Identifier: Apache-2.0 */
/* The outcome of a case of tests/lib/net_suite.h as that of a test of cmocka. */
#ifndef EPX_TESTS_UNIT_NET_SUITE_TELL_H
#define EPX_TESTS_UNIT_NET_SUITE_TELL_H

#include "tests/lib/net_suite.h"
#include "tests/lib/unit.h"

static inline void net_suite_tell(enum net_suite_outcome outcome, const char *text)
{
    switch (outcome) {
    case NET_SUITE_PASSED:
        break;
    case NET_SUITE_SKIPPED:
        print_message("skipped: %s\n", text);
        skip();
        break;
    case NET_SUITE_FAILED:
        fail_msg("%s", text);
    }
}

#endif
