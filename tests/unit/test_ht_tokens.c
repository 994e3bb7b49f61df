/* SPDX-License-Identifier: Apache-2.0 */
/*
 * High throughput: a rank has more tokens than the group is for. All ranks learn it in the update, whoever has them,
 * and the group can be used as before. And rows pass through windows where the host expects none.
 */
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "group/objects.h"
#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"
#include "util/pause.h"

enum { RANKS = 3, MANY = FIXTURE_M + 4 };

static epx_status update(struct fixture *s, int many)
{
    int32_t *ids = calloc((size_t)MANY * FIXTURE_TOPK, sizeof(*ids));
    const epx_tensor large = epx_tensor_make(ids, EPX_INT32, 2, MANY, FIXTURE_TOPK, 0, 0);
    int64_t rows = -1;
    epx_status status = epx_handle_update(s->ht, many ? &large : &s->idx, NULL, NULL);

    if (status == EPX_OK)
        status = epx_handle_recv_count(s->ht, &rows, NULL);
    if (fixture_sync(s, EPX_OK) != EPX_OK) /* the kernel reads them */
        status = EPX_ERR_PEER;
    free(ids);
    return status;
}

static int grows(struct fixture *s)
{
    const int who = *(const int *)s->arg;
    const char *const words[] = {"tokens", "10", "max_tokens_per_rank = 6", who == 0 ? "rank 0" : "rank 2", NULL};

    for (int i = 0; i < 2; i++) {
        epx_dispatch_inputs in = s->in;
        int fits = 1;

        in.topk_weights = &s->weights;
        if (fixture_ht(s) || fixture_expect(s, "update", update(s, s->rank == who), EPX_ERR_OVERFLOW, words) ||
            fixture_expect(s, "fits", epx_handle_recv_fits(s->ht, &fits), EPX_ERR_OVERFLOW, words))
            return -1;
        if (s->rank != who && fixture_expect(s, "dispatch", epx_dispatch(s->ht, &in, &s->ht_out, NULL, NULL, NULL),
                                             EPX_ERR_OVERFLOW, words))
            return -1;
    }
    return fixture_ht(s);
}

/* Tensors are in memory of the host: on the CPU, or on lanes that it emulates (EPX_DEVICE, tests/scripts/lanes.sh). */
static epx_group_config config_of(int per_node)
{
    epx_group_config config = fixture_config(20000);

    config.device = EPX_DEVICE_AUTO;
    config.ranks_per_node = per_node;
    return config;
}

static void run(int who, int per_node)
{
    epx_group_config config = config_of(per_node);

    config.num_agents = 2;
    assert_int_equal(fixture_run(RANKS, &config, grows, &who), 0);
}

static void test_in_a_node(void **state)
{
    (void)state;
    run(0, 0);
    run(2, 0);
}

static void test_between_nodes(void **state)
{
    (void)state;
    run(0, 1);
    run(2, 2);
}

/* Nobody asks for the count: the dispatch itself says it, on all ranks, and does nothing. */
static int queued(struct fixture *s)
{
    int32_t ids[MANY * FIXTURE_TOPK] = {0};
    const epx_tensor large = epx_tensor_make(ids, EPX_INT32, 2, MANY, FIXTURE_TOPK, 0, 0);
    epx_tensor tokens = s->tokens, weights = s->weights;
    epx_dispatch_inputs in = s->in;
    const int many = s->rank == 1;
    char *rows = calloc((size_t)MANY, FIXTURE_HIDDEN * 2 + FIXTURE_TOPK * 4);
    epx_status status;

    tokens.data = rows;
    tokens.shape[0] = MANY;
    weights.data = rows + (size_t)MANY * FIXTURE_HIDDEN * 2;
    weights.shape[0] = MANY;
    in.tokens = many ? &tokens : &s->tokens;
    in.topk_weights = many ? &weights : &s->weights;
    status = epx_handle_update(s->ht, many ? &large : &s->idx, NULL, NULL);
    if (status == EPX_OK)
        status = epx_dispatch(s->ht, &in, &s->ht_out, NULL, NULL, NULL);
    status = fixture_sync(s, status);
    free(rows);
    if (status != EPX_ERR_OVERFLOW)
        return fixture_fail(s, "a dispatch after an update with too many tokens");
    return 0;
}

