/* SPDX-License-Identifier: Apache-2.0 */
/* Meetings without everybody: who is gone or left out, what is told of whom, strangers. ctest: timeout=60 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "boot/muster.h"
#include "boot/socket.h"
#include "tests/lib/thread_boot.h"
#include "util/clock.h"

#include <cmocka.h>

enum { N = 5, GATHERS = 20, LARGE = 300000 };

/* What each rank does, and what must come of it. */
struct part {
    int stays_away;    /* it has a port, but does not come */
    int closes;        /* its port is gone before the others meet */
    int purpose;       /* 0 unless it says */
    uint8_t out[N];    /* whom it leaves out */
    uint8_t agreed[N]; /* whom all leave out, where it succeeds */
    epx_status expected;
    const char *words[3]; /* of the message */
};

struct play {
    struct part part[N];
    int timeout_ms;
    void (*before)(const struct line_address *all); /* rank 0 does this first */
};

static int meet_in_boot(epx_bootstrap *boot, const void *mine, void *all, size_t bytes)
{
    return boot->allgather(boot->context, mine, all, bytes);
}

static int gather_often(struct muster *m, int rank, const uint8_t *out)
{
    char *mine = malloc(LARGE), *all = malloc((size_t)N * LARGE);
    int rc = mine && all ? 0 : -1;

    for (int i = 0; i < GATHERS && !rc; i++) {
        const size_t bytes = i == 7 ? LARGE : (size_t)i;

        memset(mine, 10 * rank + i % 10, bytes);
        if (muster_gather(m, mine, all, bytes) != EPX_OK) {
            fprintf(stderr, "rank %d, gather %d: %s\n", rank, i, epx_last_error());
            rc = -1;
        }
        for (int r = 0; r < N && !rc; r++)
            for (size_t k = 0; k < bytes; k++)
                if (all[(size_t)r * bytes + k] != (out[r] ? 0 : 10 * r + i % 10)) {
                    fprintf(stderr, "rank %d, gather %d: byte %zu of rank %d is wrong\n", rank, i, k, r);
                    rc = -1;
                    break;
                }
    }
    free(all);
    free(mine);
    return rc;
}

static int act(struct muster *m, const struct play *play, int rank)
{
    const struct part *p = &play->part[rank];
    uint8_t out[N];
    epx_status status;
    int rc = 0;

    memcpy(out, p->out, N);
    status = muster_begin(m, p->purpose, out, play->timeout_ms ? play->timeout_ms : 20000);
    if (status != p->expected) {
        fprintf(stderr, "rank %d: expected %s, got %s: %s\n", rank, epx_strerror(p->expected), epx_strerror(status),
                epx_last_error());
        rc = -1;
    }
    for (int i = 0; status != EPX_OK && i < 3 && p->words[i]; i++)
        if (!strstr(epx_last_error(), p->words[i])) {
            fprintf(stderr, "rank %d: no \"%s\" in: %s\n", rank, p->words[i], epx_last_error());
            rc = -1;
        }
    if (status == EPX_OK && memcmp(out, p->agreed, N) != 0) {
        fprintf(stderr, "rank %d: others are left out than expected\n", rank);
        rc = -1;
    }
    if (status == EPX_OK && gather_often(m, rank, out))
        rc = -1;
    muster_end(m);
    return rc;
}

static int run_rank(int rank, int n, epx_bootstrap *boot, void *arg)
{
    const struct play *play = arg;
    struct line_address own, all[N];
    struct muster *m;
    char token = 0, tokens[N];
    int rc = 0;

    (void)n;
    if (muster_open(rank, N, 1, &own, &m) != EPX_OK || meet_in_boot(boot, &own, all, sizeof(own)))
        return -1;
    muster_know(m, all, 0x5eed);
    if (rank == 0 && play->before)
        play->before(all);
    if (play->part[rank].closes) {
        muster_close(m);
        m = NULL;
    }
    if (meet_in_boot(boot, &token, tokens, 1))
        return -1;
    if (m && !play->part[rank].stays_away) {
        rc = act(m, play, rank);
        if (!rc && play->part[rank].expected == EPX_OK)
            rc = act(m, play, rank); /* nothing of the first meeting disturbs the next */
    }
    if (meet_in_boot(boot, &token, tokens, 1))
        rc = -1;
    muster_close(m);
    return rc;
}

