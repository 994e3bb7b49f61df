/* SPDX-License-Identifier: Apache-2.0 */
/* NVFP4 rows against a plain reference: values by search in a table, reciprocals by division. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "device/cpu/math.h"
#include "epx/epx.h"
#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"
#include "util/nvfp4.h"

enum { HIDDEN = 512 };

static const float e2m1[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};

/* The nearest value; of two that are as near, the one with the even code. */
static uint8_t plain_e2m1(float x)
{
    const double a = fabs((double)x);
    int best = 0;

    for (int i = 1; i < 8; i++) {
        const double d = fabs(a - (double)e2m1[i]), before = fabs(a - (double)e2m1[best]);
        if (d < before || (d == before && i % 2 == 0))
            best = i;
    }
    return (uint8_t)(best | (signbit(x) ? 8 : 0));
}

static uint8_t plain_e4m3(float x)
{
    int best = 0;

    for (int i = 1; i < 127; i++) {
        const double d = fabs((double)x - (double)e4m3_to_float((uint8_t)i));
        const double before = fabs((double)x - (double)e4m3_to_float((uint8_t)best));
        if (d < before || (d == before && i % 2 == 0))
            best = i;
    }
    return (uint8_t)best;
}

static void codes_are_the_nearest(void **state)
{
    (void)state;
    for (int i = -7000; i <= 7000; i++) {
        const float x = (float)i / 1000.0f;
        assert_int_equal(float_to_e2m1(x) & (x == 0 ? 7 : 15), plain_e2m1(x) & (x == 0 ? 7 : 15));
    }
    for (int i = 0; i < 16; i++)
        assert_int_equal(float_to_e2m1(e2m1_to_float((uint8_t)i)), i);
    assert_int_equal(float_to_e2m1(1e30f), 7);
    assert_int_equal(float_to_e2m1(-INFINITY), 15);
    assert_int_equal(float_to_e2m1(NAN), 7);
    for (int i = 0; i < 8; i++)
        assert_true(e2m1_to_float((uint8_t)i) == e2m1[i] && e2m1_to_float((uint8_t)(i | 8)) == -e2m1[i]);
}

static float draw(unsigned *seed)
{
    *seed = *seed * 1664525u + 1013904223u;
    return ((float)(int)(*seed >> 8) - 8388608.0f) / 2097152.0f * ldexpf(1.0f, (int)(*seed >> 4 & 7) - 4);
}

/* A row of bf16, and the scale that its caller gives with it. */
static float draw_row(uint16_t *x, unsigned seed)
{
    float most = 0;

    for (int i = 0; i < HIDDEN; i++) {
        x[i] = i / 16 % 5 == 4 ? 0 : float_to_bf16(draw(&seed));
        most = fmaxf(most, fabsf(bf16_to_float(x[i])));
    }
    return most > 0 ? 2688.0f / most : 0;
}

static void rows_are_the_references(void **state)
{
    uint8_t row[HIDDEN];
    uint16_t x[HIDDEN];

    (void)state;
    for (unsigned seed = 1; seed <= 20; seed++) {
        const float G = draw_row(x, seed);
        float kept;

        assert_int_equal(math_nvfp4_encode(row, x, HIDDEN, G), nvfp4_row_bytes(HIDDEN));
        for (int b = 0; b < HIDDEN / 16; b++) {
            float v = 0, inverse, t;
            for (int i = 0; i < 16; i++)
                v = fmaxf(v, fabsf(bf16_to_float(x[16 * b + i])));
            t = G * (v * (1.0f / 6.0f));
            assert_int_equal(row[HIDDEN / 2 + b], plain_e4m3(t));
            inverse = t == 0 ? 0 : 1.0f / (e4m3_to_float(plain_e4m3(t)) * (1.0f / G));
            for (int i = 0; i < 16; i++) {
                const int at = 16 * b + i;
                const float value = bf16_to_float(x[at]) * inverse;
                assert_int_equal(row[at / 2] >> at % 2 * 4 & (value == 0 ? 7 : 15),
                                 plain_e2m1(value) & (value == 0 ? 7 : 15));
            }
        }
        memcpy(&kept, row + HIDDEN / 2 + HIDDEN / 16, 4);
        assert_true(kept == G);
    }
    assert_int_equal(nvfp4_row_bytes(512), 304);
}

