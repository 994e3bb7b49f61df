/* SPDX-License-Identifier: Apache-2.0 */
/* One EPX rank of the benchmark: a group from the environment, a handle, tensors; then it runs what it is told. */
#include "bench_worker.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "group/objects.h"
#include "bench.h"
#include "tests/lib/bench_runner.h"

int bench_call(struct bench_rank *rank, const char *what, epx_status status)
{
    const char *why = epx_last_error();

    if (status == EPX_OK)
        return 0;
    bench_shm_fail(rank->self.shm, status == EPX_ERR_UNSUPPORTED ? BENCH_UNSUPPORTED : BENCH_ERROR,
                   "rank %d: %s: %s: %s", rank->self.rank, what, epx_strerror(status),
                   why[0] != '\0' ? why : "(no more is known)");
    return -1;
}

static int create_group(struct bench_rank *rank)
{
    const struct bench_config *c = rank->config;
    epx_group_config config = EPX_GROUP_CONFIG_INIT;

    config.device = c->device;
    config.modes = (uint32_t)c->mode;
    config.num_experts = c->experts;
    config.max_tokens_per_rank = c->tokens;
    config.max_hidden_bytes = c->hidden * 2;
    config.max_topk = c->topk;
    config.num_agents = c->agents;
    /* room for the tensors, and for what rounding takes */
    config.alloc_bytes = (c->plain_memory ? 0 : bench_work_bytes(c)) + ((uint64_t)1 << 20);
    memcpy(config.net, c->net, sizeof(config.net));
    return bench_call(rank, "epx_group_create", epx_group_create(&rank->group, NULL, &config));
}

static int create_handle(struct bench_rank *rank)
{
    const struct bench_config *c = rank->config;
    epx_handle_config config = EPX_HANDLE_CONFIG_INIT;

    config.mode = c->mode;
    config.layout = c->layout;
    config.topk = c->topk;
    config.expert_alignment = c->mode == EPX_HIGH_THROUGHPUT && c->layout == EPX_EXPERT_MAJOR ? c->alignment : 0;
    return bench_call(rank, "epx_handle_create", epx_handle_create(&rank->handle, rank->group, &config));
}

/* On a GPU tensors are its memory, which the host does not reach. */
static int is_device_memory(const struct bench_rank *rank)
{
    return !(rank->group->device->ops->caps & DEVICE_HOST_ACCESS);
}

static int tensor_copy(void *context, void *to, const void *from, size_t bytes)
{
    struct bench_rank *rank = context;

    return bench_call(rank, "copying tensors", rank->group->device->ops->copy(rank->group->device, to, from, bytes));
}

static void *tensor_alloc(void *context, size_t bytes)
{
    struct bench_rank *rank = context;
    void *ptr = NULL;

    if (rank->config->plain_memory && is_device_memory(rank))
        return bench_call(rank, "tensor memory",
                          rank->group->device->ops->mem_alloc(rank->group->device, bytes, &ptr)) == 0
                   ? ptr
                   : NULL;
    if (rank->config->plain_memory)
        return aligned_alloc(4096, (bytes + 4095) & ~(size_t)4095);
    return bench_call(rank, "epx_alloc", epx_alloc(rank->group, bytes, &ptr)) == 0 ? ptr : NULL;
}

static int open_work(struct bench_rank *rank)
{
    if (is_device_memory(rank))
        return bench_work_open_device(&rank->work, rank->config, rank->self.rank, tensor_alloc, tensor_copy, rank);
    return bench_work_open(&rank->work, rank->config, rank->self.rank, tensor_alloc, rank);
}

static int open_rank(struct bench_rank *rank)
{
    if (create_group(rank) != 0 || create_handle(rank) != 0)
        return -1;
    if (open_work(rank) != 0) {
        bench_shm_fail(rank->self.shm, BENCH_ERROR, "rank %d: no memory for its tensors", rank->self.rank);
        return -1;
    }
    if (rank->config->nodes > 1)
        rank->work.ranks_per_node = bench_ranks_per_node(rank->config);
    rank->work.logfmt = rank->config->logfmt;
    return rank->config->mode == EPX_LOW_LATENCY ? bench_ll_open(rank) : 0;
}

/* What the operation gave to the network; called after its barrier, when all of it has been posted. */
static void count_net(void *self, int op)
{
    struct bench_rank *rank = self;
    epx_stats now = EPX_STATS_INIT;
    struct bench_net *net = &rank->self.shm->net[op < 0 ? 0 : op];

    if (bench_call(rank, "epx_group_stats", epx_group_stats(rank->group, &now)) != 0)
        return;
    if (op >= 0) {
        __atomic_fetch_add(&net->ops, 1, __ATOMIC_RELAXED);
        __atomic_fetch_add(&net->rows, now.rows_remote - rank->before.rows_remote, __ATOMIC_RELAXED);
        __atomic_fetch_add(&net->commands, now.net_commands - rank->before.net_commands, __ATOMIC_RELAXED);
        __atomic_fetch_add(&net->puts, now.net_puts - rank->before.net_puts, __ATOMIC_RELAXED);
        __atomic_fetch_add(&net->signals, now.net_signals - rank->before.net_signals, __ATOMIC_RELAXED);
        __atomic_fetch_add(&net->bytes, now.net_bytes - rank->before.net_bytes, __ATOMIC_RELAXED);
    }
    rank->before = now;
}

static int run_command(struct bench_rank *rank)
{
    int ll = rank->config->mode == EPX_LOW_LATENCY;
    struct bench_runner runner = {.name = "epx",
                                  .self = rank,
                                  .update = ll ? NULL : bench_ht_update,
                                  .dispatch = ll ? bench_ll_dispatch : bench_ht_dispatch,
                                  .combine = ll ? bench_ll_combine : bench_ht_combine,
                                  .finished = rank->config->nodes > 1 ? count_net : NULL,
                                  .corrupt_dispatch = rank->config->corrupt == 1,
                                  .corrupt_combine = rank->config->corrupt == 2};

    return bench_runner_run(&runner, &rank->self, &rank->work);
}

int bench_worker(const char *shm_path)
{
    static struct bench_rank rank;
    const char *number = getenv("RANK");
    epx_status status = EPX_OK;

    if (number == NULL || bench_shm_attach(&rank.self, shm_path, BENCH_EPX, atoi(number)) != 0) {
        fprintf(stderr, "epx bench: cannot open the benchmark's shared memory '%s': %s\n", shm_path, strerror(errno));
        return BENCH_EXIT_FAILED;
    }
    rank.config = &rank.self.shm->config;
    /* The driver reports the failure in the shared memory once; the exit code is for any other end. */
    if (open_rank(&rank) == 0)
        run_command(&rank);
    if (rank.handle != NULL)
        status = epx_handle_destroy(rank.handle);
    if (rank.group != NULL && status == EPX_OK)
        status = epx_group_destroy(rank.group);
    if (!bench_shm_stopped(rank.self.shm))
        bench_call(&rank, "epx_group_destroy", status);
    bench_work_close(&rank.work);
    return BENCH_EXIT_OK;
}
