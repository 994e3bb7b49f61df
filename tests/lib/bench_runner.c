/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_runner.h"

static int recorded(const struct bench_command *c, int i)
{
    return c->first < 0 || i < c->warmup ? -1 : c->first + i - c->warmup;
}

/* Ends a measurement; only after its barrier is everything of the operation posted and counted. */
static int finish(const struct bench_runner *runner, struct bench_shm_rank *self, enum bench_op op, int variant,
                  int slot)
{
    if (bench_shm_finish(self, op, variant, slot) != 0)
        return -1;
    if (runner->finished != NULL)
        runner->finished(runner->self, slot >= 0 ? (int)op : -1);
    return 0;
}

static int start(const struct bench_runner *runner, struct bench_shm_rank *self)
{
    if (bench_shm_barrier(self) != 0)
        return -1;
    if (runner->finished != NULL)
        runner->finished(runner->self, -1);
    return 0;
}

static int run_updates(const struct bench_runner *runner, struct bench_shm_rank *self, const struct bench_command *c)
{
    int i;

    if (start(runner, self) != 0)
        return -1;
    for (i = 0; i < c->warmup + c->iters; i++)
        if (runner->update(runner->self) != 0 || finish(runner, self, BENCH_UPDATE, c->trace, recorded(c, i)) != 0)
            return -1;
    return 0;
}

static int run_exchanges(const struct bench_runner *runner, struct bench_shm_rank *self, const struct bench_command *c)
{
    int i;

    if (start(runner, self) != 0)
        return -1;
    for (i = 0; i < c->warmup + c->iters; i++) {
        if (runner->dispatch(runner->self, c->variant) != 0)
            return -1;
        if (finish(runner, self, BENCH_DISPATCH, c->variant, recorded(c, i)) != 0)
            return -1;
        if (runner->combine(runner->self, c->variant) != 0)
            return -1;
        if (finish(runner, self, BENCH_COMBINE, c->variant, recorded(c, i)) != 0)
            return -1;
    }
    return 0;
}

static int verify(const struct bench_runner *runner, struct bench_shm_rank *self, struct bench_work *work)
{
    struct mismatch m = {{0}};
    int last = self->shm->config.ranks - 1;

    if (runner->corrupt_dispatch && self->rank == last)
        bench_work_corrupt(work, 0);
    if (runner->corrupt_combine && self->rank == last)
        bench_work_corrupt(work, 1);
    if (bench_work_check(work, &m) == 0)
        return 0;
    bench_shm_fail(self->shm, BENCH_MISMATCH, "%s rank %d, seed %llu: %s", runner->name, self->rank,
                   (unsigned long long)work->workload.seed, m.text);
    return -1;
}

static int run_command(const struct bench_runner *runner, struct bench_shm_rank *self, struct bench_work *work,
                       const struct bench_command *c)
{
    if (bench_work_seed(work, c->seed) != 0) {
        bench_shm_fail(self->shm, BENCH_ERROR, "%s rank %d: no memory for the workload", runner->name, self->rank);
        return -1;
    }
    if (c->verify)
        bench_work_poison(work);
    if (c->trace && runner->trace != NULL)
        runner->trace(runner->self, 1);
    if (runner->update != NULL && run_updates(runner, self, c) != 0)
        return -1;
    if (run_exchanges(runner, self, c) != 0)
        return -1;
    if (c->trace && runner->trace != NULL)
        runner->trace(runner->self, 0);
    return c->verify ? verify(runner, self, work) : 0;
}

int bench_runner_run(const struct bench_runner *runner, struct bench_shm_rank *self, struct bench_work *work)
{
    struct bench_command command;

    while (bench_shm_next(self, &command) == 0) {
        if (command.quit)
            return 0;
        if (run_command(runner, self, work, &command) != 0)
            return -1;
        bench_shm_done(self);
    }
    return -1;
}
