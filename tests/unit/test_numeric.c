/* SPDX-License-Identifier: Apache-2.0 */
/* Scalar conversions against references that work in double with ldexp and nearbyint, not with bits. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "util/numeric.h"

struct format {
    int mantissa, bias;
    double max; /* largest finite number */
};

static const struct format bf16 = {7, 127, 0x1.fep127};
static const struct format fp16 = {10, 15, 65504.0};
static const struct format e4m3 = {3, 7, 448.0};

static uint64_t rng = 0x9e3779b97f4a7c15u;

static uint32_t random_u32(void)
{
    rng ^= rng << 13;
    rng ^= rng >> 7;
    rng ^= rng << 17;
    return (uint32_t)(rng >> 16);
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

static void check_bf16(float x)
{
    double expected = reference_round(&bf16, fabs((double)x));
    float got = bf16_to_float(float_to_bf16(x));
    if (expected > bf16.max)
        expected = INFINITY;
    assert_true(fabs((double)got) == expected);
    assert_true(!signbit(got) == !signbit(x));
}

static void check_fp16(float x)
{
    double expected = reference_round(&fp16, fabs((double)x));
    float got = fp16_to_float(float_to_fp16(x));
    if (expected > fp16.max)
        expected = INFINITY;
    assert_true(fabs((double)got) == expected);
    assert_true(!signbit(got) == !signbit(x));
}

static void check_e4m3(float x)
{
    double expected = isinf(x) ? e4m3.max : reference_round(&e4m3, fabs((double)x));
    float got = e4m3_to_float(float_to_e4m3(x));
    if (expected > e4m3.max)
        expected = e4m3.max;
    assert_true(fabs((double)got) == expected);
    assert_true(!signbit(got) == !signbit(x));
}

static void test_bf16_all_codes(void **state)
{
    (void)state;
    for (unsigned h = 0; h < 65536; h++) {
        unsigned abs = h & 0x7fff;
        float x = bf16_to_float((uint16_t)h);
        if (abs > 0x7f80) {
            assert_true(isnan(x));
            assert_int_equal(float_to_bf16(x), h | 0x40);
            continue;
        }
        assert_true(fabs((double)x) == (abs == 0x7f80 ? INFINITY : reference_value(&bf16, abs)));
        assert_int_equal(float_to_bf16(x), h);
    }
}

static void test_fp16_all_codes(void **state)
{
    (void)state;
    for (unsigned h = 0; h < 65536; h++) {
        unsigned abs = h & 0x7fff;
        float x = fp16_to_float((uint16_t)h);
        if (abs > 0x7c00) {
            assert_true(isnan(x));
            assert_int_equal(float_to_fp16(x), h | 0x200);
            continue;
        }
        assert_true(fabs((double)x) == (abs == 0x7c00 ? INFINITY : reference_value(&fp16, abs)));
        assert_int_equal(!!signbit(x), h >> 15);
        assert_int_equal(float_to_fp16(x), h);
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
        check_bf16(x);
        /* The same mantissa near the range of the small formats. */
        check_fp16(float_from_bits((bits & 0x807fffffu) | (100u + random_u32() % 45u) << 23));
        check_e4m3(float_from_bits((bits & 0x807fffffu) | (114u + random_u32() % 24u) << 23));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bf16_all_codes), cmocka_unit_test(test_fp16_all_codes),
        cmocka_unit_test(test_e4m3_all_codes), cmocka_unit_test(test_e4m3_ties),
        cmocka_unit_test(test_fp16_ties),      cmocka_unit_test(test_bf16_ties),
        cmocka_unit_test(test_e4m3_saturates), cmocka_unit_test(test_infinities_and_nan),
        cmocka_unit_test(test_random_floats),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
