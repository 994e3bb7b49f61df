/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Random programs for nccl_ep.h against model.h: layouts, recipes, zero_copy, DROP, eager mode, staged halves, graphs,
 * second handles over one handle_mem, the backward pass, masks; ranks are threads, or processes of a launcher.
 * usage: nccl_ep_random FIRST_SEED SEEDS [RANKS]      RANKS: so many threads (0: 1 to 8, drawn); none: the launcher's
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "epx/epx.h"
#include "random.h"

int wrong(const struct run *run, const char *file, int line, const char *what)
{
    static atomic_int failures;

    if (!atomic_fetch_add(&failures, 1))
        plan_print(&run->plan);
    fprintf(stderr, "nccl_ep_random: seed %llu rank %d %s:%d: %s (%s)\n", (unsigned long long)run->plan.seed, run->rank,
            file, line, what, ncclEpxGetLastError());
    return -1;
}

/* ---- Programs ---------------------------------------------------------------------------------------------------- */

static int combines(const struct plan *p)
{
    return p->recipe == NCCL_EP_DISP_QUANT_NONE;
}

static int issue(struct run *run)
{
    if (update(run) || dispatch(run, 0))
        return -1;
    return 0;
}

/* All of a round in one graph, recorded in the first. */
static int round_graph(struct run *run)
{
    if (!run->graph) {
        cudaGraph_t graph;

        TRY(cudaStreamBeginCapture(run->stream, cudaStreamCaptureModeRelaxed));
        if (issue(run))
            return -1;
        if (combines(&run->plan)) {
            TRY(cudaLaunchHostFunc(run->stream, run_experts, run));
            if (combine(run, 0))
                return -1;
        }
        TRY(cudaStreamEndCapture(run->stream, &graph));
        TRY(cudaGraphInstantiate(&run->graph, graph, 0));
        TRY(cudaGraphDestroy(graph));
    }
    TRY(cudaGraphLaunch(run->graph, run->stream));
    TRY(cudaStreamSynchronize(run->stream));
    return combines(&run->plan) ? check_combine(run, 0) : check_dispatch(run, 0);
}

static int round_backward(struct run *run)
{
    struct tensor *const filled[] = {&run->out, &run->out_scales, &run->back, &run->back_weights};

    /* Weights travel back from where the forward pass left them. */
    for (size_t i = 0; i < sizeof(filled) / sizeof(filled[0]); i++)
        if (filled[i]->data)
            memset(filled[i]->data, FILL, filled[i]->bytes);
    if (dispatch(run, 1))
        return -1;
    TRY(cudaStreamSynchronize(run->stream));
    if (check_high(run, 1))
        return -1;
    if (!combines(&run->plan))
        return 0;
    if (combine(run, 1))
        return -1;
    TRY(cudaStreamSynchronize(run->stream));
    return check_combine(run, 1) || check_back_weights(run) ? -1 : 0;
}

static int round_calls(struct run *run)
{
    if (issue(run))
        return -1;
    TRY(cudaStreamSynchronize(run->stream));
    if (check_dispatch(run, 0))
        return -1;
    if (combines(&run->plan)) {
        TRY(cudaLaunchHostFunc(run->stream, run_experts, run));
        if (combine(run, 0))
            return -1;
        TRY(cudaStreamSynchronize(run->stream));
        if (check_combine(run, 0))
            return -1;
    }
    return run->plan.backward ? round_backward(run) : 0;
}

/* One rank sits a round out, and comes back in the next. */
static int round_masked(struct run *run)
{
    int masks[8];

    for (int r = 0; r < run->plan.R; r++)
        masks[r] = r != run->in.masked;
    TRY(ncclEpMaskUpdate(run->group, masks, run->stream));
    if (run->rank != run->in.masked && round_calls(run))
        return -1;
    TRY(ncclEpMaskClean(run->group, run->stream));
    return 0;
}

static int run_round(struct run *run, int round)
{
    const struct plan *p = &run->plan;
    int rc;

    CHECK(!inputs_draw(&run->in, p, round));
    for (int r = 0; !p->low && r < p->R; r++)
        CHECK(!received_make(&run->received[r], &run->in, r));
    if (put_inputs(run))
        return -1;
    rc = p->graph ? round_graph(run) : run->in.masked >= 0 ? round_masked(run) : round_calls(run);
    for (int r = 0; !p->low && r < p->R; r++)
        received_free(&run->received[r]);
    inputs_free(&run->in);
    return rc;
}

static ncclEpGroupConfig_t group_config(const struct plan *p)
{
    ncclEpGroupConfig_t c = NCCL_EP_GROUP_CONFIG_INIT;

    c.algorithm = p->low ? NCCL_EP_ALGO_LOW_LATENCY : NCCL_EP_ALGO_HIGH_THROUGHPUT;
    c.num_experts = (unsigned int)(p->L * p->R);
    c.max_dispatch_tokens_per_rank = (unsigned int)p->M;
    c.max_token_bytes = (unsigned int)(row_bytes(p) + scale_bytes(p));
    c.max_recv_tokens_per_rank = (unsigned int)p->T;
    c.overflow_policy = p->room == DROPS ? NCCL_EP_OVERFLOW_DROP : NCCL_EP_OVERFLOW_AUTO;
    c.zero_copy = p->zero_copy;
    c.num_topk = p->room == EAGER || p->seed % 3 == 0 ? (unsigned int)p->K : 0;
    c.enable_mask = p->masked >= 0;
    return c;
}

