/* SPDX-License-Identifier: Apache-2.0 */
/*
 * High throughput as DeepEP V2 wants it: zones of any alignment, source maps, ends of zones and sources, and sums in
 * the order of top-k. Every rank computes what it must get with plain loops; results are compared bit by bit.
 *
 * ctest: labels=ranks
 */
#include <stdio.h>
#include <string.h>

#include "epx/epx.h"
#include "tests/lib/fixture.h"
#include "tests/lib/prop.h"
#include "tests/lib/tensor_memory.h"
#include "tests/lib/unit_net.h"
#include "util/numeric.h"

enum { RANKS = 4, LOCAL = 3, EXPERTS = RANKS * LOCAL, TOPK = 5, HIDDEN = 88, MOST = 11, ALIGN = 3, STRIDE = 100 };

/* Each rank has its own for its source map. */
static int stride_of(int rank)
{
    return STRIDE + 7 * rank;
}

enum { ROWS = RANKS * MOST * LOCAL + LOCAL * ALIGN, LINES = RANKS * MOST, UNTOUCHED = 0x5a5a5a };

/* Of the thread that is a rank: it has few tokens for now, as all ranks do. */
static _Thread_local int few;

static int tokens_of(int rank)
{
    return rank == 2 ? 0 : few ? 2 : MOST - rank;
}

static uint32_t mix(uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    uint32_t h = a * 0x9e3779b1u ^ b * 0x85ebca6bu ^ c * 0xc2b2ae35u ^ (d + 1) * 0x27d4eb2fu;

    h ^= h >> 15;
    h *= 0x2c1b3c6du;
    return h ^ h >> 12;
}

/* Different experts; two of a rank come in ascending or in descending order. Some entries have none. */
static int expert_of(int s, int t, int k)
{
    const uint32_t drawn = mix((uint32_t)s, (uint32_t)t, 0, 0);
    const int first = (int)(drawn % EXPERTS), step = drawn >> 20 & 1 ? 5 : 7;

    return mix((uint32_t)s, (uint32_t)t, (uint32_t)k, 1) % 8 == 0 ? -1 : (first + step * k) % EXPERTS;
}

/* What the expert of (s, t, k) returns. Half of the values are +2^26 or -2^26, which cancel each other exactly, and the
 * others lose bits if they are added in between: so sums show the order of their additions. */
static uint16_t value_of(int s, int t, int k, int c)
{
    const uint32_t h = mix((uint32_t)(s * MOST + t), (uint32_t)k, (uint32_t)c, 2);

    if (h >> 24 & 1)
        return float_to_bf16(h >> 25 & 1 ? 0x1p26f : -0x1p26f);
    return float_to_bf16(((float)(h & 0xffff) - 32768.0f) * (1.0f + (float)(h >> 16 & 0xff)) / 65536.0f);
}

static uint16_t bias_of(int s, int t, int c)
{
    return value_of(s, t, 40, c);
}

/* ---- One rank --------------------------------------------------------------------------------------------------- */

struct state {
    int rank, nodes;
    epx_group *group;
    epx_handle *handle;
    int64_t *idx;
    float *weights, *recv_weights, *back_weights;
    uint16_t *x, *rows, *out, *bias;
    int32_t *map, *ends, *real, *sources, *stats;
    int expand, drop; /* 0, or rank r takes drop + r rows, and what is beyond is dropped */
    unsigned sum;
    int record; /* combine by a graph, the last of which is `graph` */
    epx_graph *graph;
};

static int wrong(const struct state *s, const char *what, int64_t expected, int64_t got)
{
    fprintf(stderr, "rank %d, %d nodes, expand %d, sum %u: %s: expected %lld, got %lld: %s\n", s->rank, s->nodes,
            s->expand, s->sum, what, (long long)expected, (long long)got, epx_last_error());
    return -1;
}

static void *memory(struct state *s, size_t bytes)
{
    return tensor_memory(s->group, bytes);
}

