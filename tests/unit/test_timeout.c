/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A rank that does not come: the others' waits end at their deadline, say whom they waited for and in which phase,
 * later operations fail at once, and after epx_group_error_clear on all ranks the group works again. With enable_mask,
 * low latency goes on without the missing rank. Across nodes too, where ranks learn of a failure a moment later.
 *
 * The last rank is the one that stays away. ctest: cost=38 labels=ranks,noclang sleeps
 */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "group/abort.h"
#include "group/error.h"
#include "net/net.h"
#include "tests/lib/fixture.h"
#include "tests/lib/slow.h"
#include "tests/lib/unit.h"
#include "tests/lib/unit_net.h"

enum { ONE_NODE_MS = 1000, ACROSS_NODES_MS = 3000, SLACK_MS = 5000 };

/* Of the running test; the deadline across nodes includes the time to connect. */
static int short_ms, deadline_ms, ranks_per_node; /* the deadline where nothing else runs, and here */

static double now_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

/* ---- Phases ------------------------------------------------------------------------------------------------------ */

/* `prepare` runs on all ranks and must succeed; `act` only on those that come. */
struct phase {
    const char *word; /* of epx_error_info.phase */
    epx_status (*prepare)(struct fixture *s);
    epx_status (*act)(struct fixture *s);
};

static epx_status set_routing(struct fixture *s)
{
    return epx_handle_update(s->ll, &s->idx, NULL, NULL);
}

static epx_status ll_dispatch(struct fixture *s)
{
    return fixture_sync(s, epx_dispatch(s->ll, &s->in, &s->ll_out, &s->ll_info, NULL, NULL));
}

static epx_status ll_dispatched(struct fixture *s)
{
    epx_status status = set_routing(s);

    return status == EPX_OK ? ll_dispatch(s) : status;
}

static epx_status ll_combine(struct fixture *s)
{
    return fixture_sync(s, epx_combine(s->ll, &s->ll_cin, &s->cout, NULL, NULL));
}

static epx_status ll_staged_dispatch(struct fixture *s)
{
    epx_dispatch_config send_only = EPX_DISPATCH_CONFIG_INIT;
    epx_status status;

    send_only.send_only = 1;
    status = epx_dispatch(s->ll, &s->in, &s->ll_out, &s->ll_info, &send_only, NULL);
    return fixture_sync(s, status == EPX_OK ? epx_complete(s->ll, NULL) : status);
}

static epx_status ht_update(struct fixture *s)
{
    return fixture_sync(s, epx_handle_update(s->ht, &s->idx, NULL, NULL));
}

static epx_status ht_update_counted(struct fixture *s)
{
    epx_status status = epx_handle_update(s->ht, &s->idx, NULL, NULL);
    int64_t rows;

    return fixture_sync(s, status == EPX_OK ? epx_handle_recv_count(s->ht, &rows, NULL) : status);
}

static epx_status ht_dispatch(struct fixture *s)
{
    epx_dispatch_outputs out = s->ht_out;

    out.topk_weights = NULL;
    return fixture_sync(s, epx_dispatch(s->ht, &s->in, &out, NULL, NULL, NULL));
}

static epx_status ht_dispatched(struct fixture *s)
{
    epx_status status = ht_update(s);

    return status == EPX_OK ? ht_dispatch(s) : status;
}

static epx_status ht_combine(struct fixture *s)
{
    return fixture_sync(s, epx_combine(s->ht, &s->ht_cin, &s->cout, NULL, NULL));
}

/* ---- What those that came must see ------------------------------------------------------------------------------- */

static int check_error(struct fixture *s, const struct phase *phase, epx_status status, double took)
{
    epx_error_info info = EPX_ERROR_INFO_INIT;
    char peer[24], self[24];

    if (status != EPX_ERR_TIMEOUT && status != EPX_ERR_PEER)
        return fixture_fail(s, "expected a timeout, or the word of a peer that had one");
    if (slow_exceeds(took, short_ms + SLACK_MS))
        return fixture_fail(s, "it took too long");
    if (epx_group_error(s->group, &info) != status || info.status != (int)status)
        return fixture_fail(s, "epx_group_error has another status");
    if (status == EPX_ERR_PEER)
        return 0;
    snprintf(peer, sizeof(peer), "rank %d", s->nranks - 1);
    snprintf(self, sizeof(self), "rank %d", s->rank);
    if (took < deadline_ms * 0.9)
        return fixture_fail(s, "it gave up before the deadline");
    if (info.rank != s->rank || info.peer != s->nranks - 1 || info.expected <= info.seen)
        return fixture_fail(s, "rank, peer, expected or seen are wrong");
    if (!strstr(info.phase, phase->word))
        return fixture_fail(s, info.phase);
    if (!strstr(info.message, peer) || !strstr(info.message, self) || !strstr(info.message, "expected") ||
        !strstr(info.message, "seen"))
        return fixture_fail(s, info.message);
    return 0;
}

