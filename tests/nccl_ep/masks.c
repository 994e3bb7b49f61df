/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks that are masked by hand, and ranks that come too late. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nccl_case.h"

enum { TIMEOUT_MS = 1500 };

static const struct spec spec = {"masks", LL, EXPERT_MAJOR, EPX_BF16, EPX_BF16, EPX_INT32,
                                 1,       3,  128,          6,        16,       .memory = PLAIN};

/* Everybody but the last rank. */
static int absent(void)
{
    return world.rank == world.nranks - 1;
}

/* What the device says, in the order of the stream. */
static int mask_is(ncclEpGroup_t group, const int *expected)
{
    struct tensor_pair mask = {0};

    if (tensor_pair_open(&mask, group, PLAIN, EPX_INT32, 1, world.nranks, 0, 0))
        return -1;
    TRY(ncclEpMaskQuery(group, (int *)(void *)mask.data, world.stream));
    if (tensor_pair_get(&mask))
        return -1;
    for (int r = 0; r < world.nranks; r++)
        CHECK(((int *)mask.view.data)[r] == expected[r]);
    return tensor_pair_close(&mask);
}

static int error_is(ncclEpGroup_t group, int expected)
{
    int error = -1;

    TRY(ncclEpGetAsyncError(group, &error));
    CHECK(error == expected);
    return 0;
}

static int without_last(struct nccl_case *nc, uint64_t round, const int *active)
{
    if (nccl_case_expect_active(nc, active) || nccl_case_round(nc, round, 0))
        return -1;
    return 0;
}

/* D: MaskUpdate stores the array, 0 -> 1 too, where the rank has missed nothing; also on the masked rank itself. */
static int mask_and_unmask(ncclEpGroup_t group, struct nccl_case *nc, const int *all, const int *some)
{
    for (int i = 0; i < 2; i++) {
        TRY(ncclEpMaskUpdate(group, some, world.stream));
        if (mask_is(group, some))
            return -1;
        TRY(ncclEpMaskUpdate(group, all, world.stream));
        if (mask_is(group, all))
            return -1;
    }
    return nccl_case_round(nc, 7, 0) || error_is(group, 0) ? -1 : 0;
}

/* Meanwhile the last rank has masked itself: its ncclEpMaskClean returns at once, and it waits in its next dispatch. */
static int mask_by_hand(ncclEpGroup_t group, struct nccl_case *nc, const int *all, const int *some)
{
    TRY(ncclEpMaskUpdate(group, some, world.stream));
    if (mask_is(group, some) || without_last(nc, 2, some) || error_is(group, 0))
        return -1;
    EXPECT(ncclInvalidUsage, ncclEpMaskUpdate(group, all, world.stream)); /* comes back by MaskClean only */
    return 0;
}

static int dispatch_times_out(ncclEpGroup_t group, struct nccl_case *nc, uint64_t round, const int *some)
{
    char within[32];

    snprintf(within, sizeof(within), "within %d ms", deadline_ms(TIMEOUT_MS));
    if (nccl_case_dispatch(nc, round, 0, 0))
        return -1;
    TRY(cudaStreamSynchronize(world.stream));
    if (error_is(group, 1))
        return -1;
    CHECK(strstr(ncclEpxGetLastError(), "no response from rank ") != NULL &&
          strstr(ncclEpxGetLastError(), within) != NULL);
    return mask_is(group, some) || nccl_case_expect_active(nc, some) || nccl_case_check_dispatch(nc, 0) ? -1 : 0;
}

/* All ranks are here again. */
static int meet_again(ncclEpGroup_t group, struct nccl_case *nc, uint64_t seed, int error)
{
    static const int all[] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

    TRY(ncclEpMaskClean(group, world.stream));
    if (error_is(group, error))
        return -1;
    TRY(ncclEpErrorClear(group));
    return error_is(group, 0) || mask_is(group, all) || nccl_case_expect_active(nc, NULL) ||
                   nccl_case_route(nc, seed) || nccl_case_round(nc, seed, 0)
               ? -1
               : 0;
}

static int meet(void)
{
    char own = 0, all[64];

    CHECK(world.nranks <= 64);
    TRY(epxNcclHostAllGather(world.comm, &own, all, 1));
    return 0;
}