static void test_queued(void **state)
{
    (void)state;
    for (int per_node = 0; per_node < 2; per_node++) {
        const epx_group_config config = config_of(per_node);
        assert_int_equal(fixture_run(RANKS, &config, queued, NULL), 0);
    }
}

/* The tensors of rank 0 are in reach, and it expects no steps; the others have them. */
static int is_quiet(struct fixture *s)
{
    epx_tensor *const tensors[] = {&s->ht_rows, &s->ht_weights, &s->ht_idx};
    void *plain[3];
    int failed = 0;

    for (int i = 0; i < 3; i++) {
        plain[i] = tensors[i]->data;
        if (s->rank == 0 && epx_alloc(s->group, 1 << 16, &tensors[i]->data) != EPX_OK)
            return fixture_fail(s, "epx_alloc");
    }
    for (int i = 0; i < 3 && !failed; i++) {
        const uint64_t before = *s->group->shadow.windows;

        s->group->windows_others = before / HW_HINT_OTHERS % (HW_HINT_ROWS / HW_HINT_OTHERS);
        s->group->windows_quiet = 1000;
        failed = fixture_ht(s);
        if (!failed && *s->group->shadow.windows == before)
            failed = fixture_fail(s, "no rows passed through windows");
    }
    for (int i = 0; i < 3; i++)
        tensors[i]->data = plain[i];
    return failed;
}

static void test_windows_that_nobody_expects(void **state)
{
    epx_group_config config = config_of(0);

    (void)state;
    config.num_agents = 2;
    config.ht_node_bytes = 1;
    assert_int_equal(fixture_run(RANKS, &config, is_quiet, NULL), 0);
}

/* Nothing is sent, again and again, into ordinary memory, of which the host does not know. Then rank 0 has its tensors
 * in reach, and the others do not: it expects the steps of the others at once, and until they have none. */
static int expects_those_of_others(struct fixture *s)
{
    epx_tensor *const tensors[] = {&s->ht_rows, &s->ht_weights, &s->ht_idx};
    epx_dispatch_inputs in = s->in;
    void *plain[3];
    int failed = 0;

    in.topk_weights = &s->weights;
    for (int i = 0; i < FIXTURE_TOKENS * FIXTURE_TOPK; i++)
        tensor_set_int(&s->idx, i, -1);
    for (int i = 0; i < 40; i++)
        if (epx_handle_update(s->ht, &s->idx, NULL, NULL) != EPX_OK ||
            fixture_sync(s, epx_dispatch(s->ht, &in, &s->ht_out, NULL, NULL, NULL)) != EPX_OK)
            return fixture_fail(s, "a dispatch of nothing");
    for (int i = 0; i < 3; i++) {
        plain[i] = tensors[i]->data;
        if (s->rank == 0 && epx_alloc(s->group, 1 << 16, &tensors[i]->data) != EPX_OK)
            return fixture_fail(s, "epx_alloc");
    }
    for (int i = 0; i < 12 && !failed; i++) {
        failed = fixture_ht(s);
        if (!failed && s->rank == 0 && s->group->windows_quiet > 1)
            failed = fixture_fail(s, "steps of other ranks are not expected");
    }
    for (int i = 0; i < 3; i++)
        tensors[i]->data = plain[i];
    return failed;
}

static void test_windows_of_others_are_expected(void **state)
{
    epx_group_config config = config_of(0);

    (void)state;
    config.num_agents = 2;
    config.ht_node_bytes = 1;
    assert_int_equal(fixture_run(RANKS, &config, expects_those_of_others, NULL), 0);
}

/* ---- Rows that are taken where they are -------------------------------------------------------------------------- */

/* Results are in ordinary memory, and all tokens in the heap but those of rank `who`. The host expects that no rows
 * pass through windows, and launches no more than the steps of many tokens. */