/* Everything is refused at once until the clear. */
static int check_fast_failure(struct fixture *s)
{
    double start = now_ms();

    if (epx_handle_update(s->ht, &s->idx, NULL, NULL) == EPX_OK)
        return fixture_fail(s, "an update after the failure was accepted");
    if (ll_dispatch(s) == EPX_OK)
        return fixture_fail(s, "a dispatch after the failure succeeded");
    if (slow_exceeds(now_ms() - start, short_ms))
        return fixture_fail(s, "operations after the failure waited");
    return 0;
}

static int run_phase_once(struct fixture *s, const struct phase *phase)
{
    int absent = s->rank == s->nranks - 1, rc = 0;
    double start;
    epx_status status;

    fixture_refill(s);
    if (phase->prepare && phase->prepare(s) != EPX_OK)
        return fixture_fail(s, "the preparation failed");
    if (fixture_meet(s))
        return fixture_fail(s, "ranks did not meet");
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
        return fixture_fail(s, "epx_group_error_clear");
    if (epx_group_error(s->group, NULL) != EPX_OK)
        return fixture_fail(s, "there still is an error after the clear");
    return fixture_ll(s) || fixture_ht(s) ? -1 : 0;
}

/* Twice: what a failure leaves behind must not disturb the next one. */
static int run_phase(struct fixture *s)
{
    if (fixture_ll(s) || fixture_ht(s))
        return -1;
    return run_phase_once(s, s->arg) || run_phase_once(s, s->arg) ? -1 : 0;
}

static int set_up(void **state)
{
    (void)state;
    short_ms = ONE_NODE_MS;
    deadline_ms = slow_ms(short_ms);
    return 0;
}

static epx_group_config config(int timeout_ms, int enable_mask)
{
    epx_group_config c = fixture_config(timeout_ms);

    c.ranks_per_node = ranks_per_node;
    c.enable_mask = enable_mask;
    return c;
}

static void times_out(void **state)
{
    const epx_group_config c = config(deadline_ms, 0);

    assert_int_equal(fixture_run(3, &c, run_phase, *state), 0);
}

static const struct phase ll_dispatch_phase = {"ll dispatch", set_routing, ll_dispatch},
                          ll_staged_phase = {"ll dispatch", set_routing, ll_staged_dispatch},
                          ll_combine_phase = {"ll combine", ll_dispatched, ll_combine},
                          ht_update_phase = {"ht", NULL, ht_update}, ht_counted_phase = {"ht", NULL, ht_update_counted},
                          ht_dispatch_phase = {"ht dispatch", ht_update, ht_dispatch},
                          ht_combine_phase = {"ht combine", ht_dispatched, ht_combine};

/* ---- Masks ------------------------------------------------------------------------------------------------------- */

static int check_mask(struct fixture *s, int expected_last)
{
    int32_t mask[8] = {9, 9, 9, 9, 9, 9, 9, 9};

    if (epx_mask_query(s->group, mask, NULL) != EPX_OK || epx_stream_sync(s->group, NULL) != EPX_OK)
        return fixture_fail(s, "epx_mask_query");
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
        return fixture_fail(s, "epx_handle_update");
    status = ll_dispatch(s);
    if (status != EPX_OK && status != EPX_ERR_TIMEOUT)
        return fixture_fail(s, "the first dispatch without the rank");
    if (epx_group_error(s->group, &info) != EPX_ERR_TIMEOUT || info.peer != s->nranks - 1 ||
        !strstr(info.message, "masked"))
        return fixture_fail(s, "the asynchronous error does not tell of the masked rank");
    fixture_set_active(s, s->nranks - 1, 0);
    if (fixture_check_ll_dispatch(s))
        return -1;
    status = ll_combine(s);
    if (status != EPX_OK && status != EPX_ERR_TIMEOUT)
        return fixture_fail(s, "the first combine without the rank");
    return fixture_check_ll_combine(s);
}

