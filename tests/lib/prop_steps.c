/* SPDX-License-Identifier: Apache-2.0 */
/* Property tests: what one handle does on one rank, and checking everything that is written. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "group/objects.h"
#include "prop_actor.h"
#include "util/pause.h"

enum { FILL = 0xab, CANARY = 0x5c, SPOILED = 0x3e, CANARY_BYTES = 64, PROP_MOST_PAIRS = 16 };

/* Keeps the first sentence of all ranks. */
int actor_failure(struct actor *a, const char *format, ...)
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

static uint64_t excused;
struct prop_hooks prop_hooks;

uint64_t prop_excused(void)
{
    return __atomic_load_n(&excused, __ATOMIC_RELAXED);
}

/* Low latency has masked a rank and goes on; whether by itself or not, all calls say so until the error is cleared. */
static int goes_on(struct actor *a, epx_status status)
{
    epx_error_info info = EPX_ERROR_INFO_INIT;

    if (!a->shared->c->goes_on || status != EPX_ERR_TIMEOUT || a->update == PROP_MAX_UPDATES || !a->group)
        return 0;
    if (epx_group_error(a->group, &info) == EPX_ERR_TIMEOUT && strstr(info.message, "masked now"))
        a->shared->masked = a->masked = 1;
    return a->masked && !strstr(epx_last_error(), "the group has failed");
}

/* Whoever has masked a rank has other rows than the oracle says, and returns other ones. */
static int compares(const struct actor *a)
{
    return a->update == PROP_MAX_UPDATES || !a->shared->masked;
}

int actor_status(struct actor *a, const char *call, epx_status status)
{
    if (status == EPX_OK || goes_on(a, status))
        return 0;
    if (excusable(a, status)) {
        __atomic_fetch_add(&excused, 1, __ATOMIC_RELAXED);
        a->failed = 1;
        if (prop_hooks.told && a->group)
            prop_hooks.told(a->group, a->rank);
        return -1;
    }
    return actor_failure(a, "%s: %s: %s", call, epx_strerror(status), epx_last_error());
}

/* ---- Tensors with canaries --------------------------------------------------------------------------------------- */

static int64_t elements_of(const epx_tensor *t)
{
    int64_t n = 1;

    for (int i = 0; i < t->ndim; i++)
        n *= t->shape[i];
    return n;
}

/* From the first element to past the last one. */
static size_t span_of(const epx_tensor *t)
{
    int64_t last = 0;

    if (!elements_of(t))
        return 0;
    if (!t->stride[t->ndim - 1])
        return (size_t)elements_of(t) * tensor_element_size(t->dtype);
    for (int i = 0; i < t->ndim; i++)
        last += (t->shape[i] - 1) * t->stride[i];
    return (size_t)(last + 1) * tensor_element_size(t->dtype);
}

/* For what prop_widen() adds: numbers that are not of a->rng. 0 without it. */
static uint64_t draw_apart(const struct actor *a, uint64_t what)
{
    const uint64_t who = (uint64_t)a->rank << 32 | (uint64_t)a->number << 16 | (uint64_t)a->update;
    const uint64_t draw = workload_hash(workload_hash(a->shared->c->seed, who), what << 16 | (uint64_t)a->nbuffers);

    return a->shared->c->apart ? draw : 0;
}

/* Rows with gaps between them, from any element on. Returns how many elements come before the first. */
static int64_t lay_apart(const struct actor *a, epx_tensor *t)
{
    const uint64_t draw = draw_apart(a, 0x1a1d);
    const int last = t->ndim - 1;

    if (draw % 2 == 0)
        return 0;
    t->stride[last] = 1;
    t->stride[last - 1] = t->shape[last] + (int64_t)(draw >> 8) % 10;
    if (last == 2)
        t->stride[0] = t->shape[1] * t->stride[1] + (int64_t)(draw >> 16) % 40;
    return (int64_t)(draw >> 24) % 17;
}

