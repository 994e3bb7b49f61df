/* SPDX-License-Identifier: Apache-2.0 */
/* The CPU's bulk primitives against element-by-element references, at odd sizes and odd addresses.
 * ctest: labels=notsan (one thread) */
#include <float.h>
#include <math.h>
#include <string.h>

#include "device/cpu/math.h"
#include "device/cpu/math_levels.h"
#include "epx/epx.h"
#include "util/logfmt.h"
#include "util/numeric.h"
#include "tests/lib/unit.h"
#include "tests/lib/xorshift.h"

#define MAX_HIDDEN 16384
#define MAX_ROWS 33

static const int hiddens[] = {1, 4, 8, 24, 120, 128, 136, 200, 1000, 2048, 7168, 7176};
static const int dtypes[] = {EPX_BF16, EPX_FP16, EPX_FP32};
#define COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))

static uint64_t rng = 0x2545f4914f6cdd1du;

static uint32_t random_u32(void)
{
    return xorshift(&rng);
}

/* Roughly normal, times a power of two that varies a little. */
static float random_value(void)
{
    float x = 0.0f;
    for (int i = 0; i < 4; i++)
        x += (float)(random_u32() & 0xffff) / 65536.0f - 0.5f;
    return ldexpf(x, (int)(random_u32() % 6) - 3);
}

static size_t element_bytes(int dtype)
{
    return dtype == EPX_FP32 ? 4 : 2;
}

static float element(const void *row, int dtype, int i)
{
    uint16_t h;
    float x;
    if (dtype == EPX_FP32) {
        memcpy(&x, (const char *)row + (size_t)i * 4, 4);
        return x;
    }
    memcpy(&h, (const char *)row + (size_t)i * 2, 2);
    return dtype == EPX_FP16 ? fp16_to_float(h) : bf16_to_float(h);
}

static void set_element(void *row, int dtype, int i, float x)
{
    uint16_t h = dtype == EPX_FP16 ? float_to_fp16(x) : float_to_bf16(x);
    if (dtype == EPX_FP32)
        memcpy((char *)row + (size_t)i * 4, &x, 4);
    else
        memcpy((char *)row + (size_t)i * 2, &h, 2);
}

/* Memory that ends exactly after the bytes and starts at an odd multiple of the element, so that sanitizers see
 * both. */
static void *row_alloc(size_t bytes, size_t skew, void **base)
{
    *base = malloc(bytes + skew + 1);
    assert_non_null(*base);
    *base = realloc(*base, bytes + skew ? bytes + skew : 1);
    assert_non_null(*base);
    return (char *)*base + skew;
}

static void *random_row(int dtype, int hidden, size_t skew, void **base)
{
    void *row = row_alloc((size_t)hidden * element_bytes(dtype), skew, base);
    for (int i = 0; i < hidden; i++)
        set_element(row, dtype, i, random_value());
    return row;
}

/* ---- copies ------------------------------------------------------------------------------------------------------ */

/* step: between two destinations; those of a step of 200064 are multiples of 64, for stores past the cache. */
static void check_copy_many(void (*copy)(void *const *to, int n, const void *from, size_t bytes), size_t step)
{
    static const size_t sizes[] = {0, 1, 16, 100, 256, 4096, 8192, 8200, 14336, 65536, 200000};
    uint8_t *from = malloc(200001), *all = aligned_alloc(64, 5 * 200064);
    for (int i = 0; i < 200001; i++)
        from[i] = (uint8_t)random_u32();
    for (int s = 0; s < COUNT(sizes); s++) {
        for (int n = 0; n <= 5; n++) {
            void *to[5];
            memset(all, 0xa5, 5 * 200064);
            for (int i = 0; i < 5; i++)
                to[i] = all + (size_t)i * step;
            copy(to, n, from + 1, sizes[s]);
            for (int i = 0; i < 5; i++) {
                const uint8_t *got = to[i];
                assert_true(i >= n || memcmp(got, from + 1, sizes[s]) == 0);
                assert_int_equal(got[i < n ? sizes[s] : 0], 0xa5);
                assert_true(i == 0 || got[-1] == 0xa5);
            }
        }
    }
    free(from);
    free(all);
}

