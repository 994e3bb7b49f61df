/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ctest: labels=notsan (one thread)
 * The oracle against cases small enough to work out by hand. The example that most tests use:
 *
 *      2 ranks, 3 experts (experts 0 and 1 on rank 0, expert 2 on rank 1), K = 2
 *      rank 0: token 0 -> (2, 0)   token 1 -> (1, 0)
 *      rank 1: token 0 -> (0, -1)  token 1 -> (2, 1)  token 2 -> (-1, -1)
 */
#include <math.h>
#include <string.h>

#include "tests/lib/oracle.h"
#include "tests/lib/unit.h"

enum { M = 3, K = 2, H = 4 };

static void example(struct oracle_route *route, int mode, int layout, uint32_t flags, int alignment)
{
    static const int32_t idx[2][M][K] = {{{2, 0}, {1, 0}, {0, 0}}, {{0, -1}, {2, 1}, {-1, -1}}};

    assert_int_equal(oracle_route_init(route, 2, 3, K, M, mode, layout, flags, alignment), 0);
    route->tokens[0] = 2;
    route->tokens[1] = 3;
    memcpy(route->idx, idx, sizeof(idx));
}

/* Token t of rank r is r*100 + t*10 + i; its weights are r + t/10 + k/100; experts return (e+1) * 1000 + ... */
static void token(void *context, int rank, int token, void *row)
{
    (void)context;
    for (int i = 0; i < H; i++)
        ((float *)row)[i] = (float)(rank * 100 + token * 10 + i);
}

static void weights(void *context, int rank, int token, float *w)
{
    (void)context;
    for (int k = 0; k < K; k++)
        w[k] = (float)(1 + rank * 16 + token * 4 + k) / 8;
}

static void result(void *context, int owner, int expert, int rank, int token, int k, void *row)
{
    (void)context;
    (void)k;
    for (int i = 0; i < H; i++)
        ((float *)row)[i] = (float)((expert < 0 ? owner + 8 : expert + 1) * 1000 + rank * 100 + token * 10 + i);
}

static float result_weight(void *context, int rank, int token, int k)
{
    (void)context;
    return (float)(1000 + rank * 100 + token * 10 + k);
}

static void bias(void *context, int which, int rank, int token, void *row)
{
    (void)context;
    (void)rank;
    (void)token;
    for (int i = 0; i < H; i++)
        ((float *)row)[i] = which ? 0.25f : 0.5f;
}

static const struct oracle_data data = {
    .token = token,
    .weights = weights,
    .result = result,
    .result_weight = result_weight,
    .bias = bias,
    .hidden = H,
    .dtype = EPX_FP32,
    .result_dtype = EPX_FP32,
};

static void assert_places(const struct oracle_recv *recv, const struct oracle_place *expected, int64_t n)
{
    assert_int_equal(recv->nplaces, n);
    for (int64_t i = 0; i < n; i++) {
        assert_int_equal(recv->places[i].row, expected[i].row);
        assert_int_equal(recv->places[i].src_rank, expected[i].src_rank);
        assert_int_equal(recv->places[i].src_token, expected[i].src_token);
        assert_int_equal(recv->places[i].expert, expected[i].expert);
        assert_int_equal(recv->places[i].k, expected[i].k);
    }
}

static void assert_longs(const int64_t *got, const int64_t *expected, int n)
{
    for (int i = 0; i < n; i++)
        assert_int_equal(got[i], expected[i]);
}

/* The example's routing, and what `rank` receives of it. */
struct view {
    struct oracle_route route;
    struct oracle_recv recv;
};

static void view_open(struct view *v, int rank, int mode, int layout, uint32_t flags, int alignment)
{
    example(&v->route, mode, layout, flags, alignment);
    assert_int_equal(oracle_recv_init(&v->recv, &v->route, rank), 0);
}

static void view_close(struct view *v)
{
    oracle_recv_free(&v->recv);
    oracle_route_free(&v->route);
}