static epx_group_config config_of(int nodes)
{
    epx_group_config config = fixture_config_of(30000, EXPERTS, MOST, HIDDEN * 2, TOPK);

    config.device = test_device();
    config.modes = EPX_HIGH_THROUGHPUT;
    config.layouts = EPX_LAYOUT_BIT(EPX_FLAT) | EPX_LAYOUT_BIT(EPX_EXPERT_MAJOR);
    config.num_agents = 3;
    config.ranks_per_node = RANKS / nodes;
    if (nodes > 1)
        strcpy(config.net, "ofi:tcp");
    return config;
}

static void open_rank(struct state *s)
{
    s->idx = memory(s, MOST * TOPK * sizeof(int64_t));
    s->weights = memory(s, MOST * TOPK * sizeof(float));
    s->back_weights = memory(s, MOST * TOPK * sizeof(float));
    s->recv_weights = memory(s, (size_t)ROWS * TOPK * sizeof(float));
    s->x = memory(s, MOST * HIDDEN * 2);
    s->out = memory(s, MOST * HIDDEN * 2);
    s->bias = memory(s, MOST * HIDDEN * 2);
    s->rows = memory(s, (size_t)ROWS * HIDDEN * 2);
    s->map = memory(s, (size_t)LINES * (TOPK + 2) * 4);
    s->ends = memory(s, LOCAL * 4);
    s->real = memory(s, LOCAL * 4);
    s->stats = memory(s, LOCAL * 4);
    s->sources = memory(s, RANKS * 4);
    for (int t = 0; t < tokens_of(s->rank); t++) {
        for (int k = 0; k < TOPK; k++) {
            s->idx[t * TOPK + k] = expert_of(s->rank, t, k);
            s->weights[t * TOPK + k] = (float)(s->rank * 10000 + t * 100 + k + 1);
        }
        for (int c = 0; c < HIDDEN; c++) {
            s->x[t * HIDDEN + c] = value_of(s->rank, t, 50, c);
            s->bias[t * HIDDEN + c] = bias_of(s->rank, t, c);
        }
    }
}

static void close_rank(struct state *s)
{
    void *all[] = {s->idx,  s->weights, s->back_weights, s->recv_weights, s->x,     s->out,    s->bias,
                   s->rows, s->map,     s->ends,         s->real,         s->stats, s->sources};

    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
        tensor_memory_free(s->group, all[i]);
}

/* Row of (source, token, k) at its rank, by counting; -1 for dropped. */
static int row_of(int source, int token, int k, int *zone_end)
{
    const int e = expert_of(source, token, k);
    int row = 0, before = 0;

    for (int l = e - e % LOCAL; l <= e; l++) {
        int n = 0;
        for (int s = 0; s < RANKS; s++)
            for (int t = 0; t < tokens_of(s); t++)
                for (int j = 0; j < TOPK; j++) {
                    before += l == e && expert_of(s, t, j) == e && (s < source || (s == source && t < token));
                    n += expert_of(s, t, j) == l;
                }
        if (l == e && zone_end)
            *zone_end = row + n;
        row += l == e ? before : (n + ALIGN - 1) / ALIGN * ALIGN;
    }
    return row;
}

static int goes(int s, int t, int rank)
{
    for (int k = 0; k < TOPK; k++)
        if (expert_of(s, t, k) >= 0 && expert_of(s, t, k) / LOCAL == rank)
            return 1;
    return 0;
}

