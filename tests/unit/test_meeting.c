/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The creation of a group takes at most four rounds, on one node and on several, with masks and without, and in all of
 * them what each rank gets of each other is small: 1024 ranks get at most 2 MB each. The first round compares builds,
 * and is alone because messages of other builds may have other sizes. With masks the last round goes over the ranks'
 * own connections (boot/membership.h).
 */
#include <stdio.h>
#include <string.h>

#include "tests/lib/fixture.h"
#include "tests/lib/thread_boot.h"
#include "tests/lib/unit.h"

enum { RANKS = 4, MANY = 1024, MOST = 2000000 };

struct meeting {
    int ranks_per_node, mask;
    int rounds; /* of rank 0 */
    size_t bytes;
};

static struct {
    struct meeting *meeting;
    epx_bootstrap *boot;
} counted;

static int count_rounds(void *context, const void *send, void *recv, size_t bytes)
{
    counted.meeting->rounds++;
    counted.meeting->bytes += bytes;
    (void)context;
    return counted.boot->allgather(counted.boot->context, send, recv, bytes);
}

static int create(int rank, int n, epx_bootstrap *boot, void *arg)
{
    struct meeting *meeting = arg;
    epx_group_config config = fixture_config(20000);
    epx_bootstrap mine = *boot;

    if (rank == 0) {
        counted.meeting = meeting;
        counted.boot = boot;
        mine.allgather = count_rounds;
    }
    config.ranks_per_node = meeting->ranks_per_node;
    config.enable_mask = meeting->mask;
    snprintf(config.net, sizeof(config.net), "ofi:tcp");
    return fixture_group(rank, n, &mine, &config, NULL, NULL);
}

static void ranks_meet_in_four_rounds(void **state)
{
    struct meeting *meeting = *state;
    const int own = meeting->mask; /* over the ranks' own connections */

    assert_int_equal(run_ranks(RANKS, create, meeting), 0);
    print_message("%d rounds, %zu bytes of each rank\n", meeting->rounds + own, meeting->bytes);
    assert_in_range(meeting->rounds + own, 3, 4);
    assert_true(meeting->bytes * MANY <= MOST);
}

#define MEETING(per_node, mask) \
    &(struct meeting)           \
    {                           \
        per_node, mask, 0, 0    \
    }
UNIT_MAIN(UNIT_CASE("one_node", ranks_meet_in_four_rounds, MEETING(0, 0)),
          UNIT_CASE("one_node_with_masks", ranks_meet_in_four_rounds, MEETING(0, 1)),
          UNIT_CASE("two_nodes", ranks_meet_in_four_rounds, MEETING(2, 0)),
          UNIT_CASE("two_nodes_with_masks", ranks_meet_in_four_rounds, MEETING(2, 1)))
