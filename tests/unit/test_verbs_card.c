/* SPDX-License-Identifier: Apache-2.0 */
/* Which cards a filter lets through, and which GID is chosen: needs no card. */
#include <arpa/inet.h>
#include <string.h>

#include "net/card_filter.h"
#include "net/verbs/card.h"
#include "tests/lib/unit.h"

struct filter_case {
    const char *filter, *card;
    int port, matches;
};
enum { MOST = 8 }; /* of a table, whose end is a NULL */

static const struct filter_case empty[MOST] = {{"", "mlx5_0", 1, 1}, {"=", "mlx5_0", 1, 1}, {"^", "mlx5_0", 1, 1}};
static const struct filter_case prefixes[MOST] = {
    {"mlx5", "mlx5_0", 1, 1},   {"mlx5_1,mlx5_0", "mlx5_0", 2, 1}, {"mlx5_1", "mlx5_10", 1, 1},
    {"mlx5_1", "mlx5_0", 1, 0}, {"mlx5_10", "mlx5_1", 1, 0},
};
static const struct filter_case whole[MOST] = {
    {"=mlx5_1", "mlx5_1", 1, 1},
    {"=mlx5_1", "mlx5_10", 1, 0},
    {"=mlx5", "mlx5_1", 1, 0},
    {"=mlx5_0,mlx5_1", "mlx5_1", 1, 1},
};
static const struct filter_case ports[MOST] = {
    {"=mlx5_0:1", "mlx5_0", 1, 1},
    {"=mlx5_0:1", "mlx5_0", 2, 0},
    {"mlx5_0:2,mlx5_1:1", "mlx5_1", 1, 1},
    {"mlx5_0:2,mlx5_1:1", "mlx5_1", 2, 0},
};
static const struct filter_case excluded[MOST] = {
    {"^mlx5_2", "mlx5_2", 1, 0},   {"^mlx5_2", "mlx5_20", 1, 0},         {"^mlx5_2", "mlx5_1", 1, 1},
    {"^=mlx5_2", "mlx5_20", 1, 1}, {"^mlx5_0,mlx5_1:1", "mlx5_1", 1, 0}, {"^mlx5_0,mlx5_1:1", "mlx5_1", 2, 1},
};
static const struct filter_case odd[MOST] = {
    {",", "mlx5_0", 1, 0}, {":1", "mlx5_0", 1, 0}, {",,mlx5_0,", "mlx5_0", 1, 1}};

static void check_filters(void **state)
{
    for (const struct filter_case *c = *state; c->filter; c++)
        if (!card_filter_match(c->filter, c->card, c->port) != !c->matches)
            fail_msg("filter \"%s\", card %s port %d: expected %d", c->filter, c->card, c->port, c->matches);
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
        UNIT_CASE("an_empty_filter_takes_all", check_filters, empty),
        UNIT_CASE("names_are_prefixes", check_filters, prefixes),
        UNIT_CASE("after_an_equals_sign_names_are_whole", check_filters, whole),
        UNIT_CASE("a_port_may_be_named", check_filters, ports),
        UNIT_CASE("a_caret_excludes", check_filters, excluded),
        UNIT_CASE("odd_filters_match_nothing", check_filters, odd),
#if EPX_HAVE_VERBS
        cmocka_unit_test(gids_are_ranked),
#endif
        cmocka_unit_test(probing_says_something),
    };

    return unit_run("verbs_card", tests, UNIT_COUNT(tests));
}
