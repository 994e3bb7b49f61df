/* SPDX-License-Identifier: Apache-2.0 */
/* NVFP4 and LogFMT-10 as docs/formats.md describes them. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "model.h"
#include "tests/lib/oracle.h"

static const float e2m1[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};

float model_e2m1(int code)
{
    return code & 8 ? -e2m1[code & 7] : e2m1[code & 7];
}

/* Nearest, ties to even codes, saturating at 6. */
static int to_e2m1(float x)
{
    const float a = fabsf(x);
    int code = 0;

    if (isnan(x))
        return 7;
    while (code < 7 && (a > (e2m1[code] + e2m1[code + 1]) / 2 || (a == (e2m1[code] + e2m1[code + 1]) / 2 && code % 2)))
        code++;
    return signbit(x) ? code | 8 : code;
}

static float flush(float x)
{
    return fpclassify(x) == FP_SUBNORMAL ? copysignf(0, x) : x;
}

static float reciprocal(float x)
{
    return flush(1.0f / flush(x));
}

static float most_of(const uint16_t *x, int n, int finite)
{
    float most = 0;

    for (int i = 0; i < n; i++) {
        const float a = fabsf(load_value(EPX_BF16, &x[i]));
        if (isnan(a) && !finite)
            return a;
        if (!isnan(a) && !(finite && isinf(a)))
            most = fmaxf(most, a);
    }
    return most;
}

float model_row_scale(const uint16_t *row, int H)
{
    const float most = most_of(row, H, 1);

    return most > 0 ? 2688 / most : 0;
}

/* Blocks that no scale of theirs encodes, as the table in docs/formats.md has them: the scale of such a block, of which
 * all codes are equal; -1: it is none. */
static int unencoded(float most, float row_scale)
{
    const float scale = fabsf(row_scale);

    if (isnan(most) || isnan(scale) || (most > 0 && scale < FLT_MIN) || (most >= 0x1p-114f && scale > 0x1p126f))
        return 0x7f;
    return scale > 0x1p126f ? 0 : -1;
}

void model_nvfp4(const uint16_t *row, int H, float row_scale, uint8_t *codes, uint8_t *scales)
{
    memset(codes, 0, (size_t)H / 2);
    for (int b = 0; b < H / 16; b++) {
        const uint16_t *x = row + 16 * b;
        const float most = most_of(x, 16, 0), t = flush(row_scale * flush(most * (1.0f / 6)));
        const uint8_t s = oracle_float_to_e4m3(t);
        const float inverse = t == 0 ? 0 : reciprocal(flush(oracle_e4m3_to_float(s) * reciprocal(row_scale)));

        if (unencoded(most, row_scale) >= 0) {
            scales[b] = (uint8_t)unencoded(most, row_scale);
            memset(codes + 8 * b, scales[b] ? 0x77 : 0, 8);
            continue;
        }
        scales[b] = s;
        for (int i = 0; i < 16; i++)
            codes[8 * b + i / 2] |= (uint8_t)(to_e2m1(load_value(EPX_BF16, &x[i]) * inverse) << (i % 2 * 4));
    }
}

float model_global_scale(const struct step *s, int rank)
{
    const int what = (int)(key(s->seed, 'G', rank, 0, 0, 0) % 5);

    return what == 0 ? 0 : what == 1 ? 1 : (float)(1 + key(s->seed, 'G', rank, 1, 0, 0) % 5000) / 7;
}

/* A coded block has steps of (log2 amax - log2 amin) / 510: a value is off by half of one, in the linear domain, and by
 * 1.1e-5 more at amin; what is far below the range becomes 0. */
static void logfmt_block(const uint16_t *x, float *off)
{
    double most = 0, least = INFINITY, step;

    for (int i = 0; i < 128; i++) {
        const float a = fabsf(load_value(EPX_BF16, &x[i]));
        if (!(a < 1))
            return;
        most = fmax(most, a);
        least = fmin(least, a);
    }
    if (!(least < most))
        return;
    least = fmax(least, most * 0x1p-32);
    step = log2(most / least) / 510;
    for (int i = 0; i < 128; i++) {
        const double a = fabsf(load_value(EPX_BF16, &x[i]));
        off[i] = (float)(a == 0 ? 0 : a < least ? least : a * ((exp2(step) - 1) / 2 + 2e-5));
    }
}

void model_logfmt(const uint16_t *row, int H, float *off)
{
    memset(off, 0, (size_t)H * sizeof(float));
    for (int b = 0; b + 128 <= H; b += 128)
        logfmt_block(row + b, off + b);
}