static int is_not_wide(struct fixture *s)
{
    const int who = *(const int *)s->arg;
    void *plain = s->tokens.data;
    int failed = 0;

    if (s->rank != who && epx_alloc(s->group, 1 << 16, &s->tokens.data) != EPX_OK)
        return fixture_fail(s, "epx_alloc");
    for (int i = 0; i < 3 && !failed; i++) {
        const uint64_t before = *s->group->shadow.windows;

        s->group->windows_hinted = before;
        s->group->windows_with_rows = before / HW_HINT_ROWS;
        s->group->windows_wide = 1000;
        failed = fixture_ht_dispatch(s);
        if (!failed && *s->group->shadow.windows != before + HW_HINT + (who < RANKS ? HW_HINT_ROWS : 0))
            failed = fixture_fail(s, "rows passed through windows, or did not");
        if (!failed)
            failed = fixture_ht_combine(s);
    }
    s->tokens.data = plain;
    return failed;
}

static void test_windows_of_many_tokens(void **state)
{
    epx_group_config config = config_of(0);

    (void)state;
    config.num_agents = 2;
    config.ht_node_bytes = 1;
    for (int who = 0; who <= RANKS; who++)
        assert_int_equal(fixture_run(RANKS, &config, is_not_wide, &who), 0);
}

/* ---- Tokens in EPX's receive buffer, and so many scales that they have none ------------------------------------- */

enum { NARROW = 16, SCALES = 36 };

static uint8_t token_byte(int rank, int token, int i)
{
    return (uint8_t)(rank * 50 + token * 8 + i);
}

static int32_t scale_word(int rank, int token, int i)
{
    return (rank * 100 + token) * 1000 + i;
}

static int check_row(struct fixture *s, const uint8_t *tokens, const int32_t *scales, int rank, int token)
{
    for (int i = 0; i < NARROW; i++)
        if (tokens[i] != token_byte(rank, token, i))
            return fixture_fail(s, "a token in the receive buffer is not what was sent");
    for (int i = 0; i < SCALES; i++)
        if (scales[i] != scale_word(rank, token, i))
            return fixture_fail(s, "a scale is not what was sent");
    return 0;
}

static int long_scales(struct fixture *s)
{
    enum { B = FIXTURE_TOKENS, ROWS = RANKS * FIXTURE_M };
    static _Thread_local uint8_t x[B * NARROW];
    static _Thread_local int32_t words[B * SCALES], got[ROWS * SCALES], from[ROWS], token[ROWS];
    epx_tensor tokens = epx_tensor_make(x, EPX_FP8_E4M3, 2, B, NARROW, 0, 0);
    epx_tensor scales = epx_tensor_make(words, EPX_INT32, 2, B, SCALES, 0, 0);
    epx_tensor received, got_scales, src_rank, src_token;
    epx_dispatch_inputs in = EPX_DISPATCH_INPUTS_INIT;
    epx_dispatch_outputs out = EPX_DISPATCH_OUTPUTS_INIT;
    int64_t rows = 0;

    for (int t = 0; t < B; t++) {
        for (int i = 0; i < NARROW; i++)
            x[t * NARROW + i] = token_byte(s->rank, t, i);
        for (int i = 0; i < SCALES; i++)
            words[t * SCALES + i] = scale_word(s->rank, t, i);
    }
    fixture_refill(s);
    if (epx_handle_update(s->ht, &s->idx, NULL, NULL) != EPX_OK ||
        epx_handle_recv_count(s->ht, &rows, NULL) != EPX_OK ||
        epx_handle_recv_tensor(s->ht, EPX_RECV_TOKENS, EPX_FP8_E4M3, rows, NARROW, &received) != EPX_OK)
        return fixture_fail(s, "an update, and its receive tensor");
    got_scales = epx_tensor_make(got, EPX_INT32, 2, rows, SCALES, 0, 0);
    src_rank = epx_tensor_make(from, EPX_INT32, 1, rows, 0, 0, 0);
    src_token = epx_tensor_make(token, EPX_INT32, 1, rows, 0, 0, 0);
    in.tokens = &tokens;
    in.scales = &scales;
    out.tokens = &received;
    out.scales = &got_scales;
    out.src_rank = &src_rank;
    out.src_token = &src_token;
    if (fixture_sync(s, epx_dispatch(s->ht, &in, &out, NULL, NULL, NULL)) != EPX_OK)
        return fixture_fail(s, "epx_dispatch");
    for (int64_t row = 0; row < rows; row++)
        if (check_row(s, (uint8_t *)received.data + row * NARROW, got + row * SCALES, from[row], token[row]))
            return -1;
    return fixture_ht(s);
}