/* Sums of NVFP4 rows: code * (s / G * weight), fused, in order; rounded once. */
static void sums_are_the_references(void **state)
{
    static const float weights[3] = {0.25f, 1.0f, 0.7f};
    uint16_t x[3][HIDDEN], out[HIDDEN];
    uint8_t rows[3][HIDDEN];
    struct reduce_row list[3];

    (void)state;
    for (int r = 0; r < 3; r++) {
        const float G = r == 1 ? 0 : draw_row(x[r], 77u + (unsigned)r);
        if (r == 1)
            memset(x[r], 0, sizeof(x[r])); /* a row of zeros */
        math_nvfp4_encode(rows[r], x[r], HIDDEN, G);
        list[r] = (struct reduce_row){rows[r], weights[r], ROW_NVFP4};
    }
    math_reduce(out, EPX_BF16, HIDDEN, list, 3, 1, NULL, NULL);
    for (int i = 0; i < HIDDEN; i++) {
        float sum = 0;
        for (int r = 0; r < 3; r++) {
            float G, f;
            memcpy(&G, rows[r] + HIDDEN / 2 + HIDDEN / 16, 4);
            f = e4m3_to_float(rows[r][HIDDEN / 2 + i / 16]) * (G == 0 ? 1.0f : 1.0f / G) * weights[r];
            sum = fmaf(e2m1_to_float((uint8_t)(rows[r][i / 2] >> i % 2 * 4 & 15)), f, sum);
        }
        assert_int_equal(out[i], float_to_bf16(sum));
    }
}

/* What e2m1 can say comes back as it was. */
static void exact_values_come_back(void **state)
{
    uint16_t x[HIDDEN], out[HIDDEN];
    uint8_t row[HIDDEN];
    struct reduce_row one = {row, 1.0f, ROW_NVFP4};

    (void)state;
    for (int i = 0; i < HIDDEN; i++)
        x[i] = float_to_bf16(e2m1[(i + i / 16) % 8] * (i % 3 ? 1.0f : -1.0f));
    for (int b = 0; b < HIDDEN / 16; b++)
        x[16 * b] = float_to_bf16(6.0f);
    math_nvfp4_encode(row, x, HIDDEN, 2688.0f / 6.0f);
    math_reduce(out, EPX_BF16, HIDDEN, &one, 1, 0, NULL, NULL);
    for (int i = 0; i < HIDDEN; i++)
        assert_true(fabsf(bf16_to_float(out[i]) - bf16_to_float(x[i])) <= 1e-3f);
}

/* ---- On ranks: what a device encodes, sends and sums is what the functions above give ------------------------- */

/* What cannot be encoded is NaN, block by block, whatever the processor; what is too small is 0. */
static void what_cannot_be_encoded_is_nan(void **state)
{
    static const struct {
        uint16_t x;                 /* one element; the others are 1 */
        float row_scale;            /* of the caller */
        uint8_t scale, codes, code; /* of the block; of two neighbours; of the element */
    } all[] = {
        {0x3f80, 0.0f, 0x7f, 0x77, 7},        {0x3f80, INFINITY, 0x7f, 0x77, 7},     {0x3f80, -INFINITY, 0x7f, 0x77, 7},
        {0x3f80, NAN, 0x7f, 0x77, 7},         {0x3f80, -NAN, 0x7f, 0x77, 7},         {0x3f80, 1e-39f, 0x7f, 0x77, 7},
        {0xffc1, 2688.0f, 0x7f, 0x77, 7},     {0x7f81, 2688.0f, 0x7f, 0x77, 7},      {0x7f80, 0.0f, 0x7f, 0x77, 7},
        {0x7f80, 2688.0f / 6, 0x7e, 0x22, 7}, {0xff80, 2688.0f / 6, 0x7e, 0x22, 15}, {0x8000, 2688.0f, 0x7e, 0x77, 8}};
    uint8_t row[HIDDEN];
    uint16_t x[HIDDEN];

    (void)state;
    for (size_t i = 0; i < UNIT_COUNT(all); i++) {
        for (int at = 0; at < HIDDEN; at++)
            x[at] = at == 2 ? all[i].x : 0x3f80;
        math_nvfp4_encode(row, x, HIDDEN, all[i].row_scale);
        if (row[HIDDEN / 2] != all[i].scale || row[3] != all[i].codes || (row[1] & 15) != all[i].code)
            print_error("case %zu: scale %02x, codes %02x, code %x\n", i, row[HIDDEN / 2], row[3], row[1] & 15);
        assert_int_equal(row[HIDDEN / 2], all[i].scale);
        assert_int_equal(row[3], all[i].codes);
        assert_int_equal(row[1] & 15, all[i].code);
    }
    for (int at = 0; at < HIDDEN; at++)
        x[at] = at % 2 ? 0x8003 : 0x0003; /* subnormals, whose scale is infinite */
    math_nvfp4_encode(row, x, HIDDEN, INFINITY);
    for (int at = 0; at < HIDDEN / 2 + HIDDEN / 16; at++)
        assert_int_equal(row[at], 0);
}

