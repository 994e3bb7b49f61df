/* SPDX-License-Identifier: Apache-2.0 */
/* Null pointers, sizes of structs, tensors and indices that are refused. */
#include "tests/unit/misuse.h"

/* ---- Null pointers and structs ----------------------------------------------------------------------------------- */

static int null_pointers(struct fixture *s)
{
    epx_handle_config config = EPX_HANDLE_CONFIG_INIT;
    epx_handle *handle;
    epx_event *event = NULL;
    epx_graph *graph;
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
    REFUSED(epx_graph_begin(NULL, NULL), EPX_ERR_ARGUMENT, "NULL");
    REFUSED(epx_graph_end(NULL, NULL, &graph), EPX_ERR_ARGUMENT, "group", "NULL");
    REFUSED(epx_graph_end(s->group, NULL, NULL), EPX_ERR_ARGUMENT, "graph", "NULL");
    REFUSED(epx_graph_end(s->group, NULL, &graph), EPX_ERR_USAGE, "captures no graph");
    REFUSED(epx_graph_launch((epx_graph *)s, NULL), EPX_ERR_ARGUMENT, "graph");
    REFUSED(epx_graph_launch(NULL, NULL), EPX_ERR_ARGUMENT, "graph", "NULL");
    REFUSED(epx_graph_destroy(NULL), EPX_ERR_ARGUMENT, "NULL");
    REFUSED(epx_world_query(NULL), EPX_ERR_ARGUMENT, "NULL");
    REFUSED(epx_group_query(s->group, NULL), EPX_ERR_ARGUMENT, "NULL");
    REFUSED(epx_group_stats(s->group, NULL), EPX_ERR_ARGUMENT, "NULL");
    REFUSED(epx_group_error_clear(NULL), EPX_ERR_ARGUMENT, "NULL");
    REFUSED(epx_group_abort(NULL, EPX_ERR_USAGE), EPX_ERR_ARGUMENT, "NULL");
    REFUSED(epx_group_abort(s->group, EPX_OK), EPX_ERR_ARGUMENT, "why", "got 0");
    REFUSED(epx_group_abort(s->group, (epx_status)13), EPX_ERR_ARGUMENT, "why", "got 13");
    REFUSED(epx_group_order_with(s->group, NULL), EPX_ERR_ARGUMENT, "NULL");
    REFUSED(epx_group_order_with(NULL, s->group), EPX_ERR_ARGUMENT, "NULL");
    REFUSED(epx_group_order_with(s->group, s->group), EPX_ERR_ARGUMENT, "another group");
    REFUSED(epx_group_destroy(NULL), EPX_ERR_ARGUMENT, "NULL");
    REFUSED(epx_version(NULL), EPX_ERR_ARGUMENT, "NULL");
    return 0;
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
    const uint32_t old_info = offsetof(epx_layout_info, rank_matrix),
                   older_rows = offsetof(epx_layout_info, expert_rows),
                   older_drop = offsetof(epx_layout_info, drop_rows);
    const uint32_t old_stats = offsetof(epx_stats, net_stuck);
    uint64_t kept;

    for (uint32_t i = 0; i < 256 + 6; i++) {
        static const uint32_t large[] = {4092, 4093, 4096, 4100, 65536, UINT32_MAX};
        const uint32_t size = i < 256 ? i : large[i - 256];
        const int good = size == old_info || size == older_rows || size == older_drop ||
                         (size >= sizeof(epx_layout_info) && size <= 4096 && size % 4 == 0);

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

/* A caller from the future: what this library does not know must be zero. */
static int future_structs(struct fixture *s)
{
    struct {
        epx_handle_config known;
        uint64_t unknown;
    } future = {.known = fixture_handle_config(EPX_LOW_LATENCY, EPX_EXPERT_MAJOR, FIXTURE_TOPK)};
    epx_handle *handle = NULL;

    future.known.size = sizeof(future);
    ACCEPTED(epx_handle_create(&handle, s->group, &future.known));
    ACCEPTED(epx_handle_destroy(handle));
    future.unknown = 1;
    REFUSED(epx_handle_create(&handle, s->group, &future.known), EPX_ERR_ARGUMENT, "epx_handle_config");
    return 0;
}

/* ---- Tensors ----------------------------------------------------------------------------------------------------- */

static int wrong_idx_ll(struct fixture *s)
{
    epx_dispatch_inputs in = s->in;
    epx_dispatch_outputs out = s->ll_out;
    epx_layout_info info = s->ll_info;
    epx_tensor idx = s->idx;

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
    return 0;
}

static int wrong_tokens_ll(struct fixture *s)
{
    epx_dispatch_inputs in = s->in;
    epx_tensor tokens = s->tokens;

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
    return 0;
}

static int wrong_rows_ll(struct fixture *s)
{
    epx_dispatch_outputs out = s->ll_out;
    epx_tensor rows = s->ll_rows;

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
    return 0;
}

static int wrong_counts_ll(struct fixture *s)
{
    epx_layout_info info = s->ll_info;
    epx_tensor counts = s->ll_counts;

    info.expert_counts = &counts;
    counts.shape[0]++;
    REFUSED(epx_dispatch(s->ll, &s->in, &s->ll_out, &info, NULL, NULL), EPX_ERR_ARGUMENT, "expert_counts");
    counts = s->ll_counts;
    counts.dtype = EPX_FP32;
    REFUSED(epx_dispatch(s->ll, &s->in, &s->ll_out, &info, NULL, NULL), EPX_ERR_ARGUMENT, "expert_counts", "fp32");
    return 0;
}

/* Experts have no zones in RANK_MAJOR, and dispatch does not count their rows. */
static int counts_by_rank(struct fixture *s)
{
    epx_handle_config config = fixture_handle_config(EPX_LOW_LATENCY, EPX_RANK_MAJOR, FIXTURE_TOPK);
    epx_layout_info counts = EPX_LAYOUT_INFO_INIT, stats = EPX_LAYOUT_INFO_INIT;
    epx_dispatch_outputs out = s->ll_out;
    epx_tensor rows = s->ll_rows;
    epx_handle *handle;

    rows.shape[0] = s->nranks;
    rows.shape[1] = FIXTURE_M;
    out.tokens = &rows;
    counts.expert_counts = stats.expert_stats = &s->ll_counts;
    ACCEPTED(epx_handle_create(&handle, s->group, &config));
    ACCEPTED(epx_handle_update(handle, &s->idx, NULL, NULL));
    REFUSED(epx_dispatch(handle, &s->in, &out, &counts, NULL, NULL), EPX_ERR_ARGUMENT, "expert_counts", "NULL");
    REFUSED(epx_dispatch(handle, &s->in, &out, &stats, NULL, NULL), EPX_ERR_ARGUMENT, "expert_stats", "NULL");
    ACCEPTED(epx_handle_destroy(handle));
    return 0;
}

static int wrong_tensors_ll(struct fixture *s)
{
    if (wrong_idx_ll(s))
        return 1;
    ACCEPTED(epx_handle_update(s->ll, &s->idx, NULL, NULL));
    return wrong_tokens_ll(s) || wrong_rows_ll(s) || wrong_counts_ll(s) || counts_by_rank(s);
}

static int wrong_tensors_ht(struct fixture *s)
{
    epx_dispatch_inputs in = s->in;
    epx_dispatch_outputs out = s->ht_out;
    epx_tensor weights = s->weights, rows = s->ht_rows, idx = s->ht_idx, row_weights = s->ht_weights;

    /* The routing of the good round before is still there. */
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
    in = s->ht_cin;
    in.topk_idx = &s->idx;
    REFUSED(epx_combine(s->ht, &in, &s->cout, NULL, NULL), EPX_ERR_USAGE, "topk_idx");
    in = s->ll_cin;
    in.topk_idx = &s->combined;
    REFUSED(epx_combine(s->ll, &in, &s->cout, NULL, NULL), EPX_ERR_ARGUMENT, "topk_idx", "int64", "bf16");
    return 0;
}

/* ---- Indices ----------------------------------------------------------------------------------------------------- */

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

UNIT_MAIN(MISUSE("null_pointers_are_refused", 2, null_pointers),
          MISUSE("wrong_struct_sizes_are_refused", 2, struct_sizes),
          MISUSE("sizes_that_cut_a_field_are_refused", 2, cut_and_garbage_sizes),
          MISUSE("unknown_fields_must_be_zero", 2, future_structs),
          MISUSE("wrong_low_latency_tensors_are_refused", 2, wrong_tensors_ll),
          MISUSE("wrong_high_throughput_tensors_are_refused", 2, wrong_tensors_ht),
          MISUSE("wrong_combines_are_refused", 2, wrong_combines), MISUSE("indices_out_of_range_are_named", 2, indices),
          MISUSE("an_expert_named_often_never_overflows", FIXTURE_EXPERTS, named_often))
