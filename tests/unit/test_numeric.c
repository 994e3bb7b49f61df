/* SPDX-License-Identifier: Apache-2.0 */
/* Scalar conversions against references that work in double with ldexp and nearbyint, not with bits.
 * ctest: labels=notsan (one thread) */
#include <math.h>

#include "util/numeric.h"
#include "tests/lib/unit.h"
#include "tests/lib/xorshift.h"

struct format {
    int mantissa, bias;
    double max; /* largest finite number */
    float (*decode)(unsigned code);
    unsigned (*encode)(float x);
    unsigned infinity; /* code of infinity; 0: there is none, the largest number takes its place */
    unsigned quiet;    /* bit that a NaN gets */
};

#define CODEC(name, type)                     \
    static float name##_decode(unsigned code) \
    {                                         \
        return name##_to_float((type)code);   \
    }                                         \
    static unsigned name##_encode(float x)    \
    {                                         \
        return float_to_##name(x);            \
    }
CODEC(bf16, uint16_t)
CODEC(fp16, uint16_t)
CODEC(e4m3, uint8_t)

static const struct format bf16 = {7, 127, 0x1.fep127, bf16_decode, bf16_encode, 0x7f80, 0x40};
static const struct format fp16 = {10, 15, 65504.0, fp16_decode, fp16_encode, 0x7c00, 0x200};
static const struct format e4m3 = {3, 7, 448.0, e4m3_decode, e4m3_encode, 0, 0};

static uint64_t rng = 0x9e3779b97f4a7c15u;

static uint32_t random_u32(void)
{
    return xorshift(&rng);
}

/* Value of a finite code without its sign. */
static double reference_value(const struct format *f, unsigned code)
{
    int exponent = (int)(code >> f->mantissa);
    double fraction = code & ((1u << f->mantissa) - 1);
    if (exponent == 0)
        return ldexp(fraction, 1 - f->bias - f->mantissa);
    return ldexp(fraction + ldexp(1.0, f->mantissa), exponent - f->bias - f->mantissa);
}

/* |x| rounded to the format's grid as if it had no largest number. */
static double reference_round(const struct format *f, double x)
{
    int exponent;
    double quantum;
    frexp(x, &exponent);
    exponent--; /* x = 1.f * 2^exponent */
    if (exponent < 1 - f->bias)
        exponent = 1 - f->bias;
    quantum = ldexp(1.0, exponent - f->mantissa);
    return nearbyint(x / quantum) * quantum;
}

static void check_rounding(const struct format *f, float x)
{
    double expected = isinf(x) ? INFINITY : reference_round(f, fabs((double)x));
    const float got = f->decode(f->encode(x));

    if (expected > f->max)
        expected = f->infinity ? INFINITY : f->max;
    assert_true(fabs((double)got) == expected);
    assert_true(!signbit(got) == !signbit(x));
}

/* Of the formats of 16 bits. */
static void test_all_codes(void **state)
{
    const struct format *f = *state;

    for (unsigned h = 0; h < 65536; h++) {
        const unsigned abs = h & 0x7fff;
        const float x = f->decode(h);

        if (abs > f->infinity) {
            assert_true(isnan(x));
            assert_int_equal(f->encode(x), h | f->quiet);
            continue;
        }
        assert_true(fabs((double)x) == (abs == f->infinity ? INFINITY : reference_value(f, abs)));
        assert_int_equal(!!signbit(x), h >> 15);
        assert_int_equal(f->encode(x), h);
    }
}

static void test_e4m3_all_codes(void **state)
{
    (void)state;
    for (unsigned q = 0; q < 256; q++) {
        unsigned abs = q & 0x7f;
        float x = e4m3_to_float((uint8_t)q);
        assert_int_equal(!!signbit(x), q >> 7);
        if (abs == 0x7f)
            assert_true(isnan(x));
        else
            assert_true(fabs((double)x) == reference_value(&e4m3, abs));
        assert_int_equal(float_to_e4m3(x), q);
    }
}