static void test_copy_many_writes_all(void **state)
{
    (void)state;
    check_copy_many(math_copy_many, 200018);
    check_copy_many(math_copy_many_past, 200018);
    check_copy_many(math_copy_many_past, 200064);
}

static void test_copy_and_zero(void **state)
{
    uint8_t from[100], to[100];
    (void)state;
    memset(from, 7, sizeof(from));
    memset(to, 1, sizeof(to));
    math_copy(to + 3, from + 1, 50);
    assert_int_equal(to[2], 1);
    assert_memory_equal(to + 3, from, 50);
    assert_int_equal(to[53], 1);
    math_fill_zero(to + 4, 48);
    assert_int_equal(to[3], 7);
    assert_int_equal(to[4], 0);
    assert_int_equal(to[51], 0);
    assert_int_equal(to[52], 7);
    math_copy(NULL, NULL, 0);
    math_fill_zero(NULL, 0);
}

/* ---- FP8 --------------------------------------------------------------------------------------------------------- */

/* What a cast must give for one block, straight from the definition. */
static float reference_scale(const void *x, int dtype, int at, int n, int power_of_two, float *mul)
{
    float amax = 1e-4f, inv;
    int e;
    for (int i = at; i < at + n; i++) {
        float a = fabsf(element(x, dtype, i));
        if (!isnan(a) && a > amax)
            amax = a;
    }
    if (isinf(amax))
        amax = FLT_MAX;
    inv = amax * (1.0f / 448.0f);
    *mul = 448.0f / amax;
    if (power_of_two) {
        float m = frexpf(inv, &e); /* inv = m * 2^e with m in [1/2, 1) */
        e -= m == 0.5f;
        inv = ldexpf(1.0f, e);
        *mul = ldexpf(1.0f, -e);
    }
    return inv;
}

static void check_cast(const void *x, int dtype, int hidden, enum scale_kind kind, int round)
{
    int blocks = (hidden + 127) / 128;
    size_t scale_bytes = kind == SCALE_FLOAT ? (size_t)blocks * 4 : (size_t)(blocks + 3) / 4 * 4;
    void *q_base, *scale_base;
    uint8_t *q = row_alloc((size_t)hidden, 3, &q_base), *scales = row_alloc(scale_bytes, 4, &scale_base);
    memset(scales, 0xee, scale_bytes);
    math_cast_fp8(q, scales, kind, round, x, dtype, hidden);
    for (int b = 0; b < blocks; b++) {
        int at = b * 128, n = hidden - at < 128 ? hidden - at : 128;
        float mul, inv = reference_scale(x, dtype, at, n, round || kind == SCALE_UE8M0, &mul), stored;
        if (kind == SCALE_FLOAT) {
            memcpy(&stored, scales + (size_t)b * 4, 4);
        } else {
            int32_t word;
            memcpy(&word, scales + (size_t)(b / 4) * 4, 4);
            stored = ldexpf(1.0f, (word >> b % 4 * 8 & 0xff) - 127);
        }
        assert_true(stored == inv);
        for (int i = at; i < at + n; i++)
            assert_int_equal(q[i], float_to_e4m3(element(x, dtype, i) * mul));
    }
    for (size_t b = (size_t)blocks; kind == SCALE_UE8M0 && b < scale_bytes; b++)
        assert_int_equal(scales[b], 0);
    free(q_base);
    free(scale_base);
}

static void check_cast_kinds(const void *x, int dtype, int hidden)
{
    check_cast(x, dtype, hidden, SCALE_FLOAT, 0);
    check_cast(x, dtype, hidden, SCALE_FLOAT, 1);
    check_cast(x, dtype, hidden, SCALE_UE8M0, 0);
    check_cast(x, dtype, hidden, SCALE_UE8M0, 1);
}

