/* SPDX-License-Identifier: Apache-2.0 */
/*
 * MXFP8 in combine: high throughput's EXPERT_MAJOR on one node. A rank's rows of a token are summed, the sum is rounded
 * to e4m3 codes with a power of two for each 32 values, and the rounded sums of ranks are added. The reference here
 * finds the power by trying them all, and the code by comparing with all codes.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "small.h"

#define BAD ncclInvalidArgument
#define USAGE ncclInvalidUsage

enum { HIDDEN = 512, BLOCK = 32, TOPK = 4, CODES = 127 };

/* Code c without its sign: 4 bits of exponent, 3 of mantissa. */
static double code_value(int c)
{
    return c < 8 ? ldexp(c, -9) : ldexp(8 + c % 8, c / 8 - 10);
}

/* Nearest code, the even one of two that are as near. */
static double nearest(double x)
{
    int best = 0;

    for (int c = 1; c < CODES; c++) {
        const double d = fabs(fabs(x) - code_value(c)), least = fabs(fabs(x) - code_value(best));
        if (d < least || (d <= least && c % 2 == 0))
            best = c;
    }
    return copysign(code_value(best), x);
}

/* A block of sums as the format has them: the least power of two with which no value is beyond 448. */
static void round_block(float *x)
{
    double most = 0;
    int power = -126;

    for (int i = 0; i < BLOCK; i++)
        most = fabs((double)x[i]) > most ? fabs((double)x[i]) : most;
    while (ldexp(448, power) < most)
        power++;
    for (int i = 0; i < BLOCK; i++)
        x[i] = most > 0 ? (float)ldexp(nearest(ldexp(x[i], -power)), power) : 0;
}

/* What an expert returns for a token in column h: of all magnitudes, with blocks of zeros, and one of large numbers. */
static float result(int expert, int rank, int token, int h)
{
    const unsigned int seed = (unsigned int)(((expert * 64 + rank) * 16 + token) * HIDDEN + h) * 2654435761u;
    const int block = h / BLOCK, spread = block % 4 * 12;
    const double unit = (double)(seed >> 8) / (1 << 23) - 1;
    float x;
    char bf16[2];

    if (block == 5)
        return 0;
    x = (float)ldexp(unit, block == 6 ? 100 : block == 7 ? -120 : (int)(seed % (unsigned int)(spread + 1)) - spread);
    oracle_from_float(EPX_BF16, x, bf16);
    return oracle_to_float(EPX_BF16, bf16);
}

/* The ranks ascending, and of a rank its experts in the order of k. */
static void expect_row(const int *ids, int token, float *out)
{
    memset(out, 0, HIDDEN * sizeof(*out));
    for (int r = 0; r < world.nranks; r++) {
        float sum[HIDDEN] = {0};
        for (int k = 0; k < TOPK; k++)
            for (int h = 0; h < HIDDEN && ids[k] >= 0 && ids[k] / 2 == r; h++)
                sum[h] += result(ids[k], world.rank, token, h);
        for (int h = 0; h < HIDDEN; h += BLOCK)
            round_block(sum + h);
        for (int h = 0; h < HIDDEN; h++)
            out[h] += sum[h];
    }
}

/* Where rows of the experts of this rank lie: zones without padding, in the order of source and token. */
static void fill_rows(struct tensor_pair *rows, const int *all_ids)
{
    int64_t row = 0;

    for (int e = 2 * world.rank; e < 2 * world.rank + 2; e++)
        for (int r = 0; r < world.nranks; r++)
            for (int i = 0; i < SMALL_TOKENS * TOPK; i++) {
                if (all_ids[r * SMALL_TOKENS * TOPK + i] != e)
                    continue;
                for (int h = 0; h < HIDDEN; h++)
                    oracle_from_float(EPX_BF16, result(e, r, i / TOPK, h),
                                      (char *)rows->view.data + 2 * (row * HIDDEN + h));
                row++;
            }
}

static ncclResult_t combine(struct small *s)
{
    return ncclEpCombine(s->handle, &s->calls.cin, &s->calls.cout, &s->calls.cconfig, world.stream);
}

