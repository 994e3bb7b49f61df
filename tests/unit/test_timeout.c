/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A rank that does not come: the others' waits end at their deadline, say whom they waited for and in which phase,
 * later operations fail at once, and after epx_group_error_clear on all ranks the group works again. With enable_mask,
 * low latency goes on without the missing rank. Across nodes too, where ranks learn of a failure a moment later.
 *
 * The last rank is the one that stays away. ctest: timeout=180 labels=ranks sleeps
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "group/group.h" /* before cmocka.h, whose fail() is another */
#include "net/net.h"

#include <cmocka.h>

#include "tests/lib/fixture.h"
#include "tests/lib/thread_boot.h"

enum { ONE_NODE_MS = 300, ACROSS_NODES_MS = 3000, SLACK_MS = 5000 };

/* Of the running test; the deadline across nodes includes the time to connect. */
static int deadline_ms = ONE_NODE_MS, ranks_per_node;

static double now_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static int say(struct fixture *s, const char *what)
{
    snprintf(s->why, sizeof(s->why), "%s (last error: %s)", what, epx_last_error());
    return -1;
}

/* ---- Phases ------------------------------------------------------------------------------------------------------------ */

/* `prepare` runs on all ranks and must succeed; `act` only on those that come. */
struct phase {
    const char *word; /* of epx_error_info.phase */
    epx_status (*prepare)(struct fixture *s);
    epx_status (*act)(struct fixture *s);
};

static epx_status then_sync(struct fixture *s, epx_status status)
{
    epx_status synced = epx_stream_sync(s->group, NULL);

    return status != EPX_OK ? status : synced;
}

static epx_status set_routing(struct fixture *s)
{
    return epx_handle_update(s->ll, &s->idx, NULL, NULL);
}

static epx_status ll_dispatch(struct fixture *s)
{
    return then_sync(s, epx_dispatch(s->ll, &s->in, &s->ll_out, &s->ll_info, NULL, NULL));
}

static epx_status ll_dispatched(struct fixture *s)
{
    epx_status status = set_routing(s);

    return status == EPX_OK ? ll_dispatch(s) : status;
}

static epx_status ll_combine(struct fixture *s)
{
    return then_sync(s, epx_combine(s->ll, &s->ll_cin, &s->cout, NULL, NULL));
}

static epx_status ll_staged_dispatch(struct fixture *s)
{
    epx_dispatch_config send_only = EPX_DISPATCH_CONFIG_INIT;
    epx_status status;

    send_only.send_only = 1;
    status = epx_dispatch(s->ll, &s->in, &s->ll_out, &s->ll_info, &send_only, NULL);
    return then_sync(s, status == EPX_OK ? epx_complete(s->ll, NULL) : status);
}

static epx_status ht_update(struct fixture *s)
{
    return then_sync(s, epx_handle_update(s->ht, &s->idx, NULL, NULL));
}

static epx_status ht_update_counted(struct fixture *s)
{
    epx_status status = epx_handle_update(s->ht, &s->idx, NULL, NULL);
    int64_t rows;

    return then_sync(s, status == EPX_OK ? epx_handle_recv_count(s->ht, &rows, NULL) : status);
}

static epx_status ht_dispatch(struct fixture *s)
{
    epx_dispatch_outputs out = s->ht_out;

    out.topk_weights = NULL;
    return then_sync(s, epx_dispatch(s->ht, &s->in, &out, NULL, NULL, NULL));
}

static epx_status ht_dispatched(struct fixture *s)
{
    epx_status status = ht_update(s);

    return status == EPX_OK ? ht_dispatch(s) : status;
}

static epx_status ht_combine(struct fixture *s)
{
    return then_sync(s, epx_combine(s->ht, &s->ht_cin, &s->cout, NULL, NULL));
}

/* ---- What those that came must see -------------------------------------------------------------------------------------- */