static void test_cast_matches_definition(void **state)
{
    (void)state;
    for (int d = 0; d < COUNT(dtypes); d++) {
        for (int h = 0; h < COUNT(hiddens); h++) {
            void *base, *x = random_row(dtypes[d], hiddens[h], element_bytes(dtypes[d]), &base);
            check_cast_kinds(x, dtypes[d], hiddens[h]);
            free(base);
        }
    }
}

/* Every bf16 and fp16 pattern as an element, NaN and infinity among ordinary values too. */
static void test_cast_every_pattern(void **state)
{
    uint16_t x[16384];
    (void)state;
    for (uint32_t start = 0; start < 65536; start += 16384) {
        for (uint32_t i = 0; i < 16384; i++)
            x[i] = (uint16_t)((start + i) * 40503u);
        check_cast_kinds(x, EPX_BF16, 16384);
        check_cast_kinds(x, EPX_FP16, 16384);
        for (uint32_t i = 0; i < 16384; i++)
            x[i] = (uint16_t)(start + i);
        check_cast_kinds(x, EPX_BF16, 16384);
        check_cast_kinds(x, EPX_FP16, 16384);
    }
}

static void test_cast_random_float_bits(void **state)
{
    float x[2048];
    (void)state;
    for (int round = 0; round < 40; round++) {
        for (int i = 0; i < 2048; i++)
            x[i] = float_from_bits(random_u32());
        check_cast_kinds(x, EPX_FP32, 2048);
    }
}

static void test_cast_nan_and_infinity(void **state)
{
    float x[128] = {0}, scale;
    uint8_t q[128];
    (void)state;
    x[0] = 448.0f;
    x[5] = NAN;
    math_cast_fp8(q, &scale, SCALE_FLOAT, 0, x, EPX_FP32, 128);
    assert_true(scale == 448.0f * (1.0f / 448.0f));
    assert_int_equal(q[0], 0x7e);
    assert_int_equal(q[5] & 0x7f, 0x7f);
    assert_int_equal(q[6], 0);
    x[7] = -INFINITY;
    math_cast_fp8(q, &scale, SCALE_FLOAT, 0, x, EPX_FP32, 128);
    assert_true(scale > 7e35f && isfinite(scale));
    assert_int_equal(q[7], 0xfe);
    assert_int_equal(q[5] & 0x7f, 0x7f);
}

static void test_cast_power_of_two_scale_is_exact_at_448(void **state)
{
    float x[128] = {0}, scale;
    uint8_t q[128];
    (void)state;
    x[3] = 448.0f * 4.0f; /* amax / 448 is a power of two: no step up */
    math_cast_fp8(q, &scale, SCALE_FLOAT, 1, x, EPX_FP32, 128);
    assert_true(scale == 4.0f);
    assert_int_equal(q[3], 0x7e);
    x[3] = nextafterf(x[3], 1e9f) * 1.0001f;
    math_cast_fp8(q, &scale, SCALE_FLOAT, 1, x, EPX_FP32, 128);
    assert_true(scale == 8.0f);
}

/* ---- LogFMT-10 --------------------------------------------------------------------------------------------------- */

struct logfmt_row {
    uint16_t x[MAX_HIDDEN];
    float back[MAX_HIDDEN + 1];
    _Alignas(16) uint8_t coded[MAX_HIDDEN * 2 + 256];
};

static struct logfmt_row logfmt_rows[2];

static size_t encode(struct logfmt_row *row, int hidden)
{
    size_t bound = math_logfmt_bound(hidden), bytes;
    memset(row->coded, 0xcc, sizeof(row->coded));
    bytes = math_logfmt_encode(row->coded, row->x, hidden);
    assert_true(bytes <= bound);
    assert_int_equal(bytes % 16, 0);
    assert_int_equal(bound % 16, 0);
    assert_int_equal(row->coded[bytes], 0xcc);
    row->back[hidden] = 1234.0f;
    math_logfmt_decode(row->back, row->coded, hidden);
    assert_true(row->back[hidden] == 1234.0f);
    return bytes;
}

