/* SPDX-License-Identifier: Apache-2.0 */
/* ctest: timeout=20 */
/* Which cards a filter lets through, and which GID is chosen: needs no card. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <arpa/inet.h>
#include <string.h>

#include "net/verbs/card.h"

static void an_empty_filter_takes_all(void **state)
{
    (void)state;
    assert_true(verbs_filter_match("", "mlx5_0", 1));
    assert_true(verbs_filter_match("=", "mlx5_0", 1));
    assert_true(verbs_filter_match("^", "mlx5_0", 1));
}

static void names_are_prefixes(void **state)
{
    (void)state;
    assert_true(verbs_filter_match("mlx5", "mlx5_0", 1));
    assert_true(verbs_filter_match("mlx5_1,mlx5_0", "mlx5_0", 2));
    assert_true(verbs_filter_match("mlx5_1", "mlx5_10", 1));
    assert_false(verbs_filter_match("mlx5_1", "mlx5_0", 1));
    assert_false(verbs_filter_match("mlx5_10", "mlx5_1", 1));
}

static void after_an_equals_sign_names_are_whole(void **state)
{
    (void)state;
    assert_true(verbs_filter_match("=mlx5_1", "mlx5_1", 1));
    assert_false(verbs_filter_match("=mlx5_1", "mlx5_10", 1));
    assert_false(verbs_filter_match("=mlx5", "mlx5_1", 1));
    assert_true(verbs_filter_match("=mlx5_0,mlx5_1", "mlx5_1", 1));
}

static void a_port_may_be_named(void **state)
{
    (void)state;
    assert_true(verbs_filter_match("=mlx5_0:1", "mlx5_0", 1));
    assert_false(verbs_filter_match("=mlx5_0:1", "mlx5_0", 2));
    assert_true(verbs_filter_match("mlx5_0:2,mlx5_1:1", "mlx5_1", 1));
    assert_false(verbs_filter_match("mlx5_0:2,mlx5_1:1", "mlx5_1", 2));
}

static void a_caret_excludes(void **state)
{
    (void)state;
    assert_false(verbs_filter_match("^mlx5_2", "mlx5_2", 1));
    assert_false(verbs_filter_match("^mlx5_2", "mlx5_20", 1));
    assert_true(verbs_filter_match("^mlx5_2", "mlx5_1", 1));
    assert_true(verbs_filter_match("^=mlx5_2", "mlx5_20", 1));
    assert_false(verbs_filter_match("^mlx5_0,mlx5_1:1", "mlx5_1", 1));
    assert_true(verbs_filter_match("^mlx5_0,mlx5_1:1", "mlx5_1", 2));
}

static void odd_filters_match_nothing(void **state)
{
    (void)state;
    assert_false(verbs_filter_match(",", "mlx5_0", 1));
    assert_false(verbs_filter_match(":1", "mlx5_0", 1));
    assert_true(verbs_filter_match(",,mlx5_0,", "mlx5_0", 1));
}

#if EPX_HAVE_VERBS
static int rank_of(const char *gid, uint32_t type)
{
    uint8_t raw[16];

    assert_int_equal(inet_pton(AF_INET6, gid, raw), 1);
    return verbs_gid_rank(raw, type);
}

static void gids_are_ranked(void **state)
{
    const int v4 = rank_of("::ffff:10.0.0.1", IBV_GID_TYPE_ROCE_V2), v6 = rank_of("2001:db8::1", IBV_GID_TYPE_ROCE_V2),
              local = rank_of("fe80::1", IBV_GID_TYPE_ROCE_V2), old = rank_of("::ffff:10.0.0.1", IBV_GID_TYPE_ROCE_V1),
              ib = rank_of("fe80::1", IBV_GID_TYPE_IB);

    (void)state;
    assert_true(v4 > v6 && v6 > local && local > old && old == ib && ib > 0);
    assert_int_equal(rank_of("::", IBV_GID_TYPE_ROCE_V2), 0);
}
#endif

/* Whether there is a card or not: an answer in words, and no crash. */
static void probing_says_something(void **state)
{
    char text[512] = "";

    (void)state;
    net_verbs_ops.probe("", text, sizeof(text));
    assert_true(strlen(text) > 0);
    assert_int_equal(net_verbs_ops.probe("=no such card", text, sizeof(text)), EPX_ERR_UNSUPPORTED);
    assert_true(strlen(text) > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_empty_filter_takes_all),
        cmocka_unit_test(names_are_prefixes),
        cmocka_unit_test(after_an_equals_sign_names_are_whole),
        cmocka_unit_test(a_port_may_be_named),
        cmocka_unit_test(a_caret_excludes),
        cmocka_unit_test(odd_filters_match_nothing),
#if EPX_HAVE_VERBS
        cmocka_unit_test(gids_are_ranked),
#endif
        cmocka_unit_test(probing_says_something),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
