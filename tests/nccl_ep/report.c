/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>

#include "nccl_case.h"

int wrong_result(const char *file, int line, const char *call, int got, int expected)
{
    if (got == expected)
        return 0;
    fprintf(stderr, "nccl_ep: rank %d: %s:%d: %s: expected %d, got %d: %s\n", world.rank, file, line, call, expected,
            got, ncclEpxGetLastError());
    return -1;
}
