/* SPDX-License-Identifier: Apache-2.0 */
/* The property tests on a GPU machine, which need not have the library that make test uses: gpu_prop ll|ht|mixed CASES. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support/prop.h"

int main(int argc, char **argv)
{
    const char *mode = argc > 1 ? argv[1] : "";
    const int cases = argc > 2 ? atoi(argv[2]) : 20;
    int modes = EPX_LOW_LATENCY | EPX_HIGH_THROUGHPUT;

    if (strcmp(mode, "ll") == 0)
        modes = EPX_LOW_LATENCY;
    else if (strcmp(mode, "ht") == 0)
        modes = EPX_HIGH_THROUGHPUT;
    else if (strcmp(mode, "mixed") != 0) {
        fprintf(stderr, "usage: gpu_prop ll|ht|mixed [CASES]\n");
        return 2;
    }
    return prop_run("gpu_prop", mode, cases, modes, 8, NULL) ? 1 : 0;
}
