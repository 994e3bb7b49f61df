/* SPDX-License-Identifier: Apache-2.0 */
/* What NCCL EP's own tests and rules pin, and no other file here: descriptors however they were made, windows into
 * memory that is in reach, handles with different K that take turns, low latency's top-k in the caller's memory, and
 * calls with groups and handles that are none. */
#include <stdlib.h>
#include <string.h>

#include "small.h"

#define BAD ncclInvalidArgument

/* ---- tensor_create ---------------------------------------------------------------------------------------------- */

/* The tokens of the rank before this one come, and go back. */
static int round_trip(struct small *s)
{
    const int from = (world.rank + world.nranks - 1) % world.nranks;

    if (small_dispatch(s, 0x5a) || small_combine(s, 0))
        return -1;
    for (int t = 0; t < 3; t++)
        CHECK(small_row(&s->out, t) == small_value(from, t) && small_row(&s->back, t) == small_value(world.rank, t));
    return 0;
}

static int route_to_next(struct small *s)
{
    const int to = 2 * ((world.rank + 1) % world.nranks), ids[] = {to, to + 1, to};

    return small_route(s, ids, 3);
}

/* Descriptors on the stack, by both initialisers, and of ncclEpTensorAlloc, alone and mixed: the same round trip. */
static int test_descriptors(void)
{
    const ncclEpGroupConfig_t config = small_config(HT, 32);
    struct small s;

    if (small_open(&s, &config, FLAT, 1, 1, 32, PLAIN) || route_to_next(&s) || round_trip(&s))
        return -1;
    size_t in_sizes[] = {3, SMALL_HIDDEN}, out_sizes[] = {32, SMALL_HIDDEN};
    ncclEpTensor_t tokens = NCCL_EP_TENSOR_INIT;
    ncclEpTensor_t received = {NCCL_EP_TENSOR_INIT_INLINE, .ndim = 2, .datatype = ncclBfloat16, .data = s.out.data,
                               .sizes = out_sizes};
    tokens.ndim = 2;
    tokens.datatype = ncclBfloat16;
    tokens.data = s.tokens.data;
    tokens.sizes = in_sizes;
    for (int mixed = 1; mixed < 4; mixed++) {
        s.calls.in.tokens = mixed & 1 ? &tokens : s.tokens.tensor;
        s.calls.out.tokens = s.calls.cin.tokens = mixed & 2 ? &received : s.out.tensor;
        if (round_trip(&s))
            return -1;
    }
    return small_close(&s);
}

/* ---- zero_copy -------------------------------------------------------------------------------------------------- */

/* A window into memory of ncclEpxMemAlloc, zero_copy ON. `data` is set too: it is the address, whatever win_offset
 * says. Rows behind the last one stay as they were. */
static int test_window_in_reach(ncclEpAlgorithm_t algorithm)
{
    const int low = algorithm == LL, from = (world.rank + world.nranks - 1) % world.nranks;
    ncclEpGroupConfig_t config = small_config(algorithm, low ? 0 : 32);
    ncclWindow_t window;
    struct small s;

    if (low && world.ranks_per_node && world.ranks_per_node < world.nranks)
        return 0; /* one node only */
    config.zero_copy = NCCL_EP_ZERO_COPY_ON;
    if (small_open(&s, &config, low ? RANK_MAJOR : FLAT, 1, 1, 32, SHARED))
        return -1;
    TRY(ncclCommWindowRegister(world.comm, s.out.device, s.out.bytes, &window, NCCL_WIN_COLL_SYMMETRIC));
    if (route_to_next(&s))
        return -1;
    EXPECT(BAD, ncclEpDispatch(s.handle, &s.calls.in, &s.calls.out, &s.calls.info, NULL, world.stream));
    s.out.tensor->win_hdl = window;
    s.out.tensor->win_offset = 16;
    if (small_dispatch(&s, 0x5a))
        return -1;
    for (int row = 0; row < (low ? world.nranks * SMALL_TOKENS : 32); row++) {
        const int t = low ? row % SMALL_TOKENS : row, comes = t < 3 && (!low || row / SMALL_TOKENS == from);
        CHECK(comes ? small_row(&s.out, row) == small_value(from, t) : small_row_is(&s.out, row, 0x5a));
    }
    /* Combine of high throughput demands a window as well; that of low latency takes any memory. */
    s.out.tensor->win_hdl = NULL;
    if (!low) {
        EXPECT(BAD, ncclEpCombine(s.handle, &s.calls.cin, &s.calls.cout, NULL, world.stream));
        s.out.tensor->win_hdl = window;
    }
    if (small_combine(&s, 0))
        return -1;
    for (int t = 0; t < 3; t++)
        CHECK(small_row(&s.back, t) == small_value(world.rank, t));
    TRY(ncclCommWindowDeregister(world.comm, window));
    return small_close(&s);
}