/* Halfway between neighbours goes to the even code; one float further on either side goes to the nearer one. */
static void test_e4m3_ties(void **state)
{
    (void)state;
    for (unsigned q = 0; q < 0x7e; q++) {
        float tie = (float)((reference_value(&e4m3, q) + reference_value(&e4m3, q + 1)) / 2);
        assert_int_equal(float_to_e4m3(tie), q + (q & 1));
        assert_int_equal(float_to_e4m3(-tie), (q + (q & 1)) | 0x80);
        assert_int_equal(float_to_e4m3(nextafterf(tie, 0.0f)), q);
        assert_int_equal(float_to_e4m3(nextafterf(tie, 1e9f)), q + 1);
    }
}

static void test_fp16_ties(void **state)
{
    (void)state;
    for (unsigned h = 0; h < 0x7c00; h++) {
        double above = h == 0x7bff ? 65536.0 : reference_value(&fp16, h + 1);
        float tie = (float)((reference_value(&fp16, h) + above) / 2);
        assert_int_equal(float_to_fp16(tie), h + (h & 1));
        assert_int_equal(float_to_fp16(nextafterf(tie, 0.0f)), h);
        assert_int_equal(float_to_fp16(nextafterf(tie, 1e9f)), h + 1);
    }
}

static void test_bf16_ties(void **state)
{
    (void)state;
    for (uint32_t h = 0; h < 0x7f80; h++) {
        uint32_t tie = h << 16 | 0x8000;
        assert_int_equal(float_to_bf16(float_from_bits(tie)), h + (h & 1));
        assert_int_equal(float_to_bf16(float_from_bits(tie - 1)), h);
        assert_int_equal(float_to_bf16(float_from_bits(tie + 1)), h + 1);
    }
}

static void test_e4m3_saturates(void **state)
{
    static const float large[] = {448.0f, 463.9f, 464.0f, 464.1f, 480.0f, 512.0f, 1e30f, INFINITY};
    (void)state;
    for (size_t i = 0; i < sizeof(large) / sizeof(large[0]); i++) {
        assert_int_equal(float_to_e4m3(large[i]), 0x7e);
        assert_int_equal(float_to_e4m3(-large[i]), 0xfe);
    }
    assert_int_equal(float_to_e4m3(float_from_bits(0x7fc00000u)), 0x7f);
    assert_int_equal(float_to_e4m3(float_from_bits(0xff800001u)), 0xff);
}

static void test_infinities_and_nan(void **state)
{
    (void)state;
    assert_int_equal(float_to_bf16(INFINITY), 0x7f80);
    assert_int_equal(float_to_bf16(-INFINITY), 0xff80);
    assert_int_equal(float_to_fp16(INFINITY), 0x7c00);
    assert_int_equal(float_to_fp16(-INFINITY), 0xfc00);
    assert_int_equal(float_to_fp16(65519.9f), 0x7bff);
    assert_int_equal(float_to_fp16(65520.0f), 0x7c00);
    /* A NaN whose payload lies in the dropped bits alone must not turn into infinity. */
    assert_int_equal(float_to_bf16(float_from_bits(0x7f800001u)), 0x7fc0);
    assert_int_equal(float_to_fp16(float_from_bits(0xff800001u)), 0xfe00);
}

static void test_random_floats(void **state)
{
    (void)state;
    for (int i = 0; i < 1000000; i++) {
        uint32_t bits = random_u32();
        float x = float_from_bits(bits);
        if (isnan(x) || isinf(x))
            continue;
        check_rounding(&bf16, x);
        /* The same mantissa near the range of the small formats. */
        check_rounding(&fp16, float_from_bits((bits & 0x807fffffu) | (100u + random_u32() % 45u) << 23));
        check_rounding(&e4m3, float_from_bits((bits & 0x807fffffu) | (114u + random_u32() % 24u) << 23));
    }
}

UNIT_MAIN(UNIT_CASE("test_bf16_all_codes", test_all_codes, &bf16),
          UNIT_CASE("test_fp16_all_codes", test_all_codes, &fp16), cmocka_unit_test(test_e4m3_all_codes),
          cmocka_unit_test(test_e4m3_ties), cmocka_unit_test(test_fp16_ties), cmocka_unit_test(test_bf16_ties),
          cmocka_unit_test(test_e4m3_saturates), cmocka_unit_test(test_infinities_and_nan),
          cmocka_unit_test(test_random_floats))
