/* SPDX-License-Identifier: Apache-2.0 */
/* Destroyed objects, calls in the wrong order, and more rows than there is room for. */
#include <time.h>

#include "tests/unit/misuse.h"
#include "tests/lib/slow.h"

/* ---- Destroyed objects, wrong order ------------------------------------------------------------------------------ */

static int destroyed(struct fixture *s)
{
    epx_handle_config config = fixture_handle_config(EPX_LOW_LATENCY, EPX_EXPERT_MAJOR, FIXTURE_TOPK);
    epx_handle *h;
    epx_event *event;
    void *p;

    ACCEPTED(epx_handle_create(&h, s->group, &config));
    ACCEPTED(epx_handle_destroy(h));
    REFUSED(epx_handle_destroy(h), EPX_ERR_ARGUMENT, "handle");
    REFUSED(epx_handle_update(h, &s->idx, NULL, NULL), EPX_ERR_ARGUMENT, "handle");
    REFUSED(epx_dispatch(h, &s->in, &s->ll_out, NULL, NULL, NULL), EPX_ERR_ARGUMENT, "handle");
    REFUSED(epx_combine(h, &s->ll_cin, &s->cout, NULL, NULL), EPX_ERR_ARGUMENT, "handle");
    REFUSED(epx_complete(h, NULL), EPX_ERR_ARGUMENT, "handle");
    ACCEPTED(epx_event_create(s->group, &event));
    ACCEPTED(epx_event_destroy(event));
    REFUSED(epx_event_sync(event), EPX_ERR_ARGUMENT, "event");
    ACCEPTED(epx_alloc(s->group, 100, &p));
    ACCEPTED(epx_free(s->group, p));
    REFUSED(epx_free(s->group, p), EPX_ERR_ARGUMENT, "epx_free");
    REFUSED(epx_free(s->group, &p), EPX_ERR_ARGUMENT, "epx_free");
    REFUSED(epx_group_query((epx_group *)(void *)s, &(epx_group_info)EPX_GROUP_INFO_INIT), EPX_ERR_ARGUMENT, "group");
    return 0;
}

static int wrong_order(struct fixture *s)
{
    epx_handle_config config = fixture_handle_config(EPX_LOW_LATENCY, EPX_EXPERT_MAJOR, FIXTURE_TOPK);
    epx_dispatch_config backward = EPX_DISPATCH_CONFIG_INIT;
    epx_handle *h;
    int64_t rows;

    ACCEPTED(epx_handle_create(&h, s->group, &config));
    REFUSED(epx_dispatch(h, &s->in, &s->ll_out, NULL, NULL, NULL), EPX_ERR_USAGE, "update");
    REFUSED(epx_combine(h, &s->ll_cin, &s->cout, NULL, NULL), EPX_ERR_USAGE, "update");
    ACCEPTED(epx_handle_update(h, &s->idx, NULL, NULL));
    REFUSED(epx_combine(h, &s->ll_cin, &s->cout, NULL, NULL), EPX_ERR_USAGE, "dispatch");
    REFUSED(epx_handle_recv_count(h, &rows, NULL), EPX_ERR_USAGE, "high-throughput");
    ACCEPTED(epx_complete(h, NULL));
    ACCEPTED(epx_handle_destroy(h));
    config.mode = EPX_HIGH_THROUGHPUT;
    ACCEPTED(epx_handle_create(&h, s->group, &config));
    REFUSED(epx_handle_recv_count(h, &rows, NULL), EPX_ERR_USAGE, "update");
    ACCEPTED(epx_handle_destroy(h));
    ACCEPTED(epx_handle_update(s->ll, &s->idx, NULL, NULL));
    backward.direction = EPX_BACKWARD;
    REFUSED(epx_dispatch(s->ll, &s->in, &s->ll_out, NULL, &backward, NULL), EPX_ERR_USAGE, "direction");
    backward.direction = 7;
    REFUSED(epx_dispatch(s->ht, &s->in, &s->ht_out, NULL, &backward, NULL), EPX_ERR_ARGUMENT, "direction", "7");
    REFUSED(epx_mask_query(s->group, (int32_t[8]){0}, NULL), EPX_ERR_USAGE, "enable_mask");
    REFUSED(epx_mask_update(s->group, (int32_t[8]){0}, NULL), EPX_ERR_USAGE, "enable_mask");
    return 0;
}