static void flat_rows_go_by_rank_and_token(void **state)
{
    static const struct oracle_place on0[] = {
        {0, 0, 0, -1, -1}, {1, 0, 1, -1, -1}, {2, 1, 0, -1, -1}, {3, 1, 1, -1, -1}};
    static const struct oracle_place on1[] = {{0, 0, 0, -1, -1}, {1, 1, 1, -1, -1}};
    struct view v;

    (void)state;
    view_open(&v, 0, EPX_HIGH_THROUGHPUT, EPX_FLAT, 0, 1);
    assert_places(&v.recv, on0, 4);
    assert_int_equal(v.recv.total, 4);
    assert_longs(v.recv.rank_counts, (int64_t[]){2, 2}, 2);
    assert_longs(v.recv.expert_counts, (int64_t[]){3, 2}, 2);
    view_close(&v);
    view_open(&v, 1, EPX_HIGH_THROUGHPUT, EPX_FLAT, 0, 1);
    assert_places(&v.recv, on1, 2);
    assert_longs(v.recv.expert_counts, (int64_t[]){2, 0}, 2); /* rank 1 has one expert, its tensors keep two */
    view_close(&v);
}

static void rank_major_has_a_zone_per_rank(void **state)
{
    static const struct oracle_place on0[] = {
        {0, 0, 0, -1, -1}, {1, 0, 1, -1, -1}, {3, 1, 0, -1, -1}, {4, 1, 1, -1, -1}};
    struct view v;

    (void)state;
    view_open(&v, 0, EPX_LOW_LATENCY, EPX_RANK_MAJOR, 0, 1);
    assert_places(&v.recv, on0, 4);
    assert_int_equal(v.recv.rows, 6);
    assert_int_equal(v.recv.total, 4);
    view_close(&v);
}

static void low_latency_expert_major_has_a_zone_per_expert(void **state)
{
    static const struct oracle_place on0[] = {
        {0, 0, 0, 0, 1}, {1, 0, 1, 0, 1}, {2, 1, 0, 0, 0}, {6, 0, 1, 1, 0}, {7, 1, 1, 1, 1}};
    struct view v;

    (void)state;
    view_open(&v, 0, EPX_LOW_LATENCY, EPX_EXPERT_MAJOR, 0, 1);
    assert_places(&v.recv, on0, 5);
    assert_int_equal(v.recv.rows, 12);
    assert_longs(v.recv.expert_counts, (int64_t[]){3, 2}, 2);
    assert_longs(v.recv.rank_counts, (int64_t[]){3, 2}, 2);
    assert_longs(v.recv.layout_range, (int64_t[]){2, 2ll << 32 | 1, 1, 1ll << 32 | 1}, 4);
    view_close(&v);
}

static void high_throughput_expert_major_is_padded(void **state)
{
    static const struct oracle_place on0[] = {
        {0, 0, 0, 0, 1}, {1, 0, 1, 0, 1}, {2, 1, 0, 0, 0}, {4, 0, 1, 1, 0}, {5, 1, 1, 1, 1}};
    struct view v;

    (void)state;
    view_open(&v, 0, EPX_HIGH_THROUGHPUT, EPX_EXPERT_MAJOR, 0, 4);
    assert_places(&v.recv, on0, 5);
    assert_int_equal(v.recv.total, 8);
    assert_longs(v.recv.expert_counts, (int64_t[]){4, 4}, 2);
    assert_longs(v.recv.expert_rows, (int64_t[]){3, 2}, 2);
    assert_longs(v.recv.expert_offsets, (int64_t[]){0, 4}, 2);
    view_close(&v);
}

static void a_masked_rank_sends_nothing(void **state)
{
    struct view v;

    (void)state;
    example(&v.route, EPX_LOW_LATENCY, EPX_EXPERT_MAJOR, 0, 1);
    v.route.active[1] = 0;
    assert_int_equal(oracle_recv_init(&v.recv, &v.route, 0), 0);
    assert_int_equal(v.recv.nplaces, 3);
    assert_longs(v.recv.rank_counts, (int64_t[]){3, 0}, 2);
    view_close(&v);
}