/* All ranks are active again. */
static int come_back(struct fixture *s)
{
    if (fixture_meet(s))
        return -1;
    if (epx_mask_clean(s->group, NULL) != EPX_OK || check_mask(s, 1))
        return fixture_fail(s, "epx_mask_clean");
    s->w.round = 100; /* the rank that was away has missed some */
    fixture_set_active(s, s->nranks - 1, 1);
    return fixture_ll(s);
}

/* A rank that a deadline has masked has missed operations, also when it is masked by hand behind that. */
static int stays_masked(struct fixture *s)
{
    int32_t mask[8] = {1, 1, 1, 1, 1, 1, 1, 1};

    mask[s->nranks - 1] = 0;
    if (epx_mask_update(s->group, mask, NULL) != EPX_OK)
        return fixture_fail(s, "epx_mask_update: a masked rank once more");
    mask[s->nranks - 1] = 1;
    if (epx_mask_update(s->group, mask, NULL) != EPX_ERR_USAGE || check_mask(s, 0))
        return fixture_fail(s, "epx_mask_update: a rank that missed operations became active");
    return 0;
}

/* Nor does it when it is masked by hand before the receive half runs that will have missed it. Rank 1 is masked first:
 * what this rank has begun by then is known. */
static int stays_masked_behind_a_receive_half(struct fixture *s)
{
    const int32_t masks[3][3] = {{1, 0, 1}, {1, 0, 0}, {1, 1, 1}};
    epx_dispatch_config send_only = EPX_DISPATCH_CONFIG_INIT;

    send_only.send_only = 1;
    if (fixture_ll(s) || fixture_meet(s))
        return -1;
    if (s->rank == 0) {
        fixture_refill(s);
        if (set_routing(s) != EPX_OK ||
            epx_dispatch(s->ll, &s->in, &s->ll_out, &s->ll_info, &send_only, NULL) != EPX_OK ||
            epx_mask_update(s->group, masks[0], NULL) != EPX_OK || epx_complete(s->ll, NULL) != EPX_OK ||
            epx_mask_update(s->group, masks[1], NULL) != EPX_OK)
            return fixture_fail(s, "a staged dispatch, and masks");
        if (epx_mask_update(s->group, masks[2], NULL) != EPX_ERR_USAGE || !strstr(epx_last_error(), "mask[2]"))
            return fixture_fail(s, "epx_mask_update: a rank that a deadline has masked became active");
    }
    return come_back(s);
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
            return fixture_fail(s, "clear, or the mask");
        if (stays_masked(s))
            return -1;
        start = now_ms();
        if (fixture_ll(s) || fixture_ll(s))
            return -1;
        if (slow_exceeds(now_ms() - start, 2 * short_ms) && unit_sanitizer() == NULL)
            return fixture_fail(s, "a masked rank is waited for");
    }
    return come_back(s) || fixture_ht(s) || fixture_ll(s) ? -1 : 0;
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
            return fixture_fail(s, "epx_mask_update");
        fixture_set_active(s, s->nranks - 1, 0);
        for (int i = 0; i < 3; i++)
            if (fixture_ll(s))
                return -1;
    }
    return come_back(s);
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
        fixture_sync(s, epx_dispatch(s->ll, &s->in, &out, &s->ll_info, NULL, NULL)) != EPX_OK ||
        epx_group_stats(s->group, &stats) != EPX_OK)
        return fixture_fail(s, "dispatch into memory from epx_alloc");
    if (stats.bytes_local != FIXTURE_TOKENS * FIXTURE_HIDDEN * 2)
        return fixture_fail(s, "rows were not staged for their receivers to read");
    return 0;
}

static void run_masked(int nranks, fixture_fn fn)
{
    const epx_group_config c = config(deadline_ms, 1);

    assert_int_equal(fixture_run(nranks, &c, fn, NULL), 0);
}

/* A dispatch into memory that peers write to. */
static epx_status dispatch_into(struct fixture *s, void *memory)
{
    epx_tensor rows = s->ht_rows;
    epx_dispatch_outputs out = EPX_DISPATCH_OUTPUTS_INIT;

    rows.data = memory;
    out.tokens = &rows;
    return fixture_sync(s, epx_dispatch(s->ht, &s->in, &out, NULL, NULL, NULL));
}

/* The rows that a late rank received before are its own: nobody writes into them who has not heard that it is ready
 * again. */