static int check_error(struct fixture *s, const struct phase *phase, epx_status status, double took)
{
    epx_error_info info = EPX_ERROR_INFO_INIT;
    char peer[24], self[24];

    if (status != EPX_ERR_TIMEOUT && status != EPX_ERR_PEER)
        return say(s, "expected a timeout, or the word of a peer that had one");
    if (took > deadline_ms + SLACK_MS)
        return say(s, "it took too long");
    if (epx_group_error(s->group, &info) != status || info.status != (int)status)
        return say(s, "epx_group_error has another status");
    if (status == EPX_ERR_PEER)
        return 0;
    snprintf(peer, sizeof(peer), "rank %d", s->nranks - 1);
    snprintf(self, sizeof(self), "rank %d", s->rank);
    if (took < deadline_ms * 0.9)
        return say(s, "it gave up before the deadline");
    if (info.rank != s->rank || info.peer != s->nranks - 1 || info.expected <= info.seen)
        return say(s, "rank, peer, expected or seen are wrong");
    if (!strstr(info.phase, phase->word))
        return say(s, info.phase);
    if (!strstr(info.message, peer) || !strstr(info.message, self) || !strstr(info.message, "expected") ||
        !strstr(info.message, "seen"))
        return say(s, info.message);
    return 0;
}

/* Everything is refused at once until the clear. */
static int check_fast_failure(struct fixture *s)
{
    double start = now_ms();

    if (epx_handle_update(s->ht, &s->idx, NULL, NULL) == EPX_OK)
        return say(s, "an update after the failure was accepted");
    if (ll_dispatch(s) == EPX_OK)
        return say(s, "a dispatch after the failure succeeded");
    if (now_ms() - start > deadline_ms)
        return say(s, "operations after the failure waited");
    return 0;
}

static int run_phase(struct fixture *s, const struct phase *phase)
{
    int absent = s->rank == s->nranks - 1, rc = 0;
    double start;
    epx_status status;

    fixture_refill(s);
    if (phase->prepare && phase->prepare(s) != EPX_OK)
        return say(s, "the preparation failed");
    if (fixture_meet(s))
        return say(s, "ranks did not meet");
    start = now_ms();
    if (!absent) {
        status = phase->act(s);
        rc = check_error(s, phase, status, now_ms() - start);
    }
    if (fixture_meet(s) || rc)
        return -1;
    if (!absent && check_fast_failure(s))
        return -1;
    if (fixture_meet(s))
        return -1;
    if (epx_group_error_clear(s->group) != EPX_OK)
        return say(s, "epx_group_error_clear");
    if (epx_group_error(s->group, NULL) != EPX_OK)
        return say(s, "there still is an error after the clear");
    return fixture_ll(s) || fixture_ht(s) ? -1 : 0;
}

static int phase_rank(int rank, int n, epx_bootstrap *boot, void *arg)
{
    epx_group_config config = fixture_config(deadline_ms);
    struct fixture *s = malloc(sizeof(*s));
    int rc;

    if (!s)
        return -1;
    config.ranks_per_node = ranks_per_node;
    rc = fixture_open(s, rank, n, boot, &config) || fixture_ll(s) || fixture_ht(s);
    /* Twice: what a failure leaves behind must not disturb the next one. */
    for (int i = 0; !rc && i < 2; i++)
        rc = run_phase(s, arg);
    if (rc)
        fprintf(stderr, "rank %d, %s: %s\n", rank, ((struct phase *)arg)->word, s->why);
    fixture_close(s);
    free(s);
    return rc;
}

static void times_out(struct phase phase)
{
    assert_int_equal(run_ranks(3, phase_rank, &phase), 0);
}

static void low_latency_dispatch_times_out(void **state)
{
    (void)state;
    times_out((struct phase){"ll dispatch", set_routing, ll_dispatch});
}

static void low_latency_staged_dispatch_times_out(void **state)
{
    (void)state;
    times_out((struct phase){"ll dispatch", set_routing, ll_staged_dispatch});
}

static void low_latency_combine_times_out(void **state)
{
    (void)state;
    times_out((struct phase){"ll combine", ll_dispatched, ll_combine});
}

