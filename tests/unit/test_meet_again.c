/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The connections of the rendezvous are lost while ranks live, as they are when a cable is out for long: of some ranks
 * or of all, of rank 0 or another, and the ranks see it when they use them. No clear that fails by that is final: ranks
 * meet again for the next one, or in the same call, and go on. ctest: labels=ranks sleeps
 */
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/lib/child.h"
#include "tests/lib/fixture.h"
#include "tests/lib/slow.h"
#include "tests/lib/unit.h"

enum { RANKS = 4, DEADLINE_MS = 1500, TIMES = 2, MOST_FILES = 1024 };

struct cut {
    unsigned ranks; /* bit rank: this one loses its connections */
};

/* All TCP connections of this process: on one node, those of the rendezvous. */
static int cut_connections(void)
{
    struct sockaddr_storage other;
    int cut = 0;

    for (int fd = 3; fd < MOST_FILES; fd++) {
        socklen_t length = sizeof(other);

        if (!getpeername(fd, (struct sockaddr *)&other, &length) && other.ss_family == AF_INET)
            cut += !shutdown(fd, SHUT_RDWR);
    }
    return cut;
}

static int lose_and_recover(struct fixture *s, const struct cut *cut, int time)
{
    if (cut->ranks >> s->rank & 1 && !cut_connections())
        return fixture_fail(s, "no connection to cut");
    if (s->rank == 1) /* is late for an operation of all */
        usleep((useconds_t)slow_ms(DEADLINE_MS) * 1500);
    else if (!fixture_ht(s))
        return fixture_fail(s, "an operation without rank 1 succeeded");
    if (epx_group_error_clear(s->group) != EPX_OK)
        return fixture_fail(s, "epx_group_error_clear");
    s->w.round = 1000 * (time + 1); /* that of all */
    return fixture_ll(s) || fixture_ht(s);
}

static int be_rank(int rank, void *arg)
{
    const epx_group_config config = fixture_config(slow_ms(DEADLINE_MS));
    struct fixture s;
    int rc = fixture_open(&s, rank, RANKS, NULL, &config) || fixture_ht(&s);

    for (int i = 0; i < TIMES && !rc; i++)
        rc = lose_and_recover(&s, arg, i);
    if (rc)
        fprintf(stderr, "rank %d: %s; %s\n", rank, s.why, epx_last_error());
    fixture_close(&s);
    return rc != 0;
}

static void all_meet_again(void **state)
{
    struct cut cut = {(unsigned)(uintptr_t)*state};
    pid_t pids[RANKS];

    child_forget_settings();
    child_world(RANKS);
    assert_int_equal(child_start_ranks(pids, RANKS, be_rank, &cut), 0);
    assert_int_equal(child_failures(pids, RANKS), 0);
}

UNIT_MAIN(UNIT_CASE("of_one_rank", all_meet_again, 1u << 2), UNIT_CASE("of_rank_0", all_meet_again, 1u << 0),
          UNIT_CASE("of_two_ranks", all_meet_again, 1u << 1 | 1u << 3), UNIT_CASE("of_all", all_meet_again, 15u))