/* A refused dispatch that brings a routing: the one before, and the dispatch with it, stay the handle's. */
static int refused_with_a_routing(struct fixture *s)
{
    int64_t other[FIXTURE_TOPK] = {0, 1, 2};
    const epx_tensor idx = epx_tensor_make(other, EPX_INT64, 2, 1, FIXTURE_TOPK, 0, 0);
    epx_dispatch_inputs in = s->in;

    fixture_refill(s);
    in.topk_idx = &s->idx;
    ACCEPTED(epx_dispatch(s->ll, &in, &s->ll_out, &s->ll_info, NULL, NULL));
    ACCEPTED(epx_stream_sync(s->group, NULL));
    in.topk_idx = &idx;
    REFUSED(epx_dispatch(s->ll, &in, &s->ll_out, &s->ll_info, NULL, NULL), EPX_ERR_ARGUMENT, "inputs.tokens");
    if (fixture_check_ll_dispatch(s))
        return -1;
    ACCEPTED(epx_combine(s->ll, &s->ll_cin, &s->cout, NULL, NULL));
    ACCEPTED(epx_stream_sync(s->group, NULL));
    return fixture_check_ll_combine(s);
}

/* Two may be in flight; the third is refused, and works once one of them is complete. */
static int staged_too_often(struct fixture *s)
{
    epx_handle_config config = fixture_handle_config(EPX_LOW_LATENCY, EPX_EXPERT_MAJOR, FIXTURE_TOPK);
    epx_dispatch_config send_only = EPX_DISPATCH_CONFIG_INIT;
    epx_handle *h[3];

    send_only.send_only = 1;
    fixture_refill(s);
    for (int i = 0; i < 3; i++) {
        ACCEPTED(epx_handle_create(&h[i], s->group, &config));
        ACCEPTED(epx_handle_update(h[i], &s->idx, NULL, NULL));
    }
    ACCEPTED(epx_dispatch(h[0], &s->in, &s->ll_out, NULL, &send_only, NULL));
    REFUSED(epx_dispatch(h[0], &s->in, &s->ll_out, NULL, &send_only, NULL), EPX_ERR_USAGE, "epx_complete");
    ACCEPTED(epx_dispatch(h[1], &s->in, &s->ll_out, NULL, &send_only, NULL));
    REFUSED(epx_dispatch(h[2], &s->in, &s->ll_out, NULL, &send_only, NULL), EPX_ERR_BUSY, "max_inflight", "2");
    REFUSED(epx_handle_destroy(h[1]), EPX_ERR_USAGE, "epx_complete");
    ACCEPTED(epx_complete(h[0], NULL));
    ACCEPTED(epx_dispatch(h[2], &s->in, &s->ll_out, NULL, &send_only, NULL));
    ACCEPTED(epx_complete(h[1], NULL));
    ACCEPTED(epx_complete(h[2], NULL));
    ACCEPTED(epx_stream_sync(s->group, NULL));
    for (int i = 0; i < 3; i++)
        ACCEPTED(epx_handle_destroy(h[i]));
    return 0;
}

struct last_work {
    epx_group *group;
    epx_status inside;
    int done;
};

static void late_work(void *arg)
{
    struct last_work *work = arg;

    nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    work->inside = epx_group_destroy(work->group);
    work->done = 1;
}

/* Destroying waits for what streams still hold, and is refused to that work itself. */
static int last_work(struct fixture *s)
{
    struct last_work work = {.group = s->group};
    epx_stream stream;
    int rc;

    s->group = NULL; /* destroyed here */
    rc = epx_stream_create(work.group, &stream) != EPX_OK ||
         epx_stream_call(work.group, stream, late_work, &work) != EPX_OK;
    rc |= epx_group_destroy(work.group) != EPX_OK || !work.done || work.inside != EPX_ERR_USAGE;
    if (rc)
        snprintf(s->why, sizeof(s->why), "done %d, destroying inside: %s", work.done, epx_strerror(work.inside));
    return rc;
}

static void a_group_ends_after_its_streams(void **state)
{
    const epx_group_config config = fixture_config(20000);

    (void)state;
    assert_int_equal(fixture_group_run(1, &config, last_work, NULL), 0);
}

