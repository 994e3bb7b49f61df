/* SPDX-License-Identifier: Apache-2.0 */
/* The oracle's checks: regenerate what must be there, compare, name the first difference. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "oracle.h"

/* ---- Counts ------------------------------------------------------------------------------------------------------ */

static int check_ints(const char *what, const epx_tensor *t, const int64_t *expected, int64_t n, struct mismatch *m)
{
    for (int64_t i = 0; t && i < n; i++)
        if (tensor_int(t, i) != expected[i])
            return mismatch_set(m, "%s[%lld]: expected %lld (0x%llx), got %lld (0x%llx)", what, (long long)i,
                                (long long)expected[i], (unsigned long long)expected[i], (long long)tensor_int(t, i),
                                (unsigned long long)tensor_int(t, i));
    return 0;
}

/* Low latency has no nodes: every row comes back by itself. */
static int node_of(const struct oracle_route *route, int rank)
{
    return route->mode == EPX_HIGH_THROUGHPUT ? oracle_node_of(route, rank) : 0;
}

/* Tokens that rank i sends to rank r, and that rank i has. */
static int check_ranks(const struct oracle_recv *recv, const epx_layout_info *info, struct mismatch *m)
{
    const struct oracle_route *route = recv->route;
    const int R = route->nranks, node = node_of(route, recv->rank);

    for (int i = 0; i < R; i++) {
        const int64_t tokens = route->active[i] ? route->tokens[i] : 0;
        if (info->rank_tokens && tensor_int(info->rank_tokens, i) != tokens)
            return mismatch_set(m, "rank_tokens[%d]: expected %lld, got %lld", i, (long long)tokens,
                                (long long)tensor_int(info->rank_tokens, i));
        for (int r = 0; info->rank_matrix && r < R; r++) {
            int64_t n = 0;
            for (int t = 0; route->active[r] && t < tokens; t++)
                n += oracle_names_rank(route, oracle_idx(route, i, t), r);
            if (node_of(route, r) != node)
                n = -1; /* what goes to another node is told there alone */
            if (tensor_int(info->rank_matrix, (int64_t)i * R + r) != n)
                return mismatch_set(m, "rank_matrix[%d][%d]: expected %lld, got %lld", i, r, (long long)n,
                                    (long long)tensor_int(info->rank_matrix, (int64_t)i * R + r));
        }
    }
    return 0;
}

int oracle_check_layout(const struct oracle_recv *recv, const epx_layout_info *info, struct mismatch *m)
{
    int experts = recv->route->local_experts, ranks = recv->route->nranks;

    if (check_ints("expert_counts", info->expert_counts, recv->expert_counts, experts, m) ||
        check_ints("expert_rows", info->expert_rows, recv->expert_rows, experts, m) ||
        check_ints("expert_offsets", info->expert_offsets, recv->expert_offsets, experts, m) ||
        check_ints("rank_counts", info->rank_counts, recv->rank_counts, ranks, m) ||
        check_ints("total", info->total, &recv->total, 1, m) ||
        check_ints("layout_range", info->layout_range, recv->layout_range, (int64_t)experts * ranks, m) ||
        check_ranks(recv, info, m))
        return -1;
    return 0;
}

/* ---- Dispatch ---------------------------------------------------------------------------------------------------- */

/* What the check of one dispatch carries from row to row. */
struct dispatch_check {
    const struct oracle_recv *recv;
    const struct oracle_data *data;
    const epx_dispatch_outputs *outputs;
    int round_scale;
    int global_ids;
    int untouched;
    struct mismatch *m;
    char *input;       /* one row as the source has it */
    uint8_t *cast;     /* the same in fp8 */
    char *scales;      /* its scales */
    float *weights;    /* [topk] */
    uint8_t *received; /* [rows of the tensor]: 1 = a row was received there, 2 = padding */
};

static int needs_cast(const struct dispatch_check *c)
{
    return c->data->dtype != EPX_FP8_E4M3 && c->outputs->tokens && c->outputs->tokens->dtype == EPX_FP8_E4M3;
}

static int64_t scale_columns(const struct dispatch_check *c)
{
    const epx_tensor *scales = c->outputs->scales;

    return scales ? scales->shape[scales->ndim - 1] : 0;
}

