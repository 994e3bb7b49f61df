/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bound of a dispatch: the same rows, by as many processes as the ranks have agents, to the same places, and
 * nothing else. No counts, no signals, no waits: what dispatch could do if exchanging cost nothing.
 *
 *      sources of all ranks    receive rows of all ranks(one row behind the other, in order of source and token)
 *      [rank 0][rank 1]...     [rank 0            ][rank 1            ]...
 *          |                       ^                   ^
 *          +-- process of rank 0 --+-------------------+     each row is read once and written to all its places
 *
 * All of it is one shared mapping, as the heaps of ranks are, with the advice that they give the kernel. Each process
 * maps its pages in an untimed pass. Then all do the same number of passes at once; the bound is what they wrote until
 * the last one has finished. The best of all spans counts: a ceiling is what the machine can do undisturbed.
 */
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "bench.h"
#include "device/cpu/math.h"
#include "util/clock.h"

enum {
    SPANS = 2,             /* per round of the benchmark */
    MOST_PROCESSES = 256,  /* with more ranks a process does the rows of several */
    START_NS = 1000000000, /* time for all to be ready, times 20 */
    CHILD_MS = 60000,      /* a process that is stopped does not hang the benchmark */
    CORRUPT_BOUND = 4      /* of EPX_BENCH_CORRUPT: a bound that is passed */
};
#define SPAN_BYTES 256e6 /* at least so much is written in a span */
#define MOST_BYTES 1.5e9 /* of the mapping: larger operations are bounded by their first tokens */
#define ROW_START 512    /* of the next row, fetched while one is written */

struct spans {
    uint32_t ready[SPANS], done[SPANS];
    uint64_t start_ns[SPANS], end_ns[SPANS]; /* start: 0 until all are ready; end: of the last one */
};

/* One operation: where the rows of every token go. */
struct bound_plan {
    int ranks, tokens, passes, processes, past_cache;
    size_t row, stride; /* bytes of a row; of a row with its padding */
    int32_t *count;     /* [ranks * tokens]: places */
    uint64_t *places;   /* [ranks * tokens * EPX_MAX_TOPK]: offsets */
    double bytes;       /* written in one pass */
    size_t total;       /* of the mapping */
    char *memory;
    struct spans *spans;
};

static int destination(const struct bench_config *c, int32_t expert)
{
    return expert / ((c->experts + c->ranks - 1) / c->ranks);
}

/* Expert-major layouts have a row for each (token, expert), the others one for each (token, rank). */
static int is_place(const struct bench_config *c, const int32_t *idx, int k)
{
    int j;

    if (idx[k] < 0)
        return 0;
    for (j = 0; c->layout != EPX_EXPERT_MAJOR && j < k; j++)
        if (idx[j] >= 0 && destination(c, idx[j]) == destination(c, idx[k]))
            return 0;
    return 1;
}

/* Rows of a destination lie one behind the other; `at` is where those of each destination begin, and then their end. */
static void place_rows(struct bound_plan *p, const struct bench_config *c, uint64_t *at)
{
    const struct workload w = bench_work_workload(c, c->seed);
    int32_t idx[EPX_MAX_TOPK];
    int r, t, k;

    for (r = 0; r < p->ranks; r++) {
        for (t = 0; t < p->tokens; t++) {
            const size_t i = (size_t)r * (size_t)p->tokens + (size_t)t;

            workload_topk(&w, r, t, idx);
            p->count[i] = 0;
            for (k = 0; k < c->topk; k++) {
                uint64_t *end = &at[is_place(c, idx, k) ? destination(c, idx[k]) : 0];

                if (!is_place(c, idx, k))
                    continue;
                p->places[i * EPX_MAX_TOPK + (size_t)p->count[i]++] = *end;
                *end += p->stride;
            }
        }
    }
}

/* Once to learn how much every destination gets, once to place it. */
static void plan_rows(struct bound_plan *p, const struct bench_config *c, uint64_t *at)
{
    const size_t page = 4096;
    size_t end = (size_t)p->ranks * (size_t)p->tokens * p->stride;
    uint64_t rows = 0;
    int r;

    memset(at, 0, (size_t)p->ranks * sizeof(*at));
    place_rows(p, c, at);
    for (r = 0; r < p->ranks; r++) {
        const size_t bytes = (size_t)at[r];

        rows += bytes / p->stride;
        at[r] = end = (end + page - 1) / page * page;
        end += bytes;
    }
    place_rows(p, c, at);
    p->total = end;
    p->bytes = (double)rows * (double)p->row;
    p->past_cache = math_past_cache((uint64_t)p->bytes); /* as EPX does */
    p->passes = p->bytes > 0 ? 1 + (int)(SPAN_BYTES / p->bytes) : 0;
}

static int agents_of(const struct bench_config *c)
{
    const char *set = getenv("EPX_NUM_AGENTS");
    cpu_set_t cpus;
    int agents = c->agents > 0 ? c->agents : set ? atoi(set) : 0;

    if (agents <= 0 && sched_getaffinity(0, sizeof(cpus), &cpus) == 0)
        agents = CPU_COUNT(&cpus) / (c->nodes > 1 ? bench_ranks_per_node(c) : c->ranks);
    return agents > 1 ? agents : 1;
}

/* ---- A process -------------------------------------------------------------------------------------------------- */

static void prefetch(const char *row)
{
    for (int i = 0; i < ROW_START; i += 64)
        __builtin_prefetch(row + i);
}