static void high_throughput_update_times_out(void **state)
{
    (void)state;
    times_out((struct phase){"ht", NULL, ht_update});
}

static void waiting_for_the_count_times_out(void **state)
{
    (void)state;
    times_out((struct phase){"ht", NULL, ht_update_counted});
}

static void high_throughput_dispatch_times_out(void **state)
{
    (void)state;
    times_out((struct phase){"ht dispatch", ht_update, ht_dispatch});
}

static void high_throughput_combine_times_out(void **state)
{
    (void)state;
    times_out((struct phase){"ht combine", ht_dispatched, ht_combine});
}

/* ---- Masks -------------------------------------------------------------------------------------------------------------- */

static int check_mask(struct fixture *s, int expected_last)
{
    int32_t mask[8] = {9, 9, 9, 9, 9, 9, 9, 9};

    if (epx_mask_query(s->group, mask, NULL) != EPX_OK || epx_stream_sync(s->group, NULL) != EPX_OK)
        return say(s, "epx_mask_query");
    for (int r = 0; r < s->nranks; r++)
        if (mask[r] != (r == s->nranks - 1 ? expected_last : 1)) {
            snprintf(s->why, sizeof(s->why), "mask[%d] is %d", r, mask[r]);
            return -1;
        }
    return 0;
}

/* The round in which the rank is found missing: a timeout may be told, but the results are right. */
static int first_round_without(struct fixture *s)
{
    epx_error_info info = EPX_ERROR_INFO_INIT;
    epx_status status;

    fixture_refill(s);
    if (set_routing(s) != EPX_OK)
        return say(s, "epx_handle_update");
    status = ll_dispatch(s);
    if (status != EPX_OK && status != EPX_ERR_TIMEOUT)
        return say(s, "the first dispatch without the rank");
    if (epx_group_error(s->group, &info) != EPX_ERR_TIMEOUT || info.peer != s->nranks - 1 ||
        !strstr(info.message, "masked"))
        return say(s, "the asynchronous error does not tell of the masked rank");
    fixture_set_active(s, s->nranks - 1, 0);
    if (fixture_check_ll_dispatch(s))
        return -1;
    status = ll_combine(s);
    if (status != EPX_OK && status != EPX_ERR_TIMEOUT)
        return say(s, "the first combine without the rank");
    return fixture_check_ll_combine(s);
}

static int mask_rounds(struct fixture *s)
{
    int absent = s->rank == s->nranks - 1;

    if (fixture_ll(s) || fixture_meet(s))
        return -1;
    if (!absent) {
        double start;

        if (first_round_without(s))
            return -1;
        if (epx_group_error_clear(s->group) != EPX_OK || check_mask(s, 0))
            return say(s, "clear, or the mask");
        start = now_ms();
        if (fixture_ll(s) || fixture_ll(s))
            return -1;
        if (now_ms() - start > 2 * deadline_ms && getenv("EPX_SANITIZE") == NULL)
            return say(s, "a masked rank is waited for");
    }
    if (fixture_meet(s))
        return -1;
    if (epx_mask_clean(s->group, NULL) != EPX_OK || check_mask(s, 1))
        return say(s, "epx_mask_clean");
    s->w.round = 100; /* the rank that was away has missed some */
    fixture_set_active(s, s->nranks - 1, 1);
    return fixture_ll(s) || fixture_ht(s) || fixture_ll(s) ? -1 : 0;
}

static int mask_by_hand(struct fixture *s)
{
    int absent = s->rank == s->nranks - 1;
    int32_t mask[8] = {1, 1, 1, 1, 1, 1, 1, 1};

    mask[s->nranks - 1] = 0;
    if (fixture_ll(s) || fixture_meet(s))
        return -1;
    if (!absent) {
        if (epx_mask_update(s->group, mask, NULL) != EPX_OK || check_mask(s, 0))
            return say(s, "epx_mask_update");
        fixture_set_active(s, s->nranks - 1, 0);
        for (int i = 0; i < 3; i++)
            if (fixture_ll(s))
                return -1;
    }
    if (fixture_meet(s))
        return -1;
    if (epx_mask_clean(s->group, NULL) != EPX_OK || check_mask(s, 1))
        return say(s, "epx_mask_clean");
    s->w.round = 100; /* the rank that was away has missed some */
    fixture_set_active(s, s->nranks - 1, 1);
    return fixture_ll(s);
}