static int late_rank_keeps_rows(struct fixture *s)
{
    const size_t bytes = (size_t)s->ht_rows.shape[0] * FIXTURE_HIDDEN * 2;
    void *memory = NULL, *before = malloc(bytes);
    const int late = s->rank == s->nranks - 1;
    int rc = -1;

    if (!before || epx_alloc(s->group, bytes, &memory) != EPX_OK || ht_update(s) != EPX_OK ||
        dispatch_into(s, memory) != EPX_OK) {
        free(before);
        return fixture_fail(s, "the first dispatch");
    }
    memcpy(before, memory, bytes);
    if (!fixture_meet(s)) {
        rc = 0;
        fixture_refill(s); /* other tokens */
        if (!late && dispatch_into(s, memory) == EPX_OK)
            rc = fixture_fail(s, "a dispatch without the last rank");
        if (fixture_meet(s) || (late && memcmp(before, memory, bytes) != 0))
            rc = fixture_fail(s, "the rows of an earlier dispatch were changed");
    }
    free(before);
    if (!rc && (epx_group_error_clear(s->group) != EPX_OK || fixture_ht(s)))
        rc = fixture_fail(s, "afterwards");
    return rc;
}

static void a_late_rank_keeps_the_rows_it_had(void **state)
{
    epx_group_config config = fixture_config(slow_ms(ONE_NODE_MS));

    (void)state;
    config.num_agents = 4; /* one waits, the others learn of it */
    assert_int_equal(fixture_run(3, &config, late_rank_keeps_rows, NULL), 0);
}

static void a_missing_rank_is_masked_and_comes_back(void **state)
{
    (void)state;
    run_masked(4, mask_rounds);
}

static void a_rank_masked_by_hand_is_left_out(void **state)
{
    (void)state;
    run_masked(4, mask_by_hand);
}

static void a_rank_that_a_deadline_masks_stays_so(void **state)
{
    (void)state;
    run_masked(3, stays_masked_behind_a_receive_half);
}

static void ranks_that_may_be_masked_write_to_nobody(void **state)
{
    (void)state;
    run_masked(3, nobody_writes_here);
}

/* The others wait in vain for the last rank. Nobody goes on without anybody. */
static int clean_without_last(struct fixture *s)
{
    int left_out = 0;

    if (fixture_meet(s))
        return -1;
    if (s->rank < s->nranks - 1 && (epx_mask_clean(s->group, NULL) != EPX_ERR_TIMEOUT ||
                                    epx_mask_left_out(s->group, &left_out) != EPX_OK || left_out))
        return fixture_fail(s, "epx_mask_clean without the last rank");
    return come_back(s);
}

static void a_rank_that_is_late_for_mask_clean_leaves_nobody_out(void **state)
{
    (void)state;
    run_masked(3, clean_without_last);
}

/* ---- Across nodes ------------------------------------------------------------------------------------------------ */

/* These cases are the last ones: nothing is set back. */
static void need_nodes(void)
{
    unit_need_ofi("");
    short_ms = ACROSS_NODES_MS;
    deadline_ms = slow_ms(short_ms);
    ranks_per_node = 2;
}

static void times_out_across_nodes(void **state)
{
    need_nodes();
    times_out(state);
}

/* Rank 0 fails as it does when its proxy finds something wrong, and says what; the last rank is missing, so that all
 * others wait. */
static int proxy_fails(struct fixture *s)
{
    int rc = fixture_ll(s) || set_routing(s) != EPX_OK || fixture_meet(s);

    if (!rc && s->rank < s->nranks - 1) {
        const double start = now_ms();

        rc = epx_dispatch(s->ll, &s->in, &s->ll_out, &s->ll_info, NULL, NULL) != EPX_OK;
        nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
        if (s->rank == 0) {
            error_record_net(s->group, EPX_ERR_SYSTEM, -1, 0, 0, "somebody else writes here");
            group_abort(s->group, EPX_ERR_SYSTEM, -1);
        }
        if (epx_stream_sync(s->group, NULL) != (s->rank ? EPX_ERR_PEER : EPX_ERR_SYSTEM) ||
            slow_exceeds(now_ms() - start, 4 * ACROSS_NODES_MS))
            rc = fixture_fail(s, "rank 0 failed, and this rank was not told");
        else if (!s->rank && !strstr(epx_last_error(), "somebody else writes here"))
            rc = fixture_fail(s, "the message does not say why");
    }
    return fixture_meet(s) || rc;
}

