/* SPDX-License-Identifier: Apache-2.0 */
/* Sums of sums of rows, each rounded. Piece by piece, so that the inner sums stay in the L1 cache. */
#include "device/cpu/math.h"

#include "epx/epx.h"
#include "kernel/params.h"

#define SUM_BYTES 16384 /* of all inner sums of a piece, on the stack */
#define LINE 64         /* pieces begin at multiples of it */

struct groups {
    const struct reduce_row *rows;
    int n;
    uint32_t ends;
    const void *bias[2];
};

/* Is row i the last of its sum? */
static int is_end(const struct groups *g, int i)
{
    return (g->ends >> i & 1) || i + 1 == g->n;
}

/* Sums of more than one row. */
static int inner_sums(const struct groups *g)
{
    int count = 0;

    for (int i = 1; i < g->n; i++)
        count += is_end(g, i) && !is_end(g, i - 1);
    return count;
}

/* Bytes [at, at + step) of all rows; `sums` has `step` bytes for each inner sum. */
static void reduce_piece(char *out, int dtype, int channels, const struct groups *g, size_t at, size_t step, char *sums)
{
    struct reduce_row group[KERNEL_MAX_TOPK], parts[KERNEL_MAX_TOPK];
    int nparts = 0, in_group = 0;

    for (int i = 0; i < g->n; i++) {
        group[in_group] = g->rows[i];
        group[in_group++].data = (const char *)g->rows[i].data + at;
        if (!is_end(g, i))
            continue;
        if (in_group > 1) {
            math_reduce(sums, dtype, channels, group, in_group, 0, NULL, NULL);
            group[0].data = sums;
            sums += step;
        }
        parts[nparts++] = group[0];
        in_group = 0;
    }
    math_reduce(out + at, dtype, channels, parts, nparts, 0, g->bias[0] ? (const char *)g->bias[0] + at : NULL,
                g->bias[1] ? (const char *)g->bias[1] + at : NULL);
}

void math_reduce_groups(void *out, int dtype, int hidden, const struct reduce_row *rows, int n, uint32_t ends,
                        const void *bias0, const void *bias1)
{
    const struct groups g = {rows, n, ends, {bias0, bias1}};
    const size_t element = epx_dtype_size((epx_dtype)dtype), bytes = (size_t)hidden * element;
    const int inner = inner_sums(&g);
    const size_t step = SUM_BYTES / (size_t)(inner ? inner : 1) / LINE * LINE;
    _Alignas(LINE) char sums[SUM_BYTES];

    for (size_t at = 0; at < bytes; at += step)
        reduce_piece(out, dtype, (int)((bytes - at < step ? bytes - at : step) / element), &g, at, step, sums);
}
