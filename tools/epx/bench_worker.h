/* SPDX-License-Identifier: Apache-2.0 */
/* What the parts of one EPX rank of the benchmark share. */
#ifndef EPX_TOOLS_BENCH_WORKER_H
#define EPX_TOOLS_BENCH_WORKER_H

#include "tests/lib/bench_work.h"
#include "tests/lib/bench_shm.h"

struct bench_rank {
    struct bench_shm_rank self;
    const struct bench_config *config;
    struct bench_work work;
    epx_group *group;
    epx_handle *handle;
    epx_stats before; /* at the end of the last operation */
};

/* 0 for EPX_OK; otherwise stores which call failed and why with bench_shm_fail(), and returns -1. */
int bench_call(struct bench_rank *rank, const char *what, epx_status status);

/* The operations, as a struct bench_runner wants them; self is a struct bench_rank. */
int bench_ll_open(struct bench_rank *rank);
int bench_ll_dispatch(void *self, int variant);
int bench_ll_combine(void *self, int variant);

int bench_ht_update(void *self);
int bench_ht_dispatch(void *self, int variant);
int bench_ht_combine(void *self, int variant);

#endif
