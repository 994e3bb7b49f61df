/* SPDX-License-Identifier: Apache-2.0 */
/* One point: the routing of all ranks, the simulation with costs, and what it says per rank. */
#include <malloc.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "predict.h"
#include "sim/ranks.h"
#include "util/clock.h"

enum {
    SIM_AGENTS = 8192,    /* of all ranks together, about */
    MERGE_BYTES = 1 << 20 /* EPX_PROXY_MERGE_BYTES */
};

int predict_nodes(const struct predict_point *p)
{
    const int per_node = (int)(p->machine.ranks_per_gpu * p->machine.gpus_per_node);

    return (p->ranks + per_node - 1) / per_node;
}

static int up16(int n)
{
    return (n + 15) / 16 * 16;
}

/* Payload of a row on the wire, and its scales. */
static uint64_t payload(int hidden, int fp8)
{
    return (uint64_t)up16(fp8 ? hidden : 2 * hidden);
}

static uint64_t scales(int hidden, int fp8)
{
    return fp8 ? (uint64_t)up16((hidden + 127) / 128 * 4) : 0;
}

/* Channels of the simulation's rows. High throughput wants multiples of 16 bytes in fp8 too, and copies weights as it
 * copies rows: the two must not have the same bytes. */
static int small_hidden(const struct predict_point *p)
{
    if (p->mode == EPX_LOW_LATENCY)
        return 8;
    return 4 * p->topk == 16 || 4 * p->topk == 32 ? 48 : 16;
}

static int pick_agents(const struct predict_point *p)
{
    const int real = (int)(p->machine.sms * p->machine.warps_per_sm);
    int n = p->agents ? p->agents : SIM_AGENTS / p->ranks;

    n = n < PREDICT_FEW_AGENTS ? PREDICT_FEW_AGENTS : n;
    n = n > real ? real : n;
    return n > 1024 ? 1024 : n;
}

/* Rows of the simulation are small: so are the writes that proxies make of them. */
static void set_environment(const struct predict_point *p, const struct cost_setup *cost)
{
    char text[32];

    snprintf(text, sizeof(text), "%llu", (unsigned long long)p->machine.proxies);
    setenv("EPX_PROXY_THREADS", text, 1);
    snprintf(text, sizeof(text), "%llu", (unsigned long long)(MERGE_BYTES * cost->combine.small / cost->combine.large));
    setenv("EPX_PROXY_MERGE_BYTES", text, 1);
    setenv("EPX_LOG", "error", 0);
}

