/* SPDX-License-Identifier: Apache-2.0 */
/* Routing and layout: which rows a rank receives, where they lie, how they are counted. */
#include "oracle.h"

#include <stdlib.h>
#include <string.h>

int oracle_route_init(struct oracle_route *route, int nranks, int experts, int topk, int max_tokens, int mode,
                      int layout, uint32_t flags, int alignment)
{
    memset(route, 0, sizeof(*route));
    route->nranks = nranks;
    route->experts = experts;
    route->local_experts = (experts + nranks - 1) / nranks;
    route->topk = topk;
    route->max_tokens = max_tokens;
    route->mode = mode;
    route->layout = layout;
    route->flags = flags;
    route->alignment = alignment > 1 ? alignment : 1;
    route->tokens = calloc((size_t)nranks, sizeof(*route->tokens));
    route->idx = calloc((size_t)nranks * (size_t)max_tokens * (size_t)topk + 1, sizeof(*route->idx));
    route->active = calloc((size_t)nranks, sizeof(*route->active));
    if (!route->tokens || !route->idx || !route->active) {
        oracle_route_free(route);
        return -1;
    }
    for (int r = 0; r < nranks; r++)
        route->active[r] = 1;
    return 0;
}

int oracle_route_from_workload(struct oracle_route *route, const struct workload *w, int max_tokens, int mode,
                               int layout, uint32_t flags, int alignment)
{
    if (max_tokens < w->max_tokens)
        max_tokens = w->max_tokens;
    if (oracle_route_init(route, w->nranks, w->experts, w->topk, max_tokens, mode, layout, flags, alignment))
        return -1;
    for (int r = 0; r < w->nranks; r++) {
        route->tokens[r] = workload_tokens(w, r);
        for (int t = 0; t < route->tokens[r]; t++)
            workload_topk(w, r, t, oracle_idx(route, r, t));
    }
    return 0;
}

void oracle_route_free(struct oracle_route *route)
{
    free(route->tokens);
    free(route->idx);
    free(route->active);
    free(route->first);
    free(route->named);
    memset(route, 0, sizeof(*route));
}

int32_t *oracle_idx(const struct oracle_route *route, int rank, int token)
{
    return route->idx + ((size_t)rank * (size_t)route->max_tokens + (size_t)token) * (size_t)route->topk;
}

/* ---- One rank's rows --------------------------------------------------------------------------------------------- */

static int is_low_latency_expert_major(const struct oracle_route *route)
{
    return route->mode == EPX_LOW_LATENCY && route->layout == EPX_EXPERT_MAJOR;
}

/* Does entry k of the token make a row of its own at that expert? Low latency has room for one row per token. */
static int makes_row(const struct oracle_route *route, const int32_t *idx, int k, int expert)
{
    if (idx[k] != expert)
        return 0;
    if (is_low_latency_expert_major(route))
        for (int before = 0; before < k; before++)
            if (idx[before] == expert)
                return 0;
    return 1;
}

int oracle_names_rank(const struct oracle_route *route, const int32_t *idx, int rank)
{
    for (int k = 0; k < route->topk; k++)
        if (idx[k] >= 0 && idx[k] / route->local_experts == rank)
            return 1;
    return 0;
}

static int push(struct oracle_recv *recv, int64_t *room, struct oracle_place place)
{
    if (recv->nplaces == *room) {
        int64_t more = *room ? 2 * *room : 256;
        struct oracle_place *places = realloc(recv->places, (size_t)more * sizeof(*places));
        if (!places)
            return -1;
        recv->places = places;
        *room = more;
    }
    recv->places[recv->nplaces++] = place;
    return 0;
}

/* Is entry k the first of the token that names its rank? */
static int is_first(const struct oracle_route *route, const int32_t *idx, int k)
{
    for (int j = 0; j < k; j++)
        if (idx[j] >= 0 && idx[j] / route->local_experts == idx[k] / route->local_experts)
            return 0;
    return idx[k] >= 0;
}

