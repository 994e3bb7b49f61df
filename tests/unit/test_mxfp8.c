/* SPDX-License-Identifier: Apache-2.0 */
/* MXFP8 sums of rows: powers and codes against plain ones, and what is neither a number nor finite. Whole combines are
 * in tests/nccl_ep/mxfp8.c. */
#include <math.h>
#include <string.h>

#include "device/cpu/math.h"
#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"
#include "util/mxfp8.h"

enum { HIDDEN = 2 * MXFP8_BLOCK };

/* The least power of two with which no value is beyond 448. */
static void powers_are_the_least(void **state)
{
    (void)state;
    for (int power = -117; power <= 119; power++)
        for (int i = -1; i <= 1; i++) {
            const float least = ldexpf(448, power);
            const float most = i < 0 ? nextafterf(least, 0) : i ? nextafterf(least, INFINITY) : least;
            const int expected = 127 + power + (i > 0);
            assert_int_equal(mxfp8_scale(most), expected);
        }
    assert_int_equal(mxfp8_scale(0), 0);
    assert_int_equal(mxfp8_scale(1e-40f), 1);
    assert_int_equal(mxfp8_scale(1e-45f), 0);
    assert_int_equal(mxfp8_scale(3.4e38f), 247);
    assert_int_equal(mxfp8_scale(INFINITY), 254);
}

/* Every code of every power comes back as it was, and what lies between two of them as the nearer one. */
static void codes_come_back(void **state)
{
    (void)state;
    for (uint32_t scale = 20; scale < 248; scale += 9)
        for (int c = 0; c < 126; c++) {
            const float low = ldexpf(e4m3_to_float((uint8_t)c), (int)scale - 127);
            const float high = ldexpf(e4m3_to_float((uint8_t)(c + 1)), (int)scale - 127);
            assert_true(mxfp8_round(low, scale) == low && mxfp8_round(-high, scale) == -high);
            assert_true(mxfp8_round(low + (high - low) * 0.25f, scale) == low);
            assert_true(mxfp8_round(low + (high - low) * 0.75f, scale) == high);
            assert_true(mxfp8_round(low + (high - low) * 0.5f, scale) == (c % 2 ? high : low));
        }
}

static float sum_of(const uint16_t *row, int at)
{
    const struct reduce_row one = {row, 1.0f, ROW_PLAIN};
    uint16_t out[HIDDEN];

    math_reduce_mxfp8(out, HIDDEN, &one, 1, 1, NULL, NULL);
    return bf16_to_float(out[at]);
}

/* One value of a block that is NaN leaves the others as they are; an infinity stays one, and so does a zero. */
static void odd_values(void **state)
{
    uint16_t row[HIDDEN];

    (void)state;
    for (int i = 0; i < HIDDEN; i++)
        row[i] = float_to_bf16((float)(i % 8) - 4);
    row[3] = float_to_bf16(-NAN);
    assert_true(isnan(sum_of(row, 3)) && !signbit(sum_of(row, 3)));
    assert_true(sum_of(row, 2) == -2 && sum_of(row, 40) == -4);
    row[3] = float_to_bf16(-INFINITY);
    assert_true(isinf(sum_of(row, 3)) && signbit(sum_of(row, 3)) && sum_of(row, 2) == 0 && sum_of(row, 40) == -4);
    memset(row, 0, sizeof(row));
    assert_true(sum_of(row, 3) == 0);
}

/* Biases are added as they are, and a sum is of the rows up to its end. */
static void sums_of_rows(void **state)
{
    uint16_t rows[3][HIDDEN], bias[HIDDEN], out[HIDDEN];
    struct reduce_row list[3];

    (void)state;
    for (int r = 0; r < 3; r++) {
        for (int i = 0; i < HIDDEN; i++)
            rows[r][i] = float_to_bf16(i ? 0.0f : (float)(16 + r)); /* 17 is between two codes of its sum */
        list[r] = (struct reduce_row){rows[r], 1.0f, ROW_PLAIN};
    }
    for (int i = 0; i < HIDDEN; i++)
        bias[i] = float_to_bf16(1.0f / 256);
    math_reduce_mxfp8(out, HIDDEN, list, 3, 6, bias, NULL);
    assert_true(bf16_to_float(out[0]) == bf16_to_float(float_to_bf16(32 + 18 + 1.0f / 256))); /* 33 becomes 32 */
    assert_true(bf16_to_float(out[1]) == 1.0f / 256);
    math_reduce_mxfp8(out, HIDDEN, list, 0, 0, bias, bias);
    assert_true(bf16_to_float(out[HIDDEN - 1]) == 1.0f / 128);
}

static int refused(struct fixture *s, unsigned sum, epx_status expected, const char *word)
{
    const char *const words[] = {"config.sum", word, NULL};
    epx_combine_inputs in = EPX_COMBINE_INPUTS_INIT;
    epx_combine_outputs out = EPX_COMBINE_OUTPUTS_INIT;
    epx_combine_config config = EPX_COMBINE_CONFIG_INIT;

    in.tokens = &s->ht_rows;
    out.tokens = &s->combined;
    config.sum = sum;
    return fixture_expect(s, "epx_combine", epx_combine(s->ht, &in, &out, &config, NULL), expected, words);
}

/* The fixture's handle is FLAT. */
static int try_refused(struct fixture *s)
{
    return fixture_ht(s) || refused(s, EPX_SUM_MXFP8, EPX_ERR_ARGUMENT, "0x8") ||
           refused(s, EPX_SUM_MXFP8 | EPX_SUM_ROUND_RANKS | EPX_SUM_TOPK_ORDER, EPX_ERR_ARGUMENT, "0xb") ||
           refused(s, EPX_SUM_MXFP8 | EPX_SUM_ROUND_RANKS, EPX_ERR_USAGE, "EXPERT_MAJOR and one node");
}

static void what_is_refused(void **state)
{
    (void)state;
    assert_int_equal(fixture_run(2, NULL, try_refused, NULL), 0);
}

UNIT_TESTS(powers_are_the_least, codes_come_back, odd_values, sums_of_rows, what_is_refused)