/* FLAT on rank 0, with one row to spare: written down in full, accepted; any change is found. */
static void dispatch_check_finds_every_kind_of_change(void **state)
{
    float tokens[5][H] = {{0, 1, 2, 3}, {10, 11, 12, 13}, {100, 101, 102, 103}, {110, 111, 112, 113}, {-1, -1, -1, -1}};
    float w[5][K] = {{0, 2 / 8.f}, {5 / 8.f, 6 / 8.f}, {17 / 8.f, 0}, {0, 22 / 8.f}, {0, 0}};
    int32_t idx[5][K] = {{-1, 0}, {1, 0}, {0, -1}, {-1, 1}, {-1, -1}};
    int32_t src_rank[5] = {0, 0, 1, 1}, src_token[5] = {0, 1, 0, 1};
    epx_tensor t_tokens = epx_tensor_make(tokens, EPX_FP32, 2, 5, H, 0, 0);
    epx_tensor t_w = epx_tensor_make(w, EPX_FP32, 2, 5, K, 0, 0);
    epx_tensor t_idx = epx_tensor_make(idx, EPX_INT32, 2, 5, K, 0, 0);
    epx_tensor t_rank = epx_tensor_make(src_rank, EPX_INT32, 1, 5, 0, 0, 0);
    epx_tensor t_token = epx_tensor_make(src_token, EPX_INT32, 1, 5, 0, 0, 0);
    epx_dispatch_outputs out = EPX_DISPATCH_OUTPUTS_INIT;
    struct view v;
    struct mismatch m;

    (void)state;
    memset(tokens[4], 0xab, sizeof(tokens[4]));
    memset(&src_rank[4], 0xab, 4);
    memset(&src_token[4], 0xab, 4);
    out.tokens = &t_tokens;
    out.topk_weights = &t_w;
    out.topk_idx = &t_idx;
    out.src_rank = &t_rank;
    out.src_token = &t_token;
    view_open(&v, 0, EPX_HIGH_THROUGHPUT, EPX_FLAT, 0, 1);
    assert_int_equal(oracle_check_dispatch(&v.recv, &data, &out, NULL, 0xab, &m), 0);

    tokens[2][3] = 0;
    assert_int_equal(oracle_check_dispatch(&v.recv, &data, &out, NULL, 0xab, &m), -1);
    assert_non_null(strstr(m.text, "tokens: row 2 element 3: expected 103"));
    tokens[2][3] = 103;
    idx[4][0] = 0;
    assert_int_equal(oracle_check_dispatch(&v.recv, &data, &out, NULL, -1, &m), -1);
    assert_non_null(strstr(m.text, "topk_idx (tail): row 4"));
    idx[4][0] = -1;
    w[3][1] = 0;
    assert_int_equal(oracle_check_dispatch(&v.recv, &data, &out, NULL, 0xab, &m), -1);
    w[3][1] = 22 / 8.f;
    src_token[1] = 0;
    assert_int_equal(oracle_check_dispatch(&v.recv, &data, &out, NULL, 0xab, &m), -1);
    src_token[1] = 1;
    tokens[4][0] = 0;
    assert_int_equal(oracle_check_dispatch(&v.recv, &data, &out, NULL, 0xab, &m), -1);
    assert_int_equal(oracle_check_dispatch(&v.recv, &data, &out, NULL, -1, &m), 0);
    view_close(&v);
}

static void compact_topk_is_ascending(void **state)
{
    float w[4][K] = {{2 / 8.f, 0}, {6 / 8.f, 5 / 8.f}, {17 / 8.f, 0}, {22 / 8.f, 0}};
    int64_t idx[4][K] = {{0, -1}, {0, 1}, {0, -1}, {1, -1}};
    epx_tensor t_w = epx_tensor_make(w, EPX_FP32, 2, 4, K, 0, 0);
    epx_tensor t_idx = epx_tensor_make(idx, EPX_INT64, 2, 4, K, 0, 0);
    epx_dispatch_outputs out = EPX_DISPATCH_OUTPUTS_INIT;
    struct view v;
    struct mismatch m;

    (void)state;
    out.topk_weights = &t_w;
    out.topk_idx = &t_idx;
    view_open(&v, 0, EPX_HIGH_THROUGHPUT, EPX_FLAT, EPX_HANDLE_COMPACT_TOPK, 1);
    assert_int_equal(oracle_check_dispatch(&v.recv, &data, &out, NULL, 0xab, &m), 0);
    view_close(&v);
}

