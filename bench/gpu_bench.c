/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Times EPX's operations on a GPU, per rank, by CUDA events in steady state:
 *
 *      check:   dispatch and combine of a seed, against the oracle; once more by replay, with new routing and data
 *      measure: one graph of [ event | dispatch | event | combine ] * iterations, the events recorded by the graph; and
 *               low latency also by graphs with an event after every tenth operation only, since events take time too:
 *               `pair` of dispatch and combine in turn, `dispatches` and `combines` of one kind in a row
 *      replays: one graph of (update,) dispatch and combine, replayed with other routing and data in the same tensors,
 *               each time against the oracle; --staged: both in halves; --overlap: beside copies on another stream
 *
 * Ranks are threads of this process (--threads N), or processes that `epx run` started. Each rank prints
 *      result NAME OP RANK p50_us p99_us min_us
 * and the script beside this file makes a table of them.
 */
#include <getopt.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "group/objects.h"
#ifdef EPX_HIP
#include "device/gpu/hip/runtime.h"
#else
#include "device/gpu/runtime.h"
#endif
#include "tests/lib/bench_work.h"
#include "tests/lib/thread_boot.h"

enum { OP_DISPATCH, OP_COMBINE, OP_UPDATE, OP_WHOLE, OP_PAIR, OP_DISPATCHES, OP_COMBINES, OPS };
enum { WARM = 5, SERIES = 10, UNTIL_REGISTERED = 3 };
static const char *const op_names[OPS] = {"dispatch", "combine", "update", "whole", "pair", "dispatches", "combines"};

struct options {
    struct bench_config config;
    int threads, iters, check, raw_fp8, timeout_ms, plain, registered, replays, staged, overlap;
    const char *name;
};

struct rank {
    const struct options *o;
    int number;
    epx_group *group;
    epx_handle *handle;
    struct bench_work work;
    cudaStream_t stream;
    cudaGraphExec_t graph[OPS],
        rounds; /* one operation each (from OP_PAIR on: all of a series); all that is measured */
    cudaEvent_t *event;
    void *fp8, *fp8_scales, *fp8_out, *fp8_out_scales; /* --raw-fp8 */
    cudaStream_t beside;                               /* --overlap */
    void *side[2];
    uint64_t copied; /* bytes that the last checked combine copied before they were read */
};

#define SIDE_BYTES ((size_t)8 << 20)
#define SEEDS 5 /* of --replays */

static int is_ll(const struct rank *r)
{
    return r->o->config.mode == EPX_LOW_LATENCY;
}

static int complain(const struct rank *r, const char *what, const char *why)
{
    fprintf(stderr, "gpu_bench %s: rank %d: %s: %s\n", r->o->name, r->number, what, why);
    return -1;
}

static int epx_ok(const struct rank *r, const char *what, epx_status status)
{
    return status == EPX_OK ? 0 : complain(r, what, epx_last_error()[0] ? epx_last_error() : epx_strerror(status));
}

static int cuda_ok(const struct rank *r, const char *what, cudaError_t error)
{
    return error == cudaSuccess ? 0 : complain(r, what, cudaGetErrorString(error));
}

/* ---- Set-up ----------------------------------------------------------------------------------------------------- */

static void *tensor_alloc(void *context, size_t bytes)
{
    struct rank *r = context;
    void *ptr = NULL;

    if (r->o->plain)
        return cuda_ok(r, "cudaMalloc", cudaMalloc(&ptr, bytes)) == 0 ? ptr : NULL;
    return epx_ok(r, "epx_alloc", epx_alloc(r->group, bytes, &ptr)) == 0 ? ptr : NULL;
}

static int tensor_copy(void *context, void *to, const void *from, size_t bytes)
{
    struct rank *r = context;

    return epx_ok(r, "copy", r->group->device->ops->copy(r->group->device, to, from, bytes));
}