static int check_map(const struct state *s, int64_t lines)
{
    int64_t line = 0;

    for (int src = 0; src < RANKS; src++)
        for (int t = 0; t < tokens_of(src); t++) {
            if (!goes(src, t, s->rank))
                continue;
            const int32_t *at = s->map + line * (TOPK + 2);
            if (at[0] != src * stride_of(s->rank) + t || at[1] != src)
                return wrong(s, "source", src * stride_of(s->rank) + t, at[0]);
            for (int k = 0; k < TOPK && !s->expand; k++)
                if (at[2 + k] != UNTOUCHED)
                    return wrong(s, "FLAT: a column of the caller's", UNTOUCHED, at[2 + k]);
            for (int k = 0; k < TOPK && s->expand; k++) {
                const int e = expert_of(src, t, k), here = e >= 0 && e / LOCAL == s->rank;
                const int expected = here ? row_of(src, t, k, NULL) : -1;
                if (at[2 + k] != expected)
                    return wrong(s, "row of an entry", expected, at[2 + k]);
                if (here && s->rows[expected * HIDDEN + 7] != value_of(src, t, 50, 7))
                    return wrong(s, "payload", value_of(src, t, 50, 7), s->rows[expected * HIDDEN + 7]);
            }
            line++;
        }
    return line == lines ? 0 : wrong(s, "lines", line, lines);
}

static int check_counts(const struct state *s, int64_t lines)
{
    int ends = 0, sources = 0;

    for (int l = 0; l < LOCAL; l++) {
        int n = 0;
        for (int src = 0; src < RANKS; src++)
            for (int t = 0; t < tokens_of(src); t++)
                for (int k = 0; k < TOPK; k++)
                    n += expert_of(src, t, k) == s->rank * LOCAL + l;
        const int padded = (n + ALIGN - 1) / ALIGN * ALIGN;
        if (s->real[l] != n || s->stats[l] != n + 1)
            return wrong(s, "rows of an expert", n, s->real[l]);
        if (s->ends[l] != ends + (s->expand ? n : padded))
            return wrong(s, "end of a zone", ends + n, s->ends[l]);
        ends += padded;
    }
    for (int i = 0; i < RANKS / 2; i++) {
        for (int src = i; src < RANKS; src += RANKS / 2)
            for (int t = 0; t < tokens_of(src); t++)
                sources += goes(src, t, s->rank);
        if (s->sources[i] != sources)
            return wrong(s, "end of sources", sources, s->sources[i]);
    }
    return sources == lines ? 0 : wrong(s, "tokens", sources, lines);
}

static int dispatch(struct state *s)
{
    const int B = tokens_of(s->rank);
    epx_tensor idx = epx_tensor_make(s->idx, EPX_INT64, 2, B, TOPK, 0, 0);
    epx_tensor real = epx_tensor_make(s->real, EPX_INT32, 1, LOCAL, 0, 0, 0);
    epx_tensor ends = epx_tensor_make(s->ends, EPX_INT32, 1, LOCAL, 0, 0, 0);
    epx_tensor stats = epx_tensor_make(s->stats, EPX_INT32, 1, LOCAL, 0, 0, 0);
    epx_tensor sources = epx_tensor_make(s->sources, EPX_INT32, 1, RANKS / 2, 0, 0, 0);
    epx_tensor x = epx_tensor_make(s->x, EPX_BF16, 2, B, HIDDEN, 0, 0);
    epx_tensor weights = epx_tensor_make(s->weights, EPX_FP32, 2, B, TOPK, 0, 0);
    epx_tensor rows = epx_tensor_make(s->rows, EPX_BF16, 2, ROWS, HIDDEN, 0, 0);
    epx_tensor got = epx_tensor_make(s->recv_weights, EPX_FP32, s->expand ? 1 : 2, ROWS, TOPK, 0, 0);
    epx_tensor map = epx_tensor_make(s->map, EPX_INT32, 2, LINES, TOPK + 2, 0, 0);
    epx_layout_info info = EPX_LAYOUT_INFO_INIT;
    epx_dispatch_inputs in = EPX_DISPATCH_INPUTS_INIT;
    epx_dispatch_outputs out = EPX_DISPATCH_OUTPUTS_INIT;
    epx_dispatch_config config = EPX_DISPATCH_CONFIG_INIT;
    int64_t lines = -1;

    for (int l = 0; l < LOCAL; l++)
        s->stats[l] = 1;
    for (int i = 0; i < LINES * (TOPK + 2); i++)
        s->map[i] = UNTOUCHED;
    info.expert_rows = &real;
    info.expert_ends = &ends;
    info.expert_stats = &stats;
    info.source_ends = &sources;
    in.tokens = &x;
    in.topk_weights = &weights;
    out.tokens = &rows;
    out.topk_weights = &got;
    out.source_map = &map;
    config.source_stride = stride_of(s->rank);
    if (epx_handle_update(s->handle, &idx, &info, NULL) != EPX_OK ||
        epx_handle_recv_tokens(s->handle, &lines) != EPX_OK)
        return wrong(s, "update", 0, 1);
    if (epx_dispatch(s->handle, &in, &out, NULL, &config, NULL) != EPX_OK || epx_stream_sync(s->group, NULL) != EPX_OK)
        return wrong(s, "dispatch", 0, 1);
    return check_counts(s, lines) || check_map(s, lines) ? -1 : 0;
}