/* NULL on failure. d2 < 0: two dimensions, d1 < 0: one. `apart`: a tensor whose rows need not follow each other. */
static epx_tensor *lay_out(struct actor *a, int dtype, int64_t d0, int64_t d1, int64_t d2, int apart)
{
    struct buffer *b = &a->buffer[a->nbuffers];
    int ndim = d1 < 0 ? 1 : d2 < 0 ? 2 : 3;
    void *memory = NULL;
    size_t before;

    if (a->nbuffers == PROP_MAX_BUFFERS) {
        actor_failure(a, "the test ran out of buffers");
        return NULL;
    }
    b->t = epx_tensor_make(NULL, (epx_dtype)dtype, ndim, d0, d1, d2, 0);
    before = apart ? (size_t)lay_apart(a, &b->t) * tensor_element_size(dtype) : 0;
    b->bytes = span_of(&b->t) ? before + span_of(&b->t) : 0;
    const int drawn = prop_chance(&a->rng, a->p->in_epx_alloc); /* also where it does not matter: seeds mean the same */
    b->from_epx = a->in_heap || drawn;
    b->group = a->group;
    if (b->from_epx) {
        if (actor_status(a, "epx_alloc", epx_alloc(a->group, b->bytes + CANARY_BYTES, &memory)))
            return NULL;
    } else if ((memory = tensor_memory(a->group, b->bytes + CANARY_BYTES)) == NULL) {
        actor_failure(a, "no memory for a tensor");
        return NULL;
    }
    b->base = memory;
    b->t.data = b->base + (b->bytes ? before : 0);
    memset(b->base, FILL, b->bytes);
    memset(b->base + b->bytes, CANARY, CANARY_BYTES);
    a->nbuffers++;
    if (!b->bytes && prop_chance(&a->rng, 50))
        b->t.data = NULL; /* an empty tensor has no need of memory */
    return &b->t;
}

static epx_tensor *new_tensor(struct actor *a, int dtype, int64_t d0, int64_t d1, int64_t d2)
{
    return lay_out(a, dtype, d0, d1, d2, 0);
}

/* Tokens [B, H], or what is added to them. */
static epx_tensor *new_rows(struct actor *a, int dtype)
{
    return lay_out(a, dtype, a->route->tokens[a->rank], a->w.hidden, -1, 1);
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
            return actor_failure(a, "%s (dtype %d, ndim %d, %lld x %lld)", m.text, b->t.dtype, b->t.ndim,
                                 (long long)b->t.shape[0], (long long)b->t.shape[1]);
    }
    return 0;
}

/* After a failure a rank that is late may still read registered memory: the memory stays until the end of the
 * case, but is used for something else. */
static void spoil(struct shared *s, struct buffer *b)
{
    struct kept *kept = b->base ? malloc(sizeof(*kept)) : NULL;

    if (!kept)
        return;
    memset(b->base, SPOILED, b->bytes);
    kept->memory = b->base;
    kept->next = __atomic_load_n(&s->kept, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(&s->kept, &kept->next, kept, 1, __ATOMIC_RELEASE, __ATOMIC_RELAXED))
        ;
}

static void free_tensors(struct actor *a)
{
    const struct prop_case *c = a->shared->c;

    if (prop_hooks.reuses && a->group)
        prop_hooks.reuses(a->group);
    for (int i = 0; i < a->nbuffers; i++) {
        if (a->buffer[i].from_epx && a->buffer[i].base)
            memset(a->buffer[i].base, SPOILED, a->buffer[i].bytes); /* used for something else, also after a failure */
        if (a->buffer[i].from_epx)
            epx_free(a->buffer[i].group, a->buffer[i].base);
        else if (c->registered && c->may_fail && test_device() == EPX_DEVICE_CPU)
            spoil(a->shared, &a->buffer[i]);
        else
            tensor_memory_free(a->buffer[i].group, a->buffer[i].base);
    }
    a->nbuffers = 0;
}

/* ---- Inputs and outputs of one pair ------------------------------------------------------------------------------ */

static int low_latency(const struct actor *a)
{
    return a->p->mode == EPX_LOW_LATENCY;
}

/* What dispatch returns for each row, of any width. */
static epx_tensor *received(struct actor *a, int dtype, int64_t rows, int64_t width, int apart)
{
    const int64_t R = a->route->nranks, M = a->tokens_per_rank;

    if (!low_latency(a))
        return lay_out(a, dtype, rows, width, -1, apart);
    if (a->p->layout == EPX_RANK_MAJOR)
        return lay_out(a, dtype, R, M, width, apart);
    return lay_out(a, dtype, a->route->local_experts, R * M, width, apart);
}

static epx_tensor *received_shape(struct actor *a, int dtype, int64_t rows, int64_t width)
{
    return received(a, dtype, rows, width, 0);
}