static int open_group(struct rank *r, epx_bootstrap *boot)
{
    const struct bench_config *c = &r->o->config;
    epx_group_config config = EPX_GROUP_CONFIG_INIT;
    epx_handle_config handle = EPX_HANDLE_CONFIG_INIT;

    config.device = GPU_KIND;
    config.modes = (uint32_t)c->mode;
    config.num_experts = c->experts;
    config.max_tokens_per_rank = c->tokens;
    config.max_hidden_bytes = c->hidden * 2;
    config.max_topk = c->topk;
    config.layouts = r->o->plain && c->layout == EPX_EXPERT_MAJOR ? EPX_LAYOUT_BIT(EPX_EXPERT_MAJOR) : 0;
    config.num_agents = c->agents;
    config.timeout_ms = r->o->timeout_ms;
    config.ranks_per_node = c->nodes > 1 ? (c->ranks + c->nodes - 1) / c->nodes : 0;
    memcpy(config.net, c->net, sizeof(config.net));
    config.alloc_bytes = (r->o->plain ? 0 : bench_work_bytes(c)) + ((uint64_t)1 << 20);
    if (r->o->raw_fp8)
        config.alloc_bytes += (uint64_t)bench_work_max_rows(c) * (uint64_t)(c->hidden + c->hidden / 32 + 8) + (1 << 20);
    handle.mode = c->mode;
    handle.layout = c->layout;
    handle.topk = c->topk;
    if (epx_ok(r, "epx_group_create", epx_group_create(&r->group, boot, &config)) ||
        epx_ok(r, "epx_handle_create", epx_handle_create(&r->handle, r->group, &handle)))
        return -1;
    return 0;
}

static int open_rank(struct rank *r, epx_bootstrap *boot)
{
    const struct bench_config *c = &r->o->config;

    if (open_group(r, boot))
        return -1;
    if (cuda_ok(r, "cudaStreamCreate", cudaStreamCreateWithFlags(&r->stream, cudaStreamNonBlocking)))
        return -1;
    if (bench_work_open_device(&r->work, c, r->number, tensor_alloc, tensor_copy, r))
        return complain(r, "tensors", "no memory");
    r->work.logfmt = c->logfmt;
    if (c->nodes > 1)
        r->work.ranks_per_node = (c->ranks + c->nodes - 1) / c->nodes;
    if (r->o->raw_fp8) {
        const size_t scales = (size_t)c->hidden / 128 * 4, rows = (size_t)bench_work_max_rows(c);
        if (cuda_ok(r, "cudaMalloc", cudaMalloc(&r->fp8, (size_t)c->tokens * (size_t)c->hidden)) ||
            cuda_ok(r, "cudaMalloc", cudaMalloc(&r->fp8_scales, (size_t)c->tokens * scales)) ||
            epx_ok(r, "epx_alloc", epx_alloc(r->group, rows * (size_t)c->hidden, &r->fp8_out)) ||
            epx_ok(r, "epx_alloc", epx_alloc(r->group, rows * scales, &r->fp8_out_scales)))
            return -1;
        if (cuda_ok(r, "cudaMemset", cudaMemset(r->fp8, 0x31, (size_t)c->tokens * (size_t)c->hidden)) ||
            cuda_ok(r, "cudaMemset", cudaMemset(r->fp8_scales, 0, (size_t)c->tokens * scales)))
            return -1;
    }
    if (r->o->overlap) {
        if (cuda_ok(r, "cudaStreamCreate", cudaStreamCreateWithFlags(&r->beside, cudaStreamNonBlocking)) ||
            cuda_ok(r, "cudaMalloc", cudaMalloc(&r->side[0], SIDE_BYTES)) ||
            cuda_ok(r, "cudaMalloc", cudaMalloc(&r->side[1], SIDE_BYTES)))
            return -1;
    }
    return 0;
}

/* ---- Operations ------------------------------------------------------------------------------------------------- */

static int issue_update(struct rank *r)
{
    epx_layout_info info = bench_work_layout_info(&r->work);

    return epx_ok(r, "epx_handle_update",
                  epx_handle_update(r->handle, bench_work_idx(&r->work), is_ll(r) ? NULL : &info, r->stream));
}

/* A graph serves all routings: its receive tensors have room for the largest. */
static void widen(const struct rank *r, const epx_tensor *tensor)
{
    if (tensor && r->o->replays && !is_ll(r))
        ((epx_tensor *)(uintptr_t)tensor)->shape[0] = bench_work_max_rows(&r->o->config);
}