/* Runs the check of combine for rank 1 on `out`. */
static int check_on_rank1(int mode, int layout, int weighted, int biases, int masked, float out[3][H])
{
    epx_tensor t = epx_tensor_make(out, EPX_FP32, 2, 3, H, 0, 0);
    epx_combine_outputs outputs = EPX_COMBINE_OUTPUTS_INIT;
    struct oracle_combine how = {.weighted = weighted, .biases = biases};
    struct oracle_route route;
    struct mismatch m;
    int rc;

    outputs.tokens = &t;
    example(&route, mode, layout, 0, 1);
    if (masked >= 0)
        route.active[masked] = 0;
    rc = oracle_check_combine(&route, &data, 1, &how, &outputs, &m);
    oracle_route_free(&route);
    return rc;
}

static void combine_sums_what_experts_return(void **state)
{
    /* token 0: expert 0 returns 1100; token 1: experts 2 and 1 return 3110 and 2110; token 2: nothing */
    float plain[3][H] = {{1100, 1101, 1102, 1103}, {5220, 5222, 5224, 5226}, {0}};
    /* owners return 8100 (rank 0); 8110 + 9110 */
    float by_rank[3][H] = {{8100, 8101, 8102, 8103}, {17220, 17222, 17224, 17226}, {0}};
    float biased[3][H] = {{1100.75f, 1101.75f, 1102.75f, 1103.75f},
                          {5220.75f, 5222.75f, 5224.75f, 5226.75f},
                          {0.75f, 0.75f, 0.75f, 0.75f}};
    float weighted[3][H];

    (void)state;
    for (int i = 0; i < H; i++) {
        weighted[0][i] = (float)(1100 + i) * 17 / 8;
        weighted[1][i] = (float)(3110 + i) * 21 / 8 + (float)(2110 + i) * 22 / 8;
        weighted[2][i] = 0;
    }
    assert_int_equal(check_on_rank1(EPX_HIGH_THROUGHPUT, EPX_EXPERT_MAJOR, 0, 0, -1, plain), 0);
    assert_int_equal(check_on_rank1(EPX_HIGH_THROUGHPUT, EPX_FLAT, 0, 0, -1, by_rank), 0);
    assert_int_equal(check_on_rank1(EPX_LOW_LATENCY, EPX_RANK_MAJOR, 0, 0, -1, by_rank), 0);
    assert_int_equal(check_on_rank1(EPX_HIGH_THROUGHPUT, EPX_EXPERT_MAJOR, 0, 2, -1, biased), 0);
    assert_int_equal(check_on_rank1(EPX_LOW_LATENCY, EPX_EXPERT_MAJOR, 1, 0, -1, weighted), 0);
    weighted[1][2] += 1;
    assert_int_equal(check_on_rank1(EPX_LOW_LATENCY, EPX_EXPERT_MAJOR, 1, 0, -1, weighted), -1);
}

static void combine_skips_masked_ranks(void **state)
{
    float out[3][H] = {{0}, {3110, 3111, 3112, 3113}, {0}};

    (void)state;
    assert_int_equal(check_on_rank1(EPX_LOW_LATENCY, EPX_EXPERT_MAJOR, 0, 0, 0, out), 0);
}

/* What fill_results writes on both ranks is what check_combine adds up. */
static void results_and_weights_go_where_dispatch_put_them(void **state)
{
    float rows[5][H], w[5];
    epx_tensor t_rows = epx_tensor_make(rows, EPX_FP32, 2, 5, H, 0, 0);
    epx_tensor t_w = epx_tensor_make(w, EPX_FP32, 1, 5, 0, 0, 0);
    struct view v;

    (void)state;
    view_open(&v, 0, EPX_HIGH_THROUGHPUT, EPX_EXPERT_MAJOR, 0, 1);
    oracle_fill_results(&v.recv, &data, &t_rows, &t_w);
    assert_true(rows[2][0] == 1100 && rows[4][3] == 2113);
    assert_true(w[0] == 1001 && w[2] == 1100 && w[4] == 1111);
    view_close(&v);
}