static void test_long_scales_beside_received_tokens(void **state)
{
    epx_group_config config = config_of(0);

    (void)state;
    assert_int_equal(fixture_run(RANKS, &config, long_scales, NULL), 0);
}

/* ---- A handle over memory that has a routing --------------------------------------------------------------------- */

static int counts_are(struct fixture *s, epx_handle *copy, const char *when)
{
    int64_t rows = -1, tokens = -1;
    int fits = -1;

    if (epx_handle_recv_count(copy, &rows, NULL) != EPX_OK || epx_handle_recv_tokens(copy, &tokens) != EPX_OK ||
        epx_handle_recv_fits(copy, &fits) != EPX_OK)
        return fixture_fail(s, when);
    return rows == FIXTURE_TOKENS && tokens == FIXTURE_TOKENS && fits == 1 ? 0 : fixture_fail(s, "other counts");
}

static void take_a_while(void *arg)
{
    (void)arg;
    pause_ns(200000000u);
}

/* The memory is looked at behind what is queued, and no longer than a caller wants to wait. */
static int polls_memory(struct fixture *s, epx_handle *copy)
{
    if (epx_stream_call(s->group, NULL, take_a_while, NULL) != EPX_OK ||
        epx_handle_recv_poll(copy, 1000) != EPX_ERR_NOT_READY)
        return fixture_fail(s, "a short wait behind slow work");
    return epx_handle_recv_poll(copy, 10000000u) == EPX_OK && epx_handle_recv_poll(copy, 0) == EPX_OK
               ? 0
               : fixture_fail(s, "a wait for the memory");
}

static int may_end; /* the work that is queued */

static void wait_for_word(void *arg)
{
    (void)arg;
    for (int i = 0; i < 60000 && !__atomic_load_n(&may_end, __ATOMIC_ACQUIRE); i++)
        pause_ns(1000000u);
}

struct aside {
    pthread_t thread;
    epx_handle *copy;
    epx_status status;
    int ended;
};

static void *count_aside(void *arg)
{
    struct aside *a = arg;
    int64_t rows = 0;

    a->status = epx_handle_recv_count(a->copy, &rows, NULL);
    __atomic_store_n(&a->ended, 1, __ATOMIC_RELEASE);
    return NULL;
}

static void *poll_aside(void *arg)
{
    struct aside *a = arg;

    a->status = epx_handle_recv_poll(a->copy, 5000000u);
    __atomic_store_n(&a->ended, 1, __ATOMIC_RELEASE);
    return NULL;
}

/* A thread that waits for work of the group, and what `other` makes of that. */
static int beside(struct fixture *s, epx_handle *copy, void *(*waits)(void *), int (*other)(struct fixture *, void *))
{
    struct aside a = {.copy = copy};
    int rc;

    __atomic_store_n(&may_end, 0, __ATOMIC_RELEASE);
    if (epx_stream_call(s->group, NULL, wait_for_word, NULL) != EPX_OK ||
        pthread_create(&a.thread, NULL, waits, &a) != 0) {
        __atomic_store_n(&may_end, 1, __ATOMIC_RELEASE);
        return fixture_fail(s, "work, and a thread that waits for it");
    }
    pause_ns(100000000u); /* it is inside by then, most often */
    rc = other(s, &a);
    __atomic_store_n(&may_end, 1, __ATOMIC_RELEASE);
    pthread_join(a.thread, NULL);
    return rc || a.status == EPX_OK ? rc : fixture_fail(s, "the other thread's wait");
}

static int polls_shortly(struct fixture *s, void *arg)
{
    const struct aside *a = arg;

    return epx_handle_recv_poll(a->copy, 1000) == EPX_ERR_NOT_READY ? 0 : fixture_fail(s, "a short wait");
}