static int issue_dispatch(struct rank *r)
{
    const struct bench_config *c = &r->o->config;
    epx_dispatch_inputs in = bench_work_dispatch_inputs(&r->work);
    epx_dispatch_outputs out = bench_work_dispatch_outputs(&r->work);
    epx_layout_info info = bench_work_layout_info(&r->work);
    epx_dispatch_config config = EPX_DISPATCH_CONFIG_INIT;
    epx_tensor x, s, y, z;

    widen(r, out.tokens);
    widen(r, out.scales);
    widen(r, out.topk_weights);
    widen(r, out.topk_idx);
    config.send_only = r->o->staged;
    if (r->o->raw_fp8) {
        const int64_t rows = r->work.recv.total;
        x = epx_tensor_make(r->fp8, EPX_FP8_E4M3, 2, c->tokens, c->hidden, 0, 0);
        s = epx_tensor_make(r->fp8_scales, EPX_FP32, 2, c->tokens, c->hidden / 128, 0, 0);
        y = epx_tensor_make(r->fp8_out, EPX_FP8_E4M3, 2, rows, c->hidden, 0, 0);
        z = epx_tensor_make(r->fp8_out_scales, EPX_FP32, 2, rows, c->hidden / 128, 0, 0);
        in.tokens = &x;
        in.scales = &s;
        out.tokens = &y;
        out.scales = &z;
    }
    return epx_ok(r, "epx_dispatch", epx_dispatch(r->handle, &in, &out, is_ll(r) ? &info : NULL, &config, r->stream)) ||
           (r->o->staged && epx_ok(r, "epx_complete", epx_complete(r->handle, r->stream)));
}

static int issue_combine(struct rank *r)
{
    epx_combine_inputs in = bench_work_combine_inputs(&r->work);
    epx_combine_outputs out = bench_work_combine_outputs(&r->work);
    epx_combine_config config = EPX_COMBINE_CONFIG_INIT;

    widen(r, in.tokens);
    config.logfmt = r->o->config.logfmt;
    config.send_only = r->o->staged;
    return epx_ok(r, "epx_combine", epx_combine(r->handle, &in, &out, &config, r->stream)) ||
           (r->o->staged && epx_ok(r, "epx_complete", epx_complete(r->handle, r->stream)));
}

static int sync(struct rank *r, const char *what)
{
    return epx_ok(r, what, epx_stream_sync(r->group, r->stream));
}

static int record(struct rank *r, int i)
{
    return cuda_ok(r, "record", cudaEventRecordWithFlags(r->event[i], r->stream, cudaEventRecordExternal));
}

static int issue_rounds(struct rank *r)
{
    int failed = 0;

    for (int i = 0; i < r->o->iters + WARM && !failed; i++)
        failed = record(r, 2 * i) || issue_dispatch(r) || record(r, 2 * i + 1) || issue_combine(r);
    return failed || record(r, 2 * (r->o->iters + WARM));
}

/* An event after every SERIES-th. */
static int issue_series(struct rank *r, int (*first)(struct rank *), int (*second)(struct rank *))
{
    int failed = record(r, 0);

    for (int i = 0; i < (r->o->iters + WARM) * SERIES && !failed; i++)
        failed = first(r) || (second && second(r)) || (i % SERIES == SERIES - 1 && record(r, i / SERIES + 1));
    return failed;
}

static int issue_pairs(struct rank *r)
{
    return issue_series(r, issue_dispatch, issue_combine);
}

static int issue_dispatches(struct rank *r)
{
    return issue_series(r, issue_dispatch, NULL);
}

static int issue_combines(struct rank *r)
{
    return issue_series(r, issue_combine, NULL);
}

static int issue_whole(struct rank *r)
{
    return (!is_ll(r) && issue_update(r)) || issue_dispatch(r) || issue_combine(r);
}

static int capture(struct rank *r, int (*issue)(struct rank *), cudaGraphExec_t *made)
{
    cudaGraph_t graph;
    int failed;

    if (cuda_ok(r, "capture", cudaStreamBeginCapture(r->stream, cudaStreamCaptureModeThreadLocal)))
        return -1;
    failed = issue(r);
    if (cuda_ok(r, "end of capture", cudaStreamEndCapture(r->stream, &graph)) || failed)
        return -1;
    failed = cuda_ok(r, "instantiate", cudaGraphInstantiate(made, graph, 0));
    cudaGraphDestroy(graph);
    return failed || cuda_ok(r, "upload", cudaGraphUpload(*made, r->stream));
}

static int replay(struct rank *r, int op)
{
    return cuda_ok(r, "replay", cudaGraphLaunch(r->graph[op], r->stream));
}

/* ---- Check ------------------------------------------------------------------------------------------------------ */

/* Ranks as threads share a context, in which setting up a graph may wait for kernels that run: nobody runs one before
 * all have theirs. */
static pthread_barrier_t all_captured;