/* The rows of the experts, in place of what was received: with expansion one each, else their sum on this rank. */
static void experts(struct state *s)
{
    int64_t line = 0;

    for (int src = 0; src < RANKS; src++)
        for (int t = 0; t < tokens_of(src); t++) {
            if (!goes(src, t, s->rank))
                continue;
            int row[TOPK];
            for (int k = 0; k < TOPK; k++) {
                const int e = expert_of(src, t, k);
                row[k] = e >= 0 && e / LOCAL == s->rank ? row_of(src, t, k, NULL) : -1;
            }
            for (int c = 0; c < HIDDEN; c++) {
                float sum = 0.0f;
                for (int k = 0; k < TOPK; k++) {
                    if (row[k] < 0)
                        continue;
                    sum += bf16_to_float(value_of(src, t, k, c));
                    if (s->expand)
                        s->rows[row[k] * HIDDEN + c] = value_of(src, t, k, c);
                }
                if (!s->expand)
                    s->rows[line * HIDDEN + c] = float_to_bf16(sum);
            }
            line++;
        }
}

/* Sums the values of equal keys into the place of their last entry in the top-k, and rounds; the others become dropped.
 * That entry counts also if its row was dropped. A value that is folded already stays: its sum is itself. */
static void fold(float *value, int *key, const int *entry, int per)
{
    for (int k = 0; k < TOPK; k++) {
        const int first = key[k], group = first / per;
        int last = k;
        float sum = 0.0f;
        if (first < 0)
            continue;
        for (int j = k; j < TOPK; j++) {
            sum += key[j] >= 0 && key[j] / per == group ? value[j] : 0.0f;
            last = entry[j] >= 0 && entry[j] / per == group ? j : last;
        }
        for (int j = k; j < TOPK; j++)
            key[j] = key[j] >= 0 && key[j] / per == group ? -1 : key[j];
        key[last] = first;
        value[last] = bf16_to_float(float_to_bf16(sum));
    }
}

static int is_dropped(const struct state *s, int source, int t, int k)
{
    const int e = expert_of(source, t, k);

    return s->drop && e >= 0 && row_of(source, t, k, NULL) >= s->drop + e / LOCAL;
}

/* Of ranks' sums, ascending; another node's sum is rounded. */
static float add_ranks(const struct state *s, const float *value, const int *key, float sum)
{
    const int each = RANKS / s->nodes;

    for (int node = 0; node < s->nodes; node++) {
        const int own = s->rank / each == node;
        float other = 0.0f, *to = own ? &sum : &other;
        for (int r = node * each; r < (node + 1) * each; r++)
            for (int k = 0; k < TOPK; k++)
                *to += key[k] >= 0 && key[k] / LOCAL == r ? value[k] : 0.0f;
        sum += own ? 0.0f : bf16_to_float(float_to_bf16(other));
    }
    return sum;
}

/* The experts that return something for this token; -1 for none. */
static void answering(const struct state *s, int t, int *expert)
{
    for (int k = 0; k < TOPK; k++)
        expert[k] = is_dropped(s, s->rank, t, k) ? -1 : expert_of(s->rank, t, k);
}