static int issues(struct fixture *s, void *arg)
{
    const struct aside *a = arg;
    void *memory = NULL;

    if (epx_alloc(s->group, 64, &memory) != EPX_OK || epx_free(s->group, memory) != EPX_OK)
        return fixture_fail(s, "epx_alloc beside a poll");
    return __atomic_load_n(&a->ended, __ATOMIC_ACQUIRE) ? fixture_fail(s, "epx_alloc waited for a poll") : 0;
}

static int counts_over_memory(struct fixture *s)
{
    static char tables[1 << 20] __attribute__((aligned(16)));
    epx_handle_config config = fixture_handle_config(EPX_HIGH_THROUGHPUT, EPX_FLAT, FIXTURE_TOPK);
    epx_handle *first = NULL, *copy = NULL;
    epx_dispatch_inputs in = s->in;

    config.memory = tables;
    config.memory_bytes = sizeof(tables);
    in.topk_weights = &s->weights;
    fixture_refill(s);
    if (epx_handle_create(&first, s->group, &config) != EPX_OK ||
        epx_handle_create(&copy, s->group, &config) != EPX_OK ||
        epx_handle_recv_poll(copy, 10000000u) != EPX_ERR_USAGE || /* no routing yet */
        fixture_sync(s, epx_handle_update(first, &s->idx, NULL, NULL)) != EPX_OK)
        return fixture_fail(s, "two handles over one memory");
    if (polls_memory(s, copy) || counts_are(s, copy, "before a dispatch") ||
        beside(s, copy, count_aside, polls_shortly) || beside(s, copy, poll_aside, issues))
        return -1;
    if (fixture_sync(s, epx_dispatch(copy, &in, &s->ht_out, NULL, NULL, NULL)) != EPX_OK)
        return fixture_fail(s, "a dispatch");
    return polls_memory(s, copy) || counts_are(s, copy, "after a dispatch") || fixture_check_ht_dispatch(s) ? -1 : 0;
}

static void all_counts_are_those_in_the_memory(void **state)
{
    (void)state;
    assert_int_equal(fixture_run(1, NULL, counts_over_memory, NULL), 0);
}

enum { TABLE_BYTES = 1 << 20 };
static char updated[TABLE_BYTES] __attribute__((aligned(16))), copied[TABLE_BYTES] __attribute__((aligned(16)));

static void copy_late(void *arg)
{
    take_a_while(arg);
    memcpy(copied, updated, sizeof(copied));
}

/* The copy is no operation of the group: only the stream of the dispatch is behind it. */
static int dispatches_behind_a_copy(struct fixture *s)
{
    epx_handle_config config = fixture_handle_config(EPX_HIGH_THROUGHPUT, EPX_FLAT, FIXTURE_TOPK);
    epx_handle *first = NULL, *copy = NULL;
    epx_dispatch_inputs in = s->in;
    epx_stream stream = NULL;

    in.topk_weights = &s->weights;
    config.memory = updated;
    config.memory_bytes = TABLE_BYTES;
    fixture_refill(s);
    if (epx_handle_create(&first, s->group, &config) != EPX_OK ||
        fixture_sync(s, epx_handle_update(first, &s->idx, NULL, NULL)) != EPX_OK)
        return fixture_fail(s, "a handle over memory");
    config.memory = copied;
    if (epx_handle_create(&copy, s->group, &config) != EPX_OK || epx_stream_create(s->group, &stream) != EPX_OK ||
        epx_stream_call(s->group, stream, copy_late, NULL) != EPX_OK)
        return fixture_fail(s, "a copy on a stream");
    if (epx_dispatch(copy, &in, &s->ht_out, NULL, NULL, stream) != EPX_OK ||
        epx_stream_sync(s->group, stream) != EPX_OK)
        return fixture_fail(s, "a dispatch behind the copy");
    return fixture_check_ht_dispatch(s);
}

static void a_routing_may_be_copied_on_the_stream_of_the_dispatch(void **state)
{
    (void)state;
    assert_int_equal(fixture_run(1, NULL, dispatches_behind_a_copy, NULL), 0);
}

/* ---- Returned weights -------------------------------------------------------------------------------------------- */