/* What expert e returns for every row. With `special`, those that need words in docs/formats.md. */
static int special;

static float expert_row(uint16_t *x, int expert)
{
    unsigned seed = 1000u + (unsigned)expert;
    float most = 0;

    for (int i = 0; i < FIXTURE_HIDDEN; i++) {
        x[i] = float_to_bf16(draw(&seed));
        most = fmaxf(most, fabsf(bf16_to_float(x[i])));
    }
    if (special && expert == 2)
        x[3] = 0xffc1; /* a NaN */
    if (special && expert == 4)
        x[40] = 0xff80; /* an infinity */
    for (int i = 0; special && expert == 5 && i < FIXTURE_HIDDEN; i++)
        x[i] = i % 2 ? 0x8003 : 0x0003;
    if (special && expert == 1)
        return -INFINITY;
    if (special && (expert == 3 || expert == 5))
        return expert == 3 ? 0.0f : INFINITY;
    return 2688.0f / most;
}

static int check_token(struct fixture *s, int token)
{
    const int64_t *ids = (const int64_t *)s->idx.data + token * FIXTURE_TOPK;
    uint8_t rows[FIXTURE_TOPK][FIXTURE_HIDDEN];
    uint16_t x[FIXTURE_HIDDEN], expected[FIXTURE_HIDDEN];
    struct reduce_row list[FIXTURE_TOPK];
    int n = 0;

    for (int k = 0; k < FIXTURE_TOPK; k++) {
        if (ids[k] < 0)
            continue;
        math_nvfp4_encode(rows[k], x, FIXTURE_HIDDEN, expert_row(x, (int)ids[k]));
        list[n++] = (struct reduce_row){rows[k], ((const float *)s->weights.data)[token * FIXTURE_TOPK + k], ROW_NVFP4};
    }
    math_reduce(expected, EPX_BF16, FIXTURE_HIDDEN, list, n, 1, NULL, NULL);
    return memcmp(expected, (uint16_t *)s->combined.data + token * FIXTURE_HIDDEN, sizeof(expected));
}

/* s->arg: elements between rows. */
static int combine_round(struct fixture *s)
{
    const int64_t L = s->ll_rows.shape[0], rows = s->ll_rows.shape[1], pitch = FIXTURE_HIDDEN + *(const int *)s->arg;
    uint16_t *apart = calloc((size_t)(L * rows * pitch), sizeof(*apart));
    epx_tensor tokens = s->ll_rows;
    epx_combine_config config = EPX_COMBINE_CONFIG_INIT;
    epx_combine_inputs in = s->ll_cin;
    float *scales = calloc((size_t)(L * rows), sizeof(float));
    epx_tensor t = epx_tensor_make(scales, EPX_FP32, 2, L, rows, 0, 0);
    int32_t ready[FIXTURE_EXPERTS * 16]; /* rows may be read when these are 5: they are, in blocks of four rows */
    epx_tensor signals = epx_tensor_make(ready, EPX_INT32, 2, L, 16, 0, 0);
    int rc = 0;

    tokens.data = apart;
    tokens.stride[0] = rows * pitch;
    tokens.stride[1] = pitch;
    tokens.stride[2] = 1;
    config.nvfp4 = 1;
    in.tokens = &tokens;
    in.row_scales = &t;
    for (int i = 0; i < FIXTURE_EXPERTS * 16; i++)
        ready[i] = 5;
    if (s->nranks > 1) {
        in.signals = &signals;
        config.signal_rows = 4;
        config.signal_value = 5;
    }
    fixture_refill(s);
    if (!scales || !apart || epx_handle_update(s->ll, &s->idx, NULL, NULL) != EPX_OK ||
        fixture_sync(s, epx_dispatch(s->ll, &s->in, &s->ll_out, &s->ll_info, NULL, NULL)) != EPX_OK) {
        free(scales);
        free(apart);
        return fixture_fail(s, "epx_dispatch");
    }
    for (int64_t i = 0; i < L * rows; i++)
        scales[i] = expert_row(apart + i * pitch, (int)(s->rank * L + i / rows));
    if (fixture_sync(s, epx_combine(s->ll, &in, &s->cout, &config, NULL)) != EPX_OK)
        rc = fixture_fail(s, "epx_combine");
    for (int token = 0; !rc && token < s->tokens.shape[0]; token++)
        if (check_token(s, token))
            rc = fixture_fail(s, "a sum is not the reference's");
    free(scales);
    free(apart);
    return rc;
}