/* 1 if the block is coded by the rule, and the step between neighbouring codes in powers of two. */
static int logfmt_rule(const uint16_t *x, int hidden, int block, double *step, double *log_amin)
{
    double amax = 0.0, amin = INFINITY;
    if (hidden - block * 128 < 128)
        return 0;
    for (int i = block * 128; i < block * 128 + 128; i++) {
        double a = fabs((double)bf16_to_float(x[i]));
        if (!(a < 1.0))
            return 0;
        amax = a > amax ? a : amax;
        amin = a < amin ? a : amin;
    }
    if (amin >= amax)
        return 0;
    *log_amin = fmax(log2(amin), log2(amax) - 32.0);
    *step = (log2(amax) - *log_amin) / 510.0;
    return 1;
}

/* Raw blocks are exact; coded values lie within half a step, values below the range become 0 or its lowest code. */
static void check_logfmt_errors(const struct logfmt_row *row, int hidden)
{
    for (int b = 0; b < (hidden + 127) / 128; b++) {
        double step = 0.0, log_amin = 0.0;
        int coded = logfmt_rule(row->x, hidden, b, &step, &log_amin);
        for (int i = b * 128; i < hidden && i < b * 128 + 128; i++) {
            float x = bf16_to_float(row->x[i]), y = row->back[i];
            double half = exp2(step) - 1.0;
            assert_int_equal(!!(row->coded[b / 8] >> b % 8 & 1), coded);
            if (!coded) {
                assert_int_equal(float_bits(x), float_bits(y));
                continue;
            }
            assert_int_equal(!!signbit(x), !!signbit(y));
            /* Rounded in the linear domain: half the distance of two neighbouring codes, plus float noise. */
            if (x != 0.0f && log2(fabs((double)x)) >= log_amin)
                assert_true(fabs((double)x - (double)y) <= fabs((double)x) * (half * 0.51 + 2e-5) + 1e-45);
            else
                assert_true(fabs((double)y) <= exp2(log_amin) * 1.0001);
            if (x == 0.0f)
                assert_true(y == 0.0f);
        }
    }
}

static void test_logfmt_error_bound(void **state)
{
    struct logfmt_row *row = &logfmt_rows[0];
    (void)state;
    for (int h = 0; h < COUNT(hiddens); h++) {
        for (int scale = 0; scale < 5; scale++) {
            for (int i = 0; i < hiddens[h]; i++)
                row->x[i] = float_to_bf16(ldexpf(random_value(), scale * -30));
            if (scale == 1)
                row->x[hiddens[h] / 2] = 0x8000; /* minus zero */
            encode(row, hiddens[h]);
            check_logfmt_errors(row, hiddens[h]);
        }
    }
}

/* Wide ranges, subnormals, blocks of neighbouring numbers: any pattern below 1. */
static void test_logfmt_any_pattern(void **state)
{
    struct logfmt_row *row = &logfmt_rows[0];
    (void)state;
    for (int round = 0; round < 30; round++) {
        for (int b = 0; b < 64; b++) {
            uint32_t top = 1 + random_u32() % 0x3f7f, spread = 1 + random_u32() % (round < 10 ? 2 : top);
            for (int i = 0; i < 128; i++)
                row->x[b * 128 + i] = (uint16_t)((top > spread ? top - random_u32() % spread : random_u32() % top) |
                                                 (random_u32() & 0x8000));
        }
        encode(row, 8192);
        check_logfmt_errors(row, 8192);
    }
}

static void test_logfmt_raw_blocks(void **state)
{
    struct logfmt_row *row = &logfmt_rows[0];
    (void)state;
    for (int i = 0; i < 1024; i++)
        row->x[i] = float_to_bf16(random_value() * 0.01f);
    row->x[5] = 0x3f80;           /* block 0: a 1.0 */
    row->x[128 + 9] = 0x7fc1;     /* block 1: a NaN */
    row->x[256 + 127] = 0xff80;   /* block 2: minus infinity */
    memset(row->x + 384, 0, 256); /* block 3: all zero */
    for (int i = 512; i < 640; i++)
        row->x[i] = 0x3c12; /* block 4: all equal */
    assert_int_equal(encode(row, 1024), 48 + 5 * 256 + 3 * 160);
    assert_int_equal(row->coded[0], 0xe0);
    for (int i = 0; i < 640; i++)
        assert_int_equal(float_bits(row->back[i]), (uint32_t)row->x[i] << 16);
    check_logfmt_errors(row, 1024);
}