static void returned_weights_stand_at_their_entry(void **state)
{
    float w[3][K] = {{1100, 0}, {1110, 1111}, {0, 0}};
    epx_tensor t = epx_tensor_make(w, EPX_FP32, 2, 3, K, 0, 0);
    epx_combine_outputs outputs = EPX_COMBINE_OUTPUTS_INIT;
    struct oracle_combine how = {0};
    struct oracle_route route;
    struct mismatch m;

    (void)state;
    outputs.topk_weights = &t;
    example(&route, EPX_HIGH_THROUGHPUT, EPX_FLAT, 0, 1);
    assert_int_equal(oracle_check_combine(&route, &data, 1, &how, &outputs, &m), 0);
    w[0][1] = 1;
    assert_int_equal(oracle_check_combine(&route, &data, 1, &how, &outputs, &m), -1);
    oracle_route_free(&route);
}

/* ---- Numbers ----------------------------------------------------------------------------------------------------- */

static void every_code_survives_a_round_trip(void **state)
{
    static const int dtypes[] = {EPX_BF16, EPX_FP16, EPX_FP8_E4M3};

    (void)state;
    for (int d = 0; d < 3; d++)
        for (uint32_t code = 0; code < (dtypes[d] == EPX_FP8_E4M3 ? 256u : 65536u); code++) {
            uint32_t back = 0;
            float x = oracle_to_float(dtypes[d], &code);
            if (isnan(x))
                continue;
            oracle_from_float(dtypes[d], x, &back);
            assert_int_equal(back, code);
        }
}

/* The nearest of all codes, the even one on a tie, by trying each: the definition of rounding. */
static uint8_t nearest_e4m3(float value)
{
    int best = 0;
    double distance = INFINITY;

    for (int code = 0; code < 0x7f; code++) {
        double d = fabs((double)oracle_e4m3_to_float((uint8_t)code) - fabs((double)value));
        if (d < distance || (d == distance && code % 2 == 0)) {
            best = code;
            distance = d;
        }
    }
    return (uint8_t)(best | (signbit(value) ? 0x80 : 0));
}

static void fp8_rounds_to_the_nearest(void **state)
{
    uint32_t bits = 1;

    (void)state;
    for (int i = 0; i < 20000; i++) {
        float value;
        bits = bits * 1664525 + 1013904223;
        uint32_t pattern = (bits & 0x80ffffff) + ((112 + (bits >> 24) % 24) << 23);
        memcpy(&value, &pattern, 4);
        assert_int_equal(oracle_float_to_e4m3(value), nearest_e4m3(value));
    }
    for (int code = 0; code < 0x7e; code++) { /* the ties themselves, and their neighbours */
        float tie = (oracle_e4m3_to_float((uint8_t)code) + oracle_e4m3_to_float((uint8_t)(code + 1))) / 2;
        assert_int_equal(oracle_float_to_e4m3(tie), nearest_e4m3(tie));
        assert_int_equal(oracle_float_to_e4m3(nextafterf(tie, 0)), nearest_e4m3(nextafterf(tie, 0)));
        assert_int_equal(oracle_float_to_e4m3(nextafterf(tie, 1e9f)), nearest_e4m3(nextafterf(tie, 1e9f)));
    }
    assert_int_equal(oracle_float_to_e4m3(1e30f), 0x7e);
    assert_int_equal(oracle_float_to_e4m3(-500.0f), 0xfe);
}

static void half_rounds_to_even(void **state)
{
    static const struct {
        float value;
        uint16_t bf16, fp16;
    } cases[] = {{1.0f, 0x3f80, 0x3c00},         {1.00390625f, 0x3f80, 0x3c04}, {1.01171875f, 0x3f82, 0x3c0c},
                 {65519.0f, 0x4780, 0x7bff},     {65520.0f, 0x4780, 0x7c00},    {0x1p-24f, 0x3380, 0x0001},
                 {0x1p-25f, 0x3300, 0x0000},     {0x1.8p-24f, 0x33c0, 0x0002},  {-2.5f, 0xc020, 0xc100},
                 {0x1.ff8p-15f, 0x3880, 0x03ff}, {0x1.ffcp-15f, 0x3880, 0x0400}};

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        uint16_t b, h;
        oracle_from_float(EPX_BF16, cases[i].value, &b);
        oracle_from_float(EPX_FP16, cases[i].value, &h);
        assert_int_equal(b, cases[i].bf16);
        assert_int_equal(h, cases[i].fp16);
    }
}