/* Rank 0 ends with a staged operation that it never completes; the others complete theirs and end. */
static int staged_end(struct fixture *s)
{
    epx_dispatch_config send_only = EPX_DISPATCH_CONFIG_INIT;
    double start;

    send_only.send_only = 1;
    if (fixture_ll(s) || set_routing(s) != EPX_OK || fixture_meet(s) ||
        epx_dispatch(s->ll, &s->in, &s->ll_out, &s->ll_info, &send_only, NULL) != EPX_OK ||
        fixture_sync(s, s->rank ? epx_complete(s->ll, NULL) : EPX_OK) != EPX_OK)
        return fixture_fail(s, "the staged operation");
    start = now_ms();
    epx_group_destroy(s->group);
    s->group = NULL;
    return slow_exceeds(now_ms() - start, 4 * ACROSS_NODES_MS) ? fixture_fail(s, "epx_group_destroy took too long") : 0;
}

/* The last rank completes its operation when those of the other node have ended their groups: they have waited a
 * deadline for its signals, which find nobody. */
static int others_end(struct fixture *s)
{
    /* A network that does not reach a rank says so at the deadline, and that is reported after a grace period. */
    const struct timespec until_lost = {.tv_sec = deadline_ms / 1000 + 2};
    const int late = s->rank == s->nranks - 1;
    epx_dispatch_config send_only = EPX_DISPATCH_CONFIG_INIT;
    int rc;

    send_only.send_only = 1;
    rc = fixture_ll(s) || set_routing(s) != EPX_OK || fixture_meet(s) ||
         epx_dispatch(s->ll, &s->in, &s->ll_out, &s->ll_info, &send_only, NULL) != EPX_OK ||
         fixture_sync(s, late ? EPX_OK : epx_complete(s->ll, NULL)) != EPX_OK;
    if (rc)
        (void)fixture_fail(s, "the staged operation");
    if (s->rank < 2) {
        epx_group_destroy(s->group);
        s->group = NULL;
    }
    if (fixture_meet(s) || rc || !late)
        return rc;
    if (fixture_sync(s, epx_complete(s->ll, NULL)) != EPX_OK)
        return fixture_fail(s, "epx_complete");
    nanosleep(&until_lost, NULL);
    return epx_group_error(s->group, NULL) == EPX_OK ? 0 : fixture_fail(s, "ranks that have ended are missed");
}

static void run_across_nodes(fixture_fn fn)
{
    epx_group_config c;

    need_nodes();
    c = config(slow_ms(8 * ACROSS_NODES_MS), 0);
    assert_int_equal(fixture_run(4, &c, fn, NULL), 0);
}

static void a_failed_proxy_is_known_on_all_nodes(void **state)
{
    (void)state;
    run_across_nodes(proxy_fails);
}

/* One who watches for strangers, or for traffic, loses nothing by it. */
static int keeps_its_statistics(struct fixture *s)
{
    epx_stats before = EPX_STATS_INIT, after = EPX_STATS_INIT;

    if (fixture_ll(s) || fixture_meet(s) || epx_group_stats(s->group, &before) != EPX_OK || fixture_meet(s) ||
        (s->rank == 0 && epx_group_abort(s->group, EPX_ERR_SYSTEM) != EPX_OK) || fixture_meet(s) ||
        epx_group_error_clear(s->group) != EPX_OK || epx_group_stats(s->group, &after) != EPX_OK)
        return fixture_fail(s, "a recovery");
    if (!before.net_puts || !before.net_arrivals || after.net_puts < before.net_puts ||
        after.net_arrivals < before.net_arrivals || after.net_bytes < before.net_bytes)
        return fixture_fail(s, "statistics of the network are lost with a recovery");
    return 0;
}

static void a_recovery_keeps_statistics(void **state)
{
    (void)state;
    run_across_nodes(keeps_its_statistics);
}

static void a_staged_operation_at_the_end_keeps_nobody_waiting(void **state)
{
    (void)state;
    run_across_nodes(staged_end);
}

static void ranks_that_have_ended_their_group_are_not_missed(void **state)
{
    epx_group_config c;

    (void)state;
    need_nodes();
    c = config(deadline_ms, 0);
    assert_int_equal(fixture_run(4, &c, others_end, NULL), 0);
}