/* Counts the tokens of all ranks into at[rank], or (named) writes them down, at[rank] being the next place. */
static void index_pass(const struct oracle_route *route, int64_t *at, uint32_t *named)
{
    for (int r = 0; r < route->nranks; r++) {
        for (int t = 0; t < route->tokens[r]; t++) {
            const int32_t *idx = oracle_idx(route, r, t);

            for (int k = 0; k < route->topk; k++) {
                if (!is_first(route, idx, k))
                    continue;
                if (named)
                    named[at[idx[k] / route->local_experts]] = (uint32_t)r * (uint32_t)route->max_tokens + (uint32_t)t;
                at[idx[k] / route->local_experts]++;
            }
        }
    }
}

int oracle_route_index(struct oracle_route *route)
{
    int64_t *at = calloc((size_t)route->nranks + 1, sizeof(*at));

    route->first = calloc((size_t)route->nranks + 1, sizeof(*route->first));
    if (!at || !route->first)
        goto no_memory;
    index_pass(route, at, NULL);
    for (int r = 0; r < route->nranks; r++)
        route->first[r + 1] = route->first[r] + at[r];
    route->named = malloc(((size_t)route->first[route->nranks] + 1) * sizeof(*route->named));
    if (!route->named)
        goto no_memory;
    memcpy(at, route->first, (size_t)route->nranks * sizeof(*at));
    index_pass(route, at, route->named);
    free(at);
    return 0;

no_memory:
    free(at);
    free(route->first);
    route->first = NULL;
    return -1;
}

/* Tokens that may have rows at `rank`: how many, and number i of them. */
static int64_t candidates(const struct oracle_route *route, int rank)
{
    return route->first ? route->first[rank + 1] - route->first[rank] : (int64_t)route->nranks * route->max_tokens;
}

/* Zero: there is no such token, or its rank is masked. */
static int candidate(const struct oracle_route *route, int rank, int64_t i, int *r, int *t)
{
    const int64_t at = route->first ? route->named[route->first[rank] + i] : i;

    *r = (int)(at / route->max_tokens);
    *t = (int)(at % route->max_tokens);
    return route->active[*r] && *t < route->tokens[*r];
}

/* The rows of one local expert, from `zone` on, by (source rank, source token, k); how many, or -1 without memory. */
static int64_t place_expert(struct oracle_recv *recv, int l, int64_t zone, int64_t *room)
{
    const struct oracle_route *route = recv->route;
    int64_t *range = recv->layout_range + (size_t)l * (size_t)route->nranks;
    int64_t in_zone = 0, begin = 0;
    int r, t;

    for (int64_t i = 0; i < candidates(route, recv->rank); i++) {
        if (!candidate(route, recv->rank, i, &r, &t))
            continue;
        for (int k = 0; k < route->topk; k++) {
            if (!makes_row(route, oracle_idx(route, r, t), k, recv->rank * route->local_experts + l))
                continue;
            if (push(recv, room, (struct oracle_place){zone + in_zone, r, t, l, k}))
                return -1;
            in_zone++;
            range[r]++;
        }
    }
    for (r = 0; r < route->nranks; r++) {
        const int64_t n = range[r];

        recv->rank_counts[r] += n;
        range[r] = begin << 32 | n;
        begin += n;
    }
    return in_zone;
}

/* One zone per local expert. */
static int place_by_expert(struct oracle_recv *recv)
{
    const struct oracle_route *route = recv->route;
    int low_latency = route->mode == EPX_LOW_LATENCY;
    int64_t room = 0, zone = 0;

    for (int l = 0; l < route->local_experts; l++) {
        int64_t in_zone;

        if (low_latency)
            zone = (int64_t)l * route->nranks * route->max_tokens;
        in_zone = place_expert(recv, l, zone, &room);
        if (in_zone < 0)
            return -1;
        recv->expert_rows[l] = in_zone;
        recv->expert_counts[l] = in_zone;
        if (!low_latency)
            recv->expert_counts[l] = (in_zone + route->alignment - 1) / route->alignment * route->alignment;
        recv->expert_offsets[l] = zone;
        recv->total += recv->expert_counts[l];
        zone += recv->expert_counts[l];
    }
    recv->rows = low_latency ? (int64_t)route->local_experts * route->nranks * route->max_tokens : recv->total;
    return 0;
}