/* Two blocks, the second short: amax 448 gives scale 1, amax 0 the floor of 1e-4. */
static void cast_scales_each_block(void **state)
{
    float x[130] = {448, -224, 1, 0.5f};
    uint8_t q[130];
    float scales[2];

    (void)state;
    oracle_cast_fp8(q, scales, 0, 0, x, EPX_FP32, 130);
    assert_true(scales[0] == 448 * (1.0f / 448) && scales[1] == 1e-4f * (1.0f / 448));
    assert_int_equal(q[0], 0x7e);
    assert_int_equal(q[1], 0xf6);
    assert_int_equal(q[2], 0x38);
    assert_int_equal(q[3], 0x30);
    assert_int_equal(q[129], 0);
}

static void cast_rounds_scales_up_to_powers_of_two(void **state)
{
    float x[129] = {[0] = 450, [128] = 448.0f * 4};
    uint8_t q[129], packed[4];
    float scales[2];

    (void)state;
    oracle_cast_fp8(q, scales, 0, 1, x, EPX_FP32, 129);
    assert_true(scales[0] == 2 && scales[1] == 4);
    assert_int_equal(q[0], 0x76); /* 225 -> 224 */
    assert_int_equal(q[128], 0x7e);
    oracle_cast_fp8(q, packed, 1, 0, x, EPX_FP32, 129);
    assert_int_equal(packed[0], 128);
    assert_int_equal(packed[1], 129);
    assert_int_equal(packed[2] | packed[3], 0);
}

static void logfmt_keeps_to_its_bound(void **state)
{
    uint16_t row[300];
    float decoded[300], bound[300];
    int off = 0;

    (void)state;
    for (uint64_t key = 0; key < 100; key++) {
        workload_fill(row, EPX_BF16, 300, key % 2 ? WORKLOAD_SMALL : WORKLOAD_EXTREME, key);
        oracle_logfmt(decoded, bound, row, 300);
        for (int i = 0; i < 300; i++) {
            float x = oracle_to_float(EPX_BF16, &row[i]);
            assert_true(fabsf(decoded[i] - x) <= bound[i]);
            assert_true(bound[i] <= fabsf(x) * 1.1f);
            off += decoded[i] != x;
        }
    }
    assert_in_range(off, 1000, 30000);
}

static void logfmt_leaves_large_and_flat_blocks_alone(void **state)
{
    uint16_t row[128];
    float decoded[128], bound[128];

    (void)state;
    for (int i = 0; i < 128; i++)
        row[i] = 0x3f00; /* all 0.5: amin = amax */
    oracle_logfmt(decoded, bound, row, 128);
    assert_true(decoded[5] == 0.5f && bound[5] == 0);
    row[7] = 0x3f80; /* 1.0 */
    oracle_logfmt(decoded, bound, row, 128);
    assert_true(decoded[7] == 1 && bound[5] == 0 && bound[7] == 0);
}

static void calc_diff_is_zero_only_for_equals(void **state)
{
    float x[3] = {1, 2, 3}, y[3] = {1, 2, 4};

    (void)state;
    assert_true(fabs(calc_diff(EPX_FP32, x, x, 3)) < 1e-12);
    /* 1 - 2 (4 + 9 + 20) / (8 + 18 + 41) */
    assert_true(fabs(calc_diff(EPX_FP32, x, y, 3) - (1 - 66.0 / 67)) < 1e-12);
}

UNIT_TESTS(flat_rows_go_by_rank_and_token, rank_major_has_a_zone_per_rank,
           low_latency_expert_major_has_a_zone_per_expert, high_throughput_expert_major_is_padded,
           a_masked_rank_sends_nothing, dispatch_check_finds_every_kind_of_change, compact_topk_is_ascending,
           combine_sums_what_experts_return, combine_skips_masked_ranks, results_and_weights_go_where_dispatch_put_them,
           returned_weights_stand_at_their_entry, every_code_survives_a_round_trip, fp8_rounds_to_the_nearest,
           half_rounds_to_even, cast_scales_each_block, cast_rounds_scales_up_to_powers_of_two,
           logfmt_keeps_to_its_bound, logfmt_leaves_large_and_flat_blocks_alone, calc_diff_is_zero_only_for_equals)