static void a_missing_rank_is_masked_across_nodes(void **state)
{
    need_nodes();
    a_missing_rank_is_masked_and_comes_back(state);
}

/* Masked by hand and active again, then masked by a deadline: the last rank, alone on its node, hears of it when it
 * comes to send. */
static int late_rank_is_told(struct fixture *s)
{
    const int late = s->rank == s->nranks - 1;
    int32_t mask[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    double until;
    int told = 0;

    if (fixture_ll(s))
        return -1;
    for (int active = 0; !late && active < 2; active++) {
        mask[s->nranks - 1] = active;
        if (epx_mask_update(s->group, mask, NULL) != EPX_OK || check_mask(s, active))
            return fixture_fail(s, "epx_mask_update");
    }
    if (fixture_meet(s) || (!late && first_round_without(s)) || fixture_meet(s))
        return -1;
    if (late && ll_dispatched(s) == EPX_OK)
        (void)ll_combine(s);
    until = now_ms() + deadline_ms;
    while (late && !told && now_ms() < until) {
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
        if (epx_mask_left_out(s->group, &told) != EPX_OK)
            break;
    }
    if (late && !told)
        (void)fixture_fail(s, "it was masked, and nobody told it");
    return come_back(s) || told != late;
}

static void a_late_rank_of_another_node_is_told(void **state)
{
    (void)state;
    need_nodes();
    run_masked(3, late_rank_is_told);
}

/* A rank that others name learns why: it need not have been late. */
static void a_rank_that_others_name_is_told_why(void **state)
{
    const struct {
        int status;
        const char *words;
    } cases[] = {{EPX_ERR_TIMEOUT, "this rank was too late: rank 0 has waited for it"},
                 {EPX_ERR_PEER, "the network of rank 0, or of a rank that told it, has lost this rank: the connection "
                                "was cut, or this rank was stopped or late"},
                 {EPX_ERR_MISMATCH, "rank 0 and this rank do not agree"}};
    struct epx_group group = {.rank = 1, .nranks = 2};
    epx_error_info info = EPX_ERROR_INFO_INIT;

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        assert_int_equal(error_of_abort(&group, ABORT_CAUSED(cases[i].status, PHASE_NONE, 0, 1), &info), EPX_ERR_PEER);
        if (info.peer != -1 || !strstr(info.message, cases[i].words))
            fail_msg("peer %d, no \"%s\" in: %s", info.peer, cases[i].words, info.message);
    }
}

UNIT_MAIN_WITHIN(set_up, NULL, UNIT_CASE("low_latency_dispatch_times_out", times_out, &ll_dispatch_phase),
                 UNIT_CASE("low_latency_staged_dispatch_times_out", times_out, &ll_staged_phase),
                 UNIT_CASE("low_latency_combine_times_out", times_out, &ll_combine_phase),
                 UNIT_CASE("high_throughput_update_times_out", times_out, &ht_update_phase),
                 UNIT_CASE("waiting_for_the_count_times_out", times_out, &ht_counted_phase),
                 UNIT_CASE("high_throughput_dispatch_times_out", times_out, &ht_dispatch_phase),
                 UNIT_CASE("high_throughput_combine_times_out", times_out, &ht_combine_phase),
                 cmocka_unit_test(a_late_rank_keeps_the_rows_it_had),
                 cmocka_unit_test(a_missing_rank_is_masked_and_comes_back),
                 cmocka_unit_test(a_rank_masked_by_hand_is_left_out),
                 cmocka_unit_test(a_rank_that_a_deadline_masks_stays_so),
                 cmocka_unit_test(ranks_that_may_be_masked_write_to_nobody),
                 cmocka_unit_test(a_rank_that_is_late_for_mask_clean_leaves_nobody_out),
                 UNIT_CASE("low_latency_dispatch_times_out_across_nodes", times_out_across_nodes, &ll_dispatch_phase),
                 cmocka_unit_test(a_missing_rank_is_masked_across_nodes),
                 cmocka_unit_test(a_late_rank_of_another_node_is_told),
                 cmocka_unit_test(a_staged_operation_at_the_end_keeps_nobody_waiting),
                 cmocka_unit_test(ranks_that_have_ended_their_group_are_not_missed),
                 cmocka_unit_test(a_failed_proxy_is_known_on_all_nodes), cmocka_unit_test(a_recovery_keeps_statistics),
                 cmocka_unit_test(a_rank_that_others_name_is_told_why))