static int open_handles(struct run *run)
{
    const struct plan *p = &run->plan;
    ncclEpHandleConfig_t config = NCCL_EP_HANDLE_CONFIG_INIT;
    ncclEpTensor_t memory = NCCL_EP_TENSOR_INIT;
    size_t sizes[1];

    config.dispatch_output_per_expert_alignment = (size_t)p->alignment;
    TRY(ncclEpHandleMemSize(run->group, (ncclEpLayout_t)p->layout, &config, &run->handle_bytes, p->K));
    sizes[0] = run->handle_bytes;
    TRY(cudaMalloc((void **)&run->handle_mem, run->handle_bytes));
    TRY(cudaMalloc((void **)&run->copied_mem, run->handle_bytes));
    memset(run->handle_mem, FILL, run->handle_bytes);
    memory.ndim = 1;
    memory.datatype = ncclUint8;
    memory.sizes = sizes;
    memory.data = run->handle_mem;
    TRY(ncclEpInitHandle(&run->handle, run->group, (ncclEpLayout_t)p->layout, &config, p->K,
                         p->twin || p->seed % 2 ? &memory : NULL));
    memory.data = p->twin == 2 ? run->copied_mem : run->handle_mem;
    if (p->twin)
        TRY(ncclEpInitHandle(&run->twin, run->group, (ncclEpLayout_t)p->layout, &config, p->K, &memory));
    return 0;
}

static int close_handles(struct run *run)
{
    if (run->graph)
        TRY(cudaGraphExecDestroy(run->graph));
    TRY(ncclEpHandleDestroy(run->twin));
    TRY(ncclEpHandleDestroy(run->handle));
    TRY(cudaFree(run->handle_mem));
    TRY(cudaFree(run->copied_mem));
    return 0;
}

static int run_plan(struct run *run)
{
    const ncclEpGroupConfig_t config = group_config(&run->plan);

    if (!run->plan.default_stream)
        TRY(cudaStreamCreate(&run->stream));
    TRY(ncclEpCreateGroup(&run->group, run->comm, &config));
    run->received = calloc((size_t)run->plan.R, sizeof(*run->received));
    CHECK(run->received);
    if (open_handles(run) || open_tensors(run))
        return -1;
    for (int round = 0; round < run->plan.rounds + (run->plan.masked >= 0); round++)
        if (run_round(run, round))
            return -1;
    if (close_handles(run) || close_tensors(run))
        return -1;
    free(run->received);
    TRY(ncclEpGroupDestroy(run->group));
    if (run->stream)
        TRY(cudaStreamDestroy(run->stream));
    return 0;
}

/* ---- Ranks ------------------------------------------------------------------------------------------------------- */

static int run_seeds(ncclComm_t comm, int rank, int R, uint64_t first, int count)
{
    const char *text = getenv("EPX_RANKS_PER_NODE");

    for (uint64_t seed = first; seed < first + (uint64_t)count; seed++) {
        struct run run = {.rank = rank, .comm = comm, .plan = plan_draw(seed, R, text ? atoi(text) : 0)};
        if (run_plan(&run))
            return -1;
    }
    return 0;
}

struct thread_rank {
    pthread_t thread;
    ncclUniqueId id;
    int rank, R, count;
    uint64_t seed;
};

static void *thread_main(void *arg)
{
    const struct thread_rank *t = arg;
    ncclComm_t comm;

    if (cudaSetDevice(t->rank) != cudaSuccess || ncclCommInitRank(&comm, t->R, t->id, t->rank) != ncclSuccess ||
        run_seeds(comm, t->rank, t->R, t->seed, t->count)) {
        fprintf(stderr, "nccl_ep_random: rank %d of %d threads FAILED\n", t->rank, t->R);
        exit(1); /* the others would wait for this one */
    }
    (void)ncclCommDestroy(comm);
    return NULL;
}

static int run_threads(int R, uint64_t seed, int count)
{
    struct thread_rank ranks[8];
    ncclUniqueId id;

    if (ncclGetUniqueId(&id) != ncclSuccess)
        return -1;
    for (int r = 0; r < R; r++) {
        ranks[r] = (struct thread_rank){.id = id, .rank = r, .R = R, .count = count, .seed = seed};
        if (pthread_create(&ranks[r].thread, NULL, thread_main, &ranks[r]))
            return -1;
    }
    for (int r = 0; r < R; r++)
        pthread_join(ranks[r].thread, NULL);
    return 0;
}

static int run_processes(uint64_t seed, int count)
{
    epx_world world = EPX_WORLD_INIT;
    ncclUniqueId id;
    ncclComm_t comm;
    char where[600];

    if (epx_world_query(&world) != EPX_OK)
        return -1;
    snprintf(where, sizeof(where), "%s:%d", world.nranks > 1 ? world.host : "127.0.0.1",
             world.nranks > 1 ? world.port : 29500);
    setenv("NCCL_COMM_ID", where, 0);
    if (ncclGetUniqueId(&id) != ncclSuccess || ncclCommInitRank(&comm, world.nranks, id, world.rank) != ncclSuccess ||
        run_seeds(comm, world.rank, world.nranks, seed, count))
        return -1;
    return (int)ncclCommDestroy(comm);
}

int main(int argc, char **argv)
{
    const uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    const int count = argc > 2 ? atoi(argv[2]) : 1;
    int rc = 0;

    setvbuf(stderr, NULL, _IOLBF, 0);
    if (argc <= 3)
        rc = run_processes(seed, count);
    else if (atoi(argv[3]))
        rc = run_threads(atoi(argv[3]), seed, count);
    else
        for (uint64_t s = seed; !rc && s < seed + (uint64_t)count; s++)
            rc = run_threads(1 + (int)(s % 8), s, 1);
    printf("nccl_ep_random: %d programs from seed %llu: %s\n", count, (unsigned long long)seed, rc ? "FAILED" : "ok");
    return rc ? 1 : 0;
}