static int check_scales(const struct dispatch_check *c, int64_t row, const char *expected)
{
    const epx_tensor *t = c->outputs->scales;
    int64_t step = tensor_last_stride(t);
    const char *got = tensor_row(t, row);

    for (int64_t i = 0; i < scale_columns(c); i++)
        if (memcmp(expected + 4 * i, got + 4 * i * step, 4)) {
            compare_bits("scales", row, t->dtype, expected + 4 * i, got + 4 * i * step, 1, c->m);
            return -1;
        }
    return 0;
}

/* Tokens and scales of one received row. */
static int check_payload(struct dispatch_check *c, const struct oracle_place *p)
{
    const struct oracle_data *data = c->data;
    const epx_dispatch_outputs *out = c->outputs;
    const void *expected = c->input;

    data->token(data->context, p->src_rank, p->src_token, c->input);
    if (needs_cast(c)) {
        oracle_cast_fp8(c->cast, c->scales, out->scales->dtype == EPX_INT32, c->round_scale, c->input, data->dtype,
                        data->hidden);
        expected = c->cast;
    } else if (out->scales) {
        data->scales(data->context, p->src_rank, p->src_token, c->scales);
    }
    if (out->tokens && compare_bits("tokens", p->row, out->tokens->dtype, expected, tensor_row(out->tokens, p->row),
                                    data->hidden, c->m))
        return -1;
    return out->scales ? check_scales(c, p->row, c->scales) : 0;
}

/* Local expert id and weight of each entry, in the source's k-order, or the local ones first and ascending. */
static void expected_topk(const struct dispatch_check *c, const struct oracle_place *p, int32_t *ids, float *weights)
{
    const struct oracle_route *route = c->recv->route;
    const int32_t *idx = oracle_idx(route, p->src_rank, p->src_token);
    const int first = c->global_ids ? c->recv->rank * route->local_experts : 0;
    int n = 0;

    c->data->weights(c->data->context, p->src_rank, p->src_token, c->weights);
    for (int k = 0; k < route->topk; k++) {
        ids[k] = -1;
        weights[k] = route->flags & EPX_HANDLE_ALL_WEIGHTS ? c->weights[k] : 0;
    }
    if (!(route->flags & EPX_HANDLE_COMPACT_TOPK)) {
        for (int k = 0; k < route->topk; k++)
            if (idx[k] >= 0 && idx[k] / route->local_experts == c->recv->rank) {
                ids[k] = first + idx[k] % route->local_experts;
                weights[k] = c->weights[k];
            }
        return;
    }
    for (int l = 0; l < route->local_experts; l++)
        for (int k = 0; k < route->topk; k++)
            if (idx[k] == c->recv->rank * route->local_experts + l) {
                ids[n] = first + l;
                weights[n++] = c->weights[k];
            }
}

static int check_topk(const struct dispatch_check *c, const struct oracle_place *p)
{
    const epx_dispatch_outputs *out = c->outputs;
    int topk = c->recv->route->topk;
    int32_t ids[EPX_MAX_TOPK];
    float weights[EPX_MAX_TOPK];

    if (!out->topk_idx && !out->topk_weights)
        return 0;
    expected_topk(c, p, ids, weights);
    for (int k = 0; out->topk_idx && k < topk; k++)
        if (tensor_int(out->topk_idx, p->row * topk + k) != ids[k])
            return mismatch_set(c->m, "topk_idx: row %lld entry %d: expected %d, got %lld", (long long)p->row, k,
                                ids[k], (long long)tensor_int(out->topk_idx, p->row * topk + k));
    if (!out->topk_weights)
        return 0;
    if (c->recv->route->layout == EPX_EXPERT_MAJOR) {
        c->data->weights(c->data->context, p->src_rank, p->src_token, c->weights);
        return compare_bits("topk_weights", p->row, EPX_FP32, &c->weights[p->k],
                            (float *)out->topk_weights->data + p->row, 1, c->m);
    }
    return compare_bits("topk_weights", p->row, EPX_FP32, weights, tensor_row(out->topk_weights, p->row), topk, c->m);
}

static int check_source(const struct dispatch_check *c, const struct oracle_place *p)
{
    const epx_tensor *rank = c->outputs->src_rank, *token = c->outputs->src_token;

    if (rank && tensor_int(rank, p->row) != p->src_rank)
        return mismatch_set(c->m, "src_rank: row %lld: expected %d, got %lld", (long long)p->row, p->src_rank,
                            (long long)tensor_int(rank, p->row));
    if (token && tensor_int(token, p->row) != p->src_token)
        return mismatch_set(c->m, "src_token: row %lld: expected %d, got %lld", (long long)p->row, p->src_token,
                            (long long)tensor_int(token, p->row));
    return 0;
}

