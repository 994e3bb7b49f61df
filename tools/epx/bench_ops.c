/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The operations of one EPX rank. bench_issue_*: queued on the rank's stream. bench_op_*: queued and waited for, as a
 * struct bench_runner wants them.
 */
#include <unistd.h>

#include "bench.h"
#include "bench_worker.h"
#include "util/clock.h"

static int is_ll(const struct bench_rank *rank)
{
    return rank->config->mode == EPX_LOW_LATENCY;
}

/* The receive half of a staged operation. */
static int complete(struct bench_rank *rank)
{
    if (!rank->config->staged)
        return 0;
    return bench_call(rank, "epx_complete", epx_complete(rank->handle, rank->stream));
}

/* One graph serves all routings of --replays: its receive tensors have room for the largest. */
static void widen(const struct bench_rank *rank, const epx_tensor *tensor)
{
    if (tensor != NULL && rank->config->replays && !is_ll(rank))
        ((epx_tensor *)(uintptr_t)tensor)->shape[0] = bench_work_max_rows(rank->config);
}

/* Low latency: the handle only needs to know where the indices will be. */
int bench_issue_update(struct bench_rank *rank)
{
    epx_layout_info info = bench_work_layout_info(&rank->work);

    return bench_call(
        rank, "epx_handle_update",
        epx_handle_update(rank->handle, bench_work_idx(&rank->work), is_ll(rank) ? NULL : &info, rank->stream));
}

int bench_issue_dispatch(struct bench_rank *rank)
{
    epx_dispatch_inputs in = bench_work_dispatch_inputs(&rank->work);
    epx_dispatch_outputs out = bench_work_dispatch_outputs(&rank->work);
    epx_layout_info info = bench_work_layout_info(&rank->work);
    epx_dispatch_config config = EPX_DISPATCH_CONFIG_INIT;

    widen(rank, out.tokens);
    widen(rank, out.scales);
    widen(rank, out.topk_weights);
    widen(rank, out.topk_idx);
    config.send_only = rank->config->staged;
    if (rank->config->fp8 == BENCH_FP8_INPUT) {
        in.tokens = &rank->fp8_tokens;
        in.scales = &rank->fp8_scales;
    }
    if (bench_call(rank, "epx_dispatch",
                   epx_dispatch(rank->handle, &in, &out, is_ll(rank) ? &info : NULL, &config, rank->stream)) != 0)
        return -1;
    return complete(rank);
}

int bench_issue_combine(struct bench_rank *rank)
{
    epx_combine_inputs in = bench_work_combine_inputs(&rank->work);
    epx_combine_outputs out = bench_work_combine_outputs(&rank->work);
    epx_combine_config config = EPX_COMBINE_CONFIG_INIT;

    widen(rank, in.tokens);
    config.logfmt = rank->config->logfmt;
    config.send_only = rank->config->staged;
    if (bench_call(rank, "epx_combine", epx_combine(rank->handle, &in, &out, &config, rank->stream)) != 0)
        return -1;
    return complete(rank);
}

int bench_sync(struct bench_rank *rank, const char *what)
{
    return bench_call(rank, what, epx_stream_sync(rank->group, rank->stream));
}

/* The rank lives while it asks; the operations have the group's deadline. */
int bench_sync_series(struct bench_rank *rank, const char *what)
{
    epx_status status;

    while ((status = epx_stream_query(rank->group, rank->stream)) == EPX_ERR_NOT_READY) {
        bench_shm_step(&rank->self);
        usleep(2000);
    }
    return bench_call(rank, what, status) != 0 ? -1 : bench_sync(rank, what);
}

/* Issues an operation and counts how long that kept the host. */
static int issue_timed(struct bench_rank *rank, enum bench_op op, int (*issue)(struct bench_rank *rank))
{
    struct bench_shm *shm = rank->self.shm;
    const uint64_t start = clock_ns();

    if (issue(rank) != 0)
        return -1;
    if (rank->traced)
        return 0;
    __atomic_fetch_add(&shm->host_ns[op], clock_ns() - start, __ATOMIC_RELAXED);
    __atomic_fetch_add(&shm->host_calls[op], 1, __ATOMIC_RELAXED);
    return 0;
}

/* High throughput: the routing is exchanged by an update, and kept. */
int bench_op_update(void *self)
{
    struct bench_rank *rank = self;
    const struct bench_work *work = &rank->work;
    int64_t rows = -1;

    if (issue_timed(rank, BENCH_UPDATE, bench_issue_update) != 0 || bench_sync(rank, "update") != 0)
        return -1;
    if (bench_call(rank, "epx_handle_recv_count", epx_handle_recv_count(rank->handle, &rows, NULL)) != 0)
        return -1;
    if (rows == work->recv.total)
        return 0;
    bench_shm_fail(rank->self.shm, BENCH_MISMATCH,
                   "epx rank %d: epx_handle_recv_count returned %lld rows; expected %lld", rank->self.rank,
                   (long long)rows, (long long)work->recv.total);
    return -1;
}

int bench_op_dispatch(void *self, int variant)
{
    (void)variant;
    return issue_timed(self, BENCH_DISPATCH, bench_issue_dispatch) != 0 ? -1 : bench_sync(self, "dispatch");
}

int bench_op_combine(void *self, int variant)
{
    (void)variant;
    return issue_timed(self, BENCH_COMBINE, bench_issue_combine) != 0 ? -1 : bench_sync(self, "combine");
}