static int meet(struct rank *r)
{
    if (r->o->threads)
        pthread_barrier_wait(&all_captured);
    return 0;
}

static int check(struct rank *r, uint64_t seed, int by_replay)
{
    epx_stats before = EPX_STATS_INIT, after = EPX_STATS_INIT;
    struct mismatch m;

    if (bench_work_seed(&r->work, seed))
        return complain(r, "workload", "no memory");
    bench_work_poison(&r->work);
    if (issue_update(r) || sync(r, "update"))
        return -1;
    if (by_replay ? replay(r, OP_DISPATCH) : issue_dispatch(r))
        return -1;
    if (sync(r, "dispatch") || epx_ok(r, "epx_group_stats", epx_group_stats(r->group, &before)))
        return -1;
    if (by_replay ? replay(r, OP_COMBINE) : issue_combine(r))
        return -1;
    if (sync(r, "combine") || epx_ok(r, "epx_group_stats", epx_group_stats(r->group, &after)))
        return -1;
    r->copied = after.bytes_local - before.bytes_local;
    if (r->o->check && bench_work_check(&r->work, &m))
        return complain(r, by_replay ? "check of a replay" : "check", m.text);
    return 0;
}

/* --registered: memory that is not EPX's is read in place once all ranks have mapped it, which takes some calls. */
static int check_registered(struct rank *r)
{
    for (int i = 1; i < UNTIL_REGISTERED; i++)
        if (check(r, 1, 0))
            return -1;
    return r->copied ? complain(r, "combine", "its rows were copied, expected them to be read in place") : 0;
}

/* ---- Replays ---------------------------------------------------------------------------------------------------- */

/* Work of the caller's own, meanwhile: copies a pattern to and fro. */
static int begin_beside(struct rank *r, int turn)
{
    int failed = cuda_ok(r, "cudaMemsetAsync", cudaMemsetAsync(r->side[0], turn & 0xff, SIDE_BYTES, r->beside));

    for (int i = 0; i < 4 && !failed; i++)
        failed = cuda_ok(
            r, "cudaMemcpyAsync",
            cudaMemcpyAsync(r->side[(i + 1) % 2], r->side[i % 2], SIDE_BYTES, cudaMemcpyDeviceToDevice, r->beside));
    return failed;
}

static int check_beside(struct rank *r, int turn)
{
    unsigned char got[64];

    if (cuda_ok(r, "cudaMemcpyAsync",
                cudaMemcpyAsync(got, (char *)r->side[0] + SIDE_BYTES / 2, sizeof(got), cudaMemcpyDeviceToHost,
                                r->beside)) ||
        cuda_ok(r, "work on another stream", cudaStreamSynchronize(r->beside)))
        return -1;
    for (size_t i = 0; i < sizeof(got); i++)
        if (got[i] != (turn & 0xff))
            return complain(r, "work on another stream", "its result is wrong");
    return 0;
}

static int replay_all(struct rank *r)
{
    struct mismatch m;

    for (int i = 0; i < r->o->replays; i++) {
        if (bench_work_seed(&r->work, 1 + (uint64_t)i % SEEDS))
            return complain(r, "workload", "no memory");
        bench_work_poison(&r->work);
        if ((r->o->overlap && begin_beside(r, i)) || replay(r, OP_WHOLE) || sync(r, "replay") ||
            (r->o->overlap && check_beside(r, i)))
            return -1;
        if (bench_work_check(&r->work, &m)) {
            fprintf(stderr, "gpu_bench %s: rank %d: replay %d: %s\n", r->o->name, r->number, i, m.text);
            return -1;
        }
    }
    return 0;
}

/* ---- Measure ---------------------------------------------------------------------------------------------------- */

static int by_value(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;

    return x < y ? -1 : x > y;
}

static void print_times(struct rank *r, int op, float *us, int n)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

    qsort(us, (size_t)n, sizeof(*us), by_value);
    pthread_mutex_lock(&lock);
    printf("result %s %s %d %.1f %.1f %.1f\n", r->o->name, op_names[op], r->number, us[n / 2], us[n * 99 / 100], us[0]);
    fflush(stdout);
    pthread_mutex_unlock(&lock);
}

static int prepare(struct rank *r)
{
    const int n = (r->o->iters + WARM) * 2 + 1;
    int failed;

    r->event = calloc((size_t)n, sizeof(*r->event));
    failed = !r->event;
    for (int i = 0; !failed && i < n; i++)
        failed = cuda_ok(r, "cudaEventCreate", cudaEventCreate(&r->event[i]));
    return failed;
}