/* D: MaskClean meets the ranks that are not masked, and only those: ranks 1 and 3 have stopped, and call nothing. Then
 * every entry is 1, and the error stays until ErrorClear. It needs a group that has had a handle. */
static int test_clean_without_masked(void)
{
    const int stopped = world.rank == 1 || world.rank == 3;
    int all[16], some[16];
    ncclEpGroup_t group;
    struct nccl_case nc;

    for (int r = 0; r < world.nranks; r++) {
        all[r] = 1;
        some[r] = r != 1 && r != 3;
    }
    if (group_open(&group, &spec, 1, 100000))
        return -1;
    EXPECT(ncclInvalidUsage, ncclEpMaskClean(group, world.stream));
    if (nccl_case_open(&nc, group, &spec) || nccl_case_route(&nc, 1) || nccl_case_round(&nc, 1, 0))
        return -1;
    if (world.rank != 1) {
        if (nccl_case_dispatch(&nc, 2, 0, 0))
            return -1;
        TRY(cudaStreamSynchronize(world.stream));
    }
    if (!stopped) {
        if (nccl_case_combine(&nc, 0, 0))
            return -1;
        TRY(cudaStreamSynchronize(world.stream));
        if (error_is(group, 1) || mask_is(group, some))
            return -1;
        TRY(ncclEpMaskClean(group, world.stream));
        if (mask_is(group, all) || error_is(group, 1))
            return -1;
        TRY(ncclEpErrorClear(group));
        if (error_is(group, 0) || mask_is(group, all))
            return -1;
    }
    if (meet())
        return -1;
    /* A masked rank that calls it returns at once; the next operation has all ranks again. */
    if (stopped) {
        TRY(ncclEpMaskClean(group, world.stream));
        TRY(ncclEpErrorClear(group));
    }
    if (error_is(group, 0) || nccl_case_route(&nc, 5) || nccl_case_round(&nc, 5, 0) || mask_is(group, all) ||
        nccl_case_close(&nc))
        return -1;
    TRY(ncclEpGroupDestroy(group));
    return 0;
}

int test_masks(void)
{
    int all[16], some[16];
    ncclEpGroup_t group;
    struct nccl_case nc;
    char timeout[16];

    CHECK(world.nranks > 1 && world.nranks <= 16);
    for (int r = 0; r < world.nranks; r++) {
        all[r] = 1;
        some[r] = r < world.nranks - 1;
    }
    snprintf(timeout, sizeof(timeout), "%d", deadline_ms(TIMEOUT_MS));
    TRY(setenv("NCCL_EP_TIMEOUT_MS", timeout, 1)); /* comes before the configuration's */
    if (group_open(&group, &spec, 1, 100000) || nccl_case_open(&nc, group, &spec) || nccl_case_route(&nc, 1) ||
        mask_is(group, all) || nccl_case_round(&nc, 1, 0))
        return -1;
    if (mask_and_unmask(group, &nc, all, some))
        return -1;
    if (absent())
        TRY(ncclEpMaskUpdate(group, some, world.stream));
    if (absent() ? mask_is(group, some) : mask_by_hand(group, &nc, all, some))
        return -1;
    if (meet_again(group, &nc, 2, 0))
        return -1;
    /* Masked for its absence: the others go on, without an error once they have cleared it. */
    if (!absent()) {
        if (dispatch_times_out(group, &nc, 4, some))
            return -1;
        TRY(ncclEpErrorClear(group));
        if (error_is(group, 0) || without_last(&nc, 5, some))
            return -1;
    }
    if (meet_again(group, &nc, 3, 0))
        return -1;
    /* The same, and the error is there until it is cleared. */
    if (!absent() && dispatch_times_out(group, &nc, 6, some))
        return -1;
    if (meet_again(group, &nc, 4, !absent()) || nccl_case_close(&nc))
        return -1;
    TRY(ncclEpGroupDestroy(group));
    if (world.nranks >= 4 && test_clean_without_masked())
        return -1;
    TRY(unsetenv("NCCL_EP_TIMEOUT_MS"));
    return 0;
}