/* All bytes of one row of any tensor, `per_row` = 0 where a row is one element. */
static int check_row_fill(const char *what, const epx_tensor *t, int64_t row, int per_row, int fill, struct mismatch *m)
{
    size_t size;

    if (!t)
        return 0;
    size = tensor_element_size(t->dtype);
    if (!per_row)
        return compare_fill(what, row, (char *)t->data + (size_t)row * size, size, fill, m);
    if (tensor_last_stride(t) == 1)
        return compare_fill(what, row, tensor_row(t, row), (size_t)t->shape[t->ndim - 1] * size, fill, m);
    for (int64_t i = 0; i < t->shape[t->ndim - 1]; i++) {
        const char *p = (const char *)tensor_row(t, row) + (size_t)(i * tensor_last_stride(t)) * size;
        if (compare_fill(what, row, p, size, fill, m))
            return -1;
    }
    return 0;
}

/* Padding of HT EXPERT_MAJOR: tokens, scales and weights are zero; it has no source. */
static int check_padding(const struct dispatch_check *c, int64_t row)
{
    const epx_dispatch_outputs *out = c->outputs;

    if (check_row_fill("tokens (padding)", out->tokens, row, 1, 0, c->m) ||
        check_row_fill("scales (padding)", out->scales, row, 1, 0, c->m) ||
        check_row_fill("topk_weights (padding)", out->topk_weights, row, 0, 0, c->m))
        return -1;
    return 0;
}

/* A row beyond what was received: left alone, but for topk_idx, and the weights of high throughput. */
static int check_beyond(const struct dispatch_check *c, int64_t row)
{
    const epx_dispatch_outputs *out = c->outputs;
    const int high = c->recv->route->mode == EPX_HIGH_THROUGHPUT;
    const int expert_major = c->recv->route->layout == EPX_EXPERT_MAJOR;
    int fill = c->untouched;

    if (check_row_fill("topk_idx (tail)", out->topk_idx, row, 1, 0xff, c->m))
        return -1;
    if (high && check_row_fill("topk_weights (tail)", out->topk_weights, row, !expert_major, 0, c->m))
        return -1;
    if (fill < 0)
        return 0;
    if (check_row_fill("tokens (untouched)", out->tokens, row, 1, fill, c->m) ||
        check_row_fill("scales (untouched)", out->scales, row, 1, fill, c->m) ||
        check_row_fill("src_rank (untouched)", out->src_rank, row, 0, fill, c->m) ||
        check_row_fill("src_token (untouched)", out->src_token, row, 0, fill, c->m))
        return -1;
    return !high && check_row_fill("topk_weights (untouched)", out->topk_weights, row, !expert_major, fill, c->m) ? -1
                                                                                                                  : 0;
}

/* Every row has exactly one fate. */
static void mark_rows(struct dispatch_check *c)
{
    const struct oracle_recv *recv = c->recv;

    if (recv->route->mode == EPX_HIGH_THROUGHPUT && recv->route->layout == EPX_EXPERT_MAJOR)
        memset(c->received, 2, (size_t)recv->total);
    for (int64_t i = 0; i < recv->nplaces; i++)
        c->received[recv->places[i].row] = 1;
}

static int check_rows(struct dispatch_check *c, int64_t rows)
{
    for (int64_t i = 0; i < c->recv->nplaces; i++) {
        const struct oracle_place *p = &c->recv->places[i];
        if (check_payload(c, p) || check_topk(c, p) || check_source(c, p))
            return -1;
    }
    for (int64_t row = 0; row < rows; row++) {
        if (c->received[row] == 2 && check_padding(c, row))
            return -1;
        if (c->received[row] == 0 && check_beyond(c, row))
            return -1;
    }
    return 0;
}

/* Rows that the output tensors have. */
static int64_t output_rows(const epx_dispatch_outputs *out)
{
    int64_t rows = 0;

    if (out->tokens)
        return tensor_rows(out->tokens);
    if (out->topk_idx)
        return tensor_rows(out->topk_idx);
    for (int i = 0; out->src_token && i < out->src_token->ndim; i++)
        rows = (i ? rows : 1) * out->src_token->shape[i];
    return rows;
}