/* Another type, scales, a width that is not of 512s, or another layout. */
static int test_refused(struct small *s, struct tensor_pair *rows, struct tensor_pair *back)
{
    const ncclEpGroupConfig_t config = small_config(HT, 64);
    struct small flat;

    s->calls.cin.scales = s->weights.tensor;
    EXPECT(BAD, combine(s));
    s->calls.cin.scales = NULL;
    rows->tensor->datatype = back->tensor->datatype = ncclFloat16;
    EXPECT(BAD, combine(s));
    rows->tensor->datatype = back->tensor->datatype = ncclBfloat16;
    rows->tensor->sizes[1] = back->tensor->sizes[1] = HIDDEN / 2;
    EXPECT(BAD, combine(s));
    rows->tensor->sizes[1] = back->tensor->sizes[1] = HIDDEN;
    if (small_open(&flat, &config, FLAT, 1, TOPK, 64, PLAIN))
        return -1;
    flat.calls.cconfig.quant_recipe = NCCL_EP_COMB_QUANT_MXFP8;
    EXPECT(USAGE, combine(&flat));
    return small_close(&flat);
}

static int draw_id(unsigned int *seed)
{
    *seed = *seed * 1103515245u + 12345u;
    return (int)(*seed >> 16) % (2 * world.nranks);
}

/* Different experts of a token; some of the last are left out. */
static void draw_ids(int rank, int *ids)
{
    unsigned int seed = 99u + (unsigned int)rank;

    for (int i = 0; i < SMALL_TOKENS * TOPK; i++) {
        int used;
        do {
            ids[i] = draw_id(&seed);
            used = 0;
            for (int j = i / TOPK * TOPK; j < i; j++)
                used |= ids[j] == ids[i];
        } while (used && i % TOPK < 2 * world.nranks);
        if (used || (i % TOPK == TOPK - 1 && i / TOPK % 2))
            ids[i] = -1;
    }
}

static int check_rows(const struct tensor_pair *back, const int *ids)
{
    for (int t = 0; t < SMALL_TOKENS; t++) {
        float expected[HIDDEN];
        char bf16[2];

        expect_row(ids + t * TOPK, t, expected);
        for (int h = 0; h < HIDDEN; h++) {
            oracle_from_float(EPX_BF16, expected[h], bf16);
            CHECK(!memcmp(bf16, (const char *)back->view.data + 2 * (t * HIDDEN + h), 2));
        }
    }
    return 0;
}

int test_mxfp8(void)
{
    const int64_t most = (int64_t)world.nranks * SMALL_TOKENS * TOPK;
    ncclEpGroupConfig_t config = small_config(HT, (unsigned int)most);
    int *all_ids = malloc((size_t)most * sizeof(*all_ids)), *ids = all_ids + world.rank * SMALL_TOKENS * TOPK;
    struct tensor_pair tokens = {0}, rows = {0}, back = {0};
    struct small s;

    CHECK(all_ids != NULL);
    config.max_token_bytes = HIDDEN * 2;
    for (int r = 0; r < world.nranks; r++)
        draw_ids(r, all_ids + r * SMALL_TOKENS * TOPK);
    if (small_open(&s, &config, EXPERT_MAJOR, 1, TOPK, most, PLAIN) || small_route(&s, ids, SMALL_TOKENS) ||
        tensor_pair_open(&tokens, s.group, PLAIN, EPX_BF16, 2, SMALL_TOKENS, HIDDEN, 0) ||
        tensor_pair_open(&rows, s.group, PLAIN, EPX_BF16, 2, most, HIDDEN, 0) ||
        tensor_pair_open(&back, s.group, PLAIN, EPX_BF16, 2, SMALL_TOKENS, HIDDEN, 0) || tensor_pair_fill(&tokens, 0))
        return -1;
    s.calls.in.tokens = tokens.tensor;
    s.calls.out.tokens = rows.tensor;
    TRY(ncclEpDispatch(s.handle, &s.calls.in, &s.calls.out, NULL, NULL, world.stream));
    TRY(cudaStreamSynchronize(world.stream));
    fill_rows(&rows, all_ids);
    s.calls.cin.tokens = rows.tensor;
    s.calls.cout.tokens = back.tensor;
    s.calls.cconfig.quant_recipe = NCCL_EP_COMB_QUANT_MXFP8;
    if (tensor_pair_put(&rows) || tensor_pair_fill(&back, 0x5a))
        return -1;
    if (world.ranks_per_node && world.ranks_per_node < world.nranks) {
        EXPECT(USAGE, combine(&s));
    } else {
        TRY(combine(&s));
        if (tensor_pair_get(&back) || check_rows(&back, ids) || test_refused(&s, &rows, &back))
            return -1;
    }
    if (tensor_pair_close(&tokens) || tensor_pair_close(&rows) || tensor_pair_close(&back) || small_close(&s))
        return -1;
    free(all_ids);
    return 0;
}