/* The tokens tensor of dispatch's output and combine's input. */
static epx_tensor *received_rows(struct actor *a, int dtype, int64_t rows)
{
    return received(a, dtype, rows, a->w.hidden, 1);
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
    if (!low_latency(a) && draw_apart(a, 0xe5) % 2)
        a->info.expert_rows = new_index(a, L, -1, -1);
    if (low_latency(a) ? expert_major && prop_chance(&a->rng, 50) : draw_apart(a, 0xe6) % 2) {
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

/* Are the tokens of this dispatch in memory from epx_alloc? On all ranks, or now and then on half of them. */
static int tokens_in_heap(const struct actor *a)
{
    const uint64_t seed = workload_hash(a->shared->c->seed, (uint64_t)a->number << 8 | (uint64_t)a->update);
    struct prop_rng all = {workload_hash(seed, 0x4ea0 + a->w.round)};
    struct prop_rng own = {workload_hash(all.state, (uint64_t)a->rank)};

    return a->p->in_reach && (prop_chance(&all, a->p->in_reach) || prop_chance(&own, 50));
}

static int make_dispatch_inputs(struct actor *a)
{
    const struct workload *w = &a->w;
    int B = a->route->tokens[a->rank];
    epx_tensor *tokens, *scales = NULL, *weights = NULL;

    a->in = (epx_dispatch_inputs)EPX_DISPATCH_INPUTS_INIT;
    a->in_heap = tokens_in_heap(a);
    a->in.tokens = tokens = new_rows(a, w->dtype);
    if (w->dtype == EPX_FP8_E4M3)
        a->in.scales = scales = new_tensor(a, w->scale_dtype, B, w->scale_count, -1);
    a->in_heap = 0;
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
    if (actor_status(a, "epx_handle_recv_tensor",
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
    int64_t cast = p->out_scale_dtype == EPX_FP32 ? (w->hidden + 127) / 128 : (w->hidden + 511) / 512;
    int64_t nscales = w->dtype == EPX_FP8_E4M3 ? w->scale_count : cast;
    int fp8 = p->out_dtype == EPX_FP8_E4M3;

    a->out = (epx_dispatch_outputs)EPX_DISPATCH_OUTPUTS_INIT;
    a->out.tokens = p->recv_tensor ? recv_tensor(a, EPX_RECV_TOKENS, p->out_dtype, rows, w->hidden)
                                   : received_rows(a, p->out_dtype, rows);
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
    const uint64_t one = draw_apart(a, 0x50c) % 4; /* often both are asked for, now and then one alone */
    if (p->src_out && one != 1)
        a->out.src_rank = received_shape(a, EPX_INT32, rows, -1);
    if (p->src_out && one != 2)
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
                        : received_rows(a, p->result_dtype, rows);
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
        epx_tensor *bias = new_rows(a, p->result_dtype);
        for (int t = 0; bias && t < B; t++)
            workload_bias(&a->w, p->result_dtype, i, a->rank, t, tensor_row(bias, t));
        a->cin.bias[i] = bias;
    }
    a->cout.tokens = new_rows(a, p->result_dtype);
    return a->failed ? -1 : 0;
}

/* ---- The steps of a pair ----------------------------------------------------------------------------------------- */

/* Before an operation is issued. */
static void be_late(struct actor *a)
{
    const struct prop_case *c = a->shared->c;
    const long ms = (long)c->timeout_ms * PROP_LATE_PERCENT / 100;
    const struct timespec wait = {ms / 1000, ms % 1000 * 1000000};

    if (c->late == a->rank + 1 && a->issued++ == c->late_from)
        nanosleep(&wait, NULL);
}

/* Where each stage is a launch, the host takes the steps of earlier windows for those that will come
 * (modes/high_throughput.c). Whatever it expects, and however ranks differ in that, rows are right. */
static void expect_any_steps(struct actor *a)
{
    const uint64_t who = (uint64_t)a->rank << 32 | (uint64_t)a->number << 16 | (uint64_t)a->update;
    const uint64_t draw = workload_hash(workload_hash(a->shared->c->seed, who), 0x57e9 + a->w.round);
    struct epx_group *group = a->group;

    if (!a->p->in_reach || low_latency(a) || draw & 1)
        return;
    group->windows_hinted = __atomic_load_n(group->shadow.windows, __ATOMIC_RELAXED);
    group->windows_with_rows = group->windows_hinted / HW_HINT_ROWS;
    group->windows_others = group->windows_hinted / HW_HINT_OTHERS % (HW_HINT_ROWS / HW_HINT_OTHERS);
    group->windows_wide = draw & 2 ? 1000 : 0;
    group->windows_quiet = draw & 4 ? 1000 : 0;
}

static int issue_dispatch(struct actor *a)
{
    const struct prop_handle *p = a->p;

    expect_any_steps(a);
    if (make_dispatch_inputs(a) || make_dispatch_outputs(a) || (low_latency(a) && make_info(a)))
        return -1;
    a->dispatch_config = (epx_dispatch_config)EPX_DISPATCH_CONFIG_INIT;
    a->dispatch_config.send_only = p->staged_dispatch;
    a->dispatch_config.round_scale = p->round_scale;
    a->dispatch_config.direction = a->backward ? EPX_BACKWARD : EPX_FORWARD;
    be_late(a);
    a->issued_ns = host_now_ns();
    TRY(a,
        epx_dispatch(a->handle, &a->in, &a->out, low_latency(a) ? &a->info : NULL, &a->dispatch_config, a->stream[0]));
    return 0;
}

static int check_counters(struct actor *a)
{
    const epx_tensor *stats = a->info.expert_stats, *waits = a->info.wait_ns;
    /* No longer than the operation took: the clocks of a GPU and of the host differ by less than a millisecond. A rank
     * of a simulation that died, and goes on in the end, has waited longer than any deadline. */
    const int64_t most = 7 + 1000000 + (int64_t)(host_now_ns() - a->issued_ns);

    for (int64_t l = 0; stats && l < a->route->local_experts; l++)
        if (tensor_int(stats, l) != 1000 + l + a->recv.expert_rows[l])
            return actor_failure(a, "expert_stats[%lld]: expected %lld, got %lld", (long long)l,
                                 1000 + (long long)l + (long long)a->recv.expert_rows[l],
                                 (long long)tensor_int(stats, l));
    for (int64_t r = 0; waits && r < a->route->nranks; r++)
        if (tensor_int(waits, r) < 7 || tensor_int(waits, r) > most)
            return actor_failure(a, "wait_ns[%lld] is %lld: expected 7 to %lld", (long long)r,
                                 (long long)tensor_int(waits, r), (long long)most);
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

/* An operation has completed: its inputs are the caller's again, who may change them at once, and does. */
static void take_back(const epx_tensor *t)
{
    if (t && elements_of(t))
        memset(t->data, SPOILED, span_of(t));
}

/* Each dispatch of an update reads the indices of low latency; combine does not. */
static int is_last_pair(const struct actor *a)
{
    return (int)(a->w.round % PROP_MOST_PAIRS) == a->shared->c->pairs - 1;
}

/* Checks dispatch and makes the experts' results; on the caller's thread or in stream order. */
static void after_dispatch(void *arg)
{
    struct actor *a = arg;
    struct oracle_data data = oracle_data_workload(&a->w, a->p->result_dtype);
    epx_tensor *weights = NULL;
    struct mismatch m;

    /* What a kernel that failed left behind is not to be looked at. */
    if (actor_status(a, "epx_group_error", epx_group_error(a->group, NULL)) || !compares(a))
        return;
    if (low_latency(a) && oracle_check_layout(&a->recv, &a->info, &m)) {
        actor_failure(a, "%s", m.text);
        return;
    }
    if (low_latency(a) && check_counters(a))
        return;
    if (oracle_check_dispatch(&a->recv, &data, &a->out, &a->dispatch_config, FILL, &m)) {
        actor_failure(a, "%s", m.text);
        return;
    }
    take_back(a->in.tokens);
    take_back(a->in.scales);
    take_back(a->in.topk_weights);
    if (low_latency(a) && is_last_pair(a))
        take_back(a->idx);
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
    a->combine_config.sum = p->round_ranks ? EPX_SUM_ROUND_RANKS : 0;
    a->combine_config.direction = a->backward ? EPX_BACKWARD : EPX_FORWARD;
    be_late(a);
    TRY(a, epx_combine(a->handle, &a->cin, &a->cout, &a->combine_config, a->stream[p->streams == PROP_TWO_STREAMS]));
    return 0;
}

static int check_combine(struct actor *a)
{
    const struct prop_handle *p = a->p;
    struct oracle_data data = oracle_data_workload(&a->w, p->result_dtype);
    struct oracle_combine how = {.weighted = low_latency(a) && p->layout == EPX_EXPERT_MAJOR,
                                 .biases = p->biases,
                                 .logfmt = p->logfmt,
                                 .round_ranks = p->round_ranks};
    struct mismatch m;

    if (oracle_check_combine(a->route, &data, a->rank, &how, &a->cout, &m))
        return actor_failure(a, "%s", m.text);
    return check_canaries(a);
}

static int finish_combine(struct actor *a)
{
    epx_stream stream = a->stream[a->p->streams == PROP_TWO_STREAMS];

    if (a->p->staged_combine)
        TRY(a, epx_complete(a->handle, stream));
    TRY(a, epx_stream_sync(a->group, stream));
    count_operation(a, 1);
    return a->failed ? -1 : compares(a) ? check_combine(a) : 0;
}

/* LogFMT is compared within a bound; but the same rows must give the same bits a second time. */
static int repeat_combine(struct actor *a)
{
    const size_t bytes = span_of(a->cout.tokens);
    void *first;

    if (!a->p->logfmt)
        return 0;
    first = malloc(bytes + 1);
    if (!first)
        return actor_failure(a, "no memory");
    memcpy(first, bytes ? a->cout.tokens->data : "", bytes);
    if (issue_combine(a) || finish_combine(a)) {
        free(first);
        return -1;
    }
    if (bytes && compares(a) && memcmp(first, a->cout.tokens->data, bytes))
        actor_failure(a, "the second combine of the same rows gave other bits");
    free(first);
    return a->failed ? -1 : 0;
}

/* ---- An update --------------------------------------------------------------------------------------------------- */

/* A process that has slept may find the deadline of this call expired before its kernels have run again. Its group has
 * not failed, so there is nothing to recover: it waits anew. */
static epx_status recv_count(struct actor *a, int64_t *rows, int64_t *experts)
{
    epx_status status = epx_handle_recv_count(a->handle, rows, experts);

    if (status == EPX_ERR_TIMEOUT && a->shared->c->may_fail && epx_group_error(a->group, NULL) == EPX_OK)
        status = epx_handle_recv_count(a->handle, rows, experts);
    return status;
}

static int update_routing(struct actor *a, int update)
{
    struct mismatch m;
    int64_t rows = -1, experts[1024];

    a->update = update;
    a->w = a->shared->w[update][a->number];
    a->route = update < PROP_MAX_UPDATES ? &a->shared->route[update][a->number] : &a->left;
    if (oracle_recv_init(&a->recv, a->route, a->rank))
        return actor_failure(a, "no memory for the oracle");
    if (make_idx(a) || (!low_latency(a) && make_info(a)))
        return -1;
    be_late(a);
    TRY(a, epx_handle_update(a->handle, a->idx, low_latency(a) ? NULL : &a->info, a->stream[0]));
    if (low_latency(a))
        return 0;
    TRY(a, recv_count(a, &rows, experts));
    TRY(a, epx_group_error(a->group, NULL)); /* a rank masked meanwhile has no rows */
    if (rows != a->recv.total)
        return actor_failure(a, "epx_handle_recv_count: expected %lld rows, got %lld", (long long)a->recv.total,
                             (long long)rows);
    for (int l = 0; l < a->route->local_experts; l++)
        if (experts[l] != a->recv.expert_rows[l])
            return actor_failure(a, "epx_handle_recv_count: expert %d: expected %lld rows, got %lld", l,
                                 (long long)a->recv.expert_rows[l], (long long)experts[l]);
    TRY(a, epx_stream_sync(a->group, a->stream[0]));
    take_back(a->idx);
    if (oracle_check_layout(&a->recv, &a->info, &m))
        return actor_failure(a, "%s", m.text);
    return check_counters(a) || check_canaries(a) ? -1 : 0;
}

static int run_pair(struct actor *actors, int n, int update, int pair)
{
    for (int i = 0; i < n; i++) {
        actors[i].w.round = (uint64_t)update * PROP_MOST_PAIRS + (uint64_t)pair;
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

int actors_update(struct actor *actors, const struct prop_case *c, int update)
{
    int rc = 0;

    for (int i = 0; !rc && i < c->nhandles; i++)
        rc = update_routing(&actors[i], update);
    for (int pair = 0; !rc && pair < c->pairs; pair++)
        rc = run_pair(actors, c->nhandles, update, pair);
    for (int i = 0; i < c->nhandles; i++) {
        /* After a failure in one group another may have a staged operation, whose memory is not the caller's yet. */
        if (rc && actors[i].handle)
            epx_complete(actors[i].handle, actors[i].stream[0]);
        if (actors[i].group) {
            epx_stream_sync(actors[i].group, actors[i].stream[0]);
            epx_stream_sync(actors[i].group, actors[i].stream[1]);
        }
        free_tensors(&actors[i]);
        oracle_recv_free(&actors[i].recv);
    }
    return rc;
}