static int measure(struct rank *r)
{
    const int n = r->o->iters;
    cudaEvent_t *event = r->event;
    float *us = calloc((size_t)n, sizeof(*us));
    int failed = !us || cuda_ok(r, "measured operations", cudaGraphLaunch(r->rounds, r->stream)) ||
                 sync(r, "measured operations");

    for (int op = 0; !failed && op < 2; op++) {
        for (int i = 0; i < n; i++) {
            float ms = 0;
            cudaEventElapsedTime(&ms, event[2 * (i + WARM) + op], event[2 * (i + WARM) + op + 1]);
            us[i] = ms * 1000;
        }
        print_times(r, op, us, n);
    }
    for (int op = OP_PAIR; !failed && is_ll(r) && op <= OP_COMBINES; op++) {
        failed = replay(r, op) || sync(r, op_names[op]);
        for (int i = 0; i < n && !failed; i++) {
            float ms = 0;
            cudaEventElapsedTime(&ms, event[i + WARM], event[i + WARM + 1]);
            us[i] = ms * 1000 / SERIES;
        }
        if (!failed)
            print_times(r, op, us, n);
    }
    if (!failed && !is_ll(r)) {
        for (int i = 0; !failed && i < n; i++) {
            float ms = 0;
            failed = cuda_ok(r, "record", cudaEventRecord(event[0], r->stream)) || issue_update(r) ||
                     cuda_ok(r, "record", cudaEventRecord(event[1], r->stream)) || sync(r, "update");
            cudaEventElapsedTime(&ms, event[0], event[1]);
            us[i] = ms * 1000;
        }
        if (!failed)
            print_times(r, OP_UPDATE, us, n);
    }
    free(us);
    return failed ? -1 : 0;
}

static int run_rank(int number, int n, epx_bootstrap *boot, void *arg)
{
    struct rank r;
    int failed;

    (void)n;
    memset(&r, 0, sizeof(r));
    r.o = arg;
    r.number = number;
    failed = open_rank(&r, boot) || prepare(&r);
    meet(&r);
    failed = failed || check(&r, 1, 0) || (r.o->registered && check_registered(&r));
    meet(&r);
    if (!failed && r.o->replays)
        failed = capture(&r, issue_whole, &r.graph[OP_WHOLE]);
    else if (!failed)
        failed =
            capture(&r, issue_dispatch, &r.graph[OP_DISPATCH]) || capture(&r, issue_combine, &r.graph[OP_COMBINE]) ||
            (r.o->iters && capture(&r, issue_rounds, &r.rounds)) ||
            (r.o->iters && is_ll(&r) &&
             (capture(&r, issue_pairs, &r.graph[OP_PAIR]) || capture(&r, issue_dispatches, &r.graph[OP_DISPATCHES]) ||
              capture(&r, issue_combines, &r.graph[OP_COMBINES])));
    meet(&r);
    if (r.o->replays)
        failed = failed || replay_all(&r);
    else if (!failed && r.o->check && is_ll(&r))
        failed = check(&r, 2, 1) || check(&r, 1, 1);
    else if (!failed && r.o->check)
        failed = check(&r, 1, 1) || (r.o->registered && r.copied &&
                                     complain(&r, "replay", "its rows were copied, expected them to be read in place"));
    failed = failed || (r.o->iters && !r.o->replays && measure(&r));
    if (r.handle && !failed)
        failed = epx_ok(&r, "epx_handle_destroy", epx_handle_destroy(r.handle));
    if (r.group && epx_ok(&r, "epx_group_destroy", epx_group_destroy(r.group)))
        failed = 1;
    bench_work_close(&r.work);
    free(r.event);
    if (!failed && r.o->check && number == 0)
        printf("checked %s\n", r.o->name);
    return failed;
}

/* ---- Options ---------------------------------------------------------------------------------------------------- */

static int usage(void)
{
    fprintf(
        stderr,
        "usage: gpu_bench ll|ht [--name NAME] [--threads RANKS] [--tokens N] [--hidden N] [--topk N] [--experts N]\n"
        "           [--fp8] [--raw-fp8] [--logfmt] [--rank-major | --expert-major] [--agents N] [--nodes N]\n"
        "           [--net NAME] [--iters N] [--timeout MS] [--check] [--plain [--registered]] [--replays N "
        "[--overlap]] "
        "[--staged]\n");
    return 2;
}

