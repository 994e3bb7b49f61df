/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>

#include "nccl_case.h"

int wrong_result(const char *file, int line, const char *call, int got, int expected)
{
    if (got == expected)
        return 0;
    fprintf(stderr, "nccl_ep: rank %d: %s:%d: %s: expected %d, got %d: %s\n", world.rank, file, line, call, expected,
            got, ncclEpxGetLastError());
    return -1;
}

int deadline_ms(int ms)
{
    const char *times = getenv("EPX_TEST_SLOW");

    return times && atoi(times) > 1 ? ms * atoi(times) : ms;
}