/* ---- ll_group_epoch --------------------------------------------------------------------------------------------- */

/* Which halves of which handle: D dispatch, C combine of the first, d and c of the second. */
static int run_order(struct nccl_case *nc, const char *order, uint64_t round, int staged)
{
    for (; *order; order++) {
        struct nccl_case *one = &nc[*order == 'd' || *order == 'c'];
        const int combine = *order == 'C' || *order == 'c';

        if (combine ? nccl_case_combine(one, 0, staged) : nccl_case_dispatch(one, round, 0, staged))
            return -1;
        if (staged)
            TRY(ncclEpComplete(one->handle, NULL, world.stream));
        TRY(cudaStreamSynchronize(world.stream));
        if (combine ? nccl_case_check_combine(one, 0) : nccl_case_check_dispatch(one, 0))
            return -1;
    }
    return 0;
}

/* Two expert-major handles of one group, K 1 and 2: whole and staged operations in turn, exact in every round. */
static int test_two_handles(void)
{
    static const struct spec specs[] = {
        {"K 1", LL, EXPERT_MAJOR, EPX_BF16, EPX_BF16, EPX_INT32, 1, 1, 512, 4, 8, .memory = PLAIN},
        {"K 2", LL, EXPERT_MAJOR, EPX_BF16, EPX_BF16, EPX_INT32, 1, 2, 512, 4, 8, .memory = PLAIN}};
    struct nccl_case nc[2];

    if (nccl_case_open_alone(&nc[1], &specs[1]) || nccl_case_open(&nc[0], nc[1].group, &specs[0]))
        return -1;
    for (uint64_t round = 1; round <= 8; round++)
        if (nccl_case_route(&nc[0], round) || nccl_case_route(&nc[1], round + 50) ||
            run_order(nc, round % 2 ? "DdCc" : "DCdc", round, round % 4 >= 2))
            return -1;
    return nccl_case_close(&nc[0]) || nccl_case_close_alone(&nc[1]) ? -1 : 0;
}

/* ---- handle_mem, low latency ------------------------------------------------------------------------------------ */

/* topk_idx is not copied by the update: what is in the caller's memory when a dispatch runs is what counts. */
static int test_topk_in_place(void)
{
    const ncclEpGroupConfig_t config = small_config(LL, 0);
    const int ids[] = {0};
    struct small s;

    if (small_open(&s, &config, RANK_MAJOR, 1, 1, 0, PLAIN) || small_route(&s, ids, 1))
        return -1;
    for (int to = 0; to < world.nranks; to++) {
        ((int64_t *)s.idx.view.data)[0] = 2 * to;
        if (tensor_pair_put(&s.idx) || small_dispatch(&s, 0x5a))
            return -1;
        for (int r = 0; r < world.nranks; r++)
            CHECK(small_count(&s.rank_counts, r) == (world.rank == to));
    }
    return small_close(&s);
}

/* ---- Nothing ends the process ----------------------------------------------------------------------------------- */