static int parse(struct options *o, int argc, char **argv)
{
    static const struct option names[] = {
        {"name", 1, NULL, 'n'},    {"threads", 1, NULL, 'T'},      {"tokens", 1, NULL, 't'},  {"hidden", 1, NULL, 'h'},
        {"topk", 1, NULL, 'k'},    {"experts", 1, NULL, 'e'},      {"fp8", 0, NULL, '8'},     {"raw-fp8", 0, NULL, 'r'},
        {"logfmt", 0, NULL, 'l'},  {"rank-major", 0, NULL, 'R'},   {"agents", 1, NULL, 'a'},  {"nodes", 1, NULL, 'N'},
        {"net", 1, NULL, 'w'},     {"iters", 1, NULL, 'i'},        {"timeout", 1, NULL, 'o'}, {"check", 0, NULL, 'c'},
        {"plain", 0, NULL, 'p'},   {"expert-major", 0, NULL, 'E'}, {"replays", 1, NULL, 'g'}, {"staged", 0, NULL, 's'},
        {"overlap", 0, NULL, 'v'}, {"registered", 0, NULL, 'L'},   {NULL, 0, NULL, 0}};
    struct bench_config *c = &o->config;
    int id;

    if (argc < 2 || (strcmp(argv[1], "ll") && strcmp(argv[1], "ht")))
        return usage();
    memset(o, 0, sizeof(*o));
    o->name = argv[1];
    o->iters = 50;
    o->timeout_ms = 20000;
    *c = (struct bench_config){.mode = argv[1][1] == 'l' ? EPX_LOW_LATENCY : EPX_HIGH_THROUGHPUT,
                               .layout = argv[1][1] == 'l' ? EPX_EXPERT_MAJOR : EPX_FLAT,
                               .nodes = 1,
                               .tokens = argv[1][1] == 'l' ? 128 : 4096,
                               .hidden = 7168,
                               .topk = 8,
                               .experts = argv[1][1] == 'l' ? 288 : 256,
                               .alignment = 1,
                               .device = GPU_KIND};
    optind = 2;
    while ((id = getopt_long(argc, argv, "", names, NULL)) != -1) {
        switch (id) {
        case 'n':
            o->name = optarg;
            break;
        case 'T':
            o->threads = atoi(optarg);
            break;
        case 't':
            c->tokens = atoi(optarg);
            break;
        case 'h':
            c->hidden = atoi(optarg);
            break;
        case 'k':
            c->topk = atoi(optarg);
            break;
        case 'e':
            c->experts = atoi(optarg);
            break;
        case '8':
            c->fp8 = 1;
            break;
        case 'r':
            o->raw_fp8 = 1;
            break;
        case 'l':
            c->logfmt = 1;
            break;
        case 'R':
            c->layout = EPX_RANK_MAJOR;
            break;
        case 'E':
            c->layout = EPX_EXPERT_MAJOR;
            break;
        case 'a':
            c->agents = atoi(optarg);
            break;
        case 'N':
            c->nodes = atoi(optarg);
            break;
        case 'w':
            snprintf(c->net, sizeof(c->net), "%s", optarg);
            break;
        case 'i':
            o->iters = atoi(optarg);
            break;
        case 'o':
            o->timeout_ms = atoi(optarg);
            break;
        case 'c':
            o->check = 1;
            break;
        case 'p':
            o->plain = 1;
            break;
        case 'L':
            o->registered = 1;
            break;
        case 'g':
            o->replays = atoi(optarg);
            break;
        case 's':
            o->staged = 1;
            break;
        case 'v':
            o->overlap = 1;
            break;
        default:
            return usage();
        }
    }
    return 0;
}

int main(int argc, char **argv)
{
    static struct options o;
    const char *rank = getenv("RANK"), *world = getenv("WORLD_SIZE");
    int code = parse(&o, argc, argv);

    if (code)
        return code;
    if (o.threads) {
        /* Kernels of several ranks wait for each other: no two of their streams may share a queue. */
        setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
        pthread_barrier_init(&all_captured, NULL, (unsigned)o.threads);
        o.config.ranks = o.threads;
        return run_ranks(o.threads, run_rank, &o) ? 1 : 0;
    }
    o.config.ranks = world ? atoi(world) : 1;
    return run_rank(rank ? atoi(rank) : 0, o.config.ranks, NULL, &o) ? 1 : 0;
}
