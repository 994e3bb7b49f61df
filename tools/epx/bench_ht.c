/* SPDX-License-Identifier: Apache-2.0 */
/* High throughput: the routing is exchanged by an update, and kept. */
#include "bench_worker.h"

int bench_ht_update(void *self)
{
    struct bench_rank *rank = self;
    struct bench_work *work = &rank->work;
    epx_layout_info info = bench_work_layout_info(work);
    int64_t rows = -1;

    if (bench_call(rank, "epx_handle_update", epx_handle_update(rank->handle, bench_work_idx(work), &info, NULL)) != 0)
        return -1;
    if (bench_call(rank, "update", epx_stream_sync(rank->group, NULL)) != 0)
        return -1;
    if (bench_call(rank, "epx_handle_recv_count", epx_handle_recv_count(rank->handle, &rows, NULL)) != 0)
        return -1;
    if (rows == work->recv.total)
        return 0;
    bench_shm_fail(rank->self.shm, BENCH_MISMATCH, "epx rank %d: epx_handle_recv_count says %lld rows; %lld expected",
                   rank->self.rank, (long long)rows, (long long)work->recv.total);
    return -1;
}

int bench_ht_dispatch(void *self, int variant)
{
    struct bench_rank *rank = self;
    epx_dispatch_inputs in = bench_work_dispatch_inputs(&rank->work);
    epx_dispatch_outputs out = bench_work_dispatch_outputs(&rank->work);

    (void)variant;
    if (bench_call(rank, "epx_dispatch", epx_dispatch(rank->handle, &in, &out, NULL, NULL, NULL)) != 0)
        return -1;
    return bench_call(rank, "dispatch", epx_stream_sync(rank->group, NULL));
}

int bench_ht_combine(void *self, int variant)
{
    struct bench_rank *rank = self;
    epx_combine_inputs in = bench_work_combine_inputs(&rank->work);
    epx_combine_outputs out = bench_work_combine_outputs(&rank->work);

    (void)variant;
    if (bench_call(rank, "epx_combine", epx_combine(rank->handle, &in, &out, NULL, NULL)) != 0)
        return -1;
    return bench_call(rank, "combine", epx_stream_sync(rank->group, NULL));
}