static uint16_t expected_sum(const struct state *s, int t, int c, const int *expert)
{
    float value[TOPK], sum = bf16_to_float(bias_of(s->rank, t, c));
    int key[TOPK], entry[TOPK];

    for (int k = 0; k < TOPK; k++) {
        key[k] = expert[k];
        entry[k] = expert_of(s->rank, t, k);
        value[k] = bf16_to_float(value_of(s->rank, t, k, c));
    }
    if (!s->expand || s->sum & EPX_SUM_ROUND_RANKS)
        fold(value, key, entry, LOCAL);
    if (s->nodes > 1 && s->sum & EPX_SUM_ROUND_NODES)
        fold(value, key, entry, EXPERTS / s->nodes);
    if (s->sum == EPX_SUM_ROUND_RANKS)
        return float_to_bf16(add_ranks(s, value, key, sum));
    for (int k = 0; k < TOPK; k++)
        sum += key[k] >= 0 ? value[k] : 0.0f;
    return float_to_bf16(sum);
}

static int check_combined(const struct state *s)
{
    for (int t = 0; t < tokens_of(s->rank); t++) {
        int expert[TOPK];
        answering(s, t, expert);
        for (int k = 0; k < TOPK; k++) {
            const float expected = expert[k] < 0 ? 0.0f : s->weights[t * TOPK + k];
            if (s->back_weights[t * TOPK + k] != expected)
                return wrong(s, "weight", (int64_t)expected, (int64_t)s->back_weights[t * TOPK + k]);
        }
        for (int c = 0; c < HIDDEN; c++)
            if (s->out[t * HIDDEN + c] != expected_sum(s, t, c, expert))
                return wrong(s, "sum", expected_sum(s, t, c, expert), s->out[t * HIDDEN + c]);
    }
    return 0;
}

/* Where the last row that carries a token ends: padding behind it need not be given back. */
static int used_rows(const struct state *s)
{
    int used = 0;

    for (int l = 0; l < LOCAL; l++)
        used = s->real[l] ? s->ends[l] : used;
    return s->drop && used > s->drop + s->rank ? s->drop + s->rank : used;
}

static int combine(struct state *s)
{
    const int B = tokens_of(s->rank), given = s->expand ? used_rows(s) : ROWS;
    epx_tensor rows = epx_tensor_make(s->rows, EPX_BF16, 2, given, HIDDEN, 0, 0);
    epx_tensor weights = epx_tensor_make(s->recv_weights, EPX_FP32, s->expand ? 1 : 2, given, TOPK, 0, 0);
    epx_tensor bias = epx_tensor_make(s->bias, EPX_BF16, 2, B, HIDDEN, 0, 0);
    epx_tensor out = epx_tensor_make(s->out, EPX_BF16, 2, B, HIDDEN, 0, 0);
    epx_tensor back = epx_tensor_make(s->back_weights, EPX_FP32, 2, B, TOPK, 0, 0);
    epx_combine_inputs in = EPX_COMBINE_INPUTS_INIT;
    epx_combine_outputs outputs = EPX_COMBINE_OUTPUTS_INIT;
    epx_combine_config config = EPX_COMBINE_CONFIG_INIT;

    in.tokens = &rows;
    in.topk_weights = &weights;
    in.bias[0] = &bias;
    outputs.tokens = &out;
    outputs.topk_weights = &back;
    config.sum = s->sum;
    config.max_sms = 1; /* of those that the group may take */
    memset(s->out, 0x55, MOST * HIDDEN * 2);
    epx_status status = s->record ? epx_graph_begin(s->group, NULL) : EPX_OK;
    if (status == EPX_OK)
        status = epx_combine(s->handle, &in, &outputs, &config, NULL);
    if (status == EPX_OK && s->record)
        status = epx_graph_end(s->group, NULL, &s->graph);
    if (status == EPX_OK && s->record)
        status = epx_graph_launch(s->graph, NULL);
    if (status != EPX_OK || epx_stream_sync(s->group, NULL) != EPX_OK)
        return wrong(s, "combine", 0, 1);
    return check_combined(s);
}

