/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One EPX rank of the benchmark: a group, a handle, tensors; then it runs the driver's commands. A rank is a process
 * with a group from the environment, or (--threads) one of several threads of a process.
 */
#include "bench_worker.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "group/marks.h"
#include "group/objects.h"
#include "net/net.h"
#include "bench.h"
#include "tests/lib/bench_runner.h"
#include "tests/lib/thread_boot.h"
#include "util/trace.h"

int bench_call(struct bench_rank *rank, const char *what, epx_status status)
{
    const char *why = epx_last_error();

    if (status == EPX_OK)
        return 0;
    bench_shm_fail(rank->self.shm, status == EPX_ERR_UNSUPPORTED ? BENCH_UNSUPPORTED : BENCH_ERROR, "rank %d: %s: %s",
                   rank->self.rank, what, why[0] != '\0' ? why : epx_strerror(status));
    return -1;
}

int bench_complain(struct bench_rank *rank, const char *format, ...)
{
    char text[512];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    bench_shm_fail(rank->self.shm, BENCH_ERROR, "rank %d: %s", rank->self.rank, text);
    return -1;
}

struct device *bench_device(const struct bench_rank *rank)
{
    return rank->group->device;
}

/* What dispatch is given as fp8, beside the tensors of bench_work. */
static size_t fp8_bytes(const struct bench_config *c)
{
    return c->fp8 == BENCH_FP8_INPUT ? (size_t)c->tokens * (size_t)(c->hidden + c->hidden / 128 * 4) + 8192 : 0;
}

static int create_group(struct bench_rank *rank, epx_bootstrap *boot)
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
    config.timeout_ms = c->group_timeout_ms;
    /* Rows of combine in the caller's memory may pass through the heap. */
    if (c->plain_memory && c->mode == EPX_HIGH_THROUGHPUT && c->layout == EPX_EXPERT_MAJOR)
        config.layouts = EPX_LAYOUT_BIT(EPX_EXPERT_MAJOR);
    config.ranks_per_node = c->nodes > 1 ? bench_ranks_per_node(c) : 0;
    /* room for the tensors, and for what rounding takes */
    config.alloc_bytes = (c->plain_memory ? 0 : bench_work_bytes(c) + fp8_bytes(c)) + ((uint64_t)1 << 20);
    memcpy(config.net, c->net, sizeof(config.net));
    if (!c->traced || trace_on())
        return bench_call(rank, "epx_group_create", epx_group_create(&rank->group, boot, &config));
    trace_switch(1); /* the group has room for marks of kernels */
    const int rc = bench_call(rank, "epx_group_create", epx_group_create(&rank->group, boot, &config));
    trace_switch(0);
    return rc;
}