static void test_logfmt_zero_keeps_largest(void **state)
{
    struct logfmt_row *row = &logfmt_rows[0];
    (void)state;
    for (int i = 0; i < 128; i++)
        row->x[i] = i % 3 ? float_to_bf16(ldexpf(0.75f, -(i % 60))) : 0;
    assert_int_equal(encode(row, 128), 16 + 160);
    assert_true(row->back[0] == 0.0f);
    assert_true(fabsf(row->back[1] - bf16_to_float(row->x[1])) <= 1e-6f);
    check_logfmt_errors(row, 128);
}

/* The decoder takes the exponent for granted. */
static void test_logfmt_powers_lie_in_one_octave(void **state)
{
    static const float c[] = {LOGFMT_EXP0, LOGFMT_EXP1, LOGFMT_EXP2, LOGFMT_EXP3, LOGFMT_EXP4, LOGFMT_EXP5};
    double worst = 0.0;
    (void)state;
    for (uint32_t i = 0; i < 1u << 23; i++) {
        const float m = float_from_bits(0x3f800000u | i);
        float p = c[5];
        for (int k = 4; k >= 0; k--)
            p = fmaf(p, m, c[k]);
        assert_true(p >= 1.0f && p < 2.0f);
        if (i % 1024 == 0)
            worst = fmax(worst, fabs((double)p / exp2((double)m - 1.0) - 1.0));
    }
    assert_true(worst < 3e-7);
}

static void test_logfmt_same_input_same_bytes(void **state)
{
    struct logfmt_row *one = &logfmt_rows[0], *two = &logfmt_rows[1];
    size_t bytes;
    (void)state;
    for (int i = 0; i < 7176; i++)
        two->x[i] = one->x[i] = float_to_bf16(random_value());
    bytes = encode(one, 7176);
    assert_int_equal(encode(two, 7176), bytes);
    assert_memory_equal(one->coded, two->coded, bytes);
    assert_memory_equal(one->back, two->back, 7176 * sizeof(float));
}

/* ---- reduce ------------------------------------------------------------------------------------------------------ */

struct reduce_case {
    int dtype, hidden, n, weighted, biases, logfmt;
};

/* Sums in double would not round as the contract says: plain float, one step at a time. */
static float reference_sum(const struct reduce_case *c, const struct reduce_row *rows, const void *const *plain,
                           float *const *decoded, const void *const *bias, int i)
{
    volatile float sum = 0.0f;
    for (int b = 0; b < c->biases; b++)
        sum += element(bias[b], c->dtype, i);
    for (int r = 0; r < c->n; r++) {
        const float x = decoded[r] ? decoded[r][i] : element(plain[r], c->dtype, i);
        sum = c->weighted ? fmaf(rows[r].weight, x, sum) : sum + x;
    }
    return sum;
}

/* Encoded, or left as it is for the sum to round. */
static void logfmt_of_row(struct reduce_row *row, float **decoded, void **base, int hidden, int format)
{
    void *coded = aligned_alloc(16, math_logfmt_bound(hidden));
    uint16_t *x = malloc((size_t)hidden * 2);
    memcpy(x, row->data, (size_t)hidden * 2);
    math_logfmt_encode(coded, x, hidden);
    *decoded = malloc((size_t)hidden * sizeof(float));
    math_logfmt_decode(*decoded, coded, hidden);
    row->format = format;
    free(x);
    if (format == ROW_ROUNDED) {
        free(coded);
        return;
    }
    row->data = coded;
    free(*base);
    *base = coded;
}