static int all_sums(struct state *s)
{
    static const unsigned sums[] = {EPX_SUM_TOPK_ORDER, EPX_SUM_TOPK_ORDER | EPX_SUM_ROUND_RANKS,
                                    EPX_SUM_TOPK_ORDER | EPX_SUM_ROUND_RANKS | EPX_SUM_ROUND_NODES,
                                    EPX_SUM_ROUND_RANKS};

    for (size_t i = 0; i < sizeof(sums) / sizeof(sums[0]); i++) {
        s->sum = sums[i];
        if (combine(s))
            return -1;
    }
    return 0;
}

static int begin_layout(struct state *s, int expand)
{
    epx_handle_config config = fixture_handle_config(EPX_HIGH_THROUGHPUT, expand ? EPX_EXPERT_MAJOR : EPX_FLAT, TOPK);

    s->expand = expand;
    config.expert_alignment = ALIGN;
    config.flags = expand ? EPX_HANDLE_SOURCE_MAP : 0;
    if (epx_handle_create(&s->handle, s->group, &config) != EPX_OK || dispatch(s))
        return wrong(s, "dispatch", 0, 1);
    experts(s);
    return 0;
}

static int one_layout(struct state *s, int expand)
{
    return begin_layout(s, expand) || all_sums(s) || epx_handle_destroy(s->handle) != EPX_OK ? -1 : 0;
}

/* Sums that keep rows of other nodes, recorded with few tokens: a later graph that keeps more leaves the memory of the
 * first one as it is. */
static int graphs_keep_rows(struct state *s)
{
    uint16_t *few_rows = s->rows;
    float *few_weights = s->recv_weights;
    epx_handle *few_handle;
    epx_graph *few_graph;
    int failed;

    if (test_device() != EPX_DEVICE_CPU) /* emulated lanes have no graphs (tests/gpu_lanes/module.c) */
        return 0;
    few = s->record = 1;
    s->sum = EPX_SUM_TOPK_ORDER;
    if (begin_layout(s, 0) || combine(s))
        return -1;
    few_handle = s->handle;
    few_graph = s->graph;
    few = 0;
    s->rows = memory(s, (size_t)ROWS * HIDDEN * 2);
    s->recv_weights = memory(s, (size_t)ROWS * TOPK * sizeof(float));
    failed = begin_layout(s, 0) || combine(s) || epx_handle_destroy(s->handle) != EPX_OK;
    tensor_memory_free(s->group, s->rows);
    tensor_memory_free(s->group, s->recv_weights);
    s->rows = few_rows;
    s->recv_weights = few_weights;
    few = 1;
    memset(s->out, 0x55, MOST * HIDDEN * 2);
    if (failed || epx_graph_launch(few_graph, NULL) != EPX_OK || epx_stream_sync(s->group, NULL) != EPX_OK ||
        check_combined(s) || epx_handle_destroy(few_handle) != EPX_OK)
        return wrong(s, "the first graph, after the second", 0, 1);
    few = s->record = 0;
    return 0;
}

/* The source map still has a line for every token, with -1 for rows that were dropped. */
static int check_dropped_map(const struct state *s)
{
    int64_t line = 0;

    for (int src = 0; src < RANKS; src++)
        for (int t = 0; t < tokens_of(src); t++) {
            const int32_t *at = s->map + line * (TOPK + 2);
            if (!goes(src, t, s->rank))
                continue;
            for (int k = 0; k < TOPK; k++) {
                const int e = expert_of(src, t, k), here = e >= 0 && e / LOCAL == s->rank;
                const int row = here && !is_dropped(s, src, t, k) ? row_of(src, t, k, NULL) : -1;
                if (at[0] != src * stride_of(s->rank) + t || at[2 + k] != row)
                    return wrong(s, "line of a dropped row", row, at[2 + k]);
            }
            line++;
        }
    return 0;
}

