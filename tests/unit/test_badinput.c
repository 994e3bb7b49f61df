/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Bad input: every refused call says what was expected and what was given, sends nothing, and leaves the group as it
 * was: each test ends with good operations on the same group.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "net/net.h"
#include "tests/lib/fixture.h"
#include "tests/lib/thread_boot.h"

#define WORDS(...) ((const char *const[]){__VA_ARGS__, NULL})
/* In a function with a `struct fixture *s`: the call must fail with `status` and say all the words. */
#define REFUSED(call, status, ...)                                          \
    do {                                                                    \
        if (fixture_expect(s, #call, (call), (status), WORDS(__VA_ARGS__))) \
            return -1;                                                      \
    } while (0)
#define ACCEPTED(call) REFUSED(call, EPX_OK, "")

typedef int (*misuse_fn)(struct fixture *s);

/* Only the overflow makes anyone wait; see small_tensor(). */
enum { DEADLINE_MS = 3000 };

/* On every rank: a good round, the misuse, good rounds of both modes. */
static int misuse_rank(int rank, int n, epx_bootstrap *boot, void *arg)
{
    struct fixture *s = malloc(sizeof(*s));
    misuse_fn misuse = *(misuse_fn *)arg;
    epx_group_config config;
    int rc;

    if (!s)
        return -1;
    config = fixture_config(DEADLINE_MS);
    rc = fixture_open(s, rank, n, boot, &config);
    if (!rc)
        rc = fixture_ll(s) || fixture_ht(s) || misuse(s);
    if (!rc && (fixture_ll(s) || fixture_ht(s))) {
        fprintf(stderr, "after the misuse, ");
        rc = -1;
    }
    if (rc)
        fprintf(stderr, "rank %d: %s\n", rank, s->why);
    fixture_close(s);
    free(s);
    return rc ? -1 : 0;
}

static void misuse_on(int nranks, misuse_fn misuse)
{
    assert_int_equal(run_ranks(nranks, misuse_rank, &misuse), 0);
}

/* ---- Null pointers and structs -------------------------------------------------------------------------------------- */

static int null_pointers(struct fixture *s)
{
    epx_handle_config config = EPX_HANDLE_CONFIG_INIT;
    epx_handle *handle;
    epx_event *event = NULL;
    epx_tensor t;
    int64_t rows;
    size_t bytes;
    int in_place;
    void *p;

    REFUSED(epx_handle_create(NULL, s->group, &config), EPX_ERR_ARGUMENT, "NULL");
    REFUSED(epx_handle_create(&handle, NULL, &config), EPX_ERR_ARGUMENT, "group", "NULL");
    REFUSED(epx_handle_create(&handle, s->group, NULL), EPX_ERR_ARGUMENT, "NULL");
    REFUSED(epx_handle_update(NULL, &s->idx, NULL, NULL), EPX_ERR_ARGUMENT, "handle", "NULL");
    REFUSED(epx_handle_update(s->ll, NULL, NULL, NULL), EPX_ERR_ARGUMENT, "topk_idx", "NULL");
    REFUSED(epx_handle_memory(s->group, NULL, &bytes), EPX_ERR_ARGUMENT, "NULL");
    REFUSED(epx_handle_recv_count(s->ht, NULL, NULL), EPX_ERR_ARGUMENT, "rows", "NULL");
    REFUSED(epx_handle_recv_count(NULL, &rows, NULL), EPX_ERR_ARGUMENT, "handle", "NULL");
    REFUSED(epx_handle_recv_tensor(s->ht, EPX_RECV_TOKENS, EPX_BF16, 1, 8, NULL), EPX_ERR_ARGUMENT, "NULL");
    REFUSED(epx_handle_recv_tensor(NULL, EPX_RECV_TOKENS, EPX_BF16, 1, 8, &t), EPX_ERR_ARGUMENT, "NULL");
    REFUSED(epx_dispatch(NULL, &s->in, &s->ll_out, NULL, NULL, NULL), EPX_ERR_ARGUMENT, "handle", "NULL");
    REFUSED(epx_dispatch(s->ll, NULL, &s->ll_out, NULL, NULL, NULL), EPX_ERR_ARGUMENT, "NULL");
    REFUSED(epx_dispatch(s->ll, &s->in, NULL, NULL, NULL, NULL), EPX_ERR_ARGUMENT, "NULL");
    REFUSED(epx_combine(NULL, &s->ll_cin, &s->cout, NULL, NULL), EPX_ERR_ARGUMENT, "handle", "NULL");
    REFUSED(epx_combine(s->ll, NULL, &s->cout, NULL, NULL), EPX_ERR_ARGUMENT, "NULL");
    REFUSED(epx_combine(s->ll, &s->ll_cin, NULL, NULL, NULL), EPX_ERR_ARGUMENT, "NULL");
    REFUSED(epx_complete(NULL, NULL), EPX_ERR_ARGUMENT, "handle", "NULL");
    REFUSED(epx_alloc(s->group, 16, NULL), EPX_ERR_ARGUMENT, "NULL");
    REFUSED(epx_alloc(NULL, 16, &p), EPX_ERR_ARGUMENT, "NULL");
    REFUSED(epx_register(NULL, s->tokens.data, 16, NULL, &in_place), EPX_ERR_ARGUMENT, "NULL");
    REFUSED(epx_register(s->group, NULL, 16, NULL, &in_place), EPX_ERR_ARGUMENT, "epx_register: data");
    REFUSED(epx_register(s->group, s->tokens.data, 16, NULL, NULL), EPX_ERR_ARGUMENT, "epx_register: in_place");
    REFUSED(epx_register(s->group, s->tokens.data, 16, (epx_stream)s, &in_place), EPX_ERR_ARGUMENT, "stream");
    REFUSED(epx_stream_create(s->group, NULL), EPX_ERR_ARGUMENT, "NULL");
    REFUSED(epx_stream_call(s->group, NULL, NULL, NULL), EPX_ERR_ARGUMENT, "NULL");
    REFUSED(epx_event_create(s->group, NULL), EPX_ERR_ARGUMENT, "NULL");
    REFUSED(epx_event_create(NULL, &event), EPX_ERR_ARGUMENT, "NULL");
    REFUSED(epx_event_record(NULL, NULL), EPX_ERR_ARGUMENT, "NULL");
    REFUSED(epx_event_sync(NULL), EPX_ERR_ARGUMENT, "NULL");
    REFUSED(epx_event_destroy(NULL), EPX_ERR_ARGUMENT, "NULL");
    REFUSED(epx_group_query(s->group, NULL), EPX_ERR_ARGUMENT, "NULL");
    REFUSED(epx_group_stats(s->group, NULL), EPX_ERR_ARGUMENT, "NULL");
    REFUSED(epx_group_error_clear(NULL), EPX_ERR_ARGUMENT, "NULL");
    REFUSED(epx_group_destroy(NULL), EPX_ERR_ARGUMENT, "NULL");
    REFUSED(epx_version(NULL), EPX_ERR_ARGUMENT, "NULL");
    return 0;
}

static void null_pointers_are_refused(void **state)
{
    (void)state;
    misuse_on(2, null_pointers);
}

static int struct_sizes(struct fixture *s)
{
    epx_dispatch_inputs in = s->in;
    epx_dispatch_outputs out = s->ll_out;
    epx_combine_inputs cin = s->ll_cin;
    epx_combine_outputs cout = s->cout;
    epx_handle_config config = EPX_HANDLE_CONFIG_INIT;
    epx_group_info info = EPX_GROUP_INFO_INIT;
    epx_tensor idx = s->idx;
    epx_handle *handle;

    in.size = 0;
    REFUSED(epx_dispatch(s->ll, &in, &s->ll_out, NULL, NULL, NULL), EPX_ERR_ARGUMENT, "size", "0");
    out.size = 3;
    REFUSED(epx_dispatch(s->ll, &s->in, &out, NULL, NULL, NULL), EPX_ERR_ARGUMENT, "size", "3");
    cin.size = 0;
    REFUSED(epx_combine(s->ll, &cin, &s->cout, NULL, NULL), EPX_ERR_ARGUMENT, "size", "0");
    cout.size = 0;
    REFUSED(epx_combine(s->ll, &s->ll_cin, &cout, NULL, NULL), EPX_ERR_ARGUMENT, "size", "0");
    config.size = 0;
    REFUSED(epx_handle_create(&handle, s->group, &config), EPX_ERR_ARGUMENT, "size", "0");
    info.size = 0;
    REFUSED(epx_group_query(s->group, &info), EPX_ERR_ARGUMENT, "size", "0");
    idx.size = 0;
    REFUSED(epx_handle_update(s->ll, &idx, NULL, NULL), EPX_ERR_ARGUMENT, "topk_idx", "size");
    return 0;
}

/* Every size but that of the header, those of its older versions, and larger ones with zeros at the end. */
static int cut_and_garbage_sizes(struct fixture *s)
{
    union {
        epx_layout_info info;
        char bytes[8192];
    } given;
    union {
        epx_stats stats;
        char bytes[8192];
    } asked;
    const uint32_t old_info = offsetof(epx_layout_info, rank_matrix), old_stats = offsetof(epx_stats, net_stuck);
    uint64_t kept;

    for (uint32_t i = 0; i < 256 + 6; i++) {
        static const uint32_t large[] = {4092, 4093, 4096, 4100, 65536, UINT32_MAX};
        const uint32_t size = i < 256 ? i : large[i - 256];
        const int good = size == old_info || (size >= sizeof(epx_layout_info) && size <= 4096 && size % 4 == 0);

        memset(&given, 0, sizeof(given));
        given.info.size = size;
        if (good)
            ACCEPTED(epx_handle_update(s->ht, &s->idx, &given.info, NULL));
        else
            REFUSED(epx_handle_update(s->ht, &s->idx, &given.info, NULL), EPX_ERR_ARGUMENT, "epx_layout_info.size");
    }
    ACCEPTED(epx_stream_sync(s->group, NULL));
    memset(&asked, 0, sizeof(asked));
    asked.stats.size = old_stats;
    asked.stats.net_stuck = kept = 0x1234567812345678;
    ACCEPTED(epx_group_stats(s->group, &asked.stats));
    if (asked.stats.net_stuck != kept || !asked.stats.ht_updates)
        return fixture_fail(s, "expected only the fields that an older caller knows to be written");
    asked.stats.size = old_stats - 4;
    REFUSED(epx_group_stats(s->group, &asked.stats), EPX_ERR_ARGUMENT, "epx_stats.size");
    asked.stats.size = 2048;
    asked.bytes[2047] = 1; /* not a struct that a macro has initialised: nothing is written into it */
    REFUSED(epx_group_stats(s->group, &asked.stats), EPX_ERR_ARGUMENT, "epx_stats", "2047");
    return asked.bytes[2047] == 1 ? 0 : fixture_fail(s, "expected the caller's memory to be unchanged");
}

static void sizes_that_cut_a_field_are_refused(void **state)
{
    (void)state;
    misuse_on(2, cut_and_garbage_sizes);
}

static void wrong_struct_sizes_are_refused(void **state)
{
    (void)state;
    misuse_on(2, struct_sizes);
}

/* A caller from the future: what this library does not know must be zero. */
static int future_structs(struct fixture *s)
{
    struct {
        epx_handle_config known;
        uint64_t unknown;
    } future = {.known = EPX_HANDLE_CONFIG_INIT};
    epx_handle *handle = NULL;

    future.known.size = sizeof(future);
    future.known.mode = EPX_LOW_LATENCY;
    future.known.layout = EPX_EXPERT_MAJOR;
    future.known.topk = FIXTURE_TOPK;
    ACCEPTED(epx_handle_create(&handle, s->group, &future.known));
    ACCEPTED(epx_handle_destroy(handle));
    future.unknown = 1;
    REFUSED(epx_handle_create(&handle, s->group, &future.known), EPX_ERR_ARGUMENT, "epx_handle_config");
    return 0;
}

static void unknown_fields_must_be_zero(void **state)
{
    (void)state;
    misuse_on(2, future_structs);
}

/* ---- Tensors ----------------------------------------------------------------------------------------------------------- */

static int wrong_tensors_ll(struct fixture *s)
{
    epx_dispatch_inputs in = s->in;
    epx_dispatch_outputs out = s->ll_out;
    epx_layout_info info = s->ll_info;
    epx_tensor idx = s->idx, tokens = s->tokens, rows = s->ll_rows, counts = s->ll_counts;

    idx.dtype = EPX_FP32;
    REFUSED(epx_handle_update(s->ll, &idx, NULL, NULL), EPX_ERR_ARGUMENT, "topk_idx", "int32 or int64", "fp32");
    idx = s->idx;
    idx.shape[1] = 2;
    REFUSED(epx_handle_update(s->ll, &idx, NULL, NULL), EPX_ERR_ARGUMENT, "topk_idx", "3", "2");
    idx = s->idx;
    idx.shape[0] = FIXTURE_M + 1;
    REFUSED(epx_handle_update(s->ll, &idx, NULL, NULL), EPX_ERR_ARGUMENT, "topk_idx", "6", "7");
    in.topk_idx = &idx;
    REFUSED(epx_dispatch(s->ll, &in, &out, &info, NULL, NULL), EPX_ERR_ARGUMENT, "inputs.topk_idx", "6", "7");
    in.topk_idx = NULL;
    idx = s->idx;
    idx.ndim = 1;
    REFUSED(epx_handle_update(s->ll, &idx, NULL, NULL), EPX_ERR_ARGUMENT, "topk_idx");
    idx.ndim = 9;
    REFUSED(epx_handle_update(s->ll, &idx, NULL, NULL), EPX_ERR_ARGUMENT, "topk_idx", "9");
    idx = s->idx;
    idx.data = NULL;
    REFUSED(epx_handle_update(s->ll, &idx, NULL, NULL), EPX_ERR_ARGUMENT, "topk_idx", "NULL");
    ACCEPTED(epx_handle_update(s->ll, &s->idx, NULL, NULL));

    in.tokens = NULL;
    REFUSED(epx_dispatch(s->ll, &in, &s->ll_out, NULL, NULL, NULL), EPX_ERR_ARGUMENT, "tokens", "NULL");
    in.tokens = &tokens;
    tokens.shape[0] = FIXTURE_TOKENS - 1;
    REFUSED(epx_dispatch(s->ll, &in, &s->ll_out, NULL, NULL, NULL), EPX_ERR_ARGUMENT, "tokens", "5", "4");
    tokens = s->tokens;
    tokens.shape[1] = FIXTURE_HIDDEN - 1;
    REFUSED(epx_dispatch(s->ll, &in, &s->ll_out, NULL, NULL, NULL), EPX_ERR_ARGUMENT, "tokens");
    tokens.shape[1] = FIXTURE_HIDDEN + 8;
    REFUSED(epx_dispatch(s->ll, &in, &s->ll_out, NULL, NULL, NULL), EPX_ERR_ARGUMENT, "160", "176");
    tokens = s->tokens;
    tokens.dtype = EPX_INT64;
    REFUSED(epx_dispatch(s->ll, &in, &s->ll_out, NULL, NULL, NULL), EPX_ERR_ARGUMENT, "tokens", "int64");
    tokens = s->tokens;
    tokens.dtype = 77;
    REFUSED(epx_dispatch(s->ll, &in, &s->ll_out, NULL, NULL, NULL), EPX_ERR_ARGUMENT, "tokens", "77");
    tokens = s->tokens;
    tokens.dtype = EPX_FP8_E4M3;
    REFUSED(epx_dispatch(s->ll, &in, &s->ll_out, NULL, NULL, NULL), EPX_ERR_ARGUMENT, "scales");
    tokens = s->tokens;
    tokens.data = NULL;
    REFUSED(epx_dispatch(s->ll, &in, &s->ll_out, NULL, NULL, NULL), EPX_ERR_ARGUMENT, "tokens", "NULL");
    tokens = s->tokens;
    tokens.stride[0] = 1;
    tokens.stride[1] = FIXTURE_TOKENS;
    REFUSED(epx_dispatch(s->ll, &in, &s->ll_out, NULL, NULL, NULL), EPX_ERR_ARGUMENT, "tokens", "contiguous");
    tokens.stride[0] = INT64_MAX;
    tokens.stride[1] = 1;
    REFUSED(epx_dispatch(s->ll, &in, &s->ll_out, NULL, NULL, NULL), EPX_ERR_ARGUMENT, "tokens", "63 bits");
    tokens.stride[0] = INT64_MIN;
    REFUSED(epx_dispatch(s->ll, &in, &s->ll_out, NULL, NULL, NULL), EPX_ERR_ARGUMENT, "tokens", "positive");

    rows.shape[1] = rows.shape[2] = INT32_MAX;
    rows.dtype = s->tokens.dtype;
    out.tokens = &rows;
    REFUSED(epx_dispatch(s->ll, &s->in, &out, NULL, NULL, NULL), EPX_ERR_ARGUMENT, "tokens");
    rows = s->ll_rows;
    out.tokens = NULL;
    REFUSED(epx_dispatch(s->ll, &s->in, &out, NULL, NULL, NULL), EPX_ERR_ARGUMENT, "tokens", "NULL");
    out.tokens = &rows;
    rows.dtype = EPX_FP16;
    REFUSED(epx_dispatch(s->ll, &s->in, &out, NULL, NULL, NULL), EPX_ERR_ARGUMENT, "tokens", "bf16", "fp16");
    rows = s->ll_rows;
    rows.shape[0]++;
    REFUSED(epx_dispatch(s->ll, &s->in, &out, NULL, NULL, NULL), EPX_ERR_ARGUMENT, "tokens");
    rows = s->ll_rows;
    rows.ndim = 2;
    REFUSED(epx_dispatch(s->ll, &s->in, &out, NULL, NULL, NULL), EPX_ERR_ARGUMENT, "tokens");
    rows = s->ll_rows;
    rows.dtype = EPX_FP8_E4M3;
    REFUSED(epx_dispatch(s->ll, &s->in, &out, NULL, NULL, NULL), EPX_ERR_ARGUMENT, "scales");

    info.expert_counts = &counts;
    counts.shape[0]++;
    REFUSED(epx_dispatch(s->ll, &s->in, &s->ll_out, &info, NULL, NULL), EPX_ERR_ARGUMENT, "expert_counts");
    counts = s->ll_counts;
    counts.dtype = EPX_FP32;
    REFUSED(epx_dispatch(s->ll, &s->in, &s->ll_out, &info, NULL, NULL), EPX_ERR_ARGUMENT, "expert_counts", "fp32");
    return 0;
}

static void wrong_low_latency_tensors_are_refused(void **state)
{
    (void)state;
    misuse_on(2, wrong_tensors_ll);
}

static int wrong_tensors_ht(struct fixture *s)
{
    epx_dispatch_inputs in = s->in;
    epx_dispatch_outputs out = s->ht_out;
    epx_tensor weights = s->weights, rows = s->ht_rows, idx = s->ht_idx, row_weights = s->ht_weights;

    /* The routing of the good round before still stands. */
    REFUSED(epx_dispatch(s->ht, &s->in, &s->ht_out, NULL, NULL, NULL), EPX_ERR_ARGUMENT, "topk_weights");
    in.topk_weights = &weights;
    weights.dtype = EPX_BF16;
    REFUSED(epx_dispatch(s->ht, &in, &s->ht_out, NULL, NULL, NULL), EPX_ERR_ARGUMENT, "topk_weights", "fp32", "bf16");
    weights = s->weights;
    weights.shape[1]--;
    REFUSED(epx_dispatch(s->ht, &in, &s->ht_out, NULL, NULL, NULL), EPX_ERR_ARGUMENT, "topk_weights");
    weights = s->weights;
    out.topk_idx = &idx;
    idx.dtype = EPX_BF16;
    REFUSED(epx_dispatch(s->ht, &in, &out, NULL, NULL, NULL), EPX_ERR_ARGUMENT, "topk_idx", "bf16");
    idx = s->ht_idx;
    idx.shape[0]--;
    REFUSED(epx_dispatch(s->ht, &in, &out, NULL, NULL, NULL), EPX_ERR_ARGUMENT, "topk_idx");
    out = s->ht_out;
    out.topk_weights = &row_weights;
    row_weights.shape[0]--;
    REFUSED(epx_dispatch(s->ht, &in, &out, NULL, NULL, NULL), EPX_ERR_ARGUMENT, "topk_weights");
    out = s->ht_out;
    out.tokens = &rows;
    rows.shape[1] -= 8;
    REFUSED(epx_dispatch(s->ht, &in, &out, NULL, NULL, NULL), EPX_ERR_ARGUMENT, "tokens", "80", "72");
    rows = s->ht_rows;
    rows.ndim = 3;
    REFUSED(epx_dispatch(s->ht, &in, &out, NULL, NULL, NULL), EPX_ERR_ARGUMENT, "tokens");
    return 0;
}

static void wrong_high_throughput_tensors_are_refused(void **state)
{
    (void)state;
    misuse_on(2, wrong_tensors_ht);
}

static int wrong_combines(struct fixture *s)
{
    epx_combine_inputs in = s->ll_cin;
    epx_combine_outputs out = s->cout;
    epx_combine_config config = EPX_COMBINE_CONFIG_INIT;
    epx_tensor tokens = s->ll_rows, combined = s->combined, bias = s->combined;

    in.tokens = NULL;
    REFUSED(epx_combine(s->ll, &in, &s->cout, NULL, NULL), EPX_ERR_ARGUMENT, "tokens", "NULL");
    in.tokens = &tokens;
    tokens.dtype = EPX_FP8_E4M3;
    REFUSED(epx_combine(s->ll, &in, &s->cout, NULL, NULL), EPX_ERR_ARGUMENT, "tokens", "fp8");
    tokens = s->ll_rows;
    tokens.shape[1]--;
    REFUSED(epx_combine(s->ll, &in, &s->cout, NULL, NULL), EPX_ERR_OVERFLOW, "tokens", "12", "11");
    in = s->ll_cin;
    in.topk_weights = NULL;
    REFUSED(epx_combine(s->ll, &in, &s->cout, NULL, NULL), EPX_ERR_ARGUMENT, "topk_weights");
    in = s->ll_cin;
    in.bias[0] = &bias;
    bias.dtype = EPX_FP32;
    REFUSED(epx_combine(s->ll, &in, &s->cout, NULL, NULL), EPX_ERR_ARGUMENT, "bias", "bf16", "fp32");
    out.tokens = NULL;
    REFUSED(epx_combine(s->ll, &s->ll_cin, &out, NULL, NULL), EPX_ERR_ARGUMENT, "tokens", "NULL");
    out.tokens = &combined;
    combined.shape[0]++;
    REFUSED(epx_combine(s->ll, &s->ll_cin, &out, NULL, NULL), EPX_ERR_ARGUMENT, "tokens", "5", "6");
    combined = s->combined;
    combined.dtype = EPX_FP32;
    REFUSED(epx_combine(s->ll, &s->ll_cin, &out, NULL, NULL), EPX_ERR_ARGUMENT, "tokens", "fp32");
    config.logfmt = 1;
    REFUSED(epx_combine(s->ht, &s->ht_cin, &s->cout, &config, NULL), EPX_ERR_USAGE, "logfmt");
    return 0;
}

static void wrong_combines_are_refused(void **state)
{
    (void)state;
    misuse_on(2, wrong_combines);
}

/* ---- Indices --------------------------------------------------------------------------------------------------------- */

/* The message names the place; wherever it is found (at the call, or when the operation runs), nothing is sent to an
 * expert that does not exist, and the group works again after a clear. */
static int bad_index(struct fixture *s, epx_handle *handle, int64_t value)
{
    char given[24];
    epx_status status;

    snprintf(given, sizeof(given), "%lld", (long long)value);
    fixture_refill(s);
    tensor_set_int(&s->idx, 2 * FIXTURE_TOPK + 1, value);
    status = epx_handle_update(handle, &s->idx, NULL, NULL);
    if (status == EPX_OK && handle == s->ll)
        status = epx_dispatch(handle, &s->in, &s->ll_out, NULL, NULL, NULL);
    if (status == EPX_OK)
        status = epx_stream_sync(s->group, NULL);
    if (fixture_expect(s, "an index out of range", status, EPX_ERR_ARGUMENT, WORDS("topk_idx", "[2][1]", "5", given)))
        return -1;
    return epx_group_error(s->group, NULL) == EPX_OK ? 0 : epx_group_error_clear(s->group) == EPX_OK ? 0 : -1;
}

static int indices(struct fixture *s)
{
    return bad_index(s, s->ll, FIXTURE_EXPERTS) || bad_index(s, s->ll, -2) || bad_index(s, s->ht, FIXTURE_EXPERTS) ||
           bad_index(s, s->ht, 1ll << 40) || bad_index(s, s->ll, INT64_MIN);
}

static void indices_out_of_range_are_named(void **state)
{
    (void)state;
    misuse_on(2, indices);
}

/* Tokens that name an expert K times. The expert-major layout of low latency has room for each token once: its entries
 * share a row, and nothing lies behind the end. */
static int named_often(struct fixture *s)
{
    const int64_t room = (int64_t)s->nranks * FIXTURE_M, expected = s->rank == 1 ? s->nranks * FIXTURE_TOKENS : 0;
    const size_t bytes = (size_t)(s->ll_rows.shape[0] * room) * FIXTURE_HIDDEN * 2,
                 behind = (size_t)bytes * FIXTURE_TOPK;
    epx_dispatch_outputs out = s->ll_out;
    epx_tensor rows = s->ll_rows;
    epx_status status;
    struct mismatch m;
    char *memory = malloc(bytes + behind);

    if (!memory)
        return -1;
    memset(memory, 0x77, bytes + behind);
    rows.data = memory;
    out.tokens = &rows;
    for (int i = 0; i < FIXTURE_TOKENS * FIXTURE_TOPK; i++)
        tensor_set_int(&s->idx, i, 1);
    status = epx_handle_update(s->ll, &s->idx, NULL, NULL);
    if (status == EPX_OK)
        status = epx_dispatch(s->ll, &s->in, &out, &s->ll_info, NULL, NULL);
    if (status == EPX_OK)
        status = epx_stream_sync(s->group, NULL);
    if (status != EPX_OK || tensor_int(&s->ll_counts, 0) != expected) {
        snprintf(s->why, sizeof(s->why), "status %d (%s), %lld rows for the expert, expected %lld", (int)status,
                 epx_last_error(), (long long)tensor_int(&s->ll_counts, 0), (long long)expected);
        free(memory);
        return -1;
    }
    if (compare_fill("behind the rows", 0, memory + bytes, behind, 0x77, &m)) {
        snprintf(s->why, sizeof(s->why), "%s", m.text);
        return -1;
    }
    free(memory);
    return fixture_meet(s);
}

static void an_expert_named_often_never_overflows(void **state)
{
    (void)state;
    misuse_on(FIXTURE_EXPERTS, named_often);
}

/* ---- Configurations ---------------------------------------------------------------------------------------------------- */

static int handle_configs(struct fixture *s)
{
    const epx_handle_config good = {
        .size = sizeof(good), .mode = EPX_HIGH_THROUGHPUT, .layout = EPX_EXPERT_MAJOR, .topk = FIXTURE_TOPK};
    epx_handle_config c = good;
    epx_handle *h = NULL;

    c.mode = 3;
    REFUSED(epx_handle_create(&h, s->group, &c), EPX_ERR_ARGUMENT, "mode", "3");
    c = good;
    c.layout = EPX_RANK_MAJOR;
    REFUSED(epx_handle_create(&h, s->group, &c), EPX_ERR_ARGUMENT, "layout", "2");
    c.mode = EPX_LOW_LATENCY;
    c.layout = EPX_FLAT;
    REFUSED(epx_handle_create(&h, s->group, &c), EPX_ERR_ARGUMENT, "layout", "3");
    c = good;
    c.topk = 0;
    REFUSED(epx_handle_create(&h, s->group, &c), EPX_ERR_ARGUMENT, "topk", "0");
    c.topk = FIXTURE_TOPK + 1;
    REFUSED(epx_handle_create(&h, s->group, &c), EPX_ERR_ARGUMENT, "topk", "3", "4");
    c = good;
    c.expert_alignment = 3;
    REFUSED(epx_handle_create(&h, s->group, &c), EPX_ERR_ARGUMENT, "expert_alignment", "power of two", "3");
    c.expert_alignment = -1;
    REFUSED(epx_handle_create(&h, s->group, &c), EPX_ERR_ARGUMENT, "expert_alignment", "-1");
    c = good;
    c.flags = 1u << 30;
    REFUSED(epx_handle_create(&h, s->group, &c), EPX_ERR_ARGUMENT, "flags");
    return h ? -1 : 0;
}

static void wrong_handle_configurations_are_refused(void **state)
{
    (void)state;
    misuse_on(2, handle_configs);
}

static int wide_zones_rank(int rank, int n, epx_bootstrap *boot, void *arg)
{
    epx_group_config config = fixture_config(2000);
    epx_handle_config c = {.size = sizeof(c),
                           .mode = EPX_HIGH_THROUGHPUT,
                           .layout = EPX_EXPERT_MAJOR,
                           .topk = FIXTURE_TOPK,
                           .expert_alignment = 1 << 20};
    struct fixture fixture = {.rank = rank, .nranks = n}, *s = &fixture;
    epx_group *group;
    size_t bytes;
    int rc;

    (void)arg;
    config.num_experts = 4096;
    ACCEPTED(epx_group_create(&group, boot, &config));
    rc = fixture_expect(s, "epx_handle_memory", epx_handle_memory(group, &c, &bytes), EPX_ERR_ARGUMENT,
                        WORDS("expert_alignment", "1048576", "4096"));
    c.expert_alignment = 1 << 18;
    if (!rc)
        rc = fixture_expect(s, "epx_handle_memory", epx_handle_memory(group, &c, &bytes), EPX_OK, NULL);
    epx_group_destroy(group);
    if (rc)
        fprintf(stderr, "rank %d: %s\n", rank, s->why);
    return rc;
}

/* Rows are numbered with 32 bits: so many padded zones would begin again below zero. */
static void zones_beyond_all_rows_are_refused(void **state)
{
    (void)state;
    assert_int_equal(run_ranks(1, wide_zones_rank, NULL), 0);
}

struct group_mistake {
    const char *field, *given;
    size_t offset;
    int32_t value;
};

#define MISTAKE(field, value)                                    \
    {                                                            \
#field, #value, offsetof(epx_group_config, field), value \
    }

static const struct group_mistake group_mistakes[] = {
    MISTAKE(num_experts, 0),
    MISTAKE(num_experts, -4),
    MISTAKE(max_tokens_per_rank, 0),
    MISTAKE(max_tokens_per_rank, -1),
    MISTAKE(max_hidden_bytes, 0),
    MISTAKE(max_hidden_bytes, 40),
    MISTAKE(max_topk, 33),
    MISTAKE(max_topk, -1),
    MISTAKE(max_inflight, -2),
    MISTAKE(num_agents, -1),
    MISTAKE(timeout_ms, -5),
    MISTAKE(enable_mask, 2),
    MISTAKE(device, 9),
    MISTAKE(modes, 8),
    MISTAKE(max_recv_tokens, -1),
};

static int group_mistake_rank(int rank, int n, epx_bootstrap *boot, void *arg)
{
    const struct group_mistake *mistake = arg;
    epx_group_config config = fixture_config(2000);
    epx_memory_info info = EPX_MEMORY_INFO_INIT;
    epx_group *group = (epx_group *)arg;
    struct fixture s = {.rank = rank, .nranks = n};
    int rc;

    memcpy((char *)&config + mistake->offset, &mistake->value, sizeof(int32_t));
    rc = fixture_expect(&s, "epx_group_memory", epx_group_memory(&config, n, &info), EPX_ERR_ARGUMENT,
                        WORDS(mistake->field, mistake->given));
    if (!rc)
        rc = fixture_expect(&s, "epx_group_create", epx_group_create(&group, boot, &config), EPX_ERR_ARGUMENT,
                            WORDS(mistake->field, mistake->given));
    if (!rc && group) {
        snprintf(s.why, sizeof(s.why), "epx_group_create failed but left a pointer");
        rc = -1;
    }
    if (rc)
        fprintf(stderr, "rank %d, %s = %s: %s\n", rank, mistake->field, mistake->given, s.why);
    return rc;
}

static void wrong_group_configurations_are_refused(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(group_mistakes) / sizeof(*group_mistakes); i++)
        assert_int_equal(run_ranks(2, group_mistake_rank, (void *)(uintptr_t)&group_mistakes[i]), 0);
}

/* So much that the sum of all parts would begin again at zero, and nearly so much. */
static void an_endless_alloc_heap_is_refused(void **state)
{
    static const uint64_t bytes[] = {UINT64_MAX, UINT64_MAX - 8191, (uint64_t)INT64_MAX + 1};
    epx_memory_info info = EPX_MEMORY_INFO_INIT;

    (void)state;
    for (size_t i = 0; i < sizeof(bytes) / sizeof(*bytes); i++) {
        epx_group_config config = fixture_config(2000);

        config.alloc_bytes = bytes[i];
        assert_int_equal(epx_group_memory(&config, 2, &info), EPX_ERR_ARGUMENT);
        assert_non_null(strstr(epx_last_error(), "alloc_bytes"));
    }
}

/* Between nodes everything that belongs together is one message, whose size has an end. */
static void what_no_message_holds_is_refused_across_nodes(void **state)
{
    epx_group_config config = fixture_config(2000);
    epx_memory_info info = EPX_MEMORY_INFO_INIT;

    (void)state;
    config.max_hidden_bytes = 1 << 24;
    assert_int_equal(epx_group_memory(&config, 4, &info), EPX_OK);
    config.ranks_per_node = 2;
    assert_int_equal(epx_group_memory(&config, 4, &info), EPX_ERR_ARGUMENT);
    assert_non_null(strstr(epx_last_error(), "max_hidden_bytes"));
    config = fixture_config(2000);
    config.ranks_per_node = 2;
    config.max_tokens_per_rank = 1 << 20;
    assert_int_equal(epx_group_memory(&config, 4, &info), EPX_ERR_ARGUMENT);
    assert_non_null(strstr(epx_last_error(), "max_tokens_per_rank"));
    config.modes = EPX_HIGH_THROUGHPUT;
    config.max_topk = 1;
    assert_int_equal(epx_group_memory(&config, 4, &info), EPX_OK);
}

static int bootstrap_rank(int rank, int n, epx_bootstrap *boot, void *arg)
{
    epx_group_config config = fixture_config(2000);
    epx_bootstrap bad = *boot;
    epx_group *group;
    struct fixture fixture = {.rank = rank}, *s = &fixture;

    (void)n;
    (void)arg;
    REFUSED(epx_group_create(NULL, boot, &config), EPX_ERR_ARGUMENT, "NULL");
    bad.rank = 9;
    REFUSED(epx_group_create(&group, &bad, &config), EPX_ERR_ARGUMENT, "rank", "9");
    bad = *boot;
    bad.nranks = 0;
    REFUSED(epx_group_create(&group, &bad, &config), EPX_ERR_ARGUMENT, "nranks", "0");
    bad = *boot;
    bad.size = 1;
    REFUSED(epx_group_create(&group, &bad, &config), EPX_ERR_ARGUMENT, "size");
    return 0;
}

static int bootstrap_rank_told(int rank, int n, epx_bootstrap *boot, void *arg)
{
    int rc = bootstrap_rank(rank, n, boot, arg);

    if (rc)
        fprintf(stderr, "rank %d: last error: %s\n", rank, epx_last_error());
    return rc;
}

static void wrong_bootstraps_are_refused(void **state)
{
    (void)state;
    assert_int_equal(run_ranks(1, bootstrap_rank_told, NULL), 0);
}

/* Rank 2 of 3 differs in one field: all three say so. */
static int mismatch_rank(int rank, int n, epx_bootstrap *boot, void *arg)
{
    const struct group_mistake *mistake = arg;
    epx_group_config config = fixture_config(2000);
    epx_group *group = NULL;
    struct fixture s = {.rank = rank, .nranks = n};
    int rc;

    if (rank == 2)
        memcpy((char *)&config + mistake->offset, &mistake->value, sizeof(int32_t));
    rc = fixture_expect(&s, "epx_group_create", epx_group_create(&group, boot, &config), EPX_ERR_MISMATCH,
                        WORDS("rank 2", mistake->field, mistake->given));
    if (rc)
        fprintf(stderr, "rank %d, %s = %s on rank 2: %s\n", rank, mistake->field, mistake->given, s.why);
    if (group)
        epx_group_destroy(group);
    return rc;
}

static void ranks_that_disagree_name_rank_and_field(void **state)
{
    static const struct group_mistake differences[] = {
        MISTAKE(num_experts, 12),  MISTAKE(max_tokens_per_rank, 77), MISTAKE(max_hidden_bytes, 176),
        MISTAKE(max_topk, 5),      MISTAKE(max_inflight, 4),         MISTAKE(enable_mask, 1),
        MISTAKE(timeout_ms, 2001), MISTAKE(max_recv_tokens, 99),     MISTAKE(modes, 1)};

    (void)state;
    for (size_t i = 0; i < sizeof(differences) / sizeof(*differences); i++)
        assert_int_equal(run_ranks(3, mismatch_rank, (void *)(uintptr_t)&differences[i]), 0);
}

/* Each rank a node; rank 2 has another network than the others. */
static int other_net_rank(int rank, int n, epx_bootstrap *boot, void *arg)
{
    epx_group_config config = fixture_config(5000);
    epx_group *group = NULL;
    struct fixture s = {.rank = rank, .nranks = n};
    int rc;

    (void)arg;
    config.ranks_per_node = 1;
    snprintf(config.net, sizeof(config.net), "%s", rank == 2 ? "null" : "ofi");
    rc = fixture_expect(&s, "epx_group_create", epx_group_create(&group, boot, &config), EPX_ERR_MISMATCH,
                        WORDS("rank 2", "net = null", "ofi"));
    if (rc)
        fprintf(stderr, "rank %d: %s\n", rank, s.why);
    if (group)
        epx_group_destroy(group);
    return rc;
}

static void ranks_of_different_networks_name_them(void **state)
{
    char text[256];

    (void)state;
    if (net_ofi_ops.probe("", text, sizeof(text)) != EPX_OK) {
        print_message("no network to test with: %s\n", text);
        skip();
    }
    assert_int_equal(run_ranks(3, other_net_rank, NULL), 0);
}

/* What one rank names and another leaves open may be the same. */
static int open_device_rank(int rank, int n, epx_bootstrap *boot, void *arg)
{
    epx_group_config config = fixture_config(5000);
    epx_group *group = NULL;
    epx_status status;

    (void)n;
    (void)arg;
    config.device = rank ? EPX_DEVICE_AUTO : EPX_DEVICE_CPU;
    status = epx_group_create(&group, boot, &config);
    if (status != EPX_OK)
        fprintf(stderr, "rank %d: %s\n", rank, epx_last_error());
    if (group)
        epx_group_destroy(group);
    return status != EPX_OK;
}

static void a_device_left_open_is_the_one_it_stands_for(void **state)
{
    (void)state;
    assert_int_equal(run_ranks(2, open_device_rank, NULL), 0);
}

/* One rank's configuration is wrong in itself: it says why, the others say who. */
static int one_wrong_rank(int rank, int n, epx_bootstrap *boot, void *arg)
{
    epx_group_config config = fixture_config(2000);
    epx_group *group = NULL;
    struct fixture s = {.rank = rank, .nranks = n};
    int rc;

    (void)arg;
    if (rank == 1)
        config.num_experts = -1;
    rc = fixture_expect(&s, "epx_group_create", epx_group_create(&group, boot, &config),
                        rank == 1 ? EPX_ERR_ARGUMENT : EPX_ERR_PEER, WORDS(rank == 1 ? "-1" : "rank 1", "num_experts"));
    if (rc)
        fprintf(stderr, "rank %d: %s\n", rank, s.why);
    return rc;
}

static void one_wrong_configuration_ends_all(void **state)
{
    (void)state;
    assert_int_equal(run_ranks(3, one_wrong_rank, NULL), 0);
}

/* ---- Destroyed objects, wrong order ------------------------------------------------------------------------------------ */

static int destroyed(struct fixture *s)
{
    epx_handle_config config = {
        .size = sizeof(config), .mode = EPX_LOW_LATENCY, .layout = EPX_EXPERT_MAJOR, .topk = FIXTURE_TOPK};
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

static void destroyed_objects_are_refused(void **state)
{
    (void)state;
    misuse_on(2, destroyed);
}

static int wrong_order(struct fixture *s)
{
    epx_handle_config config = {
        .size = sizeof(config), .mode = EPX_LOW_LATENCY, .layout = EPX_EXPERT_MAJOR, .topk = FIXTURE_TOPK};
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

static void calls_in_the_wrong_order_are_refused(void **state)
{
    (void)state;
    misuse_on(2, wrong_order);
}

/* Two may be in flight; the third is refused, and works once one of them is complete. */
static int staged_too_often(struct fixture *s)
{
    epx_handle_config config = {
        .size = sizeof(config), .mode = EPX_LOW_LATENCY, .layout = EPX_EXPERT_MAJOR, .topk = FIXTURE_TOPK};
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

static void too_many_staged_operations_are_refused(void **state)
{
    (void)state;
    misuse_on(2, staged_too_often);
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
static int last_work_rank(int rank, int n, epx_bootstrap *boot, void *arg)
{
    epx_group_config config = fixture_config(2000);
    struct last_work work = {0};
    epx_stream stream;
    int rc;

    (void)arg;
    (void)n;
    if (epx_group_create(&work.group, boot, &config) != EPX_OK)
        return -1;
    rc = epx_stream_create(work.group, &stream) != EPX_OK ||
         epx_stream_call(work.group, stream, late_work, &work) != EPX_OK;
    rc |= epx_group_destroy(work.group) != EPX_OK || !work.done || work.inside != EPX_ERR_USAGE;
    if (rc)
        fprintf(stderr, "rank %d: done %d, destroying inside: %s\n", rank, work.done, epx_strerror(work.inside));
    return rc;
}

static void a_group_ends_after_its_streams(void **state)
{
    (void)state;
    assert_int_equal(run_ranks(1, last_work_rank, NULL), 0);
}

/* What one rank's handle says and the others' do not is found by the first operation that needs it, on all ranks. */
static int handles_differ(struct fixture *s, int32_t layout, const char *word)
{
    epx_handle_config config = {
        .size = sizeof(config), .mode = EPX_HIGH_THROUGHPUT, .layout = layout, .topk = FIXTURE_TOPK};
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

static int different_handles(struct fixture *s)
{
    return handles_differ(s, EPX_EXPERT_MAJOR, "expert_alignment") || handles_differ(s, EPX_FLAT, "compact");
}

static void handles_that_differ_are_found(void **state)
{
    (void)state;
    misuse_on(3, different_handles);
}

/* ---- Overflow ---------------------------------------------------------------------------------------------------------- */

/* Rank 0 has room for one row too few. It learns so, at once (then it sends nothing, and the others' wait for it ends at
 * their deadline) or when the operation runs; its memory behind the tensor stays. */
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

static void too_small_receive_tensors_overflow_safely(void **state)
{
    (void)state;
    misuse_on(3, overflow);
}

/* Receives in memory from epx_alloc more rows than max_recv_tokens, which is allowed, and returns results from ordinary
 * memory, which is not: they pass through EPX's own rows. With `known` the update has finished and the call says so. */
static int return_too_many(struct fixture *s, int known)
{
    epx_dispatch_outputs out = EPX_DISPATCH_OUTPUTS_INIT;
    epx_tensor in_heap = s->ht_rows;
    epx_status status;
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
    if (fixture_expect(s, "combine", status, EPX_ERR_OVERFLOW, WORDS(need, "max_recv_tokens")) || fixture_meet(s))
        return -1;
    ACCEPTED(epx_group_error_clear(s->group));
    ACCEPTED(epx_free(s->group, in_heap.data));
    return 0;
}

static int return_too_many_rank(int rank, int n, epx_bootstrap *boot, void *arg)
{
    epx_group_config config = fixture_config(DEADLINE_MS);
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

static void too_much_memory_is_refused(void **state)
{
    (void)state;
    misuse_on(2, too_much_memory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(null_pointers_are_refused),
        cmocka_unit_test(wrong_struct_sizes_are_refused),
        cmocka_unit_test(sizes_that_cut_a_field_are_refused),
        cmocka_unit_test(unknown_fields_must_be_zero),
        cmocka_unit_test(wrong_low_latency_tensors_are_refused),
        cmocka_unit_test(wrong_high_throughput_tensors_are_refused),
        cmocka_unit_test(wrong_combines_are_refused),
        cmocka_unit_test(indices_out_of_range_are_named),
        cmocka_unit_test(an_expert_named_often_never_overflows),
        cmocka_unit_test(wrong_handle_configurations_are_refused),
        cmocka_unit_test(zones_beyond_all_rows_are_refused),
        cmocka_unit_test(wrong_group_configurations_are_refused),
        cmocka_unit_test(an_endless_alloc_heap_is_refused),
        cmocka_unit_test(what_no_message_holds_is_refused_across_nodes),
        cmocka_unit_test(wrong_bootstraps_are_refused),
        cmocka_unit_test(ranks_that_disagree_name_rank_and_field),
        cmocka_unit_test(ranks_of_different_networks_name_them),
        cmocka_unit_test(a_device_left_open_is_the_one_it_stands_for),
        cmocka_unit_test(one_wrong_configuration_ends_all),
        cmocka_unit_test(destroyed_objects_are_refused),
        cmocka_unit_test(calls_in_the_wrong_order_are_refused),
        cmocka_unit_test(too_many_staged_operations_are_refused),
        cmocka_unit_test(a_group_ends_after_its_streams),
        cmocka_unit_test(handles_that_differ_are_found),
        cmocka_unit_test(too_small_receive_tensors_overflow_safely),
        cmocka_unit_test(more_rows_than_can_return_overflow),
        cmocka_unit_test(too_much_memory_is_refused),
    };

    if (getenv("EPX_TEST_ONLY"))
        cmocka_set_test_filter(getenv("EPX_TEST_ONLY"));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