/* A group that is none, in every call that takes one. */
static int no_group(ncclEpGroup_t group, ncclEpTensor_t *idx)
{
    ncclEpHandle_t handle = (ncclEpHandle_t)1;
    int number = 1;
    size_t bytes = 0;
    void *ptr = NULL;

    EXPECT(BAD, ncclEpHandleMemSize(group, FLAT, NULL, &bytes, 1));
    EXPECT(BAD, ncclEpInitHandle(&handle, group, FLAT, NULL, 1, NULL));
    CHECK(handle == NULL);
    handle = (ncclEpHandle_t)1;
    EXPECT(BAD, ncclEpCreateHandle(&handle, group, FLAT, idx, NULL, NULL, world.stream));
    CHECK(handle == NULL);
    EXPECT(BAD, ncclEpMaskQuery(group, &number, world.stream));
    EXPECT(BAD, ncclEpMaskUpdate(group, &number, world.stream));
    EXPECT(BAD, ncclEpMaskClean(group, world.stream));
    EXPECT(BAD, ncclEpGetAsyncError(group, &number));
    EXPECT(BAD, ncclEpErrorClear(group));
    EXPECT(BAD, ncclEpxGetAsyncError(group, &number));
    EXPECT(BAD, ncclEpxErrorClear(group));
    EXPECT(BAD, ncclEpxMemAlloc(group, 16, &ptr));
    EXPECT(BAD, ncclEpxMemFree(group, &number));
    EXPECT(group ? BAD : ncclSuccess, ncclEpGroupDestroy(group));
    return 0;
}

static int no_handle(ncclEpHandle_t handle, const struct small *s)
{
    EXPECT(BAD, ncclEpUpdateHandle(handle, s->idx.tensor, NULL, world.stream));
    EXPECT(BAD, ncclEpDispatch(handle, &s->calls.in, &s->calls.out, NULL, NULL, world.stream));
    EXPECT(BAD, ncclEpCombine(handle, &s->calls.cin, &s->calls.cout, NULL, world.stream));
    EXPECT(BAD, ncclEpComplete(handle, NULL, world.stream));
    EXPECT(handle ? BAD : ncclSuccess, ncclEpHandleDestroy(handle));
    return 0;
}

/* NULL, addresses of other things, one that is no address, things of the other kind, and what was destroyed. */
static int test_strangers(void)
{
    const ncclEpGroupConfig_t config = small_config(HT, 32);
    unsigned char bytes[256];
    ncclEpHandle_t gone_handle;
    ncclEpGroup_t gone_group;
    struct small s;

    memset(bytes, 0xa5, sizeof(bytes));
    if (small_open(&s, &config, FLAT, 1, 1, 32, PLAIN)) /* first: it has no address of those that go */
        return -1;
    TRY(ncclEpCreateGroup(&gone_group, world.comm, &config));
    TRY(ncclEpInitHandle(&gone_handle, gone_group, FLAT, NULL, 1, NULL));
    TRY(ncclEpHandleDestroy(gone_handle));
    if (no_handle(gone_handle, &s))
        return -1;
    TRY(ncclEpGroupDestroy(gone_group));
    void *const things[] = {NULL, bytes, bytes + 1, (void *)16, (void *)-1, s.out.data, gone_group, gone_handle};
    for (size_t i = 0; i < sizeof(things) / sizeof(things[0]); i++)
        if (no_group(things[i], s.idx.tensor) || no_handle(things[i], &s))
            return -1;
    if (no_group((ncclEpGroup_t)(void *)s.handle, s.idx.tensor) || no_handle((ncclEpHandle_t)(void *)s.group, &s) ||
        route_to_next(&s) || round_trip(&s)) /* nothing has happened to what there is */
        return -1;
    return small_close(&s);
}

int test_pinned(void)
{
    return test_descriptors() || test_window_in_reach(HT) || test_window_in_reach(LL) || test_two_handles() ||
                   test_topk_in_place() || test_strangers()
               ? -1
               : 0;
}