/* Its share of all tokens: neighbours in one rank, as agents have them. */
static void write_rows(const struct bound_plan *p, int process)
{
    const size_t tokens = (size_t)p->ranks * (size_t)p->tokens;
    const size_t first = tokens * (size_t)process / (size_t)p->processes;
    const size_t end = tokens * (size_t)(process + 1) / (size_t)p->processes;

    for (size_t i = first; i < end; i++) {
        const char *from = p->memory + i * p->stride;
        void *to[EPX_MAX_TOPK];

        for (int n = 0; n < p->count[i]; n++)
            to[n] = p->memory + p->places[i * EPX_MAX_TOPK + (size_t)n];
        if (i + 1 < end)
            prefetch(from + p->stride);
        (p->past_cache ? math_copy_many_past : math_copy_many)(to, p->count[i], from, p->row);
    }
}

static void keep_latest(uint64_t *word, uint64_t now)
{
    uint64_t seen = __atomic_load_n(word, __ATOMIC_RELAXED);

    while (seen < now && !__atomic_compare_exchange_n(word, &seen, now, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        continue;
}

static void bound_process(const struct bound_plan *p, int process)
{
    struct spans *s = p->spans;
    const uint64_t give_up = clock_ns() + 20 * (uint64_t)START_NS;

    write_rows(p, process);
    for (int i = 0; i < SPANS; i++) {
        __atomic_fetch_add(&s->ready[i], 1, __ATOMIC_RELEASE); /* pairs with the acquire in wait_for */
        /* pairs with the release in run_spans */
        while (__atomic_load_n(&s->start_ns[i], __ATOMIC_ACQUIRE) == 0) {
            if (clock_ns() > give_up)
                _exit(1);
            usleep(200);
        }
        for (int n = 0; n < p->passes; n++)
            write_rows(p, process);
        keep_latest(&s->end_ns[i], clock_ns());
        __atomic_fetch_add(&s->done[i], 1, __ATOMIC_RELEASE); /* pairs with the acquire in wait_for */
    }
    _exit(0);
}

/* ---- The driver ------------------------------------------------------------------------------------------------- */

static int wait_for(const uint32_t *word, int n)
{
    const uint64_t give_up = clock_ns() + 15 * (uint64_t)START_NS;

    while (__atomic_load_n(word, __ATOMIC_ACQUIRE) < (uint32_t)n) {
        if (clock_ns() > give_up)
            return -1;
        usleep(200);
    }
    return 0;
}

static int run_spans(const struct bound_plan *p, double *GBps)
{
    struct spans *s = p->spans;

    for (int i = 0; i < SPANS; i++) {
        if (wait_for(&s->ready[i], p->processes) != 0)
            return -1;
        __atomic_store_n(&s->start_ns[i], clock_ns(), __ATOMIC_RELEASE);
        if (wait_for(&s->done[i], p->processes) != 0)
            return -1;
        GBps[i] = p->bytes * p->passes / (double)(s->end_ns[i] - s->start_ns[i]);
    }
    return 0;
}

static int run_processes(struct bound_plan *p, double *GBps)
{
    pid_t pids[MOST_PROCESSES];
    int n, good;

    memset(p->spans, 0, sizeof(*p->spans));
    for (n = 0; n < p->processes; n++) {
        pids[n] = fork();
        if (pids[n] < 0)
            break;
        if (pids[n] == 0)
            bound_process(p, n);
    }
    good = n == p->processes && run_spans(p, GBps) == 0;
    for (int i = 0; i < n; i++) {
        if (!good)
            kill(pids[i], SIGKILL);
        good &= bench_wait_child(pids[i], CHILD_MS) == 0;
    }
    return good ? 0 : -1;
}

static void *map_shared(size_t bytes)
{
    void *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    return map == MAP_FAILED ? NULL : map;
}

static int make_plan(struct bound_plan *p, const struct bench_report *r)
{
    const struct bench_config *c = &r->options->config;
    const double per_token = bench_row_bytes(c, BENCH_DISPATCH) * c->ranks * (1 + c->topk);
    const int room = (int)(MOST_BYTES / per_token), agents = agents_of(c);
    uint64_t *at = calloc((size_t)c->ranks, sizeof(*at));
    size_t n;

    p->ranks = c->ranks;
    p->tokens = c->tokens < room ? c->tokens : room > 0 ? room : 1;
    p->processes = c->ranks < MOST_PROCESSES / agents ? c->ranks * agents : MOST_PROCESSES;
    p->row = (size_t)bench_row_bytes(c, BENCH_DISPATCH);
    p->stride = (p->row + 15) / 16 * 16;
    n = (size_t)p->ranks * (size_t)p->tokens;
    p->count = calloc(n, sizeof(*p->count));
    p->places = calloc(n * EPX_MAX_TOPK, sizeof(*p->places));
    if (at && p->count && p->places)
        plan_rows(p, c, at);
    free(at);
    p->memory = p->passes > 0 ? map_shared(p->total) : NULL;
    p->spans = map_shared(sizeof(*p->spans));
    if (p->memory)
        (void)madvise(p->memory, p->total, MADV_HUGEPAGE); /* as heaps: src/device/cpu/heap.c */
    return p->memory && p->spans ? 0 : -1;
}

void bench_bound_measure(struct bench_ceiling *c, const struct bench_report *r)
{
    struct bound_plan plan = {0};
    double GBps[SPANS];

    if (make_plan(&plan, r) == 0 && run_processes(&plan, GBps) == 0) {
        for (int i = 0; i < SPANS; i++)
            c->bound_GBps = GBps[i] > c->bound_GBps ? GBps[i] : c->bound_GBps;
        if (r->options->config.corrupt == CORRUPT_BOUND)
            c->bound_GBps /= 1000;
        c->bound_processes = plan.processes;
    }
    if (plan.memory)
        munmap(plan.memory, plan.total);
    if (plan.spans)
        munmap(plan.spans, sizeof(*plan.spans));
    free(plan.count);
    free(plan.places);
}