/* Each rank takes another number of rows, and what is beyond is dropped: what a relay has returned before, in the same
 * place, is not added for it. `later`: the number comes with the update. */
static int dropped(struct state *s, int later, int most)
{
    const int B = tokens_of(s->rank), room = most + s->rank; /* no more than the rows that it takes */
    epx_tensor idx = epx_tensor_make(s->idx, EPX_INT64, 2, B, TOPK, 0, 0);
    epx_tensor x = epx_tensor_make(s->x, EPX_BF16, 2, B, HIDDEN, 0, 0);
    epx_tensor rows = epx_tensor_make(s->rows, EPX_BF16, 2, room, HIDDEN, 0, 0);
    epx_tensor weights = epx_tensor_make(s->weights, EPX_FP32, 2, B, TOPK, 0, 0);
    epx_tensor got = epx_tensor_make(s->recv_weights, EPX_FP32, 1, room, 0, 0, 0);
    epx_tensor map = epx_tensor_make(s->map, EPX_INT32, 2, LINES, TOPK + 2, 0, 0);
    epx_layout_info info = EPX_LAYOUT_INFO_INIT;
    epx_dispatch_inputs in = EPX_DISPATCH_INPUTS_INIT;
    epx_dispatch_outputs out = EPX_DISPATCH_OUTPUTS_INIT;
    epx_dispatch_config dispatch = EPX_DISPATCH_CONFIG_INIT;
    epx_handle_config config = fixture_handle_config(EPX_HIGH_THROUGHPUT, EPX_EXPERT_MAJOR, TOPK);
    int fits = -1;

    s->expand = 1;
    s->drop = most;
    config.expert_alignment = ALIGN;
    config.flags = EPX_HANDLE_SOURCE_MAP;
    config.drop_rows = later ? INT32_MAX : s->drop + s->rank;
    info.drop_rows = later ? (uint32_t)(s->drop + s->rank) : 0;
    in.tokens = &x;
    in.topk_weights = &weights;
    out.tokens = &rows;
    out.topk_weights = &got;
    out.source_map = &map;
    dispatch.source_stride = stride_of(s->rank);
    /* What is dropped needs no room. */
    info.expected_rows = (uint32_t)room;
    dispatch.if_expected = s->nodes == 1;
    if (epx_handle_create(&s->handle, s->group, &config) != EPX_OK ||
        epx_handle_update(s->handle, &idx, &info, NULL) != EPX_OK || epx_handle_recv_fits(s->handle, &fits) != EPX_OK ||
        fits != dispatch.if_expected)
        return wrong(s, "update with dropped rows: fits", dispatch.if_expected, fits);
    if (epx_dispatch(s->handle, &in, &out, NULL, &dispatch, NULL) != EPX_OK ||
        epx_stream_sync(s->group, NULL) != EPX_OK)
        return wrong(s, "dispatch with dropped rows", 0, 1);
    if (check_dropped_map(s))
        return -1;
    experts(s);
    return all_sums(s) || epx_handle_destroy(s->handle) != EPX_OK ? -1 : 0;
}

static int all_layouts(struct fixture *fixture)
{
    struct state s = {.rank = fixture->rank, .nodes = *(int *)fixture->arg, .group = fixture->group};
    int failed;

    open_rank(&s);
    failed = graphs_keep_rows(&s) || one_layout(&s, 0) || one_layout(&s, 1) || dropped(&s, 0, 4) || dropped(&s, 1, 3) ||
             dropped(&s, 1, 14);
    close_rank(&s);
    return failed;
}

/* Rank 0 returns one row too few of its own memory. It is told so: by the call where the update has finished, else by
 * the kernel, which reads nothing behind the tensor. */