/* On the device of EPX_DEVICE: lanes.sh runs these on the GPU's kernels. */
static epx_group_config on_device(int timeout_ms)
{
    epx_group_config config = fixture_config(timeout_ms);

    config.device = EPX_DEVICE_AUTO;
    config.num_agents = 8;
    return config;
}

static void combine_gives_the_references_sums(void **state)
{
    const epx_group_config config = on_device(60000);

    (void)state;
    assert_int_equal(fixture_run(1, &config, combine_round, &(int){0}), 0);
    assert_int_equal(fixture_run(3, &config, combine_round, &(int){0}), 0);
    assert_int_equal(fixture_run(3, &config, combine_round, &(int){8}), 0);
    /* One expert each: the outer stride says nothing. */
    assert_int_equal(fixture_run(FIXTURE_EXPERTS, &config, combine_round, &(int){400}), 0);
    special = 1;
    assert_int_equal(fixture_run(3, &config, combine_round, &(int){0}), 0);
    special = 0;
}

/* The agents that have rows of one expert fail; those of their block that have none must not wait for them for good. */
static int silent_round(struct fixture *s)
{
    const int64_t L = s->ll_rows.shape[0];
    epx_combine_config config = EPX_COMBINE_CONFIG_INIT;
    epx_combine_inputs in = s->ll_cin;
    int32_t ready[FIXTURE_EXPERTS];
    epx_tensor signals = epx_tensor_make(ready, EPX_INT32, 2, L, 1, 0, 0);

    for (int i = 0; i < FIXTURE_EXPERTS; i++)
        ready[i] = s->rank || i != *(const int *)s->arg;
    in.signals = &signals;
    config.signal_value = 1;
    fixture_refill(s);
    if (epx_handle_update(s->ll, &s->idx, NULL, NULL) != EPX_OK ||
        fixture_sync(s, epx_dispatch(s->ll, &s->in, &s->ll_out, &s->ll_info, NULL, NULL)) != EPX_OK)
        return fixture_fail(s, "epx_dispatch");
    const epx_status status = fixture_sync(s, epx_combine(s->ll, &in, &s->cout, &config, NULL));
    return status == (s->rank ? EPX_ERR_PEER : EPX_ERR_TIMEOUT) ? 0 : fixture_fail(s, "epx_combine");
}

static void a_signal_that_does_not_come_ends_the_combine(void **state)
{
    epx_group_config config = on_device(400);

    (void)state;
    config.num_agents = 16;
    for (int expert = 0; expert < 2; expert++)
        assert_int_equal(fixture_run(2, &config, silent_round, &expert), 0);
}

/* ---- Dispatch: rows of the first 64 channels ------------------------------------------------------------------- */

enum { SENT = 64 };

struct received {
    int form; /* EPX_NVFP4_* */
    int64_t rows, scale_rows;
    uint8_t *codes;
    int32_t *scales, *src_rank, *src_token;
};

/* The word of scales of a row. */
static int32_t scale_word(const struct received *r, int64_t expert, int64_t row)
{
    const int32_t *block = r->scales + expert * r->scale_rows;

    return r->form == EPX_NVFP4_TILES ? block[row / 128 * 128 + row % 32 * 4 + row % 128 / 32] : block[row];
}