static void check_reduce(struct reduce_case c)
{
    struct reduce_row rows[MAX_ROWS];
    const void *plain[MAX_ROWS], *bias[2] = {NULL, NULL};
    float *decoded[MAX_ROWS] = {NULL};
    void *base[MAX_ROWS + 3];
    size_t size = element_bytes(c.dtype), bytes = (size_t)c.hidden * size;
    uint8_t *out = row_alloc(bytes, size, &base[MAX_ROWS + 2]), *expected = malloc(bytes + 1);
    for (int b = 0; b < c.biases; b++)
        bias[b] = random_row(c.dtype, c.hidden, size, &base[MAX_ROWS + b]);
    for (int r = 0; r < c.n; r++) {
        plain[r] = random_row(c.dtype, c.hidden, size * (size_t)(r % 5), &base[r]);
        rows[r] = (struct reduce_row){plain[r], random_value(), ROW_PLAIN};
        if (c.logfmt && r % 3 != 1)
            logfmt_of_row(&rows[r], &decoded[r], &base[r], c.hidden, (r + c.n) % 2 ? ROW_LOGFMT : ROW_ROUNDED);
    }
    math_reduce(out, c.dtype, c.hidden, rows, c.n, c.weighted, bias[0], bias[1]);
    for (int i = 0; i < c.hidden; i++)
        set_element(expected, c.dtype, i, reference_sum(&c, rows, plain, decoded, bias, i));
    assert_memory_equal(out, expected, bytes);
    for (int r = 0; r < c.n; r++) {
        free(base[r]);
        free(decoded[r]);
    }
    for (int b = 0; b < c.biases; b++)
        free(base[MAX_ROWS + b]);
    free(base[MAX_ROWS + 2]);
    free(expected);
}

static void test_reduce_is_exact(void **state)
{
    static const int counts[] = {0, 1, 2, 3, 8, 32, 33};
    (void)state;
    for (int d = 0; d < COUNT(dtypes); d++)
        for (int h = 0; h < COUNT(hiddens); h++)
            for (int n = 0; n < COUNT(counts); n++)
                check_reduce((struct reduce_case){dtypes[d], hiddens[h], counts[n], n % 2 == h % 2, (n + h) % 3, 0});
}

static void test_reduce_of_logfmt_rows(void **state)
{
    (void)state;
    for (int h = 0; h < COUNT(hiddens); h++)
        for (int n = 1; n < 10; n += 3)
            check_reduce((struct reduce_case){EPX_BF16, hiddens[h], n, n != 4, h % 3, 1});
}

static void test_reduce_largest_hidden(void **state)
{
    (void)state;
    check_reduce((struct reduce_case){EPX_BF16, 16384, 8, 1, 0, 0});
    check_reduce((struct reduce_case){EPX_FP32, 16384, 8, 0, 1, 0});
}

/* One row and weight 1 gives the row back: every pattern survives the fast widening and rounding; NaN is canonical. */
static void test_reduce_every_pattern(void **state)
{
    uint16_t *x = malloc(131072), *out = malloc(131072);
    struct reduce_row row = {x, 1.0f, ROW_PLAIN};
    (void)state;
    for (uint32_t i = 0; i < 65536; i++)
        x[i] = (uint16_t)i;
    math_reduce(out, EPX_BF16, 65536, &row, 1, 1, NULL, NULL);
    for (uint32_t i = 0; i < 65536; i++)
        assert_int_equal(out[i], (i & 0x7fff) > 0x7f80 ? 0x7fc0 : i == 0x8000 ? 0 : i);
    math_reduce(out, EPX_BF16, 65536, &row, 1, 0, NULL, NULL);
    for (uint32_t i = 0; i < 65536; i++)
        assert_int_equal(out[i], (i & 0x7fff) > 0x7f80 ? 0x7fc0 : i == 0x8000 ? 0 : i);
    math_reduce(out, EPX_FP16, 65536, &row, 1, 1, NULL, NULL);
    for (uint32_t i = 0; i < 65536; i++)
        assert_int_equal(out[i], (i & 0x7fff) > 0x7c00 ? 0x7e00 : i == 0x8000 ? 0 : i);
    free(x);
    free(out);
}

/* ---- levels ------------------------------------------------------------------------------------------------------ */

