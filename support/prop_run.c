/* SPDX-License-Identifier: Apache-2.0 */
/* Property tests: running a case with ranks as threads, and checking everything it writes. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "prop.h"
#include "tensor_memory.h"
#include "thread_boot.h"

enum { FILL = 0xab, CANARY = 0x5c, CANARY_BYTES = 64, MAX_BUFFERS = 96, TIMEOUT_MS = 20000 };

/* What all ranks share: the case and the routing of every update, computed once. */
struct shared {
    const struct prop_case *c;
    struct oracle_route route[PROP_MAX_UPDATES + 1][PROP_MAX_HANDLES]; /* the last: after a recovery */
    struct workload w[PROP_MAX_UPDATES + 1][PROP_MAX_HANDLES];
    int max_recv[PROP_MAX_GROUPS]; /* most rows of any rank */
    char *error;
    size_t error_bytes;
    int lock;
};

/* A tensor with a canary behind it. */
struct buffer {
    epx_tensor t;
    char *base;
    size_t bytes;
    int from_epx;
    epx_group *group;
};

/* One handle on one rank. */
struct actor {
    struct shared *shared;
    const struct prop_handle *p;
    int rank, number, update, tokens_per_rank;
    epx_group *group;
    epx_handle *handle;
    epx_stream stream[2];
    int borrowed[2]; /* the stream is another actor's */
    epx_event *event;
    struct prop_rng rng; /* this rank's own choices */
    struct workload w;
    const struct oracle_route *route;
    struct oracle_route left; /* after a recovery: without those that are out */
    struct oracle_recv recv;
    struct buffer buffer[MAX_BUFFERS];
    int nbuffers;
    int backward;
    epx_tensor *idx;
    epx_layout_info info;
    epx_dispatch_inputs in;
    epx_dispatch_outputs out;
    epx_dispatch_config dispatch_config;
    epx_combine_inputs cin;
    epx_combine_outputs cout;
    epx_combine_config combine_config;
    epx_stats expected; /* what this handle has added to the group's */
    int failed;
};

static long long env_number(const char *name, long long otherwise)
{
    const char *text = getenv(name);

    return text && *text ? strtoll(text, NULL, 0) : otherwise;
}

