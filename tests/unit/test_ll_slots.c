/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Slots of low-latency operations: a rank that is ahead takes a slot again only when the others have read what is in
 * it. Random cases seldom show it: most have a dispatch, for which all ranks wait, between two combines of a handle.
 * Here two handles, and as many slots, have one dispatch each and then combine again and again, in two halves, while
 * one rank is late with the second. ctest: labels=ranks
 */
#include <stdio.h>
#include <unistd.h>

#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"

enum { HANDLES = 2, ROUNDS = 12, RANKS = 3, LATE_US = 2000 };

/* Small whole numbers, whose sums bf16 has. */
static float value_of(int round, int handle, int rank)
{
    return (float)(1 + (round * HANDLES + handle) % 7 + 8 * rank);
}

static uint16_t as_bf16(float value)
{
    union {
        float value;
        uint32_t bits;
    } u = {value};

    return (uint16_t)(u.bits >> 16);
}

static void fill_rows(const epx_tensor *rows, float value)
{
    for (int64_t i = 0; i < rows->shape[0] * rows->shape[1] * rows->shape[2]; i++)
        ((uint16_t *)rows->data)[i] = as_bf16(value);
}

static int check_sums(struct fixture *s, const uint16_t *sums, int round, int handle)
{
    const int64_t *idx = s->idx.data;
    const int local = (FIXTURE_EXPERTS + s->nranks - 1) / s->nranks;

    for (int64_t t = 0; t < s->idx.shape[0]; t++) {
        float sum = 0;

        for (int k = 0; k < FIXTURE_TOPK; k++)
            if (idx[t * FIXTURE_TOPK + k] >= 0)
                sum += value_of(round, handle, (int)idx[t * FIXTURE_TOPK + k] / local);
        for (int h = 0; h < FIXTURE_HIDDEN; h++)
            if (sums[t * FIXTURE_HIDDEN + h] != as_bf16(sum)) {
                snprintf(s->why, sizeof(s->why), "round %d, handle %d, token %d: expected %g", round, handle, (int)t,
                         (double)sum);
                return -1;
            }
    }
    return 0;
}

static int dispatch(struct fixture *s, epx_handle *handle)
{
    if (epx_handle_update(handle, &s->idx, NULL, NULL) != EPX_OK ||
        fixture_sync(s, epx_dispatch(handle, &s->in, &s->ll_out, &s->ll_info, NULL, NULL)) != EPX_OK)
        return fixture_fail(s, "epx_dispatch");
    return 0;
}

static int combine_in_halves(struct fixture *s, epx_handle *const *handles, int round)
{
    static const int late_ranks[] = {1, 0, 2};
    epx_combine_config send_only = EPX_COMBINE_CONFIG_INIT;
    uint16_t sums[HANDLES][FIXTURE_M * FIXTURE_HIDDEN];
    epx_status status = EPX_OK;

    send_only.send_only = 1;
    for (int i = 0; i < HANDLES && status == EPX_OK; i++) {
        epx_tensor out = s->combined;
        epx_combine_outputs to = {.size = s->cout.size, .tokens = &out};

        out.data = sums[i];
        fill_rows(&s->ll_rows, value_of(round, i, s->rank));
        /* What is sent is sent when the stream has got there: the rows can be filled anew. */
        status = fixture_sync(s, epx_combine(handles[i], &s->ll_cin, &to, &send_only, NULL));
    }
    if (s->rank == late_ranks[round % 3])
        usleep(LATE_US);
    for (int i = 0; i < HANDLES && status == EPX_OK; i++)
        status = epx_complete(handles[i], NULL);
    if (fixture_sync(s, status) != EPX_OK)
        return fixture_fail(s, "a combine in halves");
    return check_sums(s, sums[0], round, 0) || check_sums(s, sums[1], round, 1) ? -1 : 0;
}

static int combine_again_and_again(struct fixture *s)
{
    const epx_handle_config config = fixture_handle_config(EPX_LOW_LATENCY, EPX_EXPERT_MAJOR, FIXTURE_TOPK);
    epx_handle *handles[HANDLES] = {s->ll, NULL};
    int rc;

    if (epx_handle_create(&handles[1], s->group, &config) != EPX_OK)
        return fixture_fail(s, "epx_handle_create");
    fixture_refill(s);
    for (int64_t i = 0; i < s->weights.shape[0] * FIXTURE_TOPK; i++)
        ((float *)s->weights.data)[i] = 1;
    rc = dispatch(s, handles[0]) || dispatch(s, handles[1]);
    for (int round = 0; round < ROUNDS && !rc; round++)
        rc = combine_in_halves(s, handles, round);
    return epx_handle_destroy(handles[1]) != EPX_OK || rc ? -1 : 0;
}

static void a_slot_is_taken_again_when_all_have_read_it(void **state)
{
    epx_group_config config = fixture_config(30000);

    (void)state;
    config.max_inflight = HANDLES;
    assert_int_equal(fixture_run(RANKS, &config, combine_again_and_again, NULL), 0);
}

UNIT_TESTS(a_slot_is_taken_again_when_all_have_read_it)