/* s->arg: the layout and the order of sums. */
struct returned {
    epx_layout layout;
    uint32_t sum;
};

static int returns_zero(struct fixture *s)
{
    static _Thread_local uint16_t tokens[RANKS * FIXTURE_M * FIXTURE_TOPK][FIXTURE_HIDDEN];
    static _Thread_local float weights[RANKS * FIXTURE_M * FIXTURE_TOPK * FIXTURE_TOPK];
    const struct returned *how = s->arg;
    const int flat = how->layout == EPX_FLAT, rows = RANKS * FIXTURE_M * (flat ? 1 : FIXTURE_TOPK);
    const epx_handle_config config = fixture_handle_config(EPX_HIGH_THROUGHPUT, how->layout, FIXTURE_TOPK);
    epx_tensor received = epx_tensor_make(tokens, EPX_BF16, 2, rows, FIXTURE_HIDDEN, 0, 0);
    epx_tensor own = epx_tensor_make(weights, EPX_FP32, flat ? 2 : 1, rows, flat ? FIXTURE_TOPK : 0, 0, 0);
    float back[FIXTURE_TOKENS * FIXTURE_TOPK];
    epx_tensor returned = epx_tensor_make(back, EPX_FP32, 2, s->tokens.shape[0], FIXTURE_TOPK, 0, 0);
    epx_combine_config order = EPX_COMBINE_CONFIG_INIT;
    epx_dispatch_inputs in = s->in;
    epx_dispatch_outputs out = s->ht_out;
    epx_combine_inputs cin = s->ht_cin;
    epx_combine_outputs cout = s->cout;
    epx_handle *handle = NULL;
    int bad = 0;

    order.sum = how->sum;
    in.topk_weights = &s->weights;
    out.tokens = &received;
    out.topk_weights = &own;
    out.topk_idx = flat ? out.topk_idx : NULL;
    cin.tokens = &received;
    cin.topk_weights = &own;
    cout.topk_weights = &returned;
    fixture_refill(s);
    if (epx_handle_create(&handle, s->group, &config) != EPX_OK ||
        epx_handle_update(handle, &s->idx, NULL, NULL) != EPX_OK ||
        fixture_sync(s, epx_dispatch(handle, &in, &out, NULL, NULL, NULL)) != EPX_OK)
        return fixture_fail(s, "a dispatch");
    for (size_t i = 0; i < UNIT_COUNT(weights); i++)
        weights[i] = -0.0f;
    if (fixture_sync(s, epx_combine(handle, &cin, &cout, &order, NULL)) != EPX_OK)
        return fixture_fail(s, "a combine");
    for (int64_t i = 0; i < s->tokens.shape[0] * FIXTURE_TOPK; i++)
        bad |= back[i] != 0 || signbit(back[i]);
    return epx_handle_destroy(handle) != EPX_OK || bad ? fixture_fail(s, "a weight of -0 did not return as +0") : 0;
}

/* As sums do, in every layout, on one node and on several. */
static void a_weight_of_minus_zero_returns_as_zero(void **state)
{
    static const struct returned all[] = {
        {EPX_FLAT, 0}, {EPX_EXPERT_MAJOR, 0}, {EPX_FLAT, EPX_SUM_TOPK_ORDER}, {EPX_EXPERT_MAJOR, EPX_SUM_TOPK_ORDER}};

    (void)state;
    for (size_t i = 0; i < UNIT_COUNT(all); i++)
        for (int per_node = 0; per_node < 2; per_node++) {
            epx_group_config config = config_of(per_node);

            config.max_recv_tokens = RANKS * FIXTURE_M * FIXTURE_TOPK;
            assert_int_equal(fixture_run(RANKS, &config, returns_zero, (void *)(uintptr_t)&all[i]), 0);
        }
}

UNIT_TESTS(a_weight_of_minus_zero_returns_as_zero, all_counts_are_those_in_the_memory,
           a_routing_may_be_copied_on_the_stream_of_the_dispatch, test_in_a_node, test_between_nodes, test_queued,
           test_windows_that_nobody_expects, test_windows_of_others_are_expected, test_windows_of_many_tokens,
           test_long_scales_beside_received_tokens)
