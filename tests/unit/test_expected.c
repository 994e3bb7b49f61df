/* SPDX-License-Identifier: Apache-2.0 */
/* A dispatch that is queued before its number of rows is known: it runs on all ranks, or on none. */
#include <stdlib.h>
#include <string.h>

#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"

enum { RANKS = 3 }; /* as many as have experts */

/* Rows too few for the rank that is `short_by_one`; those that do not say what they expect; nodes of the group. */
struct plan {
    int short_by_one, silent, nodes;
};

static epx_status queue(struct fixture *s, uint32_t expected, int if_expected)
{
    epx_dispatch_inputs in = s->in;
    epx_layout_info info = EPX_LAYOUT_INFO_INIT;
    epx_dispatch_config config = EPX_DISPATCH_CONFIG_INIT;
    epx_status status;

    in.topk_weights = &s->weights;
    info.expected_rows = expected;
    config.if_expected = if_expected;
    status = epx_handle_update(s->ht, &s->idx, &info, NULL);
    return status == EPX_OK && expected ? epx_dispatch(s->ht, &in, &s->ht_out, NULL, &config, NULL) : status;
}

static epx_status again(struct fixture *s)
{
    epx_dispatch_inputs in = s->in;

    in.topk_weights = &s->weights;
    return fixture_sync(s, epx_dispatch(s->ht, &in, &s->ht_out, NULL, NULL, NULL));
}

static int one_round(struct fixture *s, const struct plan *plan)
{
    const size_t bytes = (size_t)s->ht_rows.shape[0] * FIXTURE_HIDDEN * 2;
    const int64_t total = s->ht_recv.total;
    const uint32_t expected = s->rank == plan->silent ? 0 : (uint32_t)(total - (s->rank == plan->short_by_one));
    char *before = malloc(bytes);
    int fits = -1, rc = -1;

    fixture_refill(s);
    memcpy(before, s->ht_rows.data, bytes);
    if (total < 2)
        fixture_fail(s, "the routing of this test has too few rows");
    else if (queue(s, expected, 1) != EPX_OK || epx_handle_recv_fits(s->ht, &fits) != EPX_OK)
        fixture_fail(s, "update and dispatch");
    else if (fits != (plan->short_by_one < 0 && plan->nodes == 1))
        fixture_fail(s, fits ? "more rows than expected are said to fit" : "rows as expected do not fit");
    else if (fixture_sync(s, EPX_OK) != EPX_OK)
        fixture_fail(s, "after the first dispatch");
    else if (!fits && memcmp(before, s->ht_rows.data, bytes))
        fixture_fail(s, "a dispatch that does not run has written rows");
    else if ((!fits || !expected) && again(s) != EPX_OK)
        fixture_fail(s, "the second dispatch");
    else
        rc = fixture_check_ht_dispatch(s) || fixture_ht_combine(s) ? -1 : 0;
    free(before);
    return rc;
}

static int rounds(struct fixture *s)
{
    for (int i = 0; i < 3; i++)
        if (one_round(s, s->arg))
            return -1;
    return fixture_ht(s);
}

static void run(struct plan plan)
{
    epx_group_config config = fixture_config(20000);

    config.num_agents = 3;
    config.ranks_per_node = plan.nodes == 1 ? 0 : 1;
    assert_int_equal(fixture_run(RANKS, &config, rounds, &plan), 0);
}

static void test_as_expected(void **state)
{
    (void)state;
    run((struct plan){-1, -1, 1});
    run((struct plan){-1, -1, RANKS});
}

static void test_one_rank_gets_more(void **state)
{
    (void)state;
    for (int rank = 0; rank < RANKS; rank++)
        run((struct plan){rank, -1, 1});
    run((struct plan){RANKS - 1, -1, RANKS});
}

static void test_one_rank_expects_nothing(void **state)
{
    (void)state;
    run((struct plan){-1, 1, 1});
    run((struct plan){2, 1, 1});
}