int oracle_check_dispatch(const struct oracle_recv *recv, const struct oracle_data *data,
                          const epx_dispatch_outputs *outputs, const epx_dispatch_config *config, int untouched,
                          struct mismatch *m)
{
    struct dispatch_check c = {
        .recv = recv,
        .data = data,
        .outputs = outputs,
        .round_scale = config ? config->round_scale : 0,
        .global_ids = config ? config->global_ids : 0,
        .untouched = untouched,
        .m = m,
    };
    int64_t rows = output_rows(outputs);
    int rc;

    if (rows < recv->rows)
        return mismatch_set(m, "output has %lld rows, %lld are needed", (long long)rows, (long long)recv->rows);
    c.input = malloc((size_t)data->hidden * 4 + 4);
    c.cast = malloc((size_t)data->hidden + 4);
    c.scales = malloc((size_t)(scale_columns(&c) + data->hidden / 128 + 2) * 4);
    c.weights = calloc(EPX_MAX_TOPK, sizeof(float));
    c.received = calloc((size_t)rows + 1, 1);
    if (!c.input || !c.cast || !c.scales || !c.weights || !c.received) {
        rc = mismatch_set(m, "no memory for the check of dispatch");
    } else {
        mark_rows(&c);
        rc = check_rows(&c, rows);
    }
    free(c.received);
    free(c.weights);
    free(c.scales);
    free(c.cast);
    free(c.input);
    return rc;
}

/* ---- Combine ----------------------------------------------------------------------------------------------------- */

static int global_expert(const struct oracle_recv *recv, const struct oracle_place *p)
{
    return p->expert < 0 ? -1 : recv->rank * recv->route->local_experts + p->expert;
}

/* The weights that row `p` sends back, in the order in which dispatch delivers them. */
static void fill_weights(const struct oracle_recv *recv, const struct oracle_data *data, const struct oracle_place *p,
                         epx_tensor *weights)
{
    const struct oracle_route *route = recv->route;
    const int32_t *idx = oracle_idx(route, p->src_rank, p->src_token);
    float *to;
    int n = 0;

    if (route->layout == EPX_EXPERT_MAJOR) {
        ((float *)weights->data)[p->row] = data->result_weight(data->context, p->src_rank, p->src_token, p->k);
        return;
    }
    to = tensor_row(weights, p->row);
    memset(to, 0, (size_t)route->topk * sizeof(float));
    for (int l = 0; l < route->local_experts; l++)
        for (int k = 0; k < route->topk; k++)
            if (idx[k] == recv->rank * route->local_experts + l)
                to[route->flags & EPX_HANDLE_COMPACT_TOPK ? n++ : k] =
                    data->result_weight(data->context, p->src_rank, p->src_token, k);
}

void oracle_fill_results(const struct oracle_recv *recv, const struct oracle_data *data, epx_tensor *tokens,
                         epx_tensor *weights)
{
    for (int64_t i = 0; i < recv->nplaces; i++) {
        const struct oracle_place *p = &recv->places[i];

        data->result(data->context, recv->rank, global_expert(recv, p), p->src_rank, p->src_token, p->k,
                     tensor_row(tokens, p->row));
        if (weights)
            fill_weights(recv, data, p, weights);
    }
}

/* Sums of one token. */
struct combine_check {
    const struct oracle_route *route;
    const struct oracle_data *data;
    const struct oracle_combine *how;
    int rank;
    char *row;            /* what one owner returned, or a bias */
    float *sum;           /* [hidden] in fp32 */
    float *bound;         /* [hidden] how far the sum may be off: only LogFMT */
    float *decoded, *off; /* LogFMT's; or sums that wait for what is added to them */
    char *expected;       /* [hidden] of result_dtype */
};

/* sum = fma(weight, row, sum): rounded once. With weight 1 that is the sum. */
static void add_row(struct combine_check *c, float weight, int is_result)
{
    int dtype = c->data->result_dtype;
    size_t size = tensor_element_size(dtype);

    for (int i = 0; i < c->data->hidden; i++) {
        float x = oracle_to_float(dtype, c->row + (size_t)i * size);
        c->sum[i] = fmaf(weight, x, c->sum[i]);
    }
    if (!c->how->logfmt || !is_result)
        return;
    oracle_logfmt(c->decoded, c->off, (const uint16_t *)(const void *)c->row, c->data->hidden);
    /* Sums that differ may be rounded in different directions: an ulp of what the sum is now, which later rows may
     * cancel. */
    for (int i = 0; i < c->data->hidden; i++) {
        c->bound[i] += fabsf(weight) * c->off[i];
        if (c->bound[i] > 0)
            c->bound[i] += fabsf(c->sum[i]) * 0x1p-23f;
    }
}

