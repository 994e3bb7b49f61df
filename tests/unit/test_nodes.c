/* SPDX-License-Identifier: Apache-2.0 */
/* Who relays for whom, with nodes of any sizes and ranks left out: against the definition, counted rank by rank. One
 * thread computes: nothing for ThreadSanitizer. ctest: labels=notsan */
#include <string.h>

#include "group/nodes.h"
#include "kernel/command.h"
#include "tests/lib/unit.h"

enum { RANKS = 40, CASES = 400 };

static uint32_t state = 1;

static int draw(int n)
{
    state = state * 1664525u + 1013904223u;
    return (int)((state >> 8) % (uint32_t)n);
}

/* The n-th rank of a node that is not out, or -1. */
static int member(const struct node_map *map, int node, int n)
{
    for (int r = 0; r < map->nranks; r++)
        if (map->node_of[r] == node && !map->out[r] && n-- == 0)
            return r;
    return -1;
}

static int expected_relay(const struct node_map *map, int source, int node)
{
    int place = 0, size = 0;

    for (int r = 0; r < source; r++)
        place += map->node_of[r] == map->node_of[source] && !map->out[r];
    while (member(map, node, size) >= 0)
        size++;
    return size ? member(map, node, place % size) : -1;
}

static void check_sources(const struct node_map *map, int relay, int *most)
{
    int sources[RANKS], n = node_relay_sources(map, relay, sources), number = 0;

    for (int s = 0; s < map->nranks; s++) {
        if (map->out[s] || map->node_of[s] == map->node_of[relay] ||
            expected_relay(map, s, map->node_of[relay]) != relay)
            continue;
        assert_true(number < n);
        assert_int_equal(sources[number], s);
        assert_int_equal(node_relay_number(map, s, map->node_of[relay]), number);
        number++;
    }
    assert_int_equal(number, n);
    *most = n > *most ? n : *most;
}

/* Tables of all ranks, made in one pass, against what they are of one rank. */
static void check_tables(const struct node_map *map, int rank)
{
    int32_t at[RANKS], of[RANKS], relays[RANKS], numbers[RANKS], by_node[RANKS], start[RANKS + 1] = {0}, place[RANKS];
    int32_t zeros[2][RANKS] = {{0}};
    const int node = map->node_of[rank];

    node_recv_indices(map, rank, at, of, zeros[0]);
    node_relays_in(map, node, relays, numbers, zeros[1]);
    node_order(map, by_node, start, place);
    for (int r = 0; r < map->nranks; r++) {
        int before_rank = 0, before_r = 0;

        for (int q = 0; q < map->nranks; q++) {
            before_rank += q < rank && map->node_of[q] != map->node_of[r];
            before_r += q < r && map->node_of[q] != node;
        }
        assert_int_equal(at[r], map->node_of[r] == node ? -1 : before_rank);
        assert_int_equal(of[r], map->node_of[r] == node ? -1 : before_r);
        assert_int_equal(relays[r], node_relay(map, r, node));
        assert_int_equal(numbers[r], map->node_of[r] == node ? -1 : node_relay_number(map, r, node));
        assert_int_equal(by_node[start[map->node_of[r]] + place[r]], r);
        assert_true(!place[r] || by_node[start[map->node_of[r]] + place[r] - 1] < r);
    }
}

static void check(const struct node_map *map)
{
    int most = 0;

    check_tables(map, draw(map->nranks));

    for (int s = 0; s < map->nranks; s++)
        for (int n = 0; n < map->nnodes; n++) {
            const int expected = map->node_of[s] == n ? -1 : expected_relay(map, s, n), got = node_relay(map, s, n);

            if (expected >= 0 || map->node_of[s] == n)
                assert_int_equal(got, expected);
            else
                assert_int_equal(map->node_of[got], n); /* nobody is left there: any of them */
        }
    for (int r = 0; r < map->nranks; r++)
        if (!map->out[r])
            check_sources(map, r, &most);
    assert_int_equal(node_most_sources(map), most);
}

static void relays_are_as_defined(void **unused)
{
    (void)unused;
    for (int i = 0; i < CASES; i++) {
        const int ranks = 1 + draw(RANKS), nodes = 1 + draw(ranks);
        int node_of[RANKS];
        uint8_t out[RANKS] = {0};
        struct node_map map;

        for (int r = 0; r < ranks; r++)
            node_of[r] = r < nodes ? r : draw(nodes);
        assert_int_equal(node_map_make(&map, ranks, node_of), EPX_OK);
        check(&map);
        assert_int_equal(map.relay_max, node_most_sources(&map));
        for (int times = 0; times < 3; times++) {
            for (int r = 0; r < ranks; r++)
                out[r] = (uint8_t)(draw(4) == 0);
            node_map_leave_out(&map, out);
            check(&map);
        }
        memset(out, 0, sizeof(out));
        node_map_leave_out(&map, out); /* all are back */
        check(&map);
        assert_int_equal(map.relay_max, node_most_sources(&map));
        node_map_free(&map);
    }
}

/* Both ends of a put choose the same ring; of each rank, rounds to its relays use all rings in turn, others one. */
static void both_ends_choose_the_same_ring(void **unused)
{
    const int node_of[] = {0, 0, 0, 1, 1, 2, 2, 2, 2, 0};
    const uint32_t row = COUNTER(SIG_HD_ROWS, 5), next = COUNTER(SIG_HD_ROWS, 6), data = COUNTER(SIG_LL_DATA, 1);
    struct node_map map;

    (void)unused;
    assert_int_equal(node_map_make(&map, 10, node_of), EPX_OK);
    for (int a = 0; a < 10; a++)
        for (int b = 0; b < 10; b++) {
            const uint32_t route = node_route(&map, a, b);
            const int relays = node_of[a] != node_of[b] &&
                               (node_relay(&map, a, node_of[b]) == b || node_relay(&map, b, node_of[a]) == a);

            assert_int_equal(route, node_route(&map, b, a));
            assert_int_equal(ROUTE_RING(route, data, 4), (a + b) % 4);
            assert_int_equal((ROUTE_RING(route, next, 4) - ROUTE_RING(route, row, 4) + 4) % 4, relays);
        }
    node_map_free(&map);
}

/* As many as a command can name: nothing here may grow with their cube. */
static void four_thousand_ranks_are_no_matter(void **unused)
{
    struct node_map map;

    (void)unused;
    assert_int_equal(node_map_slice(&map, 4096, 8), EPX_OK);
    assert_int_equal(map.nnodes, 512);
    assert_int_equal(map.relay_max, 511);
    assert_int_equal(node_relay(&map, 4095, 0), 7);
    node_map_free(&map);
}

UNIT_TESTS(relays_are_as_defined, both_ends_choose_the_same_ring, four_thousand_ranks_are_no_matter)
