/* SPDX-License-Identifier: Apache-2.0 */
#include "util/spelling.h"

#include <string.h>

enum { WORD_MOST = 48 };

static int least(int a, int b)
{
    return a < b ? a : b;
}

int word_distance(const char *a, const char *b)
{
    int d[WORD_MOST + 1][WORD_MOST + 1], m = (int)strlen(a), n = (int)strlen(b);

    if (m > WORD_MOST || n > WORD_MOST)
        return WORD_MOST;
    for (int i = 0; i <= m; i++) {
        for (int j = 0; j <= n; j++) {
            if (!i || !j) {
                d[i][j] = i + j;
                continue;
            }
            d[i][j] = least(least(d[i - 1][j], d[i][j - 1]) + 1, d[i - 1][j - 1] + (a[i - 1] != b[j - 1]));
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                d[i][j] = least(d[i][j], d[i - 2][j - 2] + 1);
        }
    }
    return d[m][n];
}