static int compare_doubles(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static void take_times(const struct predict_world *world, struct predict_result *result)
{
    const int n = world->point->ranks;
    double *us = malloc((size_t)n * sizeof(*us));

    for (int op = 0; us && op <= PREDICT_OPS; op++) {
        for (int r = 0; r < n; r++)
            us[r] = op < PREDICT_OPS ? world->times[r].us[op] : world->times[r].update_us;
        qsort(us, (size_t)n, sizeof(*us), compare_doubles);
        if (op == PREDICT_OPS) {
            result->update_us = us[n / 2];
        } else {
            result->op[op].us_median = us[n / 2];
            result->op[op].us_slowest = us[n - 1];
        }
    }
    free(us);
}

static void take_traffic(const struct predict_world *world, struct predict_result *result)
{
    const double all = (double)world->point->ranks * world->iters;

    for (int op = 0; op < PREDICT_OPS; op++) {
        struct predict_op_result *to = &result->op[op];
        for (int r = 0; r < world->point->ranks; r++) {
            const struct cost_traffic *t = &world->traffic[r][op];
            to->bytes += (double)t->bytes / all;
            to->header_bytes += (double)t->header_bytes / all;
            to->messages += (double)t->messages / all;
            to->signals += (double)t->signals / all;
            to->link_bytes += (double)t->link_bytes / all;
            to->commands += (double)t->commands / all;
            to->looks += (double)t->looks / all;
        }
    }
}

/* (token, node) pairs of a rank on average: what published bandwidths between nodes count. */
static double count_node_rows(const struct oracle_route *route, int per_node)
{
    const int experts = route->local_experts * per_node;
    int64_t n = 0;

    for (int r = 0; r < route->nranks; r++)
        for (int t = 0; t < route->tokens[r]; t++) {
            const int32_t *idx = oracle_idx(route, r, t);
            for (int k = 0; k < route->topk; k++) {
                int j = 0;
                while (j < k && (idx[j] < 0 || idx[j] / experts != idx[k] / experts))
                    j++;
                n += idx[k] >= 0 && j == k;
            }
        }
    return (double)n / route->nranks;
}

/* Most rows that one rank sends to one other. */
static int count_remote_rows(const struct oracle_route *route)
{
    int *rows = malloc((size_t)route->nranks * sizeof(*rows));
    int most = rows ? 1 : 0;

    for (int r = 0; rows && r < route->nranks; r++) {
        memset(rows, 0, (size_t)route->nranks * sizeof(*rows));
        for (int t = 0; t < route->tokens[r]; t++) {
            const int32_t *idx = oracle_idx(route, r, t);
            for (int k = 0; k < route->topk; k++) {
                int j = 0;
                while (j < k && (idx[j] < 0 || idx[j] / route->local_experts != idx[k] / route->local_experts))
                    j++;
                if (idx[k] >= 0 && j == k && ++rows[idx[k] / route->local_experts] > most)
                    most = rows[idx[k] / route->local_experts];
            }
        }
    }
    free(rows);
    return most;
}

static int make_route(const struct predict_point *p, struct predict_world *world, struct oracle_route *route)
{
    const struct workload w = predict_workload(world);
    const int ll = p->mode == EPX_LOW_LATENCY;

    if (oracle_route_from_workload(route, &w, 0, p->mode, ll ? EPX_EXPERT_MAJOR : EPX_FLAT, 0, 1) != 0 ||
        oracle_route_index(route) != 0)
        return -1;
    if (predict_nodes(p) > 1)
        route->ranks_per_node = (int)(p->machine.ranks_per_gpu * p->machine.gpus_per_node);
    for (int r = 0; r < p->ranks; r++)
        if (route->first[r + 1] - route->first[r] > world->most_rows)
            world->most_rows = route->first[r + 1] - route->first[r];
    world->remote_rows = count_remote_rows(route);
    return 0;
}

static void simulate(const struct predict_point *p, struct predict_world *world, struct predict_result *result)
{
    const int small = world->small_hidden, fp8 = p->dtype == PREDICT_FP8;
    const struct cost_setup cost = {.machine = &p->machine,
                                    .nranks = p->ranks,
                                    .agents = world->agents,
                                    .hidden_small = (uint64_t)small,
                                    .hidden_large = (uint64_t)p->hidden,
                                    .dispatch = {payload(small, fp8), payload(p->hidden, fp8)},
                                    .combine = {payload(small, 0), payload(p->hidden, 0)},
                                    .scales = {scales(small, fp8), scales(p->hidden, fp8)},
                                    .extras = scales(small, fp8) + (uint64_t)up16(4 * p->topk)};
    const struct sim_net_options net = {.seed = p->seed,
                                        .nranks = p->ranks,
                                        .latency_ns = 2 * p->machine.wire_ns,
                                        .depth = 1 << 20,
                                        .ordered = (int)p->machine.ordered};
    const struct sim_setup setup = {.sched = {.seed = p->seed, .nranks = p->ranks, .max_steps = UINT64_MAX},
                                    .net = predict_nodes(p) > 1 ? &net : NULL,
                                    .gather_ns = (uint64_t)1 << 50,
                                    .cost = &cost,
                                    .remote_rows = &world->remote_rows};
    struct sim_outcome outcome;
    int rc;

    set_environment(p, &cost);
    rc = sim_run_ranks(&setup, predict_rank, world, &outcome);
    result->steps = outcome.totals.steps;
    result->hash = outcome.totals.hash ^ outcome.net.hash;
    if (world->error[0])
        snprintf(result->error, sizeof(result->error), "%s", world->error);
    else if (rc != 0 || outcome.stuck[0])
        snprintf(result->error, sizeof(result->error), "%.590s", outcome.stuck);
    else if (outcome.failures)
        snprintf(result->error, sizeof(result->error), "%d ranks failed", outcome.failures);
}

/*
 * Ranks exchange tables that each of them frees at once; a thousand ranks have gigabytes of these. glibc would soon
 * take them from its heap, between blocks that stay, and never return them to the system.
 */
static void return_large_blocks(void)
{
    (void)mallopt(M_MMAP_THRESHOLD, 64 << 10);
    (void)mallopt(M_MMAP_MAX, 1 << 20);
}

int predict_run(const struct predict_point *p, struct predict_result *result)
{
    struct predict_world world = {.point = p, .small_hidden = small_hidden(p), .agents = pick_agents(p)};
    struct oracle_route route = {0};
    const uint64_t start = clock_ns();
    struct rusage usage;

    memset(result, 0, sizeof(*result));
    return_large_blocks();
    world.iters = p->iters;
    world.route = &route;
    world.times = calloc((size_t)p->ranks, sizeof(*world.times));
    world.traffic = calloc((size_t)p->ranks, sizeof(*world.traffic));
    if (!world.times || !world.traffic || make_route(p, &world, &route) != 0)
        snprintf(result->error, sizeof(result->error), "no memory for the routing of %d ranks", p->ranks);
    else
        simulate(p, &world, result);
    if (!result->error[0]) {
        take_times(&world, result);
        take_traffic(&world, result);
        result->memory_bytes = world.memory_bytes;
        result->rows = (double)route.first[p->ranks] / p->ranks;
        result->node_rows = count_node_rows(&route, (int)(p->machine.ranks_per_gpu * p->machine.gpus_per_node));
    }
    oracle_route_free(&route);
    free(world.times);
    free(world.traffic);
    getrusage(RUSAGE_SELF, &usage);
    result->seconds = (double)(clock_ns() - start) / 1e9;
    result->peak_bytes = (double)usage.ru_maxrss * 1024;
    return result->error[0] ? -1 : 0;
}