static int check_row(struct fixture *s, const struct received *r, int64_t expert, int64_t row, float scale)
{
    const int64_t at = expert * r->rows + row;
    uint16_t x[FIXTURE_HIDDEN];
    uint8_t expected[SENT];
    int32_t word = scale_word(r, expert, row);

    workload_token(&s->w, r->src_rank[at], r->src_token[at], x);
    math_nvfp4_encode(expected, x, SENT, scale);
    return memcmp(expected, r->codes + at * SENT / 2, SENT / 2) || memcmp(expected + SENT / 2, &word, 4);
}

static int dispatch_as(struct fixture *s, struct received *r, float *scale)
{
    const int64_t L = s->ll_rows.shape[0];
    epx_dispatch_config config = EPX_DISPATCH_CONFIG_INIT;
    epx_dispatch_inputs in = s->in;
    epx_dispatch_outputs out = s->ll_out;
    epx_tensor tokens = s->tokens, global = epx_tensor_make(scale, EPX_FP32, 1, 1, 0, 0, 0);
    epx_tensor codes = epx_tensor_make(r->codes, EPX_UINT8, 3, L, r->rows, SENT / 2, 0);
    epx_tensor scales = epx_tensor_make(r->scales, EPX_INT32, 3, L, r->scale_rows, 1, 0);
    epx_tensor src_rank = epx_tensor_make(r->src_rank, EPX_INT32, 2, L, r->rows, 0, 0);
    epx_tensor src_token = epx_tensor_make(r->src_token, EPX_INT32, 2, L, r->rows, 0, 0);

    config.nvfp4 = r->form;
    tokens.shape[1] = SENT;
    tokens.stride[0] = FIXTURE_HIDDEN;
    tokens.stride[1] = 1;
    in.tokens = &tokens;
    in.global_scale = *scale == 1.0f ? NULL : &global;
    out.tokens = &codes;
    out.scales = &scales;
    out.src_rank = &src_rank;
    out.src_token = &src_token;
    fixture_refill(s);
    if (epx_handle_update(s->ll, &s->idx, NULL, NULL) != EPX_OK ||
        fixture_sync(s, epx_dispatch(s->ll, &in, &out, &s->ll_info, &config, NULL)) != EPX_OK)
        return fixture_fail(s, "epx_dispatch");
    for (int64_t e = 0; e < L; e++)
        for (int64_t row = 0; row < ((const int32_t *)s->ll_counts.data)[e]; row++)
            if (check_row(s, r, e, row, *scale))
                return fixture_fail(s, "a row is not the reference's");
    return 0;
}

static int dispatch_round(struct fixture *s)
{
    const int64_t L = s->ll_rows.shape[0], rows = s->ll_rows.shape[1];
    float scale = s->nranks == 1 ? 1.0f : 700.0f;
    int rc = 0;

    for (int form = EPX_NVFP4_ROWS; !rc && form <= EPX_NVFP4_TILES; form++) {
        struct received r = {form, rows, form == EPX_NVFP4_TILES ? (rows + 127) / 128 * 128 : rows, 0, 0, 0, 0};
        r.codes = calloc((size_t)(L * rows), SENT / 2);
        r.scales = calloc((size_t)(L * r.scale_rows), 4);
        r.src_rank = calloc((size_t)(L * rows), 4);
        r.src_token = calloc((size_t)(L * rows), 4);
        rc = dispatch_as(s, &r, &scale);
        free(r.codes);
        free(r.scales);
        free(r.src_rank);
        free(r.src_token);
    }
    return rc;
}

static void dispatch_sends_the_references_rows(void **state)
{
    const epx_group_config config = on_device(60000);

    (void)state;
    assert_int_equal(fixture_run(1, &config, dispatch_round, NULL), 0);
    assert_int_equal(fixture_run(3, &config, dispatch_round, NULL), 0);
}

UNIT_TESTS(dispatch_sends_the_references_rows, combine_gives_the_references_sums,
           a_signal_that_does_not_come_ends_the_combine, codes_are_the_nearest, rows_are_the_references,
           sums_are_the_references, exact_values_come_back, what_cannot_be_encoded_is_nan)