#define ANY_HIDDEN (4096 + 8 + 3)
#define ANY_ROWS 11 /* of them two biases */

struct any_rows {
    uint8_t row[ANY_ROWS][ANY_HIDDEN * 4];
    uint8_t out[2][ANY_HIDDEN * 4];
    _Alignas(16) uint8_t coded[2][ANY_HIDDEN * 2 + 256];
};

/* Any bits: NaN, infinities and denormal numbers are among them. `tiny`: small 16-bit numbers. */
static struct any_rows *draw_any_rows(int tiny)
{
    struct any_rows *any = aligned_alloc(16, (sizeof(*any) + 15) / 16 * 16);
    assert_non_null(any);
    for (size_t i = 0; i < sizeof(any->row) / 2; i++) {
        const uint16_t bits = (uint16_t)(tiny ? random_u32() & 0x81ff : random_u32());
        memcpy((uint8_t *)any->row + 2 * i, &bits, 2);
    }
    return any;
}

static void compare_sums(const struct math_ops *level, int round)
{
    struct any_rows *any = draw_any_rows(round % 4 == 3);
    const int n = round % 10, weighted = round / 10 % 2, dtype = dtypes[round % COUNT(dtypes)];
    const int hidden = ANY_HIDDEN - round % 7 * 37;
    const void *bias0 = round % 3 > 0 ? any->row[9] : NULL, *bias1 = round % 3 > 1 ? any->row[10] : NULL;
    struct reduce_row rows[9];
    for (int r = 0; r < n; r++)
        rows[r] = (struct reduce_row){any->row[r], r % 3 ? random_value() : 1.0f, ROW_PLAIN};
    math_level_base->reduce(any->out[0], dtype, hidden, rows, n, weighted, bias0, bias1);
    level->reduce(any->out[1], dtype, hidden, rows, n, weighted, bias0, bias1);
    assert_memory_equal(any->out[0], any->out[1], (size_t)hidden * element_bytes(dtype));
    free(any);
}

static void compare_casts(const struct math_ops *level, int round)
{
    struct any_rows *any = draw_any_rows(round % 4 == 3);
    const enum scale_kind kind = round % 2 ? SCALE_UE8M0 : SCALE_FLOAT;
    const int dtype = dtypes[round % COUNT(dtypes)], hidden = ANY_HIDDEN - round % 7 * 37,
              blocks = (hidden + 127) / 128;
    uint8_t *scales[2] = {any->out[0] + ANY_HIDDEN + 1, any->out[1] + ANY_HIDDEN + 1};
    math_level_base->cast_fp8(any->out[0], scales[0], kind, round / 2 % 2, any->row[0], dtype, hidden);
    level->cast_fp8(any->out[1], scales[1], kind, round / 2 % 2, any->row[0], dtype, hidden);
    assert_memory_equal(any->out[0], any->out[1], (size_t)hidden);
    assert_memory_equal(scales[0], scales[1], kind == SCALE_FLOAT ? (size_t)blocks * 4 : (size_t)blocks);
    free(any);
}