static int too_few(struct fixture *f, struct state *s, int counted)
{
    const int B = tokens_of(s->rank), need = used_rows(s), given = need - (s->rank == 0);
    epx_tensor idx = epx_tensor_make(s->idx, EPX_INT64, 2, B, TOPK, 0, 0);
    epx_tensor out = epx_tensor_make(s->out, EPX_BF16, 2, B, HIDDEN, 0, 0);
    epx_tensor rows = epx_tensor_make(memory(s, (size_t)given * HIDDEN * 2), EPX_BF16, 2, given, HIDDEN, 0, 0);
    epx_combine_inputs in = EPX_COMBINE_INPUTS_INIT;
    epx_combine_outputs outputs = EPX_COMBINE_OUTPUTS_INIT;
    char words[2][24];
    int64_t n;
    epx_status status = EPX_OK;

    in.tokens = &rows;
    outputs.tokens = &out;
    snprintf(words[0], sizeof(words[0]), "%d", need);
    snprintf(words[1], sizeof(words[1]), "%d", given);
    /* Not counted: the others update behind the meeting, so that rank 0 cannot know. */
    if (!counted && s->rank != 0 && fixture_meet(f))
        return -1;
    if (epx_handle_update(s->handle, &idx, NULL, NULL) != EPX_OK ||
        (counted && epx_handle_recv_count(s->handle, &n, NULL) != EPX_OK))
        return wrong(s, "update", 0, 1);
    if (!counted || s->rank == 0)
        status = epx_combine(s->handle, &in, &outputs, NULL, NULL);
    if (!counted && s->rank == 0 && (status != EPX_OK || fixture_meet(f)))
        return wrong(s, "combine", EPX_OK, status);
    if (status == EPX_OK)
        status = epx_stream_sync(s->group, NULL);
    if (s->rank == 0 &&
        fixture_expect(f, "combine", status, EPX_ERR_OVERFLOW, (const char *const[]){words[0], words[1], NULL}))
        return -1;
    if (!counted && s->rank != 0 && status != EPX_ERR_PEER) /* its sums miss a row */
        return wrong(s, "combine", EPX_ERR_PEER, status);
    if (fixture_meet(f) || (!counted && epx_group_error_clear(s->group) != EPX_OK))
        return wrong(s, "recovery", 0, 1);
    tensor_memory_free(s->group, rows.data);
    return 0;
}

static int too_few_rows(struct fixture *f)
{
    struct state s = {.rank = f->rank, .nodes = *(int *)f->arg, .group = f->group};
    int failed;

    open_rank(&s);
    failed = begin_layout(&s, 1) || too_few(f, &s, 1) || too_few(f, &s, 0);
    close_rank(&s);
    return failed;
}

/* Once more with buffers for fewer rows than there are tokens, of six sizes, or of two at a small scale; some have room
 * for all that are left when rows are dropped. */
static void run_nodes(int nodes)
{
    epx_group_config config = config_of(nodes);
    const int step = prop_scale() < 0.5 ? 8 : 2;

    assert_int_equal(fixture_group_run(RANKS, &config, all_layouts, &nodes), 0);
    for (config.ht_node_bytes = 1024; config.ht_node_bytes <= 32768; config.ht_node_bytes *= step)
        assert_int_equal(fixture_group_run(RANKS, &config, all_layouts, &nodes), 0);
}

static void test_too_few_rows(void **unused)
{
    epx_group_config config = config_of(1);

    (void)unused;
    assert_int_equal(fixture_group_run(RANKS, &config, too_few_rows, &(int){1}), 0);
    config.ht_node_bytes = 1024;
    assert_int_equal(fixture_group_run(RANKS, &config, too_few_rows, &(int){1}), 0);
}

static void test_one_node(void **unused)
{
    (void)unused;
    run_nodes(1);
}

static void test_two_nodes(void **unused)
{
    (void)unused;
    unit_need_ofi("tcp");
    run_nodes(2);
}

UNIT_TESTS(test_one_node, test_two_nodes, test_too_few_rows)