/* Which network the group has: "ofi: libfabric 1.17, net on eth0". Its name alone where nothing more can be said. */
static void describe_network(struct bench_rank *rank)
{
    char *text = rank->self.shm->network, found[sizeof(rank->self.shm->network) - 17] = "";
    epx_group_info info = EPX_GROUP_INFO_INIT;
    const struct net_ops *ops;
    const char *provider;

    if (rank->self.rank != 0 || rank->config->nodes < 2 || epx_group_query(rank->group, &info) != EPX_OK)
        return;
    if (net_find(rank->config->net, &ops, &provider) != EPX_OK || strcmp(ops->name, info.net_name) != 0 ||
        ops->probe(provider, found, sizeof(found)) != EPX_OK)
        found[0] = '\0';
    snprintf(text, sizeof(rank->self.shm->network), "%s%s%s", info.net_name, found[0] != '\0' ? ": " : "", found);
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

static void *plain_alloc(struct bench_rank *rank, size_t bytes)
{
    void **list = realloc(rank->plain, ((size_t)rank->nplain + 1) * sizeof(list[0]));
    void *ptr;

    if (list == NULL)
        return NULL;
    rank->plain = list;
    ptr = aligned_alloc(4096, (bytes + 4095) & ~(size_t)4095);
    if (ptr != NULL)
        list[rank->nplain++] = ptr;
    return ptr;
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
        return plain_alloc(rank, bytes);
    return bench_call(rank, "epx_alloc", epx_alloc(rank->group, bytes, &ptr)) == 0 ? ptr : NULL;
}

void *bench_tensor_alloc(struct bench_rank *rank, size_t bytes)
{
    return tensor_alloc(rank, bytes);
}

int bench_tensor_copy(struct bench_rank *rank, void *to, const void *from, size_t bytes)
{
    return tensor_copy(rank, to, from, bytes);
}

static int open_work(struct bench_rank *rank)
{
    if (is_device_memory(rank))
        return bench_work_open_device(&rank->work, rank->config, rank->self.rank, tensor_alloc, tensor_copy, rank);
    return bench_work_open(&rank->work, rank->config, rank->self.rank, tensor_alloc, rank);
}

/* Constant rows: the bytes that dispatch moves do not depend on them. */
static int open_fp8(struct bench_rank *rank)
{
    const struct bench_config *c = rank->config;
    const size_t bytes = (size_t)c->tokens * (size_t)c->hidden, scales = (size_t)c->tokens * (size_t)(c->hidden / 128);
    void *tokens, *scale, *host;
    int failed;

    if (c->fp8 != BENCH_FP8_INPUT)
        return 0;
    tokens = tensor_alloc(rank, bytes);
    scale = tensor_alloc(rank, scales * sizeof(float));
    host = malloc(bytes);
    if (tokens == NULL || scale == NULL || host == NULL) {
        free(host);
        return -1;
    }
    memset(host, 0x31, bytes);
    failed = tensor_copy(rank, tokens, host, bytes);
    memset(host, 0, scales * sizeof(float));
    failed = failed || tensor_copy(rank, scale, host, scales * sizeof(float));
    free(host);
    rank->fp8_tokens = epx_tensor_make(tokens, EPX_FP8_E4M3, 2, c->tokens, c->hidden, 0, 0);
    rank->fp8_scales = epx_tensor_make(scale, EPX_FP32, 2, c->tokens, c->hidden / 128, 0, 0);
    return failed;
}

static int open_rank(struct bench_rank *rank, epx_bootstrap *boot)
{
    if (create_group(rank, boot) != 0 || create_handle(rank) != 0)
        return -1;
    if (open_work(rank) != 0 || open_fp8(rank) != 0) {
        bench_shm_fail(rank->self.shm, BENCH_ERROR, "rank %d: no memory for its tensors", rank->self.rank);
        return -1;
    }
    describe_network(rank);
    if (rank->config->nodes > 1)
        rank->work.ranks_per_node = bench_ranks_per_node(rank->config);
    rank->work.logfmt = rank->config->logfmt;
    return rank->config->mode == EPX_LOW_LATENCY ? bench_issue_update(rank) : 0;
}

/* What the operation gave to the network; called after its barrier, when all of it has been posted. */
static void count_net(void *self, int op)
{
    struct bench_rank *rank = self;
    epx_stats now = EPX_STATS_INIT;
    struct bench_net *net = &rank->self.shm->net[op < 0 ? 0 : op];

    if (bench_call(rank, "epx_group_stats", epx_group_stats(rank->group, &now)) != 0)
        return;
    if (op >= 0 && !rank->traced) {
        __atomic_fetch_add(&net->ops, 1, __ATOMIC_RELAXED);
        __atomic_fetch_add(&net->rows, now.rows_remote - rank->before.rows_remote, __ATOMIC_RELAXED);
        __atomic_fetch_add(&net->commands, now.net_commands - rank->before.net_commands, __ATOMIC_RELAXED);
        __atomic_fetch_add(&net->puts, now.net_puts - rank->before.net_puts, __ATOMIC_RELAXED);
        __atomic_fetch_add(&net->signals, now.net_signals - rank->before.net_signals, __ATOMIC_RELAXED);
        __atomic_fetch_add(&net->bytes, now.net_bytes - rank->before.net_bytes, __ATOMIC_RELAXED);
    }
    rank->before = now;
}

static int phase_op(const char *operation)
{
    static const struct {
        const char *name;
        enum bench_op op;
    } ops[] = {{"ll dispatch", BENCH_DISPATCH},
               {"ll combine", BENCH_COMBINE},
               {"ht update", BENCH_UPDATE},
               {"ht dispatch", BENCH_DISPATCH},
               {"ht combine", BENCH_COMBINE}};

    for (size_t i = 0; i < sizeof(ops) / sizeof(ops[0]); i++)
        if (strcmp(operation, ops[i].name) == 0)
            return (int)ops[i].op;
    return -1;
}

static void store_phase(void *self, const char *operation, const char *phase, uint64_t ns, uint64_t n)
{
    struct bench_rank *rank = self;
    const int op = phase_op(operation);
    struct bench_phase *p = op >= 0 ? rank->self.shm->phases[op] : NULL;

    for (int i = 0; p != NULL && i < BENCH_PHASES; i++, p++) {
        if (p->name[0] != '\0' && strcmp(p->name, phase) != 0)
            continue;
        snprintf(p->name, sizeof(p->name), "%s", phase);
        p->ns = ns;
        p->count = n;
        return;
    }
}

/* Ranks that are threads would switch each other's tracing: they all do at the same time. */
static void switch_trace(void *self, int on)
{
    struct bench_rank *rank = self;

    rank->traced = on;
    trace_switch(on);
    if (!on)
        group_marks_take(rank->group);
    if (!on && rank->self.rank == 0)
        trace_phases(0, store_phase, rank);
}

static int run_commands(struct bench_rank *rank)
{
    const struct bench_config *c = rank->config;
    struct bench_runner runner = {.name = "epx",
                                  .self = rank,
                                  .update = c->mode == EPX_LOW_LATENCY ? NULL : bench_op_update,
                                  .dispatch = bench_op_dispatch,
                                  .combine = bench_op_combine,
                                  .finished = c->nodes > 1 ? count_net : NULL,
                                  .trace = switch_trace,
                                  .corrupt_dispatch = c->corrupt == 1,
                                  .corrupt_combine = c->corrupt == 2};

    if (c->layer)
        return bench_layer_run(rank);
    if (c->events || c->replays > 0)
        return bench_events_run(rank);
    return bench_runner_run(&runner, &rank->self, &rank->work);
}

static void close_rank(struct bench_rank *rank)
{
    epx_status status = EPX_OK;

    if (rank->handle != NULL)
        status = epx_handle_destroy(rank->handle);
    if (rank->group != NULL && status == EPX_OK)
        status = epx_group_destroy(rank->group);
    if (!bench_shm_stopped(rank->self.shm))
        bench_call(rank, "epx_group_destroy", status);
    bench_work_close(&rank->work);
    for (int i = 0; i < rank->nplain; i++)
        free(rank->plain[i]);
    free(rank->plain);
}

/* The driver reports the failure in the shared memory once; the result is for any other end. */
static int run_rank(const char *shm_path, int number, epx_bootstrap *boot, const struct bench_link *link)
{
    struct bench_rank *rank = calloc(1, sizeof(*rank));

    if (rank == NULL || bench_shm_attach(&rank->self, shm_path, BENCH_EPX, number) != 0) {
        fprintf(stderr, "epx bench: cannot open the benchmark's shared memory '%s': %s\n", shm_path, strerror(errno));
        free(rank);
        return EXIT_FAILED;
    }
    rank->self.link = link;
    rank->config = &rank->self.shm->config;
    if (open_rank(rank, boot) == 0 && run_commands(rank) == 0 && link != NULL)
        (void)bench_shm_collect(&rank->self);
    close_rank(rank);
    free(rank);
    return EXIT_OK;
}

static int run_thread(int number, int n, epx_bootstrap *boot, void *arg)
{
    (void)n;
    return run_rank(arg, number, boot, NULL);
}

int bench_worker(const char *shm_path, int threads)
{
    const char *number = getenv("RANK");

    if (threads > 0) {
        /* Kernels of several ranks wait for each other: no two of their streams may share a queue. */
        setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
        return run_ranks(threads, run_thread, (void *)(uintptr_t)shm_path) != 0 ? EXIT_FAILED : EXIT_OK;
    }
    return run_rank(shm_path, number != NULL ? atoi(number) : 0, NULL, NULL);
}

int bench_worker_joined(const char *shm_path, int rank, const struct bench_link *link)
{
    return run_rank(shm_path, rank, NULL, link);
}