/* Coded rows: of values below 1, most of them; LogFMT and NVFP4, there and back, and sums of them. */
static void compare_codes(const struct math_ops *level, int round)
{
    struct any_rows *any = draw_any_rows(0);
    const int hidden = (ANY_HIDDEN - round % 7 * 144) / 16 * 16, n = (int)math_level_base->logfmt_bound(hidden);
    uint16_t *x = (uint16_t *)any->row[0];
    struct reduce_row rows[3];
    for (int i = 0; i < hidden && round % 5; i++)
        x[i] &= 0xbf7f >> (round % 5 == 4 ? 3 : 0) | 0x8000;
    assert_int_equal(level->logfmt_bound(hidden), n);
    const size_t bytes = math_level_base->logfmt_encode(any->coded[0], x, hidden);
    assert_int_equal(level->logfmt_encode(any->coded[1], x, hidden), bytes);
    assert_memory_equal(any->coded[0], any->coded[1], bytes);
    math_level_base->logfmt_decode((float *)any->out[0], any->coded[0], hidden);
    level->logfmt_decode((float *)any->out[1], any->coded[0], hidden);
    assert_memory_equal(any->out[0], any->out[1], (size_t)hidden * 4);
    const size_t row = math_level_base->nvfp4_encode(any->row[1], x, hidden, 5.5f);
    assert_int_equal(level->nvfp4_encode(any->row[2], x, hidden, 5.5f), row);
    assert_memory_equal(any->row[1], any->row[2], (size_t)hidden / 2 + (size_t)hidden / 16 + 4);
    rows[0] = (struct reduce_row){any->coded[0], 0.75f, ROW_LOGFMT};
    rows[1] = (struct reduce_row){any->row[1], random_value(), ROW_NVFP4};
    rows[2] = (struct reduce_row){any->row[3], random_value(), ROW_PLAIN};
    math_level_base->reduce(any->out[0], EPX_BF16, hidden, rows, 3, 1, NULL, any->row[4]);
    level->reduce(any->out[1], EPX_BF16, hidden, rows, 3, 1, NULL, any->row[4]);
    assert_memory_equal(any->out[0], any->out[1], (size_t)hidden * 2);
    free(any);
}

/* Every level of the machine gives the bits of the lowest one, and leaves the thread's arithmetic as it was. */
static void test_levels_give_the_same_bits(void **state)
{
    const uint32_t odd = 0x7fc01234u;
    const struct math_ops *level;
    volatile float nan;
    (void)state;
    memcpy((void *)&nan, &odd, 4);
    for (int i = 1; (level = math_level(i)); i++) {
        print_message("level %s\n", level->name);
        for (int round = 0; round < 60; round++) {
            compare_sums(level, round);
            compare_casts(level, round);
            compare_codes(level, round);
        }
        const float sum = nan + 1.0f;
        assert_memory_equal(&sum, &odd, 4);
    }
}

static void test_level_is_what_the_environment_says(void **state)
{
    const struct math_ops *level, *highest = NULL;
    (void)state;
    for (int i = 0; (level = math_level(i)); i++) {
        setenv("EPX_CPU_LEVEL", level->name, 1);
        math_level_use(NULL);
        assert_ptr_equal(math_level_used(), level);
        highest = level;
    }
    setenv("EPX_CPU_LEVEL", "mmx", 1);
    math_level_use(NULL);
    assert_ptr_equal(math_level_used(), highest);
    unsetenv("EPX_CPU_LEVEL");
    math_level_use(NULL);
    assert_ptr_equal(math_level_used(), highest);
}

/* Rounding of sums at 16 bits: a bf16 or fp16 bias plus a small second row lands on ties and their neighbours. */
static void test_reduce_rounds_to_nearest_even(void **state)
{
    static const uint16_t big[] = {0x3f80, 0x3f81}, half[] = {0x3b80, 0x3b80}; /* 1, 1 + 2^-7, 2^-8 */
    uint16_t out[2];
    struct reduce_row row = {half, 1.0f, ROW_PLAIN};
    (void)state;
    math_reduce(out, EPX_BF16, 2, &row, 1, 1, big, NULL);
    assert_int_equal(out[0], 0x3f80);
    assert_int_equal(out[1], 0x3f82);
}

UNIT_TESTS(test_copy_many_writes_all, test_copy_and_zero, test_cast_matches_definition, test_cast_every_pattern,
           test_cast_random_float_bits, test_cast_nan_and_infinity, test_cast_power_of_two_scale_is_exact_at_448,
           test_logfmt_error_bound, test_logfmt_any_pattern, test_logfmt_raw_blocks, test_logfmt_zero_keeps_largest,
           test_logfmt_powers_lie_in_one_octave, test_logfmt_same_input_same_bytes, test_reduce_is_exact,
           test_reduce_of_logfmt_rows, test_reduce_largest_hidden, test_reduce_every_pattern,
           test_reduce_rounds_to_nearest_even, test_levels_give_the_same_bits, test_level_is_what_the_environment_says)
