/* SPDX-License-Identifier: Apache-2.0 */
/* FNUZ and OCP e4m3 (device/gpu/hip/fnuz.h): the detour through a FNUZ cast gives the CPU device's codes, bit by
 * bit. ctest: labels=notsan (one thread) */
#include <math.h>
#include <string.h>

#include "device/cpu/math.h"
#include "device/gpu/hip/fnuz.h"
#include "epx/epx.h"
#include "tests/lib/unit.h"
#include "tests/gpu_lanes/fnuz_cast.h"

static uint8_t by_fnuz(float x)
{
    return fnuz_result(fnuz_cast(fnuz_question(x)), x);
}

static void expect_same(float x)
{
    const uint8_t want = float_to_e4m3(x), got = by_fnuz(x);

    if (want != got)
        fail_msg("%a (0x%08x): FNUZ gives 0x%02x, e4m3 is 0x%02x", (double)x, float_bits(x), got, want);
}

/* The replacement of the instruction is itself right: every FNUZ number gives its code, and what lies between goes to
 * the nearer one. */
static void test_cast_by_definition(void **state)
{
    (void)state;
    for (unsigned code = 0; code < 128; code++) {
        assert_int_equal(fnuz_cast((float)fnuz_value(code)), code);
        assert_int_equal(fnuz_cast((float)-fnuz_value(code)), code ? code | 0x80 : 0);
        if (code == 127)
            break;
        const double middle = (fnuz_value(code) + fnuz_value(code + 1)) / 2;
        assert_int_equal(fnuz_cast((float)middle), code % 2 ? code + 1 : code);
        assert_int_equal(fnuz_cast(nextafterf((float)middle, 0.0f)), code);
        assert_int_equal(fnuz_cast(nextafterf((float)middle, 1000.0f)), code + 1);
    }
    assert_true(fnuz_value(127) == 240.0);
}

/* All codes: half the value, one zero, NaN where FNUZ has it. */
static void test_codes(void **state)
{
    (void)state;
    for (unsigned q = 0; q < 256; q++) {
        const uint8_t half = e4m3_to_fnuz_half((uint8_t)q);
        const float value = e4m3_to_float((uint8_t)q);
        if (isnan(value)) {
            assert_int_equal(half, 0x80);
            continue;
        }
        assert_int_not_equal(half, 0x80);
        assert_true((half & 0x80 ? -1 : 1) * fnuz_value(half & 0x7f) * 2 == (double)value);
        expect_same(value);
    }
}

static void test_all_bf16(void **state)
{
    (void)state;
    for (uint32_t h = 0; h < 0x10000; h++) {
        const float x = bf16_to_float((uint16_t)h);
        if (!isnan(x))
            expect_same(x); /* infinities and what is too large: 448 */
    }
}

/* Halfway between neighbours, and the floats next to it on both sides. */
static void test_ties(void **state)
{
    (void)state;
    for (unsigned q = 0; q < 0x7f; q++) {
        const float low = e4m3_to_float((uint8_t)q), high = q == 0x7e ? 480.0f : e4m3_to_float((uint8_t)(q + 1));
        const float middle = (low + high) * 0.5f;
        for (int sign = -1; sign <= 1; sign += 2) {
            expect_same((float)sign * middle);
            expect_same((float)sign * nextafterf(middle, 0.0f));
            expect_same((float)sign * nextafterf(middle, 1000.0f));
        }
    }
}

static void test_floats(void **state)
{
    (void)state;
    for (uint64_t bits = 0; bits < (uint64_t)1 << 32; bits += 1021) {
        const float x = float_from_bits((uint32_t)bits);
        if (!isnan(x))
            expect_same(x);
    }
}

/* Rows as dispatch casts them: the scaled values of a row through FNUZ are the bytes that the CPU device writes. */
static void test_rows(void **state)
{
    enum { HIDDEN = 512 };
    float row[HIDDEN];
    uint8_t q[HIDDEN];
    float scale[HIDDEN / 128];
    uint32_t rng = 12345;

    (void)state;
    for (int round = 0; round < 200; round++) {
        for (int i = 0; i < HIDDEN; i++) {
            rng = rng * 1664525u + 1013904223u;
            row[i] = ((float)(rng >> 8) / 8388608.0f - 1.0f) * ldexpf(1.0f, round % 60 - 30);
        }
        math_cast_fp8(q, scale, SCALE_FLOAT, 1, row, EPX_FP32, HIDDEN);
        for (int i = 0; i < HIDDEN; i++)
            assert_int_equal(by_fnuz(row[i] * (1.0f / scale[i / 128])), q[i]); /* powers of two: exact */
    }
}

UNIT_TESTS(test_cast_by_definition, test_codes, test_all_bf16, test_ties, test_floats, test_rows)