static void add_biases(struct combine_check *c, int token)
{
    for (int which = 0; which < c->how->biases; which++) {
        c->data->bias(c->data->context, which, c->rank, token, c->row);
        add_row(c, 1, 0);
    }
}

/* The first entry that names the same expert: in low latency they share a row. */
static int row_entry(const struct oracle_route *route, const int32_t *idx, int k)
{
    if (route->mode == EPX_LOW_LATENCY)
        for (int before = 0; before < k; before++)
            if (idx[before] == idx[k])
                return before;
    return k;
}

static int node_count(const struct oracle_route *route)
{
    int most = 0;

    for (int r = 0; r < route->nranks; r++)
        most = node_of(route, r) > most ? node_of(route, r) : most;
    return most + 1;
}

static void sum_by_expert(struct combine_check *c, int token, int node)
{
    const struct oracle_route *route = c->route;
    const int32_t *idx = oracle_idx(route, c->rank, token);
    float weights[EPX_MAX_TOPK];

    c->data->weights(c->data->context, c->rank, token, weights);
    for (int k = 0; k < route->topk; k++) {
        int owner = idx[k] < 0 ? -1 : idx[k] / route->local_experts;

        if (owner < 0 || !route->active[owner] || node_of(route, owner) != node)
            continue;
        c->data->result(c->data->context, owner, idx[k], c->rank, token, row_entry(route, idx, k), c->row);
        add_row(c, c->how->weighted ? weights[k] : 1, 1);
    }
}

/* Ranks ascending: each one's rows in k-order, rounded. */
static void sum_rounded_ranks(struct combine_check *c, int token, int node)
{
    const struct oracle_route *route = c->route;
    const int32_t *idx = oracle_idx(route, c->rank, token);
    const int dtype = c->data->result_dtype, L = route->local_experts;
    const size_t size = tensor_element_size(dtype);

    for (int owner = 0; owner < route->nranks; owner++) {
        if (!route->active[owner] || node_of(route, owner) != node || !oracle_names_rank(route, idx, owner))
            continue;
        for (int i = 0; i < c->data->hidden; i++) {
            c->off[i] = c->sum[i];
            c->sum[i] = 0;
        }
        for (int k = 0; k < route->topk; k++)
            if (idx[k] >= 0 && idx[k] / L == owner) {
                c->data->result(c->data->context, owner, idx[k], c->rank, token, k, c->row);
                add_row(c, 1, 1);
            }
        for (int i = 0; i < c->data->hidden; i++) {
            oracle_from_float(dtype, c->sum[i], c->expected + (size_t)i * size);
            c->sum[i] = c->off[i] + oracle_to_float(dtype, c->expected + (size_t)i * size);
        }
    }
}

/* Low latency: in the order in which the token's top-k names the ranks. */
static void sum_in_turn(struct combine_check *c, int token)
{
    const struct oracle_route *route = c->route;
    const int32_t *idx = oracle_idx(route, c->rank, token);

    for (int k = 0; k < route->topk; k++) {
        const int owner = idx[k] < 0 ? -1 : idx[k] / route->local_experts;
        int again = owner < 0 || !route->active[owner];

        for (int j = 0; j < k && !again; j++)
            again = idx[j] >= 0 && idx[j] / route->local_experts == owner;
        if (again)
            continue;
        c->data->result(c->data->context, owner, -1, c->rank, token, -1, c->row);
        add_row(c, 1, 1);
    }
}

static void sum_by_rank(struct combine_check *c, int token, int node)
{
    const struct oracle_route *route = c->route;

    for (int owner = 0; owner < route->nranks; owner++) {
        if (!route->active[owner] || node_of(route, owner) != node ||
            !oracle_names_rank(route, oracle_idx(route, c->rank, token), owner))
            continue;
        c->data->result(c->data->context, owner, -1, c->rank, token, -1, c->row);
        add_row(c, 1, 1);
    }
}