/* One row per (token, this rank): FLAT one after the other, RANK_MAJOR with a zone per source rank. */
static int place_by_rank(struct oracle_recv *recv)
{
    const struct oracle_route *route = recv->route;
    int64_t room = 0;
    int r, t;

    for (int64_t i = 0; i < candidates(route, recv->rank); i++) {
        const int there = candidate(route, recv->rank, i, &r, &t);
        const int32_t *idx = oracle_idx(route, r, t);
        int64_t row = route->layout == EPX_FLAT ? recv->total : (int64_t)r * route->max_tokens + recv->rank_counts[r];

        if (!there || !oracle_names_rank(route, idx, recv->rank))
            continue;
        if (push(recv, &room, (struct oracle_place){row, r, t, -1, -1}))
            return -1;
        recv->rank_counts[r]++;
        recv->total++;
        for (int k = 0; k < route->topk; k++)
            if (idx[k] >= 0 && idx[k] / route->local_experts == recv->rank)
                recv->expert_counts[idx[k] % route->local_experts]++;
    }
    for (int l = 0; l < route->local_experts; l++)
        recv->expert_rows[l] = recv->expert_counts[l];
    recv->rows = route->layout == EPX_FLAT ? recv->total : (int64_t)route->nranks * route->max_tokens;
    return 0;
}

int oracle_recv_init(struct oracle_recv *recv, const struct oracle_route *route, int rank)
{
    size_t experts = (size_t)route->local_experts, ranks = (size_t)route->nranks;
    int rc;

    memset(recv, 0, sizeof(*recv));
    recv->route = route;
    recv->rank = rank;
    recv->expert_counts = calloc(experts, sizeof(int64_t));
    recv->expert_rows = calloc(experts, sizeof(int64_t));
    recv->expert_offsets = calloc(experts, sizeof(int64_t));
    recv->rank_counts = calloc(ranks, sizeof(int64_t));
    recv->layout_range = calloc(experts * ranks, sizeof(int64_t));
    if (!recv->expert_counts || !recv->expert_rows || !recv->expert_offsets || !recv->rank_counts ||
        !recv->layout_range)
        rc = -1;
    else
        rc = route->layout == EPX_EXPERT_MAJOR ? place_by_expert(recv) : place_by_rank(recv);
    if (rc)
        oracle_recv_free(recv);
    return rc;
}

void oracle_recv_free(struct oracle_recv *recv)
{
    free(recv->places);
    free(recv->expert_counts);
    free(recv->expert_rows);
    free(recv->expert_offsets);
    free(recv->rank_counts);
    free(recv->layout_range);
    memset(recv, 0, sizeof(*recv));
}

/* ---- The workload as a source of data ---------------------------------------------------------------------------- */

static void data_token(void *context, int rank, int token, void *row)
{
    workload_token(context, rank, token, row);
}

static void data_scales(void *context, int rank, int token, void *scales)
{
    workload_scales(context, rank, token, scales);
}

static void data_weights(void *context, int rank, int token, float *weights)
{
    workload_weights(context, rank, token, weights);
}

static float data_result_weight(void *context, int rank, int token, int k)
{
    return workload_result_weight(context, rank, token, k);
}

#define DATA_OF(name, DTYPE)                                                                                    \
    static void data_result_##name(void *context, int owner, int expert, int rank, int token, int k, void *row) \
    {                                                                                                           \
        workload_result(context, DTYPE, owner, expert, rank, token, k, row);                                    \
    }                                                                                                           \
    static void data_bias_##name(void *context, int which, int rank, int token, void *row)                      \
    {                                                                                                           \
        workload_bias(context, DTYPE, which, rank, token, row);                                                 \
    }

DATA_OF(bf16, EPX_BF16)
DATA_OF(fp16, EPX_FP16)
DATA_OF(fp32, EPX_FP32)

struct oracle_data oracle_data_workload(const struct workload *w, int result_dtype)
{
    struct oracle_data data = {
        .context = (void *)(uintptr_t)w,
        .token = data_token,
        .scales = data_scales,
        .weights = data_weights,
        .result = data_result_bf16,
        .result_weight = data_result_weight,
        .bias = data_bias_bf16,
        .hidden = w->hidden,
        .dtype = w->dtype,
        .result_dtype = result_dtype,
        .scale_dtype = w->scale_dtype,
        .scale_count = w->scale_count,
    };

    if (result_dtype == EPX_FP16) {
        data.result = data_result_fp16;
        data.bias = data_bias_fp16;
    } else if (result_dtype == EPX_FP32) {
        data.result = data_result_fp32;
        data.bias = data_bias_fp32;
    }
    return data;
}