/* What one rank's handle says and the others' do not is found by the first operation that needs it, on all ranks. */
static int handles_differ(struct fixture *s, int32_t layout, const char *word)
{
    epx_handle_config config = fixture_handle_config(EPX_HIGH_THROUGHPUT, layout, FIXTURE_TOPK);
    epx_dispatch_outputs out = EPX_DISPATCH_OUTPUTS_INIT;
    epx_handle *h;
    epx_status status;

    if (layout == EPX_EXPERT_MAJOR)
        config.expert_alignment = s->rank == 1 ? 8 : 4;
    else
        config.flags = s->rank == 1 ? EPX_HANDLE_COMPACT_TOPK : 0;
    fixture_refill(s);
    out.tokens = &s->ht_rows;
    out.topk_idx = &s->ht_idx;
    ACCEPTED(epx_handle_create(&h, s->group, &config));
    status = epx_handle_update(h, &s->idx, NULL, NULL);
    if (status == EPX_OK && layout == EPX_FLAT)
        status = epx_dispatch(h, &s->in, &out, NULL, NULL, NULL);
    if (status == EPX_OK)
        status = epx_stream_sync(s->group, NULL);
    if (status != EPX_ERR_PEER && fixture_expect(s, "mismatch", status, EPX_ERR_MISMATCH, WORDS(word)))
        return -1;
    if (fixture_meet(s))
        return -1;
    ACCEPTED(epx_group_error_clear(s->group));
    ACCEPTED(epx_handle_destroy(h));
    return 0;
}

/* A row of up to 128 channels has one scale, of four bytes, in fp32 and as UE8M0. */
static int scales_differ(struct fixture *s, epx_handle *h, int low)
{
    const int64_t outer = low ? s->ll_rows.shape[0] : 1, rows = low ? s->ll_rows.shape[1] : s->ht_rows.shape[0];
    const epx_dtype dtype = s->rank == 1 ? EPX_INT32 : EPX_FP32;
    char *memory = malloc((size_t)(outer * rows) * (FIXTURE_HIDDEN + 4));
    char *scales = memory + (size_t)(outer * rows) * FIXTURE_HIDDEN;
    epx_tensor t = low ? epx_tensor_make(memory, EPX_FP8_E4M3, 3, outer, rows, FIXTURE_HIDDEN, 0)
                       : epx_tensor_make(memory, EPX_FP8_E4M3, 2, rows, FIXTURE_HIDDEN, 0, 0);
    epx_tensor by =
        low ? epx_tensor_make(scales, dtype, 3, outer, rows, 1, 0) : epx_tensor_make(scales, dtype, 2, rows, 1, 0, 0);
    epx_dispatch_outputs out = EPX_DISPATCH_OUTPUTS_INIT;
    epx_status status;

    _Static_assert(FIXTURE_HIDDEN <= 128, "one scale");
    if (!memory)
        return -1;
    fixture_refill(s);
    out.tokens = &t;
    out.scales = &by;
    ACCEPTED(epx_handle_update(h, &s->idx, NULL, NULL));
    status = epx_dispatch(h, &s->in, &out, NULL, NULL, NULL);
    if (status == EPX_OK)
        status = epx_stream_sync(s->group, NULL);
    if (status != EPX_ERR_PEER && fixture_expect(s, "mismatch", status, EPX_ERR_MISMATCH, WORDS("int32 scales")))
        return -1;
    if (fixture_meet(s))
        return -1;
    ACCEPTED(epx_group_error_clear(s->group));
    free(memory);
    return 0;
}

/* Rank 1 does not ask for the weights that the others ask for. */
static int different_weights(struct fixture *s)
{
    epx_handle_config config = fixture_handle_config(EPX_HIGH_THROUGHPUT, EPX_FLAT, FIXTURE_TOPK);
    epx_dispatch_outputs out = EPX_DISPATCH_OUTPUTS_INIT;
    epx_dispatch_inputs in = s->in;
    const int with = s->rank != 1;
    epx_handle *h;
    epx_status status;

    fixture_refill(s);
    out.tokens = &s->ht_rows;
    out.topk_weights = with ? &s->ht_weights : NULL;
    in.topk_weights = &s->weights;
    ACCEPTED(epx_handle_create(&h, s->group, &config));
    ACCEPTED(epx_handle_update(h, &s->idx, NULL, NULL));
    status = epx_dispatch(h, &in, &out, NULL, NULL, NULL);
    if (status == EPX_OK)
        status = epx_stream_sync(s->group, NULL);
    if (status != EPX_ERR_PEER &&
        fixture_expect(s, "mismatch", status, EPX_ERR_MISMATCH,
                       with ? WORDS("rank 1 has topk_weights = 0", "this rank has 1 (1 = with, 0 = without)")
                            : WORDS("has topk_weights = 1", "this rank has 0 (1 = with")))
        return -1;
    if (fixture_meet(s))
        return -1;
    ACCEPTED(epx_group_error_clear(s->group));
    ACCEPTED(epx_handle_destroy(h));
    return 0;
}

