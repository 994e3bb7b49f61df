/* SPDX-License-Identifier: Apache-2.0 */
/* The stand-ins' cuda_bf16.h, cuda_fp16.h and cuda_fp8.h: every code, and many floats, as EPX's own conversions do.
 * ctest: labels=notsan (one thread) */
#include <math.h>

#include "standin/include/cuda/epx_small_float.h"
#include "tests/lib/unit.h"
#include "util/numeric.h"

static int same(float a, float b)
{
    return (isnan(a) && isnan(b)) || float_bits(a) == float_bits(b);
}

static void every_code_is_decoded(void **state)
{
    (void)state;
    for (uint32_t code = 0; code < 0x10000; code++) {
        assert_true(same(epx_small_decode(&epx_small_bf16, code), bf16_to_float((uint16_t)code)));
        assert_true(same(epx_small_decode(&epx_small_fp16, code), fp16_to_float((uint16_t)code)));
    }
    for (uint32_t code = 0; code < 0x100; code++) {
        assert_true(same(epx_small_decode(&epx_small_e4m3, code), e4m3_to_float((uint8_t)code)));
        /* e5m2 is the upper half of fp16 */
        assert_true(same(epx_small_decode(&epx_small_e5m2, code), fp16_to_float((uint16_t)(code << 8))));
    }
}

static void floats_are_rounded(void **state)
{
    (void)state;
    for (uint64_t bits = 0; bits < 0x100000000u; bits += 4099) {
        const float x = float_from_bits((uint32_t)bits);

        if (isnan(x))
            continue; /* its payload is not kept */
        assert_int_equal(epx_small_encode(&epx_small_bf16, x, 0), float_to_bf16(x));
        assert_int_equal(epx_small_encode(&epx_small_fp16, x, 0), float_to_fp16(x));
        assert_int_equal(epx_small_encode(&epx_small_e4m3, x, 1), float_to_e4m3(x));
    }
}

/* Between two neighbours, the nearest; in the middle, the even one. */
static void e5m2_is_rounded(void **state)
{
    (void)state;
    for (uint32_t code = 0; code + 1 < 0x7c; code++) {
        const float low = epx_small_decode(&epx_small_e5m2, code), high = epx_small_decode(&epx_small_e5m2, code + 1);
        const float middle = (low + high) / 2;

        assert_int_equal(epx_small_encode(&epx_small_e5m2, low, 0), code);
        assert_int_equal(epx_small_encode(&epx_small_e5m2, -high, 0), 0x80 | (code + 1));
        assert_int_equal(epx_small_encode(&epx_small_e5m2, middle, 0), code + (code & 1));
        assert_int_equal(epx_small_encode(&epx_small_e5m2, nextafterf(middle, 0), 0), code);
        assert_int_equal(epx_small_encode(&epx_small_e5m2, nextafterf(middle, INFINITY), 0), code + 1);
    }
    assert_int_equal(epx_small_encode(&epx_small_e5m2, 1e6f, 0), 0x7c);
    assert_int_equal(epx_small_encode(&epx_small_e5m2, 1e6f, 1), 0x7b);
    assert_int_equal(epx_small_encode(&epx_small_e4m3, 1e6f, 0), 0x7f);
    assert_true(isnan(epx_small_decode(&epx_small_e5m2, epx_small_encode(&epx_small_e5m2, NAN, 1))));
}

UNIT_TESTS(every_code_is_decoded, floats_are_rounded, e5m2_is_rounded)