/* A rank that is only late may run on after it was masked: it must not write into what its peers use again by then. */
static int nobody_writes_here(struct fixture *s)
{
    epx_dispatch_outputs out = s->ll_out;
    epx_tensor rows = s->ll_rows;
    epx_stats stats = EPX_STATS_INIT;

    out.tokens = &rows;
    fixture_refill(s);
    if (epx_alloc(s->group, (size_t)tensor_rows(&rows) * FIXTURE_HIDDEN * 2, &rows.data) != EPX_OK ||
        set_routing(s) != EPX_OK || epx_group_stats_reset(s->group) != EPX_OK ||
        then_sync(s, epx_dispatch(s->ll, &s->in, &out, &s->ll_info, NULL, NULL)) != EPX_OK ||
        epx_group_stats(s->group, &stats) != EPX_OK)
        return say(s, "dispatch into memory from epx_alloc");
    if (stats.bytes_local != FIXTURE_TOKENS * FIXTURE_HIDDEN * 2)
        return say(s, "rows were not staged for their receivers to read");
    return 0;
}

struct mask_test {
    int (*run)(struct fixture *s);
};

static int mask_rank(int rank, int n, epx_bootstrap *boot, void *arg)
{
    epx_group_config config = fixture_config(deadline_ms);
    struct fixture *s = malloc(sizeof(*s));
    int rc;

    if (!s)
        return -1;
    config.enable_mask = 1;
    config.ranks_per_node = ranks_per_node;
    rc = fixture_open(s, rank, n, boot, &config) || ((struct mask_test *)arg)->run(s);
    if (rc)
        fprintf(stderr, "rank %d: %s\n", rank, s->why);
    fixture_close(s);
    free(s);
    return rc;
}

static void a_missing_rank_is_masked_and_comes_back(void **state)
{
    struct mask_test test = {mask_rounds};

    (void)state;
    assert_int_equal(run_ranks(4, mask_rank, &test), 0);
}

static void a_rank_masked_by_hand_is_left_out(void **state)
{
    struct mask_test test = {mask_by_hand};

    (void)state;
    assert_int_equal(run_ranks(4, mask_rank, &test), 0);
}

static void ranks_that_may_be_masked_write_to_nobody(void **state)
{
    struct mask_test test = {nobody_writes_here};

    (void)state;
    assert_int_equal(run_ranks(3, mask_rank, &test), 0);
}

/* ---- Across nodes ------------------------------------------------------------------------------------------------------- */

/* These are the last ones: nothing is set back. */
static void across(void (*test)(void **state))
{
    char text[256];

    if (net_ofi_ops.probe("", text, sizeof(text)) != EPX_OK) {
        fprintf(stderr, "no network to test with: %s\n", text);
        skip();
    }
    deadline_ms = ACROSS_NODES_MS;
    ranks_per_node = 2;
    test(NULL);
}

static void low_latency_dispatch_times_out_across_nodes(void **state)
{
    (void)state;
    across(low_latency_dispatch_times_out);
}

