/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>

#include "ep_bench.h"
#include "util/descriptor.h"

int main(int argc, char **argv)
{
    struct options o;
    struct bench b;
    struct times times;
    int result;

    fd_hold_standard();
    result = options_read(&o, argc, argv);
    if (result != EXIT_GOOD)
        return result < 0 ? EXIT_GOOD : result;
    world_open();
    if (o.mask_test) {
        result = mask_test(&o);
        world_close();
        return result;
    }
    bench_open(&b, &o, 0, 0);
    if (o.validate)
        result = validate(&b);
    if (b.combine_scales.tensor && !o.validate) {
        bench_dispatch(&b);
        CUDA(cudaStreamSynchronize(world.stream));
        bench_set_combine_scales(&b);
    }
    times = bench_time(&b);
    report(&b, &times);
    if (o.validate && result == EXIT_GOOD)
        result = validate(&b); /* once more, after all that was timed */
    bench_close(&b);
    world_close();
    return result;
}