static int failure(struct actor *a, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Keeps the first sentence of all ranks. */
static int failure(struct actor *a, const char *format, ...)
{
    char text[900];
    va_list args;

    a->failed = 1;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    if (getenv("EPX_TEST_VERBOSE"))
        fprintf(stderr, "rank %d handle %d update %d round %d: %s\n", a->rank, a->number, a->update, (int)a->w.round,
                text);
    if (__atomic_exchange_n(&a->shared->lock, 1, __ATOMIC_RELAXED) == 0)
        snprintf(a->shared->error, a->shared->error_bytes, "rank %d handle %d update %d round %d: %s", a->rank,
                 a->number, a->update, (int)a->w.round, text);
    return -1;
}

/* How an operation ends when another rank is gone or late, or the own network is down. */
static int excusable(const struct actor *a, epx_status status)
{
    const struct prop_case *c = a->shared->c;

    /* High throughput after low latency has masked a rank; or more ranks lost than others can relay for. */
    if (c->recover && (status == EPX_ERR_USAGE || status == EPX_ERR_UNSUPPORTED))
        return 1;
    return c->may_fail && (status == EPX_ERR_TIMEOUT || status == EPX_ERR_PEER || status == EPX_ERR_SYSTEM);
}

static int check_status(struct actor *a, const char *call, epx_status status)
{
    if (status == EPX_OK)
        return 0;
    if (excusable(a, status)) {
        a->failed = 1;
        return -1;
    }
    return failure(a, "%s: %s: %s", call, epx_strerror(status), epx_last_error());
}

#define TRY(a, call)                      \
    do {                                  \
        if (check_status(a, #call, call)) \
            return -1;                    \
    } while (0)

/* ---- Tensors with canaries ---------------------------------------------------------------------------------------- */

static int64_t elements_of(const epx_tensor *t)
{
    int64_t n = 1;

    for (int i = 0; i < t->ndim; i++)
        n *= t->shape[i];
    return n;
}

/* NULL on failure. d2 < 0: two dimensions, d1 < 0: one. */
static epx_tensor *new_tensor(struct actor *a, int dtype, int64_t d0, int64_t d1, int64_t d2)
{
    struct buffer *b = &a->buffer[a->nbuffers];
    int ndim = d1 < 0 ? 1 : d2 < 0 ? 2 : 3;
    void *memory = NULL;

    if (a->nbuffers == MAX_BUFFERS) {
        failure(a, "the test ran out of buffers");
        return NULL;
    }
    b->t = epx_tensor_make(NULL, (epx_dtype)dtype, ndim, d0, d1, d2, 0);
    b->bytes = (size_t)elements_of(&b->t) * tensor_element_size(dtype);
    b->from_epx = prop_chance(&a->rng, a->p->in_epx_alloc);
    b->group = a->group;
    if (b->from_epx) {
        if (check_status(a, "epx_alloc", epx_alloc(a->group, b->bytes + CANARY_BYTES, &memory)))
            return NULL;
    } else if ((memory = tensor_memory(a->group, b->bytes + CANARY_BYTES)) == NULL) {
        failure(a, "no memory for a tensor");
        return NULL;
    }
    b->base = b->t.data = memory;
    memset(b->base, FILL, b->bytes);
    memset(b->base + b->bytes, CANARY, CANARY_BYTES);
    a->nbuffers++;
    if (!b->bytes && prop_chance(&a->rng, 50))
        b->t.data = NULL; /* an empty tensor has no need of memory */
    return &b->t;
}

/* Scales that lie column by column. */
static void make_column_major(epx_tensor *t)
{
    int64_t rows = t->shape[t->ndim - 2];

    t->stride[t->ndim - 1] = rows > 0 ? rows : 1;
    t->stride[t->ndim - 2] = 1;
    if (t->ndim == 3)
        t->stride[0] = rows * t->shape[2] > 0 ? rows * t->shape[2] : 1;
}

static int check_canaries(struct actor *a)
{
    struct mismatch m;

    for (int i = 0; i < a->nbuffers; i++) {
        struct buffer *b = &a->buffer[i];
        if (b->base && compare_fill("canary behind a tensor", i, b->base + b->bytes, CANARY_BYTES, CANARY, &m))
            return failure(a, "%s (dtype %d, ndim %d, %lld x %lld)", m.text, b->t.dtype, b->t.ndim,
                           (long long)b->t.shape[0], (long long)b->t.shape[1]);
    }
    return 0;
}

static void free_tensors(struct actor *a)
{
    for (int i = 0; i < a->nbuffers; i++) {
        if (a->buffer[i].from_epx)
            epx_free(a->buffer[i].group, a->buffer[i].base);
        else
            tensor_memory_free(a->buffer[i].group, a->buffer[i].base);
    }
    a->nbuffers = 0;
}

/* ---- Inputs and outputs of one pair ---------------------------------------------------------------------------------- */

static int low_latency(const struct actor *a)
{
    return a->p->mode == EPX_LOW_LATENCY;
}

/* The tokens tensor of dispatch's output and combine's input, of any width. */
static epx_tensor *received_shape(struct actor *a, int dtype, int64_t rows, int64_t width)
{
    int64_t R = a->route->nranks, M = a->tokens_per_rank;

    if (!low_latency(a))
        return new_tensor(a, dtype, rows, width, -1);
    if (a->p->layout == EPX_RANK_MAJOR)
        return width < 0 ? new_tensor(a, dtype, R, M, -1) : new_tensor(a, dtype, R, M, width);
    return width < 0 ? new_tensor(a, dtype, a->route->local_experts, R * M, -1)
                     : new_tensor(a, dtype, a->route->local_experts, R * M, width);
}

static epx_tensor *new_index(struct actor *a, int64_t d0, int64_t d1, int64_t d2)
{
    return new_tensor(a, prop_chance(&a->rng, 50) ? EPX_INT32 : EPX_INT64, d0, d1, d2);
}

static int make_idx(struct actor *a)
{
    int B = a->route->tokens[a->rank], K = a->route->topk;

    a->idx = new_index(a, B, K, -1);
    if (!a->idx)
        return -1;
    for (int t = 0; t < B; t++)
        for (int k = 0; k < K; k++)
            tensor_set_int(a->idx, (int64_t)t * K + k, oracle_idx(a->route, a->rank, t)[k]);
    return 0;
}

/* Asks for some of the counts that this layout has. */
static int make_info(struct actor *a)
{
    int64_t L = a->route->local_experts, R = a->route->nranks;
    int expert_major = a->p->layout == EPX_EXPERT_MAJOR;

    a->info = (epx_layout_info)EPX_LAYOUT_INFO_INIT;
    if (prop_chance(&a->rng, 70) && (expert_major || !low_latency(a)))
        a->info.expert_counts = new_index(a, L, -1, -1);
    if (prop_chance(&a->rng, 70) && expert_major && !low_latency(a))
        a->info.expert_offsets = new_index(a, L, -1, -1);
    if (prop_chance(&a->rng, 70))
        a->info.rank_counts = new_index(a, R, -1, -1);
    if (prop_chance(&a->rng, 70))
        a->info.total = new_index(a, 1, -1, -1);
    if (!low_latency(a) && prop_chance(&a->rng, 50)) {
        a->info.rank_matrix = new_index(a, R, R, -1);
        a->info.rank_tokens = new_index(a, R, -1, -1);
        a->info.relay_counts = new_index(a, R, -1, -1);
    }
    if (low_latency(a) && expert_major && prop_chance(&a->rng, 70))
        a->info.layout_range = new_tensor(a, EPX_INT64, L, R, -1);
    if (low_latency(a) && expert_major && prop_chance(&a->rng, 50)) {
        a->info.expert_stats = new_tensor(a, EPX_INT32, L, -1, -1);
        for (int64_t l = 0; a->info.expert_stats && l < L; l++)
            tensor_set_int(a->info.expert_stats, l, 1000 + l);
    }
    if (low_latency(a) && prop_chance(&a->rng, 50)) {
        a->info.wait_ns = new_tensor(a, EPX_INT64, R, -1, -1);
        for (int64_t r = 0; a->info.wait_ns && r < R; r++)
            tensor_set_int(a->info.wait_ns, r, 7);
    }
    return a->failed ? -1 : 0;
}

static int make_dispatch_inputs(struct actor *a)
{
    const struct workload *w = &a->w;
    int B = a->route->tokens[a->rank];
    epx_tensor *tokens, *scales = NULL, *weights = NULL;

    a->in = (epx_dispatch_inputs)EPX_DISPATCH_INPUTS_INIT;
    a->in.tokens = tokens = new_tensor(a, w->dtype, B, w->hidden, -1);
    if (w->dtype == EPX_FP8_E4M3)
        a->in.scales = scales = new_tensor(a, w->scale_dtype, B, w->scale_count, -1);
    if (a->p->weights && !a->backward && !(low_latency(a) && a->p->layout == EPX_EXPERT_MAJOR))
        a->in.topk_weights = weights = new_tensor(a, EPX_FP32, B, w->topk, -1);
    if (a->failed)
        return -1;
    if (scales && prop_chance(&a->rng, 50))
        make_column_major(scales);
    for (int t = 0; t < B; t++) {
        workload_token(w, a->rank, t, tensor_row(tokens, t));
        if (weights)
            workload_weights(w, a->rank, t, tensor_row(weights, t));
        if (scales) {
            uint32_t row[512];
            workload_scales(w, a->rank, t, row);
            for (int i = 0; i < w->scale_count; i++)
                memcpy((char *)tensor_row(scales, t) + 4 * i * tensor_last_stride(scales), &row[i], 4);
        }
    }
    return 0;
}

/* EPX's own receive buffer as the output. */
static epx_tensor *recv_tensor(struct actor *a, epx_recv_part part, int dtype, int64_t rows, int64_t columns)
{
    struct buffer *b = &a->buffer[a->nbuffers++];

    memset(b, 0, sizeof(*b));
    if (check_status(a, "epx_handle_recv_tensor",
                     epx_handle_recv_tensor(a->handle, part, (epx_dtype)dtype, rows, columns, &b->t)))
        return NULL;
    for (int64_t i = 0; i < rows; i++)
        memset(tensor_row(&b->t, i), FILL, (size_t)columns * tensor_element_size(dtype));
    return &b->t;
}

static int make_dispatch_outputs(struct actor *a)
{
    const struct prop_handle *p = a->p;
    const struct workload *w = &a->w;
    int64_t spare = p->recv_tensor || prop_chance(&a->rng, 50) ? 0 : prop_draw(&a->rng, 9);
    int64_t rows = a->recv.rows + spare;
    int64_t nscales = p->out_scale_dtype == EPX_FP32 ? (w->hidden + 127) / 128 : (w->hidden + 511) / 512;
    int fp8 = p->out_dtype == EPX_FP8_E4M3;

    a->out = (epx_dispatch_outputs)EPX_DISPATCH_OUTPUTS_INIT;
    a->out.tokens = p->recv_tensor ? recv_tensor(a, EPX_RECV_TOKENS, p->out_dtype, rows, w->hidden)
                                   : received_shape(a, p->out_dtype, rows, w->hidden);
    if (fp8 && p->recv_tensor) {
        a->out.scales = recv_tensor(a, EPX_RECV_SCALES, p->out_scale_dtype, rows, nscales);
    } else if (fp8) {
        a->out.scales = received_shape(a, p->out_scale_dtype, rows, nscales);
        if (a->out.scales && prop_chance(&a->rng, 50))
            make_column_major(a->out.scales);
    }
    if (a->in.topk_weights)
        a->out.topk_weights = received_shape(a, EPX_FP32, rows, p->layout == EPX_EXPERT_MAJOR ? -1 : w->topk);
    if (p->idx_out && !a->backward)
        a->out.topk_idx = received_shape(a, prop_chance(&a->rng, 50) ? EPX_INT32 : EPX_INT64, rows, w->topk);
    if (p->src_out)
        a->out.src_rank = received_shape(a, EPX_INT32, rows, -1);
    if (p->src_out)
        a->out.src_token = received_shape(a, EPX_INT32, rows, -1);
    return a->failed ? -1 : 0;
}

static int make_combine_tensors(struct actor *a)
{
    const struct prop_handle *p = a->p;
    int B = a->route->tokens[a->rank];
    int64_t rows = a->recv.rows + (prop_chance(&a->rng, 50) ? 0 : prop_draw(&a->rng, 9));
    int returned = !low_latency(a) && (p->weights || a->backward);

    a->cin = (epx_combine_inputs)EPX_COMBINE_INPUTS_INIT;
    a->cout = (epx_combine_outputs)EPX_COMBINE_OUTPUTS_INIT;
    /* Experts may answer in place, in the tensor that dispatch filled. */
    a->cin.tokens = p->result_dtype == p->out_dtype && prop_chance(&a->rng, 40)
                        ? a->out.tokens
                        : received_shape(a, p->result_dtype, rows, a->w.hidden);
    if (a->cin.tokens && !low_latency(a))
        rows = a->cin.tokens->shape[0];
    if (low_latency(a) && p->layout == EPX_EXPERT_MAJOR) {
        epx_tensor *weights = new_tensor(a, EPX_FP32, B, a->w.topk, -1);
        for (int t = 0; weights && t < B; t++)
            workload_weights(&a->w, a->rank, t, tensor_row(weights, t));
        a->cin.topk_weights = weights;
    } else if (returned) {
        a->cin.topk_weights = received_shape(a, EPX_FP32, rows, p->layout == EPX_EXPERT_MAJOR ? -1 : a->w.topk);
        a->cout.topk_weights = new_tensor(a, EPX_FP32, B, a->w.topk, -1);
    }
    for (int i = 0; i < p->biases; i++) {
        epx_tensor *bias = new_tensor(a, p->result_dtype, B, a->w.hidden, -1);
        for (int t = 0; bias && t < B; t++)
            workload_bias(&a->w, p->result_dtype, i, a->rank, t, tensor_row(bias, t));
        a->cin.bias[i] = bias;
    }
    a->cout.tokens = new_tensor(a, p->result_dtype, B, a->w.hidden, -1);
    return a->failed ? -1 : 0;
}

/* ---- The steps of a pair ----------------------------------------------------------------------------------------------- */

static int issue_dispatch(struct actor *a)
{
    const struct prop_handle *p = a->p;

    if (make_dispatch_inputs(a) || make_dispatch_outputs(a) || (low_latency(a) && make_info(a)))
        return -1;
    a->dispatch_config = (epx_dispatch_config)EPX_DISPATCH_CONFIG_INIT;
    a->dispatch_config.send_only = p->staged_dispatch;
    a->dispatch_config.round_scale = p->round_scale;
    a->dispatch_config.direction = a->backward ? EPX_BACKWARD : EPX_FORWARD;
    TRY(a,
        epx_dispatch(a->handle, &a->in, &a->out, low_latency(a) ? &a->info : NULL, &a->dispatch_config, a->stream[0]));
    return 0;
}

static int check_counters(struct actor *a)
{
    const epx_tensor *stats = a->info.expert_stats, *waits = a->info.wait_ns;

    for (int64_t l = 0; stats && l < a->route->local_experts; l++)
        if (tensor_int(stats, l) != 1000 + l + a->recv.expert_rows[l])
            return failure(a, "expert_stats[%lld]: expected %lld, got %lld", (long long)l,
                           (long long)(1000 + l + a->recv.expert_rows[l]), (long long)tensor_int(stats, l));
    for (int64_t r = 0; waits && r < a->route->nranks; r++)
        if (tensor_int(waits, r) < 7 || tensor_int(waits, r) > 7 + 1000000ll * TIMEOUT_MS)
            return failure(a, "wait_ns[%lld] is %lld", (long long)r, (long long)tensor_int(waits, r));
    return 0;
}

/* An operation that went well. */
static void count_operation(struct actor *a, int combine)
{
    struct oracle_counts counts = {0};
    const int dtype = combine ? a->p->result_dtype : a->p->out_dtype;

    if (combine)
        oracle_count_combine(a->route, a->rank, &counts);
    else
        oracle_count_dispatch(a->route, a->rank, &counts);
    a->expected.rows_sent += counts.rows_sent;
    a->expected.rows_received += counts.rows_received;
    a->expected.rows_returned += counts.rows_returned;
    a->expected.bytes_peer += counts.rows_peer * (uint64_t)a->w.hidden * tensor_element_size(dtype);
    *(low_latency(a) ? combine ? &a->expected.ll_combines : &a->expected.ll_dispatches
      : combine      ? &a->expected.ht_combines
                     : &a->expected.ht_dispatches) += 1;
}

static int check_stat(struct actor *a, const char *name, uint64_t expected, uint64_t got)
{
    return expected == got ? 0
                           : failure(a, "epx_stats.%s: expected %llu, got %llu", name, (unsigned long long)expected,
                                     (unsigned long long)got);
}

/* All operations of all handles of a group, when all of them went well. */
static int check_stats(struct actor *actors, const struct prop_case *c, int group)
{
    struct actor *first = &actors[group];
    epx_stats e = EPX_STATS_INIT, got = EPX_STATS_INIT;

    TRY(first, epx_group_stats(first->group, &got));
    for (int i = group; i < c->nhandles; i += c->ngroups) {
        const epx_stats *one = &actors[i].expected;
        e.rows_sent += one->rows_sent;
        e.rows_received += one->rows_received;
        e.rows_returned += one->rows_returned;
        e.bytes_peer += one->bytes_peer;
        e.ll_dispatches += one->ll_dispatches;
        e.ll_combines += one->ll_combines;
        e.ht_dispatches += one->ht_dispatches;
        e.ht_combines += one->ht_combines;
    }
    return check_stat(first, "rows_sent", e.rows_sent, got.rows_sent) ||
                   check_stat(first, "rows_received", e.rows_received, got.rows_received) ||
                   check_stat(first, "rows_returned", e.rows_returned, got.rows_returned) ||
                   check_stat(first, "bytes_peer", e.bytes_peer, got.bytes_peer) ||
                   check_stat(first, "ll_dispatches", e.ll_dispatches, got.ll_dispatches) ||
                   check_stat(first, "ll_combines", e.ll_combines, got.ll_combines) ||
                   check_stat(first, "ht_dispatches", e.ht_dispatches, got.ht_dispatches) ||
                   check_stat(first, "ht_combines", e.ht_combines, got.ht_combines)
               ? -1
               : 0;
}

/* Checks dispatch and makes the experts' results; on the caller's thread or in stream order. */
static void after_dispatch(void *arg)
{
    struct actor *a = arg;
    struct oracle_data data = oracle_data_workload(&a->w, a->p->result_dtype);
    epx_tensor *weights = NULL;
    struct mismatch m;

    /* What a kernel that failed left behind is not to be looked at. */
    if (check_status(a, "epx_group_error", epx_group_error(a->group, NULL)))
        return;
    if (low_latency(a) && oracle_check_layout(&a->recv, &a->info, &m)) {
        failure(a, "%s", m.text);
        return;
    }
    if (low_latency(a) && check_counters(a))
        return;
    if (oracle_check_dispatch(&a->recv, &data, &a->out, &a->dispatch_config, FILL, &m)) {
        failure(a, "%s", m.text);
        return;
    }
    if (!low_latency(a) && a->cin.topk_weights)
        weights = (epx_tensor *)(uintptr_t)a->cin.topk_weights;
    oracle_fill_results(&a->recv, &data, (epx_tensor *)(uintptr_t)a->cin.tokens, weights);
}

/* The receive half, then the check, before or in the stream that combine will use. */
static int finish_dispatch(struct actor *a)
{
    epx_stream then = a->stream[a->p->streams == PROP_TWO_STREAMS];

    if (a->p->staged_dispatch)
        TRY(a, epx_complete(a->handle, a->stream[0]));
    if (make_combine_tensors(a))
        return -1;
    if (a->p->streams == PROP_TWO_STREAMS) {
        TRY(a, epx_event_record(a->event, a->stream[0]));
        TRY(a, epx_stream_wait_event(a->group, then, a->event));
    }
    if (a->p->async) {
        TRY(a, epx_stream_call(a->group, then, after_dispatch, a));
        return 0;
    }
    TRY(a, epx_stream_sync(a->group, then));
    after_dispatch(a);
    return a->failed ? -1 : 0;
}

static int issue_combine(struct actor *a)
{
    const struct prop_handle *p = a->p;

    a->combine_config = (epx_combine_config)EPX_COMBINE_CONFIG_INIT;
    a->combine_config.send_only = p->staged_combine;
    a->combine_config.logfmt = p->logfmt;
    a->combine_config.direction = a->backward ? EPX_BACKWARD : EPX_FORWARD;
    TRY(a, epx_combine(a->handle, &a->cin, &a->cout, &a->combine_config, a->stream[p->streams == PROP_TWO_STREAMS]));
    return 0;
}

static int check_combine(struct actor *a)
{
    const struct prop_handle *p = a->p;
    struct oracle_data data = oracle_data_workload(&a->w, p->result_dtype);
    struct oracle_combine how = {low_latency(a) && p->layout == EPX_EXPERT_MAJOR, p->biases, p->logfmt};
    struct mismatch m;

    if (oracle_check_combine(a->route, &data, a->rank, &how, &a->cout, &m))
        return failure(a, "%s", m.text);
    return check_canaries(a);
}

static int finish_combine(struct actor *a)
{
    epx_stream stream = a->stream[a->p->streams == PROP_TWO_STREAMS];

    if (a->p->staged_combine)
        TRY(a, epx_complete(a->handle, stream));
    TRY(a, epx_stream_sync(a->group, stream));
    count_operation(a, 1);
    return a->failed ? -1 : check_combine(a);
}

/* LogFMT is compared within a bound; but the same rows must give the same bits a second time. */
static int repeat_combine(struct actor *a)
{
    size_t bytes = (size_t)elements_of(a->cout.tokens) * tensor_element_size(a->p->result_dtype);
    void *first;

    if (!a->p->logfmt)
        return 0;
    first = malloc(bytes + 1);
    if (!first)
        return failure(a, "no memory");
    memcpy(first, bytes ? a->cout.tokens->data : "", bytes);
    if (issue_combine(a) || finish_combine(a)) {
        free(first);
        return -1;
    }
    if (bytes && memcmp(first, a->cout.tokens->data, bytes))
        failure(a, "the second combine of the same rows gave other bits");
    free(first);
    return a->failed ? -1 : 0;
}

/* ---- A rank ---------------------------------------------------------------------------------------------------------- */

static int update_routing(struct actor *a, int update)
{
    struct mismatch m;
    int64_t rows = -1, experts[1024];

    a->update = update;
    a->w = a->shared->w[update][a->number];
    a->route = update < PROP_MAX_UPDATES ? &a->shared->route[update][a->number] : &a->left;
    if (oracle_recv_init(&a->recv, a->route, a->rank))
        return failure(a, "no memory for the oracle");
    if (make_idx(a) || (!low_latency(a) && make_info(a)))
        return -1;
    TRY(a, epx_handle_update(a->handle, a->idx, low_latency(a) ? NULL : &a->info, a->stream[0]));
    if (low_latency(a))
        return 0;
    TRY(a, epx_handle_recv_count(a->handle, &rows, experts));
    TRY(a, epx_group_error(a->group, NULL)); /* a rank masked meanwhile has no rows */
    if (rows != a->recv.total)
        return failure(a, "epx_handle_recv_count: expected %lld rows, got %lld", (long long)a->recv.total,
                       (long long)rows);
    for (int l = 0; l < a->route->local_experts; l++)
        if (experts[l] != a->recv.expert_rows[l])
            return failure(a, "epx_handle_recv_count: expert %d: expected %lld rows, got %lld", l,
                           (long long)a->recv.expert_rows[l], (long long)experts[l]);
    TRY(a, epx_stream_sync(a->group, a->stream[0]));
    if (oracle_check_layout(&a->recv, &a->info, &m))
        return failure(a, "%s", m.text);
    return check_canaries(a);
}

static int run_pair(struct actor *actors, int n, int update, int pair)
{
    for (int i = 0; i < n; i++) {
        actors[i].w.round = (uint64_t)(update * 16 + pair);
        actors[i].backward = actors[i].p->backward && pair % 2 == 1;
        if (issue_dispatch(&actors[i]))
            return -1;
    }
    for (int i = 0; i < n; i++) {
        if (finish_dispatch(&actors[i]))
            return -1;
        count_operation(&actors[i], 0);
    }
    for (int i = 0; i < n; i++)
        if (issue_combine(&actors[i]))
            return -1;
    for (int i = 0; i < n; i++)
        if (finish_combine(&actors[i]))
            return -1;
    for (int i = 0; i < n; i++)
        if (repeat_combine(&actors[i]))
            return -1;
    return 0;
}

static int run_update(struct actor *actors, const struct prop_case *c, int update)
{
    int rc = 0;

    for (int i = 0; !rc && i < c->nhandles; i++)
        rc = update_routing(&actors[i], update);
    for (int pair = 0; !rc && pair < c->pairs; pair++)
        rc = run_pair(actors, c->nhandles, update, pair);
    for (int i = 0; i < c->nhandles; i++) {
        if (actors[i].group) {
            epx_stream_sync(actors[i].group, actors[i].stream[0]);
            epx_stream_sync(actors[i].group, actors[i].stream[1]);
        }
        free_tensors(&actors[i]);
        oracle_recv_free(&actors[i].recv);
    }
    return rc;
}

static int run_updates(struct actor *actors, const struct prop_case *c)
{
    int rc = 0;

    for (int u = 0; !rc && u < c->updates; u++)
        rc = run_update(actors, c, u);
    return rc;
}

/* ---- Going on without some ------------------------------------------------------------------------------------------ */

static struct {
    uint64_t ranks, rounds;
} recovered;

void prop_recoveries(uint64_t *ranks, uint64_t *rounds)
{
    *ranks = __atomic_load_n(&recovered.ranks, __ATOMIC_RELAXED);
    *rounds = __atomic_load_n(&recovered.rounds, __ATOMIC_RELAXED);
}

/* Leaves out whom this rank waited for in vain: the others learn of it when they meet. */
static int mask_the_blamed(struct actor *a, int32_t *mask)
{
    epx_error_info info = EPX_ERROR_INFO_INIT;
    epx_status status = epx_group_error(a->group, &info);

    if (epx_mask_query(a->group, mask, NULL) != EPX_OK)
        return failure(a, "epx_mask_query: %s", epx_last_error());
    epx_stream_sync(a->group, NULL);
    /* A timeout, or the own network, blames somebody; the word of a rank that failed only says that it did. */
    if ((status != EPX_ERR_TIMEOUT && strcmp(info.phase, "network") != 0) || info.peer < 0 || info.peer == a->rank)
        return 0;
    mask[info.peer] = 0;
    status = epx_mask_update(a->group, mask, NULL);
    return status == EPX_OK ? 0 : failure(a, "epx_mask_update: %s", epx_last_error());
}

static int make_left_routes(struct actor *actors, const struct prop_case *c, const int32_t *mask)
{
    for (int i = 0; i < c->nhandles; i++) {
        struct actor *a = &actors[i];
        const struct prop_handle *h = a->p;

        if (oracle_route_from_workload(&a->left, &a->shared->w[PROP_MAX_UPDATES][i], a->tokens_per_rank, h->mode,
                                       h->layout, h->flags, h->alignment))
            return failure(a, "no memory for the oracle");
        a->left.ranks_per_node = c->ranks_per_node;
        a->left.node_of = c->uneven ? c->node_of : NULL;
        memcpy(a->left.active, mask, (size_t)c->nranks * sizeof(*mask));
        a->failed = 0;
    }
    return 0;
}

/* 0: this rank is through, or ended in a way that faults excuse. */
static int recover(struct actor *actors, const struct prop_case *c)
{
    struct actor *a = &actors[0];
    int32_t *mask = calloc((size_t)c->nranks, sizeof(*mask));
    int rc = mask ? mask_the_blamed(a, mask) : failure(a, "no memory");

    if (!rc)
        rc = check_status(a, "epx_group_error_clear", epx_group_error_clear(a->group));
    if (!rc)
        rc = check_status(a, "epx_group_error", epx_group_error(a->group, NULL));
    if (!rc)
        rc = check_status(a, "epx_mask_query", epx_mask_query(a->group, mask, NULL));
    if (!rc)
        rc = check_status(a, "epx_stream_sync", epx_stream_sync(a->group, NULL));
    if (!rc)
        rc = make_left_routes(actors, c, mask);
    if (!rc) {
        __atomic_fetch_add(&recovered.ranks, 1, __ATOMIC_RELAXED);
        rc = run_update(actors, c, PROP_MAX_UPDATES);
    }
    if (!rc)
        __atomic_fetch_add(&recovered.rounds, (uint64_t)c->pairs, __ATOMIC_RELAXED);
    for (int i = 0; i < c->nhandles; i++)
        oracle_route_free(&actors[i].left);
    free(mask);
    return rc;
}

static int tokens_per_rank(const struct prop_case *c)
{
    int most = 1;

    for (int i = 0; i < c->nhandles; i++)
        most = c->handle[i].w.max_tokens > most ? c->handle[i].w.max_tokens : most;
    return most + c->spare_tokens;
}

static epx_group_config group_config(const struct shared *s, int group)
{
    const struct prop_case *c = s->c;
    epx_group_config config = EPX_GROUP_CONFIG_INIT;

    config.device = test_device();
    config.modes = c->modes;
    config.num_experts = c->handle[0].w.experts;
    config.max_tokens_per_rank = tokens_per_rank(c);
    config.max_inflight = c->max_inflight;
    config.num_agents = c->num_agents;
    config.enable_mask = c->enable_mask;
    config.timeout_ms = c->timeout_ms ? c->timeout_ms : (int)env_number("EPX_TEST_TIMEOUT_MS", TIMEOUT_MS);
    config.ranks_per_node = c->ranks_per_node;
    snprintf(config.net, sizeof(config.net), "%s", c->net);
    config.alloc_bytes = config.device == EPX_DEVICE_CPU ? 256u << 20 : 64u << 20; /* a GPU's heap is there at once */
    config.layouts = EPX_LAYOUT_BIT(EPX_FLAT) | EPX_LAYOUT_BIT(EPX_EXPERT_MAJOR);
    config.max_recv_tokens = c->bounded ? s->max_recv[group] : 0;
    for (int i = group; i < c->nhandles; i += c->ngroups) {
        const struct prop_handle *h = &c->handle[i];
        int in = h->w.hidden * (int)tensor_element_size(h->w.dtype);
        int back = h->w.hidden * (int)tensor_element_size(h->result_dtype);
        int most = in > back ? in : back;

        config.max_hidden_bytes = most > config.max_hidden_bytes ? most : config.max_hidden_bytes;
        config.max_topk = h->w.topk > config.max_topk ? h->w.topk : config.max_topk;
    }
    return config;
}

/* A GPU has 32 queues for the streams of a process, and kernels in one queue wait for each other: there, handles of a
 * group share two streams. `a` is the last of `number` + 1 actors. */
static int open_streams(struct actor *a, int number)
{
    const int want = a->p->streams == PROP_TWO_STREAMS ? 2 : a->p->streams == PROP_OWN_STREAM ? 1 : 0;

    for (int i = 0; i < want; i++) {
        for (struct actor *b = a - number; b < a && test_device() != EPX_DEVICE_CPU && !a->stream[i]; b++)
            if (b->group == a->group)
                a->stream[i] = b->stream[i];
        a->borrowed[i] = a->stream[i] != NULL;
        if (!a->stream[i])
            TRY(a, epx_stream_create(a->group, &a->stream[i]));
    }
    return 0;
}

static int open_actor(struct actor *a, struct shared *s, int rank, int number, epx_group *group)
{
    epx_handle_config config = EPX_HANDLE_CONFIG_INIT;

    a->shared = s;
    a->p = &s->c->handle[number];
    a->rank = rank;
    a->number = number;
    a->group = group;
    a->tokens_per_rank = tokens_per_rank(s->c);
    a->rng.state = workload_hash(s->c->seed, (uint64_t)(1000 + rank * 8 + number));
    config.mode = a->p->mode;
    config.layout = a->p->layout;
    config.topk = a->p->w.topk;
    config.expert_alignment = a->p->alignment;
    config.flags = a->p->flags;
    TRY(a, epx_handle_create(&a->handle, group, &config));
    if (open_streams(a, number))
        return -1;
    if (a->p->streams == PROP_TWO_STREAMS)
        TRY(a, epx_event_create(group, &a->event));
    return 0;
}

static int close_actor(struct actor *a, int ok)
{
    /* After a failure too: streams belong to whoever made them. */
    for (int i = 0; i < 2; i++) {
        const int own = a->stream[i] && !a->borrowed[i];
        const epx_status status = own ? epx_stream_destroy(a->group, a->stream[i]) : EPX_OK;
        if (ok)
            TRY(a, status);
    }
    if (a->event && ok)
        TRY(a, epx_event_destroy(a->event));
    /* Half of the handles are left to the group. */
    if (a->handle && ok && prop_chance(&a->rng, 50))
        TRY(a, epx_handle_destroy(a->handle));
    return 0;
}

static int run_rank(int rank, int n, epx_bootstrap *boot, void *arg)
{
    struct shared *s = arg;
    const struct prop_case *c = s->c;
    struct actor *actors = calloc(PROP_MAX_HANDLES, sizeof(*actors));
    epx_group *groups[PROP_MAX_GROUPS] = {NULL};
    int rc = actors ? 0 : -1;

    (void)n;
    for (int g = 0; !rc && g < c->ngroups; g++) {
        epx_group_config config = group_config(s, g);
        actors[0].shared = s;
        actors[0].rank = rank;
        rc = check_status(&actors[0], "epx_group_create", epx_group_create(&groups[g], boot, &config));
    }
    for (int i = 0; !rc && i < c->nhandles; i++)
        rc = open_actor(&actors[i], s, rank, i, groups[i % c->ngroups]);
    if (!rc) {
        rc = run_updates(actors, c);
        if (rc && c->recover)
            rc = recover(actors, c);
    }
    for (int g = 0; !rc && !c->may_fail && g < c->ngroups && g < c->nhandles; g++)
        rc = check_stats(actors, c, g);
    for (int i = 0; actors && i < c->nhandles; i++)
        if (actors[i].group && close_actor(&actors[i], !rc))
            rc = -1;
    for (int g = 0; g < c->ngroups; g++)
        if (groups[g] && check_status(&actors[0], "epx_group_destroy", epx_group_destroy(groups[g])))
            rc = -1;
    free(actors);
    return rc;
}

/* ---- A case ---------------------------------------------------------------------------------------------------------- */

static int shared_init(struct shared *s)
{
    const struct prop_case *c = s->c;

    for (int u = 0; u <= PROP_MAX_UPDATES; u++) {
        if (u >= c->updates && (u < PROP_MAX_UPDATES || !c->recover))
            continue;
        for (int i = 0; i < c->nhandles; i++) {
            const struct prop_handle *h = &c->handle[i];
            struct workload *w = &s->w[u][i];

            *w = h->w;
            w->seed = workload_hash(w->seed, (uint64_t)u);
            if (oracle_route_from_workload(&s->route[u][i], w, tokens_per_rank(c), h->mode, h->layout, h->flags,
                                           h->alignment))
                return -1;
            s->route[u][i].ranks_per_node = c->ranks_per_node;
            s->route[u][i].node_of = c->uneven ? c->node_of : NULL;
            for (int r = 0; h->mode == EPX_HIGH_THROUGHPUT && r < c->nranks; r++) {
                struct oracle_recv recv;
                int *most = &s->max_recv[i % c->ngroups];

                if (oracle_recv_init(&recv, &s->route[u][i], r))
                    return -1;
                *most = recv.total > *most ? (int)recv.total : *most;
                oracle_recv_free(&recv);
            }
        }
    }
    return 0;
}

int prop_run_case_on(const struct prop_case *c, int (*ranks)(int n, prop_rank_fn fn, void *arg), char *error,
                     size_t bytes)
{
    struct shared *s = calloc(1, sizeof(*s));
    int rc = -1;

    snprintf(error, bytes, "no memory for the case");
    if (!s)
        return -1;
    s->c = c;
    s->error = error;
    s->error_bytes = bytes;
    if (shared_init(s) == 0) {
        error[0] = 0;
        rc = ranks(c->nranks, run_rank, s) ? -1 : 0;
        if (c->may_fail && !error[0])
            rc = 0;
        if (rc && !error[0])
            snprintf(error, bytes, "a rank failed without a word");
    }
    for (int u = 0; u <= PROP_MAX_UPDATES; u++)
        for (int i = 0; i < PROP_MAX_HANDLES; i++)
            oracle_route_free(&s->route[u][i]);
    free(s);
    return rc;
}

int prop_run_case(const struct prop_case *c, char *error, size_t bytes)
{
    return prop_run_case_on(c, run_ranks, error, bytes);
}

/* ---- Many cases ------------------------------------------------------------------------------------------------------ */

double prop_scale(void)
{
    const char *text = getenv("EPX_TEST_SCALE");
    double scale = text ? atof(text) : 1;

    return scale > 0 ? scale : 1;
}

void prop_print_case(const struct prop_case *c)
{
    char text[400];

    fprintf(stderr,
            "  ranks %d groups %d updates %d pairs %d agents %d inflight %d spare %d bounded %d mask %d modes %u\n",
            c->nranks, c->ngroups, c->updates, c->pairs, c->num_agents, c->max_inflight, c->spare_tokens, c->bounded,
            c->enable_mask, c->modes);
    if (c->recover)
        fprintf(stderr, "  after a failure the ranks that are left go on\n");
    if (c->uneven) {
        fprintf(stderr, "  nodes of the ranks:");
        for (int r = 0; r < c->nranks; r++)
            fprintf(stderr, " %d", c->node_of[r]);
        fprintf(stderr, "\n");
    }
    for (int i = 0; i < c->nhandles; i++) {
        const struct prop_handle *h = &c->handle[i];
        fprintf(stderr,
                "  handle %d: mode %d layout %d align %d flags %u out %d scale %d round %d result %d weights %d idx %d "
                "src %d biases %d logfmt %d backward %d staged %d/%d async %d streams %d alloc %d%% recv_tensor %d\n"
                "            %s\n",
                i, h->mode, h->layout, h->alignment, h->flags, h->out_dtype, h->out_scale_dtype, h->round_scale,
                h->result_dtype, h->weights, h->idx_out, h->src_out, h->biases, h->logfmt, h->backward,
                h->staged_dispatch, h->staged_combine, h->async, (int)h->streams, h->in_epx_alloc, h->recv_tensor,
                workload_describe(&h->w, text, sizeof(text)));
    }
}

int prop_run(const char *program, const char *name, int cases, int modes, int max_ranks,
             void (*change)(struct prop_case *c, struct prop_rng *rng))
{
    uint64_t first = (uint64_t)env_number("EPX_TEST_SEED", 1);
    long long scaled = (long long)(cases * prop_scale());
    long long count = env_number("EPX_TEST_CASES", scaled > 1 ? scaled : 1);
    char error[1200];

    for (uint64_t seed = first; seed < first + (uint64_t)count; seed++) {
        struct prop_case c;
        struct prop_rng rng = {workload_hash(seed, 0xc4a9e)};

        prop_draw_case(&c, seed, modes, max_ranks);
        if (change) {
            change(&c, &rng);
            prop_shrink(&c);
        }
        if (prop_run_case(&c, error, sizeof(error)) == 0)
            continue;
        fprintf(stderr, "%s, %s: seed %llu failed: %s\n", program, name, (unsigned long long)seed, error);
        prop_print_case(&c);
        fprintf(stderr, "  again: EPX_TEST_SEED=%llu EPX_TEST_CASES=1 EPX_TEST_ONLY=%s %s\n", (unsigned long long)seed,
                name, program);
        return 1;
    }
    return 0;
}