static int different_scales(struct fixture *s)
{
    return scales_differ(s, s->ll, 1) || scales_differ(s, s->ht, 0);
}

static int different_handles(struct fixture *s)
{
    return handles_differ(s, EPX_EXPERT_MAJOR, "expert_alignment") || handles_differ(s, EPX_FLAT, "compact");
}

/* ---- Overflow ---------------------------------------------------------------------------------------------------- */

/* Rank 0 has room for one row too few. It learns so, at once (then it sends nothing, and the others' wait for it ends
 * at their deadline) or when the operation runs; its memory behind the tensor stays. */
static int small_tensor(struct fixture *s, int in_epx_alloc)
{
    int64_t rows = s->ht_recv.total - (s->rank == 0), need = s->ht_recv.total;
    size_t row_bytes = FIXTURE_HIDDEN * 2, bytes = (size_t)(need + 2) * row_bytes;
    epx_dispatch_outputs out = EPX_DISPATCH_OUTPUTS_INIT;
    epx_tensor t;
    epx_status status;
    char words[24];
    struct mismatch m;
    void *memory = NULL;

    if (in_epx_alloc)
        ACCEPTED(epx_alloc(s->group, bytes, &memory));
    else if (!(memory = malloc(bytes)))
        return -1;
    memset(memory, 0x77, bytes);
    snprintf(words, sizeof(words), "%lld", (long long)need);
    t = epx_tensor_make(memory, EPX_BF16, 2, rows, FIXTURE_HIDDEN, 0, 0);
    out.tokens = &t;
    fixture_refill(s);
    ACCEPTED(epx_handle_update(s->ht, &s->idx, NULL, NULL));
    status = epx_dispatch(s->ht, &s->in, &out, NULL, NULL, NULL);
    if (status == EPX_OK)
        status = epx_stream_sync(s->group, NULL);
    if (s->rank == 0 && fixture_expect(s, "dispatch", status, EPX_ERR_OVERFLOW, WORDS(words)))
        return -1;
    if (s->rank != 0 && status != EPX_OK && status != EPX_ERR_PEER && status != EPX_ERR_TIMEOUT)
        return fixture_expect(s, "dispatch", status, EPX_OK, NULL);
    if (compare_fill("behind the small tensor", 0, (char *)memory + (size_t)rows * row_bytes,
                     bytes - (size_t)rows * row_bytes, 0x77, &m)) {
        snprintf(s->why, sizeof(s->why), "%s", m.text);
        return -1;
    }
    if (in_epx_alloc)
        ACCEPTED(epx_free(s->group, memory));
    else
        free(memory);
    if (fixture_meet(s))
        return -1;
    ACCEPTED(epx_group_error_clear(s->group));
    return 0;
}

static int overflow(struct fixture *s)
{
    return small_tensor(s, 0) || small_tensor(s, 1);
}

/* A rank that cannot take part says so: the others, which wait for it, do not wait until their deadline. */
static int cannot_take_part(struct fixture *s)
{
    static const char *const words[] = {"rank 0 failed", "too small", NULL};
    const time_t begin = time(NULL);
    epx_status status = EPX_OK;

    fixture_refill(s);
    if (fixture_meet(s)) /* the abort ends what others have not finished, too */
        return -1;
    if (s->rank == 0)
        ACCEPTED(epx_group_abort(s->group, EPX_ERR_OVERFLOW));
    else
        status = epx_handle_update(s->ht, &s->idx, NULL, NULL);
    if (status == EPX_OK)
        status = epx_stream_sync(s->group, NULL);
    if (fixture_expect(s, "abort", status, EPX_ERR_PEER, s->rank ? words : WORDS("this rank failed")) ||
        fixture_meet(s))
        return -1;
    if (time(NULL) - begin > 60)
        return fixture_fail(s, "an abort that took a minute");
    REFUSED(epx_handle_update(s->ht, &s->idx, NULL, NULL), EPX_ERR_PEER, "epx_group_error_clear");
    ACCEPTED(epx_group_error_clear(s->group));
    return fixture_ht(s);
}