static int misuse(struct fixture *s)
{
    static const char *const without[] = {"if_expected", "without", NULL}, *const null[] = {"fits", "NULL", NULL},
                             *const room[] = {"if_expected", "room", NULL};
    epx_dispatch_config config = EPX_DISPATCH_CONFIG_INIT;
    epx_dispatch_inputs in = s->in;
    int fits;

    in.topk_weights = &s->weights;
    config.if_expected = 1;
    if (fixture_ht(s) ||
        fixture_expect(s, "no rows expected", epx_dispatch(s->ht, &in, &s->ht_out, NULL, &config, NULL),
                       EPX_ERR_ARGUMENT, without) ||
        fixture_expect(s, "NULL", epx_handle_recv_fits(s->ht, NULL), EPX_ERR_ARGUMENT, null) ||
        fixture_expect(s, "too little room", queue(s, (uint32_t)s->ht_rows.shape[0] + 1, 1), EPX_ERR_ARGUMENT, room))
        return -1;
    if (epx_handle_recv_fits(s->ht, &fits) != EPX_OK || !fits)
        return fixture_fail(s, "epx_handle_recv_fits");
    return fixture_ht(s);
}

/* An update that expects n rows, and a dispatch into a tensor of as many; `late`: when the counts are there. */
static epx_status dispatch_rows(struct fixture *s, int64_t n, int late, int *fits)
{
    uint16_t *rows = malloc((size_t)n * FIXTURE_HIDDEN * 2);
    epx_tensor tokens = epx_tensor_make(rows, EPX_BF16, 2, n, FIXTURE_HIDDEN, 0, 0);
    epx_dispatch_outputs out = EPX_DISPATCH_OUTPUTS_INIT;
    epx_dispatch_config config = EPX_DISPATCH_CONFIG_INIT;
    epx_layout_info info = EPX_LAYOUT_INFO_INIT;
    epx_status status;

    fixture_refill(s);
    out.tokens = &tokens;
    info.expected_rows = (uint32_t)n;
    config.if_expected = 1;
    status = epx_handle_update(s->ht, &s->idx, &info, NULL);
    if (status == EPX_OK && late)
        status = epx_handle_recv_fits(s->ht, fits);
    if (status == EPX_OK)
        status = epx_dispatch(s->ht, &s->in, &out, NULL, &config, NULL);
    if (status == EPX_OK)
        status = epx_handle_recv_fits(s->ht, fits);
    status = fixture_sync(s, status);
    free(rows);
    return status;
}

/* Tensors with more rows than can ever come. */
static int ample(struct fixture *s)
{
    int fits = -1;

    if (dispatch_rows(s, s->ht_rows.shape[0] + 3, 0, &fits) != EPX_OK || fits != 1)
        return fixture_fail(s, "ample tensors");
    return fixture_ht(s);
}

/* One row too few on the last rank, whose host comes to the dispatch when the counts are there. */
static int late_host(struct fixture *s)
{
    int fits = -1;

    if (dispatch_rows(s, s->ht_recv.total - (s->rank == RANKS - 1), 1, &fits) != EPX_OK || fits != 0 ||
        again(s) != EPX_OK)
        return fixture_fail(s, "a late host");
    return fixture_check_ht_dispatch(s) || fixture_ht_combine(s) ? -1 : fixture_ht(s);
}

static void test_late_host(void **state)
{
    (void)state;
    assert_int_equal(fixture_run(RANKS, NULL, late_host, NULL), 0);
}

static void test_ample_tensors(void **state)
{
    (void)state;
    assert_int_equal(fixture_run(RANKS, NULL, ample, NULL), 0);
}

static void test_misuse(void **state)
{
    (void)state;
    assert_int_equal(fixture_run(RANKS, NULL, misuse, NULL), 0);
}

UNIT_TESTS(test_as_expected, test_one_rank_gets_more, test_one_rank_expects_nothing, test_late_host, test_ample_tensors,
           test_misuse)
