/* SPDX-License-Identifier: Apache-2.0 */
/* High throughput without max_recv_tokens_per_rank: tensors need as many rows as the routing brings, and no more. */
#include "small.h"

#define BAD ncclInvalidArgument

static ncclResult_t dispatch(struct small *s)
{
    return ncclEpDispatch(s->handle, &s->calls.in, &s->calls.out, NULL, &s->calls.config, world.stream);
}

static void set_rows(struct small *s, size_t rows)
{
    s->out.tensor->sizes[0] = s->out_weights.tensor->sizes[0] = rows;
    if (s->out_idx.tensor)
        s->out_idx.tensor->sizes[0] = rows;
}

/* Two tokens of each rank go to each of the next rank's experts: 4 rows, expert-major padded to 8. */
static int test_exact_rows(ncclEpLayout_t layout)
{
    ncclEpGroupConfig_t config = small_config(HT, NCCL_EP_AUTO);
    const int to = 2 * ((world.rank + 1) % world.nranks);
    const int ids[] = {to, to + 1, to, to + 1};
    const size_t rows = layout == EXPERT_MAJOR ? 8 : 4;
    struct small s;

    config.num_topk = 1;
    if (small_open(&s, &config, layout, 4, 1, 16, PLAIN) || small_route(&s, ids, 4))
        return -1;
    CHECK(small_count(&s.total, 0) == (int64_t)rows);
    set_rows(&s, rows - 1);
    EXPECT(BAD, dispatch(&s));
    set_rows(&s, rows);
    s.out_weights.tensor->sizes[0]--;
    EXPECT(BAD, dispatch(&s)); /* each of the tensors */
    set_rows(&s, rows);
    if (small_there_and_back(&s))
        return -1;
    /* Tensors with more rows: nothing is written behind the last. */
    set_rows(&s, 16);
    if (small_dispatch(&s, 0x5a))
        return -1;
    for (int row = (int)rows; row < 16; row++)
        CHECK(small_row_is(&s.out, row, 0x5a) && small_row_is(&s.out_weights, row, 0x5a));
    return small_close(&s);
}

/* Rank 0 gets all tokens, the others none: empty tensors have no memory, in all four legs; half-empty calls are refused
 * before anything is sent, and the group still works. */
static int test_no_rows(ncclEpLayout_t layout)
{
    ncclEpGroupConfig_t config = small_config(HT, NCCL_EP_AUTO);
    const int ids[] = {0, 0, 0, 0};
    const size_t rows = world.rank ? 0 : (size_t)world.nranks * 4;
    struct small s;

    config.num_topk = 1;
    if (small_open(&s, &config, layout, 1, 1, 4 * (int64_t)world.nranks, PLAIN) || small_route(&s, ids, 4))
        return -1;
    CHECK(small_count(&s.total, 0) == (int64_t)rows);
    set_rows(&s, rows);
    s.out_weights.tensor->sizes[0] = rows ? 0 : 1;
    EXPECT(BAD, dispatch(&s)); /* one is empty, the other is not */
    set_rows(&s, rows);
    if (!rows)
        s.out.tensor->data = s.out_weights.tensor->data = NULL;
    if (!rows && s.out_idx.tensor)
        s.out_idx.tensor->data = NULL;
    for (int backward = 0; backward < 2; backward++) {
        small_calls(&s, 0); /* the weights, for the backward combine */
        TRY(dispatch(&s));
        small_calls(&s, backward);
        TRY(dispatch(&s));
        if (backward) {
            s.out_weights.tensor->sizes[0] = rows ? 0 : 1;
            EXPECT(BAD, ncclEpCombine(s.handle, &s.calls.cin, &s.calls.cout, &s.calls.cconfig, world.stream));
            s.out_weights.tensor->sizes[0] = rows;
        }
        if (small_combine(&s, 0))
            return -1;
        for (int t = 0; t < 4; t++) {
            CHECK(small_row(&s.back, t) == small_value(world.rank, t));
            CHECK(!backward || ((float *)s.back_weights.view.data)[t] == 1.0f / (float)(1 + t));
        }
    }
    return small_close(&s);
}

/* Expert-major needs to know how many copies of a token there may be. Dispatch waits for counts: not while a graph is
 * captured. */
static int test_refused(void)
{
    ncclEpGroupConfig_t config = small_config(HT, NCCL_EP_AUTO);
    const int ids[] = {0, 0, 0, 0};
    ncclEpHandle_t handle;
    ncclEpGroup_t group;
    cudaGraph_t graph;
    struct small s;

    TRY(ncclEpCreateGroup(&group, world.comm, &config));
    EXPECT(ncclInvalidUsage, ncclEpInitHandle(&handle, group, EXPERT_MAJOR, NULL, 1, NULL));
    TRY(ncclEpInitHandle(&handle, group, FLAT, NULL, 1, NULL));
    TRY(ncclEpGroupDestroy(group));
    if (small_open(&s, &config, FLAT, 1, 1, 4 * (int64_t)world.nranks, PLAIN) || small_route(&s, ids, 4))
        return -1;
    TRY(cudaStreamBeginCapture(world.stream, cudaStreamCaptureModeRelaxed));
    EXPECT(ncclInvalidUsage, dispatch(&s));
    TRY(cudaStreamEndCapture(world.stream, &graph));
    TRY(cudaGraphDestroy(graph));
    return small_close(&s);
}

int test_eager(void)
{
    return test_exact_rows(FLAT) || test_exact_rows(EXPERT_MAJOR) || test_no_rows(FLAT) || test_no_rows(EXPERT_MAJOR) ||
                   test_refused()
               ? -1
               : 0;
}