static void perform(struct play play)
{
    assert_int_equal(run_ranks(N, run_rank, &play), 0);
}

static void all_meet(void **state)
{
    (void)state;
    perform((struct play){.timeout_ms = 20000});
}

static void a_rank_that_is_gone_is_left_out(void **state)
{
    struct play play = {.part[3].closes = 1};

    (void)state;
    for (int r = 0; r < N; r++)
        play.part[r].agreed[3] = 1;
    perform(play);
}

static void what_two_ranks_leave_out_all_do(void **state)
{
    struct play play = {.part = {[2].stays_away = 1, [4].stays_away = 1}};

    (void)state;
    play.part[0].out[2] = play.part[3].out[4] = 1;
    for (int r = 0; r < N; r++)
        play.part[r].agreed[2] = play.part[r].agreed[4] = 1;
    perform(play);
}

static void one_alone_is_enough(void **state)
{
    struct play play = {.part = {[0].closes = 1, [1].closes = 1, [2].closes = 1, [3].closes = 1}};

    (void)state;
    memcpy(play.part[4].agreed, (uint8_t[N]){1, 1, 1, 1, 0}, N);
    perform(play);
}

static void a_rank_that_does_not_come_is_named(void **state)
{
    struct play play = {.timeout_ms = 300, .part[2].stays_away = 1};

    (void)state;
    for (int r = 0; r < N; r++) {
        play.part[r].expected = EPX_ERR_TIMEOUT;
        play.part[r].words[0] = "rank 2 did not come";
        play.part[r].words[1] = "300 ms";
    }
    perform(play);
}

/* Rank 4 does not know that the others go on without it: it is told, and does not wait for its deadline. */
static void a_rank_that_is_left_out_is_told(void **state)
{
    struct play play = {.timeout_ms = 3000};

    (void)state;
    for (int r = 0; r < N; r++)
        play.part[r].out[4] = play.part[r].agreed[4] = r != 4;
    play.part[4].expected = EPX_ERR_PEER;
    play.part[4].words[0] = "without rank 4";
    perform(play);
}

static void ranks_that_want_different_things_are_told(void **state)
{
    struct play play = {.timeout_ms = 3000};

    (void)state;
    for (int r = 0; r < N; r++) {
        play.part[r].expected = EPX_ERR_MISMATCH;
        play.part[r].words[0] = "different functions";
    }
    for (int r = 0; r < N; r++)
        play.part[r].purpose = r % 2;
    perform(play);
}

/* Calls every port, says nothing, noise, or what looks like a beginning. */
static void call_everybody(const struct line_address *all)
{
    for (int r = 0; r < N; r++)
        for (int kind = 0; kind < 3; kind++) {
            struct endpoint at = {.length = all[r].bytes};
            char noise[64];
            int fd;

            memcpy(&at.address, all[r].data, all[r].bytes);
            fd = socket_connect(&at, NULL, deadline_in(2000));
            assert_true(fd >= 0);
            memset(noise, 0x5a, sizeof(noise));
            memcpy(noise, "EPXM", kind == 2 ? 4 : 0);
            if (kind)
                assert_int_equal(send_all(fd, noise, sizeof(noise), deadline_in(2000)), 0);
            if (kind != 1)
                close(fd); /* one stays, without a word more */
        }
}

static void strangers_do_no_harm(void **state)
{
    (void)state;
    perform((struct play){.before = call_everybody});
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_meet),
        cmocka_unit_test(a_rank_that_is_gone_is_left_out),
        cmocka_unit_test(what_two_ranks_leave_out_all_do),
        cmocka_unit_test(one_alone_is_enough),
        cmocka_unit_test(a_rank_that_does_not_come_is_named),
        cmocka_unit_test(a_rank_that_is_left_out_is_told),
        cmocka_unit_test(ranks_that_want_different_things_are_told),
        cmocka_unit_test(strangers_do_no_harm),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