/* Receives in memory from epx_alloc more rows than max_recv_tokens, which is allowed, and returns results from ordinary
 * memory, which is not: they pass through EPX's own rows. With `known` the update has finished and the call says so. */
static int return_too_many(struct fixture *s, int known)
{
    epx_dispatch_outputs out = EPX_DISPATCH_OUTPUTS_INIT;
    epx_tensor in_heap = s->ht_rows;
    epx_status status;
    int failed;
    char need[24];

    snprintf(need, sizeof(need), "%lld", (long long)s->ht_recv.total);
    out.tokens = &in_heap;
    fixture_refill(s);
    ACCEPTED(epx_alloc(s->group, (size_t)tensor_rows(&in_heap) * FIXTURE_HIDDEN * 2, &in_heap.data));
    ACCEPTED(epx_handle_update(s->ht, &s->idx, NULL, NULL));
    ACCEPTED(epx_dispatch(s->ht, &s->in, &out, NULL, NULL, NULL));
    if (known)
        ACCEPTED(epx_stream_sync(s->group, NULL));
    status = epx_combine(s->ht, &s->ht_cin, &s->cout, NULL, NULL);
    if (status == EPX_OK)
        status = epx_stream_sync(s->group, NULL);
    if (!known && status == EPX_ERR_PEER) /* the other rank has too many too, and was first */
        failed = fixture_expect(s, "combine", status, EPX_ERR_PEER, WORDS("receive tensor is too small"));
    else
        failed = fixture_expect(s, "combine", status, EPX_ERR_OVERFLOW, WORDS(need, "max_recv_tokens"));
    if (failed || fixture_meet(s))
        return -1;
    ACCEPTED(epx_group_error_clear(s->group));
    ACCEPTED(epx_free(s->group, in_heap.data));
    return 0;
}

static int return_too_many_rank(int rank, int n, epx_bootstrap *boot, void *arg)
{
    epx_group_config config = fixture_config(slow_ms(DEADLINE_MS));
    struct fixture s;
    int rc;

    config.max_recv_tokens = 2;
    rc = fixture_open(&s, rank, n, boot, &config) || return_too_many(&s, *(int *)arg) || fixture_ll(&s);
    if (rc)
        fprintf(stderr, "rank %d: %s\n", rank, s.why);
    fixture_close(&s);
    return rc;
}

static void more_rows_than_can_return_overflow(void **state)
{
    (void)state;
    assert_int_equal(run_ranks(2, return_too_many_rank, &(int){1}), 0);
    assert_int_equal(run_ranks(2, return_too_many_rank, &(int){0}), 0);
}

static int too_much_memory(struct fixture *s)
{
    epx_tensor t;
    void *p;

    REFUSED(epx_alloc(s->group, (size_t)1 << 40, &p), EPX_ERR_MEMORY, "1099511627776");
    REFUSED(epx_handle_recv_tensor(s->ht, EPX_RECV_TOKENS, EPX_BF16, 1 << 20, FIXTURE_HIDDEN, &t), EPX_ERR_OVERFLOW,
            "max_recv_tokens", "1048576");
    REFUSED(epx_handle_recv_tensor(s->ht, EPX_RECV_TOKENS, EPX_BF16, 1, FIXTURE_HIDDEN + 8, &t), EPX_ERR_ARGUMENT,
            "88");
    REFUSED(epx_handle_recv_tensor(s->ll, EPX_RECV_TOKENS, EPX_BF16, 1, FIXTURE_HIDDEN, &t), EPX_ERR_USAGE,
            "high-throughput");
    return 0;
}

UNIT_MAIN(MISUSE("destroyed_objects_are_refused", 2, destroyed),
          MISUSE("calls_in_the_wrong_order_are_refused", 2, wrong_order),
          MISUSE("a_refused_dispatch_leaves_the_routing", 2, refused_with_a_routing),
          MISUSE("too_many_staged_operations_are_refused", 2, staged_too_often),
          cmocka_unit_test(a_group_ends_after_its_streams),
          MISUSE("handles_that_differ_are_found", 3, different_handles),
          MISUSE("scales_that_differ_are_found", 3, different_scales),
          MISUSE("weights_that_differ_are_found", 3, different_weights),
          MISUSE("too_small_receive_tensors_overflow_safely", 3, overflow),
          MISUSE("a_rank_that_cannot_take_part_says_so", 3, cannot_take_part),
          cmocka_unit_test(more_rows_than_can_return_overflow),
          MISUSE("too_much_memory_is_refused", 2, too_much_memory))