/* Rank 0 fails as it does when its proxy finds something wrong; the last rank is missing, so that all others wait. */
static int proxy_fails_rank(int rank, int n, epx_bootstrap *boot, void *arg)
{
    epx_group_config config = fixture_config(8 * ACROSS_NODES_MS);
    struct fixture *s = malloc(sizeof(*s));
    epx_status status = EPX_ERR_PEER;
    double start = 0;
    int rc;

    (void)arg;
    if (!s)
        return -1;
    config.ranks_per_node = ranks_per_node;
    rc = fixture_open(s, rank, n, boot, &config) || fixture_ll(s) || set_routing(s) != EPX_OK || fixture_meet(s);
    if (!rc && rank < n - 1) {
        start = now_ms();
        rc = epx_dispatch(s->ll, &s->in, &s->ll_out, &s->ll_info, NULL, NULL) != EPX_OK;
        nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
        if (rank == 0)
            group_abort(s->group, EPX_ERR_SYSTEM);
        status = epx_stream_sync(s->group, NULL);
        if (status != EPX_ERR_PEER || now_ms() - start > 4 * ACROSS_NODES_MS)
            rc = say(s, "the failure of rank 0 was not told");
    }
    rc = fixture_meet(s) || rc;
    if (rc)
        fprintf(stderr, "rank %d: %s\n", rank, s->why);
    fixture_close(s);
    free(s);
    return rc;
}

static void run_proxy_fails(void **state)
{
    (void)state;
    assert_int_equal(run_ranks(4, proxy_fails_rank, NULL), 0);
}

static void a_failed_proxy_is_known_on_all_nodes(void **state)
{
    (void)state;
    across(run_proxy_fails);
}

/* Rank 0 ends with a staged operation that it never completes; the others complete theirs and end. */
static int staged_end_rank(int rank, int n, epx_bootstrap *boot, void *arg)
{
    epx_group_config config = fixture_config(8 * ACROSS_NODES_MS);
    struct fixture *s = malloc(sizeof(*s));
    epx_dispatch_config send_only = EPX_DISPATCH_CONFIG_INIT;
    double start;
    int rc;

    (void)arg;
    if (!s)
        return -1;
    send_only.send_only = 1;
    config.ranks_per_node = ranks_per_node;
    rc = fixture_open(s, rank, n, boot, &config) || fixture_ll(s) || set_routing(s) != EPX_OK || fixture_meet(s) ||
         epx_dispatch(s->ll, &s->in, &s->ll_out, &s->ll_info, &send_only, NULL) != EPX_OK ||
         then_sync(s, rank ? epx_complete(s->ll, NULL) : EPX_OK) != EPX_OK;
    start = now_ms();
    fixture_close(s);
    if (!rc && now_ms() - start > 4 * ACROSS_NODES_MS) {
        fprintf(stderr, "rank %d: the end took %.0f ms\n", rank, now_ms() - start);
        rc = -1;
    }
    if (rc)
        fprintf(stderr, "rank %d: %s\n", rank, s->why);
    free(s);
    return rc;
}

static void run_staged_end(void **state)
{
    (void)state;
    assert_int_equal(run_ranks(4, staged_end_rank, NULL), 0);
}

static void a_staged_operation_at_the_end_keeps_nobody_waiting(void **state)
{
    (void)state;
    across(run_staged_end);
}

static void a_missing_rank_is_masked_across_nodes(void **state)
{
    (void)state;
    across(a_missing_rank_is_masked_and_comes_back);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(low_latency_dispatch_times_out),
        cmocka_unit_test(low_latency_staged_dispatch_times_out),
        cmocka_unit_test(low_latency_combine_times_out),
        cmocka_unit_test(high_throughput_update_times_out),
        cmocka_unit_test(waiting_for_the_count_times_out),
        cmocka_unit_test(high_throughput_dispatch_times_out),
        cmocka_unit_test(high_throughput_combine_times_out),
        cmocka_unit_test(a_missing_rank_is_masked_and_comes_back),
        cmocka_unit_test(a_rank_masked_by_hand_is_left_out),
        cmocka_unit_test(ranks_that_may_be_masked_write_to_nobody),
        cmocka_unit_test(low_latency_dispatch_times_out_across_nodes),
        cmocka_unit_test(a_missing_rank_is_masked_across_nodes),
        cmocka_unit_test(a_staged_operation_at_the_end_keeps_nobody_waiting),
        cmocka_unit_test(a_failed_proxy_is_known_on_all_nodes),
    };

    if (getenv("EPX_TEST_ONLY"))
        cmocka_set_test_filter(getenv("EPX_TEST_ONLY"));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
