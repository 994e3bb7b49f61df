/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The timed loop, written once for EPX's ranks and the MPI baseline's, so that both are measured in the same way:
 *
 *      updates     barrier | update | barrier = end           (high throughput)
 *      exchanges   barrier | dispatch | barrier = end | combine | barrier = end
 */
#ifndef EPX_TESTS_LIB_BENCH_RUNNER_H
#define EPX_TESTS_LIB_BENCH_RUNNER_H

#include "bench_work.h"
#include "bench_shm.h"

/* Each returns 0, or -1 after bench_shm_fail() with the reason. */
struct bench_runner {
    const char *name; /* of the team, for messages */
    void *self;
    int (*update)(void *self); /* NULL: routing comes with each dispatch */
    int (*dispatch)(void *self, int variant);
    int (*combine)(void *self, int variant);
    /* All ranks have finished a timed operation, or (-1) something that does not count. NULL: no interest. */
    void (*finished)(void *self, int op);
    /* Tracing begins (1) or has ended (0). NULL: there is none. */
    void (*trace)(void *self, int on);
    int corrupt_dispatch, corrupt_combine; /* spoil this team's results before the check */
};

/* Follows the driver until it says quit (0) or something fails (-1). */
int bench_runner_run(const struct bench_runner *runner, struct bench_shm_rank *self, struct bench_work *work);

#endif
