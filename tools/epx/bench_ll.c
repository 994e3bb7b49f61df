/* SPDX-License-Identifier: Apache-2.0 */
/* Low latency: every dispatch reads the routing anew. */
#include "bench_worker.h"

/* The handle only needs to know where the indices will be. */
int bench_ll_open(struct bench_rank *rank)
{
    return bench_call(rank, "epx_handle_update",
                      epx_handle_update(rank->handle, bench_work_idx(&rank->work), NULL, NULL));
}

int bench_ll_dispatch(void *self, int variant)
{
    struct bench_rank *rank = self;
    epx_dispatch_inputs in = bench_work_dispatch_inputs(&rank->work);
    epx_dispatch_outputs out = bench_work_dispatch_outputs(&rank->work);
    epx_layout_info info = bench_work_layout_info(&rank->work);

    (void)variant;
    if (bench_call(rank, "epx_dispatch", epx_dispatch(rank->handle, &in, &out, &info, NULL, NULL)) != 0)
        return -1;
    return bench_call(rank, "dispatch", epx_stream_sync(rank->group, NULL));
}

int bench_ll_combine(void *self, int variant)
{
    struct bench_rank *rank = self;
    epx_combine_inputs in = bench_work_combine_inputs(&rank->work);
    epx_combine_outputs out = bench_work_combine_outputs(&rank->work);
    epx_combine_config config = EPX_COMBINE_CONFIG_INIT;

    (void)variant;
    config.logfmt = rank->config->logfmt;
    if (bench_call(rank, "epx_combine", epx_combine(rank->handle, &in, &out, &config, NULL)) != 0)
        return -1;
    return bench_call(rank, "combine", epx_stream_sync(rank->group, NULL));
}