static void sum_node(struct combine_check *c, int token, int node)
{
    if (c->how->round_ranks)
        sum_rounded_ranks(c, token, node);
    else if (c->route->layout == EPX_EXPERT_MAJOR)
        sum_by_expert(c, token, node);
    else if (c->route->layout == EPX_RANK_MAJOR)
        sum_in_turn(c, token);
    else
        sum_by_rank(c, token, node);
}

/* Another node sends its sum, rounded to the dtype of the rows. */
static void add_other_node(struct combine_check *c, int token, int node)
{
    const int dtype = c->data->result_dtype;
    const size_t size = tensor_element_size(dtype);
    float *total = c->decoded;

    for (int i = 0; i < c->data->hidden; i++) {
        total[i] = c->sum[i];
        c->sum[i] = 0;
    }
    sum_node(c, token, node);
    for (int i = 0; i < c->data->hidden; i++) {
        oracle_from_float(dtype, c->sum[i], c->expected + (size_t)i * size);
        c->sum[i] = total[i] + oracle_to_float(dtype, c->expected + (size_t)i * size);
    }
}

/* LogFMT: the sum's own rounding comes on top of what the rows are off. */
static int check_loose(struct combine_check *c, int token, const void *got, struct mismatch *m)
{
    for (int i = 0; i < c->data->hidden; i++) {
        if (c->bound[i] > 0)
            c->bound[i] += fabsf(c->sum[i]) * 0x1p-7f + 0x1p-130f;
        else
            c->sum[i] = oracle_to_float(EPX_BF16, c->expected + 2 * i);
    }
    return compare_within("combined tokens (LogFMT)", token, c->data->result_dtype, c->sum, c->bound, got,
                          c->data->hidden, m);
}

static int check_token(struct combine_check *c, int token, const epx_tensor *out, struct mismatch *m)
{
    size_t size = tensor_element_size(c->data->result_dtype);

    for (int i = 0; i < c->data->hidden; i++)
        c->sum[i] = c->bound[i] = 0;
    add_biases(c, token);
    for (int node = 0, nodes = node_count(c->route); node < nodes; node++) {
        if (node == node_of(c->route, c->rank))
            sum_node(c, token, node);
        else
            add_other_node(c, token, node);
    }
    for (int i = 0; i < c->data->hidden; i++)
        oracle_from_float(c->data->result_dtype, c->sum[i], c->expected + (size_t)i * size);
    if (c->how->logfmt)
        return check_loose(c, token, tensor_row(out, token), m);
    return compare_bits("combined tokens", token, c->data->result_dtype, c->expected, tensor_row(out, token),
                        c->data->hidden, m);
}

/* Each weight back in its (token, k) place, 0 where the entry was dropped. */
static int check_returned_weights(struct combine_check *c, int token, const epx_tensor *out, struct mismatch *m)
{
    const int32_t *idx = oracle_idx(c->route, c->rank, token);
    float expected[EPX_MAX_TOPK];

    for (int k = 0; k < c->route->topk; k++)
        expected[k] = idx[k] < 0 || !c->route->active[idx[k] / c->route->local_experts]
                          ? 0
                          : c->data->result_weight(c->data->context, c->rank, token, k);
    return compare_bits("combined topk_weights", token, EPX_FP32, expected, tensor_row(out, token), c->route->topk, m);
}

int oracle_check_combine(const struct oracle_route *route, const struct oracle_data *data, int rank,
                         const struct oracle_combine *how, const epx_combine_outputs *outputs, struct mismatch *m)
{
    struct combine_check c = {.route = route, .data = data, .how = how, .rank = rank};
    size_t floats = ((size_t)data->hidden + 1) * sizeof(float);
    int rc = 0;

    c.row = malloc(floats);
    c.sum = malloc(floats);
    c.bound = malloc(floats);
    c.decoded = malloc(floats);
    c.off = malloc(floats);
    c.expected = malloc(floats);
    if (!c.row || !c.sum || !c.bound || !c.decoded || !c.off || !c.expected)
        rc = mismatch_set(m, "no memory for the check of combine");
    for (int t = 0; !rc && t < route->tokens[rank]; t++) {
        if (outputs->tokens)
            rc = check_token(&c, t, outputs->tokens, m);
        if (!rc && outputs->topk_weights)
            rc = check_returned_weights(&c, t, outputs->topk_weights, m);
    }
    free(c.expected);
    free(c.off);
    free(c.decoded);
    free(c.bound);
    free(c.sum);
    free(c.row);
    return rc;
}
