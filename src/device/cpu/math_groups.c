/* SPDX-License-Identifier: Apache-2.0 */
/* Sums of sums of rows, each rounded. Piece by piece, so that the inner sums stay in the L1 cache. */
#include "device/cpu/math.h"

#include "kernel/params.h"
#include "epx/epx.h"

#define GROUP_CHANNELS 256
#define GROUPS_MAX (KERNEL_MAX_TOPK / 2) /* of more than one row */

/* Channels [at, at + channels) of row `from`. */
static struct reduce_row row_piece(const struct reduce_row *from, size_t at)
{
    const struct reduce_row piece = {(const char *)from->data + at, 1.0f, ROW_PLAIN};
    return piece;
}

static void reduce_piece(char *out, int dtype, int channels, const struct reduce_row *rows, int n, uint32_t ends,
                         const void *const bias[2], size_t at)
{
    float sums[GROUPS_MAX][GROUP_CHANNELS]; /* of any dtype */
    struct reduce_row group[KERNEL_MAX_TOPK], parts[KERNEL_MAX_TOPK];
    int nparts = 0, nsums = 0, in_group = 0;

    for (int i = 0; i < n; i++) {
        group[in_group++] = row_piece(&rows[i], at);
        if (!(ends >> i & 1) && i + 1 < n)
            continue;
        if (in_group > 1) {
            math_reduce(sums[nsums], dtype, channels, group, in_group, 0, NULL, NULL);
            group[0].data = sums[nsums++];
        }
        parts[nparts++] = group[0];
        in_group = 0;
    }
    math_reduce(out + at, dtype, channels, parts, nparts, 0, bias[0] ? (const char *)bias[0] + at : NULL,
                bias[1] ? (const char *)bias[1] + at : NULL);
}

void math_reduce_groups(void *out, int dtype, int hidden, const struct reduce_row *rows, int n, uint32_t ends,
                        const void *bias0, const void *bias1)
{
    const void *const bias[2] = {bias0, bias1};
    const size_t element = epx_dtype_size((epx_dtype)dtype);

    for (int c = 0; c < hidden; c += GROUP_CHANNELS)
        reduce_piece(out, dtype, hidden - c < GROUP_CHANNELS ? hidden - c : GROUP_CHANNELS, rows, n, ends, bias,
                     (size_t)c * element);
}
